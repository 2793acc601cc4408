//! Queries processes, and separates their answers from the failures.

use super::document::ProcessStats;
use super::table;
use iwarp::stat::{Answer, Question};
use iwarp_cli_common::error::{Context as _, Error, Result};
use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The processes to query.
#[derive(Debug, Clone, Default)]
pub(super) struct Query {
    /// Process IDs; all processes if empty.
    pub(super) pids: Vec<u32>,
    /// Directory of the sockets; `None` for the default directories.
    pub(super) directory: Option<PathBuf>,
}

/// The answers to a [`Query`].
#[derive(Debug, Default)]
pub(super) struct Answers {
    /// The answers, sorted by user and process ID.
    pub(super) stats: Vec<ProcessStats>,
    pub(super) silent: Vec<Silent>,
}

/// A process that has not answered, and the reason.
#[derive(Debug)]
pub(super) struct Silent {
    pub(super) pid: Option<u32>,
    pub(super) uid: u32,
    /// `true` if the process did not answer in time; `false` if its answer broke off or is invalid.
    pub(super) timed_out: bool,
    pub(super) why: String,
}

impl Silent {
    pub(super) fn sentence(&self) -> String {
        let who = match self.pid {
            Some(pid) => format!("process {pid}"),
            None => "a process of another container".to_owned(),
        };
        format!("no statistics of {who}, user {}: {}", self.uid, self.why)
    }
}

impl Query {
    /// Creates a query of these processes. `directory` is the option; if it is `None`, the value
    /// `set` of `IWARP_STAT` names the directory.
    pub(super) fn new(pids: Vec<u32>, directory: Option<&PathBuf>, set: Option<OsString>) -> Self {
        let set = set.map(PathBuf::from).filter(|path| path.is_absolute());
        Self {
            pids,
            directory: directory.cloned().or(set),
        }
    }

    /// Queries the processes. Blocks for some seconds if processes do not answer.
    ///
    /// # Errors
    /// No file descriptor or memory is left.
    pub(super) fn ask(&self) -> Result<Answers> {
        let mut question = Question::default();
        question.directory.clone_from(&self.directory);
        if let &[pid] = &self.pids[..] {
            question.pid = Some(pid);
        }
        let answers = question.ask().context("cannot query the processes")?;
        let mut answers = separated(answers);
        if self.pids.len() > 1 {
            let wanted = |pid: u32| self.pids.contains(&pid);
            answers.stats.retain(|one| wanted(one.pid));
            answers.silent.retain(|one| one.pid.is_some_and(wanted));
        }
        Ok(answers)
    }

    /// Returns the outcome if none of the chosen processes answered. If they answered before and
    /// their sockets are closed now, they have ended, which is no error. A process ID may still
    /// exist: the process may be a zombie, or may have executed another program.
    pub(super) fn no_answer(&self, silent: &[Silent], answered_before: bool) -> Result<()> {
        if let Some(silent) = silent.first() {
            return Err(Error::failed(silent.sentence()));
        }
        if answered_before {
            return Ok(());
        }
        let exists = |pid: &&u32| Path::new("/proc").join(pid.to_string()).exists();
        let Some(pid) = self.pids.iter().find(exists) else {
            let pids: Vec<_> = self.pids.iter().map(u32::to_string).collect();
            return Err(Error::failed(format!(
                "there is no process {}",
                pids.join(" or ")
            )));
        };
        Err(Error::failed(format!(
            "process {pid} cannot be queried: it does not use iwarp (yet), has IWARP_STAT=off, \
             belongs to another user, or has a private /tmp (if it is in a container, run \
             `iwarp stat` there)"
        )))
    }
}

fn separated(answers: Vec<Answer>) -> Answers {
    let mut out = Answers::default();
    for answer in answers {
        let timed_out = matches!(&answer.document, Err(e) if e.kind() == ErrorKind::TimedOut);
        let document = answer.document.map_err(|e| match timed_out {
            true => "it is stopped, or busy with other queries".to_owned(),
            false => e.to_string(),
        });
        let read = document.and_then(|text| ProcessStats::read(answer.pid, answer.uid, &text));
        match read {
            Ok(one) => out.stats.push(one),
            Err(why) => out.silent.push(Silent {
                pid: answer.pid,
                uid: answer.uid,
                timed_out,
                // The reason may contain text from the process.
                why: table::escaped(&why, 200),
            }),
        }
    }
    out.stats.sort_by_key(|one| (one.uid, one.pid));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stopped_process_is_reported() {
        let silent = Silent {
            pid: Some(7),
            uid: 0,
            timed_out: true,
            why: "it is stopped".to_owned(),
        };
        let no_answer = |silent: &[Silent]| Query::default().no_answer(silent, true);
        assert!(no_answer(&[]).is_ok());
        let error = no_answer(&[silent]).unwrap_err();
        assert!(error.to_string().contains("process 7"), "{error}");
    }

    /// Each option with each value of `IWARP_STAT`.
    #[test]
    fn directory_option_wins_over_environment() {
        for (option, set, directory) in [
            (None, None, None),
            (None, Some("on"), None),
            (None, Some("off"), None),
            (None, Some("relative/folder"), None),
            (None, Some("/env"), Some("/env")),
            (Some("/arg"), None, Some("/arg")),
            (Some("/arg"), Some("/env"), Some("/arg")),
            (Some("arg"), Some("off"), Some("arg")),
        ] {
            let option = option.map(PathBuf::from);
            let query = Query::new(vec![7], option.as_ref(), set.map(Into::into));
            assert_eq!(
                query.directory,
                directory.map(Into::into),
                "{option:?} {set:?}"
            );
        }
    }
}
