//! Checks that the messages that `docs/troubleshooting.md` quotes are in the sources.

use super::{Finding, Severity};

/// The document with the messages.
pub(crate) const FILE: &str = "docs/troubleshooting.md";
/// The section with messages of other programs, which is not checked.
const UNCHECKED_SECTION: &str = "## What programs say";
/// Replaces the variable part of a message.
const VARIABLE: char = '…';
/// Separators of the clauses of a message. Different functions may write the clauses, so each
/// clause is searched for separately.
const SEPARATORS: [&str; 3] = [": ", "(", ")"];
/// The minimum length of a clause that is searched for. Shorter clauses occur in many texts.
const CLAUSE_MIN: usize = 6;

/// The texts of all source files, joined.
#[derive(Default)]
pub(crate) struct Sources {
    text: String,
}

impl Sources {
    /// Adds a source file. Lines that a literal continues with a backslash are joined.
    pub(crate) fn add(&mut self, text: &str) {
        let mut rest = text;
        while let Some((line, after)) = rest.split_once("\\\n") {
            self.text.push_str(line);
            rest = after.trim_start();
        }
        self.text.push_str(rest);
        self.text.push('\n');
    }

    /// Returns a finding for each message of the document that is in no source file.
    pub(crate) fn compare(&self, document: &str) -> Vec<Finding> {
        let mut findings = Vec::new();
        let mut unchecked = false;
        for (at, line) in document.lines().enumerate() {
            if line.starts_with("## ") {
                unchecked = line == UNCHECKED_SECTION;
            }
            if unchecked {
                continue;
            }
            for message in quoted(line) {
                let known = |c: &&str| c.len() < CLAUSE_MIN || self.text.contains(*c);
                if let Some(clause) = clauses(message).find(|clause| !known(clause)) {
                    findings.push(Finding {
                        severity: Severity::Error,
                        place: format!("{FILE}:{}", at + 1),
                        text: format!("no source file has \"{clause}\""),
                    });
                }
            }
        }
        findings
    }
}

/// Returns the clauses of a message, each of which must be in a source file.
fn clauses(message: &str) -> impl Iterator<Item = &str> {
    let parts = message.split(VARIABLE);
    let parts = SEPARATORS.iter().fold(
        Box::new(parts) as Box<dyn Iterator<Item = &str>>,
        |parts, separator| Box::new(parts.flat_map(move |part| part.split(separator))),
    );
    parts.map(|part| part.trim_matches([' ', ':']))
}

/// Returns the code spans in the first cell of a row.
fn quoted(line: &str) -> impl Iterator<Item = &str> {
    let cell = line
        .strip_prefix("| ")
        .and_then(|rest| rest.split(" | ").next())
        .unwrap_or_default();
    cell.split('`').skip(1).step_by(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(document: &str) -> usize {
        let mut sources = Sources::default();
        sources.add("fail(\"cannot reach \\\n            {peer}: perhaps it sleeps\")");
        sources.compare(document).len()
    }

    #[test]
    fn messages_are_those_of_the_sources() {
        assert_eq!(findings("| `cannot reach …: perhaps it sleeps` | x |"), 0);
        assert_eq!(findings("| `cannot reach …: perhaps it left` | x |"), 1);
        assert_eq!(findings("| `cannot find …` or `it is gone` | x |"), 2);
        let joined = "| `(perhaps it sleeps): cannot reach …` | x |";
        assert_eq!(findings(joined), 0);
    }

    #[test]
    fn only_first_cells_count() {
        assert_eq!(
            findings("| words | `cannot find it` |\ntext `cannot find it`"),
            0
        );
        let table = "| `cannot find it` | x |";
        assert_eq!(findings(&format!("{UNCHECKED_SECTION}\n{table}")), 0);
        assert_eq!(
            findings(&format!("{UNCHECKED_SECTION}\n## Ours\n{table}")),
            1
        );
    }
}
