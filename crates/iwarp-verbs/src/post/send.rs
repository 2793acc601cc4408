//! `ibv_post_send(3)` and `ibv_bind_mw(3)`.

use super::list::{Poster, Room, post_list, refuse};
use crate::abi::verbs::value::{QPT_UC, QPT_UD, QPT_XRC_SEND};
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Res, code};
use crate::device::face;
use crate::memory::mw;
use crate::qp::connected::{self, QpObject};
use crate::qp::datagram;
use iwarp::runtime::PostFailed;
use iwarp::runtime::XrcSendWr;
use iwarp_rnic::memory::Stag;
use iwarp_rnic::{SendFlags, SendOp, SendWr};
use std::ffi::{c_int, c_uint};

const WR_RDMA_WRITE: c_uint = 0;
const WR_RDMA_WRITE_WITH_IMM: c_uint = 1;
pub(super) const WR_SEND: c_uint = 2;
pub(super) const WR_SEND_WITH_IMM: c_uint = 3;
const WR_RDMA_READ: c_uint = 4;
const WR_ATOMIC_CMP_AND_SWP: c_uint = 5;
const WR_ATOMIC_FETCH_AND_ADD: c_uint = 6;
const WR_LOCAL_INV: c_uint = 7;
const WR_BIND_MW: c_uint = 8;
const WR_SEND_WITH_INV: c_uint = 9;
const WR_ATOMIC_WRITE: c_uint = 15;

pub(super) const fn fetch_add(remote_addr: u64, rkey: u32, add: u64) -> SendOp {
    SendOp::FetchAdd {
        remote_addr,
        rkey,
        add,
        mask: 0,
    }
}

pub(super) const fn cmp_swap(remote_addr: u64, rkey: u32, compare: u64, swap: u64) -> SendOp {
    SendOp::CmpSwap {
        remote_addr,
        rkey,
        compare,
        swap,
        compare_mask: u64::MAX,
        swap_mask: u64::MAX,
    }
}

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

impl Poster for QpObject {
    type From = ibv_send_wr;
    type Into<'a> = SendWr<'a>;

    #[inline]
    unsafe fn convert<'a>(&self, wr: &ibv_send_wr, room: &mut Room<'a>) -> Res<Option<SendWr<'a>>> {
        let op = op_of(wr, self)?;
        let data = room.data(wr, self.max_sge.send)?;
        Ok(data.map(|data| SendWr {
            wr_id: wr.wr_id,
            op,
            flags: data.flags,
            sges: data.sges,
            inline: data.inline,
        }))
    }

    #[inline]
    fn post(&self, wrs: &[SendWr<'_>]) -> Result<(), PostFailed> {
        let posted = self.raw.post_send(wrs);
        posted.inspect_err(|failed| face::hint_if_sent_in_rtr(&self.raw, failed.error()))
    }
}

/// A queue pair that sends to shared receive queues. Each request names its queue.
struct XrcSender<'q>(&'q QpObject);

impl Poster for XrcSender<'_> {
    type From = ibv_send_wr;
    type Into<'a> = XrcSendWr<'a>;

    unsafe fn convert<'a>(
        &self,
        wr: &ibv_send_wr,
        room: &mut Room<'a>,
    ) -> Res<Option<XrcSendWr<'a>>> {
        let converted = self.0.convert(wr, room)?;
        // The only member of the union `qp_type` is `xrc.remote_srqn`.
        let srq = wr.qp_type;
        Ok(converted.map(|wr| XrcSendWr { wr, srq }))
    }

    fn post(&self, wrs: &[XrcSendWr<'_>]) -> Result<(), PostFailed> {
        let posted = self.0.raw.post_send_xrc(wrs);
        posted.inspect_err(|failed| face::hint_if_sent_in_rtr(&self.0.raw, failed.error()))
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
        post_list(connected::trusted(q), wr, bad)
    })
}

/// Posts to a datagram or XRC queue pair, whose requests have further fields.
#[inline(never)]
unsafe fn send_special(
    q: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> Res<()> {
    match (*q).qp_type {
        QPT_UD => post_list(datagram::trusted(q), wr, bad),
        QPT_XRC_SEND => post_list(&XrcSender(connected::trusted(q)), wr, bad),
        _ => refuse(wr, bad, EINVAL),
    }
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
