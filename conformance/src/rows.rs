//! Runs the cases of all suites, and keeps a row of the summary for each. A case that failed
//! because of a known, sporadic fault of its programs is retried.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use xtask::process::Log;

use crate::case::Verdict;
use crate::excuses;

/// The result of one attempt of a case, and what the guests' kernels logged meanwhile.
pub(crate) type Attempt = (Result<Verdict>, String);

pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) result: Result<Verdict>,
    pub(crate) time: Duration,
}

impl Row {
    /// Returns the result's word, padded to equal width, and the note.
    fn word_and_note(&self) -> (&'static str, String) {
        match &self.result {
            Ok(Verdict::Passed(note)) => ("passed ", note.clone()),
            Ok(Verdict::Skipped(why)) => ("skipped", why.clone()),
            Err(error) => ("FAILED ", format!("{error:#}")),
        }
    }

    pub(crate) fn is_skipped(&self) -> bool {
        matches!(self.result, Ok(Verdict::Skipped(_)))
    }

    /// Logs the row. Called as soon as the case has ended.
    pub(crate) fn report(&self, log: &mut Log) {
        let (word, note) = self.word_and_note();
        let (seconds, name) = (self.time.as_secs_f64(), &self.name);
        log.say(format!("{word} {seconds:>5.1} s  {name}  {note}"));
    }
}

/// Rows in the order in which the cases ran.
#[derive(Default)]
pub(crate) struct Rows {
    rows: Vec<Row>,
    excused: BTreeMap<&'static str, usize>,
}

impl Rows {
    /// Runs a case, adds its row, and returns the kernel log of the last attempt. `once` makes one
    /// attempt. If an attempt fails and `excuse` (which gets the kernel log and the error) returns
    /// a known fault, the case is retried. The case fails if `complaint` finds a fault in the
    /// kernel log.
    ///
    /// Fails if `once` fails, which means that a guest has crashed.
    pub(crate) fn run(
        &mut self,
        name: String,
        log: &mut Log,
        mut once: impl FnMut(&mut Log) -> Result<Attempt>,
        excuse: impl Fn(&str, &str) -> Option<&'static str>,
        complaint: impl Fn(&str) -> Option<&str>,
    ) -> Result<String> {
        let start = Instant::now();
        let mut excused = Vec::new();
        let (mut result, kernel_log) = loop {
            log.line(format!("==> {name}"));
            let (result, kernel_log) = once(log)?;
            log.line(&kernel_log);
            let excuse = match &result {
                Err(error) => excuse(&kernel_log, &format!("{error:#}")),
                Ok(_) => None,
            };
            match excuse {
                Some(excuse) if excused.len() < excuses::ATTEMPTS => {
                    log.line(format!("retry: {excuse}"));
                    excused.push(excuse);
                }
                _ => break (result, kernel_log),
            }
        };
        for excuse in excused {
            *self.excused.entry(excuse).or_default() += 1;
            if let Ok(Verdict::Passed(note)) = &mut result {
                *note = format!("{note} (retried: {excuse})")
                    .trim_start()
                    .to_owned();
            }
        }
        if let Some(line) = complaint(&kernel_log) {
            result = Err(anyhow!("the guest's kernel: {line}"));
        }
        let time = start.elapsed();
        let row = Row { name, result, time };
        row.report(log);
        self.rows.push(row);
        Ok(kernel_log)
    }

    /// Prints the table and the counts. Returns the number of failed cases.
    pub(crate) fn print(&self, log: &mut Log) -> usize {
        println!("\n{:52} {:6} {:>7}  note", "case", "result", "seconds");
        for row in &self.rows {
            let (word, note) = row.word_and_note();
            let mut note = note.lines().next().unwrap_or_default().to_owned();
            if row.result.is_err() {
                note = note.chars().take(100).collect();
            }
            let (word, seconds) = (word.trim_end(), row.time.as_secs_f64());
            let line = format!("{:52} {word:6} {seconds:>7.1}  {note}", row.name);
            println!("{}", line.trim_end());
        }
        println!();
        let failed = self.rows.iter().filter(|row| row.result.is_err()).count();
        let skipped = self.rows.iter().filter(|row| row.is_skipped()).count();
        let passed = self.rows.len() - failed - skipped;
        let retries: usize = self.excused.values().sum();
        log.say(format!(
            "{passed} passed, {failed} failed, {skipped} skipped, {retries} retried; log: {}",
            log.path().display()
        ));
        for (why, times) in &self.excused {
            log.say(format!("retried {times} times: {why}"));
        }
        failed
    }

    /// Returns `true` if the case that ran last failed.
    pub(crate) fn last_failed(&self) -> bool {
        self.rows.last().is_some_and(|row| row.result.is_err())
    }
}
