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
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    // A second initialisation (as in tests) is harmless and keeps the first.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .with_target(false)
        .try_init();
}
