//! Devices, contexts and their queries: `ibv_get_device_list(3)`, `ibv_query_device(3)`,
//! `ibv_query_gid(3)`.
//!
//! `list` contains the devices, `context` the opened devices, and `handles` the objects that
//! imported contexts find by number. `query` and `gid` answer queries. `face` contains the
//! differences between the faces. `pending_events` discards events of objects that are being
//! destroyed. This room uses `abi`, `border` and `process`; `open` creates its contexts.

pub(crate) mod context;
pub(crate) mod face;
pub(crate) mod gid;
pub(crate) mod handles;
pub(crate) mod list;
pub(crate) mod pending_events;
pub(crate) mod query;

pub(crate) use context::{ContextObject, check_same, checked_context, context};
