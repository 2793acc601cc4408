//! `cargo xtask dist --check`: installs each artefact in fresh Debian roots, uses it for two
//! processes as an ordinary user, removes it, and compares the files before and after.
//!
//! The scripts are in `packaging/dist/trial`. Another processor's artefacts run in an emulator. The
//! image and the Kubernetes manifests run in podman's containers ([`super::containers`]).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use xtask::context::Context;
use xtask::process::Log;

use super::platform::Platform;
use super::tools::Tools;
use super::{DistArgs, Kind, Release, SUMS, containers};
use crate::roots::{self, Root, USER};

/// The folder with the scripts.
const TRIAL: &str = "packaging/dist/trial";
/// The programs in a root: verbs programs, and what installs the artefacts.
pub(super) const PACKAGES: &str =
    "perftest,ibverbs-utils,infiniband-diags,ucx-utils,python3-venv,rpm,musl";
/// The release whose root is used for another processor, because the emulator is slow.
const FOREIGN_SUITE: &str = "bookworm";
/// Time limit of all commands together.
const LIMIT: Duration = Duration::from_secs(2 * 3600);

/// Checks the artefacts in the folder of the release.
///
/// # Errors
/// If an artefact is missing or damaged, if it does not work, or if it leaves files behind.
pub(super) fn run(context: &Context, release: &Release, args: &DistArgs) -> Result<bool> {
    let mut log = Log::create(&context.log_dir().join("dist-check.log"), LIMIT)?;
    let mut sums = Command::new("sha256sum");
    sums.current_dir(&release.output);
    log.run(sums.args(["--check", "--strict", SUMS]))
        .context("the artefacts are not as they were built")?;
    let tools = Tools::prepare(context, &mut log)?;
    let musl = musl_program(context, &mut log, &tools)?;
    for platform in args.platforms() {
        let suites = match platform.is_host() {
            true => &args.suite[..],
            false => &[FOREIGN_SUITE.to_owned()],
        };
        for suite in suites {
            let trial = Trial {
                context,
                release,
                platform,
                suite,
                musl: platform.is_host().then_some(&musl),
            };
            trial.run(&mut log, args)?;
        }
    }
    if args.wants(Kind::Image) {
        containers::run(context, &mut log, &tools, release)?;
    }
    Ok(true)
}

/// The trials in one root.
struct Trial<'a> {
    context: &'a Context,
    release: &'a Release,
    platform: &'a Platform,
    suite: &'a str,
    /// A program that is linked with musl.
    musl: Option<&'a PathBuf>,
}

/// One artefact in a trial.
struct Artefact {
    kind: Kind,
    script: &'static str,
    file: PathBuf,
    /// Who installs and removes it.
    installer: &'static str,
}

impl Trial<'_> {
    fn run(&self, log: &mut Log, args: &DistArgs) -> Result<()> {
        let mut artefacts = Vec::from(self.artefacts());
        artefacts.retain(|artefact| args.wants(artefact.kind));
        if artefacts.is_empty() {
            return Ok(());
        }
        let (suite, name) = (self.suite, self.platform.name);
        log.say(format!("Debian {suite}, {name}"));
        let root = self.root(log)?;
        let scripts = self.context.root.join(TRIAL);
        fs::copy(scripts.join("common.sh"), root.path.join("tmp/common.sh"))?;
        if let Some(musl) = self.musl {
            fs::copy(musl, root.path.join("tmp/musl-program"))?;
        }
        for artefact in artefacts {
            let file = artefact.file.file_name().context("no name")?;
            let inside = format!("/tmp/{}", file.display());
            fs::copy(&artefact.file, root.path.join(&inside[1..]))
                .with_context(|| format!("copying {}", artefact.file.display()))?;
            let before = root.files()?;
            let script = scripts.join(artefact.script);
            let mut step = |user: &str, phase: &str| {
                let mut arguments = vec![phase, &inside];
                arguments.extend(self.musl.map(|_| "/tmp/musl-program"));
                root.run(log, user, &script, &arguments)
            };
            step(artefact.installer, "install")?;
            step(USER, "use")?;
            step(artefact.installer, "remove")?;
            roots::compare(&before, &root.files()?)?;
            if fs::read_dir(root.path.join("home").join(USER))?
                .flatten()
                .any(|entry| !entry.file_name().to_string_lossy().starts_with('.'))
            {
                bail!("{} leaves files in the home directory", file.display());
            }
            log.say(format!("{}: installed, used, removed", file.display()));
        }
        root.remove()
    }

    fn root(&self, log: &mut Log) -> Result<Root> {
        let kind = roots::Kind {
            suite: self.suite,
            foreign: (!self.platform.is_host()).then_some(self.platform.debian),
            packages: PACKAGES,
        };
        Root::create(log, &self.context.target.join("dist-roots"), &kind)
    }

    fn artefacts(&self) -> [Artefact; 4] {
        let (version, platform) = (&self.release.version, self.platform);
        let file = |name: String| self.release.output.join(name);
        [
            Artefact {
                kind: Kind::Bundle,
                script: "bundle.sh",
                file: self.release.bundle(platform),
                installer: USER,
            },
            Artefact {
                kind: Kind::Wheel,
                script: "wheel.sh",
                file: super::wheel::file(self.release, platform),
                installer: USER,
            },
            Artefact {
                kind: Kind::Deb,
                script: "deb.sh",
                file: file(format!("iwarp_{version}-1_{}.deb", platform.debian)),
                installer: "root",
            },
            Artefact {
                kind: Kind::Rpm,
                script: "rpm.sh",
                file: super::rpm::file(self.release, platform),
                installer: "root",
            },
        ]
    }
}

/// Links a program with musl dynamically, which cannot load our libraries.
fn musl_program(context: &Context, log: &mut Log, tools: &Tools) -> Result<PathBuf> {
    let dir = context.target.join("dist-musl");
    fs::create_dir_all(&dir)?;
    let (source, program) = (dir.join("program.c"), dir.join("program"));
    fs::write(&source, "int main(void) { return 0; }\n")?;
    let target = format!("{}-linux-musl", std::env::consts::ARCH);
    let mut linker = tools.linker(&target);
    log.run(linker.args(["-dynamic", "-o"]).arg(&program).arg(source))?;
    Ok(program)
}

/// Returns the path of a folder with the scripts, for other modules.
pub(super) fn scripts(context: &Context) -> PathBuf {
    context.root.join(Path::new(TRIAL))
}
