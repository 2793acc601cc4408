//! Faults that a device injects, to test what a program does about them: the grammar of `IWARP_FAULT` and `iwarp run --fault`, and its parser.
//!
//! ```
//! use iwarp::verbs::{Config, Context, Device};
//!
//! # fn main() -> iwarp::Result<()> {
//! let mut config = Config::default();
//! config.fault = Some("seed=7;create=cq,nth=2;log=/dev/null".parse().unwrap());
//! let ctx = Context::open(&Device::by_address([127, 0, 0, 1].into())?, config)?;
//! assert!(ctx.create_cq(1, None).is_ok());
//! assert!(ctx.create_cq(1, None).is_err());
//! assert!(ctx.create_cq(1, None).is_ok());
//! # Ok(())
//! # }
//! ```
//!
//! ```text
//! SPEC = ITEM *( ";" ITEM )
//! ITEM = "seed=" NUMBER / "log=" FILE / RULE
//! RULE = KIND [ "=" VALUE ] *( "," KEY "=" VALUE )
//! ```
//! A rule says what happens (`Kind`), to whom (`Select`), when (`When`) and how often. This module knows nothing of queue pairs:
//! `inject` carries a specification out. `kinds` has one table of all kinds, which the parser and the help text share, and `names`
//! the names that the verbs have for statuses, events and errors.

mod error;
mod kinds;
mod names;
mod parse;
mod values;

pub use error::{Mistake, SpecError};
#[cfg(test)]
use kinds::Object;
pub(crate) use kinds::{Kind, Point};
pub(crate) use names::Event;
pub(crate) use values::{Chance, Directions, Ops, PeerFilter, QpFilter, Span};

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The faults that a device injects ([`Config::fault`](crate::Config::fault)): parsed from text, for example `"seed=7;reset,bytes=64K"`.
///
/// [`Spec::help`] lists what can be asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// The text that it was parsed from.
    text: String,
    /// What random choices depend on; `None` takes a new one for each process.
    pub(crate) seed: Option<u64>,
    /// Where injected faults are noted; `None` is standard error.
    pub(crate) log: Option<PathBuf>,
    pub(crate) rules: Vec<Rule>,
}

impl Spec {
    /// Returns a text for a terminal that says which faults there are and how a specification is written.
    pub fn help() -> String {
        kinds::help()
    }

    /// Takes the log file in the directory `dir` if its name is relative, so that a program may change its directory before it opens a device.
    #[must_use]
    pub fn logging_in(mut self, dir: &Path) -> Self {
        if let Some(log) = &mut self.log {
            *log = dir.join(&*log);
            let is_log = |item: &&str| {
                item.split('=')
                    .next()
                    .is_some_and(|key| key.trim() == "log")
            };
            let others: Vec<_> = self.text.split(';').filter(|item| !is_log(item)).collect();
            self.text = format!("{};log={}", others.join(";"), log.display());
        }
        self
    }
}

impl FromStr for Spec {
    type Err = SpecError;

    /// Parses a specification.
    ///
    /// # Errors
    /// [`SpecError`] names the first mistake and its place.
    fn from_str(text: &str) -> Result<Self, SpecError> {
        parse::spec(text)
    }
}

impl fmt::Display for Spec {
    /// The text that it was parsed from.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// One rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rule {
    pub(crate) kind: Kind,
    pub(crate) select: Select,
    pub(crate) when: When,
    /// The earliest time, counted from the opening of the first device, in nanoseconds.
    pub(crate) not_before: Option<Span>,
    /// How often it acts in the whole process; `None` is without limit.
    pub(crate) times: Option<u64>,
    /// The directions that it affects.
    pub(crate) directions: Directions,
}

impl Rule {
    /// Returns `true` if it acts by itself when its time has come, without any request or octets.
    pub(crate) fn is_timed(&self) -> bool {
        self.not_before.is_some() && self.when == When::Any && self.kind.point() == Point::Request
    }
}

/// Whom a rule concerns. What is not given concerns everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Select {
    pub(crate) qp: Option<QpFilter>,
    pub(crate) peer: Option<PeerFilter>,
    pub(crate) ops: Option<Ops>,
}

/// Which of the opportunities of a rule are taken. Each queue pair counts its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    /// All.
    Any,
    /// The one with this number, from 1.
    Nth(Span),
    /// Each one whose number is a multiple of this.
    Every(u64),
    /// Each one with this probability.
    Chance(Chance),
    /// The moment when so many octets of the connection have passed, in the rule's direction.
    Bytes(Span),
}

#[cfg(test)]
mod tests;
