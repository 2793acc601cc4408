//! The engine as a Linux kernel module gets it: `kernel/rust` compiled with the kernel's flags, and
//! the step `kernel`, which checks the object.
//!
//! `toolchain` finds a compiler, `build` makes the object, `listing` reads its machine code, and
//! `gates` says what has to hold. What does not hold yet is listed in `exceptions`. `headers`
//! fetches what a module is built against, `module` builds one, and `debug` builds a kernel that
//! looks for faults.

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

/// The package with the functions that C calls.
const BORDER: &str = "iwarp-kernel";
/// Declares these functions for C.
const HEADER: &str = "kernel/engine.h";
/// Says which sections the object has.
const SCRIPT: &str = "kernel/engine.lds";
/// How the object differs from programs: larger code is no faster here, and a module has no use for
/// the tables of lines.
const PROFILE: &[(&str, &str)] = &[
    ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "2"),
    ("CARGO_PROFILE_RELEASE_DEBUG", "false"),
];
/// Programs of binutils.
const TOOLS: &[&str] = &["ld", "nm", "objcopy", "objdump"];

/// What the engine's object is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Any kernel.
    Plain,
    /// A kernel with the address sanitizer only: each access to memory is checked.
    Checked,
}

impl Kind {
    /// What the names of its folders and files end with.
    const fn suffix(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Checked => "-checked",
        }
    }
}

/// The engine's object, or why it cannot be built here.
pub enum Built {
    /// Where it is.
    Object(PathBuf),
    /// What is missing.
    Missing(String),
}

/// Compiles the engine for a kernel module into one object file, in which only the entry points are
/// visible.
///
/// # Errors
/// When it does not compile or link.
pub fn build(context: &Context, kind: Kind, log: &mut Log) -> Result<Built> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return Ok(Built::Missing("needs x86-64 Linux".into()));
    }
    if let Some(tool) = TOOLS.iter().find(|tool| find_program(tool).is_none()) {
        return Ok(Built::Missing(format!("{tool} of binutils is missing")));
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
            .args(["rustc", "--release", "--package", BORDER])
            .args(["--features", "runtime", "--crate-type", "staticlib"])
            .args(["--target", TARGET]),
    )?;
    let library = target.join(TARGET).join("release/libiwarp_kernel.a");
    let object = dir.join(format!("{name}.o"));
    link(&context.root, &library, &object, log)?;
    Ok(Built::Object(object))
}

/// Puts everything that the entry points need into one relocatable object, and hides all other
/// names.
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
/// When a gate does not hold that is not listed as an exception, or an exception is not needed any
/// more.
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
    let mut complaints = declarations(&context.root, &listing)?;
    let report = gates::check(&listing);
    say(&report, log);
    complaints.extend(exceptions::compare(&report.findings));
    if !complaints.is_empty() {
        bail!("{}", complaints.join("\n"));
    }
    let known = report.findings.len();
    log.say(match known {
        0 => String::from("no findings"),
        _ => format!("{known} findings, all of them known:"),
    });
    for reason in exceptions::reasons() {
        log.say(format!("  {reason}"));
    }
    Ok(())
}

/// Builds the device's module for the newest kernel of each of these series, and the source
/// package.
///
/// # Errors
/// When the object is not fit for a kernel, apt fails, or a module does not build without warnings.
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
                "apt knows no kernel {series}: add bookworm and its security updates to its sources"
            );
        };
        log.say(format!("building for Linux {}", release.name));
        let dir = dir.join(series);
        let tree = dir.join("headers");
        release.fetch(&tree, &[], log)?;
        let headers = release.headers(&tree);
        let built = module::build(
            context,
            module::DEVICE,
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
        log.say(format!("DKMS builds it for Linux {name}"));
    }
    Ok(Outcome::Passed)
}

fn say(report: &Report, log: &mut Log) {
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

/// Compares the entry points of the object with those that the header declares.
fn declarations(root: &Path, listing: &Listing) -> Result<Vec<String>> {
    let declared = declared(&crate::files::read(root, HEADER)?);
    let defined: BTreeSet<&str> = listing.exported.iter().map(String::as_str).collect();
    let declared: BTreeSet<&str> = declared.iter().map(String::as_str).collect();
    let missing = defined.difference(&declared);
    let extra = declared.difference(&defined);
    Ok(missing
        .map(|name| format!("{HEADER} does not declare {name}"))
        .chain(
            extra.map(|name| format!("{HEADER} declares {name}, which the object does not have")),
        )
        .collect())
}

/// The functions `rk_*` that a C header declares.
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
