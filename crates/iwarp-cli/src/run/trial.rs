//! Loads the libraries into the system's shell, for `iwarp doctor`.

use super::check::verbs_path;
use super::inspect::Program;
use super::{Settings, library, own_path};
use clap::Parser;
use iwarp_cli_common::error::{Context as _, Error, Result};
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

/// Parses an empty command line, for the default settings.
#[derive(Debug, Parser)]
struct Defaults {
    #[command(flatten)]
    settings: Settings,
}

/// Runs `sh` with the variables of `iwarp run`, and lets its loader load our library, with all
/// symbols. Returns a sentence with the library's path.
///
/// # Errors
/// The libraries are not installed, or the loader does not accept them; the error says why.
pub(crate) fn try_loading() -> Result<String> {
    let libraries = library::find(false)?;
    let settings = Defaults::parse_from(["iwarp"]).settings;
    let variables = settings.variables(&libraries, &own_path()?)?;
    let shell = Program::find(&[OsString::from("sh")])
        .ok_or_else(|| Error::failed("there is no shell (sh) that could load the libraries"))?;
    if let Some(obstacle) = shell.obstacle() {
        return Err(Error::failed(format!(
            "{} cannot load iwarp's libraries: {obstacle}",
            shell.file.display()
        )));
    }
    let verbs = verbs_path(&libraries);
    let preload: Vec<OsString> = [
        Some(verbs.clone().into_os_string()),
        std::env::var_os("LD_PRELOAD"),
    ]
    .into_iter()
    .flatten()
    .collect();
    let output = Command::new(&shell.file)
        .args(["-c", ":"])
        .envs(variables)
        .env("LD_PRELOAD", preload.join(":".as_ref()))
        .env("LD_BIND_NOW", "1")
        .output()
        .context(shell.file.display())?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() || !said.trim().is_empty() {
        return Err(Error::failed(format!(
            "the loader does not accept {}: {}",
            verbs.display(),
            said.trim().replace('\n', " ")
        )));
    }
    let target = verbs
        .canonicalize()
        .unwrap_or_else(|_| PathBuf::from(&verbs));
    Ok(format!(
        "{} loads {}",
        shell.file.display(),
        target.display()
    ))
}
