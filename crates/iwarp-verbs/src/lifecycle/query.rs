//! Queries of queue pairs: `ibv_query_qp(3)`, `ibv_query_ece(3)`, and the conversion to the
//! extended structure.

use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, UNSUPPORTED, code};
use crate::qp::state::state_of;
use crate::qp::{connected, datagram};
use std::ffi::{c_int, c_uint};
use std::ptr::null_mut;

pub(crate) unsafe extern "C" fn ibv_qp_to_qp_ex(q: *mut ibv_qp) -> *mut ibv_qp_ex {
    let extended = match datagram::find(q) {
        Ok(qp) => qp.builder.is_some(),
        Err(_) => connected::find(q).is_ok_and(|qp| qp.builder.is_some()),
    };
    match extended {
        true => q.cast(),
        false => null_mut(),
    }
}

pub(crate) unsafe extern "C" fn ibv_query_qp(
    q: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    code(|| {
        if let Ok(qp) = datagram::find(q) {
            return super::datagram::query(q, qp, attr, init);
        }
        let qp = connected::find(q)?;
        let state = state_of(qp.state());
        let mut a = *qp.attributes.lock();
        a.qp_state = state;
        a.cur_qp_state = state;
        (*q).state = state;
        *attr = a;
        *init = ibv_qp_init_attr {
            qp_context: (*q).qp_context,
            send_cq: (*q).send_cq,
            recv_cq: (*q).recv_cq,
            srq: (*q).srq,
            cap: a.cap,
            qp_type: (*q).qp_type,
            sq_sig_all: c_int::from(qp.sig_all),
        };
        Ok(())
    })
}

/// Returns 0: the order in which data is placed is not guaranteed, except that the last bytes of a
/// Write are placed last.
pub(crate) unsafe extern "C" fn ibv_query_qp_data_in_order(
    _: *mut ibv_qp,
    _op: c_uint,
    _flags: u32,
) -> c_int {
    0
}

pub(crate) unsafe extern "C" fn ibv_query_ece(q: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    code(|| {
        datagram::find(q)
            .map(|_| ())
            .or_else(|_| connected::find(q).map(|_| ()))?;
        *ece = ibv_ece {
            vendor_id: 0,
            options: 0,
            comp_mask: 0,
        };
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn ibv_set_ece(q: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    code(|| {
        datagram::find(q)
            .map(|_| ())
            .or_else(|_| connected::find(q).map(|_| ()))?;
        if (*ece).comp_mask != 0 {
            return Err(EINVAL);
        }
        if (*ece).vendor_id != 0 {
            Err(UNSUPPORTED)
        } else {
            Ok(())
        }
    })
}
