//! Writes the software bill of materials: the crates in the programs, as CycloneDX 1.6.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use xtask::context::Context;

use super::Release;
use crate::notices;

/// Writes the document and returns its path.
///
/// # Errors
/// If cargo fails, or if a file cannot be read or written.
pub(super) fn build(context: &Context, release: &Release) -> Result<PathBuf> {
    let metadata = notices::metadata(context)?;
    let lock = fs::read_to_string(context.root.join("Cargo.lock")).context("reading Cargo.lock")?;
    let mut document = document(&metadata, &checksums(&lock), &release.version);
    document["metadata"]["timestamp"] = json!(release.rfc3339()?);
    let file = release
        .output
        .join(format!("iwarp-{}.cdx.json", release.version));
    fs::write(&file, serde_json::to_string_pretty(&document)? + "\n")?;
    Ok(file)
}

/// Returns the SHA-256 of each foreign crate, by name and version.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let value = |block: &str, name: &str| {
        let line = block.lines().find_map(|line| line.strip_prefix(name));
        Some(line?.strip_prefix(" = \"")?.strip_suffix('"')?.to_owned())
    };
    lock.split("[[package]]")
        .filter_map(|block| {
            let key = (value(block, "name")?, value(block, "version")?);
            Some((key, value(block, "checksum")?))
        })
        .collect()
}

/// Returns the document without its time.
fn document(
    metadata: &Value,
    checksums: &BTreeMap<(String, String), String>,
    version: &str,
) -> Value {
    let linked = notices::linked_packages(metadata);
    let purls: BTreeMap<&str, String> = metadata["packages"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|package| Some((package["id"].as_str()?, purl(package)?)))
        .collect();
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let components: Vec<Value> = packages
        .filter(|package| package["id"].as_str().is_some_and(|id| linked.contains(id)))
        .filter_map(|package| component(package, checksums))
        .collect();
    let nodes = metadata["resolve"]["nodes"]
        .as_array()
        .into_iter()
        .flatten();
    let dependencies: Vec<Value> = nodes
        .filter(|node| node["id"].as_str().is_some_and(|id| linked.contains(id)))
        .filter_map(|node| {
            let to = node["deps"].as_array().into_iter().flatten();
            let to: Vec<&String> = to
                .filter_map(|dependency| dependency["pkg"].as_str())
                .filter(|id| linked.contains(id))
                .filter_map(|id| purls.get(id))
                .collect();
            Some(json!({ "ref": purls.get(node["id"].as_str()?)?, "dependsOn": to }))
        })
        .collect();
    json!({
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": "iwarp",
                "name": "iwarp",
                "version": version,
                "licenses": [{ "expression": "MIT OR Apache-2.0" }],
            },
        },
        "components": components,
        "dependencies": dependencies,
    })
}

/// Returns the package URL of a crate.
fn purl(package: &Value) -> Option<String> {
    let (name, version) = (package["name"].as_str()?, package["version"].as_str()?);
    Some(format!("pkg:cargo/{name}@{}", version.replace('+', "%2B")))
}

fn component(package: &Value, checksums: &BTreeMap<(String, String), String>) -> Option<Value> {
    let (name, version) = (package["name"].as_str()?, package["version"].as_str()?);
    let purl = purl(package)?;
    let mut component = json!({
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
    });
    if let Some(licence) = package["license"].as_str() {
        // Old crates separate alternatives by a slash.
        let expression = licence.replace('/', " OR ");
        component["licenses"] = json!([{ "expression": expression }]);
    }
    if let Some(sum) = checksums.get(&(name.to_owned(), version.to_owned())) {
        component["hashes"] = json!([{ "alg": "SHA-256", "content": sum }]);
    }
    Some(component)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linked_crates_are_components() {
        let package = |name: &str| {
            json!({
                "id": name, "name": name, "version": "1.0.0+x", "license": "MIT/Apache-2.0",
                "targets": [{ "kind": ["lib"] }],
            })
        };
        let metadata = json!({
            "packages": [package("iwarp-cli"), package("used"), package("unused")],
            "resolve": { "nodes": [
                { "id": "iwarp-cli", "deps": [{ "pkg": "used", "dep_kinds": [{ "kind": null }] }] },
                { "id": "used", "deps": [] },
                { "id": "unused", "deps": [] },
            ] },
        });
        let lock = "[[package]]\nname = \"used\"\nversion = \"1.0.0+x\"\nchecksum = \"ab\"\n";
        let document = document(&metadata, &checksums(lock), "1.0.0");
        let components = document["components"].as_array().unwrap();
        assert_eq!(components.len(), 2);
        assert_eq!(components[1]["purl"], "pkg:cargo/used@1.0.0%2Bx");
        assert_eq!(components[1]["hashes"][0]["content"], "ab");
        assert_eq!(
            components[1]["licenses"][0]["expression"],
            "MIT OR Apache-2.0"
        );
        assert_eq!(
            document["dependencies"][0],
            json!({ "ref": "pkg:cargo/iwarp-cli@1.0.0%2Bx",
                    "dependsOn": ["pkg:cargo/used@1.0.0%2Bx"] })
        );
    }
}
