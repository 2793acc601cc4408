//! The objects of identifiers, and what belongs to them.

use super::address::Addresses;
use crate::abi::cma::*;
use crate::abi::verbs::*;
use crate::border::guard::Res;
use crate::border::object::{self, Kind, Object, Unacknowledged};
use iwarp::runtime::cm::{CmId, InfinibandParameters};
use parking_lot::Mutex;
use std::sync::Arc;

/// The rights of a queue pair, which regions limit: local and remote writes, remote reads, atomics.
pub(super) const ACCESS_ALL: u32 = 0xf;

/// Our part of an identifier.
pub(crate) struct Id {
    pub(crate) raw: CmId,
    pub(crate) events: Unacknowledged,
    pub(crate) endpoint: Mutex<Endpoint>,
    pub(crate) lookup: Arc<Lookup>,
    /// Multicast groups that it has joined.
    pub(crate) groups: Mutex<Vec<Joined>>,
}

/// Objects that were made for the program.
#[derive(Default)]
pub(crate) struct Endpoint {
    /// The channel of a synchronous identifier.
    pub(crate) channel: usize,
    /// Queue pair attributes for connections to a passive end point.
    pub(crate) qp_init: Option<QpInit>,
    /// `RDMA_OPTION_ID_TOS`: the traffic class of datagrams.
    pub(crate) tos: u8,
    /// `RDMA_OPTION_ID_ACK_TIMEOUT`.
    pub(crate) ack_timeout: Option<u8>,
    /// It connects, and the program moves the queue pair itself.
    pub(crate) external_qp: bool,
    /// Private data from `rdma_getaddrinfo`'s hints.
    pub(crate) connect_data: Vec<u8>,
    /// Completion queues and channels that `rdma_create_qp` made.
    pub(crate) made_cqs: bool,
    /// The queue pair as `rdma_create_qp` made it; a program may have changed `id->qp` since.
    pub(crate) qp: usize,
    /// The shared receive queue that `rdma_create_srq` made.
    pub(crate) srq: usize,
    /// What the other end says of its queue pair, if both devices look like RoCE NICs.
    pub(crate) peer: Option<InfinibandParameters>,
    /// The path record, on a device that looks like a RoCE NIC.
    pub(super) path: Option<Box<ibv_sa_path_rec>>,
}

/// A copy of `struct ibv_qp_init_attr`.
#[derive(Clone, Copy)]
pub(crate) struct QpInit(pub(crate) ibv_qp_init_attr);

// SAFETY: the pointers are the program's, and are only handed back to functions of this library.
unsafe impl Send for QpInit {}

pub(crate) type IdObject = Object<rdma_cm_id, Id>;

/// # Safety
/// As [`object::find`].
pub(crate) unsafe fn find<'a>(id: *mut rdma_cm_id) -> Res<&'a IdObject> {
    object::find(Kind::CmId, id)
}

/// Returns `true` if the channel is the identifier's own: calls wait for their event, which stays in `id->event`, because nobody else takes it.
pub(super) fn is_synchronous(object: &IdObject) -> bool {
    object.endpoint.lock().channel != 0
}

/// A group that the program has joined.
pub(crate) struct Joined {
    /// Our number for it, which comes back in its events.
    pub(super) key: u64,
    /// The program's own pointer, which is given back in its events.
    pub(super) context: usize,
    /// Leaving waits for these.
    pub(super) events: Arc<Unacknowledged>,
}

/// The look-up of an identifier. The thread that works on it keeps it alive, but not the identifier.
#[derive(Default)]
pub(crate) struct Lookup(pub(super) Mutex<LookupState>);

#[derive(Default)]
pub(crate) enum LookupState {
    #[default]
    None,
    Running,
    /// The program has not asked for the result yet.
    Found(Addresses),
}
