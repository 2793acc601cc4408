//! The fast paths: posting and polling. C work requests are converted on the stack; nothing is allocated.

use crate::abi::verbs::value::{
    QPT_UC, QPT_UD, QPT_XRC_RECV, QPT_XRC_SEND, SEND_FENCE, SEND_INLINE, SEND_SIGNALED,
    SEND_SOLICITED,
};
use crate::abi::verbs::*;
use crate::cq::Cq;
use crate::guard::{EINVAL, Errno, Res, code, value};
use crate::object::{self, Object};
use crate::qp::QpObject;
use crate::srq::SrqObject;
use crate::{mw, ud, xrc};
use iwarp::runtime::PostFailed;
use iwarp_rnic::limits::MAX_SGE;
use iwarp_rnic::memory::Stag;
use iwarp_rnic::{Cqe, RecvWr, SendFlags, SendOp, SendWr, Sge, WcFlags, WcOpcode, WcStatus};
use std::ffi::{c_int, c_uint};
use std::mem::MaybeUninit;

/// Most elements of a request of a queue pair.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MaxSge {
    pub(crate) send: u32,
    pub(crate) receive: u32,
}

impl MaxSge {
    pub(crate) const fn of(cap: &ibv_qp_cap) -> Self {
        Self {
            send: cap.max_send_sge,
            receive: cap.max_recv_sge,
        }
    }
}

/// Our part of a queue pair.
///
/// # Safety
/// `q` is a living queue pair.
#[inline]
pub(crate) unsafe fn qp<'a>(q: *mut ibv_qp) -> &'a QpObject {
    object::trusted(q.cast())
}

const WR_RDMA_WRITE: c_uint = 0;
const WR_RDMA_WRITE_WITH_IMM: c_uint = 1;
pub(crate) const WR_SEND: c_uint = 2;
pub(crate) const WR_SEND_WITH_IMM: c_uint = 3;
const WR_RDMA_READ: c_uint = 4;
const WR_ATOMIC_CMP_AND_SWP: c_uint = 5;
const WR_ATOMIC_FETCH_AND_ADD: c_uint = 6;
const WR_LOCAL_INV: c_uint = 7;
const WR_BIND_MW: c_uint = 8;
const WR_SEND_WITH_INV: c_uint = 9;
const WR_ATOMIC_WRITE: c_uint = 15;

pub(crate) const fn fetch_add(remote_addr: u64, rkey: u32, add: u64) -> SendOp {
    SendOp::FetchAdd {
        remote_addr,
        rkey,
        add,
        mask: 0,
    }
}

