//! Where a gate does not hold yet, and why that is known.
//!
//! The list shrinks: a row that is not needed any more fails the step, and so does a finding that
//! has no row.

use std::collections::BTreeSet;

use super::gates::{Finding, Gate};

/// Findings that are known: each gate with each function.
struct Exception {
    gates: &'static [Gate],
    /// The functions, in short.
    functions: &'static [&'static str],
    /// What they call or have. Empty for a frame.
    what: &'static str,
    why: &'static str,
}

/// All of them.
const EXCEPTIONS: &[Exception] = &[];

/// The findings that have no exception, and the exceptions that have no finding, in words.
pub(crate) fn compare(findings: &BTreeSet<Finding>) -> Vec<String> {
    compare_with(findings, EXCEPTIONS)
}

fn compare_with(findings: &BTreeSet<Finding>, exceptions: &[Exception]) -> Vec<String> {
    let mut known: BTreeSet<(Gate, &str, &str)> = BTreeSet::new();
    for exception in exceptions {
        for &gate in exception.gates {
            let rows = exception.functions.iter();
            known.extend(rows.map(|&function| (gate, function, exception.what)));
        }
    }
    let found: BTreeSet<_> = findings
        .iter()
        .map(|one| (one.gate, one.function.as_str(), one.what.as_str()))
        .collect();
    let new = findings
        .iter()
        .filter(|one| !known.contains(&(one.gate, one.function.as_str(), one.what.as_str())))
        .map(describe);
    let gone = known.difference(&found).map(|(gate, function, what)| {
        format!("{gate:?}: {function}: {what}: remove this row of xtask/src/kernel/exceptions.rs")
    });
    new.chain(gone).collect()
}

/// Why there are exceptions.
pub(crate) fn reasons() -> impl Iterator<Item = &'static str> {
    EXCEPTIONS.iter().map(|exception| exception.why)
}

/// A finding in words.
pub(crate) fn describe(finding: &Finding) -> String {
    let Finding {
        gate,
        function,
        what,
        note,
    } = finding;
    let words = [function.as_str(), what.as_str(), note.as_str()];
    let words: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
    format!("{gate:?}: {}", words.join(": "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(function: &str, note: &str) -> Finding {
        Finding {
            gate: Gate::Frames,
            function: function.into(),
            what: String::new(),
            note: note.into(),
        }
    }

    #[test]
    fn new_findings_and_stale_exceptions_fail() {
        let exceptions = [Exception {
            gates: &[Gate::Frames],
            functions: &["a::b"],
            what: "",
            why: "because",
        }];
        let known = BTreeSet::from([finding("a::b", "600 octets")]);
        assert_eq!(compare_with(&known, &exceptions), Vec::<String>::new());
        let both = BTreeSet::from([finding("c::d", "600 octets")]);
        let said = compare_with(&both, &exceptions);
        assert_eq!(said.len(), 2);
        assert_eq!(said[0], "Frames: c::d: 600 octets");
        assert!(said[1].contains("a::b") && said[1].contains("remove this row"));
    }
}
