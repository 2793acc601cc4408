//! Queue pairs: the sans-I/O state machine, its stream, and the locks around both.
//!
//! The lock `state` protects the state machine. It is never held during a system call that moves
//! data. Each direction of the stream has a baton: only its holder reads or writes the socket. If
//! another thread has left a note, the holder checks for work again.
//!
//! Lock order: `state`, memory table, shared receive queue, completion queue. During a system call,
//! a driver holds the lock of the memory table, but not `state`. It unlocks the table before it
//! locks `state` again. Events, wake-ups and callbacks happen when no lock is held.

use super::attributes::QpAttributes;
use super::cork::Cork;
use super::drive;
use super::effects::{DriveHost, Effects};
use super::engine_events::{BytesTransferred, PeerAnswers};
use super::held_receives::HeldReceives;
use super::link::{Link, Socket};
use super::pool;
use super::retry::Retry;
use super::unsent_tail::UnsentTail;
use super::xrc_target::XrcTarget;
use crate::config::ReceiverNotReady;
use crate::engine::baton::Baton;
use crate::error::{Error, Result};
use crate::objects::context::{Context, ContextInner};
use crate::objects::cq::CompletionQueue;
use crate::objects::hooks::QpFaults;
use crate::objects::slots::{SeenSlots, Slots};
use crate::objects::srq::SharedReceiveQueue;
use crate::sys::clock::now_ns;
use crate::sys::fork::Origin;
use crate::sys::sockopt::{TcpInfo, tcp_info};
use iwarp_rnic::counters::Counters;
use iwarp_rnic::qp::{
    Events, Fault, QpConfig, QueuePair as Machine, ReceiverNotReady as Policy, RxBuffer, State,
};
use iwarp_rnic::{Access, AllocError};
use parking_lot::Mutex;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

// Timer kinds from `TIMERS_END` on belong to the attempt to connect.
/// The timer of the state machine.
pub(crate) const TIMER_MACHINE: u32 = 1;
pub(crate) const TIMER_LINGER: u32 = 2;
pub(crate) const TIMER_SEND_DELAY: u32 = 3;
pub(crate) const TIMER_PEER_GONE: u32 = 4;
pub(crate) const TIMER_LIVENESS: u32 = 5;
pub(crate) const TIMERS_END: u32 = 6;
/// How long a Send is held after its sender has closed. The sender no longer waits for it, and the
/// program that should post the receive may be waiting for the disconnect event.
const HOLD_CLOSED: Duration = Duration::from_millis(200);

/// The part of the connection manager that is notified of a queue pair's connection.
pub(crate) trait CmSink: Send + Sync {
    /// Handles events of the queue pair. Called without locks.
    fn qp_event(&self, events: Events, fault: Option<Fault>);
    /// Handles that the connection ends because the peer's first message did not come in time.
    /// Called without locks.
    fn first_message_overdue(&self);
}

/// The part of a queue pair that its lock protects.
pub(crate) struct QpState {
    pub(crate) machine: Machine,
    pub(crate) seen_slots: SeenSlots,
    pub(crate) link: Link,
    /// Decides whether a post sends at once. Reset with each stream.
    pub(crate) cork: Cork,
    /// Total time for which earlier Sends were held, in nanoseconds.
    pub(crate) held_ns: u64,
    /// The peer of the last stream stopped answering.
    pub(crate) peer_vanished: bool,
    /// The error with which a call for the last stream failed, for the log.
    pub(crate) stream_errno: Option<i32>,
    /// The addresses of the last stream, for the log.
    pub(crate) stream_ends: Option<crate::sys::connect::Ends>,
    /// How long requests wait for a peer that is connected by number.
    pub(crate) retry: Retry,
    /// Number of resets. An attempt to connect that began in an earlier epoch is ignored.
    epoch: u64,
}

impl QpState {
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Takes the buffer with the received part of an FPDU, or an empty buffer if there is none.
    #[inline]
    pub(crate) fn take_partial(&mut self) -> Result<Box<RxBuffer>, AllocError> {
        let partial = self.link.open_mut().and_then(|open| open.partial.take());
        partial.map_or_else(pool::take_rx, Ok)
    }

    /// Detaches the socket, and drops the state of the stream except a pending report.
    pub(crate) fn detach(&mut self) -> Option<Arc<Socket>> {
        self.end_hold();
        self.cork = Cork::default();
        self.link.detach()
    }

