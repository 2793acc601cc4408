//! Runs commands with a time limit. Their output goes to a log file.
//!
//! A test that hangs must not make the whole run hang. When a command is killed, its descendants
//! are killed as well, because it is the test programs that hang, and not `cargo test`.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::outcome::Outcome;

/// Time between two checks whether a command has ended. It is short enough not to delay quick steps
/// noticeably.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The log of one step. Commands write into it; [`Log::say`] also writes to the terminal.
pub struct Log {
    file: File,
    path: PathBuf,
    deadline: Instant,
    /// The output for the terminal, if it is held back.
    held: Option<String>,
}

impl Log {
    /// Creates or truncates the log at `path`. All commands of the step together must end within
    /// `limit`.
    ///
    /// # Errors
    /// If the file cannot be created.
    pub fn create(path: &Path, limit: Duration) -> Result<Self> {
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir)?;
        }
        let file = File::options()
            .create(true)
            .truncate(true)
            .read(true)
            .write(true)
            .open(path)
            .with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self {
            file,
            path: path.to_owned(),
            deadline: Instant::now() + limit,
            held: None,
        })
    }

    /// Holds back the output for the terminal, for a step that runs in parallel with another step.
    #[must_use]
    pub fn held(mut self) -> Self {
        self.held = Some(String::new());
        self
    }

    /// Writes the output that was held back to the terminal.
    pub fn release(&mut self) {
        if let Some(text) = self.held.take() {
            print!("{text}");
        }
    }

    /// Writes text to the terminal only.
    pub fn print(&mut self, text: &str) {
        match &mut self.held {
            Some(held) => held.push_str(text),
            None => print!("{text}"),
        }
    }

    /// Writes a line, indented, to the terminal only.
    pub fn show(&mut self, text: impl AsRef<str>) {
        self.print(&format!("  {}\n", text.as_ref()));
    }

    /// Returns the path of the log.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a line to the log only.
    ///
    /// Errors are ignored, so that a check does not fail because its log cannot be written.
    pub fn line(&mut self, text: impl AsRef<str>) {
        let _ = self.file.seek(SeekFrom::End(0));
        let _ = writeln!(self.file, "{}", text.as_ref());
    }

    /// Writes a line to the log and, indented, to the terminal.
    pub fn say(&mut self, text: impl AsRef<str>) {
        self.show(text.as_ref());
        self.line(text);
    }

    /// Runs a command to its end and fails unless it succeeds.
    ///
    /// # Errors
    /// If the command cannot be started, if it fails, or if the step's time limit expires.
    pub fn run(&mut self, command: &mut Command) -> Result<()> {
        let shown = show(command);
        let status = self.status(command, None)?;
        if !status.success() {
            bail!("`{shown}` failed: {status}");
        }
        Ok(())
    }

    /// Runs a command like [`Log::run`] and returns its standard output and standard error, which
    /// are interleaved.
    ///
    /// # Errors
    /// As for [`Log::run`].
    pub fn run_and_read(&mut self, command: &mut Command) -> Result<String> {
        let start = self.file.seek(SeekFrom::End(0))?;
        self.run(command)?;
        let mut bytes = Vec::new();
        self.file.seek(SeekFrom::Start(start))?;
        self.file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Runs a program of this project, shows its output on the terminal while it runs, and returns
    /// its result.
    ///
    /// # Errors
    /// As for [`Log::run`].
    pub fn run_program(&mut self, command: &mut Command) -> Result<Outcome> {
        let shown = show(command);
        let start = self.file.seek(SeekFrom::End(0))?;
        let status = self.status(command, Some(Echo::new(&self.path)?))?;
        let mut output = Vec::new();
        self.file.seek(SeekFrom::Start(start))?;
        self.file.read_to_end(&mut output)?;
        Outcome::of_program(status, &String::from_utf8_lossy(&output))
            .with_context(|| format!("`{shown}` failed: {status}"))
    }

    fn status(&mut self, command: &mut Command, mut echo: Option<Echo>) -> Result<ExitStatus> {
        let shown = show(command);
        self.line(format!("$ {shown}"));
        if let Some(echo) = &mut echo {
            echo.skip()?;
        }
        self.file.seek(SeekFrom::End(0))?;
        // Both streams share one file description, so the log keeps the order of their lines.
        let mut child = command
            .stdin(Stdio::null())
            .stdout(self.file.try_clone()?)
            .stderr(self.file.try_clone()?)
            .spawn()
            .with_context(|| format!("cannot start `{shown}`"))?;
        loop {
            let ended = child.try_wait()?;
            if let Some(echo) = &mut echo {
                let lines = echo.lines()?;
                self.print(&lines);
            }
            if let Some(status) = ended {
                return Ok(status);
            }
            if Instant::now() >= self.deadline {
                kill_tree(child.id());
                let _ = child.wait();
                bail!("`{shown}` did not end within the time limit of this step and was killed");
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns the last `count` lines of the log.
    pub fn tail(&self, count: usize) -> String {
        let bytes = std::fs::read(&self.path).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(count)..].join("\n")
    }
}

/// Reads the lines that a command appends to a log.
///
/// It opens the log a second time. Reading through the log's own file description would move the
/// position at which the command writes.
struct Echo {
    file: File,
    /// The beginning of an incomplete line.
    partial: Vec<u8>,
}

impl Echo {
    fn new(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Self {
            file,
            partial: Vec::new(),
        })
    }

    /// Skips the current contents of the log.
    fn skip(&mut self) -> Result<()> {
        self.file.seek(SeekFrom::End(0))?;
        Ok(())
    }

    /// Returns the complete lines that were appended since the last call.
    fn lines(&mut self) -> Result<String> {
        self.file.read_to_end(&mut self.partial)?;
        let end = self.partial.iter().rposition(|&byte| byte == b'\n');
        let lines = self.partial.drain(..end.map_or(0, |end| end + 1));
        Ok(String::from_utf8_lossy(lines.as_slice()).into_owned())
    }
}

/// Returns a command that builds and runs a program of the workspace, in the current directory.
/// Append the program's arguments.
#[must_use]
pub fn program(root: &Path, package: &str) -> Command {
    let mut command = cargo(Path::new("."));
    command
        .args(["run", "--quiet", "--package", package, "--manifest-path"])
        .arg(root.join("Cargo.toml"))
        .arg("--");
    command
}

/// Returns a cargo command in the folder `root`. Removes the package variables that `cargo run` has
/// set for this program. With them, cargo would run build scripts again, because their environment
/// would differ.
pub fn cargo(root: &Path) -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.current_dir(root);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    // A relative path is relative to the current directory, but the command runs in `root`.
    if let Some(Ok(target)) = std::env::var_os("CARGO_TARGET_DIR").map(std::path::absolute) {
        command.env("CARGO_TARGET_DIR", target);
    }
    command
}

