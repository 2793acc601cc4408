//! Compares annotations with the RFCs and writes the reports.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::Range;

use super::annotations::{Annotation, Kind};
use super::rfc::{Requirement, Section, normalise};

/// Counts of requirements. The others do not add up to `total`, because a requirement may be quoted
/// both in code and in tests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) total: usize,
    pub(crate) implemented: usize,
    pub(crate) tested: usize,
    pub(crate) exception: usize,
    pub(crate) missing: usize,
}

impl Counts {
    fn add(&mut self, other: Self) {
        self.total += other.total;
        self.implemented += other.implemented;
        self.tested += other.tested;
        self.exception += other.exception;
        self.missing += other.missing;
    }
}

/// An RFC with the annotations that quote it.
pub(crate) struct Document {
    pub(crate) number: u16,
    sections: Vec<Section>,
    /// For each annotation: its section, and the ranges of its quote. An annotation that applies to
    /// a whole section has no ranges. If the RFC repeats a sentence, there are several ranges, and
    /// the annotation applies to all of them.
    matches: Vec<(Annotation, usize, Vec<Range<usize>>)>,
}

impl Document {
    /// Finds the quote of each annotation in the RFC. A quote that is not found is added to
    /// `errors`.
    pub(crate) fn new(
        number: u16,
        sections: Vec<Section>,
        annotations: &[Annotation],
        errors: &mut Vec<String>,
    ) -> Self {
        let mut matches = Vec::new();
        for annotation in annotations
            .iter()
            .filter(|annotation| annotation.rfc == number)
        {
            let place = annotation.place();
            let Some(at) = sections
                .iter()
                .position(|section| section.number == annotation.section)
            else {
                errors.push(format!(
                    "{place}: RFC {number} has no section {}",
                    annotation.section
                ));
                continue;
            };
            let quote = normalise(&annotation.quote);
            if quote.is_empty() {
                matches.push((annotation.clone(), at, Vec::new()));
                continue;
            }
            let ranges: Vec<_> = sections[at]
                .text
                .match_indices(&quote)
                .map(|(start, found)| start..start + found.len())
                .collect();
            if ranges.is_empty() {
                errors.push(not_found(&sections, annotation, &quote));
            } else {
                matches.push((annotation.clone(), at, ranges));
            }
        }
        Self {
            number,
            sections,
            matches,
        }
    }

    /// Returns the annotations of one kind that together cover a requirement: each of its keywords
    /// is in a quote. Returns an empty list if a keyword is in no quote.
    fn covering(&self, section: usize, requirement: &Requirement, kind: Kind) -> Vec<&Annotation> {
        let mut uncovered = requirement.keywords.clone();
        let mut used = Vec::new();
        for (annotation, at, ranges) in &self.matches {
            if annotation.kind != kind {
                continue;
            }
            let covers = |keyword: &Range<usize>| {
                let quoted =
                    |range: &Range<usize>| range.start <= keyword.start && keyword.end <= range.end;
                match ranges.as_slice() {
                    [] => is_within(&self.sections[section].number, &annotation.section),
                    ranges => *at == section && ranges.iter().any(quoted),
                }
            };
            if requirement.keywords.iter().any(covers) {
                uncovered.retain(|keyword| !covers(keyword));
                used.push(annotation);
            }
        }
        if uncovered.is_empty() {
            used
        } else {
            Vec::new()
        }
    }

    fn is_missing(&self, section: usize, requirement: &Requirement) -> bool {
        [Kind::Implementation, Kind::Test, Kind::Exception]
            .into_iter()
            .all(|kind| self.covering(section, requirement, kind).is_empty())
    }

    fn count(&self, section: usize) -> Counts {
        let mut counts = Counts::default();
        for requirement in &self.sections[section].requirements {
            let has = |kind| usize::from(!self.covering(section, requirement, kind).is_empty());
            let (implemented, tested) = (has(Kind::Implementation), has(Kind::Test));
            let exception = has(Kind::Exception);
            let missing = usize::from(self.is_missing(section, requirement));
            counts.add(Counts {
                total: 1,
                implemented,
                tested,
                exception,
                missing,
            });
        }
        counts
    }

    /// Returns the counts of all sections together.
    pub(crate) fn total(&self) -> Counts {
        let mut total = Counts::default();
        for at in 0..self.sections.len() {
            total.add(self.count(at));
        }
        total
    }
}

/// Returns the requirements that are neither quoted nor an exception, each with its RFC and
/// section.
pub(crate) fn missing(documents: &[Document]) -> Vec<String> {
    let mut out = Vec::new();
    for document in documents {
        for (at, section) in document.sections.iter().enumerate() {
            for requirement in &section.requirements {
                if document.is_missing(at, requirement) {
                    out.push(format!(
                        "RFC {} section {}: neither quoted nor an exception: {}",
                        document.number,
                        section.number,
                        &section.text[requirement.range.clone()]
                    ));
                }
            }
        }
    }
    out
}

