//! Sizes of requests.

use crate::abi::verbs::ibv_qp_cap;

/// Minimum inline data of a queue pair that sends, in bytes. Hardware grants some even if it was
/// not requested, and programs rely on it.
pub(crate) const INLINE_MIN: u32 = 32;

#[derive(Debug, Clone, Copy)]
pub(crate) struct MaxSge {
    pub(crate) send: u32,
    pub(crate) receive: u32,
}

impl MaxSge {
    pub(crate) const fn of(cap: &ibv_qp_cap) -> Self {
        Self {
            send: cap.max_send_sge,
            receive: cap.max_recv_sge,
        }
    }
}
