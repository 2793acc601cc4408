//! `iwarp stat --watch` on a terminal: it fits, scrolls, sorts, and restores the terminal.

use crate::common::{LIMIT, Running, Scratch, iwarp, str, succeed};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixListener;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A process answers with these queue pairs as often as it is asked.
fn answer(directory: &Path, number: u32, queue_pairs: &[Value]) {
    let text = json!({"format": 1, "process": {"pid": number, "age_ns": 1, "command": "program"},
                      "devices": [{"name": "iwarp0", "address": "127.0.0.1"}],
                      "queue_pairs": queue_pairs});
    let path = directory.join(format!("iwarp-stat.{number}.{number:016x}"));
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        for socket in listener.incoming() {
            let _ = socket.unwrap().write_all(text.to_string().as_bytes());
        }
    });
}

fn queue_pairs(count: u32) -> Vec<Value> {
    (1..=count)
        .map(|n| {
            json!({"device": "iwarp0", "number": n, "state": "RTS",
                   "counters": {"tx_bytes": 1000 * ((n * 7) % count + 1)},
                   "connection": {"peer": format!("10.0.{n}.1:5000"), "tcp_rtt_us": n}})
        })
        .collect()
}

/// The command on a pseudo-terminal, and what it has written so far.
struct Terminal {
    running: Running,
    /// The user's side.
    keyboard: File,
    /// The side of the command.
    line: File,
    output: Arc<Mutex<Vec<u8>>>,
    modes: LocalModes,
}

