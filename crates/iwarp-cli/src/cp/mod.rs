//! `iwarp cp`: one-sided file copy.
//!
//! `session` knows what happens in which order, `protocol` how it is said, `part` keeps files that are not complete yet, and
//! `confine` keeps peers inside the served directory. The RDMA connection is behind the trait [`session::Link`].

mod args;
#[cfg_attr(not(test), expect(dead_code, reason = "called by the RDMA link"))]
mod confine;
mod part;
#[cfg_attr(not(test), expect(dead_code, reason = "called by the RDMA link"))]
mod protocol;
#[cfg_attr(not(test), expect(dead_code, reason = "called by the RDMA link"))]
mod session;
#[cfg(test)]
mod session_tests;

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
