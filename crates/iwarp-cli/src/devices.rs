//! `iwarp devices`: what the library offers on this machine.

use crate::error::{Error, Result};
use clap::Args;

/// Arguments of `iwarp devices`.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES:
  iwarp devices            one line per device
  iwarp devices -v         with all limits
  iwarp devices --json     the same for programs")]
pub(crate) struct DevicesArgs {
    /// Show all limits of each device
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// Print JSON instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// Lists the devices.
pub(crate) fn run(args: &DevicesArgs) -> Result<()> {
    tracing::debug!(verbose = args.verbose, json = args.json, "devices");
    Err(Error::failed("this build has no RDMA runtime yet"))
}
