//! Unreliable datagrams (UD): queue pairs over UDP. docs/wire.md describes the framing.
//!
//! A datagram queue pair has a UDP socket at each address of the device (`local`). The lower 16
//! bits of its number are the port of these sockets, so a sender needs only the number and a GID of
//! the device. The upper 8 bits are random, so that a queue pair does not receive datagrams for an
//! earlier queue pair with the same port.
//!
//! Datagrams may be lost, even on one host: if no receive is posted, if the socket's buffer is
//! full, or in the network. A delivered datagram is complete, contains the number and Q_Key of this
//! queue pair, and is delivered once (`seen`). Any other datagram is dropped and counted, and no
//! peer is notified.
//!
//! Locking: `state` is locked for all changes, and released during system calls that send or
//! receive. Each direction has a baton, as in a connection. Lock order: `state`, the memory table,
//! the shared receive queue, the completion queue. Which threads drive the sockets is decided as
//! for connections (`source`).
//!
//! Files: `address` (GIDs, routing header), `numbers`, `local` (sockets), `life` (states,
//! completions, the end), `queue` (send queue), `send`, `receive`, `seen`, `group` (multicast),
//! `source`.

mod address;
mod group;
mod life;
mod local;
#[cfg(test)]
mod members_tests;
mod numbers;
mod queue;
mod receive;
mod seen;
mod send;
mod source;

pub use address::UdAddress;
pub use queue::UdSendWr;

use crate::engine::Engine;
use crate::engine::baton::Baton;
use crate::error::{Error, PostFailed, Result};
use crate::objects::context::{Context, ContextInner, random_u32};
use crate::objects::cq::{CompletionQueue, Owed};
use crate::objects::events::UdEvent;
use crate::objects::slots::{SeenSlots, Slots};
use crate::objects::srq::SharedReceiveQueue;
use crate::sys::datagram::Batch;
use crate::sys::fork::Origin;
use crate::sys::guarded;
use group::Groups;
use iwarp_rnic::counters::Counters;
use iwarp_rnic::memory::Accessor;
use iwarp_rnic::qp::State;
use iwarp_rnic::receive_queue::{ReceiveQueue, TakenRecv};
use iwarp_rnic::{PostError, RecvWr};
use local::{Local, Locals};
use parking_lot::Mutex;
use queue::SendQueue;
use seen::Seen;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Requested size of a socket's buffers. The system limits it (`net.core.rmem_max`, `wmem_max`).
const SOCKET_BUFFER: usize = 1 << 20;

/// The attributes of a new datagram queue pair.
#[derive(Debug, Clone)]
pub struct UdAttributes {
    /// Protection domain number.
    pub pd: u32,
    /// Completions of the send queue.
    pub send_cq: CompletionQueue,
    /// Completions of receives.
    pub recv_cq: CompletionQueue,
    /// A shared receive queue, which replaces the queue pair's receive queue.
    pub srq: Option<SharedReceiveQueue>,
    /// Maximum number of outstanding send work requests.
    pub max_send_wr: u32,
    /// Maximum number of outstanding receives.
    pub max_recv_wr: u32,
    /// Maximum number of elements per send work request.
    pub max_send_sge: u32,
    /// Maximum number of elements per receive.
    pub max_recv_sge: u32,
    /// Maximum number of bytes of inline data.
    pub max_inline: u32,
    /// `true` if every send work request writes a completion.
    pub signal_all: bool,
}

/// Counters of dropped datagrams. All wrap at 2^64.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct UdDrops {
    /// Received without our framing, for another queue pair, or from a port that does not match the
    /// sender's number.
    pub foreign: u64,
    /// Received with a wrong CRC.
    pub crc: u64,
    /// Received with a Q_Key other than the queue pair's.
    pub qkey: u64,
    /// Received while the queue pair was not ready to receive.
    pub state: u64,
    /// Received a second time, or after 1024 later datagrams of the sender, so that they may be
    /// copies.
    pub copies: u64,
    /// Received while no receive was posted.
    pub no_receive: u64,
    /// Received, but too large for the posted receive, which also has to hold 40 octets of the
    /// routing header.
    pub too_long: u64,
    /// Datagrams to a group that the queue pair itself has sent, if
    /// [`UdQueuePair::set_block_self_multicast`] is set.
    pub own: u64,
    /// Not sent, because the system call failed or the socket's buffer was full for too long.
    pub unsent: u64,
}

