//! Checks the tables of `docs/security.md`: no cell is empty, and each test and each attack that
//! they name exists.

use std::collections::HashSet;

use super::{Finding, Severity};

/// The document.
pub(crate) const FILE: &str = "docs/security.md";
/// The folder with the attacks of the conformance suite.
const ATTACKS_DIR: &str = "conformance/src/attack/";
/// The prefix of the last cell if no test can check the row.
const MANUAL_PREFIX: &str = "By hand: ";

/// What the last cells may name: all functions, and the descriptions of the attacks.
#[derive(Default)]
pub(crate) struct Evidence {
    functions: HashSet<String>,
    attacks: HashSet<String>,
}

impl Evidence {
    /// Adds a source file.
    pub(crate) fn add(&mut self, file: &str, text: &str) {
        for (_, rest) in text
            .match_indices("fn ")
            .map(|(at, _)| text.split_at(at + 3))
        {
            let name = rest
                .split(|c: char| !c.is_alphanumeric() && c != '_')
                .next();
            self.functions.extend(name.map(str::to_owned));
        }
        if file.starts_with(ATTACKS_DIR) {
            self.attacks
                .extend(text.split('"').skip(1).step_by(2).map(str::to_owned));
        }
    }

    /// Returns a finding for each error in the tables of the document.
    pub(crate) fn compare(&self, document: &str) -> Vec<Finding> {
        let mut findings = Vec::new();
        let rows = document.lines().enumerate();
        for (at, line) in rows.filter(|(_, line)| line.starts_with('|')) {
            if line.starts_with("| ---") || line.ends_with("| Shown by |") {
                continue;
            }
            findings.extend(self.row_errors(line).into_iter().map(|text| Finding {
                severity: Severity::Error,
                place: format!("{FILE}:{}", at + 1),
                text,
            }));
        }
        findings
    }

    fn row_errors(&self, row: &str) -> Vec<String> {
        let cells: Vec<_> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [_, _, evidence] = cells[..] else {
            return vec![format!("{} cells instead of three", cells.len())];
        };
        if cells.iter().any(|cell| cell.is_empty()) {
            return vec!["a cell is empty".into()];
        }
        if evidence.starts_with(MANUAL_PREFIX) {
            return Vec::new();
        }
        let tests: Vec<_> = evidence.split('`').skip(1).step_by(2).collect();
        let attacks: Vec<_> = evidence.split('"').skip(1).step_by(2).collect();
        if tests.is_empty() && attacks.is_empty() {
            return vec!["the row names no test".into()];
        }
        let no_test = tests.iter().filter(|name| !self.functions.contains(**name));
        let no_attack = attacks.iter().filter(|name| !self.attacks.contains(**name));
        no_test
            .map(|name| format!("there is no test {name}"))
            .chain(no_attack.map(|name| format!("there is no attack \"{name}\"")))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(row: &str) -> Vec<String> {
        let mut evidence = Evidence::default();
        evidence.add("a.rs", "#[test]\nfn it_holds() {}\nfn other<T>() {}");
        evidence.add(ATTACKS_DIR, "segment(\"DDP: a\", \"DDP: b\")");
        let table = format!("| Attack | What we do | Shown by |\n| --- | --- | --- |\n{row}\n");
        let findings = evidence.compare(&table);
        findings.into_iter().map(|finding| finding.text).collect()
    }

    #[test]
    fn tests_and_attacks_must_exist() {
        assert!(found("| a | b | `it_holds`, `other`, \"DDP: b\" |").is_empty());
        assert!(found("| a | b | By hand: nobody can |").is_empty());
        assert_eq!(found("| a | b | `it_hold` |"), ["there is no test it_hold"]);
        let attack = found("| a | b | `it_holds`, \"DDP: c\" |");
        assert_eq!(attack, ["there is no attack \"DDP: c\""]);
    }

    #[test]
    fn no_cell_is_empty() {
        assert_eq!(found("| a |  | `it_holds` |"), ["a cell is empty"]);
        assert_eq!(found("| a | b |  |"), ["a cell is empty"]);
        assert_eq!(found("| a | b | certainly |"), ["the row names no test"]);
        assert_eq!(found("| a | b |"), ["2 cells instead of three"]);
    }
}
