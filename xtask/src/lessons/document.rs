//! Reads the commands of a lesson, and the output that it shows for them.
//!
//! A block of the language `console` contains commands with their output. A line that begins with
//! a prompt, `$ ` or `NAME$ `, is a command; the lines up to the next prompt are its output. `NAME`
//! is a terminal of its own.

/// The line of the output that stands for any number of lines.
pub(super) const ANY_LINES: &str = "…";
/// The line of the output after which the reader stops the program.
pub(super) const INTERRUPT: &str = "^C";

/// A command of a lesson.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shown {
    /// The terminal; empty in a lesson that needs only one.
    pub(super) terminal: String,
    /// What the reader types.
    pub(super) command: String,
    /// The lines of output, without [`INTERRUPT`].
    pub(super) output: Vec<String>,
    /// Whether the reader stops the program.
    pub(super) interrupted: bool,
    /// The index of the command's line in the document.
    pub(super) line: usize,
}

/// Returns the commands of a document in their order.
pub(super) fn commands(text: &str) -> Vec<Shown> {
    let mut found: Vec<Shown> = Vec::new();
    let (mut fenced, mut console) = (false, false);
    for (at, line) in text.lines().enumerate() {
        if let Some(language) = line.strip_prefix("```") {
            fenced = !fenced;
            console = fenced && language == "console";
            continue;
        }
        if !console {
            continue;
        }
        if let Some((terminal, command)) = prompt(line) {
            found.push(Shown {
                terminal: terminal.to_owned(),
                command: command.to_owned(),
                output: Vec::new(),
                interrupted: false,
                line: at,
            });
        } else if let Some(last) = found.last_mut() {
            if line == INTERRUPT {
                last.interrupted = true;
            } else {
                last.output.push(line.to_owned());
            }
        }
    }
    found
}

/// Splits a line into terminal and command, if it begins with a prompt.
fn prompt(line: &str) -> Option<(&str, &str)> {
    let (terminal, command) = line.split_once("$ ")?;
    let name = terminal
        .chars()
        .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    name.then_some((terminal, command))
}

/// Returns the document with other output for one of its commands.
pub(super) fn with_output(text: &str, shown: &Shown, output: &[String]) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let first = shown.line + 1;
    let mut new: Vec<&str> = lines[..first].to_vec();
    new.extend(output.iter().map(String::as_str));
    new.extend(&lines[first + shown.output.len()..]);
    new.join("\n") + "\n"
}

/// Returns `true` if a program may have printed `actual` where the document shows `expected`.
///
/// Numbers with a fraction and hexadecimal numbers may differ, because times and keys do. The
/// number of spaces between words may differ, too.
pub(super) fn matches(expected: &[String], actual: &[String]) -> bool {
    match expected.split_first() {
        None => actual.is_empty(),
        Some((first, rest)) if first == ANY_LINES => {
            (0..=actual.len()).any(|skipped| matches(rest, &actual[skipped..]))
        }
        Some((first, rest)) => actual
            .split_first()
            .is_some_and(|(line, others)| general(first) == general(line) && matches(rest, others)),
    }
}

/// Returns a line with placeholders for the numbers that may differ.
fn general(line: &str) -> String {
    let words = line.split_whitespace().map(general_word);
    words.collect::<Vec<_>>().join(" ")
}

fn general_word(word: &str) -> String {
    let number = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '_';
    let mut out = String::new();
    let mut rest = word;
    while !rest.is_empty() {
        let end = rest.find(|c| !number(c)).unwrap_or(rest.len());
        let (part, others) = rest.split_at(end);
        // A full stop ends a sentence, and belongs to no number.
        let trimmed = part.trim_end_matches('.');
        out += if varies(trimmed) { "#" } else { trimmed };
        out += &part[trimmed.len()..];
        let mut others = others.chars();
        out.extend(others.next());
        rest = others.as_str();
    }
    out
}

/// Returns `true` for numbers like `0x1f` and `1.25`.
fn varies(part: &str) -> bool {
    let all = |text: &str, allowed: fn(&char) -> bool| {
        !text.is_empty() && text.chars().all(|c| allowed(&c))
    };
    match (part.strip_prefix("0x"), part.split_once('.')) {
        (Some(digits), _) => all(digits, char::is_ascii_hexdigit),
        (None, Some((whole, fraction))) => {
            all(whole, char::is_ascii_digit) && all(fraction, char::is_ascii_digit)
        }
        (None, None) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# A lesson\n\n```sh\n$ not run\n```\n\n```console\n$ make\nserver$ ./a\n\
                        ready\n^C\nclient$ ./b $HOME\n```\n\nText.\n";

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn commands_and_output_are_found() {
        let found = commands(TEXT);
        let shown: Vec<_> = found
            .iter()
            .map(|c| {
                (
                    c.terminal.as_str(),
                    c.command.as_str(),
                    c.output.len(),
                    c.interrupted,
                )
            })
            .collect();
        assert_eq!(
            shown,
            [
                ("", "make", 0, false),
                ("server", "./a", 1, true),
                ("client", "./b $HOME", 0, false),
            ]
        );
    }

    #[test]
    fn output_is_replaced() {
        let shown = &commands(TEXT)[1];
        let new = with_output(TEXT, shown, &lines("one\ntwo"));
        assert_eq!(new, TEXT.replace("ready\n", "one\ntwo\n"));
        assert_eq!(with_output(&new, &commands(&new)[1], &lines("ready")), TEXT);
    }

    #[test]
    fn only_keys_and_measured_numbers_may_differ() {
        let same = |a: &str, b: &str| matches(&lines(a), &lines(b));
        assert!(same("key 0x1f, 1.25 s.", "key  0x2e, 10.5 s."));
        assert!(!same("5 messages", "6 messages"));
        assert!(!same("127.0.0.1", "127.0.0.2"));
        assert!(!same("key 0x1f", "key 1.5x"));
        assert!(!same("a", "a\nb"));
        assert!(!same("a\nb", "a"));
        assert!(same("a\n…\nc", "a\nb\nb\nc"));
        assert!(same("a\n…", "a"));
        assert!(!same("a\n…\nc", "a\nb"));
    }
}
