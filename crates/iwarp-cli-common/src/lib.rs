//! What the subcommands of the command `iwarp` share.
//!
//! `error` has their failures and exit codes, `out`, `text` and `units` their output. Clients use
//! `rdma` and `patience` to connect; servers use `service` to listen and to admit clients.
#![forbid(unsafe_code)]

pub mod error;
pub mod out;
pub mod patience;
pub mod rdma;
pub mod service;
pub mod signals;
pub mod text;
pub mod units;
