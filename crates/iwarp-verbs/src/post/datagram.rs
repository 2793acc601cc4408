//! Posting to datagram queue pairs.

use super::elements::{
    FLAGS, WR_SEND, WR_SEND_WITH_IMM, assume_all_init, checked_num_sge, sge_bytes,
};
use crate::abi::verbs::value::SEND_INLINE;
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Errno, Res};
use crate::border::object::{self, Object};
use crate::device::check_same;
use crate::domain::ah::Ah;
use crate::qp::batch::Destination;
use crate::qp::datagram::{UdObject, trusted};
use iwarp::runtime::UdSendWr;
use iwarp_rnic::limits::MAX_SGE;
use iwarp_rnic::{SendFlags, Sge};
use std::mem::MaybeUninit;

/// Returns a request's destination. Fails with EINVAL if the address handle is NULL, or if it
/// belongs to another protection domain.
pub(super) unsafe fn destination(
    qp: &UdObject,
    ah: *mut ibv_ah,
    qpn: u32,
    qkey: u32,
) -> Res<Destination> {
    if ah.is_null() {
        return Err(EINVAL);
    }
    let c = (*ah).context;
    let ah: &Object<ibv_ah, Ah> = object::trusted(ah);
    if ah.pd != qp.raw.pd() {
        return Err(EINVAL);
    }
    check_same(c, (*qp.c()).qp_base.context)?;
    let to = ah.address;
    Ok(Destination { to, qpn, qkey })
}

/// Number of requests, and of their elements, that are converted at a time.
const MAX_CONVERTED: usize = 8;
const SGES: usize = 2 * MAX_SGE as usize;

/// Posts the first requests of a list. Returns the unposted tail.
unsafe fn send_some(
    qp: &UdObject,
    first: *mut ibv_send_wr,
) -> Result<*mut ibv_send_wr, (*mut ibv_send_wr, Errno)> {
    let mut sge_room = [const { MaybeUninit::<Sge>::uninit() }; SGES];
    let mut inline_room = [const { MaybeUninit::<&[u8]>::uninit() }; SGES];
    let mut wrs = [const { MaybeUninit::<UdSendWr<'_>>::uninit() }; MAX_CONVERTED];
    let (mut sges, mut pieces) = (&mut sge_room[..], &mut inline_room[..]);
    let (mut current, mut n, mut conversion_error) = (first, 0, None);
    while !current.is_null() && n < MAX_CONVERTED {
        let wr = &*current;
        let (target, immediate, num) = match decode(qp, wr) {
            Ok(decoded) => decoded,
            Err(e) => {
                conversion_error = Some(e);
                break;
            }
        };
        if num > sges.len().min(pieces.len()) {
            break;
        }
        let list = match num {
            0 => &[],
            _ => std::slice::from_raw_parts(wr.sg_list, num),
        };
        let mut to = UdSendWr {
            wr_id: wr.wr_id,
            immediate,
            flags: SendFlags::from_bits_truncate(wr.send_flags & FLAGS),
            to: target.to,
            remote_qp: target.qpn,
            remote_qkey: target.qkey,
            sges: &[],
            inline: &[],
        };
        if wr.send_flags & SEND_INLINE == 0 {
            let (mine, rest) = sges.split_at_mut(num);
            for (to, from) in mine.iter_mut().zip(list) {
                to.write(Sge {
                    addr: from.addr,
                    len: from.length,
                    lkey: from.lkey,
                });
            }
            to.sges = assume_all_init(mine);
            sges = rest;
        } else {
            let (mine, rest) = pieces.split_at_mut(num);
            for (to, from) in mine.iter_mut().zip(list) {
                to.write(sge_bytes(from));
            }
            to.inline = assume_all_init(mine);
            pieces = rest;
        }
        wrs[n].write(to);
        n += 1;
        current = wr.next;
    }
    if let Err(failed) = qp.raw.post_send(assume_all_init(&wrs[..n])) {
        let mut bad = first;
        for _ in 0..failed.accepted() {
            bad = (*bad).next;
        }
        return Err((bad, failed.into()));
    }
    match conversion_error {
        Some(e) => Err((current, e)),
        None => Ok(current),
    }
}

/// Checks a request. Returns its destination, its immediate data, and the number of its elements.
unsafe fn decode(qp: &UdObject, wr: &ibv_send_wr) -> Res<(Destination, Option<u32>, usize)> {
    let immediate = match wr.opcode {
        WR_SEND => None,
        WR_SEND_WITH_IMM => Some(u32::from_be(wr.imm_data)),
        _ => return Err(EINVAL),
    };
    let ud = wr.wr.ud;
    let target = destination(qp, ud.ah, ud.remote_qpn, ud.remote_qkey)?;
    Ok((
        target,
        immediate,
        checked_num_sge(wr.num_sge, qp.max_sge.send)?,
    ))
}

pub(super) unsafe fn post_send(
    q: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> Res<()> {
    let qp = trusted(q);
    let mut current = wr;
    while !current.is_null() {
        current = send_some(qp, current).map_err(|(wr, e)| {
            if !bad.is_null() {
                *bad = wr;
            }
            e
        })?;
    }
    Ok(())
}

/// Posts a whole `ibv_wr_*` batch, or nothing and returns an error.
pub(super) unsafe fn post_all(q: *mut ibv_qp, wrs: &[UdSendWr<'_>]) -> Res<()> {
    let posted = trusted(q).raw.post_send_all(wrs);
    Ok(posted?)
}
