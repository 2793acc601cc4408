//! Sets up the log. It goes to stderr, so that stdout contains only tables and JSON.

use clap::ValueEnum;
use iwarp_cli_common::error::Error;
use std::sync::OnceLock;
use tracing_subscriber::EnvFilter;

/// How log lines are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people
    Text,
    /// One JSON object per line, for programs
    Json,
}

/// The variable with the format, if there is no option.
const VARIABLE: &str = "IWARP_LOG_FORMAT";

static FORMAT: OnceLock<Format> = OnceLock::new();

/// Starts logging. `RUST_LOG` takes precedence over `-v`; the default is warnings. The option
/// `format` takes precedence over the environment.
pub(crate) fn init(verbosity: u8, format: Option<Format>) {
    let default = match verbosity {
        0 => "warn",
        1 => "iwarp=info,iwarp_cli=info",
        2 => "debug",
        _ => "trace",
    };
    let wanted = std::env::var_os(EnvFilter::DEFAULT_ENV).filter(|v| !v.is_empty());
    let wanted = wanted.map(|v| EnvFilter::try_new(v.to_string_lossy()));
    let refused = wanted
        .as_ref()
        .and_then(|w| w.as_ref().err())
        .map(ToString::to_string);
    let filter = wanted
        .and_then(Result::ok)
        .unwrap_or_else(|| EnvFilter::new(default));
    let set = std::env::var(VARIABLE).unwrap_or_default();
    let known = Format::from_str(&set, true);
    let format = format.or(known.clone().ok()).unwrap_or(Format::Text);
    let _ = FORMAT.set(format);
    subscribe(filter, format);
    if let Some(why) = refused {
        tracing::warn!("RUST_LOG is ignored: {why}");
    }
    if known.is_err() && !set.is_empty() {
        tracing::warn!("{VARIABLE}={set:?} is ignored: it is neither text nor json");
    }
}

fn subscribe(filter: EnvFilter, format: Format) {
    let common = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    // Tests may initialise the log twice; the first initialisation wins.
    let _ = match format {
        Format::Text => common
            .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
            .with_target(false)
            .try_init(),
        Format::Json => common.json().flatten_event(true).try_init(),
    };
}

/// Prints why the command fails: as the last line of the log if that is JSON.
pub(crate) fn failure(error: &Error) {
    if FORMAT.get() == Some(&Format::Json) && tracing::enabled!(tracing::Level::ERROR) {
        tracing::error!("{error}");
    } else {
        eprintln!("iwarp: {error}");
    }
}
