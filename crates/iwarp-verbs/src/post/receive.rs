//! `ibv_post_recv(3)` and `ibv_post_srq_recv(3)`.

use super::elements::{assume_all_init, checked_num_sge};
use crate::abi::verbs::value::{QPT_UD, QPT_XRC_RECV, QPT_XRC_SEND};
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Res, code};
use crate::border::object;
use crate::qp::{connected, datagram};
use crate::srq::queue::SrqObject;
use iwarp::runtime::PostFailed;
use iwarp_rnic::limits::MAX_SGE;
use iwarp_rnic::{RecvWr, Sge};
use std::ffi::c_int;
use std::mem::MaybeUninit;

/// Converts and posts a list of receives, at most `W` receives with `S` elements at a time.
#[inline]
unsafe fn post_in_chunks<const W: usize, const S: usize>(
    max_sge: u32,
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
    post: impl Fn(&[RecvWr<'_>]) -> Result<(), PostFailed>,
) -> Res<()> {
    let mut current = first;
    while !current.is_null() {
        let from = current;
        let mut room = [const { MaybeUninit::<Sge>::uninit() }; S];
        let mut wrs = [const { MaybeUninit::<RecvWr<'_>>::uninit() }; W];
        let mut sges = &mut room[..];
        let mut n = 0;
        let mut conversion_error = None;
        while !current.is_null() && n < W {
            let wr = &*current;
            let num = match checked_num_sge(wr.num_sge, max_sge) {
                Ok(num) if num <= sges.len() => num,
                Ok(_) => break,
                Err(e) => {
                    conversion_error = Some(e);
                    break;
                }
            };
            let (mine, rest) = sges.split_at_mut(num);
            for (i, to) in mine.iter_mut().enumerate() {
                let sge = &*wr.sg_list.add(i);
                to.write(Sge {
                    addr: sge.addr,
                    len: sge.length,
                    lkey: sge.lkey,
                });
            }
            wrs[n].write(RecvWr {
                wr_id: wr.wr_id,
                sges: assume_all_init(mine),
            });
            sges = rest;
            n += 1;
            current = wr.next;
        }
        let failed = match (post(assume_all_init(&wrs[..n])), conversion_error) {
            (Err(failed), _) => Some((failed.accepted(), failed.into())),
            (Ok(()), Some(e)) => Some((n, e)),
            (Ok(()), None) => None,
        };
        if let Some((i, e)) = failed {
            let mut wr = from;
            for _ in 0..i {
                wr = (*wr).next;
            }
            if !bad.is_null() {
                *bad = wr;
            }
            return Err(e);
        }
    }
    Ok(())
}

/// Converts and posts a list of receives. Most programs post one receive with few elements.
#[inline]
unsafe fn recv_list(
    max_sge: u32,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
    post: impl Fn(&[RecvWr<'_>]) -> Result<(), PostFailed>,
) -> Res<()> {
    if !wr.is_null() && (*wr).next.is_null() && (0..=2).contains(&(*wr).num_sge) {
        post_in_chunks::<1, 2>(max_sge, wr, bad, post)
    } else {
        post_in_chunks::<32, { 2 * MAX_SGE as usize }>(max_sge, wr, bad, post)
    }
}

pub(crate) unsafe extern "C" fn post_recv(
    q: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    code(|| {
        if (*q).qp_type == QPT_UD {
            let qp = datagram::trusted(q);
            return recv_list(qp.max_sge.receive, wr, bad, |wrs| qp.raw.post_recv(wrs));
        }
        if [QPT_XRC_SEND, QPT_XRC_RECV].contains(&(*q).qp_type) {
            if !bad.is_null() {
                *bad = wr;
            }
            return Err(EINVAL);
        }
        let qp = connected::trusted(q);
        recv_list(qp.max_sge.receive, wr, bad, |wrs| qp.raw.post_recv(wrs))
    })
}

pub(crate) unsafe extern "C" fn post_srq_recv(
    s: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    code(|| {
        let srq: &SrqObject = object::trusted(s);
        recv_list(srq.max_sge, wr, bad, |wrs| srq.raw.post(wrs))
    })
}
