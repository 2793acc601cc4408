//! Generates and checks `docs/unsafe.md`: where `unsafe` is, and why it is sound there. `cargo
//! xtask unsafe-doc` generates it from the table that `rules` uses, so the two agree.

use std::fmt::Write as _;

use anyhow::Result;
use xtask::context::Context;
use xtask::files;

use super::code::code_only;
use super::{Finding, Severity, UNSAFE_MODULES};

/// The document.
const FILE: &str = "docs/unsafe.md";

const HEAD: &str = "\
# Where `unsafe` is

`unsafe` appears in these files only, each block with a `SAFETY:` comment that relies on the
invariant in this table. `cargo xtask unsafe-doc` writes this file from `xtask/unsafe-modules.txt`.
`cargo xtask test --only tidy` fails if another file contains `unsafe`, if a row is not needed, or
if this file is out of date. `iwarp-proto` forbids `unsafe`. Terms are in the
[glossary](glossary.md).

It is checked by Miri (step `miri`), by valgrind, AddressSanitizer and ThreadSanitizer
(`cargo xtask interop apps --all --only Sanitizer valgrind`), and by KASAN for the kernel module.

| Where | Why it is sound |
| --- | --- |
";

/// A row of the table.
struct Row<'a> {
    path: &'a str,
    why: &'a str,
    /// Whether a file of the row has `unsafe`.
    needed: bool,
}

/// Compares the document with the table, and the table with the sources.
pub(super) fn check(context: &Context, table: &str) -> Result<Vec<Finding>> {
    let rows = rows(context, table)?;
    let error = |place: &str, text: &str| Finding {
        severity: Severity::Error,
        place: place.to_owned(),
        text: text.to_owned(),
    };
    let mut findings: Vec<Finding> = rows
        .iter()
        .filter(|row| !row.needed)
        .map(|row| error(UNSAFE_MODULES, &format!("{} has no `unsafe`", row.path)))
        .collect();
    let current = files::read(&context.root, FILE).unwrap_or_default();
    if current != text(&rows) {
        findings.push(error(FILE, "is out of date: run `cargo xtask unsafe-doc`"));
    }
    Ok(findings)
}

/// Writes the document.
///
/// # Errors
/// - If the table or a source file cannot be read.
/// - If the document cannot be written.
pub(crate) fn write(context: &Context) -> Result<()> {
    let table = files::read(&context.root, UNSAFE_MODULES)?;
    let text = text(&rows(context, &table)?);
    Ok(std::fs::write(context.root.join(FILE), text)?)
}

/// Parses the table, and determines which rows are needed.
fn rows<'a>(context: &Context, table: &'a str) -> Result<Vec<Row<'a>>> {
    let mut rows = parse(table);
    for file in files::listed(&context.root)? {
        if !file.ends_with(".rs") {
            continue;
        }
        let Some(row) = rows.iter_mut().find(|row| covers(row.path, &file)) else {
            continue;
        };
        let source = files::read(&context.root, &file)?;
        let word = |line: &str| {
            line.split(|c: char| !c.is_alphanumeric() && c != '_')
                .any(|word| word == "unsafe")
        };
        row.needed |= code_only(&source).lines().any(word);
    }
    Ok(rows)
}

fn covers(path: &str, file: &str) -> bool {
    file == path || (path.ends_with('/') && file.starts_with(path))
}

/// Returns the rows sorted by their paths, so that the rows of a crate are adjacent.
fn parse(table: &str) -> Vec<Row<'_>> {
    let mut rows: Vec<Row<'_>> = table
        .lines()
        .map(str::trim)
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split_once(char::is_whitespace))
        .map(|(path, why)| Row {
            path,
            why: why.trim(),
            needed: false,
        })
        .collect();
    rows.sort_by_key(|row| row.path);
    rows
}

fn text(rows: &[Row<'_>]) -> String {
    let mut out = HEAD.to_owned();
    for row in rows {
        // Writing into a string cannot fail.
        let _ = writeln!(out, "| `{}` | {} |", row.path, row.why);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_sorted_and_written() {
        let table = "# comment\nb/  second reason\n\na/x.rs first | reason\n";
        let rows = parse(table);
        let paths: Vec<_> = rows.iter().map(|row| row.path).collect();
        assert_eq!(paths, ["a/x.rs", "b/"]);
        assert!(text(&rows).ends_with("| `a/x.rs` | first | reason |\n| `b/` | second reason |\n"));
        assert!(covers("b/", "b/c.rs") && !covers("b/", "bc.rs") && covers("a/x.rs", "a/x.rs"));
    }
}