/// Runs a command that prints to the terminal.
///
/// # Errors
/// If the command cannot be started or fails.
pub fn run(command: &mut Command) -> Result<()> {
    let program = command.get_program().to_owned();
    let status = command
        .status()
        .with_context(|| format!("starting {}", program.display()))?;
    if !status.success() {
        bail!("{} failed: {status}", program.display());
    }
    Ok(())
}

/// Adds up the passed tests of all `test result:` lines.
#[must_use]
pub fn tests_passed(text: &str) -> u64 {
    text.lines()
        .filter_map(|line| line.trim().strip_prefix("test result:"))
        .filter_map(|rest| {
            let words: Vec<&str> = rest.split_whitespace().collect();
            let passed = words.iter().position(|word| word.starts_with("passed"))?;
            words.get(passed.checked_sub(1)?)?.parse::<u64>().ok()
        })
        .sum()
}

/// Returns the command as a user would type it.
fn show(command: &Command) -> String {
    let mut words = Vec::new();
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            words.push(format!(
                "{}={:?}",
                name.to_string_lossy(),
                value.to_string_lossy()
            ));
        }
    }
    let program = Path::new(command.get_program());
    words.push(
        program
            .file_name()
            .unwrap_or(program.as_os_str())
            .to_string_lossy()
            .into_owned(),
    );
    words.extend(
        command
            .get_args()
            .map(|arg| arg.to_string_lossy().into_owned()),
    );
    words.join(" ")
}

