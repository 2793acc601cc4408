//! Runs libFuzzer's search for failing inputs, and reads its report.

use std::fs::{self, File};
use std::path::Path;
use std::process::Stdio;
use std::sync::Mutex;

use anyhow::{Context as _, Result, bail};

use super::programs::{Fuzzer, Target};

/// An input that takes longer than this, in seconds, is a failure: a peer could use it to keep us
/// busy. Correct code takes much less time for any input.
const SLOW_S: u32 = 5;
/// Time limit for minimising a failing input, in seconds.
const MINIMISE_S: u32 = 20;

/// When a search ends, as an option of libFuzzer.
#[derive(Debug, Clone, Copy)]
pub(super) enum Limit {
    Seconds(u64),
    Executions(u64),
}

impl Limit {
    fn option(self) -> String {
        match self {
            Self::Seconds(n) => format!("-max_total_time={n}"),
            Self::Executions(n) => format!("-runs={n}"),
        }
    }
}

/// Results of a search.
#[derive(Debug, Default, PartialEq, Eq)]
struct Report {
    executions: u64,
    per_second: u64,
    /// Edges that were reached.
    edges: u64,
    /// Pairs of an edge and the order of magnitude of its count.
    features: u64,
    /// Inputs in the corpus.
    corpus: u64,
}

impl Report {
    /// Reads libFuzzer's output. Returns `None` if the search did not complete.
    fn parse(text: &str) -> Option<Self> {
        let stat = |name: &str| -> Option<u64> {
            let line = text
                .lines()
                .rev()
                .find_map(|line| line.strip_prefix(name))?;
            line.trim().parse().ok()
        };
        let status = text.lines().rev().find(|line| line.contains(" cov: "));
        let number = |name: &str| -> u64 {
            let words = status.unwrap_or_default().split_whitespace();
            let value = words.skip_while(|word| *word != name).nth(1);
            let digits = value.and_then(|value| value.split('/').next());
            digits.and_then(|n| n.parse().ok()).unwrap_or(0)
        };
        Some(Self {
            executions: stat("stat::number_of_executed_units:")?,
            per_second: stat("stat::average_exec_per_sec:")?,
            edges: number("cov:"),
            features: number("ft:"),
            corpus: number("corp:"),
        })
    }
}

impl Fuzzer {
    /// Runs one input. Returns `true` if it passes.
    fn passes(&self, target: &Target, input: &Path) -> Result<bool> {
        let mut command = self.command(target)?;
        command.arg(format!("-timeout={SLOW_S}")).arg(input);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Ok(command.status()?.success())
    }

    /// Searches for a failing input, guided by coverage. Starts with the seeds and the corpus.
    ///
    /// # Errors
    /// If an input fails; the error contains libFuzzer's message.
    fn search(&self, target: &Target, limit: Limit, seed: u64) -> Result<Report> {
        let found = self.folder(target, "found")?;
        for old in fs::read_dir(&found)? {
            fs::remove_file(old?.path())?;
        }
        let log = self.state.join(&target.name).join("log");
        let mut command = self.command(target)?;
        command
            .arg(limit.option())
            .arg(format!("-seed={seed}"))
            .arg(format!("-timeout={SLOW_S}"))
            .arg("-print_final_stats=1")
            .arg(format!("-artifact_prefix={}/", found.display()))
            .args([&self.folder(target, "corpus")?, &target.seeds])
            .stdout(Stdio::null())
            .stderr(File::create(&log)?);
        let status = command.status().with_context(|| target.name.clone())?;
        let _ = fs::remove_dir_all(self.folder(target, "tmp")?);
        let text = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
        let report = Report::parse(&text);
        match (status.success(), report) {
            (true, Some(report)) if report.edges > 0 => Ok(report),
            (true, _) => bail!("target {}: the search ran no code:\n{text}", target.name),
            (false, report) => self.failed(target, &found, &text, report),
        }
    }

    /// Minimises and keeps the failing input, and returns an error with libFuzzer's message. If the
    /// input was too slow, but is fast enough when it runs alone, it is no failure: the machine was
    /// busy.
    fn failed(
        &self,
        target: &Target,
        found: &Path,
        text: &str,
        report: Option<Report>,
    ) -> Result<Report> {
        let name = &target.name;
        let end = last_lines(text, 30);
        let Some(input) = fs::read_dir(found)?.flatten().next() else {
            bail!("target {name} failed without an input:\n{end}");
        };
        let file = input.file_name().to_string_lossy().into_owned();
        let fails = !self.passes(target, &input.path())?;
        if !fails && file.starts_with("timeout-") {
            println!("target {name}: {file} did not recur, so the machine was busy");
            return Ok(report.unwrap_or_default());
        }
        let kept = self.folder(target, "failures")?.join(&file);
        fs::copy(input.path(), &kept)?;
        let again = if fails {
            self.minimise(target, &kept)?;
            ""
        } else {
            " (it did not fail when it ran again)"
        };
        let data: String = fs::read(&kept)?
            .iter()
            .map(|o| format!("{o:02x}"))
            .collect();
        bail!(
            "target {name}: {}{again} fails; its contents: {data}\n{end}",
            kept.display()
        );
    }

    /// Replaces a crashing input with a smaller one, if libFuzzer finds one.
    fn minimise(&self, target: &Target, input: &Path) -> Result<()> {
        let small = self.folder(target, "tmp")?.join("small");
        let mut command = self.command(target)?;
        command
            .args(["-minimize_crash=1", &format!("-timeout={SLOW_S}")])
            .arg(format!("-max_total_time={MINIMISE_S}"))
            .arg(format!("-exact_artifact_path={}", small.display()))
            .arg(input)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command.status()?;
        if small.is_file() && !self.passes(target, &small)? {
            fs::rename(&small, input)?;
        }
        Ok(())
    }

