//! Octets in the driver's memory, and how much of them one call processes.

use super::harness::*;
use super::stream::read_as_planned;
use crate::qp::*;
use crate::{SendOp, Time, WcStatus};
use core::cell::Cell;
use iwarp_proto::crc32c;
use iwarp_proto::mpa::framing::CRC_LEN;
use iwarp_proto::rdmap::Opcode;
use proptest::prelude::*;
use std::vec;
use std::vec::Vec;

const MARKED: StreamConfig = StreamConfig {
    markers_tx: true,
    markers_rx: true,
    ..STREAM
};

const STREAMS: [StreamConfig; 4] = [
    STREAM,
    StreamConfig {
        crc: false,
        ..STREAM
    },
    MARKED,
    StreamConfig {
        crc: false,
        ..MARKED
    },
];

fn sends(rig: &mut Rig, payloads: &[&[u8]]) -> Vec<Vec<u8>> {
    let ulpdus = (1..).zip(payloads).map(|(msn, p)| send(msn, p));
    ulpdus.map(|ulpdu| rig.fpdu(&ulpdu)).collect()
}

#[test]
fn complete_fpdus_are_processed_in_place() {
    for stream in STREAMS {
        let mut rig = Rig::with(QpConfig::default(), stream);
        let mr = rig.mr(400, ALL);
        for i in 0..4 {
            rig.recv(u64::from(i), &[mr.part(i * 100, 100)]);
        }
        let fpdus = sends(&mut rig, &[&[1; 90], &[2; 90], &[3; 90], &[4; 90]]);
        assert_eq!(rig.rx(&fpdus[..2].concat()), RxStatus::Ok);
        assert_eq!(rig.host.recvs.len(), 2);
        assert!(rig.buffer.is_empty() && rig.buffer.is_untouched());
        // The third FPDU arrives in parts. The first part ends inside the length field.
        for cut in [1, 50] {
            let (begins, ends) = fpdus[2].split_at(cut);
            if cut == 1 {
                assert_eq!(rig.rx(begins), RxStatus::Ok);
                assert_eq!(rig.buffer.len(), 1);
                continue;
            }
            assert_eq!(rig.rx(&begins[1..]), RxStatus::Ok);
            assert_eq!((rig.buffer.len(), rig.host.recvs.len()), (cut, 2));
            // The FPDU after it is not copied to the buffer.
            let rest = [ends, &fpdus[3]].concat();
            assert_eq!(rig.rx(&rest), RxStatus::Ok);
        }
        assert!(rig.buffer.is_empty());
        let all: Vec<_> = (0..4).map(|i| (i, WcStatus::Success)).collect();
        assert_eq!(brief(&rig.host.recvs), all);
        let memory = rig.read(&mr);
        for (i, part) in (1..).zip(memory.chunks(100)) {
            assert_eq!(part[..90], [i; 90]);
        }
        let sum: usize = fpdus.iter().map(Vec::len).sum();
        assert_eq!(rig.qp.counters().rx_bytes, sum as u64);
    }
}

#[test]
fn held_send_stays_with_caller() {
    for stream in STREAMS {
        let mut rig = Rig::with(QpConfig::default(), stream);
        let mr = rig.mr(64, ALL);
        rig.recv(1, &[mr.sge()]);
        let fpdus = sends(&mut rig, &[&[1; 8], &[2; 8], &[3; 8]]);
        let later_fpdus = fpdus[1..].concat();
        assert_eq!(rig.rx(&fpdus.concat()), RxStatus::Held);
        assert!(rig.offered == later_fpdus && rig.buffer.is_empty());
        assert_eq!(rig.offer_again(), RxStatus::Held);
        rig.recv(2, &[mr.sge()]);
        assert_eq!(rig.offer_again(), RxStatus::Held);
        assert!(rig.offered == fpdus[2] && rig.buffer.is_untouched());
        rig.recv(3, &[mr.sge()]);
        assert_eq!(rig.offer_again(), RxStatus::Ok);
        assert_eq!(rig.host.recvs.len(), 3);
        assert_eq!(rig.qp.counters().receiver_not_ready, 2);
        // A held Send that arrived in two parts stays in the buffer until it is processed.
        let held = rig.fpdu(&send(4, &[4; 8]));
        assert_eq!(rig.rx(&held[..10]), RxStatus::Ok);
        assert_eq!(rig.rx(&held[10..]), RxStatus::Held);
        assert!(rig.offered.is_empty() && rig.buffer.len() == held.len());
        rig.recv(4, &[mr.sge()]);
        assert_eq!(rig.offer_again(), RxStatus::Ok);
        assert!(rig.buffer.is_empty() && rig.host.recvs.len() == 4);
    }
}

