//! Comparisons of 32-bit numbers that wrap, which happens within hours on a busy connection.

use super::blamed::receive_terminate_about;
use super::harness::*;
use crate::qp::*;
use crate::{Access, SendOp, WcStatus};
use iwarp_proto::rdmap::Opcode;
use std::vec::Vec;

/// The number of messages or requests before the first one of a test.
const BEFORE: [u32; 6] = [
    0,
    u32::MAX - 4,
    u32::MAX - 3,
    u32::MAX - 2,
    u32::MAX - 1,
    u32::MAX,
];

fn set_up_by_number(rig: &mut Rig) {
    rig.qp.complete_when_placed();
    rig.qp.set_by_number();
}

fn completed(rig: &Rig) -> Vec<u64> {
    let sends = rig.host.sends.iter();
    let good = sends.filter(|cqe| cqe.status == WcStatus::Success);
    good.map(|cqe| cqe.wr_id).collect()
}

#[test]
fn farewell_counts_across_wrap() {
    for before in BEFORE {
        for arrived in 1..=4u64 {
            let (mut a, mut b) = pair(STREAM);
            set_up_by_number(&mut a);
            set_up_by_number(&mut b);
            // This many Writes were sent, received and completed.
            a.qp.acknowledge.sent = before;
            a.qp.acknowledge.cover_sent();
            b.qp.rx.writes = before;
            let (mr, target) = (a.mr(8, Access::LOCAL_WRITE), b.mr(8, ALL));
            let write = SendOp::Write {
                remote_addr: target.at,
                rkey: target.stag,
            };
            for wr_id in [1, 2] {
                b.recv(wr_id, &[]);
                a.post(2 * wr_id - 1, write, &[mr.sge()]);
                a.post(2 * wr_id, SendOp::Send, &[]);
            }
            for (header, payload) in &a.sent()[..arrived as usize] {
                assert_eq!(b.rx_ulpdu(&with_payload(header, payload)), RxStatus::Ok);
            }
            let sent_farewell = b.qp.say_farewell(false);
            // Zero means that nothing was received, so no farewell is needed.
            assert_eq!(sent_farewell, before.wrapping_add(arrived as u32) != 0);
            b.qp.close(&mut b.host);
            let octets = b.octets_out();
            let _ = a.rx(&octets);
            let expected: Vec<u64> = (1..=arrived).filter(|_| sent_farewell).collect();
            assert_eq!(completed(&a), expected, "{arrived} after {before}");
        }
    }
}

#[test]
fn held_message_is_found_across_wrap() {
    for before in BEFORE {
        let (mut a, mut b) = pair(STREAM);
        set_up_by_number(&mut a);
        set_up_by_number(&mut b);
        let first = before.wrapping_add(1);
        (a.qp.tx.msn[0], b.qp.rx.msn[0]) = (first, first);
        // Earlier messages were also held, the last of them recently.
        let held = u64::from(u32::from_be_bytes(*b"held")) << 32;
        for msn in [1 << 30, 2 << 30, 3 << 30, u32::MAX - 9] {
            if before != 0 {
                let note = tagged(Opcode::WRITE, 1, held | u64::from(msn), true, &[]);
                assert_eq!(a.rx_ulpdu(&note), RxStatus::Ok);
            }
        }
        for wr_id in 1..=4 {
            a.post(wr_id, SendOp::Send, &[]);
        }
        for wr_id in 1..=4 {
            // The preceding message completes, although no probe was answered.
            shuttle(&mut a, &mut b, 9999);
            let complete: Vec<u64> = (1..wr_id).collect();
            assert_eq!(completed(&a), complete, "after {before}");
            b.recv(wr_id, &[]);
            let status = b.offer_again();
            assert_eq!(status == RxStatus::Held, wr_id < 4);
        }
        shuttle(&mut a, &mut b, 9999);
        assert_eq!(completed(&a), [1, 2, 3, 4]);
    }
}

/// Requests 1 to 4 are a Send, a Read and two Sends. The peer refuses the last: it has processed
/// the earlier ones, and has not answered the Read.
#[test]
fn requests_are_distinguished_across_wrap() {
    for before in BEFORE {
        let mut rig = Rig::fresh(QpConfig::default());
        rig.qp.sq.begin_at(before);
        rig.start(STREAM);
        rig.qp.complete_when_placed();
        let mr = rig.mr(8, ALL);
        let read = SendOp::Read {
            remote_addr: 0,
            rkey: 7,
        };
        rig.post(1, SendOp::Send, &[]);
        rig.post(2, read, &[mr.sge()]);
        rig.post(3, SendOp::Send, &[]);
        rig.post(4, SendOp::Send, &[]);
        let _ = rig.sent();
        receive_terminate_about(&mut rig, Opcode::SEND, 3);
        let expected = [
            (1, WcStatus::Success),
            (2, WcStatus::Flushed),
            (3, WcStatus::Flushed),
            (4, WcStatus::RemoteInvalidRequest),
        ];
        assert_eq!(brief(&rig.host.sends), expected, "after {before}");
    }
}
