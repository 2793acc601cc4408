//! Log output: always to stderr, so that stdout stays clean for tables and JSON.

use tracing_subscriber::EnvFilter;

/// Starts logging. `RUST_LOG` wins over `-v`; without either only warnings are shown.
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
    // A second initialisation (as in tests) is harmless and keeps the first.
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
