//! The check `semver`: cargo-semver-checks compares the interfaces of the crates with those of the
//! last release, and fails if the version number does not allow the difference.
//!
//! Crates that the others require by an exact version are left out: their interfaces serve only the
//! other crates.

use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::packed::text;
use super::{Release, tools};
use xtask::outcome::Outcome;
use xtask::process::Log;

/// The version of cargo-semver-checks to install.
const VERSION: &str = "0.51.0";

/// A build that is optimised a little compiles in a third of the time, and is fast enough.
const PROFILE: &[(&str, &str)] = &[
    ("CARGO_PROFILE_RELEASE_LTO", "off"),
    ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16"),
    ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1"),
];

/// Runs the check.
pub(super) fn run(release: &Release<'_>, log: &mut Log) -> Result<Outcome> {
    let context = &release.context;
    let metadata: Vec<&Value> = release.packed.crates.iter().map(|p| &p.metadata).collect();
    let names = public(&metadata)?;
    let version = text(
        metadata.first().context("no crate is published")?,
        "version",
    )?;
    let baseline = match &release.args.baseline {
        Some(revision) => Some(revision.clone()),
        None => last_release(&tags(release)?, version),
    };
    let Some(baseline) = baseline else {
        // The first release has no earlier interface, so there is nothing to check.
        log.say("no earlier release; --baseline REVISION compares with any commit");
        return Ok(Outcome::Passed);
    };
    let wanted = ("cargo-semver-checks", VERSION);
    let Some(program) = tools::from_cargo(context, log, wanted, &[], PROFILE) else {
        return Ok(Outcome::Skipped(
            "cargo-semver-checks is not installed".into(),
        ));
    };
    let mut check = tools::command(&program, &context.root);
    check
        .args(["semver-checks", "--baseline-rev", &baseline])
        .env(
            "CARGO_TARGET_DIR",
            context.target.join("xtask-release/semver"),
        );
    for name in &names {
        check.args(["--package", name]);
    }
    let output = log.run_and_read(&mut check)?;
    for line in output
        .lines()
        .filter(|line| line.trim_start().starts_with("Summary "))
    {
        log.show(line.trim());
    }
    log.say(format!("{} compared with {baseline}", names.join(", ")));
    Ok(Outcome::Passed)
}

/// Returns the names of the libraries that no other crate requires by an exact version.
fn public<'a>(crates: &[&'a Value]) -> Result<Vec<&'a str>> {
    let mut names = Vec::new();
    for package in crates {
        let name = text(package, "name")?;
        let is_exact = |dependency: &Value| {
            dependency["name"] == name
                && dependency["req"]
                    .as_str()
                    .is_some_and(|req| req.starts_with('='))
        };
        let list = |package: &'a Value, field: &str| package[field].as_array().cloned();
        let dependencies = crates
            .iter()
            .filter_map(|other| list(other, "dependencies"));
        let library = list(package, "targets").unwrap_or_default();
        let library = library.iter().any(|target| target["kind"][0] == "lib");
        if library
            && !dependencies
                .flatten()
                .any(|dependency| is_exact(&dependency))
        {
            names.push(name);
        }
    }
    if names.is_empty() {
        bail!("no crate has a public interface");
    }
    Ok(names)
}

/// Returns the tags of releases that the present commit contains, the newest version first.
///
/// # Errors
/// If the clone is shallow: the last release could be missing in it.
fn tags(release: &Release<'_>) -> Result<String> {
    if git(release, &["rev-parse", "--is-shallow-repository"])?.trim() == "true" {
        bail!("the clone is shallow and may lack the last release: git fetch --unshallow --tags");
    }
    let merged = ["tag", "--merged", "HEAD", "--sort=-version:refname"];
    git(release, &[&merged[..], &["--list", "v[0-9]*"]].concat())
}

/// Returns what a git command prints.
fn git(release: &Release<'_>, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new("git");
    command.current_dir(&release.context.root).args(arguments);
    let output = command.output().context("cannot start git")?;
    let error = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("git {} failed: {}", arguments[0], error.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the newest tag of an earlier release than `version`. Releases for trial, such as
/// `v1.0.0-rc.1`, promise nothing, so they are no baseline.
fn last_release(tags: &str, version: &str) -> Option<String> {
    let is_earlier = |tag: &&str| !tag.contains('-') && tag.strip_prefix('v') != Some(version);
    tags.lines().find(is_earlier).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn exact_requirements_mark_internal_crates() {
        let package = |name: &str, kind: &str, needs: &[(&str, &str)]| {
            let needs = needs
                .iter()
                .map(|(name, req)| json!({ "name": name, "req": req }));
            let needs: Vec<Value> = needs.collect();
            json!({ "name": name, "targets": [{ "kind": [kind] }], "dependencies": needs })
        };
        let wire = package("wire", "lib", &[]);
        let os = package("os", "lib", &[("wire", "^0.1.0")]);
        let top = package("top", "lib", &[("os", "=0.1.0"), ("wire", "^0.1.0")]);
        let command = package("command", "bin", &[("top", "^0.1.0")]);
        let found = public(&[&wire, &os, &top, &command]).unwrap();
        assert_eq!(found, ["wire", "top"]);
        assert!(public(&[&command]).is_err());
    }

    #[test]
    fn baseline_is_an_earlier_release() {
        let tags = "v0.3.0\nv0.3.0-rc.1\nv0.2.1\nv0.1.0\n";
        assert_eq!(last_release(tags, "0.3.0").as_deref(), Some("v0.2.1"));
        assert_eq!(last_release(tags, "0.4.0").as_deref(), Some("v0.3.0"));
        assert_eq!(last_release("v0.1.0\n", "0.1.0"), None);
    }
}
