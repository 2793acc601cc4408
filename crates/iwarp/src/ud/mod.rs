//! Unreliable datagrams (UD): queue pairs over UDP. docs/wire.md describes the framing.
//!
//! A datagram queue pair has UDP sockets of its own, one at each address of the device (`local`).
//! The lower 16 bits of its number are their port, so a sender needs only a GID of the device and
//! the number. The other 8 bits are random, so that a datagram for an earlier queue pair with the
//! same port does not reach a new one.
//!
//! Datagrams may be lost, even on one host: if no receive is posted, if the socket's buffer is
//! full, or in the network. A delivered datagram is complete, has the number and key of this queue
//! pair, and is delivered once (`seen`). A datagram can only fill a posted receive. If anything is
//! wrong with it, it is dropped and counted, and no peer is notified.
//!
//! Locking. `state` guards all of it and is not held during a system call that moves data. Each
//! direction has a baton, as in a connection. Lock order: `state`, then the memory table, then
//! shared receive queue, then completion queue. The threads that drive the sockets are chosen as
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

/// Octets that a socket may buffer in each direction, if the system allows it (`net.core.rmem_max`,
/// `wmem_max`).
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
    /// Used instead of a receive queue of its own.
    pub srq: Option<SharedReceiveQueue>,
    /// Send work requests outstanding.
    pub max_send_wr: u32,
    /// Receive work requests outstanding.
    pub max_recv_wr: u32,
    /// Elements per send work request.
    pub max_send_sge: u32,
    /// Elements per receive work request.
    pub max_recv_sge: u32,
    /// Octets of inline data.
    pub max_inline: u32,
    /// Every send work request writes a completion.
    pub signal_all: bool,
}

/// Counters of dropped datagrams. All wrap at 2^64.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct UdDrops {
    /// Received without our framing, for another queue pair, or from a port that is not its
    /// sender's.
    pub foreign: u64,
    /// Received with a wrong CRC.
    pub crc: u64,
    /// Received with a Q_Key that is not the queue pair's.
    pub qkey: u64,
    /// Received while the queue pair was not ready to receive.
    pub state: u64,
    /// Received a second time, or so late that they may be copies: 1024 later datagrams of the
    /// sender have come.
    pub copies: u64,
    /// Received while no receive was posted.
    pub no_receive: u64,
    /// Received, and larger than the posted receive, which also needs 40 octets for the routing
    /// header.
    pub too_long: u64,
    /// Its own datagrams to groups, if [`UdQueuePair::set_deaf_to_itself`] is on.
    pub own: u64,
    /// Not sent, because the system refused them or its buffer was full for too long.
    pub unsent: u64,
}

struct UdState {
    state: State,
    qkey: u32,
    seen_slots: SeenSlots,
    sends: SendQueue,
    /// Datagrams of the send queue that a thread is sending.
    in_flight: usize,
    /// Changes when the send queue is emptied without sending.
    epoch: u64,
    /// When the buffer of the socket that sends next became full, in nanoseconds of the monotonic
    /// clock.
    blocked_since: Option<u64>,
    /// The engine watches for room in the buffer of this socket.
    watches_room: Option<Arc<Local>>,
    /// Application threads drive it, and the engine does not watch its sockets.
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
    /// It does not receive what it sends to groups.
    deaf_to_itself: AtomicBool,
    /// Changed with `state` locked.
    destroyed: AtomicBool,
    origin: Origin,
}

/// The effects of a call, applied when all locks are dropped.
#[derive(Default)]
struct Due {
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
    /// [`Error::OutOfMemory`]; [`Error::NoDevice`]: the device has lost its addresses; the
    /// operating system's: no descriptors or ports left.
    pub fn create_ud_qp(&self, attributes: &UdAttributes) -> Result<UdQueuePair> {
        if attributes
            .srq
            .as_ref()
            .is_some_and(|srq| srq.tag_cq().is_some())
        {
            return Err(Error::InvalidArgument(
                "tags are matched on reliable connections only",
            ));
        }
        let inner = UdInner::create(&self.inner, attributes)?;
        Ok(UdQueuePair { inner })
    }
}

impl UdQueuePair {
    /// Returns its number, which is unique on the device at any time. It has 24 bits; the lower 16
    /// are its UDP port at each address of the device.
    pub fn num(&self) -> u32 {
        self.inner.num
    }

    /// Returns the program's value ([`set_user_data`](Self::set_user_data)).
    pub fn user_data(&self) -> u64 {
        self.inner.user.load(Ordering::Acquire)
    }

    /// Stores a value for the program ([`user_data`](Self::user_data)).
    pub fn set_user_data(&self, value: u64) {
        self.inner.user.store(value, Ordering::Release);
    }

    /// Returns the device it is on.
    pub fn context(&self) -> Context {
        Context {
            inner: Arc::clone(&self.inner.ctx),
        }
    }

    /// Returns its protection domain.
    pub fn pd(&self) -> u32 {
        self.inner.pd
    }