/// Kills a child of this program and all its descendants. The caller still has to wait for the
/// child.
pub(crate) fn kill_tree(child: u32) {
    for id in tree(child) {
        if let Some(pid) = i32::try_from(id).ok().and_then(Pid::from_raw) {
            // An error means that the process has ended already.
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

/// Returns a line for each process of the tree below `root`, and one for each thread of `root`,
/// with the name of the kernel function in which the thread waits.
pub(crate) fn describe_tree(root: u32) -> Vec<String> {
    let read = |path: String| std::fs::read(path).unwrap_or_default();
    let text = |octets: Vec<u8>| String::from_utf8_lossy(&octets).trim_end().to_owned();
    let mut lines = Vec::new();
    for id in tree(root) {
        let words = read(format!("/proc/{id}/cmdline"));
        let words = text(words).replace('\0', " ");
        lines.push(format!("  process {id}: {}", words.trim_end()));
    }
    for task in numbers_in(&format!("/proc/{root}/task")) {
        let of_task = |file| text(read(format!("/proc/{root}/task/{task}/{file}")));
        let (name, place) = (of_task("comm"), of_task("wchan"));
        lines.push(format!("  thread {task} {name}: {place}"));
    }
    lines
}

/// Returns a process and its descendants, parents first.
fn tree(root: u32) -> Vec<u32> {
    let mut all = vec![root];
    let mut next = 0;
    while let Some(&parent) = all.get(next) {
        all.extend(children_of(parent));
        next += 1;
    }
    all
}

/// Returns the names in a folder that are numbers.
fn numbers_in(folder: &str) -> Vec<u32> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

fn children_of(parent: u32) -> Vec<u32> {
    let mut all = numbers_in("/proc");
    all.retain(|&id| parent_of(id) == Some(parent));
    all
}

fn parent_of(id: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // The program's name is in parentheses and may itself contain parentheses, so parse the fields
    // after the last parenthesis.
    stat.rsplit_once(')')?
        .1
        .split_whitespace()
        .nth(1)?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(name: &str, limit: Duration) -> Log {
        let path = std::env::temp_dir().join(format!("xtask-{}-{name}.log", std::process::id()));
        Log::create(&path, limit).unwrap()
    }

    #[test]
    fn output_is_read_back_and_kept() {
        let mut log = log("read", Duration::from_secs(20));
        log.line("before");
        let text = log
            .run_and_read(Command::new("sh").args(["-c", "echo out; echo err >&2"]))
            .unwrap();
        assert!(text.ends_with("out\nerr\n"), "{text}");
        assert_eq!(log.tail(2), "out\nerr");
        assert!(log.tail(100).starts_with("before\n$ sh -c"));
        std::fs::remove_file(log.path()).unwrap();
    }

    #[test]
    fn held_output_stays_in_order() {
        let mut log = log("held", Duration::from_secs(20)).held();
        log.say("before");
        let result = log.run_program(Command::new("sh").args(["-c", "echo out"]));
        assert_eq!(result.unwrap(), Outcome::Passed);
        log.show("after");
        assert_eq!(log.held.as_deref(), Some("  before\nout\n  after\n"));
        log.release();
        assert_eq!(log.held, None);
        std::fs::remove_file(log.path()).unwrap();
    }

    #[test]
    fn failure_names_the_command() {
        let mut log = log("fail", Duration::from_secs(20));
        let error = log
            .run(Command::new("sh").args(["-c", "exit 3"]))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("sh -c exit 3") && error.contains('3'),
            "{error}"
        );
        std::fs::remove_file(log.path()).unwrap();
    }

    #[test]
    fn program_can_skip() {
        let mut log = log("skip", Duration::from_secs(20));
        let mut run = |script: &str| log.run_program(Command::new("sh").args(["-c", script]));
        assert_eq!(run("echo fine").unwrap(), Outcome::Passed);
        assert_eq!(
            run("echo 'skipped: no network'; exit 77").unwrap(),
            Outcome::Skipped("no network".into())
        );
        assert!(run("exit 1").unwrap_err().to_string().contains("exit 1"));
        std::fs::remove_file(log.path()).unwrap();
    }

    #[test]
    fn out_of_time_kills_grandchildren() {
        let mut log = log("time", Duration::from_millis(300));
        let start = Instant::now();
        let error = log
            .run(Command::new("sh").args(["-c", "sleep 60 & echo $!; wait"]))
            .unwrap_err();
        assert!(error.to_string().contains("time limit"));
        assert!(start.elapsed() < Duration::from_secs(20));
        let grandchild: u32 = log.tail(1).trim().parse().unwrap();
        let has_ended = || {
            // A killed orphan may stay as a zombie until its new parent collects it.
            std::fs::read_to_string(format!("/proc/{grandchild}/stat")).map_or(true, |stat| {
                stat.rsplit_once(')')
                    .is_some_and(|(_, rest)| rest.trim_start().starts_with('Z'))
            })
        };
        while !has_ended() {
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "the grandchild is still running"
            );
            thread::sleep(POLL_INTERVAL);
        }
        std::fs::remove_file(log.path()).unwrap();
    }
}
