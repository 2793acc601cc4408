//! The step `spelling`: codespell finds common misspellings in all text files.

use std::process::Command;

use anyhow::{Result, anyhow};

use xtask::context::{Context, find_program};
use xtask::files;
use xtask::outcome::Outcome;
use xtask::process::Log;

/// Words that codespell takes for misspellings and that are right here, one per line.
const WORDS: &str = "xtask/spelling.txt";
/// Files that others or programs wrote, by the beginning or the end of their path.
const FOREIGN: &[&str] = &[
    "rfcs/rfc",
    "fuzz/seeds/",
    "fuzz/host/seeds/",
    "bench/results/",
];
const NO_TEXT: &[&str] = &[".pcap", ".pcapng", ".bin", ".png", ".svg", ".lock"];

/// Checks every text file that git tracks or would add.
pub(crate) fn run(context: &Context, log: &mut Log) -> Result<Outcome> {
    if find_program("codespell").is_none() {
        return Ok(Outcome::Skipped("codespell is not installed".into()));
    }
    let files: Vec<String> = files::listed(&context.root)?
        .into_iter()
        .filter(|file| is_checked(file))
        .collect();
    let mut command = Command::new("codespell");
    command.current_dir(&context.root);
    command.args(["--ignore-words", WORDS]).args(&files);
    // The error of `run` would name all files.
    let run = log.run(&mut command);
    run.map_err(|_| anyhow!("correct these words, or add right ones to {WORDS}"))?;
    log.say(format!("{} files", files.len()));
    Ok(Outcome::Passed)
}

fn is_checked(file: &str) -> bool {
    !FOREIGN.iter().any(|start| file.starts_with(start))
        && !NO_TEXT.iter().any(|ending| file.ends_with(ending))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_files_are_left_out() {
        assert!(is_checked("README.md") && is_checked("crates/iwarp/src/lib.rs"));
        assert!(!is_checked("rfcs/rfc5040.txt") && !is_checked("Cargo.lock"));
        assert!(is_checked("rfcs/exceptions/rfc5040.txt"));
    }
}