pub(crate) const fn cmp_swap(remote_addr: u64, rkey: u32, compare: u64, swap: u64) -> SendOp {
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

pub(crate) const FLAGS: c_uint = SEND_FENCE | SEND_SIGNALED | SEND_SOLICITED | SEND_INLINE;

/// Returns the program's octets of one element, for inline data.
pub(crate) unsafe fn octets<'a>(sge: &ibv_sge) -> &'a [u8] {
    if sge.length == 0 {
        return &[];
    }
    std::slice::from_raw_parts(sge.addr as *const u8, sge.length as usize)
}

/// Returns how many elements a request has. The list of one with more than `max`, the queue's limit, must not be read.
#[inline]
pub(crate) fn count(n: c_int, max: u32) -> Res<usize> {
    // A negative number is too large as an unsigned one.
    match n as u32 <= max {
        true => Ok(n as usize),
        false => Err(EINVAL),
    }
}

/// A list whose elements have been written.
///
/// # Safety
/// The whole list: all elements have been written.
#[inline]
pub(crate) const unsafe fn written<T>(list: &[MaybeUninit<T>]) -> &[T] {
    &*(std::ptr::from_ref(list) as *const [T])
}

/// Posts the first requests of a list, as many as fit into `W` requests and `S` elements. Returns the rest of the list.
#[inline]
unsafe fn send_some<const W: usize, const S: usize>(
    qp: &QpObject,
    first: *mut ibv_send_wr,
    post: impl Fn(&QpObject, &[SendWr<'_>], *mut ibv_send_wr) -> Result<(), PostFailed>,
) -> Result<*mut ibv_send_wr, (*mut ibv_send_wr, Errno)> {
    // The arrays are not cleared: that would take as long as filling them.
    let mut sge_room = [const { MaybeUninit::<Sge>::uninit() }; S];
    let mut inline_room = [const { MaybeUninit::<&[u8]>::uninit() }; S];
    let mut wrs = [const { MaybeUninit::<SendWr<'_>>::uninit() }; W];
    let (mut sges, mut pieces) = (&mut sge_room[..], &mut inline_room[..]);
    let mut at = first;
    let mut n = 0;
    let mut stop = None;
    while !at.is_null() && n < W {
        let wr = &*at;
        let op = match op_of(wr, qp).and_then(|op| Ok((op, count(wr.num_sge, qp.max_sge.send)?))) {
            Ok(op) => op,
            Err(e) => {
                stop = Some(e);
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
            to.sges = written(mine);
            sges = rest;
        } else {
            let (mine, rest) = pieces.split_at_mut(num);
            for (to, from) in mine.iter_mut().zip(list) {
                to.write(octets(from));
            }
            to.inline = written(mine);
            pieces = rest;
        }
        wrs[n].write(to);
        n += 1;
        at = wr.next;
    }
    let wrs = written(&wrs[..n]);
    let posted = post(qp, wrs, first);
    if let Err(failed) = posted {
        let mut bad = first;
        for _ in 0..failed.accepted() {
            bad = (*bad).next;
        }
        crate::face::post_failed(&qp.raw, failed.error());
        return Err((bad, failed.into()));
    }
    match stop {
        Some(e) => Err((at, e)),
        None => Ok(at),
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
        let qp = qp(q);
        let plain = |qp: &QpObject, wrs: &[SendWr<'_>], _| qp.raw.post_send(wrs);
        let mut at = wr;
        while !at.is_null() {
            // Most programs post one request with few elements.
            let done = if (*at).next.is_null() && (0..=2).contains(&(*at).num_sge) {
                send_some::<1, 2>(qp, at, plain)
            } else {
                send_some::<32, { 2 * MAX_SGE as usize }>(qp, at, plain)
            };
            at = rest(done, bad)?;
        }
        Ok(())
    })
}

/// Returns what is left of a list, or tells which request was refused.
#[inline]
unsafe fn rest(
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

/// Posts to a queue pair whose requests have more than those of other connections.
#[inline(never)]
unsafe fn send_special(
    q: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> Res<()> {
    const MOST: usize = 8;
    match (*q).qp_type {
        QPT_UD => ud::post_send(q, wr, bad),
        QPT_XRC_SEND => {
            let mut at = wr;
            while !at.is_null() {
                let post = |qp: &QpObject, wrs: &[SendWr<'_>], first| {
                    xrc::post_some::<MOST>(qp, wrs, first)
                };
                let done = send_some::<MOST, { 2 * MAX_SGE as usize }>(qp(q), at, post);
                at = rest(done, bad)?;
            }
            Ok(())
        }
        // A target sends nothing.
        _ => rest(Err((wr, EINVAL)), bad).map(|_| ()),
    }
}

/// Converts receives and passes them to `post`, a few at a time.
#[inline]
unsafe fn recv_all<const W: usize, const S: usize>(
    max_sge: u32,
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
    post: impl Fn(&[RecvWr<'_>]) -> Result<(), PostFailed>,
) -> Res<()> {
    let mut at = first;
    while !at.is_null() {
        let from = at;
        let mut room = [const { MaybeUninit::<Sge>::uninit() }; S];
        let mut wrs = [const { MaybeUninit::<RecvWr<'_>>::uninit() }; W];
        let mut sges = &mut room[..];
        let mut n = 0;
        let mut stop = None;
        while !at.is_null() && n < W {
            let wr = &*at;
            let num = match count(wr.num_sge, max_sge) {
                Ok(num) if num <= sges.len() => num,
                Ok(_) => break,
                Err(e) => {
                    stop = Some(e);
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
                sges: written(mine),
            });
            sges = rest;
            n += 1;
            at = wr.next;
        }
        let failed = match (post(written(&wrs[..n])), stop) {
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

/// Most programs post one receive with few elements.
#[inline]
unsafe fn recv_list(
    max_sge: u32,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
    post: impl Fn(&[RecvWr<'_>]) -> Result<(), PostFailed>,
) -> Res<()> {
    if !wr.is_null() && (*wr).next.is_null() && (0..=2).contains(&(*wr).num_sge) {
        recv_all::<1, 2>(max_sge, wr, bad, post)
    } else {
        recv_all::<32, { 2 * MAX_SGE as usize }>(max_sge, wr, bad, post)
    }
}

pub(crate) unsafe extern "C" fn post_recv(
    q: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    code(|| {
        if (*q).qp_type == QPT_UD {
            let qp = ud::trusted(q);
            return recv_list(qp.max_sge.receive, wr, bad, |wrs| qp.raw.post_recv(wrs));
        }
        if [QPT_XRC_SEND, QPT_XRC_RECV].contains(&(*q).qp_type) {
            // Receives are posted to the shared receive queues.
            if !bad.is_null() {
                *bad = wr;
            }
            return Err(EINVAL);
        }
        let qp = qp(q);
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

pub(crate) const fn wc_status(status: WcStatus) -> c_uint {
    match status {
        WcStatus::Success => 0,
        WcStatus::LocalLength => 1,
        WcStatus::LocalQpOperation => 2,
        WcStatus::LocalProtection => 4,
        WcStatus::Flushed => 5,
        WcStatus::MwBind => 6,
        WcStatus::BadResponse => 7,
        WcStatus::LocalAccess => 8,
        WcStatus::RemoteInvalidRequest => 9,
        WcStatus::RemoteAccess => 10,
        WcStatus::RemoteOperation => 11,
        WcStatus::TransportRetryExceeded => 12,
        WcStatus::ReceiverNotReady => 13,
        WcStatus::Fatal => 19,
        WcStatus::ResponseTimeout => 20,
        WcStatus::General => 21,
        WcStatus::TagMatching => 22,
    }
}

pub(crate) const fn wc_opcode(opcode: WcOpcode) -> c_uint {
    match opcode {
        WcOpcode::Send => 0,
        WcOpcode::Write => 1,
        WcOpcode::Read => 2,
        WcOpcode::CmpSwap => 3,
        WcOpcode::FetchAdd => 4,
        WcOpcode::Bind => 5,
        // No work request of this interface registers memory.
        WcOpcode::LocalInvalidate | WcOpcode::FastRegister => 6,
        WcOpcode::Flush => 8,
        WcOpcode::AtomicWrite => 9,
        WcOpcode::Recv => 128,
        WcOpcode::RecvWriteImm => 129,
        WcOpcode::TagAdd => 130,
        WcOpcode::TagRemove => 131,
        WcOpcode::TagSync => 132,
        WcOpcode::TagRecv => 133,
        WcOpcode::TagNone => 134,
    }
}

/// Returns immediate data in network order, or an STag in host order.
pub(crate) const fn imm_or_stag(cqe: &Cqe) -> u32 {
    if cqe.flags.contains(WcFlags::WITH_IMM) {
        cqe.imm_or_stag.to_be()
    } else {
        cqe.imm_or_stag
    }
}

/// Returns `enum ibv_wc_flags` of a completion.
pub(crate) const fn wc_flags(cqe: &Cqe) -> c_uint {
    let shown = WcFlags::GRH
        .union(WcFlags::WITH_IMM)
        .union(WcFlags::WITH_INV)
        .union(WcFlags::TAG_SYNC)
        .union(WcFlags::TAG_MATCH)
        .union(WcFlags::TAG_DATA);
    cqe.flags.bits() & shown.bits()
}

/// Returns the service level of a completion. Of a datagram it says which routing header the receive has, because iWARP has no service
/// levels, and because NICs for RoCE v2 (mlx5) do so. UCX before 1.19 takes the header's kind from here.
pub(crate) const fn service_level(cqe: &Cqe) -> u8 {
    /// A UDP header follows the routing header.
    const OVER_UDP: u8 = 1 << 3;
    const IPV6: u8 = 1;
    const IPV4: u8 = 2;
    match (
        cqe.flags.contains(WcFlags::GRH),
        cqe.flags.contains(WcFlags::IPV4),
    ) {
        (false, _) => 0,
        (true, false) => OVER_UDP | IPV6,
        (true, true) => OVER_UDP | IPV4,
    }
}

/// Returns what a completion says about an error. Datagrams have their sender there, and matched messages what their sender has added.
pub(crate) const fn vendor_err(cqe: &Cqe) -> u32 {
    match cqe.flags.intersects(WcFlags::GRH.union(WcFlags::TAG_MATCH)) {
        true => 0,
        false => cqe.vendor_err,
    }
}

#[inline]
const fn to_wc(cqe: &Cqe) -> ibv_wc {
    ibv_wc {
        wr_id: cqe.wr_id,
        status: wc_status(cqe.status),
        opcode: wc_opcode(cqe.opcode),
        vendor_err: vendor_err(cqe),
        byte_len: cqe.byte_len,
        imm_data: imm_or_stag(cqe),
        qp_num: cqe.qp_num,
        src_qp: cqe.src_qp(),
        wc_flags: wc_flags(cqe),
        pkey_index: 0,
        slid: 0,
        sl: service_level(cqe),
        dlid_path_bits: 0,
    }
}

/// Polls into an array of `N` and converts. Returns a negative number if the queue has overflowed.
#[inline]
unsafe fn poll_some<const N: usize>(
    cq: &Object<ibv_cq_ex, Cq>,
    n: usize,
    to: *mut ibv_wc,
) -> c_int {
    let mut got = 0;
    let mut cqes = [Cqe::default(); N];
    while got < n {
        let want = (n - got).min(N);
        match cq.raw.poll(&mut cqes[..want]) {
            Ok(taken) => {
                for cqe in &cqes[..taken] {
                    to.add(got).write(to_wc(cqe));
                    got += 1;
                }
                if taken < want {
                    break;
                }
                // Further completions are taken only if they are there: the sockets were looked at once.
                if cq.raw.is_empty() {
                    break;
                }
            }
            Err(_) if got > 0 => break,
            Err(_) => return -libc::EIO,
        }
    }
    got as c_int
}

pub(crate) unsafe extern "C" fn poll_cq(c: *mut ibv_cq, n: c_int, to: *mut ibv_wc) -> c_int {
    value(-libc::EIO, || {
        let cq: &Object<ibv_cq_ex, Cq> = object::trusted(c.cast());
        match usize::try_from(n) {
            Ok(1) => poll_some::<1>(cq, 1, to),
            Ok(n) => poll_some::<16>(cq, n, to),
            Err(_) => -libc::EINVAL,
        }
    })
}
