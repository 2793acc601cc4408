//! Checks that `docs/options.md` has a row for each `IWARP_…` variable that the sources read, and
//! no rows for other variables.

use std::collections::{BTreeMap, BTreeSet};

use super::{Finding, Severity};

/// The document with the rows.
pub(crate) const FILE: &str = "docs/options.md";
/// The prefix of the variables' names.
const PREFIX: &str = "IWARP_";

/// The variables that the sources read, each with the first file that reads it.
#[derive(Default)]
pub(crate) struct Variables {
    read: BTreeMap<String, String>,
}

impl Variables {
    /// Adds the variables of a source file. A string literal counts if it consists of the
    /// variable's name only.
    pub(crate) fn add(&mut self, file: &str, text: &str) {
        for (at, _) in text.match_indices(&format!("\"{PREFIX}")) {
            let rest = &text[at + 1..];
            let name = leading_name(rest);
            if name.len() > PREFIX.len() && rest[name.len()..].starts_with('"') {
                let place = self.read.entry(name.to_owned());
                place.or_insert_with(|| file.to_owned());
            }
        }
    }

    /// Compares the variables with the rows of the document.
    pub(crate) fn compare(&self, document: &str) -> Vec<Finding> {
        let rows = documented(document);
        let missing = self
            .read
            .iter()
            .filter(|(name, _)| !rows.contains(*name))
            .map(|(name, file)| (file.clone(), format!("{name} has no row in {FILE}")));
        let unread = rows
            .iter()
            .filter(|name| !self.read.contains_key(*name))
            .map(|name| (FILE.to_owned(), format!("no source file reads {name}")));
        let finding = |(place, text)| Finding {
            severity: Severity::Error,
            place,
            text,
        };
        missing.chain(unread).map(finding).collect()
    }
}

/// Returns the variables in the first cells of all tables.
fn documented(document: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for line in document.lines() {
        let first = line
            .strip_prefix('|')
            .and_then(|rest| rest.split('|').next())
            .unwrap_or_default();
        for (at, _) in first.match_indices(PREFIX) {
            names.insert(leading_name(&first[at..]).to_owned());
        }
    }
    names
}

/// Returns the capital letters, digits and underscores at the beginning of `text`.
fn leading_name(text: &str) -> &str {
    let part = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    let end = text.find(|c| !part(c)).unwrap_or(text.len());
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Split into two literals. Otherwise the rule would find these names in this file.
    const A: &str = concat!("IWARP", "_A");
    const B: &str = concat!("IWARP", "_B2");

    fn findings(source: &str, document: &str) -> Vec<String> {
        let mut variables = Variables::default();
        variables.add("x.rs", source);
        let findings = variables.compare(document);
        findings.into_iter().map(|f| f.text).collect()
    }

    #[test]
    fn variables_and_rows_match() {
        let source = format!("var_os(\"{A}\"); get(\"{B}\")");
        let rows = format!("| Variable |\n| `{A}` | x |\n| `{B}`, `RS` | y |\n");
        assert!(findings(&source, &rows).is_empty());
        for name in [A, B] {
            let less = rows.replace(name, "");
            assert_eq!(
                findings(&source, &less),
                [format!("{name} has no row in {FILE}")]
            );
            let less = source.replace(name, "");
            assert_eq!(
                findings(&less, &rows),
                [format!("no source file reads {name}")]
            );
        }
    }

    #[test]
    fn messages_and_prefixes_are_ignored() {
        let source = format!("\"{A}=1: bad\"; starts_with(\"{PREFIX}\"); // {B}");
        assert!(findings(&source, "").is_empty());
        assert!(findings("", &format!("text {A}\n| x | {A} |\n")).is_empty());
    }
}
