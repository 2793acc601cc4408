//! The README's terminal session: two unmodified programs that talk over the software card.
//!
//! The commands run in terminals of their own, and each line is recorded with its time. The picture
//! shows the lines one after the other, in the order in which they came.

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

/// The terminals, from top to bottom.
const TERMINALS: [&str; 2] = ["server", "client"];
/// What the reader would type: the terminal and the command. The client starts when the server
/// listens.
const COMMANDS: &[(usize, &str)] = &[
    (0, "id -un; ls /sys/class/infiniband"),
    (0, "iwarp run -- rping -s -v -C 3 -S 40"),
    (1, "iwarp run -- rping -c -a 127.0.0.1 -v -C 3 -S 40"),
];
const LIMIT: Duration = Duration::from_secs(30);

/// A line on a terminal.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Line {
    terminal: usize,
    /// Milliseconds since the first command.
    time_ms: u64,
    typed: bool,
    text: String,
}

/// Runs the commands and records what the terminals show.
///
/// # Errors
/// If a command cannot be started, fails, or takes too long.
pub(super) fn record(prefix: &Path) -> Result<Vec<Line>> {
    let start = Instant::now();
    let (sender, receiver) = mpsc::channel();
    let mut children = Vec::new();
    let mut lines = Vec::new();
    for &(terminal, command) in COMMANDS {
        if terminal == 1 {
            // rping prints nothing when it listens.
            thread::sleep(Duration::from_secs(1));
        }
        let time_ms = start.elapsed().as_millis() as u64;
        let text = command.to_owned();
        lines.push(Line {
            terminal,
            time_ms,
            typed: true,
            text,
        });
        let mut child = in_terminal(prefix, command)?;
        let output = child.stdout.take().context("a pipe")?;
        read_lines(output, terminal, start, sender.clone());
        if command.starts_with("iwarp") {
            children.push(child);
        } else {
            child.wait()?;
        }
    }
    drop(sender);
    for mut child in children {
        while child.try_wait()?.is_none() {
            if start.elapsed() > LIMIT {
                let _ = child.kill();
                bail!("the programs do not end");
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
    lines.extend(receiver);
    lines.sort_by_key(|line| (line.time_ms, !line.typed));
    ensure!(lines.len() > COMMANDS.len(), "the programs print nothing");
    Ok(lines)
}

/// Starts a command in a terminal of its own, so that it prints as it does for a person.
fn in_terminal(prefix: &Path, command: &str) -> Result<Child> {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut words = Vec::new();
    if rustix::process::geteuid().is_root() {
        // The picture shows what an ordinary user can do.
        words.extend([
            "setpriv",
            "--reuid=nobody",
            "--regid=nogroup",
            "--clear-groups",
        ]);
    }
    words.push("script");
    Command::new(words[0])
        .args(&words[1..])
        .args([
            "--quiet",
            "--flush",
            "--return",
            "--command",
            command,
            "/dev/null",
        ])
        .env("PATH", format!("{}:{path}", prefix.join("bin").display()))
        .env("LC_ALL", "C.UTF-8")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start script (Debian: bsdutils)")
}

fn read_lines(output: ChildStdout, terminal: usize, start: Instant, to: mpsc::Sender<Line>) {
    thread::spawn(move || {
        for text in BufReader::new(output).lines().map_while(Result::ok) {
            let time_ms = start.elapsed().as_millis() as u64;
            let text = text.trim_end().to_owned();
            let _ = to.send(Line {
                terminal,
                time_ms,
                typed: false,
                text,
            });
        }
    });
}

/// Returns the recording as JSON, a line for each line.
pub(super) fn to_json(lines: &[Line]) -> Result<String> {
    let row = |line: &Line| {
        json!([
            line.time_ms,
            TERMINALS[line.terminal],
            line.typed,
            line.text
        ])
        .to_string()
    };
    let rows: Vec<String> = lines.iter().map(row).collect();
    Ok(format!("[\n{}\n]\n", rows.join(",\n")))
}

/// Reads what [`to_json`] has written.
///
/// # Errors
/// If the text is not of this form.
pub(super) fn from_json(text: &str) -> Result<Vec<Line>> {
    let rows: Vec<Value> = serde_json::from_str(text).context("the recorded session")?;
    let line = |row: Value| {
        let name = row[1].as_str()?;
        Some(Line {
            terminal: TERMINALS.iter().position(|known| *known == name)?,
            time_ms: row[0].as_u64()?,
            typed: row[2].as_bool()?,
            text: row[3].as_str()?.to_owned(),
        })
    };
    let lines: Option<Vec<Line>> = rows.into_iter().map(line).collect();
    lines.context("a row of the recorded session is not [ms, terminal, typed, text]")
}

const WIDTH: usize = 680;
const LEFT: usize = 18;
const LINE_HEIGHT: usize = 22;
/// Height of a terminal's bar with its name.
const BAR: usize = 30;
/// Space between and below terminals.
const GAP: usize = 12;
/// The time between two lines of the picture, in milliseconds.
const PACE_MS: usize = 300;

/// Returns the picture as an SVG document. Viewers that show no animation show all lines.
pub(super) fn svg(lines: &[Line]) -> String {
    let mut boxes = String::new();
    let mut text = String::new();
    let mut top = 0;
    for (terminal, name) in TERMINALS.iter().enumerate() {
        let own: Vec<(usize, &Line)> = lines
            .iter()
            .enumerate()
            .filter(|(_, line)| line.terminal == terminal)
            .collect();
        let height = BAR + own.len() * LINE_HEIGHT + GAP;
        frame(&mut boxes, top, height, name);
        for (row, (turn, line)) in own.into_iter().enumerate() {
            let y = top + BAR + (row + 1) * LINE_HEIGHT - 4;
            let delay = turn * PACE_MS;
            let prompt = if line.typed {
                "<tspan class=\"p\">$ </tspan>"
            } else {
                ""
            };
            let class = if line.typed { "l t" } else { "l" };
            let _ = writeln!(
                text,
                "<text class=\"{class}\" x=\"{LEFT}\" y=\"{y}\" \
                 style=\"animation-delay:{delay}ms\">{prompt}{}</text>",
                escaped(&line.text)
            );
        }
        top += height + GAP;
    }
    let height = top - GAP;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\n\
         <title>Two unmodified programs use RDMA on a machine without RDMA hardware</title>\n\
         <style>\n\
         text {{ font: 15px ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace; \
         fill: #c9d1d9; white-space: pre }}\n\
         .t {{ fill: #ffffff; font-weight: bold }}\n\
         .p {{ fill: #7ee787 }}\n\
         .n {{ fill: #9198a1 }}\n\
         .l {{ animation: show 0.2s both }}\n\
         @keyframes show {{ from {{ opacity: 0 }} to {{ opacity: 1 }} }}\n\
         @media (prefers-reduced-motion) {{ .l {{ animation: none }} }}\n\
         </style>\n{boxes}{text}</svg>\n"
    )
}

/// Draws the window of a terminal.
fn frame(out: &mut String, top: usize, height: usize, name: &str) {
    let _ = writeln!(
        out,
        "<rect x=\"0.5\" y=\"{top}.5\" width=\"{}\" height=\"{}\" rx=\"8\" fill=\"#0d1117\" \
         stroke=\"#3d444d\"/>",
        WIDTH - 1,
        height - 1
    );
    for (at, colour) in ["#ff5f57", "#febc2e", "#28c840"].iter().enumerate() {
        let _ = writeln!(
            out,
            "<circle cx=\"{}\" cy=\"{}\" r=\"5\" fill=\"{colour}\"/>",
            LEFT + 4 + at * 18,
            top + 16
        );
    }
    let _ = writeln!(
        out,
        "<text class=\"n\" x=\"{}\" y=\"{}\" text-anchor=\"middle\">{name}</text>",
        WIDTH / 2,
        top + 21
    );
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(terminal: usize, time_ms: u64, typed: bool, text: &str) -> Line {
        Line {
            terminal,
            time_ms,
            typed,
            text: text.to_owned(),
        }
    }

    #[test]
    fn recording_survives_json() {
        let lines = [line(0, 0, true, "a \"b\""), line(1, 17, false, "<c> & d")];
        assert_eq!(from_json(&to_json(&lines).unwrap()).unwrap(), lines);
        assert!(from_json("[[1, \"nobody\", true, \"\"]]").is_err());
    }

    #[test]
    fn lines_appear_in_recorded_order() {
        let lines = [
            line(0, 0, true, "serve"),
            line(1, 5, true, "ask"),
            line(0, 6, false, "<asked>"),
        ];
        let svg = svg(&lines);
        let delay = |text: &str| {
            let before = &svg[..svg.find(text).unwrap()];
            let value = before.rsplit("delay:").next().unwrap();
            value.split("ms").next().unwrap().parse::<usize>().unwrap()
        };
        assert!(delay("serve<") < delay("ask<") && delay("ask<") < delay("&lt;asked&gt;"));
    }
}
