//! `ibv_post_send(3)` and `ibv_bind_mw(3)`. C work requests are converted on the stack, without
//! allocation.

use super::datagram;
use super::elements::{
    FLAGS, WR_SEND, WR_SEND_WITH_IMM, assume_all_init, checked_num_sge, cmp_swap, fetch_add,
    sge_bytes,
};
use crate::abi::verbs::value::{QPT_UC, QPT_UD, QPT_XRC_SEND, SEND_INLINE};
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Errno, Res, code};
use crate::device::face;
use crate::memory::mw;
use crate::qp::connected::{self, QpObject};
use iwarp::runtime::PostFailed;
use iwarp::runtime::XrcSendWr;
use iwarp_rnic::limits::MAX_SGE;
use iwarp_rnic::memory::Stag;
use iwarp_rnic::{SendFlags, SendOp, SendWr, Sge};
use std::ffi::{c_int, c_uint};
use std::mem::MaybeUninit;

const WR_RDMA_WRITE: c_uint = 0;
const WR_RDMA_WRITE_WITH_IMM: c_uint = 1;
const WR_RDMA_READ: c_uint = 4;
const WR_ATOMIC_CMP_AND_SWP: c_uint = 5;
const WR_ATOMIC_FETCH_AND_ADD: c_uint = 6;
const WR_LOCAL_INV: c_uint = 7;
const WR_BIND_MW: c_uint = 8;
const WR_SEND_WITH_INV: c_uint = 9;
const WR_ATOMIC_WRITE: c_uint = 15;

#[inline]
unsafe fn op_of(wr: &ibv_send_wr, qp: &QpObject) -> Res<SendOp> {
    let rdma = wr.wr.rdma;
    let (remote_addr, rkey) = (rdma.remote_addr, rdma.rkey);
    Ok(match wr.opcode {
        WR_SEND => SendOp::Send,
        WR_RDMA_WRITE => SendOp::Write { remote_addr, rkey },
        WR_RDMA_READ => SendOp::Read { remote_addr, rkey },
        WR_ATOMIC_WRITE => SendOp::AtomicWrite { remote_addr, rkey },
        WR_RDMA_WRITE_WITH_IMM => SendOp::WriteImm {
            remote_addr,
            rkey,
            imm: u32::from_be(wr.imm_data),
        },
        WR_SEND_WITH_IMM => SendOp::SendImm(u32::from_be(wr.imm_data)),
        WR_SEND_WITH_INV => SendOp::SendInv(wr.imm_data),
        WR_ATOMIC_CMP_AND_SWP => {
            let a = wr.wr.atomic;
            cmp_swap(a.remote_addr, a.rkey, a.compare_add, a.swap)
        }
        WR_ATOMIC_FETCH_AND_ADD => {
            let a = wr.wr.atomic;
            fetch_add(a.remote_addr, a.rkey, a.compare_add)
        }
        WR_LOCAL_INV => SendOp::LocalInvalidate {
            stag: Stag(wr.imm_data),
        },
        WR_BIND_MW => {
            let (c, bind) = ((*qp.c()).qp_base.context, wr.bind_mw);
            mw::bind_op(c, bind.mw, bind.rkey, &bind.bind_info)?
        }
        _ => return Err(EINVAL),
    })
}

