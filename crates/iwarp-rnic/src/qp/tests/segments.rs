//! Segments of one message: their common fields, and their processing by the receiver (RFC 5040
//! §4.1 and §4.2, RFC 5041 §4, §5 and §7.1, RFC 7306 §5).

use super::harness::*;
use super::refused::assert_refused;
use crate::qp::*;
use crate::{SendFlags, SendOp, Sge, WcFlags, WcStatus};
use iwarp_proto::ddp::{Header, Stag, UntaggedHeader};
use iwarp_proto::rdmap::{AtomicOp, AtomicRequest, Opcode, ReadRequest, Terminate, TerminateCode};
use std::vec;
use std::vec::Vec;

/// EMSS 536: a ULPDU has at most 530 octets.
const SMALL: StreamConfig = StreamConfig {
    emss: 536,
    ..STREAM
};
const MULPDU: usize = 530;

fn message(sent: &[(Header, Vec<u8>)]) -> &[(Header, Vec<u8>)] {
    let last = sent.iter().position(|(header, _)| header.last()).unwrap();
    &sent[..=last]
}

/// Checks that the segments carry `len` octets in order from offset `start`, with the fields of the
/// first segment.
#[track_caller]
fn assert_one_message(segments: &[(Header, Vec<u8>)], len: usize, start: u64) {
    let mut off = 0;
    for (header, payload) in segments {
        assert!(header.len() + payload.len() <= MULPDU);
        let at = match (*header, segments[0].0) {
            (Header::Tagged(h), Header::Tagged(first)) => {
                assert_eq!((h.opcode, h.stag), (first.opcode, first.stag));
                h.to
            }
            (Header::Untagged(h), Header::Untagged(first)) => {
                assert_eq!(
                    (h.opcode, h.invalidate_stag, h.qn, h.msn),
                    (first.opcode, first.invalidate_stag, first.qn, first.msn)
                );
                u64::from(h.mo)
            }
            pair => panic!("tagged and untagged segments in one message: {pair:?}"),
        };
        assert_eq!(at, start + off as u64);
        off += payload.len();
        // Only the segment with the highest offset is the last one.
        assert_eq!(header.last(), off == len);
    }
    assert_eq!(off, len);
}

#[test]
fn segments_share_fields() {
    //= rfc5040 section 5.3
    //= type=test
    //# A Send with Invalidate or Send with Solicited Event and Invalidate Message
    //# MUST reference an STag.
    //= rfc5040 section 5.3
    //= type=test
    //# That is, the Local Peer's RDMAP layer MUST pass the RDMA control field and
    //# the STag that will be Invalidated to the DDP layer.
    //= rfc5041 section 4.3
    //= type=test
    //# The MO referencing the first octet of the DDP Message MUST be set to zero by
    //# the DDP layer.
    //= rfc5041 section 4.1
    //= type=test
    //# For an Untagged DDP Message, the DDP Segment with the L bit set to 1 MUST
    //# carry the highest MO.
    //= rfc5041 section 4.2
    //= type=test
    //# At the Data Source, DDP MUST set RsvdULP Field to the value specified by the
    //# ULP.
    //= rfc5041 section 4.2
    //= type=test
    //# Each DDP Segment within a specific DDP Message MUST contain the same value
    //# for this field.
    //= rfc5041 section 4.2
    //= type=test
    //# The Data Source MUST ensure that each DDP Segment within a specific DDP
    //# Message contains the same value for this field.
    //= rfc5041 section 4.2
    //= type=test
    //# Each DDP Segment within a specific DDP Message MUST contain the same value
    //# for this field and MUST be the value supplied by the ULP.
    //= rfc5041 section 4.3
    //= type=test
    //# At the Data Source, DDP MUST set RsvdULP Field to the value specified by the
    //# ULP.
    //= rfc5041 section 4.3
    //= type=test
    //# Each DDP Segment within a specific DDP Message MUST contain the same value
    //# for the RsvdULP field.
    //= rfc5041 section 4.3
    //= type=test
    //# Each DDP segment within a specific DDP message MUST contain the same value
    //# for this field and MUST be the value supplied by the ULP at the Data Source.
    //= rfc5041 section 4.3
    //= type=test
    //# The Data Source MUST ensure that each DDP Segment within a specific DDP
    //# Message contains the same value for this field.
    //= rfc5041 section 4.3
    //= type=test
    //# Each DDP segment within a specific DDP message MUST contain the same value
    //# for this field.
    //= rfc5040 section 5.1
    //= type=test
    //# * If the Local Peer wishes to write to multiple Tagged Buffers on the Remote
    //# Peer, the Local Peer MUST use multiple RDMA Write Messages.
    //= rfc5041 section 5.2
    //= type=test
    //# The ULP at the Data Source MUST specify the STag and the initial TO when the
    //# ULP Message is handed to DDP.
    let mut rig = Rig::with(QpConfig::default(), SMALL);
    let mr = rig.mr(2000, ALL);
    let write = SendOp::Write {
        remote_addr: 1000,
        rkey: 0x0102_0304,
    };
    rig.post(1, write, &[mr.sge()]);
    rig.post(2, SendOp::SendInv(0xabcd_ef12), &[mr.sge()]);
    let flags = SendFlags::SIGNALED | SendFlags::SOLICITED;
    rig.post_flags(3, SendOp::Send, flags, &[mr.sge()]);
    let sent = rig.sent();
    let mut rest = &sent[..];
    let mut fields = Vec::new();
    for start in [1000, 0, 0] {
        let segments = message(rest);
        assert_eq!(segments.len(), 4);
        assert_one_message(segments, 2000, start);
        fields.push(match segments[0].0 {
            Header::Tagged(h) => (h.opcode, h.stag, 0, 0),
            Header::Untagged(h) => (h.opcode, h.invalidate_stag, h.qn, h.msn),
        });
        rest = &rest[segments.len()..];
    }
    assert!(rest.is_empty());
    assert_eq!(
        fields,
        [
            (Opcode::WRITE, Stag(0x0102_0304), 0, 0),
            (Opcode::SEND_INV, Stag(0xabcd_ef12), 0, 1),
            (Opcode::SEND_SE, Stag(0), 0, 2),
        ]
    );
}

