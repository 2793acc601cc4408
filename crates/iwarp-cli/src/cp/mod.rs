//! `iwarp cp`: one-sided file copy.

mod args;

pub(crate) use args::CpArgs;

use crate::error::{Error, Result};
use args::{Call, DEFAULT_PORT};

/// Runs `iwarp cp`.
pub(crate) fn run(args: &CpArgs) -> Result<()> {
    let call = args.call()?;
    tracing::debug!(?call, port = args.port.unwrap_or(DEFAULT_PORT), "cp");
    match call {
        Call::Serve { .. } | Call::Put { .. } | Call::Get { .. } => {
            Err(Error::failed("this build has no RDMA runtime yet"))
        }
    }
}
