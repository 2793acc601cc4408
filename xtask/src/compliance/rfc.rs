//! Reads an RFC as published (paginated text) into sections, and finds the sentences that require
//! something.
//!
//! A requirement is a sentence with a capitalised word of RFC 2119 that obliges or recommends.
//! `MAY` and `OPTIONAL` are ignored, because an implementation need not use a permission.

use std::ops::Range;

/// The RFC 2119 words that make a sentence a requirement. `MUST NOT` and the other negated forms
/// contain these words.
const KEYWORDS: &[&str] = &["MUST", "SHALL", "SHOULD", "REQUIRED"];

/// Words that end with a full stop without ending a sentence.
const ABBREVIATIONS: &[&str] = &[
    "e.g.", "i.e.", "etc.", "vs.", "al.", "cf.", "Sec.", "Fig.", "No.",
];

/// A section with its own text, without the text of its subsections.
#[derive(Debug)]
pub(crate) struct Section {
    /// As in the heading: `4.2`, `A.1`, or `A` for an appendix.
    pub(crate) number: String,
    /// The heading's text.
    pub(crate) title: String,
    /// The text, normalised as by [`normalise`].
    pub(crate) text: String,
    /// The sentences that require something, in order.
    pub(crate) requirements: Vec<Requirement>,
}

/// One sentence that requires something.
#[derive(Debug)]
pub(crate) struct Requirement {
    /// The range of the sentence in [`Section::text`].
    pub(crate) range: Range<usize>,
    /// The ranges of its keywords in [`Section::text`]. Never empty.
    pub(crate) keywords: Vec<Range<usize>>,
}

/// Splits the text of an RFC into its numbered sections. The text before the first section is
/// dropped.
pub(crate) fn parse(text: &str) -> Vec<Section> {
    let mut sections: Vec<(String, String, Vec<String>)> = Vec::new();
    for line in without_page_breaks(text) {
        if let Some((number, title)) = heading(&line) {
            sections.push((number, title, Vec::new()));
        } else if let Some((_, _, lines)) = sections.last_mut() {
            lines.push(line);
        }
    }
    sections
        .into_iter()
        .map(|(number, title, lines)| section(number, title, &lines))
        .collect()
}

fn section(number: String, title: String, lines: &[String]) -> Section {
    let mut text = String::new();
    let mut requirements = Vec::new();
    for paragraph in paragraphs(lines) {
        if !text.is_empty() {
            text.push(' ');
        }
        let start = text.len();
        text.push_str(&normalise(&paragraph));
        for range in sentences(&text[start..]) {
            let range = start + range.start..start + range.end;
            let keywords = keywords(&text, &range);
            if !keywords.is_empty() && !defines_keywords(&text[range.clone()]) {
                requirements.push(Requirement { range, keywords });
            }
        }
    }
    Section {
        number,
        title,
        text,
        requirements,
    }
}

/// Returns `true` for the sentence in which an RFC introduces the words of RFC 2119. It is not a
/// requirement.
fn defines_keywords(sentence: &str) -> bool {
    sentence.contains("\"MUST NOT\"")
}

/// Joins lines and words with single spaces. Inserts no space after a word that ends with a hyphen,
/// because RFCs break lines after hyphens.
pub(crate) fn normalise(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for word in text.split_whitespace() {
        let mut last = out.chars().rev();
        let after_hyphen =
            last.next() == Some('-') && last.next().is_some_and(char::is_alphanumeric);
        if !out.is_empty() && !after_hyphen {
            out.push(' ');
        }
        out.push_str(word);
    }
    out
}

/// Drops form feeds, page footers and page headers. Also drops the empty lines around them if a
/// paragraph continues on the next page.
fn without_page_breaks(text: &str) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    let mut after_break = false;
    for line in text.lines() {
        let line = line.trim_start_matches('\u{c}').trim_end();
        if is_footer(line) {
            while out.last().is_some_and(String::is_empty) {
                out.pop();
            }
            after_break = true;
        } else if after_break && (line.is_empty() || is_header(line)) {
            continue;
        } else {
            // If a paragraph ended with the page, an empty line separates it from the next one.
            let ended = out
                .last()
                .is_some_and(|last| last.ends_with(['.', ':', ';', '!', '?']));
            if after_break && (ended || heading(line).is_some() || starts_item(line)) {
                out.push(String::new());
            }
            after_break = false;
            out.push(line.to_owned());
        }
    }
    out
}

