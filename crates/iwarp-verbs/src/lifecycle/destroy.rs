//! `ibv_destroy_qp(3)`.

use super::used::for_each_dependency;
use super::xrc;
use crate::abi::verbs::*;
use crate::border::guard::{EBUSY, Res, code};
use crate::border::object::{self, Kind, Users};
use crate::counter;
use crate::device::context;
use crate::device::pending_events::discard;
use crate::qp::connected::{self, Qp};
use crate::qp::datagram;
use std::ffi::c_int;

pub(crate) unsafe extern "C" fn ibv_destroy_qp(q: *mut ibv_qp) -> c_int {
    code(|| {
        // As in the kernel, the program must first detach the queue pair from multicast groups.
        if datagram::find(q).is_ok_and(|qp| qp.raw.is_attached()) {
            return Err(EBUSY);
        }
        destroy(q)
    })
}

/// Destroys a queue pair and detaches it from its multicast groups.
pub(crate) unsafe fn destroy(q: *mut ibv_qp) -> Res<()> {
    if let Ok(qp) = datagram::find(q) {
        return super::datagram::destroy(q, qp);
    }
    let qp = connected::find(q)?;
    counter::detach(q);
    if !xrc::remove_handle(q, qp) {
        qp.raw.destroy();
        discard(&context((*q).context).raw, qp.raw.clone());
    }
    // Acknowledging an event must still find the object.
    qp.asynchronous.wait();
    object::retire(Kind::Qp, q.cast::<ibv_qp_ex>())?;
    for_each_dependency(&*q, qp.target.as_ref(), Users::remove);
    object::free::<ibv_qp_ex, Qp>(q.cast());
    Ok(())
}
