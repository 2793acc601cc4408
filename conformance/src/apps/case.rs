//! The type of a case, its possible results, and checks that several cases use.

use std::time::Duration;

use anyhow::{Result, bail};

use super::stage::Stage;

/// The result of a case that did not fail: passed with a note for the terminal, or skipped with the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    Passed(String),
    Skipped(String),
}

impl Verdict {
    pub(super) fn passed(note: impl Into<String>) -> Self {
        Self::Passed(note.into())
    }

    pub(super) fn skipped(why: impl Into<String>) -> Self {
        Self::Skipped(why.into())
    }
}

type Run = Box<dyn Fn(&Stage) -> Result<Verdict> + Send + Sync>;

/// The default limit, which is enough for a quick program on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// A check of a program: its name, a description of what runs, and the function that runs and checks it.
pub(super) struct Case {
    program: &'static str,
    what: String,
    packages: &'static [&'static str],
    wire: bool,
    long: bool,
    spins: bool,
    own_tmp: bool,
    limit: Duration,
    run: Run,
}

impl Case {
    /// A quick case over loopback. See the head of the parent module.
    pub(super) fn new(
        program: &'static str,
        what: impl Into<String>,
        run: impl Fn(&Stage) -> Result<Verdict> + Send + Sync + 'static,
    ) -> Self {
        Self {
            program,
            what: what.into(),
            packages: &[],
            wire: false,
            long: false,
            spins: false,
            own_tmp: false,
            limit: LIMIT,
            run: Box::new(run),
        }
    }

    /// Names the Debian packages that the case needs. Without them it is skipped.
    pub(super) fn needs(mut self, packages: &'static [&'static str]) -> Self {
        self.packages = packages;
        self
    }

    /// Gives the case a network interface that is not loopback.
    pub(super) fn wire(mut self) -> Self {
        self.wire = true;
        self
    }

    /// Runs the case with `--all` only.
    pub(super) fn long(mut self) -> Self {
        self.long = true;
        self
    }

    /// Runs the case while no other case runs, because its programs spin instead of sleeping.
    pub(super) fn spins(mut self) -> Self {
        self.spins = true;
        self
    }

    /// Gives the case a folder `/tmp` of its own, because its programs use files of fixed names there. Without namespaces it is skipped: such
    /// a file may be another user's.
    pub(super) fn own_tmp(mut self) -> Self {
        self.own_tmp = true;
        self
    }

    /// Sets the time limit of the whole case, in seconds.
    pub(super) fn limit(mut self, seconds: u64) -> Self {
        self.limit = Duration::from_secs(seconds);
        self
    }

    /// Returns the program's name. The table has a row for each program.
    pub(super) fn program(&self) -> &'static str {
        self.program
    }

    /// Returns the description of what runs.
    pub(super) fn what(&self) -> &str {
        &self.what
    }

    /// Returns the name that `--only` is compared with.
    pub(super) fn name(&self) -> String {
        format!("{}: {}", self.program, self.what)
    }

    pub(super) fn packages(&self) -> &'static [&'static str] {
        self.packages
    }

    pub(super) fn needs_wire(&self) -> bool {
        self.wire
    }

    pub(super) fn needs_own_tmp(&self) -> bool {
        self.own_tmp
    }

    pub(super) fn is_spinning(&self) -> bool {
        self.spins
    }

    pub(super) fn is_long(&self) -> bool {
        self.long
    }

    pub(super) fn time(&self) -> Duration {
        self.limit
    }

    pub(super) fn run(&self, stage: &Stage) -> Result<Verdict> {
        if self.own_tmp && !stage.has_namespaces() {
            return Ok(Verdict::skipped("needs namespaces, for a /tmp of its own"));
        }
        (self.run)(stage)
    }
}

/// Fails unless exactly `count` lines contain the text.
pub(super) fn expect_lines(said: &str, text: &str, count: usize) -> Result<()> {
    let found = said.lines().filter(|line| line.contains(text)).count();
    if found != count {
        bail!("{found} lines with {text:?} instead of {count}");
    }
    Ok(())
}

/// Fails unless the output contains the text.
pub(super) fn expect(said: &str, text: &str) -> Result<()> {
    if !said.contains(text) {
        bail!("no {text:?} in the output");
    }
    Ok(())
}

/// Returns pseudorandom octets. The same seed gives the same octets.
pub(super) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(len);
    out
}

/// Returns the number of octets sent, from a line that `--stats` printed.
pub(super) fn octets_sent(line: &str) -> Option<u64> {
    let (_, rest) = line.split_once("iwarp: process ")?;
    let (_, rest) = rest.split_once(" sent ")?;
    let number = rest.split(' ').next()?;
    number.parse().ok()
}
