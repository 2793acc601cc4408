//! Posting at the limits of a queue, and while it is flushed or drained.

use super::harness::*;
use crate::qp::*;
use crate::{PostError, SendFlags, SendOp, SendWr, Sge, WcStatus};
use iwarp_proto::ddp::{Header, Stag, TaggedHeader};
use iwarp_proto::rdmap::{Opcode, Terminate, TerminateCode};
use std::vec::Vec;

fn config_with_depth(depth: u32) -> QpConfig {
    QpConfig {
        max_send_wr: depth,
        budget: Budget {
            completions: 1,
            ..Budget::DEFAULT
        },
        ..QpConfig::default()
    }
}

fn write(to: u64) -> SendOp {
    SendOp::Write {
        remote_addr: to,
        rkey: 7,
    }
}

/// Each queued request has its own inline data, up to the size of the queue pair.
#[test]
fn inline_data_are_separate() {
    let mut rig = Rig::with(config_with_depth(3), STREAM);
    let max = rig.qp.config().max_inline as usize;
    for round in 0..3u8 {
        let octets: Vec<_> = (0..3u8)
            .map(|i| [round * 3 + i].repeat(max - usize::from(i)))
            .collect();
        for (wr_id, octets) in (0..).zip(&octets) {
            let wr = SendWr {
                wr_id,
                op: SendOp::Send,
                flags: SendFlags::INLINE,
                sges: &[],
                inline: &[octets],
            };
            rig.qp.post_send(&wr, &mut rig.host).unwrap();
        }
        let sent: Vec<_> = rig.sent().into_iter().map(|(_, octets)| octets).collect();
        assert_eq!(sent, octets);
    }
}

#[test]
fn longest_message_is_two_gigabytes() {
    //= rfc5041 section 5.2
    //= type=test
    //# The ULP Message Length MUST be less than 2^32.
    let rig = Rig::new();
    let element = |len| Sge {
        addr: 0,
        len,
        lkey: 1,
    };
    const MOST: u32 = 1 << 31;
    let cases: [(&[u32], bool); 6] = [
        (&[MOST], true),
        (&[MOST + 1], false),
        (&[MOST / 2, MOST / 2], true),
        (&[MOST, 0, 0], true),
        (&[MOST, 0, 1], false),
        // The sum needs more than 32 bits.
        (&[u32::MAX, 1, 8], false),
    ];
    for (lens, fits) in cases {
        let sges: Vec<_> = lens.iter().map(|len| element(*len)).collect();
        let wr = SendWr::new(1, SendOp::Send, &sges);
        let expected = match fits {
            true => Ok(()),
            false => Err((0, PostError::MessageTooLong)),
        };
        assert_eq!(rig.qp.check_sends([wr].iter()), expected, "{lens:?}");
    }
}

/// A queue that is being flushed accepts requests when it is full, even during the search for the
/// request that the peer refused.
#[test]
fn flushing_queue_accepts_requests() {
    let mut rig = Rig::with(config_with_depth(3), STREAM);
    rig.qp.complete_when_placed();
    let mr = rig.mr(8, ALL);
    for i in 0..3 {
        rig.post(i, write(i * 8), &[mr.sge()]);
    }
    let _ = rig.sent();
    let header = Header::Tagged(TaggedHeader {
        last: true,
        opcode: Opcode::WRITE,
        stag: Stag(7),
        to: 8,
    });
    let terminate = Terminate::about(TerminateCode::RDMAP_ACCESS, 22, header, None);
    let mut body = [0; crate::limits::CONTROL_MAX];
    let n = terminate.emit(&mut body);
    let _ = rig.rx_ulpdu(&untagged(Opcode::TERMINATE, 2, 1, 0, true, &body[..n]));
    // The first of the three was examined; the peer has refused another one.
    assert!(rig.host.sends.is_empty() && rig.qp.sends_outstanding() == 3);
    for i in 3..6 {
        rig.post(i, SendOp::Send, &[mr.sge()]);
    }
    while rig.qp.completions_due() {
        let _ = rig.qp.complete_due(&mut rig.host);
    }
    use WcStatus::{Flushed, RemoteAccess, Success};
    assert_eq!(
        brief(&rig.host.sends),
        [
            (0, Success),
            (1, RemoteAccess),
            (2, Flushed),
            (3, Flushed),
            (4, Flushed),
            (5, Flushed)
        ]
    );
}

/// Requests queued in SQD wait until the program returns to RTS.
#[test]
fn sqd_queue_fills_up() {
    for with_stream in [true, false] {
        let mut rig = Rig::fresh(config_with_depth(2));
        if with_stream {
            rig.start(STREAM);
        } else {
            for to in [State::Init, State::Rtr, State::Rts] {
                rig.qp.modify(to, &mut rig.host).unwrap();
            }
        }
        rig.qp.modify(State::Sqd, &mut rig.host).unwrap();
        rig.post(1, SendOp::Send, &[]);
        rig.post(2, SendOp::Send, &[]);
        for _ in 0..2 {
            let full = rig.try_post(3, SendOp::Send, SendFlags::SIGNALED, &[]);
            assert_eq!(full, Err(PostError::QueueFull));
        }
        assert_eq!((rig.qp.state(), rig.qp.sends_waiting()), (State::Sqd, 2));
        assert_eq!(brief(&rig.host.sends), []);
        if with_stream {
            rig.qp.modify(State::Rts, &mut rig.host).unwrap();
            assert_eq!(rig.sent().len(), 2);
        }
    }
}
