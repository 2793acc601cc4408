//! The list of mutants that no test can kill, because they do what the original does:
//! `xtask/equivalent-mutants.txt`.
//!
//! A mutant is known by its file, the change and the function, and not by its line, so that code
//! may move. Where a function has the same change more than once, ` [2/3]` says which of how many;
//! with the number of them the entry becomes invalid, and is read again.

use std::collections::HashMap;

use anyhow::{Context as _, Result, bail};

/// The file of the list.
pub(crate) const LIST: &str = "xtask/equivalent-mutants.txt";

/// Separates the mutant from the reason.
const BECAUSE: &str = " # ";

/// Names of mutants as cargo-mutants lists them, with their lines, and as the list of equivalents
/// has them.
pub(crate) struct Names(HashMap<String, String>);

impl Names {
    /// Makes names from the lines of `cargo mutants --list`.
    pub(crate) fn new(listed: &[String]) -> Self {
        let plain: Vec<String> = listed.iter().map(|name| without_line(name)).collect();
        let mut total: HashMap<&str, usize> = HashMap::new();
        for name in &plain {
            *total.entry(name).or_default() += 1;
        }
        let mut seen: HashMap<&str, usize> = HashMap::new();
        let named = listed.iter().zip(&plain).map(|(full, name)| {
            let at = seen.entry(name).or_default();
            *at += 1;
            let lasting = match total[name.as_str()] {
                1 => name.clone(),
                count => format!("{name} [{at}/{count}]"),
            };
            (full.clone(), lasting)
        });
        Self(named.collect())
    }

    /// Returns the name without a line.
    pub(crate) fn lasting<'a>(&'a self, full: &'a str) -> &'a str {
        self.0.get(full).map_or(full, String::as_str)
    }

    fn has(&self, lasting: &str) -> bool {
        self.0.values().any(|name| name == lasting)
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

/// The list.
pub(crate) struct Equivalents(Vec<String>);

impl Equivalents {
    /// Reads the list.
    ///
    /// # Errors
    /// When a line has no reason, or a mutant stands there twice.
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
                bail!("{LIST}: without a reason, or twice: {line:?}");
            }
            entries.push(mutant.to_owned());
        }
        Ok(Self(entries))
    }

    /// Returns `true` if the mutant of this lasting name is in the list.
    pub(crate) fn contain(&self, lasting: &str) -> bool {
        self.0.iter().any(|entry| entry == lasting)
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
        let lasting = |full| names.lasting(full);
        assert_eq!(
            lasting("a/b.rs:3:5: replace f -> bool with true"),
            "a/b.rs: replace f -> bool with true"
        );
        assert_eq!(
            lasting("a/b.rs:11:5: replace + with - in g"),
            "a/b.rs: replace + with - in g [2/2]"
        );
        assert_eq!(
            lasting("a/b.rs:12:5: replace x::y with z::w in h"),
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