    /// Returns `true` if `socket` is still the queue pair's socket.
    pub(crate) fn is_linked(&self, socket: &Arc<Socket>) -> bool {
        self.link
            .socket()
            .is_some_and(|ours| Arc::ptr_eq(ours, socket))
    }

    #[cold]
    pub(super) fn awaits_peer(&self) -> bool {
        let machine = &self.machine;
        self.link.is_none() && machine.is_by_number() && machine.sends_outstanding() > 0
    }

    /// Adds the time for which a Send was held to the statistics.
    pub(crate) fn end_hold(&mut self) {
        let Some(open) = self.link.open_mut() else {
            return;
        };
        let since = std::mem::take(&mut open.held_since);
        if since != 0 {
            self.held_ns += now_ns().saturating_sub(since);
        }
    }
}

pub(crate) struct QpInner {
    pub(crate) ctx: Arc<ContextInner>,
    pub(crate) num: u32,
    pub(crate) user: AtomicU64,
    pub(crate) send_cq: CompletionQueue,
    pub(crate) recv_cq: CompletionQueue,
    pub(crate) srq: Option<SharedReceiveQueue>,
    pub(crate) xrc: Option<Box<dyn XrcTarget>>,
    pub(crate) slots: Slots,
    pub(crate) state: Mutex<QpState>,
    pub(crate) tx: Baton,
    pub(crate) rx: Baton,
    pub(crate) held_receives: HeldReceives,
    /// Changed only with `state` locked.
    pub(crate) destroyed: AtomicBool,
    pub(crate) bytes_transferred: BytesTransferred,
    pub(crate) peer_answers: PeerAnswers,
    /// `true` while the queue pair is on the list of deferred queue pairs of `send_cq` and of
    /// `recv_cq`.
    pub(crate) deferred: [AtomicBool; 2],
    pub(crate) origin: Origin,
    pub(crate) faults: Option<Box<dyn QpFaults>>,
}

/// A connected queue pair.
#[derive(Clone)]
pub struct QueuePair {
    pub(crate) inner: Arc<QpInner>,
}

impl QueuePair {
    pub(crate) fn create(ctx: &Arc<ContextInner>, attributes: &QpAttributes) -> Result<Self> {
        Self::create_with(ctx, attributes, |taken| Ok(ctx.next_free_number(taken)))
    }

    pub(crate) fn create_with(
        ctx: &Arc<ContextInner>,
        attributes: &QpAttributes,
        choose_number: impl FnOnce(&dyn Fn(u32) -> bool) -> Result<u32>,
    ) -> Result<Self> {
        Self::create_as(ctx, attributes, None, choose_number)
    }

    pub(crate) fn create_as(
        ctx: &Arc<ContextInner>,
        attributes: &QpAttributes,
        target: Option<Box<dyn XrcTarget>>,
        choose_number: impl FnOnce(&dyn Fn(u32) -> bool) -> Result<u32>,
    ) -> Result<Self> {
        ctx.check_fault("qp")?;
        let policy = match ctx.config.receiver_not_ready {
            _ if attributes.unreliable => Policy::Drop,
            ReceiverNotReady::Hold(limit) => Policy::Hold {
                limit,
                after_close: HOLD_CLOSED,
            },
            ReceiverNotReady::Terminate => Policy::Terminate,
        };
        let tag_cq = attributes.srq.as_ref().and_then(SharedReceiveQueue::tag_cq);
        if attributes.unreliable && tag_cq.is_some() {
            return Err(Error::InvalidArgument(
                "tags are matched on reliable connections only",
            ));
        }
        let recv_cq = tag_cq.unwrap_or(&attributes.recv_cq);
        let shared_receive = attributes.srq.is_some() || target.is_some();
        let inner = ctx.insert_qp(choose_number, |num| {
            let machine = Machine::new(QpConfig {
                qp_num: num,
                shared_receive,
                match_tags: tag_cq.is_some(),
                receiver_not_ready: policy,
                ..attributes.machine_config()
            })?;
            Ok(Arc::new(QpInner {
                ctx: Arc::clone(ctx),
                num,
                user: AtomicU64::new(0),
                send_cq: attributes.send_cq.clone(),
                recv_cq: recv_cq.clone(),
                srq: attributes.srq.clone(),
                xrc: target,
                slots: Slots::new(&attributes.send_cq, recv_cq, shared_receive),
                state: Mutex::new(QpState {
                    machine,
                    seen_slots: SeenSlots::default(),
                    link: Link::default(),
                    cork: Cork::default(),
                    held_ns: 0,
                    peer_vanished: false,
                    stream_errno: None,
                    stream_ends: None,
                    retry: Retry::default(),
                    epoch: 0,
                }),
                tx: Baton::new(),
                rx: Baton::new(),
                held_receives: HeldReceives::default(),
                destroyed: AtomicBool::new(false),
                bytes_transferred: BytesTransferred::default(),
                peer_answers: PeerAnswers::default(),
                deferred: [const { AtomicBool::new(false) }; 2],
                origin: Origin::current_process(),
                faults: (ctx.hooks.faults.as_ref())
                    .map(|faults| Arc::clone(faults).queue_pair(num)),
            }))
        })?;
        inner.send_cq.inner.attach(&inner);
        if !inner.recv_cq.is_same(&inner.send_cq) {
            inner.recv_cq.inner.attach(&inner);
        }
        Ok(Self { inner })
    }

