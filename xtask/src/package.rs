//! The step `package`: each crate that is meant for the registry can be packaged and has the
//! metadata that the registry requires.
//!
//! The packages are not compiled here (`--no-verify`): the steps `clippy` and `unit` have compiled
//! the same files, and a second build of seven crates takes two minutes on two processors.
//! Compiling a package would also detect that a file is missing in it. In place of that, this step
//! looks for sources that include files from outside their crate. Before a release, `cargo xtask
//! release` compiles the packages.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use xtask::context::Context;
use xtask::files;
use xtask::outcome::Outcome;
use xtask::process::{Log, cargo};

/// Files that each package must contain besides its sources.
const FILES: &[&str] = &["README.md", "LICENSE-MIT", "LICENSE-APACHE", "Cargo.toml"];
/// The registry's limits on keywords: how many, and how long.
const KEYWORDS_MAX: usize = 5;
const KEYWORD_LENGTH_MAX: usize = 20;
/// The registry's limit on categories.
const CATEGORIES_MAX: usize = 5;
/// The registry refuses larger packages.
const PACKAGE_BYTES_MAX: u64 = 10 << 20;

/// Checks and packages each crate that is not `publish = false`.
pub(crate) fn run(context: &Context, log: &mut Log) -> Result<Outcome> {
    // All later commands are offline, so fetch the dependencies. This also checks the lock file.
    log.run(cargo(&context.root).args(["fetch", "--locked"]))?;
    let all = published(context)?;
    let published: BTreeSet<&str> = all
        .iter()
        .filter_map(|package| package["name"].as_str())
        .collect();
    if published.is_empty() {
        bail!("every crate is `publish = false`");
    }
    let mut found = Vec::new();
    for package in &all {
        found.extend(defects(package, &published));
        let name = package["name"].as_str().unwrap_or_default();
        let list = log.run_and_read(cargo(&context.root).args([
            "package",
            "--list",
            "--allow-dirty",
            "--offline",
            "-p",
            name,
        ]))?;
        for file in FILES.iter().filter(|f| !list.lines().any(|l| l == **f)) {
            found.push(format!("{name}: the package has no {file}"));
        }
    }
    found.extend(included_from_outside(&context.root)?);
    if !found.is_empty() {
        bail!("{}", found.join("\n"));
    }
    let mut package = cargo(&context.root);
    package.args(["package", "--no-verify", "--allow-dirty", "--offline"]);
    package.args(published.iter().flat_map(|name| ["-p", name]));
    log.run(&mut package)?;
    let mut octets = 0;
    for package in &all {
        octets += size(context, package)?;
    }
    log.say(format!(
        "{} packages, {} KiB",
        published.len(),
        octets.div_ceil(1024)
    ));
    Ok(Outcome::Passed)
}

/// Returns cargo's metadata of each crate that is not `publish = false`.
///
/// # Errors
/// As [`members`].
pub(crate) fn published(context: &Context) -> Result<Vec<Value>> {
    let mut all = members(context)?;
    all.retain(is_published);
    Ok(all)
}

/// Returns cargo's metadata of each crate of the workspace.
///
/// # Errors
/// When cargo fails, or the lock file is out of date.
pub(crate) fn members(context: &Context) -> Result<Vec<Value>> {
    let mut metadata = cargo(&context.root);
    metadata.args([
        "metadata",
        "--no-deps",
        "--format-version=1",
        "--offline",
        "--locked",
    ]);
    let mut metadata: Value = serde_json::from_slice(&metadata.output()?.stdout)
        .context("reading the output of cargo metadata")?;
    match metadata["packages"].take() {
        Value::Array(all) => Ok(all),
        _ => bail!("the output of cargo metadata has no packages"),
    }
}

/// Returns `true` unless the crate is `publish = false`, which is an empty list of registries in
/// the metadata.
pub(crate) fn is_published(package: &Value) -> bool {
    package["publish"].as_array().is_none_or(|l| !l.is_empty())
}

/// Returns the size of a package that cargo has written, in octets.
fn size(context: &Context, package: &Value) -> Result<u64> {
    let part = |name: &str| package[name].as_str().unwrap_or_default();
    let file = format!("{}-{}.crate", part("name"), part("version"));
    let path = context.target.join("package").join(&file);
    let octets = std::fs::metadata(&path)
        .with_context(|| format!("cargo wrote no {}", path.display()))?
        .len();
    if octets > PACKAGE_BYTES_MAX {
        bail!("{file} has {octets} octets, but the registry accepts only {PACKAGE_BYTES_MAX}");
    }
    Ok(octets)
}