/// Returns the error message for a quote that is not in its section. It names other sections that
/// contain the quote.
fn not_found(sections: &[Section], annotation: &Annotation, quote: &str) -> String {
    let elsewhere: Vec<_> = sections
        .iter()
        .filter(|section| section.text.contains(quote))
        .map(|section| section.number.as_str())
        .collect();
    let hint = match elsewhere.as_slice() {
        [] => "nor does any other section".to_owned(),
        list => format!("but section {} does", list.join(", ")),
    };
    let (place, rfc, section) = (annotation.place(), annotation.rfc, &annotation.section);
    format!("{place}: RFC {rfc} section {section} does not contain this text, {hint}: {quote}")
}

/// Returns `true` if `section` is `outer` or one of its subsections.
fn is_within(section: &str, outer: &str) -> bool {
    section
        .strip_prefix(outer)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Returns the full report: each requirement with the annotations that cover it, or `MISSING`.
pub(crate) fn full(documents: &[Document]) -> String {
    let mut out = String::new();
    for document in documents {
        let _ = writeln!(out, "RFC {}: {}", document.number, line(document.total()));
        for (at, section) in document.sections.iter().enumerate() {
            if section.requirements.is_empty() {
                continue;
            }
            let _ = writeln!(
                out,
                "\n  {} {}: {}",
                section.number,
                section.title,
                line(document.count(at))
            );
            for requirement in &section.requirements {
                let mut notes = Vec::new();
                for (kind, word) in [
                    (Kind::Implementation, "code"),
                    (Kind::Test, "test"),
                    (Kind::Exception, "exception"),
                ] {
                    for annotation in document.covering(at, requirement, kind) {
                        let reason = if kind == Kind::Exception {
                            format!(" ({})", annotation.reason)
                        } else {
                            String::new()
                        };
                        notes.push(format!("{word} {}{reason}", annotation.place()));
                    }
                }
                let mark = if notes.is_empty() { "MISSING" } else { "ok" };
                let _ = writeln!(
                    out,
                    "    [{mark}] {}",
                    &section.text[requirement.range.clone()]
                );
                for note in notes {
                    let _ = writeln!(out, "        {note}");
                }
            }
        }
        out.push('\n');
    }
    out
}

fn line(counts: Counts) -> String {
    format!(
        "{} requirements, {} in code, {} in tests, {} exceptions, {} missing",
        counts.total, counts.implemented, counts.tested, counts.exception, counts.missing
    )
}

/// Returns the snapshot that is committed: counts and the reasons of exceptions. It has no line
/// numbers, because they would change with nearly every commit.
pub(crate) fn snapshot(documents: &[Document]) -> String {
    let mut out = String::from(
        "# Compliance\n\n\
         `cargo xtask compliance --bless` writes this file; `cargo xtask test` fails if it is out\n\
         of date.\n\
         Terms are in the [glossary](glossary.md).\n\n\
         A requirement is a sentence of an RFC with MUST, SHALL, SHOULD or REQUIRED, or their\n\
         negation. It may be quoted in code and in tests, so the columns do not add up. A\n\
         requirement that is neither quoted nor an exception is missing, and the check fails.\n\
         [CONTRIBUTING.md](../CONTRIBUTING.md#citing-an-rfc) shows how to quote one.\n\n\
         | RFC | requirements | in code | in tests | exceptions | missing |\n\
         | --- | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for document in documents {
        let _ = writeln!(out, "| {} | {} |", document.number, cells(document.total()));
    }
    for document in documents {
        let _ = writeln!(out, "\n## RFC {}\n", document.number);
        out.push_str("| section | requirements | in code | in tests | exceptions | missing |\n");
        out.push_str("| --- | ---: | ---: | ---: | ---: | ---: |\n");
        for (at, section) in document.sections.iter().enumerate() {
            if !section.requirements.is_empty() {
                let _ = writeln!(
                    out,
                    "| {} {} | {} |",
                    section.number,
                    section.title,
                    cells(document.count(at))
                );
            }
        }
        let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (annotation, _, _) in &document.matches {
            if annotation.kind == Kind::Exception {
                let sections = reasons.entry(&annotation.reason).or_default();
                if !sections.contains(&annotation.section.as_str()) {
                    sections.push(&annotation.section);
                }
            }
        }
        if !reasons.is_empty() {
            out.push_str("\n| section | left out, because |\n| --- | --- |\n");
        }
        for (reason, mut sections) in reasons {
            sections.sort_unstable();
            let _ = writeln!(out, "| {} | {reason} |", sections.join(", "));
        }
    }
    out
}

fn cells(counts: Counts) -> String {
    format!(
        "{} | {} | {} | {} | {}",
        counts.total, counts.implemented, counts.tested, counts.exception, counts.missing
    )
}

#[cfg(test)]
mod tests {
    use super::super::{annotations, rfc};
    use super::*;

    const RFC: &str = "\
1.  One

   A MUST hold and B MUST NOT.  C SHOULD
   be done.

2.  Two

   D MUST.

2.1.  Three

   E SHALL be.
";

    fn document(code: &str) -> (Document, Vec<String>) {
        let mut errors = Vec::new();
        let annotations = annotations::collect("a.rs", code, &mut errors);
        let document = Document::new(9999, rfc::parse(RFC), &annotations, &mut errors);
        (document, errors)
    }

    #[test]
    fn without_annotations_all_is_missing() {
        let (document, errors) = document("");
        assert!(errors.is_empty());
        assert_eq!(
            document.total(),
            Counts {
                total: 4,
                missing: 4,
                ..Counts::default()
            }
        );
    }

    #[test]
    fn half_sentences_cover_together() {
        let half = "//= rfc9999 section 1\n//# A MUST hold\n";
        assert_eq!(document(half).0.count(0).implemented, 0);
        let both = format!("{half}\n//= rfc9999 section 1\n//# and B MUST NOT.\n");
        assert_eq!(
            document(&both).0.count(0),
            Counts {
                total: 2,
                implemented: 1,
                missing: 1,
                ..Counts::default()
            }
        );
    }

    #[test]
    fn quotes_may_wrap_differently() {
        let (document, errors) =
            document("//= rfc9999 section 1\n//= type=test\n//# C\n//# SHOULD be done.\n");
        assert!(errors.is_empty(), "{errors:?}");
        assert_eq!(document.count(0).tested, 1);
    }

    #[test]
    fn exception_covers_subsections() {
        let (document, errors) =
            document("//= rfc9999 section 2\n//= type=exception\n//= reason=no\n");
        assert!(errors.is_empty());
        assert_eq!(document.total().exception, 2);
        assert!(snapshot(&[document]).contains("| 2 | no |"));
        assert!(!is_within("22.1", "2"));
    }

    #[test]
    fn wrong_quote_names_right_section() {
        let (_, errors) = document("//= rfc9999 section 1\n//# D MUST.\n");
        assert_eq!(errors.len(), 1);
        assert!(
            errors[0].starts_with("a.rs:1:") && errors[0].contains("but section 2 does"),
            "{errors:?}"
        );
        let (_, errors) = document("//= rfc9999 section 1\n//# F MUST.\n");
        assert!(errors[0].contains("nor does any other"), "{errors:?}");
        let (_, errors) = document("//= rfc9999 section 7\n//# D MUST.\n");
        assert!(errors[0].contains("no section 7"), "{errors:?}");
    }

    #[test]
    fn quote_applies_to_all_places() {
        let mut errors = Vec::new();
        let annotations =
            annotations::collect("a.rs", "//= rfc9999 section 1\n//# It MUST.\n", &mut errors);
        let sections = rfc::parse("1.  One\n\n   It MUST.\n\n   It MUST.\n");
        let document = Document::new(9999, sections, &annotations, &mut errors);
        assert_eq!(
            document.total(),
            Counts {
                total: 2,
                implemented: 2,
                ..Counts::default()
            }
        );
    }

    #[test]
    fn missing_requirements_are_named() {
        let cited = "//= rfc9999 section 1\n//# A MUST hold and B MUST NOT.\n\n\
                     //= rfc9999 section 1\n//= type=test\n//# C SHOULD be done.\n";
        let names = missing(&[document(cited).0]);
        assert_eq!(names.len(), 2, "{names:?}");
        assert!(names[0].starts_with("RFC 9999 section 2: ") && names[0].ends_with(": D MUST."));
        assert!(names[1].starts_with("RFC 9999 section 2.1: "));
        let rest = "\n//= rfc9999 section 2\n//= type=exception\n//= reason=no\n";
        let all = format!("{cited}{rest}");
        assert_eq!(missing(&[document(&all).0]), Vec::<String>::new());
        // Half of a sentence is not enough.
        let half = all.replace(" and B MUST NOT.", "");
        assert_eq!(missing(&[document(&half).0]).len(), 1);
    }

    #[test]
    fn report_names_missing_requirements() {
        let (document, _) = document("//= rfc9999 section 2\n//# D MUST.\n");
        let text = full(&[document]);
        assert!(text.contains("[ok] D MUST.\n        code a.rs:1"), "{text}");
        assert!(text.contains("[MISSING] E SHALL be."), "{text}");
    }
}
