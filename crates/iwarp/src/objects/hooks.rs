//! Traits for observing and disturbing a device and its queue pairs. Capture and fault injection
//! implement them, and the rooms that call them know neither. If nothing is armed, a call costs one
//! test of a pointer.

use super::member::Member;
use crate::error::Result;
use crate::sys::raw_slice::RawSlice;
use iwarp_rnic::qp::Direction;
use iwarp_rnic::{Cqe, SendOp};
use std::any::Any;
use std::fmt;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::sync::Arc;

#[derive(Default)]
pub(crate) struct Hooks {
    pub(crate) recorder: Option<Arc<dyn Recording>>,
    pub(crate) faults: Option<Arc<dyn DeviceFaults>>,
}

pub(crate) trait Recording: Send + Sync {
    /// Begins to record a connection. `active` is `true` if this end has connected.
    fn connection(&self, local: SocketAddr, peer: SocketAddr, active: bool) -> Box<dyn Observer>;

    fn flush(&self) -> io::Result<()>;
}

/// Observes the octets of one connection until it is dropped.
pub(crate) trait Observer: fmt::Debug + Send + Sync {
    /// Records that FPDUs begin, and whether those that we send and receive have markers.
    fn framed(&self, markers_tx: bool, markers_rx: bool);

    /// Records bytes that were sent during MPA start-up, or that are no longer in registered
    /// memory.
    fn sent(&self, parts: &[IoSlice<'_>]);

    /// Records bytes that were received during MPA start-up.
    fn received(&self, parts: &[&[u8]]);

    /// Records that the first `count` bytes of a list were sent.
    ///
    /// # Safety
    /// The ranges are mapped and readable for the length of the call. They may change meanwhile.
    unsafe fn sent_raw(&self, list: &[RawSlice], count: usize);

    /// Records that the first `count` bytes of a list were received. Called before they may be
    /// overwritten.
    ///
    /// # Safety
    /// As [`sent_raw`](Self::sent_raw).
    unsafe fn received_raw(&self, list: &[RawSlice], count: usize);

    /// Records the end of the connection: a reset, or the closing of both directions.
    fn closed(&self, reset: bool);
}

pub(crate) trait DeviceFaults: Any + Send + Sync {
    /// Returns an error if the creation of an object of this kind must fail.
    fn create(&self, name: &'static str) -> Result<()>;

    /// Returns `true` if a receive must not be posted to a shared receive queue.
    fn refuses_shared_receive(&self) -> bool;

    fn is_port_down(&self) -> bool;

    /// Returns the error number if an attempt to connect to `peer` must fail.
    fn connect(&self, peer: SocketAddr) -> Option<i32>;

    /// Returns the faults of the new queue pair `num`.
    fn queue_pair(self: Arc<Self>, num: u32) -> Box<dyn QpFaults>;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamDirection {
    Out,
    In,
}

impl StreamDirection {
    pub(crate) const BOTH: [Self; 2] = [Self::Out, Self::In];

    pub(crate) const fn index(self) -> usize {
        match self {
            Self::Out => 0,
            Self::In => 1,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Completion {
    Written,
    /// Write it, and then call [`QpFaults::act`].
    ThenAct,
    /// Lose it, as if the queue had overflowed.
    Lost,
}

/// Injects faults into one queue pair. All methods except [`act`](Self::act) may be called with its
/// state locked.
pub(crate) trait QpFaults: Any + Send + Sync {
    fn connected(&self, peer: SocketAddr, crc: bool);

    /// Returns `true` if a send work request must not be posted.
    fn refuses_send(&self, op: &SendOp) -> bool;

    fn refuses_receive(&self) -> bool;

    /// Returns the operation to be posted instead of `op`.
    fn changed(&self, op: &SendOp) -> Option<SendOp>;

    fn posted(&self, op: &SendOp);

    /// Returns `true` while bytes of this direction must not pass.
    fn holds(&self, way: StreamDirection) -> bool;

    /// Shortens a list of bytes to what may pass before a fault is due.
    fn limit(&self, way: StreamDirection, runs: &mut Vec<RawSlice>);

    /// Notes that `n` bytes have passed.
    fn passed_octets(&self, way: StreamDirection, n: usize);

    /// If a bit of what is sent is to be flipped, copies the bytes and flips it. `runs` then refers
    /// to the copy, which the caller keeps. The bytes begin with an FPDU.
    ///
    /// # Safety
    /// The ranges are readable for the length of the call.
    unsafe fn spoil_copy(&self, runs: &mut Vec<RawSlice>) -> Option<Vec<u8>>;

    /// If a bit of what was received is to be flipped, flips it. The `n` bytes begin with an FPDU.
    ///
    /// # Safety
    /// The ranges are readable and writable for the length of the call.
    unsafe fn spoil_received(&self, runs: &[RawSlice], n: usize);

    /// Returns `true` unless a fault makes the receiver of this message not ready.
    fn receiver_ready(&self) -> bool;

    /// Returns `true` while a fault makes the receiver not ready.
    fn starves(&self) -> bool;

    /// Decides about a completion that is about to be written, and may change it.
    fn completed(&self, direction: Direction, cqe: &mut Cqe) -> Completion;

    /// Returns `true` if [`act`](Self::act) has something to do.
    fn is_due(&self) -> bool;

    /// Does what is due. Called without locks.
    fn act(&self, qp: Arc<dyn Member>);
}
