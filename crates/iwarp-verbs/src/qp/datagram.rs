//! Datagram queue pairs (`IBV_QPT_UD`), and how functions find them.

use super::batch::Builder;
use super::limits::MaxSge;
use crate::abi::verbs::*;
use crate::border::guard::Res;
use crate::border::object::{self, Kind, Object, Unacknowledged};
use iwarp::runtime::UdQueuePair;
use parking_lot::Mutex;

pub(crate) struct UdQp {
    pub(crate) raw: UdQueuePair,
    pub(crate) asynchronous: Unacknowledged,
    pub(crate) attributes: Mutex<ibv_qp_attr>,
    pub(crate) sig_all: bool,
    pub(crate) max_inline: u32,
    pub(crate) max_sge: MaxSge,
    pub(crate) builder: Option<Builder>,
}

// SAFETY: the attributes are integers; all other fields are `Sync`.
unsafe impl Sync for UdQp {}

pub(crate) type UdObject = Object<ibv_qp_ex, UdQp>;

/// # Safety
/// As [`object::find`].
pub(crate) unsafe fn find<'a>(qp: *mut ibv_qp) -> Res<&'a UdObject> {
    object::find(Kind::UdQp, qp.cast())
}

/// # Safety
/// `q` is a living queue pair of this type.
#[inline]
pub(crate) unsafe fn trusted<'a>(q: *mut ibv_qp) -> &'a UdObject {
    object::trusted(q.cast())
}

/// `IBV_QP_EX_WITH_SEND` and `IBV_QP_EX_WITH_SEND_WITH_IMM`.
pub(crate) const OPS: u64 = 1 << 2 | 1 << 3;
