//! The verbs objects without the safe interface: shared handles, memory by address.
//!
//! The C libraries use these objects, and so can programs that manage their own memory. The one `unsafe` step is registering
//! memory ([`Context::register`]); all later calls use keys that are checked at every access. All handles are cheap to clone,
//! `Send` and `Sync`. The safe interface at the root of the crate wraps these objects.

pub use crate::cm;
pub use crate::complain::once as complain_once;
pub use crate::conn::qp::{QpAttributes, QueuePair};
pub use crate::conn::retry::Retry;
pub use crate::objects::channel::CompletionChannel;
pub use crate::objects::context::Context;
pub use crate::objects::cq::{CompletionQueue, CqError};
pub use crate::objects::events::{AsyncEvent, AsyncEventKind, EventQueue, PortEvent, UdEvent};
pub use crate::objects::member::EventQp;
pub use crate::objects::srq::SharedReceiveQueue;
pub use crate::open::create_event_channel;
pub use crate::progress::in_vain::looked_in_vain;
pub use crate::sys::fork::{generation as fork_generation, install as notice_forks};
pub use crate::sys::on_demand::{Prefetch, prefetch};
pub use crate::sys::process_lock::{self, ProcessLock};
pub use crate::tags::{TagOperation, TagRequest};
pub use crate::ud::{UdAddress, UdAttributes, UdDrops, UdQueuePair, UdSendWr};
pub use crate::xrc::{XrcDomain, XrcSendWr, XrcTargetAttributes};
pub use iwarp_rnic::qp::XrcEnd;
pub use iwarp_rnic::tags::{MAX_TAG_SGE, MAX_TAGS, TaggedBuffer};
