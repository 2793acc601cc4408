//! Completion queues and completion channels.
//!
//! `object` contains the objects; `queue` and `channel` contain the functions that create and
//! destroy them and wait for events. `completion` polls, and `extended` polls field by field. This
//! room uses `domain` and the rooms below it.

pub(crate) mod channel;
pub(crate) mod completion;
mod extended;
mod object;
pub(crate) mod queue;

pub(crate) use object::{CqObject, find};
