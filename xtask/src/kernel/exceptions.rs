//! Known findings: functions for which a gate does not hold yet, with the reasons.
//!
//! The step fails if a finding has no row here, and also if a row has no finding any more, so the
//! list can only shrink.

use std::collections::BTreeSet;

use super::gates::{Finding, Gate};

/// Known findings: each of these gates does not hold for each of these functions.
struct Exception {
    gates: &'static [Gate],
    /// The short names of the functions.
    functions: &'static [&'static str],
    /// As in [`Finding::what`].
    what: &'static str,
    why: &'static str,
}

const EXCEPTIONS: &[Exception] = &[];

/// Returns a message for each finding without an exception, and for each exception without a
/// finding.
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
    let stale = known.difference(&found).map(|(gate, function, what)| {
        format!("{gate:?}: {function}: {what}: remove this row of xtask/src/kernel/exceptions.rs")
    });
    new.chain(stale).collect()
}

/// Returns the reasons of all exceptions.
pub(crate) fn reasons() -> impl Iterator<Item = &'static str> {
    EXCEPTIONS.iter().map(|exception| exception.why)
}

/// Returns a description of a finding.
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
        let new = BTreeSet::from([finding("c::d", "600 octets")]);
        let messages = compare_with(&new, &exceptions);
        assert_eq!(messages.len(), 2);
        assert_eq!(messages[0], "Frames: c::d: 600 octets");
        assert!(messages[1].contains("a::b") && messages[1].contains("remove this row"));
    }
}
