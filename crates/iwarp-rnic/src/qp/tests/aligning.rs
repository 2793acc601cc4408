//! Alignment of FPDUs and TCP segments (RFC 5044 section 5.1).

use super::harness::*;
use crate::qp::*;
use crate::{Access, SendOp};
use iwarp_proto::rdmap::Opcode;
use std::boxed::Box;
use std::vec::Vec;

/// Splits octets into segments like TCP: whenever a segment is full, and at the end of a record
/// (`MSG_EOR`).
#[derive(Default)]
struct Segments {
    done: Vec<Vec<u8>>,
    open: Vec<u8>,
}

impl Segments {
    const LEN: usize = 1460;

    fn write(&mut self, octets: &[u8], end: bool) {
        for &octet in octets {
            self.open.push(octet);
            if self.open.len() == Self::LEN {
                self.done.push(std::mem::take(&mut self.open));
            }
        }
        if end && !self.open.is_empty() {
            self.done.push(std::mem::take(&mut self.open));
        }
    }

    fn assert_aligned(&self) {
        assert!(self.open.is_empty(), "nothing may follow in this segment");
        for segment in &self.done {
            let mut rest = &segment[..];
            while let [high, low, ..] = rest {
                let ulpdu = usize::from(u16::from_be_bytes([*high, *low]));
                let fpdu = iwarp_proto::mpa::framing::fpdu_len(ulpdu);
                assert!(
                    fpdu <= rest.len(),
                    "an FPDU of {fpdu} in {} octets",
                    rest.len()
                );
                rest = &rest[fpdu..];
            }
            assert!(rest.is_empty());
        }
    }
}

const WRITE: SendOp = SendOp::Write {
    remote_addr: 0,
    rkey: 7,
};

/// Writes all that is due, at most `most` octets at a time. Returns the number of calls.
fn write_aligned(rig: &mut Rig, segments: &mut Segments, most: usize) -> usize {
    let mut calls = 0;
    while rig.qp.wants_tx() {
        assert_eq!(rig.fill(), TxFill::Ready);
        while !rig.plan.is_done() {
            assert!(rig.plan.ends_segment());
            let (together, n) = (rig.plan.together(), rig.plan.together().min(most));
            assert!(together > 0 && together <= rig.plan.remaining());
            let octets = rig.write_some(n);
            // Only a call that writes everything ends the record.
            segments.write(&octets, n == together);
            calls += 1;
        }
        assert!(!rig.plan.ends_segment() && rig.plan.together() == 0);
    }
    calls
}

/// Returns a plan that copies up to this much payload next to its header.
fn plan_that_copies(copy_max: u32) -> Box<TxPlan> {
    let sizes = TxSizes {
        copy_max,
        ..TxSizes::DEFAULT
    };
    TxPlan::with(sizes).unwrap()
}

#[test]
fn segments_begin_with_fpdus() {
    //= rfc5044 section 5.1
    //= type=test
    //# MPA transmitters SHOULD also use whatever facilities the TCP stack
    //# presents to cause the TCP transmitter to start TCP segments at FPDU
    //# boundaries.  Multiple FPDUs MAY be packed into a single TCP segment
    //# as determined by the EMSS calculation as long as they are entirely
    //# contained in the TCP segment.
    let config = QpConfig {
        max_send_wr: 128,
        ..QpConfig::default()
    };
    let copied = TxSizes::DEFAULT.copy_max;
    // With `copy_max` 0, payload stays in registered memory, so that an FPDU has several pieces.
    let kinds = [usize::MAX, 2920, 1460, 999, 1].map(|most| (most, copied));
    for (most, copy_max) in kinds.into_iter().chain([(usize::MAX, 0), (999, 0)]) {
        let mut rig = Rig::with(config, STREAM);
        rig.plan = plan_that_copies(copy_max);
        rig.qp.align(1460);
        let mr = rig.mr(600_000, Access::LOCAL_WRITE);
        let mut segments = Segments::default();
        // The messages need more than one plan. They include messages with a remainder, exact fits,
        // and many small messages per segment.
        rig.post(0, WRITE, &[mr.part(0, 600_000)]);
        for (wr_id, len) in [6000, 6000, 1440, 1440, 1441, 0, 1436, 3]
            .into_iter()
            .enumerate()
        {
            rig.post(wr_id as u64, WRITE, &[mr.part(0, len)]);
        }
        for wr_id in 10..90 {
            rig.post(wr_id, SendOp::Send, &[mr.part(0, 40)]);
        }
        let calls = write_aligned(&mut rig, &mut segments, most);
        segments.assert_aligned();
        // Later messages start a new segment.
        rig.post(99, SendOp::Send, &[mr.part(0, 100)]);
        write_aligned(&mut rig, &mut segments, most);
        segments.assert_aligned();
        assert_eq!(rig.host.sends.len(), 90);
        if most == usize::MAX {
            // Full segments need no separate calls, and small messages share one.
            assert!(calls < 20, "{calls} calls");
            let full = segments.done.iter().filter(|s| s.len() == 1460).count();
            assert!(full > 415, "{full} full segments");
        }
    }
}

