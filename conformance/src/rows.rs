//! The runner of all suites: runs a case, repeats it after known faults of the programs that happen
//! by chance, reports it, and keeps its row for the summary.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use xtask::process::Log;

use crate::case::Verdict;
use crate::excuses;

/// What one run of a case gives: its result, and what the guests' kernels wrote meanwhile.
pub(crate) type Once = (Result<Verdict>, String);

pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) result: Result<Verdict>,
    pub(crate) time: Duration,
}

impl Row {
    /// Returns the word, padded, and the note of this row.
    fn words(&self) -> (&'static str, String) {
        match &self.result {
            Ok(Verdict::Passed(note)) => ("passed ", note.clone()),
            Ok(Verdict::Skipped(why)) => ("skipped", why.clone()),
            Err(error) => ("FAILED ", format!("{error:#}")),
        }
    }

    pub(crate) fn is_skipped(&self) -> bool {
        matches!(self.result, Ok(Verdict::Skipped(_)))
    }

    /// Prints the row as soon as the case has ended.
    pub(crate) fn report(&self, log: &mut Log) {
        let (word, note) = self.words();
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
    /// Runs a case and keeps its row. If `excuse` returns a known fault for a failure (from what
    /// the kernel wrote, and the error), runs the case again. `complaint` finds what a kernel may
    /// not write. Returns what the kernel wrote in the last run.
    ///
    /// Fails if `once` fails, because a guest is gone.
    pub(crate) fn run(
        &mut self,
        name: String,
        log: &mut Log,
        mut once: impl FnMut(&mut Log) -> Result<Once>,
        excuse: impl Fn(&str, &str) -> Option<&'static str>,
        complaint: impl Fn(&str) -> Option<&str>,
    ) -> Result<String> {
        let start = Instant::now();
        let mut excused = Vec::new();
        let (mut result, said) = loop {
            log.line(format!("==> {name}"));
            let (result, said) = once(log)?;
            log.line(&said);
            let excuse = match &result {
                Err(error) => excuse(&said, &format!("{error:#}")),
                Ok(_) => None,
            };
            match excuse {
                Some(excuse) if excused.len() < excuses::ATTEMPTS => {
                    log.line(format!("again: {excuse}"));
                    excused.push(excuse);
                }
                _ => break (result, said),
            }
        };
        for excuse in excused {
            *self.excused.entry(excuse).or_default() += 1;
            if let Ok(Verdict::Passed(note)) = &mut result {
                *note = format!("{note} (again: {excuse})").trim_start().to_owned();
            }
        }
        if let Some(line) = complaint(&said) {
            result = Err(anyhow!("the guest's kernel: {line}"));
        }
        let time = start.elapsed();
        let row = Row { name, result, time };
        row.report(log);
        self.rows.push(row);
        Ok(said)
    }

    /// Prints the table and the counts. Returns how many cases failed.
    pub(crate) fn print(&self, log: &mut Log) -> usize {
        println!("\n{:52} {:6} {:>7}  note", "case", "result", "seconds");
        for row in &self.rows {
            let (word, note) = row.words();
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
        let again: usize = self.excused.values().sum();
        log.say(format!(
            "{passed} passed, {failed} failed, {skipped} skipped, {again} repeated; log: {}",
            log.path().display()
        ));
        for (why, times) in &self.excused {
            log.say(format!("repeated {times} times: {why}"));
        }
        failed
    }

    /// Returns `true` if the case that ran last failed.
    pub(crate) fn last_failed(&self) -> bool {
        self.rows.last().is_some_and(|row| row.result.is_err())
    }
}
