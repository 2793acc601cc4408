//! Completions as C structures, and `ibv_poll_cq(3)`, which does not allocate.

use super::object::CqObject;
use crate::abi::verbs::*;
use crate::border::guard::value;
use crate::border::object;
use iwarp_rnic::{Cqe, WcFlags, WcOpcode, WcStatus};
use std::ffi::{c_int, c_uint};

pub(super) const fn wc_status(status: WcStatus) -> c_uint {
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

pub(super) const fn wc_opcode(opcode: WcOpcode) -> c_uint {
    match opcode {
        WcOpcode::Send => 0,
        WcOpcode::Write => 1,
        WcOpcode::Read => 2,
        WcOpcode::CmpSwap => 3,
        WcOpcode::FetchAdd => 4,
        WcOpcode::Bind => 5,
        // This interface has no work request that registers memory.
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

/// Returns immediate data in network byte order, or an STag in host byte order.
pub(super) const fn imm_or_stag(cqe: &Cqe) -> u32 {
    if cqe.flags.contains(WcFlags::WITH_IMM) {
        cqe.imm_or_stag.to_be()
    } else {
        cqe.imm_or_stag
    }
}

pub(super) const fn wc_flags(cqe: &Cqe) -> c_uint {
    let shown = WcFlags::GRH
        .union(WcFlags::WITH_IMM)
        .union(WcFlags::WITH_INV)
        .union(WcFlags::TAG_SYNC)
        .union(WcFlags::TAG_MATCH)
        .union(WcFlags::TAG_DATA);
    cqe.flags.bits() & shown.bits()
}

/// Returns a completion's service level. iWARP has none; for a datagram it encodes the kind of
/// routing header in the receive, as RoCE v2 NICs (mlx5) do. UCX before 1.19 relies on it.
pub(super) const fn service_level(cqe: &Cqe) -> u8 {
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

/// Returns a completion's vendor error. In datagrams and tag-matched messages the field has another
/// use, so the result is zero.
pub(super) const fn vendor_err(cqe: &Cqe) -> u32 {
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

/// Polls up to `N` completions at a time and converts them. Returns a negative number on overflow.
#[inline]
unsafe fn poll_some<const N: usize>(cq: &CqObject, n: usize, to: *mut ibv_wc) -> c_int {
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
                // Do not read the sockets a second time.
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
        let cq: &CqObject = object::trusted(c.cast());
        match usize::try_from(n) {
            Ok(1) => poll_some::<1>(cq, 1, to),
            Ok(n) => poll_some::<16>(cq, n, to),
            Err(_) => -libc::EINVAL,
        }
    })
}