struct UdState {
    state: State,
    qkey: u32,
    seen_slots: SeenSlots,
    sends: SendQueue,
    /// Datagrams of the send queue that a thread is sending.
    in_flight: usize,
    /// Incremented when the send queue is flushed or cleared.
    epoch: u64,
    /// When the buffer of the next socket to send became full, in nanoseconds of the monotonic
    /// clock.
    blocked_since: Option<u64>,
    /// The socket that the engine watches until its send buffer has room.
    watched_for_room: Option<Arc<Local>>,
    /// `true` if application threads drive the queue pair and the engine does not watch its
    /// sockets.
    driven_by_app: bool,
    sequence: u32,
    rq: ReceiveQueue,
    taken: TakenRecv,
    seen: Seen,
    counters: Counters,
    drops: UdDrops,
}

pub(crate) struct UdInner {
    ctx: Arc<ContextInner>,
    num: u32,
    pd: u32,
    signal_all: bool,
    user: AtomicU64,
    send_cq: CompletionQueue,
    recv_cq: CompletionQueue,
    srq: Option<SharedReceiveQueue>,
    slots: Slots,
    interface: u32,
    locals: Locals,
    engine: Arc<Engine>,
    timer: u64,
    state: Mutex<UdState>,
    groups: Groups,
    tx: Baton,
    rx: Baton,
    /// `true` if the queue pair drops its own datagrams to groups.
    deaf_to_itself: AtomicBool,
    /// Written only with `state` locked.
    destroyed: AtomicBool,
    origin: Origin,
}

/// The effects of a call, which are applied after all locks are released.
#[derive(Default)]
struct UdEffects {
    send: Owed,
    recv: Owed,
    events: Vec<UdEvent>,
}

/// A datagram queue pair.
#[derive(Clone)]
pub struct UdQueuePair {
    pub(crate) inner: Arc<UdInner>,
}

impl Context {
    /// Creates a datagram queue pair (`ibv_create_qp(3)` with `IBV_QPT_UD`), in state RESET.
    ///
    /// # Errors
    /// - [`Error::OutOfMemory`]: no memory or number is left.
    /// - [`Error::NoDevice`]: the device has lost its addresses.
    /// - [`Error::InvalidArgument`]: the shared receive queue matches tags.
    /// - [`Error::Io`]: no file descriptor or port is left.
    pub fn create_ud_qp(&self, attributes: &UdAttributes) -> Result<UdQueuePair> {
        if attributes
            .srq
            .as_ref()
            .is_some_and(|srq| srq.tag_cq().is_some())
        {
            return Err(Error::InvalidArgument(
                "a shared receive queue with tag matching needs reliable connections",
            ));
        }
        let inner = UdInner::create(&self.inner, attributes)?;
        Ok(UdQueuePair { inner })
    }
}

impl UdQueuePair {
    /// Returns the queue pair number, which is unique on the device at any time. It has 24 bits;
    /// the lower 16 bits are the UDP port at each address of the device.
    pub fn num(&self) -> u32 {
        self.inner.num
    }

    /// Returns the value of [`set_user_data`](Self::set_user_data).
    pub fn user_data(&self) -> u64 {
        self.inner.user.load(Ordering::Acquire)
    }

    /// Stores a value for the program ([`user_data`](Self::user_data)).
    pub fn set_user_data(&self, value: u64) {
        self.inner.user.store(value, Ordering::Release);
    }

    /// Returns the context of the queue pair.
    pub fn context(&self) -> Context {
        Context {
            inner: Arc::clone(&self.inner.ctx),
        }
    }

    /// Returns the number of the protection domain.
    pub fn pd(&self) -> u32 {
        self.inner.pd
    }

    /// Returns the state.
    pub fn state(&self) -> State {
        self.inner.state.lock().state
    }

    /// Returns the Q_Key that received datagrams must contain.
    pub fn qkey(&self) -> u32 {
        self.inner.state.lock().qkey
    }