fn is_footer(line: &str) -> bool {
    line.strip_suffix(']')
        .and_then(|rest| rest.rsplit_once("[Page "))
        .is_some_and(|(_, number)| {
            !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
        })
}

/// Returns `true` for a line like `RFC 5044               MPA Framing for TCP           October
/// 2007`.
fn is_header(line: &str) -> bool {
    let mut words = line.split_whitespace();
    words.next() == Some("RFC")
        && words
            .next()
            .is_some_and(|word| word.bytes().all(|byte| byte.is_ascii_digit()))
        && words
            .next_back()
            .is_some_and(|word| word.len() == 4 && word.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Returns number and title if the line is a heading. Headings start in the first column; lines of
/// the table of contents are indented.
fn heading(line: &str) -> Option<(String, String)> {
    let (number, title) = match line.strip_prefix("Appendix ") {
        Some(rest) => rest.split_once(' ')?,
        None => line.split_once(' ')?,
    };
    let number = number.strip_suffix('.').unwrap_or(number);
    let appendix = line.starts_with("Appendix ");
    let mut parts = number.split('.');
    let first = parts.next()?;
    let lettered = first.len() == 1 && first.bytes().all(|byte| byte.is_ascii_uppercase());
    let numbered = !first.is_empty() && first.bytes().all(|byte| byte.is_ascii_digit());
    let mut levels = 0;
    for part in parts {
        if part.is_empty() || !part.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        levels += 1;
    }
    // A single letter is a number only after the word "Appendix": "A sentence" is not a heading.
    let valid = numbered || (lettered && (appendix || levels > 0));
    let title = title.trim();
    (valid && !title.is_empty()).then(|| (number.to_owned(), title.to_owned()))
}

/// Returns `true` if the line starts an item of a list.
fn starts_item(line: &str) -> bool {
    let line = line.trim_start();
    let Some((mark, _)) = line.split_once(' ') else {
        return false;
    };
    matches!(mark, "*" | "-" | "o" | "+")
        || mark.strip_suffix(['.', ')']).is_some_and(|number| {
            !number.is_empty()
                && number.len() <= 2
                && number.bytes().all(|byte| byte.is_ascii_alphanumeric())
        })
}

/// Joins lines into paragraphs. Empty lines separate paragraphs, and each item of a list is a
/// paragraph of its own.
fn paragraphs(lines: &[String]) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    let mut open = false;
    for line in lines {
        if line.is_empty() {
            open = false;
            continue;
        }
        match out.last_mut() {
            Some(last) if open && !starts_item(line) => {
                last.push('\n');
                last.push_str(line);
            }
            _ => out.push(line.clone()),
        }
        open = true;
    }
    out
}

/// Returns the ranges of the sentences of a normalised paragraph.
fn sentences(text: &str) -> Vec<Range<usize>> {
    let mut out = Vec::new();
    let mut start = 0;
    for (at, _) in text.match_indices(' ') {
        let (before, after) = (&text[start..at], &text[at + 1..]);
        let word = before.rsplit(' ').next().unwrap_or_default();
        let closed = before
            .trim_end_matches([')', '"'])
            .ends_with(['.', '?', '!']);
        let opens = after
            .starts_with(|c: char| c.is_uppercase() || c.is_ascii_digit() || "\"([*".contains(c));
        // The mark of a list item ("1.") belongs to the sentence that follows.
        let mark = !before.contains(' ') && starts_item(&text[start..]);
        if closed && opens && !mark && !ABBREVIATIONS.contains(&word.trim_start_matches('(')) {
            out.push(start..at);
            start = at + 1;
        }
    }
    if start < text.len() {
        out.push(start..text.len());
    }
    out
}

/// Returns the ranges of the keywords in `text[range]`. Keywords are whole words.
fn keywords(text: &str, range: &Range<usize>) -> Vec<Range<usize>> {
    let sentence = &text[range.clone()];
    let mut out = Vec::new();
    for keyword in KEYWORDS {
        for (at, _) in sentence.match_indices(keyword) {
            let end = at + keyword.len();
            let before = sentence[..at].chars().next_back();
            let after = sentence[end..].chars().next();
            let inside = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
            // "NOT REQUIRED" is not a requirement.
            let negated = *keyword == "REQUIRED" && sentence[..at].ends_with("NOT ");
            if !inside(before) && !inside(after) && !negated {
                out.push(range.start + at..range.start + end);
            }
        }
    }
    out.sort_by_key(|keyword| keyword.start);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
Some Group                                              A. Nobody
Request for Comments: 9999                           October 2007

Table of Contents

   1. First ....................................................3

1.  First

   The key words \"MUST\", \"MUST NOT\" and \"SHOULD\" are to be read as
   in RFC 2119.  A receiver MUST count to
   three, e.g. Slowly, and it MUST NOT stop.  It MAY rest.  A zero-
   length message SHOULD be



Nobody                      Standards Track                     [Page 1]
\u{c}
RFC 9999                 Counting for Peers                 October 2007


   sent at the end.

1.1.  Deeper

   1.  The first item MUST be first.
   2.  The second is MUSTARD.

   *   Nothing else is REQUIRED


Nobody                      Standards Track                     [Page 2]
\u{c}
RFC 9999                 Counting for Peers                 October 2007


Appendix A.  More

A.1.  Still More

   A sentence that starts with a letter SHALL be no heading.  It is NOT
   REQUIRED to be long.
";

    fn texts(section: &Section) -> Vec<&str> {
        section
            .requirements
            .iter()
            .map(|requirement| &section.text[requirement.range.clone()])
            .collect()
    }

    #[test]
    fn contents_are_no_sections() {
        let sections = parse(TEXT);
        let numbers: Vec<_> = sections
            .iter()
            .map(|section| section.number.as_str())
            .collect();
        assert_eq!(numbers, ["1", "1.1", "A", "A.1"]);
        assert_eq!(sections[3].title, "Still More");
    }

    #[test]
    fn sentences_cross_pages() {
        let sections = parse(TEXT);
        assert_eq!(
            texts(&sections[0]),
            [
                "A receiver MUST count to three, e.g. Slowly, and it MUST NOT stop.",
                "A zero-length message SHOULD be sent at the end.",
            ]
        );
        assert!(!sections[0].text.contains("Standards Track"));
        assert!(!sections[0].text.contains("Counting for Peers"));
        assert_eq!(sections[0].requirements[0].keywords.len(), 2);
    }

    #[test]
    fn list_items_are_sentences() {
        let sections = parse(TEXT);
        assert_eq!(
            texts(&sections[1]),
            [
                "1. The first item MUST be first.",
                "* Nothing else is REQUIRED"
            ]
        );
        assert!(sections[1].text.contains("MUSTARD"));
        assert_eq!(texts(&sections[3]).len(), 1);
    }

    #[test]
    fn keywords_point_into_the_text() {
        for section in parse(TEXT) {
            for requirement in &section.requirements {
                for keyword in &requirement.keywords {
                    assert!(KEYWORDS.contains(&&section.text[keyword.clone()]));
                    assert!(
                        requirement.range.start <= keyword.start
                            && keyword.end <= requirement.range.end
                    );
                }
            }
        }
    }

    #[test]
    fn normalising_joins_hyphenated_lines_only() {
        assert_eq!(normalise("zero-\n   length  a - b"), "zero-length a - b");
        assert_eq!(normalise("  \n "), "");
    }

    #[test]
    fn headings_are_strict() {
        assert_eq!(heading("4.2.  Title"), Some(("4.2".into(), "Title".into())));
        assert_eq!(
            heading("A.5.1  Title"),
            Some(("A.5.1".into(), "Title".into()))
        );
        assert_eq!(
            heading("Appendix B.  Title"),
            Some(("B".into(), "Title".into()))
        );
        assert_eq!(heading("A sentence"), None);
        assert_eq!(heading("4..2 Title"), None);
        assert_eq!(heading("   4. Indented"), None);
    }
}