/// A driver whose stream is no socket may write beyond segment boundaries ([`TxPlan::all_runs`]).
/// The rest is still split at the same boundaries.
#[test]
fn segment_ends_do_not_depend_on_writes() {
    for copy_max in [TxSizes::DEFAULT.copy_max, 0] {
        check_segment_ends(copy_max);
    }
}

fn check_segment_ends(copy_max: u32) {
    let plan = || {
        let mut rig = Rig::new();
        rig.plan = plan_that_copies(copy_max);
        rig.qp.align(1460);
        let mr = rig.mr(2000, Access::LOCAL_WRITE);
        for (wr_id, len) in (0..).zip([1000, 1000, 500, 1400, 200, 1000]) {
            rig.post(wr_id, WRITE, &[mr.part(0, len)]);
        }
        assert_eq!(rig.fill(), TxFill::Ready);
        rig
    };
    let mut rig = plan();
    let mut ends = Vec::new();
    while !rig.plan.is_done() {
        let n = rig.plan.together();
        rig.write_some(n);
        ends.push(ends.last().map_or(n, |end| end + n));
    }
    assert!(ends.len() >= 4, "{ends:?}");
    let all = *ends.last().unwrap();
    for at in 1..all {
        let mut rig = plan();
        rig.write_some(at);
        let next = ends.iter().find(|end| **end > at).unwrap();
        assert_eq!(rig.plan.together(), next - at, "after {at} of {all}");
    }
}

#[test]
fn segment_size_may_change() {
    for markers in [false, true] {
        for emss in [536, 1024, 1460, 9000] {
            let lens = |changed: bool| {
                let stream = StreamConfig {
                    markers_tx: markers,
                    markers_rx: markers,
                    emss: if changed { 4000 } else { emss },
                    ..STREAM
                };
                let mut rig = Rig::with(QpConfig::default(), stream);
                if changed {
                    rig.qp.set_emss(emss);
                }
                let mr = rig.mr(30_000, Access::LOCAL_WRITE);
                rig.post(1, WRITE, &[mr.sge()]);
                let sent = rig.sent();
                sent.iter().map(|(_, p)| p.len()).collect::<Vec<_>>()
            };
            assert_eq!(lens(true), lens(false), "{markers} {emss}");
        }
    }
}

/// An FPDU that refers to its payload has several runs. A write that must end before the last of
/// them must not include an empty run (`compare_runs` of the harness).
#[test]
fn early_write_end_has_no_empty_run() {
    let stream = StreamConfig {
        emss: 9000,
        ..STREAM
    };
    let mut rig = Rig::with(QpConfig::default(), stream);
    rig.qp.align(9000);
    let mr = rig.mr(6000, Access::LOCAL_WRITE);
    for wr_id in 0..3 {
        rig.post(wr_id, WRITE, &[mr.sge()]);
    }
    assert_eq!(rig.fill(), TxFill::Ready);
    // Two FPDUs do not fit into one segment.
    let mut calls = 0;
    while !rig.plan.is_done() {
        let together = rig.plan.together();
        assert!(together > 6000 && together < 9000);
        assert_eq!(rig.write_some(together).len(), together);
        calls += 1;
    }
    assert_eq!((calls, rig.host.sends.len()), (3, 3));
}

