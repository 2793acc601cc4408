//! The verbs objects without the safe interface: shared handles, memory by address.
//!
//! The C libraries use these objects, and so can programs that manage their own memory. The one `unsafe` step is registering
//! memory ([`Context::register`]); all later calls use keys that are checked at every access. All handles are cheap to clone,
//! `Send` and `Sync`. The safe interface at the root of the crate wraps these objects.

pub mod cm;

mod absent;
mod after;
mod channel;
mod closing;
mod context;
mod cork;
mod cq;
mod drive;
mod events;
mod inject;
mod late;
mod left;
mod linger;
mod link_state;
mod numbered;
mod peer;
mod pool;
mod qp;
pub(crate) mod report;
mod rest;
mod retry;
mod silence;
mod slots;
mod source;
mod srq;
#[cfg(test)]
mod start_tests;
mod stats;
mod table_lock;
mod tags;
mod tally;
#[cfg(test)]
pub(crate) mod testing;
mod timer;
mod ud;
mod waiting;
mod xrc;

pub use crate::complain::once as complain_once;
pub use crate::progress::in_vain::looked_in_vain;
pub use crate::sys::fork::{generation as fork_generation, install as notice_forks};
pub use crate::sys::on_demand::{Prefetch, prefetch};
pub use crate::sys::process_lock::{self, ProcessLock};
pub use channel::CompletionChannel;
pub use context::Context;
pub use cq::{CompletionQueue, CqError};
pub use events::{AsyncEvent, AsyncEventKind, EventQueue, PortEvent};
pub use iwarp_rnic::qp::XrcEnd;
pub use iwarp_rnic::tags::{MAX_TAG_SGE, MAX_TAGS, TaggedBuffer};
pub use qp::{QpAttributes, QueuePair};
pub use retry::Retry;
pub use srq::SharedReceiveQueue;
pub use tags::{TagOperation, TagRequest};
pub use ud::{UdAddress, UdAttributes, UdDrops, UdEvent, UdQueuePair, UdSendWr};
pub use xrc::{XrcDomain, XrcSendWr, XrcTargetAttributes};
