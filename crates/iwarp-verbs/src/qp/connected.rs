//! Connected queue pairs of all types, and how functions find them.

use super::batch::Builder;
use super::limits::MaxSge;
use crate::abi::verbs::*;
use crate::border::guard::Res;
use crate::border::object::{self, Kind, Object, Unacknowledged};
use iwarp::runtime::QueuePair;
use iwarp_rnic::qp::State;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) struct Qp {
    pub(crate) raw: QueuePair,
    /// The program called `rdma_disconnect`: the queue pair is reported in ERR, although
    /// outstanding requests are still sent.
    pub(crate) disconnected: AtomicBool,
    /// The program has not changed the state yet.
    pub(crate) is_new: AtomicBool,
    pub(crate) asynchronous: Unacknowledged,
    pub(crate) attributes: Mutex<ibv_qp_attr>,
    pub(crate) sig_all: bool,
    pub(crate) max_sge: MaxSge,
    pub(crate) builder: Option<Builder>,
    pub(crate) target: Option<Target>,
}

// SAFETY: the attributes are integers; all other fields are `Sync`.
unsafe impl Sync for Qp {}

pub(crate) type QpObject = Object<ibv_qp_ex, Qp>;

impl Qp {
    pub(crate) fn set_timeout(&self, timeout: u8) {
        self.attributes.lock().timeout = timeout;
    }

    /// Sets the attributes negotiated by the connection manager. Retry counts and the peer's
    /// address are reported for InfiniBand only.
    pub(crate) fn set_negotiated(&self, from: &ibv_qp_attr, is_infiniband: bool) {
        let mut to = self.attributes.lock();
        to.path_mtu = from.path_mtu;
        to.max_rd_atomic = from.max_rd_atomic;
        to.max_dest_rd_atomic = from.max_dest_rd_atomic;
        if is_infiniband {
            to.timeout = from.timeout;
            to.retry_cnt = from.retry_cnt;
            to.rnr_retry = from.rnr_retry;
            to.dest_qp_num = from.dest_qp_num;
            to.ah_attr = from.ah_attr;
        }
    }

    /// Reports the queue pair in ERR from now on.
    pub(crate) fn set_disconnected(&self) {
        self.disconnected.store(true, Ordering::Release);
    }

    pub(crate) fn state(&self) -> State {
        match self.raw.state() {
            State::Reset => State::Reset,
            _ if self.disconnected.load(Ordering::Acquire) => State::Error,
            state => state,
        }
    }
}

/// # Safety
/// As [`object::find`].
pub(crate) unsafe fn find<'a>(qp: *mut ibv_qp) -> Res<&'a QpObject> {
    object::find(Kind::Qp, qp.cast())
}

/// Returns the library's part of a queue pair.
///
/// # Safety
/// `q` is a living queue pair.
#[inline]
pub(crate) unsafe fn trusted<'a>(q: *mut ibv_qp) -> &'a QpObject {
    object::trusted(q.cast())
}

/// Returns the state from which `ibv_modify_qp` changes. As in siw, a new queue pair of an RNIC
/// accepts receives and is reported in INIT, but the program still has to move it from RESET to
/// INIT.
pub(crate) fn state_for_program(qp: &QpObject) -> State {
    match qp.state() {
        State::Init if qp.is_new.load(Ordering::Acquire) => State::Reset,
        state => state,
    }
}

pub(crate) struct Target {
    pub(crate) xrcd: usize,
    /// All handles, the oldest first. The target is destroyed with its last handle.
    pub(crate) handles: Arc<Mutex<Vec<usize>>>,
}

impl Target {
    pub(crate) fn new(xrcd: *mut ibv_xrcd) -> Self {
        Self {
            xrcd: xrcd as usize,
            handles: Arc::default(),
        }
    }

    pub(crate) const fn xrcd(&self) -> *mut ibv_xrcd {
        self.xrcd as *mut ibv_xrcd
    }
}