#[test]
fn segment_length_is_rounded_down() {
    // 1462 is not a multiple of four: FPDUs have at most 1460 octets.
    let stream = StreamConfig {
        emss: 1462,
        ..STREAM
    };
    let mut rig = Rig::with(QpConfig::default(), stream);
    rig.qp.align(1462);
    let mr = rig.mr(20_000, Access::LOCAL_WRITE);
    rig.post(0, WRITE, &[mr.sge()]);
    assert_eq!(rig.fill(), TxFill::Ready);
    let mut pieces = Vec::new();
    while !rig.plan.is_done() {
        pieces.push(rig.plan.together());
        rig.write_some(rig.plan.together());
    }
    assert_eq!(pieces[..13], [1460; 13]);
    assert_eq!(pieces.len(), 14);
}

#[test]
fn unaligned_plan_is_one_write() {
    for aligned in [None, Some(100)] {
        let mut rig = Rig::new();
        if let Some(segment) = aligned {
            // FPDUs are larger than the segment, so nothing is aligned.
            rig.qp.align(segment);
        }
        let mr = rig.mr(6000, Access::LOCAL_WRITE);
        for wr_id in 0..3 {
            rig.post(wr_id, WRITE, &[mr.sge()]);
        }
        assert_eq!(rig.fill(), TxFill::Ready);
        assert_eq!(rig.plan.together(), rig.plan.len());
        assert!(!rig.plan.ends_segment());
    }
}

/// Loopback segments have room for more than the maximum ULPDU.
#[test]
fn ulpdu_length_is_limited() {
    //= rfc5044 section 3
    //= type=test
    //# The sending DDP MUST NOT post a ULPDU larger than 64768 octets to
    //# MPA.
    const LEN: u32 = 200_000;
    const MOST: usize = 64768;
    for (emss, markers) in [
        (65483, false),
        (65483, true),
        (1 << 20, false),
        (1 << 20, true),
    ] {
        let stream = StreamConfig {
            emss,
            markers_tx: markers,
            markers_rx: markers,
            ..STREAM
        };
        let mut rig = Rig::with(QpConfig::default(), stream);
        let mr = rig.mr(LEN, Access::REMOTE_READ);
        let write = SendOp::Write {
            remote_addr: 0,
            rkey: 7,
        };
        rig.post(1, SendOp::Send, &[mr.part(0, LEN)]);
        rig.post(2, write, &[mr.part(0, LEN)]);
        let request = read_request(5, LEN, mr.stag, mr.at);
        let request = untagged(Opcode::READ_REQUEST, 1, 1, 0, true, &request);
        assert_eq!(rig.rx_ulpdu(&request), RxStatus::Ok);
        let sent = rig.sent();
        let longest = |opcode| {
            let matching = sent.iter().filter(|(h, _)| h.opcode() == opcode);
            matching.map(|(h, payload)| h.len() + payload.len()).max()
        };
        for opcode in [Opcode::SEND, Opcode::WRITE, Opcode::READ_RESPONSE] {
            let longest = longest(opcode).unwrap();
            assert!(longest <= MOST, "{opcode:?} {longest}, {emss}");
            assert!(longest > MOST - 8, "{opcode:?} {longest}, {emss}");
        }
    }
}

#[test]
fn exact_fit_needs_no_cut() {
    let mut rig = Rig::new();
    rig.qp.align(1460);
    let mr = rig.mr(1000, Access::LOCAL_WRITE);
    // FPDUs of 728 and 732 octets, twice, and one that begins a segment.
    for (wr_id, len) in [708, 712, 712, 708, 100].into_iter().enumerate() {
        rig.post(wr_id as u64, WRITE, &[mr.part(0, len)]);
    }
    assert_eq!(rig.fill(), TxFill::Ready);
    assert_eq!(rig.plan.together(), rig.plan.len());
    assert_eq!(rig.plan.len(), 2 * 1460 + 120);
}
