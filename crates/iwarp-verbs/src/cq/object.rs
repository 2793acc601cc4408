//! The objects of completion channels and completion queues, and how functions find them.

use crate::abi::verbs::*;
use crate::border::guard::Res;
use crate::border::object::{self, Kind, Object, Unacknowledged, Users};
use iwarp::runtime::{CompletionChannel, CompletionQueue, ProcessLock};
use iwarp_rnic::Cqe;
use parking_lot::RawMutex;
use std::cell::Cell;

pub(crate) struct Channel {
    pub(super) raw: CompletionChannel,
    pub(super) users: Users,
}

pub(super) type ChannelObject = Object<ibv_comp_channel, Channel>;

/// Held while an event is taken and counted, so that destroying a queue sees both changes or
/// neither.
pub(super) static DELIVERY: ProcessLock<()> = ProcessLock::new("verbs::cq::DELIVERY", ());

pub(super) unsafe fn find_channel<'a>(c: *mut ibv_comp_channel) -> Res<&'a ChannelObject> {
    object::find(Kind::Channel, c)
}

pub(crate) struct Cq {
    pub(crate) raw: CompletionQueue,
    pub(crate) users: Users,
    pub(super) comp: Unacknowledged,
    pub(crate) asynchronous: Unacknowledged,
    pub(super) parent_domain: usize,
    pub(super) polling: RawMutex,
    pub(super) current: Cell<Cqe>,
}

pub(crate) type CqObject = Object<ibv_cq_ex, Cq>;

/// # Safety
/// As [`object::find`].
pub(crate) unsafe fn find<'a>(cq: *mut ibv_cq) -> Res<&'a CqObject> {
    object::find(Kind::Cq, cq.cast())
}

/// # Safety
/// As [`object::trusted`].
#[inline]
pub(super) unsafe fn trusted<'a>(cq: *mut ibv_cq_ex) -> &'a CqObject {
    object::trusted(cq)
}
