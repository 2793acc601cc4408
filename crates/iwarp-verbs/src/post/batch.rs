//! The `ibv_wr_*` interface (`ibv_wr_post(3)`): builds requests one by one between `ibv_wr_start`
//! and `ibv_wr_complete`.

use super::datagram as post_datagram;
use super::list::sge;
use super::send::{cmp_swap, fetch_add};
use crate::abi::verbs::value::{QPT_UD, QPT_XRC_SEND};
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Res, UNSUPPORTED, code, value};
use crate::memory::mw;
use crate::qp::batch::{Batch, Builder, BuiltRequest};
use crate::qp::limits::INLINE_MIN;
use crate::qp::{connected, datagram};
use iwarp::runtime::{UdSendWr, XrcSendWr};
use iwarp_rnic::memory::Stag;
use iwarp_rnic::{SendFlags, SendOp, SendWr};
use parking_lot::lock_api::RawMutex as _;
use std::ffi::{c_int, c_void};

/// `enum ibv_placement_type`: visible to all readers, or persistent.
const FLUSH_GLOBAL: u8 = 1;
const FLUSH_PERSISTENT: u8 = 2;
/// The last value of `enum ibv_selectivity_level`: a range, or the whole region.
const LEVEL_MAX: u8 = 1;
/// Bytes of an atomic write. Every queue pair that sends accepts this much inline data.
const ATOMIC_WRITE_LEN: usize = 8;
const _: () = assert!(ATOMIC_WRITE_LEN <= INLINE_MIN as usize);

pub(crate) fn fill(c: &mut ibv_qp_ex) {
    c.wr_atomic_cmp_swp = Some(wr_atomic_cmp_swp);
    c.wr_atomic_fetch_add = Some(wr_atomic_fetch_add);
    c.wr_bind_mw = Some(wr_bind_mw);
    c.wr_local_inv = Some(wr_local_inv);
    c.wr_rdma_read = Some(wr_rdma_read);
    c.wr_rdma_write = Some(wr_rdma_write);
    c.wr_rdma_write_imm = Some(wr_rdma_write_imm);
    c.wr_send = Some(wr_send);
    c.wr_send_imm = Some(wr_send_imm);
    c.wr_send_inv = Some(wr_send_inv);
    c.wr_send_tso = Some(wr_send_tso);
    c.wr_set_ud_addr = Some(wr_set_ud_addr);
    c.wr_set_xrc_srqn = Some(wr_set_xrc_srqn);
    c.wr_set_inline_data = Some(wr_set_inline_data);
    c.wr_set_inline_data_list = Some(wr_set_inline_data_list);
    c.wr_set_sge = Some(wr_set_sge);
    c.wr_set_sge_list = Some(wr_set_sge_list);
    c.wr_start = Some(wr_start);
    c.wr_complete = Some(wr_complete);
    c.wr_abort = Some(wr_abort);
    c.wr_atomic_write = Some(wr_atomic_write);
    c.wr_flush = Some(wr_flush);
}

unsafe fn is_ud(q: *mut ibv_qp_ex) -> bool {
    (*q).qp_base.qp_type == QPT_UD
}

unsafe fn is_xrc(q: *mut ibv_qp_ex) -> bool {
    (*q).qp_base.qp_type == QPT_XRC_SEND
}

unsafe fn builder<'a>(q: *mut ibv_qp_ex) -> &'a Builder {
    let builder = match is_ud(q) {
        true => &datagram::trusted(q.cast()).builder,
        false => &connected::trusted(q.cast()).builder,
    };
    match builder {
        Some(builder) => builder,
        // Only queue pairs with a batch get these functions.
        None => unreachable!("the queue pair was created without the extended interface"),
    }
}

/// Runs `f` on the batch, and records its first error for `ibv_wr_complete`.
unsafe fn update(q: *mut ibv_qp_ex, f: impl FnOnce(&mut Batch) -> Res<()>) {
    value((), || {
        let batch = &mut *builder(q).batch.get();
        if let Err(e) = f(batch) {
            batch.error.get_or_insert(e);
        }
    });
}

unsafe fn begin(q: *mut ibv_qp_ex, op: Res<SendOp>) {
    update(q, |batch| {
        batch.wrs.push(BuiltRequest {
            wr_id: (*q).wr_id,
            op: op?,
            flags: SendFlags::from_bits_truncate((*q).wr_flags & 0x7),
            sges: 0..0,
            inline: 0..0,
            is_inline: false,
            target: None,
            srq: 0,
        });
        Ok(())
    });
}

unsafe extern "C" fn wr_send(q: *mut ibv_qp_ex) {
    begin(q, Ok(SendOp::Send));
}

unsafe extern "C" fn wr_send_imm(q: *mut ibv_qp_ex, imm: u32) {
    begin(q, Ok(SendOp::SendImm(u32::from_be(imm))));
}

