//! Streams in arbitrary pieces: splits, markers, direct placement, partial writes.

use super::harness::*;
use crate::limits::{RX_DIRECT_TAIL, RX_READ_MAX};
use crate::qp::*;
use crate::{Access, SendOp, WcStatus};
use iwarp_proto::crc32c;
use iwarp_proto::ddp::Stag;
use iwarp_proto::rdmap::Opcode;
use proptest::prelude::*;
use std::vec::Vec;

/// Runs all operations in both directions, in pieces of `piece` octets.
fn all_operations(stream: StreamConfig, piece: usize, len: u32) {
    let (mut a, mut b) = pair(stream);
    let (src, dst) = (a.mr(len, ALL), b.mr(len, ALL));
    let (buffer, sink) = (b.mr(len, ALL), a.mr(len, ALL));
    let filled = a.read(&src);
    b.recv(1, &[buffer.sge()]);
    b.recv(2, &[]);
    let (remote_addr, rkey) = (dst.at, dst.stag);
    let write = SendOp::WriteImm {
        remote_addr,
        rkey,
        imm: 4,
    };
    a.post(
        1,
        SendOp::Send,
        &[src.part(0, len / 2), src.part(len / 2, len - len / 2)],
    );
    a.post(2, write, &[src.sge()]);
    a.post(3, SendOp::Read { remote_addr, rkey }, &[sink.sge()]);
    let reply_buffer = receive_buffer(&mut a, len);
    a.recv(5, &[reply_buffer.sge()]);
    let reply = b.mr(len, ALL);
    b.post(4, SendOp::Send, &[reply.sge()]);
    shuttle(&mut a, &mut b, piece);
    use WcStatus::Success;
    assert_eq!(
        brief(&a.host.sends),
        [(1, Success), (2, Success), (3, Success)]
    );
    assert_eq!(brief(&b.host.sends), [(4, Success)]);
    assert_eq!(brief(&b.host.recvs), [(1, Success), (2, Success)]);
    assert_eq!(brief(&a.host.recvs), [(5, Success)]);
    for (rig, mr) in [(&b, &dst), (&b, &buffer), (&a, &sink)] {
        assert_eq!(rig.read(mr), filled);
    }
}

fn receive_buffer(rig: &mut Rig, len: u32) -> Mr {
    rig.mr(len, Access::LOCAL_WRITE)
}

