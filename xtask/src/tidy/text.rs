//! The rules for text: width of lines, wording of comments, and names of tests.

use super::{Finding, Severity};

/// The maximum width of a line, in characters.
const COLUMNS_MAX: usize = 100;
/// The maximum number of words in the name of a test.
const TEST_NAME_WORDS_MAX: usize = 8;
/// Suffixes of the files in which the width of lines is checked.
const WRAPPED_SUFFIXES: &[&str] = &[
    ".rs", ".c", ".h", ".md", ".sh", ".py", ".toml", ".yml", ".yaml",
];
/// The first lines of the code blocks that show what programs print. Their lines may be wider.
const OUTPUT: &[&str] = &["```text", "```console"];
/// Prefixes of the paths of generated files, which are not checked.
const GENERATED: &[&str] = &["bench/RESULTS.md", "bench/results/"];
/// First words of comments that are incomplete sentences.
const CLIPPED: &[&str] = &["That", "Those", "Of one", "So many", "So long", "The same"];
/// Expressions that are hard to understand. Each is split into two literals, because otherwise
/// this file would violate its own rule.
const UNCLEAR: &[&str] = &[
    concat!("for so", " long"),
    concat!("in", " vain"),
    concat!("is", " told"),
    concat!("are", " told"),
];

/// Checks the text of one file.
pub(crate) fn check(file: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    if GENERATED.iter().any(|start| file.starts_with(start)) {
        return findings;
    }
    let mut add = |line: usize, text: String| {
        findings.push(Finding {
            severity: Severity::Error,
            place: format!("{file}:{}", line + 1),
            text,
        });
    };
    let mut output = false;
    for (at, line) in text.lines().enumerate() {
        if file.ends_with(".md") && line.trim_start().starts_with("```") {
            output = OUTPUT.iter().any(|kind| line.trim() == *kind);
        }
        if !output
            && WRAPPED_SUFFIXES.iter().any(|ending| file.ends_with(ending))
            && is_too_wide(line)
        {
            add(at, format!("more than {COLUMNS_MAX} columns"));
        }
        if let Some(comment) = comment(file, line) {
            if let Some(start) = CLIPPED.iter().find(|start| begins_with(comment, start)) {
                add(
                    at,
                    format!("write a sentence that does not begin with \"{start}\""),
                );
            }
            if let Some(words) = UNCLEAR.iter().find(|words| comment.contains(*words)) {
                add(at, format!("\"{words}\" is unclear: use the standard term"));
            }
        }
    }
    if file.ends_with(".rs") {
        for (at, name) in names_of_tests(text) {
            let words = name.split('_').filter(|word| !word.is_empty()).count();
            if words > TEST_NAME_WORDS_MAX {
                add(
                    at,
                    format!("{name}: a test name has at most {TEST_NAME_WORDS_MAX} words"),
                );
            }
        }
    }
    findings
}

/// Returns `true` if a line is too wide and can be wrapped. Rows of tables, quotations of RFCs and
/// addresses cannot be wrapped.
fn is_too_wide(line: &str) -> bool {
    if line.chars().count() <= COLUMNS_MAX {
        return false;
    }
    let text = line.trim_start();
    let quoted = text.starts_with("//#") || text.starts_with("//=");
    let text = text.trim_start_matches(['/', '!', '#', '*']).trim_start();
    !quoted && !text.starts_with('|') && !text.contains("://")
}

/// Returns the text of a comment or of a line of a document. Returns `None` for other lines and for
/// quotations of RFCs.
fn comment<'a>(file: &str, line: &'a str) -> Option<&'a str> {
    let text = line.trim_start();
    if file.ends_with(".rs") {
        let text = text.strip_prefix("//")?;
        let text = text.strip_prefix(['/', '!']).unwrap_or(text);
        (!text.starts_with(['#', '='])).then(|| text.trim_start())
    } else if file.ends_with(".c") || file.ends_with(".h") {
        let text = text.strip_prefix("/*").or_else(|| text.strip_prefix('*'))?;
        Some(text.trim_start_matches('*').trim_start())
    } else {
        file.ends_with(".md").then_some(text)
    }
}

