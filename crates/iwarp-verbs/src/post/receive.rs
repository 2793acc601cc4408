//! `ibv_post_recv(3)` and `ibv_post_srq_recv(3)`.

use super::list::{Poster, Room, post_list, refuse};
use crate::abi::verbs::value::{QPT_UD, QPT_XRC_RECV, QPT_XRC_SEND};
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Res, code};
use crate::border::object;
use crate::qp::{connected, datagram};
use crate::srq::queue::SrqObject;
use iwarp::runtime::PostFailed;
use iwarp_rnic::RecvWr;
use std::ffi::c_int;

/// A queue of receives with at most `max_sge` elements.
struct Receives<F> {
    max_sge: u32,
    post: F,
}

impl<F: Fn(&[RecvWr<'_>]) -> Result<(), PostFailed>> Poster for Receives<F> {
    type From = ibv_recv_wr;
    type Into<'a> = RecvWr<'a>;

    #[inline]
    unsafe fn convert<'a>(&self, wr: &ibv_recv_wr, room: &mut Room<'a>) -> Res<Option<RecvWr<'a>>> {
        let wr_id = wr.wr_id;
        let sges = room.sges(wr, self.max_sge)?;
        Ok(sges.map(|sges| RecvWr { wr_id, sges }))
    }

    #[inline]
    fn post(&self, wrs: &[RecvWr<'_>]) -> Result<(), PostFailed> {
        (self.post)(wrs)
    }
}

#[inline]
unsafe fn post_receives(
    max_sge: u32,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
    post: impl Fn(&[RecvWr<'_>]) -> Result<(), PostFailed>,
) -> Res<()> {
    post_list(&Receives { max_sge, post }, wr, bad)
}

pub(crate) unsafe extern "C" fn post_recv(
    q: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    code(|| match (*q).qp_type {
        QPT_UD => {
            let qp = datagram::trusted(q);
            post_receives(qp.max_sge.receive, wr, bad, |wrs| qp.raw.post_recv(wrs))
        }
        QPT_XRC_SEND | QPT_XRC_RECV => refuse(wr, bad, EINVAL),
        _ => {
            let qp = connected::trusted(q);
            post_receives(qp.max_sge.receive, wr, bad, |wrs| qp.raw.post_recv(wrs))
        }
    })
}

pub(crate) unsafe extern "C" fn post_srq_recv(
    s: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    code(|| {
        let srq: &SrqObject = object::trusted(s);
        post_receives(srq.max_sge, wr, bad, |wrs| srq.raw.post(wrs))
    })
}