/// Returns the defects of a crate's metadata: what the registry would refuse, missing fields, and
/// dependencies on our own crates that are not published or have another version.
fn defects(package: &Value, published: &BTreeSet<&str>) -> Vec<String> {
    let name = package["name"].as_str().unwrap_or_default();
    let mut out = Vec::new();
    for field in [
        "description",
        "license",
        "repository",
        "homepage",
        "readme",
        "rust_version",
    ] {
        if package[field].as_str().is_none_or(str::is_empty) {
            out.push(format!("{name}: Cargo.toml has no {field}"));
        }
    }
    let list = |field: &str| -> Vec<&str> {
        let array = package[field].as_array();
        array
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect()
    };
    for (field, max) in [("keywords", KEYWORDS_MAX), ("categories", CATEGORIES_MAX)] {
        let count = list(field).len();
        if count == 0 || count > max {
            out.push(format!("{name}: {count} {field}, not 1 to {max}"));
        }
    }
    if package["metadata"]["docs"]["rs"]["targets"][0]
        .as_str()
        .is_none()
    {
        out.push(format!("{name}: Cargo.toml has no targets for docs.rs"));
    }
    for word in list("keywords") {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_-+".contains(c);
        let starts = word.starts_with(|c: char| c.is_ascii_alphanumeric());
        if word.len() > KEYWORD_LENGTH_MAX || !starts || !word.chars().all(plain) {
            out.push(format!("{name}: the registry refuses the keyword {word:?}"));
        }
    }
    for dependency in package["dependencies"].as_array().into_iter().flatten() {
        let to = dependency["name"].as_str().unwrap_or_default();
        // A development dependency with only a path is allowed: cargo removes it from the package.
        let ours = dependency["path"].is_string() && dependency["kind"] != "dev";
        let version = package["version"].as_str().unwrap_or_default();
        let required = dependency["req"].as_str().unwrap_or_default();
        if ours && required.trim_start_matches(['^', '=']) != version {
            out.push(format!(
                "{name}: Cargo.toml requires {to} {required}, but must require {version}"
            ));
        }
        if ours && !published.contains(to) {
            out.push(format!("{name}: the dependency {to} is not published"));
        }
    }
    out
}

/// Returns an error message for each file outside of a crate that its sources include by
/// `include_str!`, `include_bytes!` or `include!`.
fn included_from_outside(root: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for file in files::listed(root)? {
        let Some((name, inside)) = file.strip_prefix("crates/").and_then(|f| f.split_once('/'))
        else {
            continue;
        };
        if !inside.ends_with(".rs") {
            continue;
        }
        for target in included(&files::read(root, &file)?) {
            let depth = inside.matches('/').count();
            if target.matches("../").count() > depth {
                found.push(format!(
                    "{name}: {inside} includes {target}, which is not packaged"
                ));
            }
        }
    }
    Ok(found)
}

/// Returns the literal paths that a source file includes.
fn included(text: &str) -> impl Iterator<Item = &str> {
    ["include_str!(\"", "include_bytes!(\"", "include!(\""]
        .into_iter()
        .flat_map(|call| text.split(call).skip(1))
        .filter_map(|rest| rest.split('"').next())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn good() -> Value {
        json!({
            "name": "a", "version": "0.1.0", "description": "d", "license": "MIT",
            "repository": "r", "homepage": "h",
            "readme": "README.md", "rust_version": "1.0",
            "keywords": ["rdma"], "categories": ["no-std"],
            "metadata": { "docs": { "rs": { "targets": ["t"] } } },
            "dependencies": [
                { "name": "b", "path": "/b", "req": "^0.1.0", "kind": null },
                { "name": "a", "path": "/a", "req": "*", "kind": "dev" },
            ],
        })
    }

    #[test]
    fn missing_parts_are_named() {
        let published = BTreeSet::from(["a", "b"]);
        assert!(defects(&good(), &published).is_empty());
        let mut exact = good();
        exact["dependencies"][0]["req"] = json!("=0.1.0");
        assert!(defects(&exact, &published).is_empty());
        for (at, value, word) in [
            ("/description", json!(null), "description"),
            ("/homepage", json!(""), "homepage"),
            ("/keywords", json!([]), "0 keywords"),
            ("/keywords", json!(["two words"]), "two words"),
            ("/keywords", json!(["x".repeat(21)]), "xxx"),
            ("/categories", json!(vec!["a"; 6]), "6 categories"),
            ("/dependencies/0/req", json!("*"), "Cargo.toml requires b *"),
            ("/dependencies/0/req", json!("=0.2.0"), "must require 0.1.0"),
            ("/metadata", json!(null), "docs.rs"),
            (
                "/dependencies/0/name",
                json!("xtask"),
                "xtask is not published",
            ),
        ] {
            let mut package = good();
            *package.pointer_mut(at).unwrap() = value;
            let found = defects(&package, &published);
            assert!(
                found.len() == 1 && found[0].contains(word),
                "{at}: {found:?}"
            );
        }
    }

    #[test]
    fn publish_false_is_an_empty_list() {
        assert!(is_published(&json!({ "publish": null })));
        assert!(!is_published(&json!({ "publish": [] })));
        assert!(is_published(&json!({ "publish": ["registry"] })));
    }

    #[test]
    fn includes_are_found() {
        let text = r#"a(include_str!("symbols.txt")) include_bytes!("../../x")"#;
        assert_eq!(
            included(text).collect::<Vec<_>>(),
            ["symbols.txt", "../../x"]
        );
    }
}