    /// Searches with these targets, `jobs` at a time, and returns a line for each target.
    ///
    /// # Errors
    /// If an input fails; the error contains the failures of all targets.
    pub(super) fn search_all(
        &self,
        targets: &[Target],
        jobs: usize,
        limit: Limit,
        seed: u64,
    ) -> Result<Vec<String>> {
        let jobs = match jobs {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
        };
        let next = Mutex::new(targets.iter());
        let results = Mutex::new((Vec::new(), Vec::new()));
        std::thread::scope(|scope| {
            for _ in 0..jobs.min(targets.len()) {
                scope.spawn(|| {
                    while let Some(target) = take(&next) {
                        let result = self.search(target, limit, seed);
                        if let Ok(mut results) = results.lock() {
                            match result {
                                Ok(report) => results.0.push(line(&target.name, &report)),
                                Err(error) => results.1.push(format!("{error:#}")),
                            }
                        }
                    }
                });
            }
        });
        let (mut lines, errors) = results.into_inner().unwrap_or_default();
        if !errors.is_empty() {
            bail!("{}", errors.join("\n"));
        }
        if lines.len() != targets.len() {
            bail!("{} of {} targets ran", lines.len(), targets.len());
        }
        lines.sort();
        Ok(lines)
    }
}

fn take<'a>(next: &Mutex<std::slice::Iter<'a, Target>>) -> Option<&'a Target> {
    next.lock().ok()?.next()
}

fn line(name: &str, report: &Report) -> String {
    format!(
        "{name:13} {} executions, {} a second, {} inputs, {} edges, {} features",
        report.executions, report.per_second, report.corpus, report.edges, report.features
    )
}

fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// Runs a search with a script in place of libFuzzer. A search writes an input of `kind`,
    /// unless that is empty, and exits with code `search`; a replay exits with code `replay`.
    /// Returns the result of the search, and whether an input was kept.
    fn search_with(name: &str, kind: &str, search: u8, replay: u8) -> (Result<Report>, bool) {
        let dir = std::env::temp_dir().join(format!("xtask-fuzz-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        let found = match kind {
            "" => String::new(),
            _ => format!("printf bug >\"${{word#*=}}{kind}-1\";"),
        };
        let script = format!(
            "#!/bin/sh\nfor word; do case $word in\n\
             -artifact_prefix=*) {found} echo boom >&2; exit {search};; esac; done\n\
             exit {replay}\n"
        );
        fs::write(dir.join("script"), script).unwrap();
        // Another process writes the program: in this process, a thread that forks meanwhile could
        // inherit the open file, and executing it would fail.
        let mut install = Command::new("install");
        install
            .arg("-m755")
            .arg(dir.join("script"))
            .arg(dir.join("target"));
        assert!(install.status().unwrap().success());
        let fuzzer = Fuzzer {
            programs: dir.clone(),
            state: dir.join("state"),
        };
        let target = Target {
            name: "target".into(),
            package: "none",
            seeds: dir.clone(),
        };
        let result = fuzzer.search(&target, Limit::Executions(1), 1);
        let kept = dir
            .join(format!("state/target/failures/{kind}-1"))
            .is_file();
        fs::remove_dir_all(dir).unwrap();
        (result, kept)
    }

    #[test]
    fn failing_inputs_are_kept_and_named() {
        let (result, kept) = search_with("crash", "crash", 77, 77);
        let error = result.unwrap_err().to_string();
        assert!(
            kept && error.contains("crash-1 fails; its contents: 627567"),
            "{error}"
        );
        assert!(error.ends_with("boom"), "{error}");
        let (result, kept) = search_with("once", "crash", 77, 0);
        let error = result.unwrap_err().to_string();
        assert!(
            kept && error.contains("did not fail when it ran again"),
            "{error}"
        );
    }

    #[test]
    fn slow_inputs_must_be_slow_again() {
        let (result, kept) = search_with("busy", "timeout", 70, 0);
        assert!(result.is_ok() && !kept, "{result:?}");
        let (result, kept) = search_with("slow", "timeout", 70, 70);
        assert!(result.is_err() && kept, "{result:?}");
    }

    #[test]
    fn search_without_report_fails() {
        let (result, _) = search_with("nothing", "", 0, 0);
        let error = result.unwrap_err().to_string();
        assert!(error.contains("the search ran no code"), "{error}");
        let (result, _) = search_with("early", "", 1, 0);
        let error = result.unwrap_err().to_string();
        assert!(error.contains("failed without an input"), "{error}");
    }

    #[test]
    fn last_report_is_read() {
        let text = "#2\tINITED cov: 9 ft: 9 corp: 1/1b exec/s: 0 rss: 26Mb\n\
            #40\tNEW    cov: 120 ft: 340 corp: 17/512b lim: 48 exec/s: 0 rss: 30Mb L: 3/90 \
            MS: 1 X-\n\
            Done 5000 runs in 3 second(s)\n\
            stat::number_of_executed_units: 5000\n\
            stat::average_exec_per_sec:     1666\n";
        let report = Report {
            executions: 5000,
            per_second: 1666,
            edges: 120,
            features: 340,
            corpus: 17,
        };
        assert_eq!(Report::parse(text), Some(report));
        assert_eq!(
            Report::parse("==1== ERROR: libFuzzer: deadly signal\n"),
            None
        );
    }
}
