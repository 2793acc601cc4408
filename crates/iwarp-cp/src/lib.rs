//! The subcommand `iwarp cp`: copies files by one-sided RDMA.
//!
//! The command `iwarp` includes [`CpArgs`] in its own arguments and calls [`run`].
//!
//! `session` implements the steps of a copy in order, `protocol` the messages, and `part` the
//! partial files. `confine` keeps peers inside the served directory. The trait `Link` in
//! `transport` abstracts the RDMA connection, which `link` implements; `client` and `server` are
//! the two ends of the command.
#![forbid(unsafe_code)]

mod args;
mod auth;
mod client;
mod confine;
#[cfg(fuzzing)]
pub mod fuzzing;
mod link;
mod part;
mod protocol;
mod server;
mod session;
#[cfg(test)]
mod session_steps_tests;
#[cfg(test)]
mod session_tests;
mod transport;

pub use args::CpArgs;

use args::{Call, DEFAULT_PORT};
use iwarp::Config;
use iwarp_cli_common::error::Result;

/// Default limit of a recording.
const DEFAULT_CAPTURE_BYTES: u64 = 16 << 20;

/// Runs `iwarp cp`.
///
/// # Errors
/// Returns a usage error, or the first failure of either end of the copy.
pub fn run(args: &CpArgs) -> Result<()> {
    let call = args.call()?;
    let port = args.port.unwrap_or(DEFAULT_PORT);
    tracing::debug!(?call, port, "cp");
    match call {
        Call::Serve { dir } => server::run(args, &dir, port),
        Call::Put { file, host, path } => client::put(args, &file, (&host, port), &path),
        Call::Get { host, path, file } => client::get(args, (&host, port), &path, &file),
    }
}

/// Returns the configuration from the environment and the arguments.
fn config(args: &CpArgs) -> Config {
    let config = iwarp_cli_common::rdma::config();
    with_options(config, args)
}

/// Applies the options that were given.
fn with_options(mut config: Config, args: &CpArgs) -> Config {
    if let Some(crc) = args.crc {
        config.crc = crc == args::Crc::On;
    }
    config.markers |= args.markers;
    if let Some(path) = &args.capture {
        config.capture = Some(path.clone());
        let bytes = args.capture_bytes.or(config.capture_bytes);
        config.capture_bytes = Some(bytes.unwrap_or(DEFAULT_CAPTURE_BYTES));
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Wrap {
        #[command(flatten)]
        a: CpArgs,
    }

    fn config_with(base: &Config, more: &[&str]) -> Config {
        let args = Wrap::parse_from([&["cp", "a", "h:b"], more].concat()).a;
        with_options(base.clone(), &args)
    }

    /// Each option alone and together with settings of the environment.
    #[test]
    fn options_win_over_environment() {
        let defaults = Config::default();
        let mut environment = Config::default();
        (environment.crc, environment.markers) = (false, true);
        environment.capture = Some("env".into());
        environment.capture_bytes = Some(7);
        type Change = fn(&mut Config);
        let rows: [(&[&str], Change, Change); 7] = [
            (&[], |_| (), |_| ()),
            (&["--crc", "on"], |_| (), |c| c.crc = true),
            (&["--crc", "off"], |c| c.crc = false, |_| ()),
            (&["--markers"], |c| c.markers = true, |_| ()),
            (
                &["--capture", "x"],
                |c| record(c, 16 << 20),
                |c| record(c, 7),
            ),
            (
                &["--capture", "x", "--capture-bytes", "4M"],
                |c| record(c, 4 << 20),
                |c| record(c, 4 << 20),
            ),
            (
                &["--crc", "on", "--markers", "--no-resume", "-q"],
                |c| c.markers = true,
                |c| c.crc = true,
            ),
        ];
        for (options, alone, with_environment) in rows {
            for (base, change) in [(&defaults, alone), (&environment, with_environment)] {
                let mut want = base.clone();
                change(&mut want);
                assert_eq!(config_with(base, options), want, "{options:?}");
            }
        }
    }

    fn record(config: &mut Config, bytes: u64) {
        config.capture = Some("x".into());
        config.capture_bytes = Some(bytes);
    }
}
