//! Runs all examples of the crate, as their first lines say: with both ends in one process, and
//! with each end in a process of its own. The client must print what these lines promise. The crate
//! `iwarp-http` compiles this file, too.
//!
//! The first lines of an example are its documentation, with two blocks: `sh` contains commands
//! without arguments, with `serve`, and with `connect`; `text` contains what the client prints. A
//! server prints `listening on ADDRESS`, and serves until it is killed or its client has left.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

const PACKAGE: &str = env!("CARGO_PKG_NAME");
const LIMIT: Duration = Duration::from_secs(120);
const MOST_LINES: usize = 120;

struct Example {
    name: String,
    text: String,
}

impl Example {
    fn all() -> Vec<Self> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
        let files = fs::read_dir(folder).expect("examples");
        let all = files.map(|file| {
            let path = file.expect("an example").path();
            let name = path.file_stem().expect("a name").to_string_lossy();
            let name = name.into_owned();
            let text = fs::read_to_string(&path).expect("text");
            Self { name, text }
        });
        all.collect()
    }

    /// Returns the lines of a block of its documentation.
    fn block(&self, language: &str) -> Vec<&str> {
        let opening = format!("//! ```{language}");
        let lines = self.text.lines().skip_while(|line| *line != opening);
        let lines = lines.skip(1).take_while(|line| *line != "//! ```");
        let lines: Vec<_> = lines.filter_map(|line| line.strip_prefix("//! ")).collect();
        assert!(!lines.is_empty(), "{}: no block `{language}`", self.name);
        lines
    }

    /// Returns the arguments of each command, without its comment.
    fn commands(&self) -> Vec<Vec<&str>> {
        let start = format!("cargo run -p {PACKAGE} --example {}", self.name);
        let commands = self.block("sh").into_iter().map(|line| {
            let command = line.split('#').next().unwrap_or_default();
            let arguments = command.strip_prefix(&start);
            let arguments = arguments.unwrap_or_else(|| panic!("not '{start} …': {line}"));
            arguments.split_whitespace().collect()
        });
        commands.collect()
    }

    /// Returns the path of the program. `cargo test` builds the examples, but `cargo test --test
    /// it` does not, so this function builds one that is missing.
    fn program(&self) -> PathBuf {
        let test = std::env::current_exe().expect("the path of this test");
        let profile = test.parent().and_then(Path::parent);
        let profile = profile.expect("a target directory");
        let path = profile.join("examples").join(&self.name);
        if !path.exists() {
            let mut cargo = Command::new(env!("CARGO"));
            cargo.args(["build", "--package", PACKAGE, "--example", &self.name]);
            let target = profile.parent().expect("a target directory");
            let built = cargo.arg("--target-dir").arg(target).status();
            assert!(built.expect("cargo runs").success());
        }
        path
    }

    fn start(&self, folder: &Path, arguments: &[String]) -> Running {
        let mut command = Command::new(self.program());
        command.args(arguments).current_dir(folder);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        Running(command.spawn().expect("the example starts"))
    }

    /// Runs it to its end, and checks the output of the client.
    fn run(&self, folder: &Path, arguments: &[String]) {
        let name = &self.name;
        let (status, out) = self.start(folder, arguments).finish();
        assert!(status.success(), "{name} {arguments:?}: {status}, {out}");
        for line in self.block("text") {
            assert!(
                out.lines().any(|l| l == line),
                "{name} {arguments:?}: {line} not in {out}"
            );
        }
    }

    /// Runs both ends in one process, and then each end in its own.
    fn test(&self) {
        let folder = format!("{}-{}-{}", PACKAGE, self.name, std::process::id());
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder);
        fs::create_dir_all(&folder).expect("a folder");
        fs::write(folder.join("file.bin"), self.text.repeat(1000)).expect("a file");
        let (mut servers, mut addresses, mut kinds) = (Vec::new(), Vec::new(), Vec::new());
        for command in self.commands() {
            let mut arguments: Vec<_> = command.iter().map(|&word| word.to_owned()).collect();
            let kind = command.first().copied();
            match kind {
                Some("serve") => {
                    "127.0.0.1:0".clone_into(&mut arguments[1]);
                    let mut server = self.start(&folder, &arguments);
                    addresses.push((command[1], server.address()));
                    servers.push(server);
                }
                _ => {
                    for word in &mut arguments {
                        let known = addresses.iter().find(|(written, _)| word == written);
                        word.clone_from(known.map_or(&word.clone(), |(_, address)| address));
                    }
                    self.run(&folder, &arguments);
                }
            }
            kinds.push(kind);
        }
        for kind in [None, Some("serve"), Some("connect")] {
            assert!(kinds.contains(&kind), "{}: no command {kind:?}", self.name);
        }
        for server in servers {
            server.has_not_failed();
        }
        fs::remove_dir_all(&folder).expect("the folder is removed");
    }
}

/// A process that is killed when this value is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    /// Returns the address that a server prints.
    fn address(&mut self) -> String {
        let mut line = String::new();
        let out = self.0.stdout.as_mut().expect("a pipe");
        // The server prints little more, so nothing is lost with the reader's buffer.
        BufReader::new(out).read_line(&mut line).expect("a line");
        let address = line.trim_end().strip_prefix("listening on ");
        address
            .unwrap_or_else(|| panic!("no address: {line}"))
            .to_owned()
    }

    fn finish(mut self) -> (ExitStatus, String) {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.0.try_wait().expect("wait") {
                break status;
            }
            assert!(start.elapsed() < LIMIT, "it hangs");
            std::thread::sleep(Duration::from_millis(10));
        };
        let mut text = String::new();
        let out = self.0.stdout.as_mut().expect("a pipe");
        out.read_to_string(&mut text).expect("text");
        (status, text)
    }

    /// Checks the exit code, if it has ended.
    fn has_not_failed(mut self) {
        let status = self.0.try_wait().expect("wait");
        assert!(status.is_none_or(|status| status.success()), "{status:?}");
    }
}

#[test]
fn examples_do_what_they_say() {
    let all = Example::all();
    assert!(!all.is_empty());
    std::thread::scope(|scope| {
        for example in &all {
            scope.spawn(|| example.test());
        }
    });
}

#[test]
fn wrong_arguments_are_refused() {
    for example in Example::all() {
        let mut command = Command::new(example.program());
        let out = command.arg("--help").output().expect("it runs");
        assert!(!out.status.success());
        let usage = format!("Error: usage: {} [serve ADDR:PORT", example.name);
        let text = String::from_utf8_lossy(&out.stderr);
        assert!(text.starts_with(&usage), "{text}");
    }
}

#[test]
fn examples_are_short() {
    for example in Example::all() {
        let lines = example.text.lines().count();
        assert!(lines <= MOST_LINES, "{}: {lines} lines", example.name);
    }
}