    /// Returns its state.
    pub fn state(&self) -> State {
        self.inner.state.lock().state
    }

    /// Returns the key that datagrams to it must have.
    pub fn qkey(&self) -> u32 {
        self.inner.state.lock().qkey
    }

    /// Sets the key that datagrams to it must have.
    pub fn set_qkey(&self, qkey: u32) {
        self.inner.state.lock().qkey = qkey;
    }

    /// Sets whether it drops its own datagrams to groups that it is attached to
    /// (`IBV_QP_CREATE_BLOCK_SELF_MCAST_LB`). Other queue pairs of this host receive them in any
    /// case.
    pub fn set_deaf_to_itself(&self, deaf: bool) {
        self.inner.deaf_to_itself.store(deaf, Ordering::Relaxed);
    }

    /// Returns the number of its next datagram.
    pub fn sequence(&self) -> u32 {
        self.inner.state.lock().sequence
    }

    /// Returns its counters. An FPDU is a datagram here.
    pub fn counters(&self) -> Counters {
        self.inner.state.lock().counters
    }

    /// Returns the counters of dropped datagrams.
    pub fn drops(&self) -> UdDrops {
        self.inner.state.lock().drops
    }

    /// Changes its state as `ibv_modify_qp(3)` does. ERR flushes all requests, RESET drops them. A
    /// change to RTS ends SQE.
    ///
    /// # Errors
    /// [`Error::InvalidState`] if the verbs do not allow the change.
    pub fn modify(&self, to: State) -> Result<()> {
        let qp = &self.inner;
        let mut due = Due::default();
        {
            let mut g = qp.state.lock();
            // Only an error leads to SQE.
            if !g.state.may_become(to) || qp.is_destroyed() {
                return Err(Error::InvalidState(
                    "the verbs do not allow this change of state",
                ));
            }
            qp.enter(&mut g, to, &mut due);
        }
        qp.raise_due(due);
        if to == State::Reset {
            // Earlier completions must not be taken for those of later requests.
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
    /// A request completes when the socket has taken its datagram, whether or not that arrives.
    ///
    /// # Errors
    /// [`PostFailed`] for the first request that is not accepted.
    pub fn post_send(&self, wrs: &[UdSendWr<'_>]) -> Result<(), PostFailed> {
        let result = self.inner.post(wrs, false);
        self.inner.drive_tx();
        result.map_err(|(n, e)| PostFailed::new(n, e))
    }

    /// As [`post_send`](Self::post_send), but accepts all of the requests or none.
    ///
    /// # Errors
    /// As [`post_send`](Self::post_send).
    pub fn post_send_all(&self, wrs: &[UdSendWr<'_>]) -> Result<(), PostFailed> {
        let result = self.inner.post(wrs, true);
        self.inner.drive_tx();
        result.map_err(|(n, e)| PostFailed::new(n, e))
    }

    /// Queues receives, in order. Never blocks. The first 40 octets of a receive are filled with
    /// the routing header.
    ///
    /// # Errors
    /// As [`post_send`](Self::post_send).
    pub fn post_recv(&self, wrs: &[RecvWr<'_>]) -> Result<(), PostFailed> {
        let qp = &self.inner;
        let mut due = Due::default();
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
                qp.flush(&mut g, &mut due);
            }
        }
        qp.raise_due(due);
        result
    }

    /// Destroys it (`ibv_destroy_qp(3)`): its requests, completions and asynchronous events are
    /// dropped. Other handles to it can post nothing. In a forked child this does nothing, because
    /// the queue pair is the parent's.
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
        let guarded = Mutex::new(UdState {
            state: State::Reset,
            qkey: 0,
            seen_slots: SeenSlots::default(),
            sends: SendQueue::new(a.max_send_wr, a.max_send_sge, a.max_inline)?,
            in_flight: 0,
            epoch: 0,
            blocked_since: None,
            watches_room: None,
            driven_by_app: false,
            sequence: random_u32()?,
            rq,
            // A shared receive queue may have larger requests than this queue pair.
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
            state: guarded,
            groups: Groups::default(),
            tx: Baton::new(),
            rx: Baton::new(),
            deaf_to_itself: AtomicBool::new(false),
            destroyed: AtomicBool::new(false),
            origin: Origin::here(),
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
    static ROOM: Cell<Option<Box<Batch>>> = const { Cell::new(None) };
}

/// Calls `f` with this thread's buffer for datagrams.
fn with_room<R>(f: impl FnOnce(&mut Batch) -> R) -> R {
    // A thread that is ending keeps no buffer.
    let kept = ROOM.try_with(Cell::take).ok().flatten();
    let mut room = kept.unwrap_or_else(|| {
        // First the thread's own preparation, because it may block the signals of faults.
        guarded::keep();
        Box::default()
    });
    room.clear();
    let result = f(&mut room);
    let _ = ROOM.try_with(|cell| cell.set(Some(room)));
    result
}

impl std::fmt::Debug for UdQueuePair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UdQueuePair")
            .field("num", &self.inner.num)
            .finish_non_exhaustive()
    }
}
