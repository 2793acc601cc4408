//! Types the commands of a lesson, like a reader with several terminals.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process_group};

use super::document::{self, Shown};

/// How long a command may take. A reader would have given up by then.
const LIMIT: Duration = Duration::from_secs(120);
/// How long a reader waits for the output that the lesson shows before Ctrl-C.
const PATIENCE: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// The beginning of a warning of tshark that readers do not see, because they are not root.
const ROOT_WARNING: &str = "Running as user \"root\"";

/// The terminals of a lesson.
pub(super) struct Session<'a> {
    /// The folder in which commands run; `cd` changes it.
    folder: PathBuf,
    /// Variables for the commands.
    variables: &'a [(&'a str, String)],
    /// The programs that run in the terminals.
    running: BTreeMap<String, Running<'a>>,
    /// Commands that have ended, with their output.
    ended: Vec<(&'a Shown, Vec<String>)>,
    /// How many commands have been started.
    count: usize,
}

/// A program in a terminal, with all its children.
struct Running<'a> {
    shown: &'a Shown,
    child: Child,
    /// The file that gets its output.
    output: PathBuf,
}

impl Running<'_> {
    /// Returns the lines that the program has printed.
    fn lines(&self) -> Result<Vec<String>> {
        let octets = fs::read(&self.output)?;
        let text = String::from_utf8_lossy(&octets);
        let lines = text.lines().filter(|line| !line.starts_with(ROOT_WARNING));
        Ok(lines.map(|line| line.trim_end().to_owned()).collect())
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        let _ = self.child.wait();
    }
}

impl<'a> Session<'a> {
    pub(super) fn new(folder: &Path, variables: &'a [(&'a str, String)]) -> Self {
        Self {
            folder: folder.to_owned(),
            variables,
            running: BTreeMap::new(),
            ended: Vec::new(),
            count: 0,
        }
    }

    /// Types the commands, and returns their outputs in the order in which the commands ended.
    ///
    /// # Errors
    /// If a command takes too long, or fails without any output that the lesson shows.
    pub(super) fn run(mut self, commands: &'a [Shown]) -> Result<Vec<(&'a Shown, Vec<String>)>> {
        for shown in commands {
            if let Some(previous) = self.running.remove(&shown.terminal) {
                self.finish(previous)?;
            }
            if let Some(folder) = shown.command.strip_prefix("cd ") {
                self.folder.push(folder);
                ensure!(self.folder.is_dir(), "there is no folder {folder}");
                continue;
            }
            let started = self.start(shown)?;
            if shown.terminal.is_empty() {
                self.finish(started)?;
            } else {
                let started = wait_until_listening(started)?;
                self.running.insert(shown.terminal.clone(), started);
            }
        }
        while let Some((_, last)) = self.running.pop_first() {
            self.finish(last)?;
        }
        Ok(self.ended)
    }

    fn start(&mut self, shown: &'a Shown) -> Result<Running<'a>> {
        self.count += 1;
        let output = self.folder.join(format!(".output-{}", self.count));
        let file = fs::File::create(&output)?;
        // A terminal starts programs with the default actions. A shell that runs this program in
        // the background ignores SIGINT, and children inherit that: Ctrl-C would end none of them.
        let mut command = Command::new("env");
        command
            .args(["--default-signal", "bash", "-c"])
            .arg(&shown.command)
            .current_dir(&self.folder)
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .process_group(0)
            .stdin(Stdio::null())
            .stderr(file.try_clone()?)
            .stdout(file);
        let child = command.spawn().context("cannot start bash")?;
        Ok(Running {
            shown,
            child,
            output,
        })
    }

    /// Waits for the end of a command and keeps its output. Presses Ctrl-C if the reader would.
    fn finish(&mut self, mut running: Running<'a>) -> Result<()> {
        let shown = running.shown;
        let begin = Instant::now();
        let mut pending_interrupt = shown.interrupted;
        let status = loop {
            if let Some(status) = running.child.try_wait()? {
                break status;
            }
            // A server may print its last line after the end of its client. If the lines never
            // come, the difference is the error.
            let complete = || anyhow::Ok(document::matches(&shown.output, &running.lines()?));
            if pending_interrupt && (begin.elapsed() > PATIENCE || complete()?) {
                let _ = kill_process_group(Pid::from_child(&running.child), Signal::INT);
                pending_interrupt = false;
            }
            if begin.elapsed() > LIMIT {
                let text = running.lines()?.join("\n");
                bail!("`{}` did not end within {LIMIT:?}: {text}", shown.command);
            }
            thread::sleep(POLL_INTERVAL);
        };
        let lines = running.lines()?;
        let _ = fs::remove_file(&running.output);
        if !status.success() && !shown.interrupted && shown.output.is_empty() {
            bail!("`{}` failed: {status}\n{}", shown.command, lines.join("\n"));
        }
        self.ended.push((shown, lines));
        Ok(())
    }
}

