//! `cargo xtask pictures`: draws the README's diagram and terminal session.
//!
//! The session is drawn from a recording in `docs/pictures`; `--record` makes a new one. The curves
//! come from `cargo xtask bench --draw`, which draws the recorded measurements.

mod diagram;
mod session;
mod theme;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::Args;

use theme::THEMES;
use xtask::context::Context;
use xtask::{install, layout};

const FOLDER: &str = "docs/pictures";
const RECORDING: &str = "session.json";

/// Arguments of `cargo xtask pictures`.
#[derive(Args)]
pub(crate) struct PicturesArgs {
    /// Record the terminal session again
    #[arg(long)]
    record: bool,
    /// The folder with bin/iwarp for the recording [default: build and install below the target
    /// folder]
    #[arg(long, value_name = "DIR", requires = "record")]
    prefix: Option<PathBuf>,
}

/// Draws the pictures.
///
/// # Errors
/// If a file cannot be read or written, or if the programs of the session fail.
pub(crate) fn command(args: &PicturesArgs) -> Result<bool> {
    let context = Context::new(false, false)?;
    let folder = context.root.join(FOLDER);
    if args.record {
        let prefix = match &args.prefix {
            Some(prefix) => fs::canonicalize(prefix).context("the prefix")?,
            None => installed(&context)?,
        };
        let lines = session::record(&prefix)?;
        fs::write(folder.join(RECORDING), session::to_json(&lines)?)?;
    }
    for (name, svg) in all(&folder)? {
        fs::write(folder.join(&name), svg)?;
        println!("{FOLDER}/{name}");
    }
    Ok(true)
}

fn installed(context: &Context) -> Result<PathBuf> {
    let prefix = context.target.join("lessons/prefix");
    let built = install::build(context)?;
    layout::put(&layout::files(context, &built)?, &prefix)?;
    Ok(prefix)
}

/// Returns the names and contents of all pictures.
fn all(folder: &Path) -> Result<Vec<(String, String)>> {
    let mut pictures: Vec<(String, String)> = THEMES
        .iter()
        .map(|theme| (format!("layers-{}.svg", theme.name), diagram::svg(theme)))
        .collect();
    let recording = folder.join(RECORDING);
    let text = fs::read_to_string(&recording).with_context(|| recording.display().to_string())?;
    let lines = session::from_json(&text)?;
    pictures.push(("session.svg".to_owned(), session::svg(&lines)));
    Ok(pictures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn committed_pictures_are_current() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("..")
            .join(FOLDER);
        for (name, svg) in all(&folder).unwrap() {
            let committed = fs::read_to_string(folder.join(&name)).unwrap();
            assert!(
                committed == svg,
                "{name} is old: run `cargo xtask pictures`"
            );
        }
    }
}
