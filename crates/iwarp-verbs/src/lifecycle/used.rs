//! The objects that a queue pair depends on.

use crate::abi::verbs::value::QPT_XRC_SEND;
use crate::abi::verbs::*;
use crate::border::object::Users;
use crate::domain::{pd, xrcd};
use crate::qp::connected::Target;
use crate::{cq, srq};
use std::ptr::null_mut;

/// Calls `f` for the user counts of the objects that a queue pair depends on. These objects cannot
/// be destroyed before the queue pair.
pub(crate) unsafe fn for_each_dependency(c: &ibv_qp, target: Option<&Target>, f: impl Fn(&Users)) {
    if let Some(target) = target {
        // A target depends on no other object, whatever the program passed.
        if let Ok(domain) = xrcd::find(target.xrcd()) {
            f(&domain.users);
        }
        return;
    }
    if let Ok(pd) = pd::find(c.pd) {
        f(&pd.users);
    }
    let (recv_cq, srq) = match c.qp_type {
        QPT_XRC_SEND => (null_mut(), null_mut()),
        _ => (c.recv_cq, c.srq),
    };
    for cq in [c.send_cq, recv_cq] {
        if let Ok(cq) = cq::find(cq) {
            f(&cq.users);
        }
    }
    if let Ok(srq) = srq::queue::find(srq) {
        f(&srq.users);
    }
}
