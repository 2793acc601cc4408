//! Limits of a transmit plan, nearly full plans, and messages that continue in the next plan.

use super::harness::*;
use crate::memory::AccessError;
use crate::qp::*;
use crate::{Access, SendFlags, SendOp, SendWr, Sge, WcStatus};
use iwarp_proto::ddp::{Header, Stag};
use iwarp_proto::rdmap::{AtomicOp, AtomicRequest, Opcode};
use std::vec;
use std::vec::Vec;

/// Messages are one segment here unless a test says otherwise.
const LONG: StreamConfig = StreamConfig {
    emss: 65483,
    ..STREAM
};
const WRITE: SendOp = SendOp::Write {
    remote_addr: 0x1000,
    rkey: 7,
};
const READ: SendOp = SendOp::Read {
    remote_addr: 0x1000,
    rkey: 7,
};
const ADD: SendOp = SendOp::FetchAdd {
    remote_addr: 0x1000,
    rkey: 7,
    add: 1,
    mask: 0,
};

fn rig(stream: StreamConfig, sizes: TxSizes) -> Rig {
    let config = QpConfig {
        max_send_wr: 100,
        max_send_sge: 32,
        max_inline: 1024,
        ..QpConfig::default()
    };
    let mut rig = Rig::with(config, stream);
    rig.plan = TxPlan::with(sizes).unwrap();
    rig
}

fn inline(rig: &mut Rig, wr_id: u64, octets: &[u8]) {
    let wr = SendWr {
        wr_id,
        op: SendOp::Send,
        flags: SendFlags::INLINE | SendFlags::SIGNALED,
        sges: &[],
        inline: &[octets],
    };
    rig.qp.post_send(&wr, &mut rig.host).unwrap();
}

fn fill_and_count_fpdus(rig: &mut Rig) -> u64 {
    let before = rig.qp.counters().tx_fpdus;
    assert_eq!(rig.fill(), TxFill::Ready);
    rig.qp.counters().tx_fpdus - before
}

/// Returns the payload of everything sent, whose CRCs are checked.
fn payload(rig: &mut Rig) -> Vec<u8> {
    let sent = rig.sent();
    sent.into_iter().flat_map(|(_, payload)| payload).collect()
}

fn content(rig: &Rig, mr: &Mr, parts: &[Sge]) -> Vec<u8> {
    let memory = rig.read(mr);
    let part = |sge: &Sge| {
        let at = (sge.addr - mr.at) as usize;
        memory[at..at + sge.len as usize].to_vec()
    };
    parts.iter().flat_map(part).collect()
}

/// A message is planned if the plan has the scratch that its kind needs. Otherwise the complete
/// message goes into the next plan.
#[test]
fn scratch_limit_is_exact() {
    // 64 Sends of 2045 octets, which are 2072 with length field, header, pad and CRC.
    const BEFORE: u64 = 64;
    const USED: usize = 64 * 2072;
    // Element lengths, and the scratch: a copied FPDU with three octets of pad; or head, trailer,
    // and the space to which 4096 octets of payload at a time are copied for the CRC.
    let kinds: [(&[u32], usize); 4] = [
        (&[1], 28),
        (&[2, 3], 32),
        (&[5001], 27 + 4096),
        (&[2500, 2501], 27 + 4096),
    ];
    let kinds = kinds.map(|(lens, need)| [(lens, true, need), (lens, false, need)]);
    for (lens, crc, need) in kinds.into_iter().flatten() {
        for room in [0, 4].into_iter().chain(need - 10..need + 10) {
            let sizes = TxSizes {
                scratch: USED + room,
                ..TxSizes::DEFAULT
            };
            let mut rig = rig(StreamConfig { crc, ..LONG }, sizes);
            let mr = rig.mr(8192, ALL);
            let mut all = Vec::new();
            for wr_id in 0..BEFORE {
                let part = mr.part(wr_id as u32, 2045);
                rig.post(wr_id, SendOp::Send, &[part]);
                all.push(part);
            }
            let last: Vec<Sge> = lens.iter().map(|len| mr.part(100, *len)).collect();
            rig.post(BEFORE, SendOp::Send, &last);
            all.extend(&last);
            let fits = room >= need;
            let fpdus = fill_and_count_fpdus(&mut rig);
            assert_eq!(fpdus, BEFORE + u64::from(fits), "{lens:?} {crc} {room}");
            assert!(payload(&mut rig) == content(&rig, &mr, &all), "{lens:?}");
            assert_eq!(rig.host.sends.len() as u64, BEFORE + 1);
        }
    }
}