fn begins_with(comment: &str, start: &str) -> bool {
    comment
        .strip_prefix(start)
        .is_some_and(|rest| rest.starts_with(' '))
}

/// Returns the lines and names of all functions that have an attribute `test`.
fn names_of_tests(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut is_test = false;
    for (at, line) in text.lines().enumerate() {
        let line = line.trim_start();
        if line.starts_with("#[") {
            is_test |= line.starts_with("#[test]") || line.contains("::test");
        } else if let Some((_, rest)) = line.split_once("fn ").filter(|_| is_test) {
            let end = rest.find(['(', '<']).unwrap_or(rest.len());
            found.push((at, &rest[..end]));
            is_test = false;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(file: &str, text: &str) -> Vec<String> {
        let place = |finding: Finding| format!("{} {}", finding.place, finding.text);
        check(file, text).into_iter().map(place).collect()
    }

    #[test]
    fn wide_lines_are_found() {
        let wide = "x".repeat(COLUMNS_MAX + 1);
        assert_eq!(findings("a.rs", &wide), ["a.rs:1 more than 100 columns"]);
        assert_eq!(findings("a.rs", &wide[1..]), [""; 0]);
        assert_eq!(findings("a.md", &"ü".repeat(COLUMNS_MAX)), [""; 0]);
        assert_eq!(findings("a.svg", &wide), [""; 0]);
    }

    #[test]
    fn tables_and_quotations_may_be_wide() {
        let wide = "word ".repeat(30);
        for start in [
            "| ",
            "/// | ",
            "//! | ",
            "    //# ",
            "//= ",
            "// https://a ",
        ] {
            assert_eq!(
                findings("a.rs", &format!("{start}{wide}")),
                [""; 0],
                "{start}"
            );
        }
        for start in ["", "/// ", "// ", "# ", "let a = \""] {
            assert_eq!(
                findings("a.rs", &format!("{start}{wide}")).len(),
                1,
                "{start}"
            );
        }
    }

    #[test]
    fn shown_output_may_be_wide() {
        let wide = "word ".repeat(30);
        assert_eq!(
            findings("a.md", &format!("```text\n{wide}\n```\n")),
            [""; 0]
        );
        assert_eq!(findings("a.md", &format!("```sh\n{wide}\n```\n")).len(), 1);
        assert_eq!(
            findings("a.md", &format!("```text\n```\n{wide}\n")).len(),
            1
        );
    }

    #[test]
    fn clipped_comments_are_found() {
        for start in CLIPPED {
            for mark in ["//", "///", "    //!"] {
                assert_eq!(findings("a.rs", &format!("{mark} {start} queue.")).len(), 1);
            }
            assert_eq!(findings("a.c", &format!(" * {start} queue.")).len(), 1);
            assert_eq!(findings("a.c", &format!("/* {start} queue. */")).len(), 1);
            assert_eq!(findings("a.md", &format!("{start} queue.")).len(), 1);
            assert_eq!(findings("a.rs", &format!("//# {start} queue.")), [""; 0]);
            assert_eq!(
                findings("a.rs", &format!("let a = \"{start} queue\";")),
                [""; 0]
            );
            assert_eq!(findings("a.rs", &format!("// {start}ness.")), [""; 0]);
        }
    }

    #[test]
    fn unclear_expressions_are_found() {
        for words in UNCLEAR {
            assert_eq!(findings("a.rs", &format!("// It {words}.")).len(), 1);
            assert_eq!(findings("a.rs", &format!("//# It {words}.")), [""; 0]);
        }
    }

    #[test]
    fn long_test_names_are_found() {
        let test = |name: &str| findings("a.rs", &format!("#[test]\nfn {name}() {{}}\n"));
        assert_eq!(test("a_b_c_d_e_f_g_h"), [""; 0]);
        assert_eq!(test("a_b_c_d_e_f_g_h_i").len(), 1);
        let others = "#[tokio::test]\n#[ignore]\nasync fn a_b_c_d_e_f_g_h_i() {}";
        assert_eq!(findings("a.rs", others).len(), 1);
        assert_eq!(findings("a.rs", "fn a_b_c_d_e_f_g_h_i() {}"), [""; 0]);
    }
}
