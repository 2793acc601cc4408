//! What the modules of the command take from `service`, of which the rest needs a server.

#[path = "../../../crates/iwarp-cli/src/service/budget.rs"]
mod budget;

pub(crate) use budget::zeros;
