//! Rules for the project's documents: links must work, and the README must be short and complete.

use std::path::Path;

use anyhow::Result;
use xtask::documents;

use super::{Finding, Severity};

/// The table of contents of the site.
pub(crate) const CONTENTS: &str = "docs/SUMMARY.md";

/// Commands that the README must name.
const README_COMMANDS: &[&str] = &["cargo run --release -- perf", "cargo xtask test"];
/// The maximum length of the README, in lines. Longer texts and tables belong in `docs/`.
const README_LINES_MAX: usize = 130;

fn error(place: String, text: String) -> Finding {
    Finding {
        severity: Severity::Error,
        place,
        text,
    }
}

/// Checks that the file or folder, and the heading, of each relative link exist.
///
/// # Errors
/// If a document cannot be read.
pub(crate) fn links(root: &Path, file: &str, text: &str) -> Result<Vec<Finding>> {
    let dead = documents::dead_links(root, file, text)?;
    let found = dead
        .into_iter()
        .map(|(line, what)| error(format!("{file}:{line}"), what));
    Ok(found.collect())
}

/// Checks that the site's table of contents names each document of `docs/` exactly once.
pub(crate) fn contents(documents: &[String], text: &str) -> Vec<Finding> {
    let named: Vec<String> = documents::links(text)
        .into_iter()
        .filter_map(|place| documents::target(CONTENTS, &text[place]))
        .map(|(path, _)| path)
        .collect();
    let count = |file: &String| named.iter().filter(|name| *name == file).count();
    documents
        .iter()
        .filter(|file| file.ends_with(".md") && *file != CONTENTS && count(file) != 1)
        .map(|file| {
            error(
                CONTENTS.into(),
                format!("names {file} {} times", count(file)),
            )
        })
        .collect()
}

/// Checks that the README is short and names the commands and the oldest supported Rust version.
pub(crate) fn readme(text: &str, manifest: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut add = |text: String| findings.push(error("README.md".into(), text));
    for command in README_COMMANDS {
        if !text.contains(command) {
            add(format!("does not name `{command}`"));
        }
    }
    let lines = text.lines().count();
    if lines > README_LINES_MAX {
        add(format!(
            "{lines} lines are more than {README_LINES_MAX}: move details to docs/"
        ));
    }
    let version = manifest
        .lines()
        .find_map(|line| line.strip_prefix("rust-version"))
        .and_then(|rest| rest.split('"').nth(1));
    match version {
        Some(version) if text.contains(&format!("Rust {version}")) => {}
        Some(version) => add(format!(
            "does not say that it needs Rust {version}, as Cargo.toml does"
        )),
        None => add("cannot be compared: Cargo.toml has no rust-version".into()),
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANIFEST: &str = "[workspace.package]\nrust-version = \"1.95\"\n";
    const GOOD: &str = "Rust 1.95\n`cargo run --release -- perf`\n`cargo xtask test`\n";

    #[test]
    fn complete_readme_passes() {
        assert!(readme(GOOD, MANIFEST).is_empty());
    }

    #[test]
    fn missing_readme_parts_are_found() {
        for part in GOOD.lines() {
            assert_eq!(readme(&GOOD.replace(part, ""), MANIFEST).len(), 1, "{part}");
        }
        assert_eq!(readme(GOOD, "").len(), 1);
        let remaining = README_LINES_MAX - GOOD.lines().count();
        let extended = |lines: usize| GOOD.to_owned() + &"x\n".repeat(lines);
        assert!(readme(&extended(remaining), MANIFEST).is_empty());
        assert_eq!(readme(&extended(remaining + 1), MANIFEST).len(), 1);
    }

    #[test]
    fn each_document_is_in_contents_once() {
        let documents = ["docs/a.md".to_owned(), "docs/SUMMARY.md".to_owned()];
        let count = |text: &str| contents(&documents, text).len();
        assert_eq!(count("[A](a.md) [Architecture](../ARCHITECTURE.md)"), 0);
        assert_eq!(count("[A](a.md) [again](a.md)"), 1);
        assert_eq!(count("[B](b.md)"), 1);
    }
}
