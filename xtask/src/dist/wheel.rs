//! Writes the Python wheel, with the packages `wheel` and `auditwheel`.
//!
//! pip installs the wheel like `cargo xtask install`, below the prefix of its environment: the
//! command in `bin`, the libraries in `lib/iwarp`, manual pages and completions in `share`. A wheel
//! cannot contain links, so `librdmacm.so.1` is a small library that depends on `libibverbs.so.1`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use xtask::context::Context;
use xtask::layout::{self, File, Source};
use xtask::process::Log;

use super::build::Programs;
use super::platform::{GLIBC, Platform};
use super::tools::Tools;
use super::{Release, contents};
use crate::deb::NOTICES;
use crate::package;

/// The folder with the Python modules.
const PACKAGING: &str = "packaging/wheel/iwarp";
/// The Python modules.
const MODULES: [&str; 2] = ["__init__.py", "__main__.py"];

/// Writes the wheel of these programs and returns its path.
///
/// # Errors
/// If a file cannot be read, if a tool fails, or if the programs need a newer glibc than the tag of
/// the wheel promises.
pub(super) fn build(
    context: &Context,
    log: &mut Log,
    tools: &Tools,
    release: &Release,
    programs: &Programs,
) -> Result<PathBuf> {
    let dir = contents::folder(context, "wheel")?;
    let start = format!("iwarp-{}", release.version);
    let mut files = Vec::new();
    for name in MODULES {
        let from = context.root.join(PACKAGING).join(name);
        files.push(File::copy(from, Path::new("iwarp").join(name)));
    }
    for file in layout::files(context, &programs.built)? {
        let from = match &file.source {
            Source::Copy(from) => from,
            Source::Link(_) => &programs.second_name,
        };
        files.push(File {
            to: Path::new(&format!("{start}.data")).join(place(&file.to)),
            source: Source::Copy(from.clone()),
            ..file
        });
    }
    let info = PathBuf::from(format!("{start}.dist-info"));
    files.extend(contents::licences(context, &dir, &info.join("licenses"))?);
    let tag = tag(programs.platform);
    for (name, text) in [
        ("METADATA", metadata(context, release)?),
        ("WHEEL", wheel(&tag)),
    ] {
        let from = dir.join(name);
        fs::write(&from, text)?;
        files.push(File::copy(from, info.join(name)));
    }
    let root = dir.join("root");
    layout::put(&files, &root)?;
    log.run(
        tools
            .python()
            .env("SOURCE_DATE_EPOCH", &release.epoch)
            .args(["-m", "wheel", "pack", "--dest-dir"])
            .arg(&release.output)
            .arg(&root),
    )?;
    let package = file(release, programs.platform);
    audit(log, tools, &package, programs.platform)?;
    Ok(package)
}

/// Returns the path of a platform's wheel.
pub(super) fn file(release: &Release, platform: &Platform) -> PathBuf {
    let name = format!("iwarp-{}-{}.whl", release.version, tag(platform));
    release.output.join(name)
}

/// Returns where a file of an installation is in the folder with the wheel's data.
fn place(file: &Path) -> PathBuf {
    match file.strip_prefix("bin") {
        // pip makes these files executable.
        Ok(name) => Path::new("scripts").join(name),
        Err(_) => Path::new("data").join(file),
    }
}

/// Returns the compatibility tag: every Python 3 on a platform with our oldest glibc.
fn tag(platform: &Platform) -> String {
    let glibc = GLIBC.replace('.', "_");
    format!("py3-none-manylinux_{glibc}_{}", platform.name)
}

/// Returns the contents of `WHEEL`. With `Root-Is-Purelib`, pip would put the modules into a folder
/// that several architectures may share.
fn wheel(tag: &str) -> String {
    format!("Wheel-Version: 1.0\nGenerator: iwarp-xtask\nRoot-Is-Purelib: false\nTag: {tag}\n")
}

/// Returns the contents of `METADATA`: fields from the crate of the command, and its readme.
fn metadata(context: &Context, release: &Release) -> Result<String> {
    let members = package::members(context)?;
    let command = members
        .iter()
        .find(|package| package["name"] == "iwarp-cli");
    let command = command.context("there is no crate iwarp-cli")?;
    let text = |name: &str| command[name].as_str().unwrap_or_default();
    let keywords = command["keywords"].as_array().into_iter().flatten();
    let keywords: Vec<&str> = keywords.filter_map(Value::as_str).collect();
    let readme = fs::read_to_string(context.root.join("crates/iwarp-cli/README.md"))?;
    Ok(format!(
        "Metadata-Version: 2.4\n\
         Name: iwarp\n\
         Version: {}\n\
         Summary: {}\n\
         License-Expression: {}\n\
         License-File: LICENSE-APACHE\n\
         License-File: LICENSE-MIT\n\
         License-File: {NOTICES}\n\
         Keywords: {}\n\
         Project-URL: Homepage, {}\n\
         Classifier: Environment :: Console\n\
         Classifier: Operating System :: POSIX :: Linux\n\
         Classifier: Topic :: System :: Networking\n\
         Requires-Python: >=3.6\n\
         Description-Content-Type: text/markdown\n\
         \n{readme}",
        release.version,
        text("description"),
        text("license"),
        keywords.join(","),
        text("homepage"),
    ))
}

/// Checks that the programs need no newer glibc than the wheel's tag promises, and no library that
/// is neither on every system nor in the wheel.
fn audit(log: &mut Log, tools: &Tools, package: &Path, platform: &Platform) -> Result<()> {
    let report = log.run_and_read(tools.program("auditwheel").arg("show").arg(package))?;
    let policy = format!("manylinux_{}_{}", GLIBC.replace('.', "_"), platform.name);
    if !accepts(&report, &policy) {
        bail!("auditwheel does not accept the wheel as {policy}:\n{report}");
    }
    log.say(format!("auditwheel: consistent with {policy}"));
    Ok(())
}

/// Returns `true` if auditwheel's report says that the wheel is consistent with a policy.
fn accepts(report: &str, policy: &str) -> bool {
    // The report is wrapped to the width of a terminal.
    let words: Vec<&str> = report.split_whitespace().collect();
    words
        .join(" ")
        .contains(&format!("following platform tag: \"{policy}\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_is_read_from_wrapped_report() {
        let report = "x.whl is consistent with the\nfollowing platform tag:\n\"a_2_28\".\n";
        assert!(accepts(report, "a_2_28"));
        assert!(!accepts(report, "a_2_17"));
    }

    #[test]
    fn files_are_installed_below_prefix() {
        assert_eq!(place(Path::new("bin/iwarp")), Path::new("scripts/iwarp"));
        let library = Path::new("lib/iwarp/libibverbs.so.1");
        assert_eq!(place(library), Path::new("data").join(library));
    }
}