    /// Sets the Q_Key that received datagrams must contain.
    pub fn set_qkey(&self, qkey: u32) {
        self.inner.state.lock().qkey = qkey;
    }

    /// Sets whether the queue pair drops datagrams that it has sent to a group itself
    /// (`IBV_QP_CREATE_BLOCK_SELF_MCAST_LB`). Other queue pairs of this host receive them in any
    /// case.
    pub fn set_block_self_multicast(&self, deaf: bool) {
        self.inner.deaf_to_itself.store(deaf, Ordering::Relaxed);
    }

    /// Returns the sequence number of the next datagram to send.
    pub fn sequence(&self) -> u32 {
        self.inner.state.lock().sequence
    }

    /// Returns the counters. Those of FPDUs count datagrams.
    pub fn counters(&self) -> Counters {
        self.inner.state.lock().counters
    }

    /// Returns the counters of dropped datagrams.
    pub fn drops(&self) -> UdDrops {
        self.inner.state.lock().drops
    }

    /// Changes the state as `ibv_modify_qp(3)` does. A change to ERR flushes all requests, and a
    /// change to RESET drops them.
    ///
    /// # Errors
    /// [`Error::InvalidState`]: verbs do not allow this change.
    pub fn modify(&self, to: State) -> Result<()> {
        let qp = &self.inner;
        let mut effects = UdEffects::default();
        {
            let mut g = qp.state.lock();
            if !g.state.may_become(to) || qp.is_destroyed() {
                return Err(Error::InvalidState(
                    "verbs do not allow this change of state",
                ));
            }
            qp.change_state(&mut g, to, &mut effects);
        }
        qp.apply_effects(effects);
        if to == State::Reset {
            // A program must not mistake earlier completions for completions of later requests.
            qp.send_cq.inner.purge(qp.num);
            qp.recv_cq.inner.purge(qp.num);
            let g = &mut *qp.state.lock();
            g.seen_slots = qp.slots.all_free(g.sends.position());
        }
        qp.drive_tx();
        Ok(())
    }

