//! The list of mutants that no test can kill, because they behave like the original:
//! `xtask/equivalent-mutants.txt`.
//!
//! An entry names a mutant by file, change and function, but not by line, so that code may move. If
//! a function has the same change several times, ` [2/3]` means the second of three. If their
//! number changes, the entry becomes invalid and has to be reviewed.

use std::collections::HashMap;

use anyhow::{Context as _, Result, bail};

/// The file of the list.
pub(crate) const LIST: &str = "xtask/equivalent-mutants.txt";

/// Separates the mutant from the reason.
const BECAUSE: &str = " # ";

/// Maps the names of mutants in the output of cargo-mutants, which contain lines, to the names in
/// the list of equivalents.
pub(crate) struct Names(HashMap<String, String>);

impl Names {
    /// Creates the map from the lines of `cargo mutants --list`.
    pub(crate) fn new(listed: &[String]) -> Self {
        let plain: Vec<String> = listed.iter().map(|name| without_line(name)).collect();
        let mut total: HashMap<&str, usize> = HashMap::new();
        for name in &plain {
            *total.entry(name).or_default() += 1;
        }
        let mut seen: HashMap<&str, usize> = HashMap::new();
        let named = listed.iter().zip(&plain).map(|(full, name)| {
            let number = seen.entry(name).or_default();
            *number += 1;
            let stable = match total[name.as_str()] {
                1 => name.clone(),
                count => format!("{name} [{number}/{count}]"),
            };
            (full.clone(), stable)
        });
        Self(named.collect())
    }

    /// Returns the name in the list of equivalents, without a line.
    pub(crate) fn stable<'a>(&'a self, full: &'a str) -> &'a str {
        self.0.get(full).map_or(full, String::as_str)
    }

    fn has(&self, stable: &str) -> bool {
        self.0.values().any(|name| name == stable)
    }
}

/// Removes line and column from `file:line:column: change`.
fn without_line(name: &str) -> String {
    let mut parts = name.splitn(4, ':');
    match (parts.next(), parts.next(), parts.next(), parts.next()) {
        (Some(file), Some(_), Some(_), Some(change)) => format!("{file}:{change}"),
        _ => name.to_owned(),
    }
}

/// The list of equivalents.
pub(crate) struct Equivalents(Vec<String>);

impl Equivalents {
    /// Reads the list.
    ///
    /// # Errors
    /// If a line has no reason, or if a mutant occurs twice.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let mut entries: Vec<String> = Vec::new();
        for line in text.lines().map(str::trim) {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let (mutant, reason) = line
                .split_once(BECAUSE)
                .with_context(|| format!("{LIST}: no reason in {line:?}"))?;
            if reason.trim().is_empty() || entries.iter().any(|other| other == mutant) {
                bail!("{LIST}: an entry without a reason, or a second entry: {line:?}");
            }
            entries.push(mutant.to_owned());
        }
        Ok(Self(entries))
    }

    /// Returns `true` if the list contains the mutant with this stable name.
    pub(crate) fn contain(&self, stable: &str) -> bool {
        self.0.iter().any(|entry| entry == stable)
    }

    /// Returns the entries that match no mutant.
    pub(crate) fn outdated<'a>(&'a self, names: &'a Names) -> impl Iterator<Item = &'a str> {
        let entries = self.0.iter().map(String::as_str);
        entries.filter(|entry| !names.has(entry))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Names {
        let listed = [
            "a/b.rs:3:5: replace f -> bool with true",
            "a/b.rs:9:5: replace + with - in g",
            "a/b.rs:11:5: replace + with - in g",
            "a/b.rs:12:5: replace x::y with z::w in h",
        ];
        Names::new(&listed.map(str::to_owned))
    }

    #[test]
    fn mutant_names_survive_moved_lines() {
        let names = names();
        let stable = |full| names.stable(full);
        assert_eq!(
            stable("a/b.rs:3:5: replace f -> bool with true"),
            "a/b.rs: replace f -> bool with true"
        );
        assert_eq!(
            stable("a/b.rs:11:5: replace + with - in g"),
            "a/b.rs: replace + with - in g [2/2]"
        );
        assert_eq!(
            stable("a/b.rs:12:5: replace x::y with z::w in h"),
            "a/b.rs: replace x::y with z::w in h"
        );
    }

    #[test]
    fn unmatched_entry_is_outdated() {
        let text = "# a comment\n\na/b.rs: replace + with - in g [2/2] # why\n\
            a/b.rs: replace + with - in g # there are two\nc.rs: gone # why\n";
        let list = Equivalents::parse(text).unwrap();
        assert!(list.contain("a/b.rs: replace + with - in g [2/2]"));
        assert!(!list.contain("a/b.rs: replace + with - in g [1/2]"));
        let names = names();
        let outdated: Vec<_> = list.outdated(&names).collect();
        assert_eq!(outdated, ["a/b.rs: replace + with - in g", "c.rs: gone"]);
    }

    #[test]
    fn every_entry_has_one_reason() {
        assert!(Equivalents::parse("a.rs: replace f with ()\n").is_err());
        assert!(Equivalents::parse("a.rs: x #  \n").is_err());
        assert!(Equivalents::parse("a.rs: x # y\na.rs: x # z\n").is_err());
    }
}