unsafe extern "C" fn wr_send_inv(q: *mut ibv_qp_ex, stag: u32) {
    begin(q, Ok(SendOp::SendInv(stag)));
}

unsafe extern "C" fn wr_rdma_write(q: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) {
    begin(q, Ok(SendOp::Write { remote_addr, rkey }));
}

unsafe extern "C" fn wr_rdma_write_imm(q: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, imm: u32) {
    let imm = u32::from_be(imm);
    begin(
        q,
        Ok(SendOp::WriteImm {
            remote_addr,
            rkey,
            imm,
        }),
    );
}

unsafe extern "C" fn wr_rdma_read(q: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) {
    begin(q, Ok(SendOp::Read { remote_addr, rkey }));
}

unsafe extern "C" fn wr_atomic_cmp_swp(
    q: *mut ibv_qp_ex,
    rkey: u32,
    addr: u64,
    compare: u64,
    swap: u64,
) {
    begin(q, Ok(cmp_swap(addr, rkey, compare, swap)));
}

unsafe extern "C" fn wr_atomic_fetch_add(q: *mut ibv_qp_ex, rkey: u32, addr: u64, add: u64) {
    begin(q, Ok(fetch_add(addr, rkey, add)));
}

unsafe extern "C" fn wr_local_inv(q: *mut ibv_qp_ex, stag: u32) {
    begin(q, Ok(SendOp::LocalInvalidate { stag: Stag(stag) }));
}

unsafe extern "C" fn wr_bind_mw(
    q: *mut ibv_qp_ex,
    window: *mut ibv_mw,
    rkey: u32,
    info: *const ibv_mw_bind_info,
) {
    begin(q, mw::bind_op((*q).qp_base.context, window, rkey, &*info));
}

unsafe extern "C" fn wr_send_tso(q: *mut ibv_qp_ex, _: *mut c_void, _: u16, _: u16) {
    begin(q, Err(UNSUPPORTED));
}

unsafe extern "C" fn wr_atomic_write(
    q: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    data: *const c_void,
) {
    begin(q, Ok(SendOp::AtomicWrite { remote_addr, rkey }));
    wr_set_inline_data(q, data.cast_mut(), ATOMIC_WRITE_LEN);
}

/// A flush makes all earlier requests visible, not only those in its range. The protocol cannot
/// request persistence.
unsafe extern "C" fn wr_flush(
    q: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    _: usize,
    placement: u8,
    level: u8,
) {
    let op = match placement {
        _ if level > LEVEL_MAX => Err(EINVAL),
        FLUSH_GLOBAL => Ok(SendOp::Flush { remote_addr, rkey }),
        p if p & FLUSH_PERSISTENT != 0 && p <= FLUSH_GLOBAL | FLUSH_PERSISTENT => Err(UNSUPPORTED),
        _ => Err(EINVAL),
    };
    begin(q, op);
}

unsafe extern "C" fn wr_set_ud_addr(q: *mut ibv_qp_ex, ah: *mut ibv_ah, qpn: u32, qkey: u32) {
    update(q, |batch| {
        if !is_ud(q) {
            return Err(EINVAL);
        }
        let wr = batch.wrs.last_mut().ok_or(EINVAL)?;
        wr.target = Some(post_datagram::destination(
            datagram::trusted(q.cast()),
            ah,
            qpn,
            qkey,
        )?);
        Ok(())
    });
}

unsafe extern "C" fn wr_set_xrc_srqn(q: *mut ibv_qp_ex, srq: u32) {
    update(q, |batch| {
        if !is_xrc(q) {
            return Err(EINVAL);
        }
        batch.wrs.last_mut().ok_or(EINVAL)?.srq = srq;
        Ok(())
    });
}

unsafe extern "C" fn wr_set_sge(q: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    let sge = ibv_sge { addr, length, lkey };
    // A single element of zero length is an empty list.
    wr_set_sge_list(q, usize::from(length != 0), &raw const sge);
}

unsafe extern "C" fn wr_set_sge_list(q: *mut ibv_qp_ex, n: usize, list: *const ibv_sge) {
    update(q, |batch| {
        let wr = batch.wrs.last_mut().ok_or(EINVAL)?;
        let from = batch.sges.len();
        for i in 0..n {
            batch.sges.push(sge(&*list.add(i)));
        }
        wr.sges = from..batch.sges.len();
        Ok(())
    });
}

unsafe extern "C" fn wr_set_inline_data(q: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    let buf = ibv_data_buf { addr, length };
    wr_set_inline_data_list(q, 1, &raw const buf);
}

