//! The tests of rdma-core that may be skipped or fail on a device. A TOML file lists them with the
//! reasons.

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Expected {
    #[serde(default)]
    skip: Vec<Skip>,
    /// The tests that fail, because they do not check whether the feature is supported.
    #[serde(default)]
    fail: Vec<Fail>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Skip {
    reason: String,
    #[serde(default)]
    messages: Vec<String>,
    /// Prefixes of messages.
    #[serde(default)]
    beginnings: Vec<String>,
    /// The tests, as `MODULE.CLASS.NAME`. If empty, any test with such a message may be skipped.
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
        let has_prefix = |text: &String| message.starts_with(text.as_str());
        let message_matches =
            self.messages.iter().any(|m| m == message) || self.beginnings.iter().any(has_prefix);
        message_matches && (self.tests.is_empty() || self.tests.iter().any(|name| name == test))
    }
}

impl Expected {
    /// Parses a TOML file.
    ///
    /// Fails if the format is invalid, or an entry has no reason or no message.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let all: Self =
            toml::from_str(text).context("invalid list of tests that may be skipped or fail")?;
        for row in &all.skip {
            ensure!(
                !row.reason.is_empty() && row.messages.len() + row.beginnings.len() > 0,
                "an entry has no reason or no message: {row:?}"
            );
        }
        for row in &all.fail {
            ensure!(!row.reason.is_empty(), "an entry has no reason: {row:?}");
        }
        Ok(all)
    }

    /// Returns the reason why a test may be skipped with this message, if it may.
    pub(super) fn skip_reason(&self, test: &str, message: &str) -> Option<&str> {
        let row = self.skip.iter().find(|row| row.covers(test, message))?;
        Some(&row.reason)
    }

    /// Returns the reason why a test may fail, if it may.
    pub(super) fn fail_reason(&self, test: &str) -> Option<&str> {
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
    fn entries_need_reason_and_message() {
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
    fn our_entries_name_exact_messages_and_tests() {
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
