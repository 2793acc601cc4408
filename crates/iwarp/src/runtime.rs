//! The verbs objects without owners: cloneable handles, memory by address, domains and keys by
//! number.
//!
//! ```
//! use iwarp::runtime::{Context, QpAttributes, State};
//! use iwarp::{Access, Config, Device};
//!
//! # fn main() -> iwarp::Result<()> {
//! let ctx = Context::open(&Device::by_address([127, 0, 0, 1].into())?, Config::from_env())?;
//! let (pd, cq) = (ctx.allocate_pd(), ctx.create_cq(16, None)?);
//! let memory = Box::into_raw(Box::new([0_u8; 64]));
//! // SAFETY: the memory stays until it is deregistered, and nothing refers to it meanwhile.
//! let key = unsafe { ctx.register(memory as u64, 64, memory as u64, pd, Access::LOCAL_WRITE) }?;
//! let qp = ctx.create_qp(&QpAttributes {
//!     pd,
//!     send_cq: cq.clone(),
//!     recv_cq: cq,
//!     srq: None,
//!     unreliable: false,
//!     max_send_wr: 16,
//!     max_recv_wr: 16,
//!     max_send_sge: 1,
//!     max_recv_sge: 1,
//!     max_inline: 0,
//!     signal_all: true,
//!     max_ird: 1,
//!     max_ord: 1,
//! })?;
//! qp.modify(State::Init)?;
//! qp.destroy();
//! ctx.deregister(key)?;
//! // SAFETY: it is the box of above, which nothing uses any more.
//! drop(unsafe { Box::from_raw(memory) });
//! # Ok(())
//! # }
//! ```
//!
//! The C libraries are built on this module, and so can be other programs that manage their own
//! memory and objects. Queue pairs and identifiers of [`cm`] exist until `destroy` is called,
//! registrations until [`Context::deregister`]. Other objects are destroyed with their last handle.
//! All handles are cheap to clone, `Send` and `Sync`.
//!
//! Registering memory ([`Context::register`] and related calls) is `unsafe`; later calls use keys,
//! which are checked at every access. [`verbs`](crate::verbs) adds owners for queue pairs, memory
//! and connections, so that its programs need no `unsafe`.

/// Connection management: identifiers, event channels and datagram services (`rdma_cm(7)`).
///
/// ```
/// use iwarp::runtime::cm::CmId;
/// use iwarp::runtime::create_event_channel;
///
/// # fn main() -> iwarp::Result<()> {
/// let events = create_event_channel()?;
/// let id = CmId::create(&events, None);
/// id.bind(([127, 0, 0, 1], 0).into())?;
/// id.listen(16)?;
/// println!("listening on {:?}", id.addresses().0);
/// assert!(events.try_next().is_none()); // nobody has connected yet
/// id.destroy();
/// # Ok(())
/// # }
/// ```
pub mod cm {
    pub use crate::cm::*;
}

pub use crate::conn::attributes::QpAttributes;
pub(crate) use crate::conn::linger::unacknowledged_bytes;
pub use crate::conn::qp::QueuePair;
pub use crate::conn::retry::Retry;
pub use crate::error::PostFailed;
pub use crate::objects::any_qp::EventQp;
pub use crate::objects::channel::CompletionChannel;
pub use crate::objects::context::Context;
pub use crate::objects::cq::{CompletionQueue, CqError};
pub use crate::objects::events::{AsyncEvent, AsyncEventKind, EventQueue, PortEvent, UdEvent};
pub use crate::objects::srq::SharedReceiveQueue;
pub use crate::objects::wait::Completions;
pub use crate::open::create_event_channel;
pub use crate::sys::on_demand::{Prefetch, prefetch};
pub use crate::tags::{TagOperation, TagRequest};
pub use crate::ud::{UdAddress, UdAttributes, UdDrops, UdQueuePair, UdSendWr};
pub use crate::xrc::{XrcDomain, XrcSendWr, XrcTargetAttributes};
pub use iwarp_rnic::counters::Counters;
pub use iwarp_rnic::memory::{Stag, WindowType};
pub use iwarp_rnic::qp::{State, XrcEnd};
pub use iwarp_rnic::tags::{MAX_TAG_SGE, MAX_TAGS, TaggedBuffer};
pub use iwarp_rnic::{
    Bind, Cqe, FastRegister, RecvWr, SendFlags, SendOp, SendWr, Sge, WcFlags, WcOpcode, WcStatus,
};

// Helpers of the C libraries for the process as a whole: locks that survive a fork, messages to the
// user, and yielding between polls.
pub use crate::complain::once as complain_once;
pub use crate::engine::yield_pacing::after_empty_poll;
pub use crate::sys::fork::{generation as fork_generation, install as notice_forks};
pub use crate::sys::process_lock::{self, ProcessLock};
