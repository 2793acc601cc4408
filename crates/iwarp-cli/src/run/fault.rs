//! `--fault`: injected faults, checked before the program runs.

use iwarp::fault::Spec;
use iwarp_cli_common::error::{Context as _, Error, Result};

/// The value of one `--fault`.
#[derive(Debug, Clone)]
pub(super) enum FaultOption {
    Help,
    /// Faults, as written by the user.
    Faults(String),
}

/// Parses one value. Settings that apply to all rules may be in another `--fault`.
pub(super) fn parse(text: &str) -> std::result::Result<FaultOption, String> {
    if text == "help" {
        return Ok(FaultOption::Help);
    }
    match text.parse::<Spec>() {
        Ok(_) => Ok(FaultOption::Faults(text.to_owned())),
        Err(e) => Err(format!("{e}\n(`iwarp run --fault help` lists the faults)")),
    }
}

/// Returns `true` if the user asked for the list.
pub(super) fn wants_help(all: &[FaultOption]) -> bool {
    all.iter().any(|option| matches!(option, FaultOption::Help))
}

/// Prints the list of faults.
pub(super) fn print_help() {
    iwarp_cli_common::out::line(format_args!("{}", Spec::help().trim_end()));
}

/// Joins all values into one specification. The path of the log becomes absolute, because the
/// program may change its directory before it opens a device.
pub(super) fn joined_spec(all: &[FaultOption]) -> Result<Option<String>> {
    let texts: Vec<&str> = all
        .iter()
        .filter_map(|option| match option {
            FaultOption::Faults(text) => Some(text.as_str()),
            FaultOption::Help => None,
        })
        .collect();
    if texts.is_empty() {
        return Ok(None);
    }
    let spec: Spec = texts
        .join(";")
        .parse()
        .map_err(|e: iwarp::fault::SpecError| Error::usage(format!("--fault: {}", e.mistake())))?;
    let here = std::env::current_dir().context("the directory of the log")?;
    Ok(Some(spec.logging_in(&here).to_string()))
}
