//! Compiles the programs for one platform, with zig as the linker.
//!
//! The libraries and the packages' command use glibc. A bundle's command is linked statically with
//! musl instead: it starts on every distribution, so it can explain what needs glibc.
//!
//! Paths of this machine are replaced in the programs, so that builds in two folders are identical.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use xtask::context::Context;
use xtask::install;
use xtask::layout::Built;
use xtask::process::{Log, cargo};
use xtask::release_builds;

use super::platform::{GLIBC, Platform};
use super::tools::Tools;
use super::unwinder;
use crate::deb::output;
use crate::targets;

/// The profile in `Cargo.toml`.
const PROFILE: &str = "stripped";
/// The crate whose build script compiles the audit library.
const AUDIT: &str = "iwarp-audit";

/// The compiled programs of a platform.
pub(super) struct Programs {
    pub(super) platform: &'static Platform,
    /// The programs that use glibc.
    pub(super) built: Built,
    /// The command that is linked statically.
    pub(super) portable: PathBuf,
    /// A library with the name `librdmacm.so.1` for files that cannot contain links.
    pub(super) second_name: PathBuf,
}

/// Compiles everything for a platform.
///
/// # Errors
/// If Rust's standard library for the platform is not installed, or if the build fails.
pub(super) fn build(
    context: &Context,
    log: &mut Log,
    tools: &Tools,
    platform: &'static Platform,
) -> Result<Programs> {
    let glibc = platform.target("gnu");
    let musl = platform.target("musl");
    for target in [&glibc, &musl] {
        require_library(target)?;
    }
    log.say(format!("compiling for {}", platform.name));
    let unwinder = unwinder::link(context, log, tools, platform)?;
    let mut link = OsString::from("-Clink-arg=");
    link.push(&unwinder);
    let remapped = remapped(context)?;
    let with_unwinder = [remapped.clone(), vec![link]].concat();
    let compile = |target: &str, packages: &[&str], flags: &[OsString]| {
        let mut command = tools.zigbuild(&context.root)?;
        command.args(["--locked", "--profile", PROFILE, "--target", target]);
        command.args(packages.iter().flat_map(|name| ["--package", name]));
        // Separated by a character that no path contains, unlike in `RUSTFLAGS`.
        command.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f".as_ref()));
        Ok::<_, anyhow::Error>(command)
    };
    let versioned = format!("{glibc}.{GLIBC}");
    let libraries = || compile(&versioned, &release_builds::INSTALLED, &with_unwinder);
    log.run(&mut libraries()?)?;
    log.run(&mut compile(&musl, &[release_builds::COMMAND], &remapped)?)?;

    let folder = |target: &str| context.target.join(target).join(PROFILE);
    let dir = folder(&glibc);
    let portable = folder(&musl).join("iwarp");
    let built = Built {
        command: dir.join("iwarp"),
        // An emulator starts it without the libraries of the platform.
        runnable: portable.clone(),
        verbs: dir.join("libiwarp_verbs.so"),
        preload: Some(dir.join("librspreload.so")),
        paths: dir.join("libiwarp_paths.so"),
        audit: script_output(&mut libraries()?, AUDIT)?.join(iwarp_audit::FILE_NAME),
    };
    require_versions(log, &built.verbs)?;
    let second_name = dir.join("librdmacm-name.so");
    let linker = tools.linker(&platform.zig_target());
    log.run(&mut install::second_name_linker(
        context,
        linker,
        &built.verbs,
        &second_name,
    ))?;
    Ok(Programs {
        platform,
        built,
        portable,
        second_name,
    })
}

/// Checks that the library exports only symbols with a version. Rust's own symbols have none, and
/// are exported if the linker does not get the complete version script
/// (`crates/iwarp-verbs/build.rs`).
fn require_versions(log: &mut Log, library: &Path) -> Result<()> {
    let listing = log.run_and_read(
        Command::new("readelf")
            .args(["--dyn-syms", "--wide"])
            .arg(library),
    )?;
    match unversioned(&listing).next() {
        Some(name) => bail!("{} exports {name}", library.display()),
        None => Ok(()),
    }
}

/// Returns the symbols in readelf's listing that are defined and have no version.
fn unversioned(listing: &str) -> impl Iterator<Item = &str> {
    listing.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, _, _, _, "GLOBAL" | "WEAK", _, section, name, ..] = words[..] else {
            return None;
        };
        let defined = section != "UND" && section != "ABS";
        (defined && !name.contains('@')).then_some(name)
    })
}

/// Checks that Rust's standard library for a target is installed.
fn require_library(target: &str) -> Result<()> {
    if targets::library_folder(target)?.is_dir() {
        return Ok(());
    }
    bail!("no standard library for {target}: rustup target add {target}")
}