unsafe extern "C" fn wr_set_inline_data_list(
    q: *mut ibv_qp_ex,
    n: usize,
    list: *const ibv_data_buf,
) {
    let max = match is_ud(q) {
        true => datagram::trusted(q.cast()).max_inline,
        false => connected::trusted(q.cast()).raw.config().max_inline,
    } as usize;
    update(q, |batch| {
        let wr = batch.wrs.last_mut().ok_or(EINVAL)?;
        let from = batch.inline.len();
        for i in 0..n {
            let buf = &*list.add(i);
            if buf.length > max {
                return Err(EINVAL);
            }
            if buf.length > 0 {
                let data = std::slice::from_raw_parts(buf.addr.cast::<u8>(), buf.length);
                batch.inline.extend_from_slice(data);
            }
        }
        wr.inline = from..batch.inline.len();
        wr.is_inline = true;
        Ok(())
    });
}

unsafe extern "C" fn wr_start(q: *mut ibv_qp_ex) {
    let builder = builder(q);
    builder.lock.lock();
    update(q, |batch| {
        batch.wrs.clear();
        batch.sges.clear();
        batch.inline.clear();
        batch.error = None;
        Ok(())
    });
}

/// Posts the whole batch, or nothing and returns an error.
unsafe fn submit(q: *mut ibv_qp_ex, batch: &Batch) -> Res<()> {
    if let Some(e) = batch.error {
        return Err(e);
    }
    if is_ud(q) {
        return submit_ud(q, batch);
    }
    let n = batch.wrs.len();
    // Only a large batch needs an allocation.
    let (mut stack_pieces, mut stack_wrs) = ([&[][..]; STACK_BATCH], [EMPTY; STACK_BATCH]);
    let (mut heap_pieces, mut heap_wrs) = (Vec::new(), Vec::new());
    let (pieces, list) = if n <= STACK_BATCH {
        (&mut stack_pieces[..n], &mut stack_wrs[..n])
    } else {
        heap_pieces.resize(n, &[][..]);
        heap_wrs.resize(n, EMPTY);
        (&mut heap_pieces[..], &mut heap_wrs[..])
    };
    for (to, wr) in pieces.iter_mut().zip(&batch.wrs) {
        *to = &batch.inline[wr.inline.clone()];
    }
    for ((to, wr), piece) in list.iter_mut().zip(&batch.wrs).zip(&*pieces) {
        *to = SendWr {
            wr_id: wr.wr_id,
            op: wr.op,
            flags: wr.flags,
            sges: &batch.sges[wr.sges.clone()],
            inline: &[],
        };
        if wr.is_inline {
            to.flags |= SendFlags::INLINE;
            to.inline = std::slice::from_ref(piece);
        }
    }
    let qp = &connected::trusted(q.cast()).raw;
    let posted = match is_xrc(q) {
        false => qp.post_send_all(list),
        true => {
            let numbers = batch.wrs.iter().map(|built| built.srq);
            let list = list.iter().zip(numbers);
            let list: Vec<_> = list.map(|(wr, srq)| XrcSendWr { wr: *wr, srq }).collect();
            qp.post_send_all_xrc(&list)
        }
    };
    Ok(posted?)
}

unsafe fn submit_ud(q: *mut ibv_qp_ex, batch: &Batch) -> Res<()> {
    let pieces: Vec<&[u8]> = batch
        .wrs
        .iter()
        .map(|wr| &batch.inline[wr.inline.clone()])
        .collect();
    let mut list = Vec::with_capacity(pieces.len());
    for (wr, piece) in batch.wrs.iter().zip(&pieces) {
        let immediate = match wr.op {
            SendOp::Send => None,
            SendOp::SendImm(immediate) => Some(immediate),
            _ => return Err(EINVAL),
        };
        let target = wr.target.ok_or(EINVAL)?;
        let mut to = UdSendWr {
            wr_id: wr.wr_id,
            immediate,
            flags: wr.flags,
            to: target.to,
            remote_qp: target.qpn,
            remote_qkey: target.qkey,
            sges: &batch.sges[wr.sges.clone()],
            inline: &[],
        };
        if wr.is_inline {
            to.flags |= SendFlags::INLINE;
            to.inline = std::slice::from_ref(piece);
        }
        list.push(to);
    }
    post_datagram::post_all(q.cast(), &list)
}

/// Batches of up to this many requests are built on the stack.
const STACK_BATCH: usize = 16;
const EMPTY: SendWr<'static> = SendWr {
    wr_id: 0,
    op: SendOp::Send,
    flags: SendFlags::empty(),
    sges: &[],
    inline: &[],
};

unsafe extern "C" fn wr_complete(q: *mut ibv_qp_ex) -> c_int {
    let builder = builder(q);
    let result = code(|| submit(q, &*builder.batch.get()));
    builder.lock.unlock();
    result
}

unsafe extern "C" fn wr_abort(q: *mut ibv_qp_ex) {
    builder(q).lock.unlock();
}
