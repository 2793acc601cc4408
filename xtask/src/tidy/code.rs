//! Replaces comments and literals by spaces, so that rules check code only.

/// Returns the text with all comments, string literals and character literals replaced by spaces.
/// Line breaks stay, so that line numbers stay the same.
pub(crate) fn code_only(text: &str) -> String {
    let mut scanner = Scanner {
        rest: text,
        out: String::with_capacity(text.len()),
        last: ' ',
    };
    while !scanner.rest.is_empty() {
        scanner.step();
    }
    scanner.out
}

struct Scanner<'a> {
    rest: &'a str,
    out: String,
    /// The last character of code. An `r` after a character of a name does not start a raw string.
    last: char,
}

impl Scanner<'_> {
    fn step(&mut self) {
        if self.rest.starts_with("//") {
            let end = self.rest.find('\n').unwrap_or(self.rest.len());
            self.blank(end);
        } else if self.rest.starts_with("/*") {
            let end = block_comment_end(self.rest);
            self.blank(end);
        } else if let Some(end) = self.raw_string_end().or_else(|| string_end(self.rest)) {
            self.blank(end);
        } else if let Some(end) = char_end(self.rest) {
            self.blank(end);
        } else if let Some(next) = self.rest.chars().next() {
            self.out.push(next);
            self.last = next;
            self.rest = &self.rest[next.len_utf8()..];
        }
    }

    fn blank(&mut self, end: usize) {
        self.out.extend(
            self.rest[..end]
                .chars()
                .map(|c| if c == '\n' { c } else { ' ' }),
        );
        self.rest = &self.rest[end..];
        self.last = ' ';
    }

    /// Returns the end of a raw string that starts here: `r"…"` or `r#"…"#`, also with `b` or `c`
    /// before it.
    fn raw_string_end(&self) -> Option<usize> {
        if self.last.is_alphanumeric() || self.last == '_' {
            return None;
        }
        let after_kind = self.rest.strip_prefix(['b', 'c']).unwrap_or(self.rest);
        let after_r = after_kind.strip_prefix('r')?;
        let body = after_r.trim_start_matches('#');
        let hashes = after_r.len() - body.len();
        let body = body.strip_prefix('"')?;
        let close = format!("\"{}", "#".repeat(hashes));
        let start = self.rest.len() - body.len();
        Some(
            body.find(&close)
                .map_or(self.rest.len(), |at| start + at + close.len()),
        )
    }
}

fn block_comment_end(text: &str) -> usize {
    let mut depth = 0_usize;
    let mut at = 0;
    while at < text.len() {
        let rest = &text.as_bytes()[at..];
        if rest.starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest.starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    text.len()
}

fn string_end(text: &str) -> Option<usize> {
    let body = text.strip_prefix('"')?;
    let mut escaped = false;
    for (at, c) in body.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return Some(1 + at + 1),
            _ => {}
        }
    }
    Some(text.len())
}

/// Returns the end of a character literal that starts here, or `None` for a lifetime.
fn char_end(text: &str) -> Option<usize> {
    let mut chars = text.strip_prefix('\'')?.char_indices();
    let (_, first) = chars.next()?;
    if first == '\\' {
        // The escaped character may be a quote itself, so the search starts after it.
        chars.next();
        return chars.find(|&(_, c)| c == '\'').map(|(at, _)| 1 + at + 1);
    }
    chars
        .next()
        .filter(|&(_, c)| c == '\'')
        .map(|(at, _)| 1 + at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> String {
        code_only(text)
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
    }

    #[test]
    fn comments_are_blanked() {
        assert_eq!(words("a // b\nc /* d /* e */ f */ g"), "a c g");
        assert_eq!(code_only("a // b\nc").lines().count(), 2);
        assert_eq!(words("/* open"), "");
    }

    #[test]
    fn literals_are_blanked() {
        assert_eq!(words(r#"a "b \" // c" d"#), "a d");
        assert_eq!(words("a r#\"b \" c\"# d br\"\\\" e"), "a d e");
        assert_eq!(words(r"a '\'' b '\u{1}' c 'x' d"), "a b c d");
        assert_eq!(words("a b\"x\" c"), "a b c");
    }

    #[test]
    fn lifetimes_and_names_stay() {
        assert_eq!(words("fn f<'a>(x: &'a str)"), "fn f<'a>(x: &'a str)");
        assert_eq!(words("for x in r { bar }"), "for x in r { bar }");
    }
}