    /// Returns the queue pair's number. It has 24 bits and is unique on the device while the queue
    /// pair exists.
    pub fn num(&self) -> u32 {
        self.inner.num
    }

    /// Returns the program's own value for this queue pair, 0 if none was set.
    pub fn user_data(&self) -> u64 {
        self.inner.user.load(Ordering::Acquire)
    }

    /// Sets [`user_data`](Self::user_data).
    pub fn set_user_data(&self, value: u64) {
        self.inner.user.store(value, Ordering::Release);
    }

    /// Returns the device of the queue pair.
    pub fn context(&self) -> Context {
        Context {
            inner: Arc::clone(&self.inner.ctx),
        }
    }

    /// Returns the sizes that the queue pair was created with.
    pub fn config(&self) -> QpConfig {
        *self.inner.state.lock().machine.config()
    }

    /// Returns the state.
    pub fn state(&self) -> State {
        self.inner.state.lock().machine.state()
    }

    /// Returns why the connection ended, if it ended in error.
    pub fn fault(&self) -> Option<Fault> {
        self.inner.state.lock().machine.fault()
    }

    /// Returns `true` if the connection ended because the peer stopped answering.
    pub(crate) fn has_peer_vanished(&self) -> bool {
        self.inner.state.lock().peer_vanished
    }

    /// Returns `true` if a successful completion of the queue pair has not been polled.
    pub(crate) fn has_unseen_success(&self) -> bool {
        let QpInner {
            num,
            send_cq,
            recv_cq,
            ..
        } = &*self.inner;
        [send_cq, recv_cq]
            .iter()
            .any(|cq| cq.inner.has_success_of(*num))
    }

    /// Returns the counters.
    pub fn counters(&self) -> Counters {
        self.inner.counters()
    }

    /// Returns the local and the peer's address of the connection, if there is one.
    pub fn addresses(&self) -> Option<(SocketAddr, SocketAddr)> {
        let ends = self.inner.state.lock().link.socket()?.ends;
        Some((ends.local, ends.peer))
    }

    /// Returns what TCP reports about the connection, and the bytes that the peer has not
    /// acknowledged.
    pub(crate) fn transport(&self) -> Option<(TcpInfo, u64)> {
        let socket = self.inner.state.lock().link.socket().cloned()?;
        // Without the lock, because these are system calls.
        let unacknowledged = socket.stream.unacknowledged_bytes().ok()?;
        Some((tcp_info(&socket.stream).ok()?, unacknowledged))
    }

    /// Sets the remote accesses that the peer may make through the queue pair
    /// (`qp_access_flags` of `ibv_modify_qp(3)`). Only the remote rights of `access` are used.
    pub fn set_remote_access(&self, access: Access) {
        self.inner.state.lock().machine.set_remote_access(access);
    }

    /// Allows the program to change memory while it is being sent ([`Machine::set_snapshot`]).
    pub fn set_snapshot(&self, on: bool) {
        self.inner.state.lock().machine.set_snapshot(on);
    }