#[test]
fn response_segments_use_requested_sink() {
    //= rfc5040 section 4.4
    //= type=test
    //# This field MUST be copied, without interpretation, from the RDMA Read
    //# Request into the corresponding RDMA Read Response; this field allows the
    //# Data Sink to place the returning data.
    //= rfc5040 section 5.2.2
    //= type=test
    //# * A single RDMA Read Response Message MUST write to one remote Tagged
    //# Buffer.
    //= rfc5040 section 5.2.1
    //= type=test
    //# That is, a single RDMA Read Request Message MUST only read from one remote
    //# Tagged Buffer.
    let mut rig = Rig::with(QpConfig::default(), SMALL);
    let mr = rig.mr(2000, ALL);
    // Any value is valid as sink: 0, one that looks like our own STag, one that wraps.
    for (msn, sink_stag, sink_to) in [(1, 0, 0), (2, mr.stag, mr.at), (3, u32::MAX, 1 << 63)] {
        let mut body = vec![0; ReadRequest::LEN];
        ReadRequest {
            sink_stag: Stag(sink_stag),
            sink_to,
            size: 2000,
            source_stag: Stag(mr.stag),
            source_to: mr.at,
        }
        .emit(&mut body);
        let ulpdu = untagged(Opcode::READ_REQUEST, 1, msn, 0, true, &body);
        assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
        let sent = rig.sent();
        assert_eq!(message(&sent).len(), sent.len());
        assert_one_message(&sent, 2000, sink_to);
        let (Header::Tagged(h), _) = sent[0] else {
            panic!("a Read Response is tagged");
        };
        assert_eq!((h.opcode, h.stag), (Opcode::READ_RESPONSE, Stag(sink_stag)));
        let octets: Vec<u8> = sent.into_iter().flat_map(|(_, octets)| octets).collect();
        assert_eq!(octets, rig.read(&mr));
    }
}

