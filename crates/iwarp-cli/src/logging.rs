//! Sets up the log. It goes to stderr, so that stdout contains only tables and JSON.

use tracing_subscriber::EnvFilter;

/// Starts logging. `RUST_LOG` takes precedence over `-v`; the default is warnings.
pub(crate) fn init(verbosity: u8) {
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
    // Tests may initialise the log twice; the first initialisation wins.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .with_target(false)
        .try_init();
    if let Some(why) = refused {
        tracing::warn!("RUST_LOG is ignored: {why}");
    }
}