    /// Changes the state as `ibv_modify_qp(3)` does. ERR and RESET end the connection in the
    /// background: data of completed requests is still delivered, and then the stream is closed.
    ///
    /// # Errors
    /// Returns [`Error::InvalidState`] if the verbs do not allow the change.
    pub fn modify(&self, to: State) -> Result<()> {
        self.inner.prepare_for(to);
        let mut effects = Effects::default();
        let result = {
            let mut g = self.inner.state.lock();
            // In state ERR, the queue pair sends the tail itself.
            let tail =
                (to == State::Reset).then(|| UnsentTail::take(&self.inner, &mut g, &mut effects));
            let result = g
                .machine
                .modify(to, &mut DriveHost::new(&self.inner, &mut effects));
            self.inner.collect_effects(&mut g, &mut effects);
            if let Some(closing) = &mut effects.closing {
                closing.send_first(tail.unwrap_or_default());
            }
            if to == State::Reset {
                self.inner.held_receives.clear();
                g.epoch += 1;
            }
            result
        };
        effects.apply(&self.inner);
        if matches!(to, State::Reset | State::Error) {
            self.inner.ctx.gave_up_peer(self.num());
        }
        if to == State::Reset {
            // Completions of the old connection must not be mistaken for those of the next one.
            self.inner.send_cq.inner.purge(self.num());
            self.inner.recv_cq.inner.purge(self.num());
            self.inner.state.lock().release_all_slots(&self.inner.slots);
        }
        self.inner.drive_tx();
        result.map_err(|_| Error::InvalidState("the verbs do not allow this change of state"))
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.inner.state.lock().epoch()
    }

    /// Ends the connection with a reset. Data that the peer's TCP has not acknowledged is lost. The
    /// reset is a single packet: if it is lost, the peer notices the end when it next sends.
    pub fn abort(&self) {
        self.inner.with_machine(|machine, host| machine.abort(host));
    }

    /// Destroys the queue pair (`ibv_destroy_qp(3)`). Its completions and asynchronous events are
    /// dropped, and its connection is closed in the background. Other handles to it see the error
    /// state and cannot post. Does nothing in a forked child, because the parent owns the queue
    /// pair.
    pub fn destroy(&self) {
        self.inner.destroy();
    }

    /// Returns `true` if both handles refer to the same queue pair.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl QpInner {
    pub(crate) fn is_destroyed(&self) -> bool {
        self.destroyed.load(Ordering::Acquire)
    }

    pub(crate) fn counters(&self) -> Counters {
        *self.state.lock().machine.counters()
    }

    pub(crate) fn with_machine<R>(
        self: &Arc<Self>,
        f: impl FnOnce(&mut Machine, &mut DriveHost<'_>) -> R,
    ) -> R {
        let mut effects = Effects::default();
        let result = {
            let mut g = self.state.lock();
            let result = f(&mut g.machine, &mut DriveHost::new(self, &mut effects));
            self.collect_effects(&mut g, &mut effects);
            result
        };
        effects.apply(self);
        self.drive_tx();
        result
    }

    /// Returns `true` if requests wait for the stream of a peer that is connected by number, and
    /// the queue pair was not reset since `epoch`.
    pub(crate) fn awaits_peer(&self, epoch: u64) -> bool {
        let g = self.state.lock();
        g.epoch == epoch && g.awaits_peer()
    }

    /// If requests wait for a stream ([`awaits_peer`](Self::awaits_peer)), fails the oldest request
    /// as unanswered, flushes the others, and returns `true`.
    pub(crate) fn fail_absent_peer(self: &Arc<Self>, epoch: u64) -> bool {
        let mut effects = Effects::default();
        {
            let mut g = self.state.lock();
            if g.epoch != epoch || !g.awaits_peer() {
                return false;
            }
            tracing::debug!(qp = self.num, "the peer is absent");
            let mut host = DriveHost::new(self, &mut effects);
            g.machine.fail_absent_peer(&mut host);
            drop(host);
            self.collect_effects(&mut g, &mut effects);
        }
        effects.apply(self);
        true
    }

    /// Reads the socket. If another thread is reading it, leaves a note for that thread and returns
    /// `false`.
    #[inline]
    pub(crate) fn drive_rx(self: &Arc<Self>) -> bool {
        if self.origin.is_foreign() {
            return false;
        }
        self.rx.drive(|| drive::rx(self))
    }

    /// Writes to the socket. If another thread is writing to it, leaves a note for that thread and
    /// returns `false`.
    #[inline]
    pub(crate) fn drive_tx(self: &Arc<Self>) -> bool {
        if self.origin.is_foreign() {
            return false;
        }
        self.tx.drive(|| drive::tx(self))
    }

    /// The result is a hint: it may be outdated.
    #[inline]
    pub(crate) fn is_driven_elsewhere(&self) -> bool {
        self.rx.is_held() || self.tx.is_held()
    }
}

impl std::fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QueuePair")
            .field("num", &self.inner.num)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "qp_tests.rs"]
mod tests;
