//! Text that came from a peer or from the file system, made harmless for a terminal and for a log.

/// Escapes everything that is not plainly visible: control characters (a terminal obeys them), format characters such as
/// U+202E (they reverse or hide what is beside them) and line breaks (they forge lines of a log). Quotes and backslashes
/// stay as they are, so that escaping twice changes nothing.
pub fn printable(text: &str) -> String {
    text.chars().map(visible).collect()
}

/// A character as [`printable`] shows it.
pub fn visible(c: char) -> String {
    if matches!(c, '\'' | '"' | '\\') {
        return c.to_string();
    }
    // Behind a letter, because `escape_debug` escapes an accent that stands alone, and accents may follow a letter.
    let pair = String::from_iter(['a', c]);
    pair.escape_debug().skip(1).collect()
}

#[cfg(test)]
mod tests {
    use super::printable;

    #[test]
    fn what_a_terminal_would_obey_is_escaped() {
        for (text, shown) in [
            ("it's \"C:\\x\"", "it's \"C:\\x\""),
            // Letters of every script stay, also those that are written with combining accents.
            ("d/ä/文/e\u{301}", "d/ä/文/e\u{301}"),
            ("\u{1b}[2Jx", "\\u{1b}[2Jx"),
            ("a\nb\r\u{9b}", "a\\nb\\r\\u{9b}"),
            ("gpj.\u{202e}exe", "gpj.\\u{202e}exe"),
            ("\u{2066}\u{200b}\u{feff}", "\\u{2066}\\u{200b}\\u{feff}"),
            ("\u{2028}\u{e0041}", "\\u{2028}\\u{e0041}"),
        ] {
            assert_eq!(printable(text), shown);
            assert_eq!(printable(shown), shown, "twice");
        }
    }
}
