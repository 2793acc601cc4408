//! `iwarp cp`: one-sided file copy.
//!
//! `session` has the steps of a copy in their order, `protocol` the messages, and `part` the files that are not complete yet.
//! `confine` keeps peers inside the served directory. The RDMA connection is behind the trait [`session::Link`] and
//! implemented in `link`; `client` and `server` are the two ends of the command.

mod args;
mod auth;
mod client;
mod confine;
mod link;
mod part;
mod protocol;
mod server;
mod session;
#[cfg(test)]
mod session_steps_tests;
#[cfg(test)]
mod session_tests;

pub(crate) use args::CpArgs;

use crate::error::Result;
use args::{Call, DEFAULT_PORT};
use iwarp::Config;

/// Runs `iwarp cp`.
pub(crate) fn run(args: &CpArgs) -> Result<()> {
    let call = args.call()?;
    let port = args.port.unwrap_or(DEFAULT_PORT);
    tracing::debug!(?call, port, "cp");
    match call {
        Call::Serve { dir } => server::run(args, &dir, port),
        Call::Put { file, host, path } => client::put(args, &file, (&host, port), &path),
        Call::Get { host, path, file } => client::get(args, (&host, port), &path, &file),
    }
}

/// The environment's settings, changed by the arguments.
fn config(args: &CpArgs) -> Config {
    let mut config = crate::rdma::config();
    config.crc = args.crc == args::Crc::On;
    config.markers |= args.markers;
    if let Some(path) = &args.capture {
        config.capture = Some(path.clone());
        config.capture_bytes = Some(args.capture_bytes);
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

    fn of(more: &[&str]) -> Config {
        config(&Wrap::parse_from([&["cp", "a", "h:b"], more].concat()).a)
    }

    #[test]
    fn arguments_change_the_settings() {
        let usual = crate::rdma::config();
        let plain = of(&[]);
        assert!(plain.crc);
        assert_eq!(plain.markers, usual.markers);
        assert_eq!(plain.capture, usual.capture);
        assert!(!of(&["--crc", "off"]).crc);
        assert!(of(&["--markers"]).markers);
        let recorded = of(&["--capture", "x.pcapng", "--capture-bytes", "4M"]);
        assert_eq!(recorded.capture, Some("x.pcapng".into()));
        assert_eq!(recorded.capture_bytes, Some(4 << 20));
        assert_eq!(of(&["--capture", "x"]).capture_bytes, Some(16 << 20));
    }
}
