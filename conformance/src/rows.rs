//! The table of results: one row for each case, which is run again for faults that are known and happen by chance.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use xtask::process::Log;

use crate::excuses;

/// What a run of a case gives: its result with a note for the table, and what the guests' kernels said meanwhile.
pub(crate) type Once = (Result<String>, String);

/// Results in the order in which the cases ran.
#[derive(Default)]
pub(crate) struct Rows {
    rows: Vec<(String, Result<String>, Duration)>,
    excused: BTreeMap<&'static str, usize>,
}

impl Rows {
    /// Runs a case, again if `excuse` knows why it failed (from what the kernel said, and the error), and keeps its result. Returns what
    /// the kernel said the last time.
    ///
    /// # Errors
    /// When a guest is gone.
    pub(crate) fn run(
        &mut self,
        title: String,
        log: &mut Log,
        mut once: impl FnMut(&mut Log) -> Result<Once>,
        excuse: impl Fn(&str, &str) -> Option<&'static str>,
        broken: impl Fn(&str) -> Option<String>,
    ) -> Result<String> {
        let start = Instant::now();
        let mut excused = Vec::new();
        let (mut result, said) = loop {
            log.line(format!("==> {title}"));
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
            if let Ok(note) = &mut result {
                *note = format!("{note} (again: {excuse})").trim_start().to_owned();
            }
        }
        if let Some(line) = broken(&said) {
            result = Err(anyhow!("the guest's kernel: {line}"));
        }
        let time = start.elapsed();
        let (word, note) = match &result {
            Ok(note) => ("passed", note.clone()),
            Err(error) => ("FAILED", format!("{error:#}")),
        };
        log.say(format!(
            "{word} {:>5.1} s  {title}  {note}",
            time.as_secs_f64()
        ));
        self.rows.push((title, result, time));
        Ok(said)
    }

    /// Prints the table and how many passed, failed, and had to be repeated. Returns how many failed.
    pub(crate) fn print(&self, log: &mut Log) -> usize {
        println!("\n{:52} {:6} {:>7}  note", "case", "result", "seconds");
        let mut failed = 0;
        for (title, result, time) in &self.rows {
            let (word, note) = match result {
                Ok(note) => ("passed", note.clone()),
                Err(error) => {
                    failed += 1;
                    let text = format!("{error:#}");
                    let line = text.lines().next().unwrap_or_default();
                    ("FAILED", line.chars().take(100).collect())
                }
            };
            println!(
                "{}",
                format!("{title:52} {word:6} {:>7.1}  {note}", time.as_secs_f64()).trim_end()
            );
        }
        println!();
        let passed = self.rows.len() - failed;
        let again: usize = self.excused.values().sum();
        log.say(format!(
            "{passed} passed, {failed} failed, {again} repeated; log: {}",
            log.path().display()
        ));
        for (why, times) in &self.excused {
            log.say(format!("repeated {times} times: {why}"));
        }
        failed
    }
}
