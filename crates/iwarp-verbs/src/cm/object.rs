//! The objects of identifiers and their parts.

use super::address::Addresses;
use crate::abi::cma::*;
use crate::abi::verbs::*;
use crate::border::guard::Res;
use crate::border::object::{self, Kind, Object, Unacknowledged};
use iwarp::runtime::cm::{CmId, InfinibandParameters};
use parking_lot::Mutex;
use std::sync::Arc;

/// All access rights: local write, remote write, remote read, atomics. Queue pairs have all rights;
/// memory regions restrict access.
pub(super) const ACCESS_ALL: u32 = 0xf;

pub(crate) struct Id {
    pub(crate) raw: CmId,
    pub(crate) events: Unacknowledged,
    pub(crate) endpoint: Mutex<Endpoint>,
    pub(crate) lookup: Arc<Lookup>,
    pub(crate) groups: Mutex<Vec<MulticastGroup>>,
}

/// An identifier's options, and the objects that the library created for it.
#[derive(Default)]
pub(crate) struct Endpoint {
    /// The channel of a synchronous identifier, created by the library; 0 for other identifiers.
    pub(crate) channel: usize,
    /// Queue pair attributes for connections to a passive endpoint.
    pub(crate) qp_init: Option<QpInit>,
    /// `RDMA_OPTION_ID_TOS`: the traffic class of datagrams.
    pub(crate) tos: u8,
    pub(crate) ack_timeout: Option<u8>,
    /// `id->qp` was NULL in `rdma_connect`: the program moves the queue pair itself.
    pub(crate) external_qp: bool,
    /// Private data from the hints of `rdma_getaddrinfo`.
    pub(crate) connect_data: Vec<u8>,
    /// The library created the completion queues and channels.
    pub(crate) owns_cqs: bool,
    /// The queue pair from `rdma_create_qp`; the program may have changed `id->qp` since.
    pub(crate) qp: usize,
    /// The shared receive queue from `rdma_create_srq`.
    pub(crate) srq: usize,
    /// The peer's queue pair parameters, if both devices look like RoCE NICs.
    pub(crate) peer: Option<InfinibandParameters>,
    /// The path record, if the device looks like a RoCE NIC.
    pub(super) path: Option<Box<ibv_sa_path_rec>>,
}

#[derive(Clone, Copy)]
pub(crate) struct QpInit(pub(crate) ibv_qp_init_attr);

// SAFETY: the pointers are the program's; they are only passed back to functions of this library.
unsafe impl Send for QpInit {}

pub(crate) type IdObject = Object<rdma_cm_id, Id>;

/// # Safety
/// As [`object::find`].
pub(crate) unsafe fn find<'a>(id: *mut rdma_cm_id) -> Res<&'a IdObject> {
    object::find(Kind::CmId, id)
}

/// Returns `true` if the program passed no channel for the identifier. Calls then wait for their
/// event and store it in `id->event`.
pub(super) fn is_synchronous(object: &IdObject) -> bool {
    object.endpoint.lock().channel != 0
}

pub(crate) struct MulticastGroup {
    /// The number that identifies the group in events.
    pub(super) key: u64,
    /// The program's pointer, returned in the group's events.
    pub(super) context: usize,
    /// Unacknowledged events; leaving the group waits for them.
    pub(super) events: Arc<Unacknowledged>,
}

/// An identifier's look-up. Its thread keeps this state alive, but not the identifier.
#[derive(Default)]
pub(crate) struct Lookup(pub(super) Mutex<LookupState>);

#[derive(Default)]
pub(crate) enum LookupState {
    #[default]
    None,
    Running,
    /// The result, until the program fetches it.
    Found(Addresses),
}
