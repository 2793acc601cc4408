//! The log of injected faults. Each line is written with one system call, so that the lines of
//! several processes are not interleaved.

use super::plan::{Injected, Plan};
use crate::complain;
use crate::error::Result;
use parking_lot::Mutex;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::Path;

/// Destination of the lines: a file or standard error.
pub(super) struct Log {
    file: Option<Mutex<File>>,
}

/// Target of a fault, as far as known.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Target {
    /// The queue pair: its position in order of creation, and its number.
    pub(super) qp: Option<(u32, u32)>,
    pub(super) peer: Option<SocketAddr>,
    pub(super) op: Option<&'static str>,
    /// Octets that have passed on the connection in the rule's direction.
    pub(super) octets: Option<u64>,
}

impl Log {
    /// Opens the file for appending, because several processes may write to it.
    ///
    /// # Errors
    /// Fails if the file cannot be opened.
    pub(super) fn open(file: Option<&Path>) -> Result<Self> {
        let open = |path| OpenOptions::new().append(true).create(true).open(path);
        let file = file.map(open).transpose()?.map(Mutex::new);
        Ok(Self { file })
    }

    /// Logs the specification and its seed, so that the run can be replayed.
    pub(super) fn begin(&self, plan: &Plan) {
        let known = plan.spec.seed.is_some();
        let seed = match known {
            true => String::new(),
            false => format!("seed={};", plan.seed),
        };
        self.line(plan, &format!("spec=\"{seed}{}\"", plan.spec));
    }

    pub(super) fn record(&self, plan: &Plan, injected: &Injected, target: &Target) {
        let mut text = format!("rule={} {}", injected.rule + 1, injected.kind);
        // Errors are ignored, because writing to a string never fails.
        if let Some((ordinal, number)) = target.qp {
            let _ = write!(text, " qp={ordinal} num={number:#08x}");
        }
        if let Some(peer) = target.peer {
            let _ = write!(text, " peer={peer}");
        }
        if let Some(op) = target.op {
            let _ = write!(text, " op={op}");
        }
        if injected.n > 0 {
            let _ = write!(text, " n={}", injected.n);
        }
        if let Some(octets) = target.octets {
            let _ = write!(text, " bytes={octets}");
        }
        self.line(plan, &text);
    }

    fn line(&self, plan: &Plan, text: &str) {
        let age_us = plan.age() / 1000;
        let (s, us) = (age_us / 1_000_000, age_us % 1_000_000);
        let pid = std::process::id();
        let line = format!(
            "iwarp fault: pid={pid} t={s}.{us:06} seed={} {text}\n",
            plan.seed
        );
        match &self.file {
            // Errors are ignored, because a full disk must not end the tested program.
            Some(file) => drop(file.lock().write_all(line.as_bytes())),
            None => complain::stderr(&line),
        }
    }
}