#[test]
fn send_stays_held_until_passed_again() {
    let mut rig = Rig::new();
    let held = rig.fpdu(&send(1, &[1; 8]));
    assert_eq!(rig.rx(&held), RxStatus::Held);
    let due = |rig: &mut Rig| {
        rig.qp.on_time(Time::from_nanos(5), &mut rig.host);
        rig.qp.poll_at()
    };
    let until = due(&mut rig);
    let octets = core::mem::take(&mut rig.offered);
    assert_eq!(rig.filled(0), RxStatus::Held);
    assert_eq!(rig.offer_again(), RxStatus::Held);
    assert_eq!(rig.qp.rx_interest(), RxInterest::Held);
    rig.qp.on_time(Time::from_nanos(9), &mut rig.host);
    assert_eq!(rig.qp.poll_at(), until, "the deadline does not change");
    let mr = rig.mr(8, ALL);
    rig.recv(1, &[mr.sge()]);
    assert_eq!(rig.rx(&octets), RxStatus::Ok);
    assert_eq!(rig.host.recvs.len(), 1);
}

#[test]
fn failed_stream_keeps_nothing() {
    let mut rig = Rig::new();
    let mut fpdu = rig.fpdu(&send(1, &[1; 8]));
    *fpdu.last_mut().unwrap() ^= 1;
    let more = [&fpdu[..], &[0; 100]].concat();
    assert_eq!(rig.rx(&more[..20]), RxStatus::Ok);
    assert_eq!(rig.rx(&more[20..]), RxStatus::Failed);
    assert!(rig.offered.is_empty() && rig.buffer.is_empty());
    assert_eq!(rig.rx(&[0; 100]), RxStatus::Failed);
    assert!(rig.offered.is_empty() && rig.buffer.is_empty());
}

/// How octets reach the receiver.
#[derive(Debug, Clone, Copy)]
enum Input {
    Planned,
    Passed,
}

/// Sends Send and Write messages of these lengths alternately, and receives the octets in these
/// pieces. Returns all observable state.
fn receive_in_pieces(
    input: Input,
    stream: StreamConfig,
    lens: &[u32],
    pieces: &[usize],
    budget: u32,
) -> (Vec<(u64, WcStatus)>, Vec<u8>, Counters, State) {
    let (mut a, mut b) = pair(stream);
    b.qp.config.budget.fpdus = budget;
    b.buffer = RxBuffer::with(RxSizes {
        staging: 0,
        read_max: 0,
    })
    .unwrap();
    let (src, dst) = (a.mr(60_000, ALL), b.mr(60_000, ALL));
    for (i, len) in (0..).zip(lens) {
        let write = SendOp::Write {
            remote_addr: dst.at + 7 * i,
            rkey: dst.stag,
        };
        let op = if i % 2 == 0 { SendOp::Send } else { write };
        b.recv(i, &[dst.part(100, 50), dst.part(300, 40_000)]);
        a.post(i, op, &[src.part(i as u32, *len)]);
    }
    let octets = a.octets_out();
    let mut rest = &octets[..];
    for piece in pieces.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (now, later) = rest.split_at((*piece).min(rest.len()));
        rest = later;
        match input {
            Input::Planned => {
                read_as_planned(&mut b, now, usize::MAX, 4);
            }
            Input::Passed => {
                let _ = b.rx(now);
            }
        }
    }
    let mut counters = *b.qp.counters();
    // Only planned reads place payload directly.
    counters.rx_direct = 0;
    (brief(&b.host.recvs), b.read(&dst), counters, b.qp.state())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn input_equals_planned_reads(
        stream in 0usize..4,
        lens in proptest::collection::vec(
            prop_oneof![0u32..100, 1000u32..3000, 20_000u32..30_000],
            1..9,
        ),
        pieces in proptest::collection::vec(
            prop_oneof![1usize..100, 100usize..2000, 2000usize..70_000],
            1..9,
        ),
        emss in prop_oneof![Just(300u32), Just(1460), Just(65483)],
        budget in prop_oneof![Just(1u32), Just(3), Just(u32::MAX)],
    ) {
        let stream = StreamConfig { emss, ..STREAMS[stream] };
        let planned = receive_in_pieces(Input::Planned, stream, &lens, &pieces, u32::MAX);
        let passed = receive_in_pieces(Input::Passed, stream, &lens, &pieces, budget);
        prop_assert_eq!(&passed, &planned);
        prop_assert_eq!(passed.0.len(), lens.len().div_ceil(2));
        prop_assert_eq!(receive_in_pieces(Input::Planned, stream, &lens, &pieces, budget), planned);
    }
}

