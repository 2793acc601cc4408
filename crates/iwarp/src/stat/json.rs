//! Writes JSON (RFC 8259). A library with a parser is not needed here.

use std::fmt::{Display, Write as _};

/// A JSON writer. It inserts commas; the caller closes brackets in the right order.
#[derive(Debug, Default)]
pub(super) struct Json {
    text: String,
    /// `true` if the next value needs a comma before it.
    comma: bool,
}

impl Json {
    /// Returns the text written since the last call.
    pub(super) fn take(&mut self) -> String {
        std::mem::take(&mut self.text)
    }

    fn separate(&mut self) {
        if std::mem::replace(&mut self.comma, true) {
            self.text.push(',');
        }
    }

    pub(super) fn open(&mut self, bracket: char) {
        self.separate();
        self.text.push(bracket);
        self.comma = false;
    }

    pub(super) fn close(&mut self, bracket: char) {
        self.text.push(bracket);
        self.comma = true;
    }

    /// Writes the name of the next member.
    pub(super) fn name(&mut self, name: &str) {
        self.string(name);
        self.text.push(':');
        self.comma = false;
    }

    /// Writes a string. Escapes quotes, backslashes and control characters, as JSON requires.
    pub(super) fn string(&mut self, value: &str) {
        self.separate();
        self.text.push('"');
        for c in value.chars() {
            match c {
                '"' | '\\' => self.text.extend(['\\', c]),
                '\u{0}'..='\u{1f}' => {
                    let _ = write!(self.text, "\\u{:04x}", u32::from(c));
                }
                c => self.text.push(c),
            }
        }
        self.text.push('"');
    }

    /// Writes a member that is a string, or null for `None`.
    pub(super) fn text_of(&mut self, name: &str, value: Option<impl Display>) {
        self.name(name);
        match value {
            Some(value) => self.string(&value.to_string()),
            None => self.bare("null"),
        }
    }

    /// Writes a member that is a whole number, or null for `None`.
    pub(super) fn number_of(&mut self, name: &str, value: Option<u64>) {
        self.name(name);
        match value {
            Some(value) => self.bare(value),
            None => self.bare("null"),
        }
    }

    fn bare(&mut self, value: impl Display) {
        self.separate();
        let _ = write!(self.text, "{value}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_escapes_and_brackets() {
        let mut j = Json::default();
        j.open('{');
        j.text_of("a", Some("q\"b\\n\n\u{1b}é\u{202e}"));
        j.number_of("n", Some(u64::MAX));
        j.number_of("none", None);
        j.name("list");
        j.open('[');
        for _ in 0..2 {
            j.open('{');
            j.close('}');
        }
        j.close(']');
        let first = j.take();
        j.name("last");
        j.open('[');
        j.close(']');
        j.close('}');
        assert_eq!(
            first + &j.take(),
            "{\"a\":\"q\\\"b\\\\n\\u000a\\u001bé\u{202e}\",\"n\":18446744073709551615,\
             \"none\":null,\"list\":[{},{}],\"last\":[]}"
        );
    }
}
