//! Errors of a specification, with their position.

use super::kinds::KINDS;
use std::fmt;
use std::ops::Range;

/// Why a specification of faults is invalid.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mistake {
    /// There are no rules.
    NoRule,
    /// Unknown name of a fault.
    UnknownKind(String),
    /// Unknown name of an option, or an option of other faults.
    UnknownKey {
        /// The name.
        key: String,
        /// Options of the fault.
        known: Vec<&'static str>,
    },
    /// A value is missing.
    NoValue(&'static str),
    /// The fault takes no value.
    NeedlessValue,
    /// Invalid value; the text says what is expected.
    Value(&'static str),
    /// The option occurs twice.
    Twice,
    /// Options that exclude each other.
    Excludes(&'static str, &'static str),
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRule => f.write_str("there is no rule"),
            Self::UnknownKind(name) => {
                write!(f, "there is no fault '{name}', but ")?;
                let names = KINDS.iter().map(|kind| kind.name);
                f.write_str(&names.collect::<Vec<_>>().join(", "))
            }
            Self::UnknownKey { key, known } => {
                write!(f, "this fault has no option '{key}', but ")?;
                f.write_str(&known.join(", "))
            }
            Self::NoValue(wanted) => write!(f, "a value is missing: {wanted}"),
            Self::NeedlessValue => f.write_str("this fault takes no value"),
            Self::Value(wanted) => write!(f, "wanted: {wanted}"),
            Self::Twice => f.write_str("given twice"),
            Self::Excludes(a, b) => write!(f, "'{a}' and '{b}' exclude each other"),
        }
    }
}

/// An invalid specification of faults. Its text contains the specification and a line that marks
/// the error.
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
        // A control character would misplace the mark.
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