/// The Invalidate STag field of messages that invalidate nothing is ignored on receipt and sent as
/// zero.
#[test]
fn unused_invalidate_stag_is_ignored() {
    //= rfc5040 section 4.1
    //= type=test
    //# For Send, Send with Solicited Event, RDMA Read Request, and Terminate, the
    //# Invalidate STag field MUST be set to zero on transmit and ignored by the
    //# receiver.
    let mut rig = Rig::new();
    let mr = rig.mr(8, ALL);
    for id in 1..=2 {
        rig.recv(id, &[mr.sge()]);
    }
    let with_stag = |opcode, qn, msn, payload: &[u8]| {
        let header = UntaggedHeader {
            last: true,
            opcode,
            invalidate_stag: Stag(mr.stag),
            qn,
            msn,
            mo: 0,
        };
        with_payload(&Header::Untagged(header), payload)
    };
    assert_eq!(
        rig.rx_ulpdu(&with_stag(Opcode::SEND, 0, 1, b"a")),
        RxStatus::Ok
    );
    assert_eq!(
        rig.rx_ulpdu(&with_stag(Opcode::SEND_SE, 0, 2, b"b")),
        RxStatus::Ok
    );
    let body = read_request(5, 8, mr.stag, mr.at);
    assert_eq!(
        rig.rx_ulpdu(&with_stag(Opcode::READ_REQUEST, 1, 1, &body)),
        RxStatus::Ok
    );
    assert_eq!(rig.sent().len(), 1);
    assert_eq!(
        (rig.host.recvs[0].flags, rig.host.recvs[1].flags),
        (WcFlags::empty(), WcFlags::SOLICITED)
    );
    assert!(rig.table.info(Stag(mr.stag)).unwrap().valid);
    let read = SendOp::Read {
        remote_addr: 0,
        rkey: 7,
    };
    rig.post(1, read, &[mr.sge()]);
    rig.post(2, SendOp::Send, &[]);
    rig.post_flags(3, SendOp::Send, SendFlags::SOLICITED, &[]);
    let mut sent = rig.sent();
    assert_eq!(
        rig.rx_ulpdu(&with_stag(Opcode::SEND, 0, 9, &[])),
        RxStatus::Failed
    );
    sent.extend(rig.sent());
    let fields: Vec<_> = sent
        .iter()
        .map(|(header, _)| match header {
            Header::Untagged(h) => (h.opcode, h.invalidate_stag),
            Header::Tagged(h) => panic!("{h:?}"),
        })
        .collect();
    use Opcode as O;
    assert_eq!(
        fields,
        [O::READ_REQUEST, O::SEND, O::SEND_SE, O::TERMINATE].map(|opcode| (opcode, Stag(0)))
    );
    // This also applies to a received Terminate.
    let mut rig = Rig::new();
    let mut body = vec![0; Terminate::MAX_LEN];
    let len = Terminate::new(TerminateCode::MPA_CRC).emit(&mut body);
    let _ = rig.rx_ulpdu(&with_stag(O::TERMINATE, 2, 1, &body[..len]));
    rig.assert_ended(Blame::PeerTerminated, TerminateCode::MPA_CRC);
}

#[test]
fn message_sequence_numbers_wrap_to_zero() {
    //= rfc5041 section 4.3
    //= type=test
    //# The MSN value MUST wrap to 0 after a value of 0xFFFFFFFF.
    let mut rig = Rig::new();
    rig.qp.tx.msn = [u32::MAX; 4];
    rig.qp.rx.msn = [u32::MAX; 4];
    for id in 0..2 {
        rig.post(id, SendOp::Send, &[]);
        rig.recv(id, &[]);
    }
    let msns: Vec<_> = rig
        .sent()
        .iter()
        .map(|(header, _)| match header {
            Header::Untagged(h) => h.msn,
            Header::Tagged(h) => panic!("{h:?}"),
        })
        .collect();
    assert_eq!(msns, [u32::MAX, 0]);
    assert_eq!(rig.rx_ulpdu(&send(u32::MAX, &[])), RxStatus::Ok);
    assert_eq!(rig.rx_ulpdu(&send(0, &[])), RxStatus::Ok);
    assert_eq!(rig.host.recvs.len(), 2);
}

#[test]
fn new_mulpdu_keeps_planned_fpdus() {
    //= rfc5041 section 3
    //= type=test
    //# 2. In the event of a MULPDU change, DDP MUST NOT be required by the LLP to
    //# re-segment DDP Segments that have been previously posted to the LLP.
    let mut rig = Rig::new();
    let mr = rig.mr(3000, ALL);
    rig.post(1, SendOp::Send, &[mr.sge()]);
    rig.post(2, SendOp::Send, &[mr.sge()]);
    assert_eq!(rig.fill(), TxFill::Ready);
    // The path MTU changes before anything is written: the plan keeps its FPDUs of 1460 octets.
    let planned = rig.plan.len();
    rig.qp.set_emss(536);
    let octets = rig.octets_out();
    assert!(octets.len() >= planned);
    assert_eq!(octets[..2], 1454u16.to_be_bytes());
    rig.post(3, SendOp::Send, &[mr.sge()]);
    let sent = rig.sent();
    assert_one_message(message(&sent), 3000, 0);
    assert_eq!(brief(&rig.host.sends).len(), 3);
}

