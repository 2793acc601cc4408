//! Devices, contexts and their queries: `ibv_get_device_list(3)`, `ibv_query_device(3)`,
//! `ibv_query_gid(3)`.
//!
//! `list` has the devices, `context` the opened ones, `handles` what imported contexts find by
//! number. `query` and `gid` answer queries, `face` has the differences between the faces, and
//! `pending_events` withdraws events of objects that are being destroyed. This room uses `abi`,
//! `border` and `process`. Every room above uses it; `open` creates its contexts.

pub(crate) mod context;
pub(crate) mod face;
pub(crate) mod gid;
pub(crate) mod handles;
pub(crate) mod list;
pub(crate) mod pending_events;
pub(crate) mod query;

pub(crate) use context::{ContextObject, check_same, checked_context, context};
