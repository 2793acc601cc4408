//! Traits by which capture observes, and fault injection disturbs, a device and its queue pairs.
//! The rooms that call these traits do not depend on the rooms that implement them. If neither is
//! configured, a call costs one test of a pointer.

use super::any_qp::AnyQp;
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
    /// Starts the recording of a connection. `active` is `true` if this end is the initiator.
    fn connection(&self, local: SocketAddr, peer: SocketAddr, active: bool) -> Box<dyn Observer>;

    fn flush(&self) -> io::Result<()>;
}

/// Observes the octets of one connection until it is dropped.
pub(crate) trait Observer: fmt::Debug + Send + Sync {
    /// Records that MPA start-up is complete, and whether sent and received FPDUs have markers.
    fn framed(&self, markers_tx: bool, markers_rx: bool);

    /// Records bytes that were sent during MPA start-up, or that were copied out of registered
    /// memory.
    fn sent(&self, parts: &[IoSlice<'_>]);

    /// Records bytes that were received during MPA start-up.
    fn received(&self, parts: &[&[u8]]);

    /// Records that the first `count` bytes of a list were sent.
    ///
    /// # Safety
    /// The ranges must be mapped and readable during the call. Their contents may change meanwhile.
    unsafe fn sent_raw(&self, list: &[RawSlice], count: usize);

    /// Records that the first `count` bytes of a list were received. Called before they may be
    /// overwritten.
    ///
    /// # Safety
    /// As [`sent_raw`](Self::sent_raw).
    unsafe fn received_raw(&self, list: &[RawSlice], count: usize);

    fn closed(&self, reset: bool);
}

pub(crate) trait DeviceFaults: Any + Send + Sync {
    /// Returns an error if the creation of an object of this kind must fail. The kinds are those of
    /// [`check_fault`](super::context::ContextInner::check_fault).
    fn create(&self, name: &'static str) -> Result<()>;

    fn refuses_shared_receive(&self) -> bool;

    fn is_port_down(&self) -> bool;

    /// Returns the error number if an attempt to connect to `peer` must fail.
    fn connect(&self, peer: SocketAddr) -> Option<i32>;

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

/// What becomes of a completion ([`QpFaults::completed`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Completion {
    Written,
    /// The caller writes the completion, and then calls [`QpFaults::act`].
    ThenAct,
    /// The caller drops the completion, as if the queue had overflowed.
    Lost,
}

/// Injects faults into one queue pair. All methods except [`act`](Self::act) may be called with the
/// queue pair's state locked.
pub(crate) trait QpFaults: Any + Send + Sync {
    fn connected(&self, peer: SocketAddr, crc: bool);

    fn refuses_send(&self, op: &SendOp) -> bool;

    fn refuses_receive(&self) -> bool;

    /// Returns the operation to post instead of `op`, if a fault changes it.
    fn changed(&self, op: &SendOp) -> Option<SendOp>;

    fn posted(&self, op: &SendOp);

    /// Returns `true` while a fault stalls this direction: no bytes may be sent or received.
    fn holds(&self, direction: StreamDirection) -> bool;

    /// Shortens a list of bytes to those that may be sent or received before a fault is due.
    fn limit(&self, direction: StreamDirection, runs: &mut Vec<RawSlice>);

    fn passed_octets(&self, direction: StreamDirection, n: usize);

    /// If a fault flips a bit of the bytes to send, copies the bytes and flips the bit in the copy.
    /// `runs` then refers to the copy, which the caller keeps. The bytes begin with an FPDU.
    ///
    /// # Safety
    /// The ranges must be readable during the call.
    unsafe fn spoil_copy(&self, runs: &mut Vec<RawSlice>) -> Option<Vec<u8>>;

    /// If a fault flips a bit of the `n` received bytes, flips it. The bytes begin with an FPDU.
    ///
    /// # Safety
    /// The ranges must be readable and writable during the call.
    unsafe fn spoil_received(&self, runs: &[RawSlice], n: usize);

    /// Returns `true` unless a fault makes the receiver not ready for this message.
    fn receiver_ready(&self) -> bool;

    /// Returns `true` while a fault makes the receiver not ready.
    fn starves(&self) -> bool;

    /// Decides what becomes of a completion that is about to be written, and may change it.
    fn completed(&self, direction: Direction, cqe: &mut Cqe) -> Completion;

    /// Returns `true` if [`act`](Self::act) has something to do.
    fn is_due(&self) -> bool;

    /// Carries out the faults that are due. Called without locks.
    fn act(&self, qp: Arc<dyn AnyQp>);
}