impl Terminal {
    fn start(directory: &Path, (rows, columns): (u16, u16), options: &[&str]) -> Self {
        let keyboard = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&keyboard).unwrap();
        unlockpt(&keyboard).unwrap();
        let name = ptsname(&keyboard, Vec::new()).unwrap();
        let keyboard = File::from(keyboard);
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY;
        let line = rustix::fs::open(name, flags, rustix::fs::Mode::empty()).unwrap();
        let line = File::from(line);
        let modes = tcgetattr(&line).unwrap().local_modes;
        resize(&line, rows, columns);
        let args = ["stat", "--watch=0.1", "--directory", str(directory)];
        let mut command = iwarp(&[&args, options].concat());
        command
            .env("TERM", "xterm")
            .stdin(Stdio::from(line.try_clone().unwrap()))
            .stdout(Stdio::from(line.try_clone().unwrap()));
        let running = Running(command.spawn().unwrap());
        let output = Arc::new(Mutex::new(Vec::new()));
        let (mut from, to) = (keyboard.try_clone().unwrap(), Arc::clone(&output));
        std::thread::spawn(move || {
            let mut octets = [0; 4096];
            while let Ok(n @ 1..) = from.read(&mut octets) {
                to.lock().unwrap().extend_from_slice(&octets[..n]);
            }
        });
        Self {
            running,
            keyboard,
            line,
            output,
            modes,
        }
    }

    fn text(&self) -> String {
        let output = self.output.lock().unwrap();
        // The terminal inserts a carriage return in front of each line feed.
        String::from_utf8_lossy(&output).replace("\r\r\n", "\r\n")
    }

    /// Waits for a complete screen that satisfies the condition, and returns its lines.
    fn screen(&mut self, what: &str, condition: impl Fn(&[&str]) -> bool) -> Vec<String> {
        let begin = Instant::now();
        loop {
            let text = self.text();
            if let Some((before, _)) = text.rsplit_once("\x1b[J")
                && let Some((_, frame)) = before.rsplit_once("\x1b[H")
            {
                let lines: Vec<_> = frame.split("\x1b[K\r\n").collect();
                if condition(&lines) {
                    let clean = |line: &&str| line.replace("\x1b[K", "");
                    return lines.iter().map(clean).collect();
                }
            }
            let last = text.rsplit("\x1b[H").next().unwrap_or_default();
            assert!(begin.elapsed() < LIMIT, "no screen with {what}: {last:?}");
            assert!(self.running.0.try_wait().unwrap().is_none(), "{last:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.running.0);
        kill_process(pid, signal).unwrap();
    }

    /// Waits for the end of the command, and checks that the terminal is as before.
    fn end(mut self) -> std::process::ExitStatus {
        let status = self.running.wait(LIMIT).expect("iwarp stat ends");
        assert_eq!(tcgetattr(&self.line).unwrap().local_modes, self.modes);
        let begin = Instant::now();
        while !self.text().ends_with("\x1b[?7h\x1b[?25h\x1b[?1049l") {
            assert!(begin.elapsed() < LIMIT, "{:?}", self.text());
            std::thread::sleep(Duration::from_millis(5));
        }
        status
    }
}

fn resize(line: &File, rows: u16, columns: u16) {
    let size = Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    tcsetwinsize(line, size).unwrap();
}

fn check_size(screen: &[String], rows: usize, columns: usize) {
    assert!(screen.len() <= rows, "{screen:#?}");
    for line in screen {
        assert!(line.chars().count() <= columns, "{line}");
    }
}

#[test]
fn screen_fits_and_scrolls() {
    let scratch = Scratch::new();
    answer(&scratch.sub("stat"), 1, &queue_pairs(50));
    let mut terminal = Terminal::start(&scratch.path("stat"), (12, 60), &[]);
    let first = terminal.screen("the heading", |lines| {
        lines[0].contains("1 process, 50 queue pairs")
    });
    check_size(&first, 12, 60);
    assert_eq!(first.len(), 12, "{first:#?}");
    assert!(first[1].starts_with("process "), "{first:#?}");
    assert!(
        !tcgetattr(&terminal.line)
            .unwrap()
            .local_modes
            .contains(LocalModes::ICANON)
    );
    terminal.press("\x1b[B\x1b[B");
    terminal.screen("two lines less", |lines| !lines[2].contains("iwarp0"));
    terminal.press("G");
    let last = terminal.screen("the end", |lines| {
        lines.last().unwrap().contains("10.0.50.1")
    });
    check_size(&last, 12, 60);
    terminal.press("g");
    terminal.screen("the start", |lines| lines[1].starts_with("process "));

    resize(&terminal.line, 40, 100);
    terminal.signal(Signal::WINCH);
    let large = terminal.screen("40 lines", |lines| lines.len() == 40);
    check_size(&large, 40, 100);
    assert!(
        large.iter().any(|line| line.ends_with(" RTT")),
        "{large:#?}"
    );
    terminal.press("q");
    assert!(terminal.end().success());
}

#[test]
fn key_changes_the_order() {
    let scratch = Scratch::new();
    answer(&scratch.sub("stat"), 1, &queue_pairs(5));
    let options = ["--sort", "rtt"];
    let mut terminal = Terminal::start(&scratch.path("stat"), (20, 160), &options);
    let screen = terminal.screen("the order", |lines| lines[0].contains("by rtt"));
    let first = screen.iter().find(|line| line.contains("10.0.")).unwrap();
    assert!(first.contains("10.0.5.1"), "{screen:#?}");
    // After the last column comes the default order, and then the first column.
    terminal.press("s");
    let screen = terminal.screen("the order", |lines| lines[0].contains("by process"));
    let first = screen.iter().find(|line| line.contains("10.0.")).unwrap();
    assert!(first.contains("10.0.1.1"), "{screen:#?}");
    terminal.press("sss");
    terminal.screen("the order", |lines| lines[0].contains("by peer"));
    terminal.press("q");
    assert!(terminal.end().success());
}

#[test]
fn signals_restore_the_terminal() {
    for (signal, cause) in [
        (Signal::INT, None),
        (Signal::TERM, Some(15)),
        (Signal::HUP, Some(1)),
    ] {
        let scratch = Scratch::new();
        answer(&scratch.sub("stat"), 1, &queue_pairs(1));
        let mut terminal = Terminal::start(&scratch.path("stat"), (24, 80), &[]);
        terminal.screen("a table", |lines| lines.len() > 1);
        terminal.signal(signal);
        let status = terminal.end();
        assert_eq!(status.signal(), cause, "{signal:?}: {status}");
        assert_eq!(status.success(), cause.is_none());
    }
}

/// While the command is suspended, the shell has the terminal.
#[test]
fn suspended_command_restores_the_terminal() {
    let scratch = Scratch::new();
    answer(&scratch.sub("stat"), 1, &queue_pairs(1));
    let mut terminal = Terminal::start(&scratch.path("stat"), (24, 80), &[]);
    terminal.screen("a table", |lines| lines.len() > 1);
    terminal.signal(Signal::TSTP);
    let begin = Instant::now();
    while tcgetattr(&terminal.line).unwrap().local_modes != terminal.modes {
        assert!(begin.elapsed() < LIMIT);
        std::thread::sleep(Duration::from_millis(5));
    }
    let status = format!("/proc/{}/stat", terminal.running.0.id());
    while !std::fs::read_to_string(&status).unwrap().contains(") T ") {
        assert!(begin.elapsed() < LIMIT);
        std::thread::sleep(Duration::from_millis(5));
    }
    let before = terminal.text().len();
    terminal.signal(Signal::CONT);
    while !terminal.text()[before..].contains("\x1b[J") {
        assert!(begin.elapsed() < LIMIT);
        std::thread::sleep(Duration::from_millis(5));
    }
    terminal.press("q");
    assert!(terminal.end().success());
}

/// All outputs have these options.
#[test]
fn processes_and_peers_are_filtered() {
    let scratch = Scratch::new();
    let dir = scratch.sub("stat");
    answer(&dir, 11, &queue_pairs(3));
    answer(&dir, 12, &queue_pairs(2));
    // Both sockets belong to this process.
    let own = std::process::id().to_string();
    let stat = |options: &[&str]| succeed(&[&["stat", "--directory", str(&dir)], options].concat());
    let table = stat(&["--pid", &format!("{own},4194304"), "--peer", "10.0.3.0/24"]);
    let processes = table.lines().filter(|line| line.starts_with("process "));
    assert_eq!(processes.count(), 1, "{table}");
    assert!(
        table.contains("10.0.3.1:5000") && !table.contains("10.0.2.1"),
        "{table}"
    );
    let document: Value =
        serde_json::from_str(&stat(&["--json", "--peer", "10.0.2.1:5000"])).unwrap();
    let processes = document["processes"].as_array().unwrap();
    assert_eq!(processes.len(), 2, "{document}");
    for process in processes {
        let queue_pairs = process["statistics"]["queue_pairs"].as_array().unwrap();
        assert_eq!(queue_pairs.len(), 1, "{document}");
        assert_eq!(queue_pairs[0]["number"], 2);
    }
    let nothing = stat(&["--peer", "::1"]);
    assert_eq!(nothing, "no queue pair is connected to such a peer\n");
}
