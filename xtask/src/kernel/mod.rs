//! Compiles the engine (`kernel/rust`) with the kernel's flags, for a Linux kernel module. The step
//! `kernel` checks the object.
//!
//! `toolchain` finds a compiler, `build` compiles the object, `listing` reads its machine code, and
//! `gates` checks it. Known findings are listed in `exceptions`. `headers` downloads the headers
//! for modules, `module` builds a module, and `debug` builds a kernel with debugging checks.

pub mod debug;
mod exceptions;
mod frame;
mod gates;
pub mod headers;
mod listing;
pub mod module;
mod names;
mod toolchain;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

use crate::context::{Context, find_program};
use crate::outcome::Outcome;
use crate::process::Log;
use gates::Report;
use headers::Release;
use listing::Listing;
use toolchain::{TARGET, Toolchain};

/// The package with the entry points, which C calls.
const PACKAGE: &str = "iwarp-kernel";
/// The C header that declares the entry points.
const HEADER: &str = "kernel/engine.h";
/// The linker script of the object.
const SCRIPT: &str = "kernel/engine.lds";
/// Differences from the release profile: `opt-level=3` makes the object larger and not faster, and
/// a module does not use line tables.
const PROFILE: &[(&str, &str)] = &[
    ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "2"),
    ("CARGO_PROFILE_RELEASE_DEBUG", "false"),
];
/// The programs of binutils that the build needs.
const TOOLS: &[&str] = &["ld", "nm", "objcopy", "objdump"];

/// The kernels for which the engine's object is built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Any kernel.
    Plain,
    /// A kernel with the address sanitizer, which checks each memory access of the object.
    Checked,
}

impl Kind {
    /// Returns the suffix of the object's folders and files.
    const fn suffix(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Checked => "-checked",
        }
    }
}

/// The result of [`build`].
pub enum Built {
    /// The path of the object.
    Object(PathBuf),
    /// The object cannot be built on this machine, for this reason.
    Missing(String),
}

/// Compiles the engine for a kernel module into one object file, in which only the entry points are
/// visible.
///
/// # Errors
/// If the engine does not compile or link.
pub fn build(context: &Context, kind: Kind, log: &mut Log) -> Result<Built> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return Ok(Built::Missing("needs x86-64 Linux".into()));
    }
    if let Some(tool) = TOOLS.iter().find(|tool| find_program(tool).is_none()) {
        return Ok(Built::Missing(format!(
            "{tool} (binutils) is not installed"
        )));
    }
    let toolchain = match Toolchain::get(context, kind, log)? {
        Ok(toolchain) => toolchain,
        Err(why) => return Ok(Built::Missing(why)),
    };
    let dir = context.target.join("kernel");
    let name = format!("engine{}", kind.suffix());
    let target = dir.join(&name);
    log.run(
        toolchain
            .cargo(&context.root)
            .env("CARGO_TARGET_DIR", &target)
            .envs(PROFILE.iter().copied())
            .args(["rustc", "--release", "--package", PACKAGE])
            .args(["--features", "runtime", "--crate-type", "staticlib"])
            .args(["--target", TARGET]),
    )?;
    let library = target.join(TARGET).join("release/libiwarp_kernel.a");
    let object = dir.join(format!("{name}.o"));
    link(&context.root, &library, &object, log)?;
    Ok(Built::Object(object))
}

/// Links the entry points and everything that they need into one relocatable object. Hides all
/// names except the entry points.
fn link(root: &Path, library: &Path, object: &Path, log: &mut Log) -> Result<()> {
    let symbols = log.run_and_read(
        Command::new("nm")
            .args(["--defined-only", "--extern-only", "--format=posix"])
            .arg(library),
    )?;
    let entries: BTreeSet<&str> = symbols
        .lines()
        .filter_map(|line| line.split(' ').next())
        .filter(|name| name.starts_with("rk_"))
        .collect();
    if entries.is_empty() {
        bail!("{} has no entry points", library.display());
    }
    let mut linker = Command::new("ld");
    linker.args(["-m", "elf_x86_64", "-r", "--gc-sections", "-T"]);
    linker.arg(root.join(SCRIPT));
    let mut hide = Command::new("objcopy");
    for entry in &entries {
        linker.args(["-u", entry]);
        hide.arg(format!("--keep-global-symbol={entry}"));
    }
    log.run(linker.arg("-o").arg(object).arg(library))?;
    log.run(hide.arg(object))
}

/// The step: compiles the object and checks it.
///
/// # Errors
/// If there is a finding without an exception, or an exception without a finding.
pub fn run(context: &Context, log: &mut Log) -> Result<Outcome> {
    match build(context, Kind::Plain, log)? {
        Built::Object(object) => check(context, &object, log)?,
        Built::Missing(why) => return Ok(Outcome::Skipped(why)),
    }
    Ok(Outcome::Passed)
}

