//! The attributes of a new queue pair.

use crate::objects::cq::CompletionQueue;
use crate::objects::srq::SharedReceiveQueue;
use iwarp_rnic::qp::{Budget, QpConfig, QueuePair as Machine, ReceiverNotReady as Policy};

/// The attributes of a new queue pair.
#[derive(Debug, Clone)]
pub struct QpAttributes {
    /// Protection domain number.
    pub pd: u32,
    /// Completion queue of the send queue.
    pub send_cq: CompletionQueue,
    /// Completion queue of the receive queue.
    pub recv_cq: CompletionQueue,
    /// Shared receive queue, used instead of the queue pair's own receive queue.
    pub srq: Option<SharedReceiveQueue>,
    /// Creates an unreliable connection (`IBV_QPT_UC`). A Send, or a Write with immediate data, is
    /// lost if the other end has posted no receive. A Write is lost if it violates the rights of
    /// the memory. Nothing is acknowledged. There are no Reads and atomics: `max_ird` and `max_ord`
    /// are 0.
    pub unreliable: bool,
    /// Maximum number of outstanding send work requests.
    pub max_send_wr: u32,
    /// Maximum number of outstanding receive work requests.
    pub max_recv_wr: u32,
    /// Maximum number of SGEs of a send work request.
    pub max_send_sge: u32,
    /// Maximum number of SGEs of a receive work request.
    pub max_recv_sge: u32,
    /// Maximum number of bytes of inline data.
    pub max_inline: u32,
    /// Every send work request writes a completion.
    pub signal_all: bool,
    /// Maximum number of inbound RDMA Reads and atomics that are served at a time.
    pub max_ird: u16,
    /// Maximum number of outbound RDMA Reads and atomics that are outstanding.
    pub max_ord: u16,
}

impl QpAttributes {
    pub(super) fn machine_config(&self) -> QpConfig {
        QpConfig {
            qp_num: 0,
            pd: self.pd,
            max_send_wr: self.max_send_wr,
            max_recv_wr: self.max_recv_wr,
            max_send_sge: self.max_send_sge,
            max_recv_sge: self.max_recv_sge,
            max_inline: self.max_inline,
            max_ird: if self.unreliable { 0 } else { self.max_ird },
            max_ord: if self.unreliable { 0 } else { self.max_ord },
            signal_all: self.signal_all,
            shared_receive: false,
            match_tags: false,
            receiver_not_ready: Policy::Terminate,
            snapshot: false,
            hold_slots: true,
            budget: Budget::default(),
        }
    }
}

pub(crate) fn is_unreliable(machine: &Machine) -> bool {
    machine.config().receiver_not_ready == Policy::Drop
}
