//! `cargo xtask deb`: builds one Debian package with everything, and checks it.
//!
//! It is one package because its parts need each other in the same version: the command finds the
//! libraries in its private folder, and the service is one of the command's subcommands. Together
//! they have a few megabytes. Cargo builds the files; debhelper and dpkg-buildpackage create the
//! package from them, with the control files in `packaging/debian/`.

mod check;
pub(crate) mod source;
mod trial;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use xtask::context::{Context, find_program};
use xtask::install;
use xtask::layout::{self, Built, File};
use xtask::outcome::Outcome;
use xtask::process::Log;

use crate::notices;

/// The folder with the files that only the Debian package needs.
pub(crate) const PACKAGING: &str = "packaging/debian";
/// The folder of the documents in a package.
pub(crate) const DOCUMENTS: &str = "usr/share/doc/iwarp";
/// The file with the licences of foreign crates.
pub(crate) const NOTICES: &str = "third-party-licences";
/// The service's settings, which the user may change.
pub(crate) const SETTINGS: &str = "etc/default/iwarp-cp";
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
    let built = install::build(&context)?;
    let package = build(&context, &mut log, &built, None, &output)?;
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
    let built = install::build(context)?;
    build(context, log, &built, None, &context.target.join("deb"))?;
    Ok(Outcome::Passed)
}

pub(crate) fn missing_tool() -> Option<&'static str> {
    TOOLS.into_iter().find(|tool| find_program(tool).is_none())
}

/// Runs a command and returns its standard output.
///
/// # Errors
/// If the command cannot be started or fails.
pub(crate) fn output(command: &mut Command) -> Result<String> {
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

/// What Debian's tools cannot find out about programs for another machine.
pub(crate) struct Foreign<'a> {
    /// Debian's name of the processor.
    pub(crate) architecture: &'a str,
    /// The packages that the programs need.
    pub(crate) depends: String,
}

/// Builds a package of these programs, checks it, and returns its path. The programs are for this
/// machine, or stripped and `foreign`.
///
/// # Errors
/// If a tool fails, or if a check finds a defect in the package.
pub(crate) fn build(
    context: &Context,
    log: &mut Log,
    built: &Built,
    foreign: Option<&Foreign>,
    output: &Path,
) -> Result<PathBuf> {
    let mut files = layout::files(context, built)?;
    for file in &mut files {
        if file.to == Path::new(ZSH.0) {
            file.to = ZSH.1.into();
        }
    }
    let stage = context.target.join("deb/stage");
    let _ = fs::remove_dir_all(&stage);
    layout::put(&files, &stage.join("usr"))?;
    layout::put(&service_and_documents(context)?, &stage)?;
    layout::put(&debian_files(context), &stage)?;
    let doc = stage.join(DOCUMENTS);
    fs::copy(context.root.join("CHANGELOG.md"), doc.join("changelog"))?;
    fs::write(doc.join(NOTICES), notices::text(context)?)?;

    let dir = context.target.join("deb/build");
    let folder = source::Folder::create(context, &dir)?;
    log.run(&mut build_command(&folder, &stage, foreign))?;
    fs::create_dir_all(output)?;
    let mut built_files = fs::read_dir(&dir)?.flatten().map(|entry| entry.path());
    let package = built_files.find(|path| path.extension().is_some_and(|end| end == "deb"));
    let package = package.context("dpkg-buildpackage wrote no package")?;
    let copy = output.join(package.file_name().context("a package without a name")?);
    fs::copy(&package, &copy)?;
    let octets = fs::metadata(&copy)?.len();
    log.say(format!("{}, {} KiB", copy.display(), octets / 1024));
    check::run(context, log, &copy, &built.runnable)?;
    Ok(copy)
}

/// Returns the command that builds the package.
fn build_command(folder: &source::Folder, stage: &Path, foreign: Option<&Foreign>) -> Command {
    let mut command = Command::new("dpkg-buildpackage");
    command
        .current_dir(&folder.path)
        .env("SOURCE_DATE_EPOCH", &folder.epoch)
        .env("STAGE", stage)
        .env(
            "MAINTAINER",
            folder.maintainer.as_deref().unwrap_or_default(),
        )
        .args(["--build=binary", "--unsigned-source", "--unsigned-changes"]);
    if let Some(foreign) = foreign {
        command
            .env("DEPENDS", &foreign.depends)
            .env("DEB_BUILD_OPTIONS", "nostrip")
            // No compiler for the other machine is needed.
            .args(["--host-arch", foreign.architecture, "--no-check-builddeps"]);
    }
    command
}

/// Returns the files of the service, and the documents of the repository, for every kind of system
/// package.
///
/// # Errors
/// If a document cannot be read or copied.
pub(crate) fn service_and_documents(context: &Context) -> Result<Vec<File>> {
    let own = |name: &str| context.root.join(PACKAGING).join(name);
    let mut files = vec![
        File::copy(
            own("iwarp-cp.service"),
            "usr/lib/systemd/system/iwarp-cp.service",
        ),
        File::copy(own("iwarp-cp.default"), SETTINGS),
    ];
    // Not the folder of `layout::files`, whose files the caller may not have copied yet.
    let copies = context.target.join("package-documents");
    let _ = fs::remove_dir_all(&copies);
    let documents = xtask::documents::install(&context.root, &copies)?;
    let place = |name: &String| File::copy(copies.join(name), Path::new(DOCUMENTS).join(name));
    files.extend(documents.iter().map(place));
    Ok(files)
}

/// Returns the files that only Debian's packages have.
fn debian_files(context: &Context) -> [File; 2] {
    let own = |name: &str| context.root.join(PACKAGING).join(name);
    [
        File::copy(own("copyright"), Path::new(DOCUMENTS).join("copyright")),
        File::copy(
            own("lintian-overrides"),
            "usr/share/lintian/overrides/iwarp",
        ),
    ]
}