    /// Queues send work requests, in order, and sends them from this thread. Never blocks.
    ///
    /// A request completes when its datagram is in the socket's buffer, whether or not it arrives.
    ///
    /// # Errors
    /// [`PostFailed`] for the first request that is not accepted.
    pub fn post_send(&self, wrs: &[UdSendWr<'_>]) -> Result<(), PostFailed> {
        let result = self.inner.post(wrs, false);
        self.inner.drive_tx();
        result.map_err(|(n, e)| PostFailed::new(n, e))
    }

    /// Queues send work requests as [`post_send`](Self::post_send) does, but accepts either all or
    /// none.
    ///
    /// # Errors
    /// The errors of [`post_send`](Self::post_send).
    pub fn post_send_all(&self, wrs: &[UdSendWr<'_>]) -> Result<(), PostFailed> {
        let result = self.inner.post(wrs, true);
        self.inner.drive_tx();
        result.map_err(|(n, e)| PostFailed::new(n, e))
    }

    /// Queues receives, in order. Never blocks. The first 40 octets of a receive are for the
    /// routing header.
    ///
    /// # Errors
    /// The errors of [`post_send`](Self::post_send).
    pub fn post_recv(&self, wrs: &[RecvWr<'_>]) -> Result<(), PostFailed> {
        let qp = &self.inner;
        let mut effects = UdEffects::default();
        let mut result = Ok(());
        {
            let mut g = qp.state.lock();
            if qp.srq.is_some() {
                return Err(PostFailed::new(0, PostError::UsesSharedReceiveQueue));
            }
            if g.state == State::Reset || qp.is_destroyed() {
                return Err(PostFailed::new(0, PostError::InvalidState));
            }
            if (g.rq.room() as usize) < wrs.len() {
                let freed = qp.slots.free_receives(&mut g.seen_slots);
                g.rq.release(freed);
            }
            for (i, wr) in wrs.iter().enumerate() {
                if let Err(e) = g.rq.post(wr) {
                    result = Err(PostFailed::new(i, e));
                    break;
                }
            }
            if g.state == State::Error {
                qp.flush(&mut g, &mut effects);
            }
        }
        qp.apply_effects(effects);
        result
    }

    /// Destroys the queue pair (`ibv_destroy_qp(3)`). Drops its requests, completions and
    /// asynchronous events. Other handles cannot post any more. If a parent process created the
    /// queue pair, the call has no effect.
    pub fn destroy(&self) {
        self.inner.destroy();
    }

    /// Returns `true` if both handles refer to the same queue pair.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl UdInner {
    fn create(ctx: &Arc<ContextInner>, a: &UdAttributes) -> Result<Arc<Self>> {
        ctx.check_fault("qp")?;
        let engine = Engine::current()?;
        let mut rq = ReceiveQueue::new(a.max_recv_wr, a.max_recv_sge)?;
        rq.hold_slots(true);
        let state = Mutex::new(UdState {
            state: State::Reset,
            qkey: 0,
            seen_slots: SeenSlots::default(),
            sends: SendQueue::new(a.max_send_wr, a.max_send_sge, a.max_inline)?,
            in_flight: 0,
            epoch: 0,
            blocked_since: None,
            watched_for_room: None,
            driven_by_app: false,
            sequence: random_u32()?,
            rq,
            // The receives of a shared receive queue may have more elements than this queue pair's.
            taken: TakenRecv::new(iwarp_rnic::limits::MAX_SGE)?,
            seen: Seen::default(),
            counters: Counters::default(),
            drops: UdDrops::default(),
        });
        let device = ctx.device.current()?.ok_or(Error::NoDevice)?;
        let (sockets, num) = numbers::bind(ctx, &device, &engine)?;
        let inner = Arc::new(Self {
            ctx: Arc::clone(ctx),
            num,
            pd: a.pd,
            signal_all: a.signal_all,
            user: AtomicU64::new(0),
            send_cq: a.send_cq.clone(),
            recv_cq: a.recv_cq.clone(),
            srq: a.srq.clone(),
            slots: Slots::new(&a.send_cq, &a.recv_cq, a.srq.is_some()),
            interface: device.interface_index(),
            locals: Locals::new(sockets),
            engine: Arc::clone(&engine),
            timer: engine.token(),
            state,
            groups: Groups::default(),
            tx: Baton::new(),
            rx: Baton::new(),
            deaf_to_itself: AtomicBool::new(false),
            destroyed: AtomicBool::new(false),
            origin: Origin::current_process(),
        });
        ctx.ud_qps.set(&inner);
        inner.send_cq.inner.datagrams.attach(&inner);
        if !inner.recv_cq.is_same(&inner.send_cq) {
            inner.recv_cq.inner.datagrams.attach(&inner);
        }
        for cq in [&inner.send_cq, &inner.recv_cq] {
            cq.inner.count_members();
        }
        engine.add_timed(inner.timer, source::Watch::own(&inner));
        if let Err(e) = inner.watch() {
            inner.destroy();
            return Err(e.into());
        }
        Ok(inner)
    }
}

impl UdInner {
    fn is_destroyed(&self) -> bool {
        self.destroyed.load(Ordering::Acquire)
    }

    const fn accessor(&self) -> Accessor {
        Accessor {
            pd: self.pd,
            qp: self.num,
        }
    }
}

thread_local! {
    static BATCH_BUFFER: Cell<Option<Box<Batch>>> = const { Cell::new(None) };
}

/// Calls `f` with this thread's buffer for datagrams.
fn with_batch<R>(f: impl FnOnce(&mut Batch) -> R) -> R {
    // While the thread exits, its buffer is no longer available.
    let kept = BATCH_BUFFER.try_with(Cell::take).ok().flatten();
    let mut batch = kept.unwrap_or_else(|| {
        // The signal handler has to be ready before the buffer is allocated, because the thread may
        // block signals of faults.
        guarded::keep_installed();
        Box::default()
    });
    batch.clear();
    let result = f(&mut batch);
    let _ = BATCH_BUFFER.try_with(|cell| cell.set(Some(batch)));
    result
}

impl std::fmt::Debug for UdQueuePair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UdQueuePair")
            .field("num", &self.inner.num)
            .finish_non_exhaustive()
    }
}
