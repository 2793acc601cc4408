//! A tokenizer of Rust code that is sufficient to find paths. It omits tests.

use crate::tidy::code::code_only;

/// A name, `::`, or another character.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Token {
    Name(String),
    Colons,
    Mark(char),
}

impl Token {
    pub(super) fn is_mark(&self, mark: char) -> bool {
        *self == Self::Mark(mark)
    }

    pub(super) fn name(&self) -> Option<&str> {
        match self {
            Self::Name(name) => Some(name),
            _ => None,
        }
    }

    fn is(&self, word: &str) -> bool {
        self.name() == Some(word)
    }
}

/// Returns the tokens of a text, without comments, literals and items for tests.
pub(super) fn tokens(text: &str) -> Vec<Token> {
    without_tests(&split(&code_only(text)))
}

fn split(code: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    let mut rest = code.trim_start();
    while let Some(first) = rest.chars().next() {
        let is_part = |c: char| c.is_alphanumeric() || c == '_';
        let len = if is_part(first) {
            let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
            tokens.push(Token::Name(rest[..end].to_owned()));
            end
        } else if rest.starts_with("::") {
            tokens.push(Token::Colons);
            2
        } else {
            tokens.push(Token::Mark(first));
            first.len_utf8()
        };
        rest = rest[len..].trim_start();
    }
    tokens
}

/// Removes each item that has an attribute `cfg(test)` or `cfg(all(test, …))`.
fn without_tests(tokens: &[Token]) -> Vec<Token> {
    let mut kept = Vec::new();
    let mut index = 0;
    while index < tokens.len() {
        if let Some(len) = test_attribute_len(&tokens[index..]) {
            index += len;
            index += item_len(&tokens[index..]);
        } else {
            kept.push(tokens[index].clone());
            index += 1;
        }
    }
    kept
}

/// If the tokens begin with an attribute for tests, returns its length.
fn test_attribute_len(tokens: &[Token]) -> Option<usize> {
    let [hash, open, cfg, paren, first, ..] = tokens else {
        return None;
    };
    if !(hash.is_mark('#') && open.is_mark('[') && cfg.is("cfg") && paren.is_mark('(')) {
        return None;
    }
    let end = tokens.iter().position(|token| token.is_mark(']'))? + 1;
    let all = first.is("all") && tokens[..end].iter().any(|token| token.is("test"));
    let negated = tokens[..end]
        .windows(3)
        .any(|three| three[0].is("not") && three[1].is_mark('(') && three[2].is("test"));
    (first.is("test") || all && !negated).then_some(end)
}

/// Returns the length of the first item of the tokens. It ends with a semicolon or with its closing
/// brace.
fn item_len(tokens: &[Token]) -> usize {
    let opening = tokens.iter().position(|token| token.is_mark('{'));
    let before = &tokens[..opening.unwrap_or(0)];
    let is_import = before.iter().any(|token| token.is("use"));
    let mut depth = 0_usize;
    for (index, token) in tokens.iter().enumerate() {
        match token {
            Token::Mark('{' | '(' | '[') => depth += 1,
            Token::Mark('}' | ')' | ']') => {
                depth = depth.saturating_sub(1);
                if depth == 0 && token.is_mark('}') && !is_import {
                    return index + 1;
                }
            }
            Token::Mark(';') if depth == 0 => return index + 1,
            _ => {}
        }
    }
    tokens.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> String {
        let tokens = tokens(text);
        let names: Vec<&str> = tokens.iter().filter_map(Token::name).collect();
        names.join(" ")
    }

    #[test]
    fn tests_are_omitted() {
        let text = "a; #[cfg(test)] mod tests { b::<[u8; 2]>(); } c;";
        assert_eq!(names(text), "a c");
        assert_eq!(names("#[cfg(test)] use b::{c, d}; e"), "e");
        assert_eq!(names("#[cfg(test)] #[path = \"x\"] mod tests; e"), "e");
        assert_eq!(names("#[cfg(all(test, unix))] fn b(c: [u8; 2]) {} d"), "d");
    }

    #[test]
    fn other_items_are_kept() {
        assert_eq!(names("#[cfg(not(test))] a;"), "cfg not test a");
        assert_eq!(names("#[cfg(any(test, b))] c;"), "cfg any test b c");
        assert_eq!(
            names("#[cfg(all(unix, not(test)))] a;"),
            "cfg all unix not test a"
        );
        assert_eq!(names("#[cfg(unix)] a; // b\n\"c\""), "cfg unix a");
    }
}
