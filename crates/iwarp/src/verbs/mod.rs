//! Explicit verbs: a program chooses completion queues, posts work requests with its own
//! identifiers, and polls for completions.
//!
//! The objects are those of the C interface, but no call needs `unsafe`: a registration owns its
//! memory, a queue pair has one owner, and keys are checked at each access. Use this module for
//! shared receive queues, for one completion queue shared by many connections, for polling without
//! sleeping, or to port a C program. For other programs a [`Connection`](crate::Connection), on
//! which each request is a call, needs less code.
//!
//! | C | here |
//! | --- | --- |
//! | `ibv_get_device_list`, `ibv_open_device` | [`Device::list`], [`Context::open`] |
//! | `ibv_query_device` | [`LIMITS`] |
//! | `ibv_alloc_pd` | [`ProtectionDomain::new`] |
//! | `ibv_reg_mr` | [`ProtectionDomain::reg_mr`], which also allocates the memory |
//! | `ibv_alloc_mw`, `ibv_bind_mw` | [`ProtectionDomain::alloc_mw`], [`MemoryWindow::bind_mw`] |
//! | `ibv_create_comp_channel`, `ibv_create_cq`, `ibv_resize_cq` | [`Context::create_channel`], [`Context::create_cq`], [`CompletionQueue::resize`] |
//! | `ibv_poll_cq`, `ibv_req_notify_cq`, `ibv_get_cq_event` | [`CompletionQueue::poll`], [`CompletionQueue::arm`], [`CompletionChannel::event`] |
//! | `ibv_create_qp`, `ibv_query_qp` | [`ProtectionDomain::create_qp`], [`QueuePair::state`](crate::runtime::QueuePair::state) |
//! | `ibv_post_send`, `ibv_post_recv` | [`QueuePair::post_send`](crate::runtime::QueuePair::post_send), [`QueuePair::post_recv`](crate::runtime::QueuePair::post_recv) |
//! | `ibv_create_srq`, `ibv_modify_srq`, `ibv_post_srq_recv` | [`ProtectionDomain::create_srq`], [`SharedReceiveQueue::set_limit`], [`SharedReceiveQueue::post`] |
//! | `ibv_get_async_event` | [`Context::async_event`] |
//! | `rdma_listen`, `rdma_get_request`, `rdma_accept`, `rdma_connect` | the module [`cm`] |
//! | `ibv_dereg_mr`, `ibv_destroy_…`, `ibv_close_device`, `ibv_dealloc_…` | dropping the object, or its last handle |
//!
//! Contexts, domains, regions, channels, completion queues and shared receive queues are handles: a
//! clone refers to the same object, and an object keeps alive what it depends on. Queue pairs and
//! the identifiers of [`cm`] have one owner. All types may be used by several threads at once.
//! Contexts, channels, queues and events are those of [`runtime`](crate::runtime), which has
//! further calls for programs that manage their own memory.
//!
//! ```
//! use iwarp::verbs::{
//!     Access, Config, Context, Cqe, Device, ProtectionDomain, QpInitAttr, RecvWr, SendWr,
//!     WcStatus,
//! };
//! use iwarp::verbs::cm::{ConnectionParameters, Connector, ListeningId};
//!
//! # fn main() -> iwarp::Result<()> {
//! let device = Device::by_address([127, 0, 0, 1].into())?;
//! let ctx = Context::open(&device, Config::from_env())?;
//! let listener = ListeningId::bind(&ctx, ([127, 0, 0, 1], 0).into())?;
//! let address = listener.local_addr();
//!
//! let server = std::thread::spawn({
//!     let ctx = ctx.clone();
//!     move || -> iwarp::Result<Vec<u8>> {
//!         let (pd, cq) = (ProtectionDomain::new(&ctx), ctx.create_cq(1, None)?);
//!         let inbox = pd.reg_mr(64, Access::LOCAL_WRITE)?;
//!         let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq))?;
//!         qp.post_recv(&[RecvWr { wr_id: 1, sges: &[inbox.sge(..)?] }])?;
//!         let _connection = listener.accept(None)?.accept(qp, &ConnectionParameters::default())?;
//!         let mut done = [Cqe::default()];
//!         cq.wait(&mut done, None)?;
//!         inbox.to_vec(..done[0].byte_len as usize)
//!     }
//! });
//!
//! let (pd, cq) = (ProtectionDomain::new(&ctx), ctx.create_cq(16, None)?);
//! let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq))?;
//! let connection = Connector::new(&ctx).connect(address, qp)?;
//! connection.post_send(&[SendWr::inline(7, &[b"hello"]).signaled()])?;
//! let mut done = [Cqe::default()];
//! while cq.poll(&mut done)? == 0 {}
//! assert_eq!((done[0].wr_id, done[0].status), (7, WcStatus::Success));
//! assert_eq!(server.join().unwrap()?, b"hello");
//! # Ok(())
//! # }
//! ```

pub mod cm;
mod lent;
mod mr;
mod mw;
mod pages;
mod pd;
mod qp;

pub(crate) use lent::{LentBytes, LentMemory};
pub use mr::{MemoryRegion, RemoteMemory};
pub use mw::MemoryWindow;
pub(crate) use pages::{Elements, Pages};
pub use pd::ProtectionDomain;
pub use qp::{QpInitAttr, QueuePair};

pub use crate::config::Config;
pub use crate::device::{Device, LIMITS, Limits};
pub use crate::error::{Error, PostFailed, Result};
pub use crate::runtime::CompletionChannel;
pub use crate::runtime::Completions;
pub use crate::runtime::Context;
pub use crate::runtime::EventQp;
pub use crate::runtime::SharedReceiveQueue;
pub use crate::runtime::{AsyncEvent, AsyncEventKind, PortEvent};
pub use crate::runtime::{CompletionQueue, CqError};
pub use iwarp_rnic::counters::Counters;
pub use iwarp_rnic::memory::{Stag, WindowType};
pub use iwarp_rnic::qp::{Blame, Fault, State};
pub use iwarp_rnic::{
    Access, Bind, Cqe, PostError, RecvWr, SendFlags, SendOp, SendWr, Sge, WcFlags, WcOpcode,
    WcStatus,
};
