//! Escapes untrusted text (from peers, from file names) for terminals and logs.

/// Escapes everything that is not plainly visible: control characters, which terminals interpret;
/// format characters such as U+202E, which reverse or hide text; and line breaks, which forge log
/// lines. Quotes and backslashes are kept, so that escaping twice changes nothing.
pub fn printable(text: &str) -> String {
    text.chars().map(visible).collect()
}

/// Returns a character as [`printable`] shows it.
pub fn visible(c: char) -> String {
    if matches!(c, '\'' | '"' | '\\') {
        return c.to_string();
    }
    // `escape_debug` escapes a combining accent only at the start, so put a letter in front.
    let pair = String::from_iter(['a', c]);
    pair.escape_debug().skip(1).collect()
}

#[cfg(test)]
mod tests {
    use super::printable;

    #[test]
    fn terminal_controls_are_escaped() {
        for (text, shown) in [
            ("it's \"C:\\x\"", "it's \"C:\\x\""),
            // Letters of every script are kept, with combining accents.
            ("d/ä/文/e\u{301}", "d/ä/文/e\u{301}"),
            ("\u{1b}[2Jx", "\\u{1b}[2Jx"),
            ("a\nb\r\u{9b}", "a\\nb\\r\\u{9b}"),
            ("gpj.\u{202e}exe", "gpj.\\u{202e}exe"),
            ("\u{2066}\u{200b}\u{feff}", "\\u{2066}\\u{200b}\\u{feff}"),
            ("\u{2028}\u{e0041}", "\\u{2028}\\u{e0041}"),
        ] {
            assert_eq!(printable(text), shown);
            assert_eq!(printable(shown), shown, "escaping twice");
        }
    }
}