/// Checks the machine code of the object.
fn check(context: &Context, object: &Path, log: &mut Log) -> Result<()> {
    let listing = Listing::read(object, log)?;
    let mut errors = compare_declarations(&context.root, &listing)?;
    let report = gates::check(&listing);
    log_report(&report, log);
    errors.extend(exceptions::compare(&report.findings));
    if !errors.is_empty() {
        bail!("{}", errors.join("\n"));
    }
    let known = report.findings.len();
    log.say(match known {
        0 => String::from("no findings"),
        _ => format!("{known} findings, all of them with an exception:"),
    });
    for reason in exceptions::reasons() {
        log.say(format!("  {reason}"));
    }
    Ok(())
}

/// Compiles and checks the engine, and writes the source package for DKMS. Returns its path, or the
/// reason why it cannot be built on this machine.
///
/// # Errors
/// If the object violates a gate, or if a file cannot be written.
pub fn source_package(
    context: &Context,
    log: &mut Log,
) -> Result<std::result::Result<PathBuf, String>> {
    let object = match build(context, Kind::Plain, log)? {
        Built::Object(object) => object,
        Built::Missing(why) => return Ok(Err(why)),
    };
    check(context, &object, log)?;
    module::package(context, &object, &context.target.join("kernel"), log).map(Ok)
}

/// Builds the device's module for the newest kernel of each of these series, and the source
/// package.
///
/// # Errors
/// If the object violates a gate, if apt fails, or if a module does not build without warnings.
pub fn modules(context: &Context, series: &[&str], log: &mut Log) -> Result<Outcome> {
    let object = match build(context, Kind::Plain, log)? {
        Built::Object(object) => object.canonicalize()?,
        Built::Missing(why) => return Ok(Outcome::Skipped(why)),
    };
    check(context, &object, log)?;
    let dir = context.target.join("kernel").canonicalize()?;
    let mut kernels = Vec::new();
    for series in series {
        let Some(release) = Release::newest(series, log)? else {
            bail!(
                "apt offers no kernel {series}: add bookworm and its security updates to apt's \
                 sources"
            );
        };
        log.say(format!("building for Linux {}", release.name));
        let dir = dir.join(series);
        let tree = dir.join("headers");
        release.fetch(&tree, &[], log)?;
        let headers = release.headers(&tree);
        let built = module::build(
            context,
            (module::DEVICE, module::Use::Shipped),
            &object,
            &headers,
            &dir.join("build"),
            log,
        )?;
        let module = dir.join(format!("{}.ko", module::DEVICE));
        std::fs::copy(built, &module)?;
        log.say(format!("built {}", module.display()));
        kernels.push((release.name, headers));
    }
    let package = module::package(context, &object, &dir, log)?;
    log.say(format!("wrote {}", package.display()));
    for (name, headers) in &kernels {
        module::try_package(&package, name, headers, &dir.join("dkms"), log)?;
        log.say(format!("DKMS built the source package for Linux {name}"));
    }
    Ok(Outcome::Passed)
}

fn log_report(report: &Report, log: &mut Log) {
    for finding in &report.findings {
        log.line(exceptions::describe(finding));
    }
    log.say(format!(
        "{} functions, {} of them on the data path",
        report.functions, report.data_path
    ));
    log.say(format!(
        "largest frame of the data path: {} octets ({}); deepest stack of calls: {} octets ({})",
        report.frame.0, report.frame.1, report.stack.0, report.stack.1
    ));
}

/// Compares the entry points of the object with those that the header declares. Returns a message
/// for each difference.
fn compare_declarations(root: &Path, listing: &Listing) -> Result<Vec<String>> {
    let declared = declared(&crate::files::read(root, HEADER)?);
    let defined: BTreeSet<&str> = listing.exported.iter().map(String::as_str).collect();
    let declared: BTreeSet<&str> = declared.iter().map(String::as_str).collect();
    let missing = defined.difference(&declared);
    let extra = declared.difference(&defined);
    Ok(missing
        .map(|name| format!("{HEADER} does not declare {name}"))
        .chain(
            extra.map(|name| format!("{HEADER} declares {name}, which the object does not define")),
        )
        .collect())
}

/// Returns the functions `rk_*` that a C header declares.
fn declared(header: &str) -> BTreeSet<String> {
    header
        .match_indices('(')
        .filter_map(|(at, _)| {
            let start = header[..at].rfind(|c: char| !c.is_alphanumeric() && c != '_')? + 1;
            let name = &header[start..at];
            name.starts_with("rk_").then(|| name.to_owned())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declarations_of_the_header_are_found() {
        let header =
            "void *rk_new(void);\nint rk_post(struct rk_qp *qp,\n\tint n);\nint other(void);\n";
        let names: Vec<_> = declared(header).into_iter().collect();
        assert_eq!(names, ["rk_new", "rk_post"]);
    }
}
