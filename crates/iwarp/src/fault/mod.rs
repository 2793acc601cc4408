//! Injected faults of a device, to test how programs handle them: the grammar of `IWARP_FAULT` and
//! `iwarp run --fault`, and its parser.
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
//! A rule consists of the fault (`Kind`), its targets (`Select`), its time (`When`) and its
//! frequency. This module only parses; `inject` applies a specification. `kinds` contains the table
//! of faults, which the parser and the help text share. `names` contains the names of statuses,
//! events and errors in verbs.

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

/// Faults that a device injects ([`Config::fault`](crate::Config::fault)), parsed from text such as
/// `"seed=7;reset,bytes=64K"`. [`Spec::help`] lists the faults.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    text: String,
    /// Seed of random choices; `None` chooses one per process.
    pub(crate) seed: Option<u64>,
    /// Log of injected faults; `None` is standard error.
    pub(crate) log: Option<PathBuf>,
    pub(crate) rules: Vec<Rule>,
}

impl Spec {
    /// Returns the help text: the faults and the syntax of a specification.
    pub fn help() -> String {
        kinds::help()
    }

    /// Makes the path of the log file absolute, relative to `dir`. Then the program can change its
    /// working directory before it opens a device.
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
    /// [`SpecError`] describes the first error and its position.
    fn from_str(text: &str) -> Result<Self, SpecError> {
        parse::spec(text)
    }
}

impl fmt::Display for Spec {
    /// Writes the text as parsed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rule {
    pub(crate) kind: Kind,
    pub(crate) select: Select,
    pub(crate) when: When,
    /// Earliest time, relative to the opening of the first device, in nanoseconds.
    pub(crate) not_before: Option<Span>,
    /// Maximum number of injections in the process; `None` is unlimited.
    pub(crate) times: Option<u64>,
    pub(crate) directions: Directions,
}

impl Rule {
    /// Returns `true` if the rule injects its fault at its time, without an opportunity.
    pub(crate) fn is_timed(&self) -> bool {
        self.not_before.is_some() && self.when == When::Any && self.kind.point() == Point::Request
    }
}

/// Targets of a rule. Absent values select everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Select {
    pub(crate) qp: Option<QpFilter>,
    pub(crate) peer: Option<PeerFilter>,
    pub(crate) ops: Option<Ops>,
}

/// At which opportunities a rule injects its fault. Opportunities are counted per queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    Any,
    /// The opportunity with this number, from 1.
    Nth(Span),
    /// Each opportunity whose number is a multiple of this.
    Every(u64),
    /// Each opportunity with this probability.
    Chance(Chance),
    /// When this number of octets has passed on the connection, in the rule's direction.
    Bytes(Span),
}

#[cfg(test)]
mod tests;
