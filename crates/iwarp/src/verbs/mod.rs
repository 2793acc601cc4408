//! Explicit verbs: a program chooses completion queues, posts work requests with its own
//! identifiers, and polls for completions.
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
//! # Which objects exist
//!
//! | Object | Created by | Purpose |
//! | --- | --- | --- |
//! | [`Device`] | [`Device::list`], [`Device::by_address`], [`Device::route_to`] | A network interface of this machine, with its addresses. Costs nothing. |
//! | [`Context`] | [`Context::open`] | An open device with its settings. All other objects belong to it. |
//! | [`ProtectionDomain`] | [`ProtectionDomain::new`] | Memory and queue pairs that may work together. |
//! | [`MemoryRegion`] | [`ProtectionDomain::reg_mr`] | Memory that the RNIC may access, and peers if its rights allow it. |
//! | [`MemoryWindow`] | [`ProtectionDomain::alloc_mw`] | Temporary rights of one peer to a part of a region. |
//! | [`CompletionQueue`] | [`Context::create_cq`] | Reports completed work requests. |
//! | [`CompletionChannel`] | [`Context::create_channel`] | Events of many completion queues, with a descriptor. |
//! | [`QueuePair`] | [`ProtectionDomain::create_qp`] | One end of a connection: a send queue and a receive queue. |
//! | [`SharedReceiveQueue`] | [`ProtectionDomain::create_srq`] | Receives for many queue pairs. |
//! | [`ListeningId`](cm::ListeningId), [`Connector`](cm::Connector), [`ConnectedId`](cm::ConnectedId) | the module [`cm`] | Connect two queue pairs. |
//!
//! # Write by a work request
//!
//! The server grants access to a region, and sends its address and key in the private data of its
//! reply. Atomics and Reads work in the same way: [`SendWr::fetch_add`], [`SendWr::read`].
//!
//! ```
//! use iwarp::verbs::cm::{ConnectionParameters, Connector, ListeningId};
//! use iwarp::verbs::{
//!     Access, Config, Context, Cqe, Device, ProtectionDomain, QpInitAttr, RemoteMemory, SendWr,
//!     WcStatus,
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Device::by_address("127.0.0.1".parse()?)?;
//! let ctx = Context::open(&device, Config::from_env())?;
//! let (pd, cq) = (ProtectionDomain::new(&ctx), ctx.create_cq(16, None)?);
//! let listener = ListeningId::bind(&ctx, "127.0.0.1:0".parse()?)?;
//! let address = listener.local_addr();
//!
//! let server = std::thread::spawn({
//!     let ctx = ctx.clone();
//!     move || -> iwarp::Result<Vec<u8>> {
//!         let (pd, cq) = (ProtectionDomain::new(&ctx), ctx.create_cq(1, None)?);
//!         let granted = pd.reg_mr(4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
//!         let parameters = ConnectionParameters {
//!             private_data: granted.remote().to_bytes().to_vec(),
//!             ..Default::default()
//!         };
//!         let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq))?;
//!         let connection = listener.accept(None)?.accept(qp, &parameters)?;
//!         connection.wait_disconnected(None)?;
//!         granted.to_vec(..12)
//!     }
//! });
//!
//! let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq))?;
//! let connection = Connector::new(&ctx).connect(address, qp)?;
//! let there = RemoteMemory::from_bytes(connection.private_data()).ok_or("no memory granted")?;
//! let source = pd.reg_mr(4096, Access::empty())?;
//! source.write_at(0, b"one-sided it")?;
//! let elements = [source.sge(..12)?];
//! connection.post_send(&[SendWr::write(7, there.addr, there.rkey, &elements).signaled()])?;
//!
//! let mut done = [Cqe::default()];
//! cq.wait(&mut done, None)?;
//! assert_eq!((done[0].wr_id, done[0].status), (7, WcStatus::Success));
//! drop(connection);
//! assert_eq!(server.join().unwrap()?, b"one-sided it");
//! # Ok(())
//! # }
//! ```
//!
//! On an error, `post_send` returns a [`PostFailed`] with the number of accepted requests; `?`
//! converts it to an [`iwarp::Error`](Error).
//!
//! # What a completion means
//!
//! | Request | Completes when | The peer's program |
//! | --- | --- | --- |
//! | Send, RDMA Write | TCP has accepted all data: the buffer may be reused | may not have it yet. With [`Config::placed`] the request completes when the peer has placed it. If the connection ends before the peer confirms that, the request is flushed |
//! | RDMA Read, atomics | the answer is in your memory | takes no part |
//! | Receive | a message is in your memory | has sent it |
//!
//! A request without [`signaled`](SendWr::signaled) completes silently, together with the next
//! signaled one. After an error status the queue pair is in the error state, and all queued
//! requests complete as [`WcStatus::Flushed`];
//! [`QueuePair::fault`](crate::runtime::QueuePair::fault) returns the cause. If a completion queue
//! overflows, its queue pairs fail, and [`CompletionQueue::poll`] and the blocking waits report it.
//!
//! # Wait, poll or await
//!
//! ```
//! use iwarp::verbs::{CompletionQueue, Cqe, Result};
//! use std::time::Duration;
//!
//! /// Sleeps until a request completes, for at most a second.
//! fn blocking(cq: &CompletionQueue, out: &mut [Cqe]) -> Result<usize> {
//!     cq.wait(out, Some(Duration::from_secs(1)))
//! }
//!
//! /// Never sleeps: the lowest latency, at the cost of one processor.
//! fn polling(cq: &CompletionQueue, out: &mut [Cqe]) -> Result<usize> {
//!     loop {
//!         let n = cq.poll(out)?;
//!         if n > 0 {
//!             return Ok(n);
//!         }
//!         std::hint::spin_loop();
//!     }
//! }
//!
//! /// As a task of any runtime. Dropping the future loses no completion.
//! async fn asynchronous(cq: &CompletionQueue, out: &mut [Cqe]) -> Result<usize> {
//!     cq.completions(out).await
//! }
//! ```
//!
//! Blocking calls of [`cm`] have `…_async` variants. The feature `tokio` adds
//! `iwarp::tokio::Watched`, for programs that want tokio's reactor to watch a descriptor.

mod borrows;
pub mod cm;
mod lease;
mod lent;
mod mr;
mod mw;
mod pages;
mod pd;
mod qp;

#[cfg(test)]
pub(crate) use borrows::Borrows;
pub(crate) use lease::{Buffer, TakeBack};
pub(crate) use lent::{LentBytes, LentMemory};
pub use mr::{MemoryRegion, RemoteMemory};
pub(crate) use mr::{WriteAccess, Writing, bounds};
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