/// Returns the compiler's options that replace the paths of sources and generated files. The last
/// option that matches a path applies.
fn remapped(context: &Context) -> Result<Vec<OsString>> {
    let metadata =
        output(cargo(&context.root).args(["metadata", "--format-version=1", "--locked"]))?;
    let metadata: Value = serde_json::from_str(&metadata).context("cargo metadata")?;
    let mut folders: Vec<(PathBuf, String)> = registries(&metadata)
        .into_iter()
        .map(|dir| (dir, "/crates".to_owned()))
        .collect();
    folders.push((context.root.clone(), "/iwarp".to_owned()));
    folders.push((context.target.clone(), "/target".to_owned()));
    folders.push(standard_library()?);
    let option = |(from, to): (PathBuf, String)| {
        let mut text = OsString::from("--remap-path-prefix=");
        text.push(from);
        text.push(format!("={to}"));
        text
    };
    Ok(folders.into_iter().map(option).collect())
}

/// Returns the folder with the source of the standard library, which may not exist, and the name
/// that the compiler gives to it in that case.
fn standard_library() -> Result<(PathBuf, String)> {
    let rustc = || Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    let root = output(rustc().args(["--print", "sysroot"]))?;
    let version = output(rustc().arg("-vV"))?;
    let hash = version
        .lines()
        .find_map(|line| line.strip_prefix("commit-hash: "))
        .context("rustc -vV prints no commit")?;
    let source = Path::new(root.trim()).join("lib/rustlib/src/rust");
    Ok((source, format!("/rustc/{hash}")))
}

/// Returns the folders with the sources of foreign crates.
fn registries(metadata: &Value) -> BTreeSet<PathBuf> {
    let packages = metadata["packages"].as_array().into_iter().flatten();
    packages
        .filter(|package| !package["source"].is_null())
        .filter_map(|package| {
            let manifest = Path::new(package["manifest_path"].as_str()?);
            Some(manifest.parent()?.parent()?.to_owned())
        })
        .collect()
}

/// Returns the folder in which a crate's build script has put its files. The command must have been
/// run before, so that it only prints its messages again.
fn script_output(command: &mut Command, package: &str) -> Result<PathBuf> {
    let messages = output(command.arg("--message-format=json"))?;
    let found = script_output_in(&messages, package);
    found.with_context(|| format!("cargo has not run the build script of {package}"))
}

/// Returns the folder that cargo's messages name.
fn script_output_in(messages: &str, package: &str) -> Option<PathBuf> {
    let part = format!("/{package}#");
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|message| message["reason"] == "build-script-executed")
        .find(|message| {
            let id = message["package_id"].as_str();
            id.is_some_and(|id| id.contains(&part))
        })
        .and_then(|message| message["out_dir"].as_str().map(PathBuf::from))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn script_folder_is_that_of_package() {
        let message = |package: &str, dir: &str| {
            json!({
                "reason": "build-script-executed",
                "package_id": format!("path+file:///x/{package}#0.1.0"),
                "out_dir": dir,
            })
            .to_string()
        };
        let messages = [
            "no message".to_owned(),
            json!({ "reason": "build-finished" }).to_string(),
            message("iwarp-audit-more", "/wrong"),
            message("iwarp-audit", "/right"),
        ];
        let found = script_output_in(&messages.join("\n"), AUDIT);
        assert_eq!(found, Some("/right".into()));
        assert_eq!(script_output_in(&messages[0], AUDIT), None);
    }

    #[test]
    fn exports_without_version_are_found() {
        let listing = "   Num:    Value          Size Type    Bind   Vis      Ndx Name\n\
            1: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND puts\n\
            2: 0000000000001000     5 FUNC    GLOBAL DEFAULT   12 ibv_x@@IBVERBS_1.1\n\
            3: 0000000000000000     0 OBJECT  GLOBAL DEFAULT  ABS IBVERBS_1.1\n\
            4: 0000000000001010     5 FUNC    GLOBAL DEFAULT   12 _RNvx\n";
        assert_eq!(unversioned(listing).collect::<Vec<_>>(), ["_RNvx"]);
    }

    #[test]
    fn only_foreign_folders_are_registries() {
        let package =
            |source: Value, path: &str| json!({ "source": source, "manifest_path": path });
        let metadata = json!({ "packages": [
            package(json!(null), "/home/own/iwarp/Cargo.toml"),
            package(json!("registry"), "/home/registry/a-1.0.0/Cargo.toml"),
            package(json!("registry"), "/home/registry/b-1.0.0/Cargo.toml"),
        ]});
        let found: Vec<_> = registries(&metadata).into_iter().collect();
        assert_eq!(found, [PathBuf::from("/home/registry")]);
    }
}
