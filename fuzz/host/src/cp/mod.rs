//! The modules of `iwarp cp` that read what a peer sends.

#[path = "../../../../crates/iwarp-cli/src/cp/auth.rs"]
pub(crate) mod auth;
#[path = "../../../../crates/iwarp-cli/src/cp/confine.rs"]
pub(crate) mod confine;
#[path = "../../../../crates/iwarp-cli/src/cp/part.rs"]
pub(crate) mod part;
#[path = "../../../../crates/iwarp-cli/src/cp/protocol.rs"]
pub(crate) mod protocol;
#[path = "../../../../crates/iwarp-cli/src/cp/session.rs"]
pub(crate) mod session;
