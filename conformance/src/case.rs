//! A case: one check of a suite, and what the machine must have to run it.
//!
//! `run` also compares the result with what is expected, because the expectation is seldom a value:
//! most cases check what several programs print. The attacks of `cargo xtask interop hostile` are
//! no cases: each is run against several servers, next to a client whose latencies are reported.

use std::time::Duration;

use anyhow::Result;

use crate::needs::Need;

/// The result of a case that did not fail: passed with a note, or skipped with the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    Passed(String),
    Skipped(String),
}

impl Verdict {
    pub(crate) fn passed(note: impl Into<String>) -> Self {
        Self::Passed(note.into())
    }

    pub(crate) fn skipped(why: impl Into<String>) -> Self {
        Self::Skipped(why.into())
    }
}

type Run<E> = Box<dyn Fn(&E) -> Result<Verdict> + Send + Sync>;

/// The default time limit of a case: enough for a quick program on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// One check. `E` is the environment in which its suite runs it.
pub(crate) struct Case<E: ?Sized> {
    /// The name that `--only` is compared with.
    pub(crate) name: String,
    pub(crate) needs: Vec<Need>,
    /// The case runs with `--all` or `--only`, but not by default.
    pub(crate) long: bool,
    /// The case does not run concurrently with others, because its programs busy-poll.
    pub(crate) busy_polls: bool,
    pub(crate) limit: Duration,
    pub(crate) run: Run<E>,
}

impl<E: ?Sized> Case<E> {
    /// Creates a case with the default limit and no needs.
    pub(crate) fn named(
        name: impl Into<String>,
        run: impl Fn(&E) -> Result<Verdict> + Send + Sync + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            needs: Vec::new(),
            long: false,
            busy_polls: false,
            limit: LIMIT,
            run: Box::new(run),
        }
    }

    /// Creates a case named `PROGRAM: WHAT`, with the default limit and no needs.
    pub(crate) fn new(
        program: &'static str,
        what: impl Into<String>,
        run: impl Fn(&E) -> Result<Verdict> + Send + Sync + 'static,
    ) -> Self {
        Self::named(format!("{program}: {}", what.into()), run)
    }

    /// Skips the case unless these Debian packages are installed.
    pub(crate) fn needs(mut self, packages: &[&'static str]) -> Self {
        self.needs
            .extend(packages.iter().map(|&name| Need::Package(name)));
        self
    }

    /// Runs the case in a network namespace with an interface other than loopback.
    pub(crate) fn wire(mut self) -> Self {
        self.needs.push(Need::Wire);
        self
    }

    /// Gives the case a private `/tmp`, because its programs use fixed file names there, or list
    /// the files of other processes.
    pub(crate) fn own_tmp(mut self) -> Self {
        self.needs.push(Need::OwnTmp);
        self
    }

    pub(crate) fn long(mut self) -> Self {
        self.long = true;
        self
    }

    pub(crate) fn busy_polls(mut self) -> Self {
        self.busy_polls = true;
        self
    }

    /// Sets the time limit of the whole case, in seconds.
    pub(crate) fn limit(mut self, seconds: u64) -> Self {
        self.limit = Duration::from_secs(seconds);
        self
    }

    /// Returns the program: the part of the name before the colon. The table of programs has a row
    /// for each program.
    pub(crate) fn program(&self) -> &str {
        self.parts().0
    }

    /// Returns what the program does: the part of the name after the colon.
    pub(crate) fn what(&self) -> &str {
        self.parts().1
    }

    fn parts(&self) -> (&str, &str) {
        self.name.split_once(": ").unwrap_or((&self.name, ""))
    }
}

/// Returns `true` if `only` is empty or `name` contains one of its texts.
pub(crate) fn is_chosen(name: &str, only: &[String]) -> bool {
    only.is_empty() || only.iter().any(|text| name.contains(text.as_str()))
}