#[test]
fn fpdu_budget_is_enforced() {
    for stream in STREAMS {
        for staged in [false, true] {
            let (most, count) = (5, 23);
            let mut config = QpConfig::default();
            config.budget.fpdus = most as u32;
            let mut rig = Rig::with(config, stream);
            let mr = rig.mr(8, ALL);
            for i in 0..count {
                rig.recv(i, &[mr.sge()]);
            }
            let all: Vec<&[u8]> = vec![&[7; 8]; count as usize];
            rig.offered = sends(&mut rig, &all).concat();
            if staged {
                let octets = core::mem::take(&mut rig.offered);
                let n = rig.buffer.keep(&octets);
                assert_eq!(n, octets.len());
            }
            let mut calls = 0;
            loop {
                let before = rig.host.recvs.len() as u64;
                let status = if staged {
                    rig.filled(0)
                } else {
                    rig.input(crc32c::append)
                };
                calls += 1;
                assert_eq!(rig.host.recvs.len() as u64, (before + most).min(count));
                if status != RxStatus::More {
                    assert_eq!(status, RxStatus::Ok);
                    break;
                }
                // The stream is intact and continues.
                assert_eq!(rig.qp.rx_interest(), RxInterest::Read);
            }
            assert_eq!(calls, 5);
            assert!(rig.buffer.is_empty() && rig.offered.is_empty());
        }
    }
}

#[test]
fn exact_budget_has_no_more() {
    let mut config = QpConfig::default();
    config.budget.fpdus = 0;
    let mut rig = Rig::with(config, STREAM);
    // A budget of zero is treated as one.
    let mr = rig.mr(8, ALL);
    rig.recv(1, &[mr.sge()]);
    rig.offered = sends(&mut rig, &[&[7; 8]]).concat();
    assert_eq!(rig.input(crc32c::append), RxStatus::Ok);
}

#[test]
fn responses_are_sent_between_calls() {
    let mut config = QpConfig::default();
    config.budget.fpdus = 2;
    let mut rig = Rig::with(config, STREAM);
    let mr = rig.mr(64, ALL);
    for msn in 1..=8 {
        let body = read_request(msn, 8, mr.stag, mr.at);
        let fpdu = rig.fpdu(&untagged(Opcode::READ_REQUEST, 1, msn, 0, true, &body));
        rig.offered.extend(fpdu);
    }
    // Eight at once would exceed the IRD of the stream.
    for _ in 0..4 {
        let _ = rig.input(crc32c::append);
        assert_eq!(rig.sent().len(), 2);
    }
    assert_eq!(rig.qp.state(), State::Rts);
}

std::thread_local! {
    static SUMMED: Cell<usize> = const { Cell::new(0) };
}

fn counting(crc: u32, octets: &[u8]) -> u32 {
    SUMMED.set(SUMMED.get() + octets.len());
    crc32c::append(crc, octets)
}

#[test]
fn received_octets_are_summed_once() {
    for stream in [STREAM, MARKED] {
        for cut in [0, 1, 60, 1500] {
            let mut rig = Rig::with(QpConfig::default(), stream);
            let mr = rig.mr(4000, ALL);
            rig.recv(1, &[mr.part(0, 10), mr.part(20, 100)]);
            rig.recv(2, &[mr.sge()]);
            // A Send into two elements, and one of three segments.
            let mut ulpdus = vec![send(1, &[1; 100])];
            for (i, last) in [(0, false), (1, false), (2, true)] {
                ulpdus.push(untagged(Opcode::SEND, 0, 2, i * 900, last, &[2; 900]));
            }
            ulpdus.push(tagged(Opcode::WRITE, mr.stag, mr.at, true, &[3; 70]));
            let fpdus: Vec<_> = ulpdus.iter().map(|ulpdu| rig.fpdu(ulpdu)).collect();
            let covered: usize = fpdus.iter().map(|fpdu| fpdu.len() - CRC_LEN).sum();
            SUMMED.set(0);
            let octets = fpdus.concat();
            for part in [&octets[..cut], &octets[cut..]] {
                rig.offered.extend(part);
                assert_eq!(rig.input(counting), RxStatus::Ok);
            }
            assert_eq!(SUMMED.get(), covered);
            assert_eq!(rig.host.recvs.len(), 2);
        }
    }
}

/// Markers keep their positions, even if an FPDU is passed several times.
#[test]
fn held_send_keeps_marker_positions() {
    let stream = StreamConfig {
        markers_tx: true,
        markers_rx: true,
        ..STREAM
    };
    let mut rig = Rig::with(QpConfig::default(), stream);
    let mr = rig.mr(1000, ALL);
    for msn in 1..4 {
        assert_eq!(rig.rx_ulpdu(&send(msn, &[7; 1000])), RxStatus::Held);
        assert_eq!(rig.offer_again(), RxStatus::Held);
        rig.recv(u64::from(msn), &[mr.sge()]);
        assert_eq!(rig.offer_again(), RxStatus::Ok);
    }
    let all = [1, 2, 3].map(|id| (id, WcStatus::Success));
    assert_eq!(brief(&rig.host.recvs), all);
}