#[test]
fn stream_arrives_octet_by_octet() {
    //= rfc5044 section A.4
    //= type=test
    //# However, MPA receivers MUST NOT depend on FPDU Alignment on TCP segment
    //# boundaries.
    //= rfc5044 section 5.1
    //= type=test
    //# MPA receivers are REQUIRED to be able to operate correctly even if
    //# alignment is lost (see Section 6).
    //= rfc5044 section 3
    //= type=test
    //# On receive, MPA MUST pass each ULPDU with its length to DDP when it has
    //# been validated.
    //= rfc5044 section 3
    //= type=test
    //# MPA MUST encapsulate the ULPDU such that there is exactly one ULPDU
    //# contained in one FPDU.
    for crc in [true, false] {
        for (markers_tx, markers_rx) in [(false, false), (true, false), (false, true), (true, true)]
        {
            let stream = StreamConfig {
                crc,
                markers_tx,
                markers_rx,
                ..STREAM
            };
            all_operations(stream, 1, 3000);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn operations_work_in_any_pieces(
        crc: bool,
        tx: bool,
        rx: bool,
        piece in 1usize..5000,
        len in 1u32..40_000,
        emss in prop_oneof![Just(536u32), Just(1460), Just(9000), Just(65483)],
    ) {
        let stream = StreamConfig { crc, markers_tx: tx, markers_rx: rx, emss, ..STREAM };
        all_operations(stream, piece, len);
    }
}

#[allow(unsafe_code)]
pub(super) fn read_as_planned(rig: &mut Rig, mut octets: &[u8], piece: usize, runs: usize) -> u64 {
    let mut plan = RxPlan::new(runs);
    while !octets.is_empty() {
        let mut list = Vec::new();
        let visit = |run| list.push(run);
        rig.qp
            .rx_plan(&mut rig.buffer, &rig.table, &mut plan, visit);
        assert!(list.len() <= runs);
        assert!(list.iter().all(|run| !run.fragment.is_empty()));
        let n = plan.room().min(piece).min(octets.len());
        assert!(n > 0, "no room");
        let (now, later) = octets.split_at(n);
        octets = later;
        let mut rest = now;
        for fragment in list.iter().map(|run| run.fragment) {
            let n = fragment.len().min(rest.len());
            // SAFETY: the plan is fresh, and its runs are writable.
            unsafe { core::ptr::copy_nonoverlapping(rest.as_ptr(), fragment.as_ptr(), n) };
            rest = &rest[n..];
        }
        let mut env = Env {
            memory: &rig.table,
            crc32c: Crc32c::new(crc32c::append),
            host: &mut rig.host,
        };
        let status = rig.qp.rx_filled(&mut rig.buffer, &mut plan, n, &mut env);
        if status == RxStatus::More {
            while rig.filled(0) == RxStatus::More {}
        }
    }
    rig.qp.counters().rx_direct
}

#[test]
fn large_payload_is_read_directly() {
    for piece in [100, 5_000, 100_000] {
        for runs in [1, 2, 3, 16] {
            let (mut a, mut b) = pair(StreamConfig {
                crc: false,
                emss: 65483,
                ..STREAM
            });
            let src = a.mr(200_000, ALL);
            let (dst, buffer) = (b.mr(200_000, ALL), b.mr(200_000, ALL));
            let parts: Vec<_> = (0..4).map(|i| buffer.part(i * 50_000, 50_000)).collect();
            b.recv(1, &parts);
            let write = SendOp::Write {
                remote_addr: dst.at,
                rkey: dst.stag,
            };
            a.post(1, write, &[src.sge()]);
            a.post(2, SendOp::Send, &[src.sge()]);
            let octets = a.octets_out();
            let direct = read_as_planned(&mut b, &octets, piece, runs);
            assert_eq!(b.read(&dst), a.read(&src));
            assert_eq!(b.read(&buffer), a.read(&src));
            assert_eq!(brief(&b.host.recvs), [(1, WcStatus::Success)]);
            if runs > 1 {
                assert!(direct > 100_000, "{direct} octets of 400000");
            }
        }
    }
}

/// Returns how many octets the next plan has in memory, and in total.
fn planned(rig: &mut Rig, runs: usize) -> (usize, usize) {
    let mut plan = RxPlan::new(runs);
    let mut octets = 0;
    rig.qp
        .rx_plan(&mut rig.buffer, &rig.table, &mut plan, |run| {
            octets += run.fragment.len();
        });
    plan.release(&rig.table);
    assert_eq!(plan.room(), octets);
    (plan.direct(), plan.room())
}

/// In a plan, staging follows the registered memory. With too few runs for all the memory, staging
/// is left out, because the octets after the last run also belong into memory.
#[test]
fn staging_follows_memory() {
    let stream = StreamConfig {
        crc: false,
        ..STREAM
    };
    let mut rig = Rig::with(QpConfig::default(), stream);
    let mr = rig.mr(20_000, ALL);
    rig.recv(1, &[mr.part(0, 10_000), mr.part(10_000, 10_000)]);
    assert_eq!(planned(&mut rig, 4), (0, RX_READ_MAX));
    let fpdu = rig.fpdu(&send(1, &[0xaa; 20_000]));
    // The length field, the header, and 80 octets.
    read_as_planned(&mut rig, &fpdu[..100], 100, 4);
    for (runs, expected) in [
        (1, (0, RX_DIRECT_TAIL)),
        (2, (9_920, 9_920)),
        (3, (19_920, 19_920 + RX_DIRECT_TAIL)),
        (4, (19_920, 19_920 + RX_DIRECT_TAIL)),
    ] {
        assert_eq!(planned(&mut rig, runs), expected, "{runs} runs");
    }
    // The payload is complete.
    read_as_planned(&mut rig, &fpdu[100..20_020], 50_000, 4);
    assert_eq!(planned(&mut rig, 4), (0, RX_DIRECT_TAIL));
    assert!(brief(&rig.host.recvs).is_empty());
    read_as_planned(&mut rig, &fpdu[20_020..], 50_000, 4);
    assert_eq!(brief(&rig.host.recvs), [(1, WcStatus::Success)]);
    assert_eq!(rig.read(&mr), [0xaa; 20_000]);
}

/// After a large FPDU little is read to staging, so that the payload of the next large FPDU can be
/// read directly. A few small FPDUs restore long reads to staging.
#[test]
fn small_fpdus_restore_long_reads() {
    let (mut rig, _, large) = large_write();
    for _ in 0..2 {
        assert_eq!(planned(&mut rig, 4), (0, RX_READ_MAX));
        read_as_planned(&mut rig, &large, 3000, 4);
        let small = rig.fpdu(&tagged(Opcode::WRITE, 1, 0, true, &[]));
        let mut small_fpdus = 0;
        while planned(&mut rig, 4) == (0, RX_DIRECT_TAIL) {
            read_as_planned(&mut rig, &small, 3000, 4);
            small_fpdus += 1;
            assert!(small_fpdus < 10);
        }
        // One small FPDU is not enough, because it may be the end of the same message.
        assert!(small_fpdus > 1);
    }
}

/// The driver fails to write the planned memory.
#[test]
fn unwritable_direct_read_is_refused() {
    let code = iwarp_proto::rdmap::TerminateCode::DDP_TAGGED_BASE_BOUNDS;
    let local = iwarp_proto::rdmap::TerminateCode::RDMAP_LOCAL_CATASTROPHIC;
    for (is_write, code) in [(true, code), (false, local)] {
        let (mut a, mut b) = pair(StreamConfig {
            crc: false,
            emss: 65483,
            ..STREAM
        });
        let (src, dst) = (a.mr(60_000, ALL), b.mr(60_000, ALL));
        let op = match is_write {
            true => SendOp::Write {
                remote_addr: dst.at,
                rkey: dst.stag,
            },
            false => SendOp::Send,
        };
        b.recv(5, &[dst.sge()]);
        a.post(1, op, &[src.sge()]);
        let octets = a.octets_out();
        read_as_planned(&mut b, &octets[..10_000], 1000, 4);
        assert!(b.qp.rx_is_direct());
        b.qp.rx_unwritable(&mut b.host);
        assert_eq!(b.terminate().code, code);
        let status = match is_write {
            true => WcStatus::Flushed,
            false => WcStatus::LocalProtection,
        };
        assert_eq!(brief(&b.host.recvs), [(5, status)]);
    }
}

#[test]
fn deregistration_stops_direct_placement() {
    //= rfc5041 section 8.3.1
    //= type=test
    //# An RNIC MUST ensure that the network interface can no longer modify an
    //# Advertised Buffer after the ULP revokes remote access rights for an
    //# STag.
    //= rfc5040 section 8.1.1
    //= type=test
    //# An RNIC MUST ensure that the network interface can no longer modify an
    //# Advertised Buffer after the ULP revokes remote access rights for an
    //# STag.
    let (mut a, mut b) = pair(StreamConfig {
        crc: false,
        emss: 65483,
        ..STREAM
    });
    let src = a.mr(60_000, ALL);
    let dst = b.mr(60_000, ALL);
    let write = SendOp::Write {
        remote_addr: dst.at,
        rkey: dst.stag,
    };
    a.post(1, write, &[src.sge()]);
    let octets = a.octets_out();
    read_as_planned(&mut b, &octets[..10_000], 1000, 4);
    let before = b.read(&dst);
    b.table.deregister(Stag(dst.stag)).unwrap();
    read_as_planned(&mut b, &octets[10_000..11_000], 1000, 4);
    assert_eq!(b.read(&dst), before);
    let code = iwarp_proto::rdmap::TerminateCode::DDP_TAGGED_INVALID_STAG;
    b.assert_ended(Blame::Peer, code);
    assert_eq!(b.terminate().code, code);
}

/// Returns a Write of 20,000 octets in one FPDU without CRC, and its region.
fn large_write() -> (Rig, Mr, Vec<u8>) {
    let mut rig = Rig::with(
        QpConfig::default(),
        StreamConfig {
            crc: false,
            ..STREAM
        },
    );
    let mr = rig.mr(20_000, ALL);
    let write = tagged(Opcode::WRITE, mr.stag, mr.at, true, &[0xaa; 20_000]);
    let fpdu = rig.fpdu(&write);
    (rig, mr, fpdu)
}

#[test]
fn direct_write_delays_tail() {
    let (mut rig, mr, fpdu) = large_write();
    assert!(!rig.qp.rx_is_direct());
    // Everything but the last octet of the FPDU arrives.
    let received = fpdu.len() - 1;
    assert!(read_as_planned(&mut rig, &fpdu[..received], 3000, 4) > 10_000);
    assert!(rig.qp.rx_is_direct());
    let memory = rig.read(&mr);
    let (now, later) = memory.split_at(20_000 - crate::limits::WRITE_TAIL as usize);
    assert!(now.iter().all(|octet| *octet == 0xaa));
    assert!(!later.contains(&0xaa), "{later:?}");
    read_as_planned(&mut rig, &fpdu[received..], 1, 4);
    assert!(!rig.qp.rx_is_direct());
    assert_eq!(rig.read(&mr), [0xaa; 20_000]);
}

/// A direct read costs a look-up in the table, so it has to pay off.
#[test]
fn direct_read_needs_large_rest() {
    for (missing, direct) in [(8193, true), (8192, true), (8191, false)] {
        let (mut rig, mr, fpdu) = large_write();
        // The length field, the header, and part of the payload arrive.
        let received = 2 + 14 + 20_000 - missing;
        assert_eq!(rig.rx(&fpdu[..received]), RxStatus::Ok);
        assert_eq!(rig.qp.rx_is_direct(), direct, "{missing}");
        assert_eq!(rig.rx(&fpdu[received..]), RxStatus::Ok);
        assert!(!rig.qp.rx_is_direct());
        assert_eq!(rig.read(&mr), [0xaa; 20_000]);
    }
}

/// Programs poll the last octet of a Write, so the tail of its last segment is written separately.
/// Other segments are read to memory completely.
#[test]
fn only_write_tail_is_held_back() {
    for (last, directly) in [(true, 19_992), (false, 20_000)] {
        let (mut rig, mr, _) = large_write();
        let ulpdu = tagged(Opcode::WRITE, mr.stag, mr.at, last, &[0xaa; 20_000]);
        let fpdu = rig.fpdu(&ulpdu);
        assert_eq!(rig.rx(&fpdu[..16]), RxStatus::Ok);
        assert_eq!(read_as_planned(&mut rig, &fpdu[16..], 30_000, 4), directly);
        assert_eq!(rig.read(&mr), [0xaa; 20_000]);
    }
}

#[test]
fn deregistration_stops_direct_write() {
    // Deregister the region in the middle of the Write, or when only its tail is missing.
    for cut in [10_000, 20_010] {
        for octets_follow in [true, false] {
            let (mut rig, mr, fpdu) = large_write();
            read_as_planned(&mut rig, &fpdu[..cut], 1000, 4);
            assert!(rig.qp.rx_is_direct());
            let before = rig.read(&mr);
            rig.table.deregister(Stag(mr.stag)).unwrap();
            let mut plan = RxPlan::new(4);
            rig.qp
                .rx_plan(&mut rig.buffer, &rig.table, &mut plan, |_| {});
            // Deregistered memory must not be written.
            assert_eq!(plan.direct(), 0);
            if octets_follow || cut > 19_000 {
                read_as_planned(&mut rig, &fpdu[cut..], 1000, 4);
            } else {
                assert_eq!(rig.offer_again(), RxStatus::Failed);
            }
            let code = iwarp_proto::rdmap::TerminateCode::DDP_TAGGED_INVALID_STAG;
            rig.assert_ended(Blame::Peer, code);
            assert_eq!(rig.read(&mr), before);
        }
    }
}

#[test]
fn partial_writes_lose_nothing() {
    //= rfc5041 section 5.2
    //= type=test
    //# At the Data Sink, the DDP layer MUST Place the ULP Payload contained in
    //# all valid incoming DDP Segments associated with a DDP Message into the
    //# ULP Buffer.
    //= rfc5041 section 5.2
    //= type=test
    //# For each DDP Segment of a Untagged DDP Message, the MO MUST be set to
    //# the octet offset from the first octet in the associated ULP Message
    //# (which is defined to be zero) to the first octet in the ULP Payload
    //# contained in the DDP Segment.
    //= rfc5040 section 5.5
    //= type=test
    //# A Send or RDMA Write Message MUST NOT be considered Complete at the
    //# Local Peer (Data Source) until it has been successfully completed at the
    //# DDP layer.
    for most in [1, 3, 1000] {
        let (mut a, mut b) = pair(STREAM);
        let src = a.mr(5000, ALL);
        let dst = b.mr(5000, ALL);
        b.recv(1, &[dst.sge()]);
        a.post(1, SendOp::Send, &[src.sge()]);
        assert_eq!(a.fill(), TxFill::Ready);
        while !a.plan.is_done() {
            assert!(a.host.sends.is_empty(), "complete before it is written");
            assert!(a.qp.wants_tx());
            let octets = a.write_some(most);
            assert!(octets.len() <= most);
            let _ = b.rx(&octets);
        }
        assert_eq!(brief(&a.host.sends), [(1, WcStatus::Success)]);
        assert_eq!(b.read(&dst), a.read(&src));
    }
}
