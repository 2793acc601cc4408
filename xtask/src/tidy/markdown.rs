//! Rules for the project's documents: links must work, and the README must be short and complete.

use std::path::Path;

use super::{Finding, Severity};

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

/// Checks that the file or folder of each relative link exists.
pub(crate) fn links(root: &Path, file: &str, text: &str) -> Vec<Finding> {
    let base = root.join(file);
    let base = base.parent().unwrap_or(root);
    let mut findings = Vec::new();
    let mut fenced = false;
    for (at, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        if fenced {
            continue;
        }
        for target in targets(line) {
            let path = target.split('#').next().unwrap_or_default();
            let external = target.contains("://") || target.starts_with("mailto:");
            if !external && !path.is_empty() && !base.join(path).exists() {
                findings.push(error(
                    format!("{file}:{}", at + 1),
                    format!("there is no file {target}"),
                ));
            }
        }
    }
    findings
}

/// Returns the targets of the inline links of a line.
fn targets(line: &str) -> Vec<&str> {
    line.match_indices("](")
        .filter_map(|(at, _)| {
            let rest = &line[at + 2..];
            let target = &rest[..rest.find(')')?];
            // A title may follow the target.
            target.split_whitespace().next()
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
    fn broken_links_are_found() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let check = |text: &str| links(root, "src/README.md", text).len();
        assert_eq!(check("[a](main.rs) [b](../Cargo.toml#x \"title\")"), 0);
        assert_eq!(
            check("[a](https://example.org/x) [b](#here) [c](mailto:a@example.org)"),
            0
        );
        assert_eq!(check("[a](nowhere.rs)"), 1);
        assert_eq!(check("```\n[a](nowhere.rs)\n```\n"), 0);
    }
}