#[test]
fn data_after_error_is_dropped() {
    //= rfc5041 section 7.1
    //= type=test
    //# DDP MUST silently drop any subsequent incoming DDP Segments.
    let mut rig = Rig::new();
    let mr = rig.mr(8, ALL);
    rig.recv(1, &[mr.sge()]);
    // Further segments follow: in the same read as the refused segment, and later.
    let mut octets = rig.fpdu(&send(3, b"a"));
    octets.extend(rig.fpdu(&tagged(Opcode::WRITE, mr.stag, mr.at, true, &[9; 8])));
    octets.extend(rig.fpdu(&send(1, b"b")));
    assert_eq!(rig.rx(&octets), RxStatus::Failed);
    let later = rig.fpdu(&tagged(Opcode::WRITE, mr.stag, mr.at, true, &[9; 8]));
    assert_eq!(rig.rx(&later), RxStatus::Failed);
    let wrong = rig.fpdu(&send(7, b"c"));
    assert_eq!(rig.rx(&wrong), RxStatus::Failed);
    assert_eq!(rig.read(&mr), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(brief(&rig.host.recvs), [(1, WcStatus::Flushed)]);
    let sent = rig.sent();
    assert_eq!(sent.len(), 1, "one Terminate: {sent:?}");
    //= rfc5040 section 5.4
    //= type=test
    //# * One Terminate Message MUST consume one Untagged Buffer.
    let Header::Untagged(h) = sent[0].0 else {
        panic!("a Terminate is untagged");
    };
    assert_eq!((h.qn, h.msn, h.mo, h.last), (2, 1, 0, true));
    let terminate = Terminate::parse(&sent[0].1).unwrap().0;
    assert!(matches!(terminate.ddp_header, Some(Header::Untagged(h)) if h.msn == 3));
}

fn fetch_add(msn: u32, mr: &Mr) -> Vec<u8> {
    let mut body = vec![0; AtomicRequest::LEN];
    AtomicRequest {
        op: AtomicOp::FETCH_ADD,
        request_id: msn,
        stag: Stag(mr.stag),
        to: mr.at,
        add_swap: 1,
        add_swap_mask: 0,
        compare: 0,
        compare_mask: 0,
    }
    .emit(&mut body);
    untagged(Opcode::ATOMIC_REQUEST, 1, msn, 0, true, &body)
}

#[test]
fn peer_reads_and_atomics_share_ird() {
    //= rfc7306 section 5.2.2
    //= type=test
    //# 4. The Responder MUST ensure that a sufficient number of Untagged Buffers
    //# are available on the RDMA Read Request Queue (Queue with DDP Queue Number 1)
    //# to support the maximum number of Atomic Operation Requests negotiated by the
    //# ULP in addition to the maximum number of RDMA Read Requests negotiated by
    //# the ULP.
    for ird in 1..=4 {
        for kinds in 0..1 << (ird + 1) {
            let mut rig = Rig::with(QpConfig::default(), StreamConfig { ird, ..STREAM });
            let mr = rig.mr(8, ALL);
            let request = |msn: u32| {
                if kinds >> (msn - 1) & 1 == 0 {
                    fetch_add(msn, &mr)
                } else {
                    let body = read_request(5, 8, mr.stag, mr.at);
                    untagged(Opcode::READ_REQUEST, 1, msn, 0, true, &body)
                }
            };
            let ird = u32::from(ird);
            for msn in 1..=ird {
                assert_eq!(rig.rx_ulpdu(&request(msn)), RxStatus::Ok);
            }
            let before = rig.read(&mr);
            let code = TerminateCode::DDP_UNTAGGED_NO_BUFFER;
            assert_refused(&mut rig, &request(ird + 1), code);
            assert_eq!(rig.read(&mr), before);
        }
    }
}

#[test]
fn local_reads_and_atomics_share_ord() {
    //= rfc5040 section 5.2.1
    //= type=test
    //# * If the Local Peer wishes to read from multiple Tagged Buffers on the
    //# Remote Peer, the Local Peer MUST use multiple RDMA Read Request Messages.
    let mut rig = Rig::with(QpConfig::default(), StreamConfig { ord: 2, ..STREAM });
    let mr = rig.mr(8, ALL);
    let read = SendOp::Read {
        remote_addr: 0,
        rkey: 7,
    };
    let atomic = SendOp::FetchAdd {
        remote_addr: 0,
        rkey: 7,
        add: 1,
        mask: 0,
    };
    for (id, op) in [(1, atomic), (2, read), (3, atomic), (4, read)] {
        rig.post(id, op, &[mr.sge()]);
    }
    let opcodes = |rig: &mut Rig| -> Vec<Opcode> {
        rig.sent()
            .iter()
            .map(|(header, _)| header.opcode())
            .collect()
    };
    use Opcode as O;
    let sent = rig.sent();
    let first: Vec<_> = sent.iter().map(|(header, _)| header.opcode()).collect();
    assert_eq!(first, [O::ATOMIC_REQUEST, O::READ_REQUEST]);
    let request = AtomicRequest::parse(&sent[0].1).unwrap();
    let mut body = vec![0; 12];
    iwarp_proto::rdmap::AtomicResponse {
        request_id: request.request_id,
        original: 1,
    }
    .emit(&mut body);
    let answer = untagged(O::ATOMIC_RESPONSE, 3, 1, 0, true, &body);
    assert_eq!(rig.rx_ulpdu(&answer), RxStatus::Ok);
    assert_eq!(opcodes(&mut rig), [O::ATOMIC_REQUEST]);
    let sink = ReadRequest::parse(&sent[1].1).unwrap().sink_stag.0;
    let answer = tagged(O::READ_RESPONSE, sink, 0, true, &[5; 8]);
    assert_eq!(rig.rx_ulpdu(&answer), RxStatus::Ok);
    assert_eq!(opcodes(&mut rig), [O::READ_REQUEST]);
}

/// A request is executed when its complete message has arrived, after everything sent before it.
#[test]
fn requests_wait_for_delivery() {
    //= rfc5040 section 5.5
    //= type=test
    //# 12. RDMA Read Request Messages, including zero-length RDMA Read Requests,
    //# MUST NOT start processing at the Remote Peer until they have been Delivered
    //# to RDMAP by DDP.
    //= rfc5040 section 5.5
    //= type=test
    //# 17. RDMA Read Response Message processing at the Remote Peer (reading the
    //# specified Tagged Buffer) MUST be started only after the RDMA Read Request
    //# Message has been Delivered by the DDP layer (thus, all previous RDMA
    //# Messages have been properly submitted for ordered Placement).
    //= rfc7306 section 5.4
    //= type=test
    //# 3. Atomic Operation Request Messages MUST NOT start processing at the
    //# Responder until they have been Delivered to RDMAP by DDP.
    //= rfc7306 section 5.4
    //= type=test
    //# 5. Atomic Operation Response Message processing at the Responder MUST be
    //# started only after the Atomic Operation Request Message has been Delivered
    //# by the DDP layer (thus, all previous RDMA Messages on that DDP Stream have
    //# been Delivered).
    let mut rig = Rig::new();
    let mr = rig.mr(8, ALL);
    let mut octets = rig.fpdu(&tagged(
        Opcode::WRITE,
        mr.stag,
        mr.at,
        true,
        &40u64.to_ne_bytes(),
    ));
    octets.extend(rig.fpdu(&fetch_add(1, &mr)));
    let (last, before) = octets.split_last().unwrap();
    assert_eq!(rig.rx(before), RxStatus::Ok);
    assert_eq!(rig.read(&mr), 40u64.to_ne_bytes());
    assert!(rig.sent().is_empty());
    assert_eq!(rig.rx(&[*last]), RxStatus::Ok);
    assert_eq!(rig.read(&mr), 41u64.to_ne_bytes());
    let sent = rig.sent();
    assert_eq!(sent[0].1[4..], 40u64.to_be_bytes());
    let written = 42u64.to_ne_bytes();
    let mut octets = rig.fpdu(&tagged(Opcode::WRITE, mr.stag, mr.at, true, &written));
    let body = read_request(5, 8, mr.stag, mr.at);
    octets.extend(rig.fpdu(&untagged(Opcode::READ_REQUEST, 1, 2, 0, true, &body)));
    let (last, before) = octets.split_last().unwrap();
    assert_eq!(rig.rx(before), RxStatus::Ok);
    assert!(rig.sent().is_empty());
    assert_eq!(rig.rx(&[*last]), RxStatus::Ok);
    let sent = rig.sent();
    assert_eq!(sent[0].0.opcode(), Opcode::READ_RESPONSE);
    assert_eq!(sent[0].1, written);
}

#[test]
fn unsendable_message_ends_stream() {
    //= rfc7306 section 8.1
    //= type=test
    //# The Local Peer MUST send a Terminate Message for each of the following
    //# cases:
    let atomic = SendOp::CmpSwap {
        remote_addr: 0,
        rkey: 7,
        compare: 0,
        swap: 1,
        compare_mask: 0,
        swap_mask: 0,
    };
    let with_imm = SendOp::WriteImm {
        remote_addr: 0,
        rkey: 7,
        imm: 5,
    };
    for op in [atomic, with_imm, SendOp::SendImm(5)] {
        let mut rig = Rig::new();
        let mut sge = rig.mr(8, ALL).sge();
        sge.lkey ^= 1;
        rig.post(1, op, &[sge]);
        let terminate = rig.terminate();
        assert_eq!(terminate.code, TerminateCode::RDMAP_LOCAL_CATASTROPHIC);
        assert_eq!((terminate.ddp_header, terminate.read_request), (None, None));
        assert_eq!(brief(&rig.host.sends), [(1, WcStatus::LocalProtection)]);
    }
}

/// RFC 5044 section 3 limits what is sent, not what is received: siw and others send ULPDUs up to
/// the limit of the length field.
#[test]
fn longer_ulpdus_are_accepted() {
    for (crc, markers, len) in [
        (true, false, 65535),
        (false, false, 65535),
        // The test's codec cannot build longer FPDUs with markers.
        (true, true, 65000),
    ] {
        let stream = StreamConfig {
            crc,
            markers_tx: markers,
            markers_rx: markers,
            ..STREAM
        };
        let payload: Vec<u8> = (0..len - 14u32).map(|i| (i * 7) as u8).collect();
        for piece in [1000, 70_000] {
            let mut rig = Rig::with(QpConfig::default(), stream);
            let mr = rig.mr(len - 14, ALL);
            let fpdu = rig.fpdu(&tagged(Opcode::WRITE, mr.stag, mr.at, true, &payload));
            for octets in fpdu.chunks(piece) {
                assert_eq!(rig.rx(octets), RxStatus::Ok);
            }
            assert!(rig.read(&mr) == payload, "crc {crc}, markers {markers}");
        }
    }
}

/// Some peers check the STag of an empty Write, and zero is never valid.
#[test]
fn empty_write_has_nonzero_stag() {
    for (rkey, len, want) in [(0, 0, 1), (0, 4, 0), (7, 0, 7), (7, 4, 7)] {
        let mut rig = Rig::new();
        let mr = rig.mr(4, ALL);
        let write = SendOp::Write {
            remote_addr: 0,
            rkey,
        };
        rig.post(1, write, &[mr.part(0, len)]);
        let Header::Tagged(h) = rig.sent()[0].0 else {
            panic!("a Write is tagged");
        };
        assert_eq!(h.stag, Stag(want), "key {rkey}, {len} octets");
    }
}

/// A message that fails because of its memory occupies no stream position, so the markers in the
/// Terminate that replaces it are at the right positions.
#[test]
fn failed_message_moves_no_marker() {
    let stream = StreamConfig {
        markers_tx: true,
        markers_rx: true,
        ..STREAM
    };
    for before in [0, 100, 400, 460] {
        for len in [1, 100, 300, 450, 512, 1000] {
            let mut rig = Rig::with(QpConfig::default(), stream);
            let mr = rig.mr(1000, ALL);
            rig.post(1, SendOp::Send, &[mr.part(0, before)]);
            assert_eq!(rig.sent().len(), 1);
            let wrong = Sge {
                lkey: mr.stag ^ 1,
                ..mr.part(0, len)
            };
            rig.post(2, SendOp::Send, &[wrong]);
            rig.terminate();
            let done = [(1, WcStatus::Success), (2, WcStatus::LocalProtection)];
            assert_eq!(brief(&rig.host.sends), done, "{before} {len}");
        }
    }
}