/// Waits until the program, or one of its children, listens on a TCP port, or until it ends.
fn wait_until_listening(mut running: Running<'_>) -> Result<Running<'_>> {
    let group = Pid::from_child(&running.child).as_raw_nonzero().get();
    let deadline = Instant::now() + LIMIT;
    while running.child.try_wait()?.is_none() && !listens(group)? {
        if Instant::now() > deadline {
            bail!("`{}` neither listens nor ends", running.shown.command);
        }
        thread::sleep(POLL_INTERVAL);
    }
    Ok(running)
}

/// Returns `true` if a process of the group has a socket that listens.
fn listens(group: i32) -> Result<bool> {
    for entry in fs::read_dir("/proc")?.flatten() {
        let path = entry.path();
        // A process may end while it is examined.
        let Ok(stat) = fs::read_to_string(path.join("stat")) else {
            continue;
        };
        // The name is in parentheses and may contain anything: state, parent and group follow it.
        let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
        if fields.split(' ').nth(2) != Some(&group.to_string()) {
            continue;
        }
        let Ok(files) = fs::read_dir(path.join("fd")) else {
            continue;
        };
        let sockets: Vec<String> = files
            .flatten()
            .filter_map(|file| fs::read_link(file.path()).ok())
            .filter_map(|target| {
                let name = target.to_str()?.strip_prefix("socket:[")?;
                name.strip_suffix(']').map(str::to_owned)
            })
            .collect();
        let listening = ["tcp", "tcp6"].iter().flat_map(|table| {
            let text = fs::read_to_string(path.join("net").join(table)).unwrap_or_default();
            listening_inodes(&text)
        });
        if listening.into_iter().any(|inode| sockets.contains(&inode)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the inodes of the listening sockets in the text of `/proc/net/tcp`.
fn listening_inodes(table: &str) -> Vec<String> {
    let rows = table.lines().skip(1);
    let fields = rows.map(|row| row.split_whitespace().collect::<Vec<_>>());
    let listening = fields.filter(|fields| fields.get(3) == Some(&"0A"));
    listening
        .filter_map(|fields| fields.get(9).map(|&inode| inode.to_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::document::commands;
    use super::*;

    /// Set in a process that ignores SIGINT.
    const IGNORING: &str = "XTASK_TEST_IGNORES_SIGINT";

    fn folder(name: &str) -> PathBuf {
        let name = format!("xtask-lessons-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        path
    }

    fn outputs(name: &str, text: &str) -> Result<Vec<String>> {
        let all = commands(text);
        let folder = folder(name);
        let variables = [("ANSWER", "42".to_owned())];
        let result = Session::new(&folder, &variables).run(&all);
        let result = result.map(|all| all.into_iter().map(|(_, out)| out.join("|")).collect());
        fs::remove_dir_all(folder).unwrap();
        result
    }

    #[test]
    fn commands_run_in_folder_and_terminal() {
        let text = "```console\n$ mkdir sub\n$ cd sub\n$ echo $ANSWER; basename $PWD; ls no\n\
                    any\na$ echo one\nb$ echo two; sleep 1000 &\na$ echo three\n```\n";
        assert_eq!(
            outputs("terminals", text).unwrap()[1..],
            [
                "42|sub|ls: cannot access 'no': No such file or directory",
                "one",
                "three",
                "two"
            ]
        );
    }

    /// The test starts itself from a shell that ignores SIGINT, like one that runs in the
    /// background.
    #[test]
    fn interrupt_ends_program_after_output() {
        let text = "```console\n$ sleep 0.2; echo ready; sleep 1000\nready\n^C\n```\n";
        if std::env::var_os(IGNORING).is_some() {
            assert_eq!(outputs("interrupt", text).unwrap(), ["ready"]);
            return;
        }
        let name = "lessons::session::tests::interrupt_ends_program_after_output";
        let status = Command::new("sh")
            .args(["-c", "trap '' INT; exec \"$@\"", "sh"])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env(IGNORING, "1")
            .status();
        assert!(status.unwrap().success());
    }

    #[test]
    fn failure_without_output_is_an_error() {
        let error = outputs("failure", "```console\n$ false\n```\n").unwrap_err();
        assert!(error.to_string().starts_with("`false` failed"), "{error}");
        assert_eq!(
            outputs("expected", "```console\n$ false\nx\n```\n").unwrap(),
            [""]
        );
    }

    #[test]
    fn listening_sockets_are_found() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt \
                     uid timeout inode\n\
                     0: 0100007F:1D2F 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 \
                     0 4711 1\n\
                     1: 0100007F:1D2F 0100007F:8C1A 01 00000000:00000000 00:00000000 00000000 0 \
                     0 4712 1\n";
        assert_eq!(listening_inodes(table), ["4711"]);
    }
}
