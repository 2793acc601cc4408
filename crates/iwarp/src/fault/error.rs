//! Mistakes in a specification, with their place.

use super::kinds::KINDS;
use std::fmt;
use std::ops::Range;

/// Why a specification of faults was not understood.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mistake {
    /// There is no rule.
    NoRule,
    /// No fault has this name.
    UnknownKind(String),
    /// No option has this name, or this fault does not have it.
    UnknownKey {
        /// The name.
        key: String,
        /// Those that the fault has.
        known: Vec<&'static str>,
    },
    /// A value is missing.
    NoValue(&'static str),
    /// The fault takes no value.
    NeedlessValue,
    /// A value that is not understood, and what is wanted.
    Value(&'static str),
    /// The option stands there twice.
    Twice,
    /// Of these options a rule can have one.
    Excludes(&'static str, &'static str),
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRule => f.write_str("no fault is asked for"),
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

/// A specification of faults that was not understood. Its text has the specification and a line below it that points at the mistake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecError {
    pub(super) spec: String,
    pub(super) at: Range<usize>,
    pub(super) mistake: Mistake,
}

impl SpecError {
    /// Returns what is wrong.
    pub fn mistake(&self) -> &Mistake {
        &self.mistake
    }

    /// Returns the octets of the specification that are wrong.
    pub fn at(&self) -> Range<usize> {
        self.at.clone()
    }
}

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let before = self.spec.get(..self.at.start).unwrap_or_default();
        let wrong = self.spec.get(self.at.clone()).unwrap_or_default();
        let (indent, width) = (before.chars().count(), wrong.chars().count().max(1));
        // A control character would break the line that points at the place.
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
