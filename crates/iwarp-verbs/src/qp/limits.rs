//! Limits of a queue pair's requests.

use crate::abi::verbs::ibv_qp_cap;

/// Minimum inline data of a queue pair that sends, in bytes. Hardware supports some inline data
/// even if none was requested, and programs rely on that.
pub(crate) const INLINE_MIN: u32 = 32;

#[derive(Debug, Clone, Copy)]
pub(crate) struct MaxSge {
    pub(crate) send: u32,
    pub(crate) receive: u32,
}

impl MaxSge {
    pub(crate) const fn from_cap(cap: &ibv_qp_cap) -> Self {
        Self {
            send: cap.max_send_sge,
            receive: cap.max_recv_sge,
        }
    }
}
