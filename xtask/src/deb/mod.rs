//! `cargo xtask deb`: builds one Debian package with everything, and checks it.
//!
//! It is one package because its parts need each other in the same version: the command finds the
//! libraries in its private folder, and the service is one of the command's subcommands. Together
//! they have a few megabytes. Cargo builds the files; debhelper and dpkg-buildpackage create the
//! package from them, with the control files in `packaging/debian/`.

mod check;
mod notices;
mod source;
mod trial;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use xtask::context::{Context, find_program};
use xtask::install;
use xtask::layout::{self, File};
use xtask::outcome::Outcome;
use xtask::process::Log;

/// The folder with the files that only the Debian package needs.
const PACKAGING: &str = "packaging/debian";
/// The scripts that dpkg runs.
const SCRIPTS: [&str; 3] = ["postinst", "prerm", "postrm"];
/// The path of zsh's completions in an installation, and the path where Debian's packages put them.
const ZSH: (&str, &str) = (
    "share/zsh/site-functions/_iwarp",
    "share/zsh/vendor-completions/_iwarp",
);
/// Programs that building the package needs.
const TOOLS: [&str; 3] = ["dpkg-buildpackage", "dh", "strip"];
/// Time limit of each command. Building in release mode takes minutes, and so does downloading and
/// unpacking a Debian root.
const LIMIT: Duration = Duration::from_secs(3600);

/// Arguments of `cargo xtask deb`.
#[derive(Args)]
pub(crate) struct DebArgs {
    /// The folder in which to put the package [default: deb in the target folder]
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Install, use and remove the package in a fresh Debian root (needs root and debootstrap)
    #[arg(long)]
    test: bool,
    /// The Debian release of that root
    #[arg(
        long,
        value_name = "NAME",
        default_value = "bookworm",
        requires = "test"
    )]
    suite: String,
}

/// Builds the package and checks it. With `--test` it also installs and uses the package in a
/// Debian root.
///
/// # Errors
/// If a tool is missing, if the build fails, or if a check finds a defect in the package.
pub(crate) fn command(args: &DebArgs) -> Result<bool> {
    let context = Context::new(false, false)?;
    let mut log = Log::create(&context.log_dir().join("deb.log"), LIMIT)?;
    if let Some(tool) = missing_tool() {
        bail!("{tool} is not installed (Debian: debhelper, dpkg-dev)");
    }
    let output = match &args.output {
        Some(dir) => dir.clone(),
        None => context.target.join("deb"),
    };
    let package = build(&context, &mut log, &output)?;
    check::run(&context, &mut log, &package)?;
    if args.test {
        trial::run(&context, &mut log, &package, &args.suite)?;
    }
    Ok(true)
}

/// The step of `cargo xtask test`: builds the package and checks its content.
pub(crate) fn step(context: &Context, log: &mut Log) -> Result<Outcome> {
    if let Some(tool) = missing_tool() {
        return Ok(Outcome::Skipped(format!("{tool} is not installed")));
    }
    let package = build(context, log, &context.target.join("deb"))?;
    check::run(context, log, &package)?;
    Ok(Outcome::Passed)
}

fn missing_tool() -> Option<&'static str> {
    TOOLS.into_iter().find(|tool| find_program(tool).is_none())
}

/// Runs a command and returns its standard output.
///
/// # Errors
/// If the command cannot be started or fails.
fn output(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_owned();
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start {}", program.display()))?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        bail!("{} failed: {}: {error}", program.display(), output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Builds the package and returns its path.
fn build(context: &Context, log: &mut Log, output: &Path) -> Result<PathBuf> {
    let built = install::build(context)?;
    let mut files = layout::files(context, &built)?;
    for file in &mut files {
        if file.to == Path::new(ZSH.0) {
            file.to = ZSH.1.into();
        }
    }
    let stage = context.target.join("deb/stage");
    let _ = fs::remove_dir_all(&stage);
    layout::put(&files, &stage.join("usr"))?;
    layout::put(&own_files(context), &stage)?;
    documents(context, &stage)?;

    let dir = context.target.join("deb/build");
    let folder = source::Folder::create(context, &dir)?;
    log.run(
        Command::new("dpkg-buildpackage")
            .current_dir(&folder.path)
            .env("SOURCE_DATE_EPOCH", &folder.epoch)
            .env("STAGE", &stage)
            .env(
                "MAINTAINER",
                folder.maintainer.as_deref().unwrap_or_default(),
            )
            .args(["--build=binary", "--unsigned-source", "--unsigned-changes"]),
    )?;
    fs::create_dir_all(output)?;
    let mut built = fs::read_dir(&dir)?.flatten().map(|entry| entry.path());
    let built = built.find(|path| path.extension().is_some_and(|end| end == "deb"));
    let built = built.context("dpkg-buildpackage wrote no package")?;
    let package = output.join(built.file_name().context("a package without a name")?);
    fs::copy(&built, &package)?;
    let octets = fs::metadata(&package)?.len();
    log.say(format!("{}, {} KiB", package.display(), octets / 1024));
    Ok(package)
}

/// Returns the files of the service.
fn own_files(context: &Context) -> Vec<File> {
    let own = |name: &str| context.root.join(PACKAGING).join(name);
    vec![
        File::copy(
            own("iwarp-cp.service"),
            "usr/lib/systemd/system/iwarp-cp.service",
        ),
        File::copy(own("iwarp-cp.default"), "etc/default/iwarp-cp"),
        File::copy(own("copyright"), "usr/share/doc/iwarp/copyright"),
        File::copy(
            own("lintian-overrides"),
            "usr/share/lintian/overrides/iwarp",
        ),
    ]
}

/// Writes the documents, the changelog and the licences of foreign crates.
fn documents(context: &Context, stage: &Path) -> Result<()> {
    let doc = stage.join("usr/share/doc/iwarp");
    xtask::documents::install(&context.root, &doc)?;
    fs::copy(context.root.join("CHANGELOG.md"), doc.join("changelog"))?;
    fs::write(doc.join("third-party-licences"), notices::text(context)?)?;
    Ok(())
}
