//! Collects the licences of the crates that are compiled into the programs. Most licences require
//! that their text is distributed with the program.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::Value;
use xtask::context::Context;
use xtask::process::cargo;
use xtask::release_builds::INSTALLED;

use crate::deb::output;

/// Prefixes of the names of files with licences.
const NAMES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "COPYRIGHT"];

/// Returns cargo's metadata of all packages, with the dependencies on this platform.
///
/// # Errors
/// If cargo fails, or if the lock file is out of date.
pub(crate) fn metadata(context: &Context) -> Result<Value> {
    let version = output(Command::new("rustc").arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    let host = host.context("rustc -vV prints no host")?;
    let metadata = output(cargo(&context.root).args([
        "metadata",
        "--format-version=1",
        "--locked",
        "--filter-platform",
        host,
    ]))?;
    serde_json::from_str(&metadata).context("cargo metadata")
}

/// Returns the names, licences and licence texts of all foreign crates. A text that several crates
/// share occurs once.
///
/// # Errors
/// As [`metadata`], or if a licence cannot be read.
pub(crate) fn text(context: &Context) -> Result<String> {
    let metadata = metadata(context)?;
    let wanted = linked_packages(&metadata);
    let mut list = String::from(
        "The programs of this package contain the crates below, and parts of Rust's standard\n\
         library (MIT or Apache-2.0, the Rust project's contributors).\n\n",
    );
    let mut texts: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let id = package["id"].as_str().unwrap_or_default();
        if !wanted.contains(id) || package["source"].is_null() {
            continue;
        }
        let part = |name: &str| package[name].as_str().unwrap_or("unknown");
        let name = format!("{} {}", part("name"), part("version"));
        writeln!(list, "{name}: {}", part("license"))?;
        let dir = Path::new(part("manifest_path"))
            .parent()
            .unwrap_or(Path::new("/"));
        for text in licences(dir)? {
            texts.entry(text).or_default().insert(name.clone());
        }
    }
    for (text, names) in texts {
        let names: Vec<String> = names.into_iter().collect();
        write!(
            list,
            "\n{}\n{}\n\n{}\n",
            "-".repeat(72),
            names.join(", "),
            text.trim_end()
        )?;
    }
    Ok(list)
}

/// Returns the texts of the licence files of a crate.
fn licences(dir: &Path) -> Result<Vec<String>> {
    let mut texts = Vec::new();
    for entry in fs::read_dir(dir).with_context(|| format!("reading {}", dir.display()))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().to_uppercase();
        if NAMES.iter().any(|start| name.starts_with(start)) && entry.path().is_file() {
            texts.push(String::from_utf8_lossy(&fs::read(entry.path())?).into_owned());
        }
    }
    Ok(texts)
}

/// Returns the packages whose code is linked into the programs, without build scripts, macros and
/// dependencies of tests.
pub(crate) fn linked_packages(metadata: &Value) -> BTreeSet<&str> {
    let mut dependencies: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for node in metadata["resolve"]["nodes"]
        .as_array()
        .into_iter()
        .flatten()
    {
        let linked = |dependency: &&Value| {
            let kinds = dependency["dep_kinds"].as_array();
            kinds.is_some_and(|kinds| kinds.iter().any(|kind| kind["kind"].is_null()))
        };
        let to = node["deps"].as_array().into_iter().flatten().filter(linked);
        let to = to
            .filter_map(|dependency| dependency["pkg"].as_str())
            .collect();
        dependencies.insert(node["id"].as_str().unwrap_or_default(), to);
    }
    let packages = || metadata["packages"].as_array().into_iter().flatten();
    let id = |package: &'_ Value| package["id"].as_str().unwrap_or_default().to_owned();
    let macros: BTreeSet<String> = packages()
        .filter(|package| {
            let targets = package["targets"].as_array().into_iter().flatten();
            targets
                .into_iter()
                .any(|target| target["kind"][0] == "proc-macro")
        })
        .map(id)
        .collect();
    let mut pending: Vec<&str> = packages()
        .filter(|package| INSTALLED.iter().any(|root| package["name"] == **root))
        .filter_map(|package| package["id"].as_str())
        .collect();
    let mut found = BTreeSet::new();
    while let Some(id) = pending.pop() {
        if !macros.contains(id) && found.insert(id) {
            pending.extend(dependencies.get(id).into_iter().flatten());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_linked_crates_are_named() {
        let dep = |to: &str, kind: Value| json!({ "pkg": to, "dep_kinds": [{ "kind": kind }] });
        let package =
            |id: &str, kind: &str| json!({ "id": id, "name": id, "targets": [{ "kind": [kind] }] });
        let metadata = json!({
            "packages": [
                package("iwarp-cli", "bin"), package("a", "lib"), package("b", "lib"),
                package("m", "proc-macro"), package("of-m", "lib"), package("t", "lib"),
            ],
            "resolve": { "nodes": [
                { "id": "iwarp-cli", "deps": [
                    dep("a", json!(null)), dep("t", json!("dev")), dep("m", json!(null))
                ] },
                { "id": "a", "deps": [dep("b", json!(null)), dep("t", json!("build"))] },
                { "id": "m", "deps": [dep("of-m", json!(null))] },
            ] },
        });
        let found: Vec<&str> = linked_packages(&metadata).into_iter().collect();
        assert_eq!(found, ["a", "b", "iwarp-cli"]);
    }
}
