//! A case: one check of a suite, with what it needs. All suites list their cases in this form.

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

/// The default limit, which is enough for a quick program on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// One check. `E` is the environment in which its suite runs it.
pub(crate) struct Case<E: ?Sized> {
    /// The name that `--only` is compared with.
    pub(crate) name: String,
    pub(crate) needs: Vec<Need>,
    /// Runs with `--all` or `--only`, but not by default.
    pub(crate) long: bool,
    /// Runs while no other case runs, because its programs spin instead of sleeping.
    pub(crate) spins: bool,
    pub(crate) limit: Duration,
    pub(crate) run: Run<E>,
}

impl<E: ?Sized> Case<E> {
    /// A quick case without needs.
    pub(crate) fn named(
        name: impl Into<String>,
        run: impl Fn(&E) -> Result<Verdict> + Send + Sync + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            needs: Vec::new(),
            long: false,
            spins: false,
            limit: LIMIT,
            run: Box::new(run),
        }
    }

    /// A quick case of a program. See the head of `apps`.
    pub(crate) fn new(
        program: &'static str,
        what: impl Into<String>,
        run: impl Fn(&E) -> Result<Verdict> + Send + Sync + 'static,
    ) -> Self {
        Self::named(format!("{program}: {}", what.into()), run)
    }

    /// Names the Debian packages that the case needs. Without them it is skipped.
    pub(crate) fn needs(mut self, packages: &[&'static str]) -> Self {
        self.needs
            .extend(packages.iter().map(|&name| Need::Package(name)));
        self
    }

    /// Gives the case a network interface that is not loopback.
    pub(crate) fn wire(mut self) -> Self {
        self.needs.push(Need::Wire);
        self
    }

    /// Gives the case a `/tmp` of its own, because its programs use files of fixed names there, or
    /// list what other processes have there.
    pub(crate) fn own_tmp(mut self) -> Self {
        self.needs.push(Need::OwnTmp);
        self
    }

    pub(crate) fn long(mut self) -> Self {
        self.long = true;
        self
    }

    pub(crate) fn spins(mut self) -> Self {
        self.spins = true;
        self
    }

    /// Sets the time limit of the whole case, in seconds.
    pub(crate) fn limit(mut self, seconds: u64) -> Self {
        self.limit = Duration::from_secs(seconds);
        self
    }

    /// Returns the name's part before the colon. The table of programs has a row for each program.
    pub(crate) fn program(&self) -> &str {
        self.parts().0
    }

    /// Returns the name's part after the colon: what the program does.
    pub(crate) fn what(&self) -> &str {
        self.parts().1
    }

    fn parts(&self) -> (&str, &str) {
        self.name.split_once(": ").unwrap_or((&self.name, ""))
    }
}

/// Returns `true` if `--only` chooses a name: it contains one of the texts, or there are none.
pub(crate) fn is_chosen(name: &str, only: &[String]) -> bool {
    only.is_empty() || only.iter().any(|text| name.contains(text.as_str()))
}