/// Inline data and protocol messages are planned completely, in this plan or in the next.
#[test]
fn nearly_full_plan_splits_no_message() {
    for kind in 0..3 {
        for room in 0..120 {
            let sizes = TxSizes {
                scratch: 64 * 2072 + room,
                ..TxSizes::DEFAULT
            };
            let mut rig = rig(LONG, sizes);
            let mr = rig.mr(2045, ALL);
            for wr_id in 0..64 {
                rig.post(wr_id, SendOp::Send, &[mr.sge()]);
            }
            // The FPDU's length, and the room with which it is always planned. Only for the first
            // kind are they equal.
            let (fpdu, enough) = match kind {
                0 => {
                    inline(&mut rig, 64, &[7]);
                    (28, 28)
                }
                1 => {
                    rig.post(64, READ, &[mr.part(0, 8)]);
                    (52, 91)
                }
                _ => {
                    rig.post(64, ADD, &[mr.part(0, 8)]);
                    (76, 91)
                }
            };
            let fpdus = fill_and_count_fpdus(&mut rig);
            assert!(fpdus == 64 || room >= fpdu, "{kind} {room}");
            assert!(fpdus == 65 || room < enough, "{kind} {room}");
            // Decoding checks that each FPDU is complete.
            assert_eq!(rig.sent().len(), 65);
        }
    }
}

#[test]
fn marked_fpdu_is_planned_completely() {
    const LEN: u32 = 60_032;
    let stream = StreamConfig {
        markers_tx: true,
        markers_rx: true,
        ..LONG
    };
    // While an FPDU is built, its ULPDU occupies scratch as well. Two FPDUs therefore need three
    // times their length.
    for (scratch, expected_fpdus) in [(178_000, Some(1)), (185_000, Some(2))]
        .into_iter()
        .chain((180_000..182_500).step_by(100).map(|room| (room, None)))
    {
        let sizes = TxSizes {
            scratch,
            ..TxSizes::DEFAULT
        };
        let mut rig = rig(stream, sizes);
        let mr = rig.mr(LEN, ALL);
        rig.post(0, SendOp::Send, &[mr.sge()]);
        rig.post(1, SendOp::Send, &[mr.sge()]);
        let fpdus = fill_and_count_fpdus(&mut rig);
        assert!(
            expected_fpdus.is_none_or(|n| n == fpdus),
            "{scratch}: {fpdus}"
        );
        let all = content(&rig, &mr, &[mr.sge(), mr.sge()]);
        assert!(payload(&mut rig) == all, "{scratch}");
    }
}

/// Small sizes are increased, so that a plan has room for an FPDU with the maximum number of
/// elements, none of them copied, and for the longest FPDU with markers.
#[test]
fn smallest_plan_has_room_for_any_fpdu() {
    const NONE: TxSizes = TxSizes {
        scratch: 0,
        bytes: 0,
        pieces: 0,
        messages: 0,
        cuts: 0,
        copy_max: 0,
    };
    for crc in [true, false] {
        let mut rig = rig(StreamConfig { crc, ..LONG }, NONE);
        let mr = rig.mr(32 * 100, ALL);
        let parts: Vec<_> = (0..32).map(|i| mr.part(i * 100, 99)).collect();
        rig.post(1, SendOp::Send, &parts);
        rig.post(2, WRITE, &parts);
        let all = [parts.clone(), parts].concat();
        assert!(payload(&mut rig) == content(&rig, &mr, &all));
    }
    let stream = StreamConfig {
        markers_tx: true,
        markers_rx: true,
        emss: 1 << 20,
        ..STREAM
    };
    let mut rig = rig(stream, NONE);
    let mr = rig.mr(200_000, ALL);
    rig.post(1, SendOp::Send, &[mr.sge()]);
    rig.qp.align(1 << 20);
    assert!(payload(&mut rig) == rig.read(&mr));
    assert_eq!(brief(&rig.host.sends), [(1, WcStatus::Success)]);
}

