//! The step `spelling`: codespell finds common misspellings in all text files.

use std::process::Command;

use anyhow::{Result, anyhow};

use xtask::context::{Context, find_program};
use xtask::files;
use xtask::outcome::Outcome;
use xtask::process::Log;

/// Correct words that codespell takes for misspellings, one per line.
const WORDS: &str = "xtask/spelling.txt";

/// Checks every text file that git tracks or would add.
pub(crate) fn run(context: &Context, log: &mut Log) -> Result<Outcome> {
    if find_program("codespell").is_none() {
        return Ok(Outcome::Skipped("codespell is not installed".into()));
    }
    let files = files::own_texts(&context.root)?;
    let mut command = Command::new("codespell");
    command.current_dir(&context.root);
    command.args(["--ignore-words", WORDS]).args(&files);
    // Replace the error of `run`, which would name all files.
    let run = log.run(&mut command);
    run.map_err(|_| anyhow!("correct these words, or add correct words to {WORDS}"))?;
    log.say(format!("{} files", files.len()));
    Ok(Outcome::Passed)
}
