//! Code that the subcommands of `iwarp` share.
//!
//! `error` defines failures and exit codes; `out`, `text` and `units` format output. Clients
//! connect with `rdma` and `retry`; servers listen and admit clients with `service`.
#![forbid(unsafe_code)]

pub mod error;
pub mod out;
pub mod rdma;
pub mod retry;
pub mod service;
pub mod signals;
pub mod text;
pub mod units;
