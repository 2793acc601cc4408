//! The check `notes`: the tag is the version of all crates, and the changelog has a section of it.
//!
//! Without `--tag`, only the versions are compared: between releases, the changelog has no section
//! of the next version.

use std::collections::BTreeSet;

use anyhow::{Result, bail};

use super::Release;
use super::packed::text;
use xtask::files;
use xtask::outcome::Outcome;
use xtask::process::Log;

const CHANGELOG: &str = "CHANGELOG.md";

/// Runs the check.
pub(super) fn run(release: &Release<'_>, log: &mut Log) -> Result<Outcome> {
    let versions: BTreeSet<&str> = release
        .packed
        .crates
        .iter()
        .map(|package| text(&package.metadata, "version"))
        .collect::<Result<_>>()?;
    let (1, Some(version)) = (versions.len(), versions.first()) else {
        bail!("all crates are released together, but have the versions {versions:?}");
    };
    log.say(format!("version {version}"));
    let Some(tag) = &release.args.tag else {
        return Ok(Outcome::Passed);
    };
    if tag.strip_prefix('v') != Some(version) {
        bail!("the tag is {tag}, but the version in Cargo.toml is {version}");
    }
    if !is_described(&files::read(&release.context.root, CHANGELOG)?, version) {
        bail!("{CHANGELOG} has no section `## [{version}] - YYYY-MM-DD`");
    }
    Ok(Outcome::Passed)
}

/// Returns `true` if the changelog has a section with the version and a date in its heading.
fn is_described(changelog: &str, version: &str) -> bool {
    let heading = format!("## [{version}] - ");
    changelog
        .lines()
        .filter_map(|line| line.strip_prefix(&heading))
        .any(is_date)
}

/// Returns `true` for a date in the form `2026-11-28`.
fn is_date(text: &str) -> bool {
    let pattern = "0000-00-00";
    text.len() == pattern.len()
        && text
            .chars()
            .zip(pattern.chars())
            .all(|(c, wanted)| match wanted {
                '0' => c.is_ascii_digit(),
                _ => c == wanted,
            })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn section_needs_version_and_date() {
        let text = "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n";
        assert!(is_described(text, "0.2.0"));
        assert!(!is_described(text, "0.2.1"));
        assert!(!is_described("## [0.2.0] - soon\n", "0.2.0"));
        assert!(!is_described("## [0.2.0]\n", "0.2.0"));
    }
}