/// Posts the first requests of a list: at most `W` requests with `S` elements. Returns the tail.
#[inline]
unsafe fn send_some<const W: usize, const S: usize>(
    qp: &QpObject,
    first: *mut ibv_send_wr,
    post: impl Fn(&QpObject, &[SendWr<'_>], *mut ibv_send_wr) -> Result<(), PostFailed>,
) -> Result<*mut ibv_send_wr, (*mut ibv_send_wr, Errno)> {
    // The arrays stay uninitialized, because clearing takes as long as filling them.
    let mut sge_room = [const { MaybeUninit::<Sge>::uninit() }; S];
    let mut inline_room = [const { MaybeUninit::<&[u8]>::uninit() }; S];
    let mut wrs = [const { MaybeUninit::<SendWr<'_>>::uninit() }; W];
    let (mut sges, mut pieces) = (&mut sge_room[..], &mut inline_room[..]);
    let mut current = first;
    let mut n = 0;
    let mut conversion_error = None;
    while !current.is_null() && n < W {
        let wr = &*current;
        let op = match op_of(wr, qp)
            .and_then(|op| Ok((op, checked_num_sge(wr.num_sge, qp.max_sge.send)?)))
        {
            Ok(op) => op,
            Err(e) => {
                conversion_error = Some(e);
                break;
            }
        };
        let (op, num) = op;
        if num > sges.len().min(pieces.len()) {
            break;
        }
        let list = if num == 0 {
            &[]
        } else {
            std::slice::from_raw_parts(wr.sg_list, num)
        };
        let mut to = SendWr {
            wr_id: wr.wr_id,
            op,
            flags: SendFlags::from_bits_truncate(wr.send_flags & FLAGS),
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
    let wrs = assume_all_init(&wrs[..n]);
    let posted = post(qp, wrs, first);
    if let Err(failed) = posted {
        let mut bad = first;
        for _ in 0..failed.accepted() {
            bad = (*bad).next;
        }
        face::hint_if_sent_in_rtr(&qp.raw, failed.error());
        return Err((bad, failed.into()));
    }
    match conversion_error {
        Some(e) => Err((current, e)),
        None => Ok(current),
    }
}

pub(crate) unsafe extern "C" fn post_send(
    q: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    code(|| {
        if (*q).qp_type > QPT_UC {
            return send_special(q, wr, bad);
        }
        let qp = connected::trusted(q);
        let plain = |qp: &QpObject, wrs: &[SendWr<'_>], _| qp.raw.post_send(wrs);
        let mut current = wr;
        while !current.is_null() {
            // Most programs post one request with few elements.
            let done = if (*current).next.is_null() && (0..=2).contains(&(*current).num_sge) {
                send_some::<1, 2>(qp, current, plain)
            } else {
                send_some::<32, { 2 * MAX_SGE as usize }>(qp, current, plain)
            };
            current = store_bad_wr(done, bad)?;
        }
        Ok(())
    })
}

/// If posting failed, stores the refused request in `bad`.
#[inline]
unsafe fn store_bad_wr(
    done: Result<*mut ibv_send_wr, (*mut ibv_send_wr, Errno)>,
    bad: *mut *mut ibv_send_wr,
) -> Res<*mut ibv_send_wr> {
    done.map_err(|(wr, e)| {
        if !bad.is_null() {
            *bad = wr;
        }
        e
    })
}

/// Posts to a datagram or XRC queue pair, whose requests have further fields.
#[inline(never)]
unsafe fn send_special(
    q: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> Res<()> {
    const CHUNK: usize = 8;
    match (*q).qp_type {
        QPT_UD => datagram::post_send(q, wr, bad),
        QPT_XRC_SEND => {
            let mut current = wr;
            while !current.is_null() {
                let post =
                    |qp: &QpObject, wrs: &[SendWr<'_>], first| post_xrc::<CHUNK>(qp, wrs, first);
                let done = send_some::<CHUNK, { 2 * MAX_SGE as usize }>(
                    connected::trusted(q),
                    current,
                    post,
                );
                current = store_bad_wr(done, bad)?;
            }
            Ok(())
        }
        _ => store_bad_wr(Err((wr, EINVAL)), bad).map(|_| ()),
    }
}

/// Posts requests with the numbers of their shared receive queues.
unsafe fn post_xrc<const W: usize>(
    qp: &QpObject,
    wrs: &[SendWr<'_>],
    first: *mut ibv_send_wr,
) -> Result<(), PostFailed> {
    let mut room = [const { MaybeUninit::<XrcSendWr<'_>>::uninit() }; W];
    let mut current = first;
    for (to, wr) in room.iter_mut().zip(wrs) {
        // The only member of the union `qp_type` is `xrc.remote_srqn`.
        let srq = (*current).qp_type;
        to.write(XrcSendWr { wr: *wr, srq });
        current = (*current).next;
    }
    qp.raw.post_send_xrc(assume_all_init(&room[..wrs.len()]))
}

/// `ibv_bind_mw(3)`, for windows of type 1. The new key is the old one plus one.
pub(crate) unsafe extern "C" fn bind_mw(
    q: *mut ibv_qp,
    m: *mut ibv_mw,
    bind: *mut ibv_mw_bind,
) -> c_int {
    code(|| {
        let bind = &*bind;
        // A datagram queue pair has no windows.
        if (*m).r#type != mw::TYPE_1 || (*q).qp_type == QPT_UD {
            return Err(EINVAL);
        }
        let old = Stag((*m).rkey);
        let rkey = old.with_key(old.key().wrapping_add(1)).0;
        let op = mw::bind_op((*q).context, m, rkey, &bind.bind_info)?;
        let wr = SendWr {
            wr_id: bind.wr_id,
            op,
            flags: SendFlags::from_bits_truncate(bind.send_flags & 0x7),
            sges: &[],
            inline: &[],
        };
        connected::trusted(q).raw.post_send(&[wr])?;
        (*m).rkey = rkey;
        Ok(())
    })
}