#[test]
fn plan_closes_at_limits() {
    // FPDUs of 32 octets.
    for (bytes, fpdus) in [(1, 1), (31, 1), (32, 1), (33, 2), (64, 2), (65, 3)] {
        let sizes = TxSizes {
            bytes,
            ..TxSizes::DEFAULT
        };
        let mut rig = rig(LONG, sizes);
        let mr = rig.mr(8, ALL);
        for wr_id in 0..5 {
            rig.post(wr_id, SendOp::Send, &[mr.sge()]);
        }
        assert_eq!(fill_and_count_fpdus(&mut rig), fpdus, "{bytes} octets");
    }
    // Each FPDU has two pieces: its payload, and the scratch between it and the previous payload.
    // An FPDU of 32 elements has 35 pieces: the elements, head, trailer, and the scratch before it.
    // The plan is full if fewer than 35 pieces are free.
    for (pieces, fpdus) in [(35, 1), (36, 1), (37, 2), (69, 18), (70, 18), (71, 19)] {
        let sizes = TxSizes {
            pieces,
            copy_max: 0,
            ..TxSizes::DEFAULT
        };
        let mut rig = rig(LONG, sizes);
        let mr = rig.mr(8, ALL);
        for wr_id in 0..40 {
            rig.post(wr_id, SendOp::Send, &[mr.sge()]);
        }
        assert_eq!(fill_and_count_fpdus(&mut rig), fpdus, "{pieces} pieces");
        assert_eq!(rig.sent().len(), 40);
    }
}

type Prepare = fn(&mut Rig, &Mr);

/// Messages of each kind, of several segments where possible.
const MESSAGES: [Prepare; 10] = [
    |rig, mr| rig.post(1, SendOp::Send, &[mr.part(0, 8)]),
    |rig, mr| rig.post(1, SendOp::SendImm(3), &[mr.sge()]),
    |rig, mr| {
        let op = SendOp::WriteImm {
            remote_addr: 0x1000,
            rkey: 7,
            imm: 3,
        };
        rig.post(1, op, &[mr.part(0, 3000), mr.part(7, 3000)]);
    },
    |rig, _| inline(rig, 1, &[5; 1024]),
    |rig, mr| rig.post(1, READ, &[mr.part(0, 8)]),
    |rig, mr| rig.post(1, ADD, &[mr.part(0, 8)]),
    |rig, mr| {
        let body = read_request(9, mr.len, mr.stag, mr.at);
        let ulpdu = untagged(Opcode::READ_REQUEST, 1, 1, 0, true, &body);
        assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
    },
    |rig, mr| {
        let body = AtomicRequest {
            op: AtomicOp::FETCH_ADD,
            request_id: 1,
            stag: Stag(mr.stag),
            to: mr.at,
            add_swap: 1,
            add_swap_mask: 0,
            compare: 0,
            compare_mask: 0,
        };
        let mut octets = vec![0; AtomicRequest::LEN];
        body.emit(&mut octets);
        let ulpdu = untagged(Opcode::ATOMIC_REQUEST, 1, 1, 0, true, &octets);
        assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
    },
    // A probe after a Send, in a plan of its own.
    |rig, _| {
        rig.qp.complete_when_placed();
        rig.post(1, SendOp::Send, &[]);
    },
    // A note before a Send.
    |rig, _| {
        rig.qp.complete_when_placed();
        rig.qp.set_by_number();
        rig.qp.set_rnr_retry(3);
        rig.post(1, SendOp::Send, &[]);
    },
];

