//! `watch-tests PROGRAM [ARGUMENT…]`: runs a test program, kills it if it hangs, and names the test
//! that hung.
//!
//! The environment variable `TEST_LIMIT_S` replaces the limit of a test, in seconds.

use std::io::{IsTerminal as _, Write};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitCode};

use xtask::watch::{Limits, run};

/// The exit code if the program hung, as of timeout(1).
const HUNG: u8 = 124;

fn main() -> ExitCode {
    let mut words = std::env::args_os().skip(1);
    let Some(program) = words.next() else {
        eprintln!("usage: watch-tests PROGRAM [ARGUMENT...]");
        return ExitCode::from(2);
    };
    let mut command = Command::new(&program);
    command.args(words);
    let seconds = std::env::var("TEST_LIMIT_S").ok();
    let limits = Limits::new(seconds.and_then(|text| text.parse().ok()));
    // At a terminal, leave the output to the program: libtest then uses colours, and the user sees
    // which tests are slow.
    let stdout = std::io::stdout();
    let output = (!stdout.is_terminal()).then(|| Box::new(stdout) as Box<dyn Write + Send>);
    match run(&mut command, &limits, output, &mut std::io::stderr()) {
        Ok(Some(status)) => {
            if let Some(signal) = status.signal() {
                eprintln!("{}: {status}", program.to_string_lossy());
                return ExitCode::from(u8::try_from(128 + signal).unwrap_or(u8::MAX));
            }
            ExitCode::from(
                status
                    .code()
                    .and_then(|code| u8::try_from(code).ok())
                    .unwrap_or(1),
            )
        }
        Ok(None) => ExitCode::from(HUNG),
        Err(error) => {
            eprintln!("{}: {error}", program.to_string_lossy());
            ExitCode::FAILURE
        }
    }
}
