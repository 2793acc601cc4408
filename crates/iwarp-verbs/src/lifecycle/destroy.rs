//! `ibv_destroy_qp(3)`.

use super::used::each_used;
use super::xrc;
use crate::abi::verbs::*;
use crate::border::guard::{EBUSY, Res, code};
use crate::border::object::{self, Kind, Users};
use crate::counter;
use crate::device::context;
use crate::device::pending_events::forget;
use crate::qp::connected::{self, Qp};
use crate::qp::datagram;
use std::ffi::c_int;

pub(crate) unsafe extern "C" fn ibv_destroy_qp(q: *mut ibv_qp) -> c_int {
    code(|| {
        // As in the kernel, the program has to detach it from its multicast groups first.
        if datagram::find(q).is_ok_and(|qp| qp.raw.is_attached()) {
            return Err(EBUSY);
        }
        destroy(q)
    })
}

/// Destroys a queue pair. If it is attached to multicast groups, it leaves them.
pub(crate) unsafe fn destroy(q: *mut ibv_qp) -> Res<()> {
    if let Ok(qp) = datagram::find(q) {
        return super::datagram::destroy(q, qp);
    }
    let qp = connected::find(q)?;
    counter::detach(q);
    if !xrc::has_other_handles(q, qp) {
        qp.raw.destroy();
        forget(&context((*q).context).raw, qp.raw.clone());
    }
    // Acknowledging an event finds the object, so it is retired only afterwards.
    qp.asynchronous.wait();
    object::retire(Kind::Qp, q.cast::<ibv_qp_ex>())?;
    each_used(&*q, qp.target.as_ref(), Users::remove);
    object::free::<ibv_qp_ex, Qp>(q.cast());
    Ok(())
}
