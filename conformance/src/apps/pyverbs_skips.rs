//! Which of rdma-core's tests need not pass on a device. A data file in TOML lists them with the
//! reasons.

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Expected {
    #[serde(default)]
    skip: Vec<Skip>,
    /// The tests that fail instead of skipping themselves.
    #[serde(default)]
    fail: Vec<Fail>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Skip {
    reason: String,
    #[serde(default)]
    messages: Vec<String>,
    /// Beginnings of messages.
    #[serde(default)]
    beginnings: Vec<String>,
    /// The tests, by module, class and name. If there are none, any test with such a message may be
    /// skipped.
    #[serde(default)]
    tests: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fail {
    reason: String,
    tests: Vec<String>,
}

impl Skip {
    fn covers(&self, test: &str, message: &str) -> bool {
        let begins = |text: &String| message.starts_with(text.as_str());
        let said = self.messages.iter().any(|m| m == message) || self.beginnings.iter().any(begins);
        said && (self.tests.is_empty() || self.tests.iter().any(|name| name == test))
    }
}

impl Expected {
    /// Reads a data file.
    ///
    /// Fails if the format is wrong, or a row lacks a reason or a message.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let all: Self = toml::from_str(text).context("a list of tests that need not pass")?;
        for row in &all.skip {
            ensure!(
                !row.reason.is_empty() && row.messages.len() + row.beginnings.len() > 0,
                "a row has no reason or no message: {row:?}"
            );
        }
        for row in &all.fail {
            ensure!(!row.reason.is_empty(), "a row has no reason: {row:?}");
        }
        Ok(all)
    }

    /// Returns the reason why a test may be skipped with a message.
    pub(super) fn skipped(&self, test: &str, message: &str) -> Option<&str> {
        let row = self.skip.iter().find(|row| row.covers(test, message))?;
        Some(&row.reason)
    }

    /// Returns the reason why a test fails.
    pub(super) fn fails(&self, test: &str) -> Option<&str> {
        let row = self
            .fail
            .iter()
            .find(|row| row.tests.iter().any(|name| name == test))?;
        Some(&row.reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_need_reason_and_message() {
        let row = |reason, messages| {
            Expected::parse(&format!(
                "[[skip]]\nreason = {reason:?}\nmessages = {messages}\n"
            ))
        };
        assert!(row("why", "['said']").is_ok());
        assert!(row("", "['said']").is_err());
        assert!(row("why", "[]").is_err());
        assert!(Expected::parse("[[fail]]\nreason = ''\ntests = ['a']\n").is_err());
        assert!(Expected::parse("[[other]]\n").is_err());
    }

    #[test]
    fn our_skips_name_tests_and_messages() {
        let all = Expected::parse(super::super::pyverbs::EXPECTED).unwrap();
        assert!(all.fail.is_empty() && !all.skip.is_empty());
        for row in &all.skip {
            assert!(
                row.beginnings.is_empty() && !row.tests.is_empty(),
                "{row:?}"
            );
        }
    }
}