/// A plan of one octet is closed by each FPDU; the result is the same as with a large plan.
#[test]
fn one_octet_plan_holds_one_fpdu() {
    for (i, prepare) in MESSAGES.into_iter().enumerate() {
        for (emss, copy_max, crc) in [
            (536, 2048, true),
            (1460, 0, true),
            (1460, 0, false),
            (9000, 2048, true),
        ] {
            let stream = StreamConfig {
                emss,
                crc,
                ..STREAM
            };
            let sizes = |bytes| TxSizes {
                bytes,
                copy_max,
                ..TxSizes::DEFAULT
            };
            let mut large_plan = rig(stream, sizes(TxSizes::DEFAULT.bytes));
            let mr = large_plan.mr(6000, ALL);
            let mut small_plan = rig(stream, sizes(1));
            let same = small_plan.mr(6000, ALL);
            prepare(&mut large_plan, &mr);
            prepare(&mut small_plan, &same);
            // Another message is queued after the tested one.
            large_plan.post(2, SendOp::Send, &[]);
            small_plan.post(2, SendOp::Send, &[]);
            let mut segments = Vec::new();
            while small_plan.qp.wants_tx() {
                assert_eq!(fill_and_count_fpdus(&mut small_plan), 1, "{i} {emss}");
                segments.extend(small_plan.write_plan());
            }
            assert!(segments.len() > 1, "{i} {emss}");
            assert_eq!(segments, large_plan.sent(), "{i} {emss}");
        }
    }
}

#[test]
fn bad_element_prevents_message() {
    for op in [SendOp::Send, WRITE] {
        // One segment, a bit more, several; the good element is longer or shorter than a segment.
        for (good, bad) in [(100, 100), (1000, 600), (3000, 3000), (2000, 1), (1, 5000)] {
            let mut rig = rig(STREAM, TxSizes::DEFAULT);
            let mr = rig.mr(6000, Access::LOCAL_WRITE);
            let mut foreign = mr.part(0, bad);
            foreign.lkey ^= 1;
            rig.post(1, op, &[mr.part(0, good), foreign]);
            let opcodes: Vec<_> = rig.sent().iter().map(|(h, _)| h.opcode()).collect();
            assert_eq!(opcodes, [Opcode::TERMINATE], "{good} {bad}");
            assert_eq!(brief(&rig.host.sends), [(1, WcStatus::LocalProtection)]);
        }
    }
}

#[test]
fn sent_elements_may_be_deregistered() {
    let sizes = TxSizes {
        bytes: 1,
        ..TxSizes::DEFAULT
    };
    let mut rig = rig(STREAM, sizes);
    let (first, second) = (rig.mr(1000, ALL), rig.mr(6000, ALL));
    let expected = [rig.read(&first), rig.read(&second)].concat();
    rig.post(1, SendOp::Send, &[first.sge(), second.sge()]);
    assert_eq!(fill_and_count_fpdus(&mut rig), 1);
    let mut sent = rig.write_plan();
    assert!(sent[0].1.len() > 1000);
    rig.table.deregister(Stag(first.stag)).unwrap();
    sent.extend(rig.sent());
    let octets: Vec<u8> = sent.into_iter().flat_map(|(_, payload)| payload).collect();
    assert!(octets == expected);
    assert_eq!(brief(&rig.host.sends), [(1, WcStatus::Success)]);
}

/// For streams that are not sockets: only the requested octets are copied and checked.
#[test]
fn octets_before_missing_region_are_copied() {
    let mut rig = rig(LONG, TxSizes::DEFAULT);
    let mr = rig.mr(5000, ALL);
    rig.post(1, WRITE, &[mr.sge()]);
    assert_eq!(rig.fill(), TxFill::Ready);
    let accessor = rig.qp.accessor();
    let mut before = vec![0; 16];
    rig.plan.copy_to(&rig.table, accessor, &mut before).unwrap();
    rig.table.deregister(Stag(mr.stag)).unwrap();
    // The length field and the header, before the payload.
    for len in [0, 1, 15, 16] {
        let mut out = vec![0xee; len];
        assert_eq!(rig.plan.copy_to(&rig.table, accessor, &mut out), Ok(len));
        assert_eq!(out, before[..len]);
    }
    let copied = rig.plan.copy_to(&rig.table, accessor, &mut [0; 17]);
    assert_eq!(copied, Err(AccessError::InvalidStag));
    let header = Header::parse(&before[2..]).unwrap();
    assert_eq!(header.opcode(), Opcode::WRITE);
}
