//! Errors in a fault specification, with their position.

use super::kinds::KINDS;
use std::fmt;
use std::ops::Range;

/// The cause of an error in a fault specification.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mistake {
    /// The specification has no rules.
    NoRule,
    /// Unknown name of a fault.
    UnknownKind(String),
    /// The option is unknown, or not an option of this fault.
    UnknownKey {
        /// The option's name.
        key: String,
        /// The options of the fault.
        known: Vec<&'static str>,
    },
    /// A value is missing.
    NoValue(&'static str),
    /// The fault takes no value.
    NeedlessValue,
    /// The value is invalid; the text describes valid values.
    Value(&'static str),
    /// The option occurs twice.
    Twice,
    /// The two options cannot be combined.
    Excludes(&'static str, &'static str),
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRule => f.write_str("no rule: at least one fault is needed"),
            Self::UnknownKind(name) => {
                write!(f, "unknown fault '{name}'; faults are: ")?;
                let names = KINDS.iter().map(|kind| kind.name);
                f.write_str(&names.collect::<Vec<_>>().join(", "))
            }
            Self::UnknownKey { key, known } => {
                write!(f, "this fault has no option '{key}'; its options are: ")?;
                f.write_str(&known.join(", "))
            }
            Self::NoValue(wanted) => write!(f, "missing value: {wanted}"),
            Self::NeedlessValue => f.write_str("this fault takes no value"),
            Self::Value(wanted) => write!(f, "invalid value; expected {wanted}"),
            Self::Twice => f.write_str("option given twice"),
            Self::Excludes(a, b) => write!(f, "'{a}' and '{b}' cannot be combined"),
        }
    }
}

/// An error in a fault specification. Its text contains the specification, and a line below it
/// marks the error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecError {
    pub(super) spec: String,
    pub(super) at: Range<usize>,
    pub(super) mistake: Mistake,
}

impl SpecError {
    /// Returns the cause.
    pub fn mistake(&self) -> &Mistake {
        &self.mistake
    }

    /// Returns the byte range of the error in the specification.
    pub fn at(&self) -> Range<usize> {
        self.at.clone()
    }
}

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let before = self.spec.get(..self.at.start).unwrap_or_default();
        let wrong = self.spec.get(self.at.clone()).unwrap_or_default();
        let (indent, width) = (before.chars().count(), wrong.chars().count().max(1));
        // A control character would shift the mark.
        let shown: String = self
            .spec
            .chars()
            .map(|c| if c.is_control() { '?' } else { c })
            .collect();
        write!(
            f,
            "{}\n  {shown}\n  {:indent$}{}",
            self.mistake,
            "",
            "^".repeat(width)
        )
    }
}

impl std::error::Error for SpecError {}
