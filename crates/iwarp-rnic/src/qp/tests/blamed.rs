//! Which requests fail and which succeed if the peer refuses one of several requests
//! (`acknowledge`, RFC 5040 §4.8).

use super::harness::*;
use crate::qp::fault::status_of;
use crate::qp::*;
use crate::{Cqe, SendFlags, SendOp, WcStatus};
use iwarp_proto::ddp::{Header, Stag, TaggedHeader, UntaggedHeader};
use iwarp_proto::rdmap::{Opcode, Terminate, TerminateCode};
use proptest::prelude::*;
use std::collections::VecDeque;
use std::vec;
use std::vec::Vec;

const OTHER: StreamConfig = StreamConfig {
    initiator: false,
    ..STREAM
};

fn acknowledged_rig(stream: StreamConfig) -> Rig {
    let mut rig = Rig::fresh(QpConfig::default());
    rig.qp.complete_when_placed();
    rig.start(stream);
    rig
}

/// The configuration of a queue pair that does not hold Sends.
fn terminate_policy() -> QpConfig {
    QpConfig {
        receiver_not_ready: ReceiverNotReady::Terminate,
        ..QpConfig::default()
    }
}

#[test]
fn refused_write_fails_alone() {
    let (mut a, mut b) = (
        acknowledged_rig(STREAM),
        Rig::with(QpConfig::default(), OTHER),
    );
    let (from, to) = (a.mr(64, ALL), b.mr(24, ALL));
    for (id, off, len) in [(1, 0, 16), (2, 16, 16)] {
        let write = SendOp::Write {
            remote_addr: to.at + off,
            rkey: to.stag,
        };
        a.post(id, write, &[from.part(0, len)]);
    }
    shuttle(&mut a, &mut b, 1000);
    assert_eq!(
        brief(&a.host.sends),
        [(1, WcStatus::Success), (2, WcStatus::RemoteAccess)]
    );
}

#[test]
fn overlapping_writes_differ_by_length() {
    let (mut a, mut b) = (
        acknowledged_rig(STREAM),
        Rig::with(QpConfig::default(), OTHER),
    );
    let (from, to) = (a.mr(64, ALL), b.mr(16, ALL));
    for (id, off) in [(1, 0), (2, 8)] {
        let write = SendOp::Write {
            remote_addr: to.at + off,
            rkey: to.stag,
        };
        a.post(id, write, &[from.part(0, 16)]);
    }
    shuttle(&mut a, &mut b, 1000);
    assert_eq!(
        brief(&a.host.sends),
        [(1, WcStatus::Success), (2, WcStatus::RemoteAccess)]
    );
}

#[test]
fn partial_message_does_not_shift_blame() {
    let ops: [fn(&Mr) -> SendOp; 3] = [
        |to| SendOp::WriteImm {
            remote_addr: to.at,
            rkey: to.stag,
            imm: 5,
        },
        |_| SendOp::SendImm(5),
        |_| SendOp::Send,
    ];
    for long in ops {
        let (mut a, mut b) = (
            acknowledged_rig(STREAM),
            Rig::with(terminate_policy(), OTHER),
        );
        let (from, to) = (a.mr(1 << 20, ALL), b.mr(1 << 20, ALL));
        a.post(1, SendOp::Send, &[from.part(0, 16)]);
        a.post(2, long(&to), &[from.sge()]);
        // Write one plan only, so that the second request is incomplete.
        assert_eq!(a.fill(), TxFill::Ready);
        let octets = a.write_some(400_000);
        for part in octets.chunks(1000) {
            let _ = b.rx(part);
        }
        let back = b.octets_out();
        assert_eq!(a.rx(&back), RxStatus::Failed);
        assert_eq!(
            brief(&a.host.sends),
            [(1, WcStatus::RemoteInvalidRequest), (2, WcStatus::Flushed)]
        );
    }
}

#[test]
fn send_without_receive_is_blamed() {
    let (mut a, mut b) = (
        acknowledged_rig(STREAM),
        Rig::with(QpConfig::default(), OTHER),
    );
    let from = a.mr(64, ALL);
    b.recv(9, &[]);
    for id in 1..=3 {
        a.post(id, SendOp::Send, &[]);
    }
    a.post(4, SendOp::Send, &[from.part(0, 16)]);
    let octets = a.octets_out();
    assert_eq!(b.rx(&octets), RxStatus::Held);
    b.expire_held_send();
    let back = b.octets_out();
    assert_eq!(a.rx(&back), RxStatus::Failed);
    use WcStatus::{Flushed, RemoteInvalidRequest, Success};
    assert_eq!(
        brief(&a.host.sends),
        [
            (1, Success),
            (2, RemoteInvalidRequest),
            (3, Flushed),
            (4, Flushed)
        ]
    );
}

/// The kind of a request of the property test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Write,
    WriteImm,
    Send,
    SendImm,
    SendInv,
    Read,
    FetchAdd,
}

#[derive(Debug, Clone, Copy)]
struct TestRequest {
    kind: Kind,
    len: u32,
    fence: bool,
}

fn requests() -> impl Strategy<Value = Vec<TestRequest>> {
    use Kind::*;
    let kind = prop::sample::select(vec![
        Write, WriteImm, Send, SendImm, SendInv, Read, FetchAdd,
    ]);
    let len = prop_oneof![Just(0), 1u32..16, 1000u32..4000, Just(20_000)];
    let request = (kind, len, prop::bool::weighted(0.1));
    let request = request.prop_map(|(kind, len, fence)| TestRequest { kind, len, fence });
    prop::collection::vec(request, 1..10)
}

/// Octets sent by one end and not yet received by the other end.
type Line = VecDeque<u8>;

/// The memory: the source, adjacent targets of Writes, words for atomics, and receives.
struct Areas {
    source: Mr,
    target: Mr,
    words: Mr,
    inbox: Mr,
}

struct Pair {
    a: Rig,
    b: Rig,
    areas: Areas,
    /// Octets in flight from `a` and from `b`.
    lines: [Line; 2],
}

const LEN_MAX: u32 = 20_009;
const REQUESTS_MAX: u32 = 10;

impl Pair {
    fn new(ord: u16, holds_sends: bool) -> Self {
        let config = if holds_sends {
            QpConfig::default()
        } else {
            terminate_policy()
        };
        let mut a = acknowledged_rig(StreamConfig { ord, ..STREAM });
        let mut b = Rig::with(config, OTHER);
        let areas = Areas {
            source: a.mr(LEN_MAX * REQUESTS_MAX, ALL),
            target: b.mr(LEN_MAX * REQUESTS_MAX, ALL),
            words: b.mr(8 * (REQUESTS_MAX + 1), ALL),
            inbox: b.mr(LEN_MAX, ALL),
        };
        for i in 0..areas.target.len {
            b.write(&areas.target, i, 0xee);
        }
        let lines = [Line::new(), Line::new()];
        Self { a, b, areas, lines }
    }

    /// Posts request `i`. If `wrong` is set, the peer will refuse it, for one of two reasons.
    /// Returns the expected status of a refused request.
    fn post(
        &mut self,
        i: u32,
        request: &TestRequest,
        at: u32,
        wrong: Option<bool>,
    ) -> Option<WcStatus> {
        use Kind::*;
        let Areas {
            source,
            target,
            words,
            ..
        } = self.areas;
        let (by_key, beyond) = (wrong == Some(true), wrong == Some(false));
        let rkey = target.stag ^ u32::from(by_key);
        // One octet beyond the end.
        let to = target.at
            + u64::from(if beyond {
                target.len - request.len + 1
            } else {
                at
            });
        let imm = 3;
        let op = match request.kind {
            Write => SendOp::Write {
                remote_addr: to,
                rkey,
            },
            // The other reason for a refusal is a missing receive.
            WriteImm => SendOp::WriteImm {
                remote_addr: target.at + u64::from(at),
                rkey,
                imm,
            },
            Send => SendOp::Send,
            SendImm => SendOp::SendImm(imm),
            SendInv if wrong.is_some() => SendOp::SendInv(0xdead_beef),
            SendInv => SendOp::Send,
            Read => SendOp::Read {
                remote_addr: to,
                rkey,
            },
            FetchAdd => SendOp::FetchAdd {
                remote_addr: words.at + u64::from(8 * i) + u64::from(beyond),
                rkey: words.stag ^ u32::from(by_key),
                add: 1,
                mask: 0,
            },
        };
        let mut flags = SendFlags::SIGNALED;
        flags.set(SendFlags::FENCE, request.fence);
        let len = if request.kind == FetchAdd {
            8
        } else {
            request.len
        };
        let sge = source.part(LEN_MAX * i, len);
        self.a
            .try_post(u64::from(i), op, flags, &[sge])
            .expect("the request is accepted");
        wrong?;
        Some(match request.kind {
            Write | Read | SendInv => WcStatus::RemoteAccess,
            WriteImm | FetchAdd if by_key => WcStatus::RemoteAccess,
            _ => WcStatus::RemoteInvalidRequest,
        })
    }

    /// Posts the peer's receive for a request.
    fn post_receive(&mut self, request: &TestRequest, wrong: Option<bool>) {
        use Kind::*;
        let len = match (request.kind, wrong) {
            (Write | Read | FetchAdd, _) => return,
            // A Send is refused because it is too long, or because there is no receive.
            (Send | SendImm, Some(true)) => request.len - 1,
            (Send | SendImm | WriteImm, Some(false)) => return,
            _ => LEN_MAX,
        };
        let inbox = self.areas.inbox.part(0, len);
        self.b.recv(0, &[inbox]);
    }

    /// Moves at most `most` octets in one direction. Returns `true` if anything happened.
    fn step(&mut self, back: bool, most: usize) -> bool {
        let [forward, backward] = &mut self.lines;
        let (from, to, line) = match back {
            false => (&mut self.a, &mut self.b, forward),
            true => (&mut self.b, &mut self.a, backward),
        };
        if from.plan.is_done() && from.qp.wants_tx() {
            let _ = from.fill();
        }
        let written = from.write_some(most);
        line.extend(&written);
        let taken: Vec<u8> = match to.qp.rx_interest() {
            RxInterest::Held => vec![],
            _ => line.drain(..most.min(line.len())).collect(),
        };
        if to.qp.rx_interest() == RxInterest::Read && !taken.is_empty() {
            let _ = to.rx(&taken);
        }
        !written.is_empty() || !taken.is_empty()
    }

    fn run(&mut self, steps: &[(bool, usize)]) {
        for &(back, most) in steps {
            self.step(back, most);
        }
        loop {
            while self.step(false, 9000) | self.step(true, 9000) {}
            if self.b.qp.rx_interest() != RxInterest::Held {
                return;
            }
            self.b.expire_held_send();
        }
    }
}

proptest! {
    /// At most one request is refused. However the stream is split into pieces, this request fails
    /// with its status, and later requests are flushed. Earlier requests succeed, unless they
    /// follow a Read whose response was not sent.
    #[test]
    fn only_refused_request_is_blamed(
        requests in requests(),
        refused in 0usize..12,
        by_key: bool,
        holds_sends: bool,
        ord in 1u16..4,
        steps in prop::collection::vec((any::<bool>(), 1usize..6000), 0..150),
    ) {
        let mut requests = requests;
        let mut pair = Pair::new(ord, holds_sends);
        let (mut at, mut refused_status, mut offsets) = (0, None, vec![]);
        for (i, request) in requests.iter_mut().enumerate() {
            let wrong = (i == refused).then_some(by_key);
            if wrong.is_some() {
                // An empty message is never refused.
                request.len = request.len.max(9);
            }
            let status = pair.post(i as u32, request, at, wrong);
            refused_status = refused_status.or(status);
            if i <= refused {
                pair.post_receive(request, wrong);
            }
            offsets.push(at);
            if request.kind != Kind::Read {
                at += request.len;
            }
        }
        pair.run(&steps);
        let completions = brief(&pair.a.host.sends);
        let ids: Vec<u64> = (0..requests.len() as u64).collect();
        prop_assert_eq!(completions.iter().map(|g| g.0).collect::<Vec<_>>(), ids);
        let has_response = |kind| matches!(kind, Kind::Read | Kind::FetchAdd);
        let mut response_lost = false;
        let memory = pair.b.read(&pair.areas.target);
        let sent = pair.a.read(&pair.areas.source);
        for (i, (request, (_, status))) in requests.iter().zip(&completions).enumerate() {
            let is_flushed = i < refused && *status == WcStatus::Flushed;
            response_lost |= is_flushed && has_response(request.kind);
            let expected = match i.cmp(&refused) {
                core::cmp::Ordering::Less if !response_lost => WcStatus::Success,
                core::cmp::Ordering::Equal => refused_status.unwrap(),
                _ => WcStatus::Flushed,
            };
            prop_assert_eq!(*status, expected, "request {} of {:?}", i, completions);
            let is_write = matches!(request.kind, Kind::Write | Kind::WriteImm);
            if *status == WcStatus::Success && is_write {
                let (to, from) = (offsets[i] as usize, LEN_MAX as usize * i);
                let len = request.len as usize;
                let (placed, written) = (&memory[to..to + len], &sent[from..from + len]);
                prop_assert_eq!(placed, written, "Write {} is not placed", i);
            }
        }
        // A response is lost only because the peer ended the stream.
        prop_assert!(!response_lost || refused_status.is_some());
        let delivered = pair.b.host.recvs.iter().filter(|c| c.status == WcStatus::Success).count();
        let takes_receive = |request: &TestRequest| {
            !has_response(request.kind) && request.kind != Kind::Write
        };
        let succeeded = |status: &WcStatus| *status == WcStatus::Success;
        let done = requests.iter().zip(&completions).filter(|(_, (_, status))| succeeded(status));
        prop_assert!(done.filter(|(request, _)| takes_receive(request)).count() <= delivered);
    }
}

/// Receives a Terminate that refers to the message with this sequence number.
pub(super) fn receive_terminate_about(rig: &mut Rig, opcode: Opcode, msn: u32) {
    let header = Header::Untagged(UntaggedHeader {
        last: true,
        opcode,
        invalidate_stag: Stag(0),
        qn: 0,
        msn,
        mo: 0,
    });
    let terminate = Terminate::about(TerminateCode::DDP_UNTAGGED_NO_BUFFER, 18, header, None);
    receive_terminate(rig, &terminate);
}

fn receive_terminate(rig: &mut Rig, terminate: &Terminate) {
    let mut octets = vec![0; Terminate::MAX_LEN];
    let n = terminate.emit(&mut octets);
    let ulpdu = untagged(Opcode::TERMINATE, 2, 1, 0, true, &octets[..n]);
    assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Failed);
}

#[test]
fn unanswered_read_is_flushed() {
    let mut rig = acknowledged_rig(STREAM);
    let mr = rig.mr(8, ALL);
    let read = SendOp::Read {
        remote_addr: 0,
        rkey: 7,
    };
    rig.post(1, SendOp::Send, &[]);
    rig.post(2, read, &[mr.sge()]);
    rig.post(3, SendOp::Send, &[]);
    rig.post(4, SendOp::Send, &[]);
    rig.sent();
    receive_terminate_about(&mut rig, Opcode::SEND, 3);
    let [first, read, between, last] = [0, 1, 2, 3].map(|i| rig.host.sends[i].status);
    assert_eq!(first, WcStatus::Success);
    assert_eq!((read, between), (WcStatus::Flushed, WcStatus::Flushed));
    assert!(!matches!(last, WcStatus::Success | WcStatus::Flushed));
}

#[test]
fn immediate_data_have_msn() {
    let mut rig = acknowledged_rig(STREAM);
    let op = SendOp::WriteImm {
        remote_addr: 0,
        rkey: 7,
        imm: 1,
    };
    rig.post(1, SendOp::Send, &[]);
    rig.post(2, op, &[]);
    rig.post(3, SendOp::Send, &[]);
    rig.sent();
    receive_terminate_about(&mut rig, Opcode::IMMEDIATE, 2);
    let [first, blamed, last] = [0, 1, 2].map(|i| rig.host.sends[i].status);
    assert_eq!((first, last), (WcStatus::Success, WcStatus::Flushed));
    assert!(!matches!(blamed, WcStatus::Success | WcStatus::Flushed));
}

/// A sequence number that was never sent matches no Send.
#[test]
fn unsent_msn_blames_no_request() {
    for (msn, blamed) in [(1, Some(1)), (2, Some(2)), (0, None), (3, None), (4, None)] {
        let mut rig = acknowledged_rig(STREAM);
        rig.post(1, SendOp::Send, &[]);
        rig.post(2, SendOp::Send, &[]);
        rig.sent();
        receive_terminate_about(&mut rig, Opcode::SEND, msn);
        let failed = |c: &&Cqe| c.status == WcStatus::RemoteInvalidRequest;
        let failed = rig.host.sends.iter().find(failed);
        assert_eq!(failed.map(|c| c.wr_id), blamed, "{msn}");
        let done = |c: &&Cqe| c.status == WcStatus::Success;
        let done = rig.host.sends.iter().filter(done).count();
        assert_eq!(done, usize::from(blamed == Some(2)), "{msn}");
    }
}

/// An unanswered Read after the refused Send does not affect the requests before that Send.
#[test]
fn later_read_does_not_shift_blame() {
    let mut rig = acknowledged_rig(STREAM);
    let mr = rig.mr(8, ALL);
    let read = SendOp::Read {
        remote_addr: 0,
        rkey: 7,
    };
    for id in 1..=3 {
        rig.post(id, SendOp::Send, &[]);
    }
    rig.post(4, read, &[mr.sge()]);
    rig.sent();
    receive_terminate_about(&mut rig, Opcode::SEND, 2);
    use WcStatus::{Flushed, RemoteInvalidRequest, Success};
    assert_eq!(
        brief(&rig.host.sends),
        [
            (1, Success),
            (2, RemoteInvalidRequest),
            (3, Flushed),
            (4, Flushed)
        ]
    );
}

/// The immediate data of a Write count as a message, even while a longer message after them is
/// being sent.
#[test]
fn partial_message_does_not_hide_immediate() {
    let op = SendOp::WriteImm {
        remote_addr: 0,
        rkey: 7,
        imm: 1,
    };
    for (msn, blamed) in [(1, 1), (2, 2), (3, 3)] {
        let mut rig = acknowledged_rig(STREAM);
        let mr = rig.mr(1 << 20, ALL);
        rig.post(1, SendOp::Send, &[]);
        rig.post(2, op, &[]);
        rig.post(3, SendOp::Send, &[mr.sge()]);
        assert_eq!(rig.fill(), TxFill::Ready);
        rig.write_some(1 << 20);
        receive_terminate_about(&mut rig, Opcode::SEND, msn);
        use WcStatus::{Flushed, RemoteInvalidRequest, Success};
        let expected = [1, 2, 3].map(|id| {
            let status = match id.cmp(&blamed) {
                core::cmp::Ordering::Less => Success,
                core::cmp::Ordering::Equal => RemoteInvalidRequest,
                core::cmp::Ordering::Greater => Flushed,
            };
            (id, status)
        });
        assert_eq!(brief(&rig.host.sends), expected, "{msn}");
    }
}

/// Returns a queue pair that has sent a Read and then two Sends, requests 1 to 3.
fn read_and_two_sends() -> Rig {
    let mut rig = acknowledged_rig(STREAM);
    let mr = rig.mr(8, ALL);
    let read = SendOp::Read {
        remote_addr: 0,
        rkey: 7,
    };
    rig.post(1, read, &[mr.sge()]);
    rig.post(2, SendOp::Send, &[]);
    rig.post(3, SendOp::Send, &[]);
    rig.sent();
    rig
}

/// A Terminate for an internal error of the peer refers to a Send or Write, because Reads wait for
/// their responses.
#[test]
fn headerless_terminate_blames_no_read() {
    let mut rig = read_and_two_sends();
    let terminate = Terminate::new(TerminateCode::RDMAP_LOCAL_CATASTROPHIC);
    receive_terminate(&mut rig, &terminate);
    use WcStatus::{Flushed, RemoteOperation};
    assert_eq!(
        brief(&rig.host.sends),
        [(1, Flushed), (2, RemoteOperation), (3, Flushed)]
    );
}

/// Each queue has its own sequence numbers: the first Send and the first Read both have number 1.
#[test]
fn send_and_read_msns_are_separate() {
    let mut rig = read_and_two_sends();
    receive_terminate_about(&mut rig, Opcode::SEND, 1);
    use WcStatus::{Flushed, RemoteInvalidRequest};
    assert_eq!(
        brief(&rig.host.sends),
        [(1, Flushed), (2, RemoteInvalidRequest), (3, Flushed)]
    );
}

/// A Send and a Write are pending; most of the Terminates refer to neither of them.
#[test]
fn unrelated_terminate_blames_no_request() {
    let about = |header| Terminate::about(TerminateCode::DDP_TAGGED_BASE_BOUNDS, 22, header, None);
    let tagged = |opcode, stag, to| {
        about(Header::Tagged(TaggedHeader {
            last: true,
            opcode,
            stag: Stag(stag),
            to,
        }))
    };
    let cases = [
        (tagged(Opcode::WRITE, 7, 0x1000), Some(2)),
        (tagged(Opcode::READ_RESPONSE, 7, 0x1000), None),
        (tagged(Opcode::WRITE, 8, 0x1000), None),
        (tagged(Opcode::WRITE, 7, 0x1008), None),
        (tagged(Opcode::WRITE, 7, 0xfff), None),
        // Without a header: an internal error of the peer at the oldest incomplete request, or an
        // error of the stream.
        (
            Terminate::new(TerminateCode::RDMAP_LOCAL_CATASTROPHIC),
            Some(1),
        ),
        (Terminate::new(TerminateCode::MPA_CRC), None),
    ];
    for (terminate, blamed) in cases {
        let mut rig = acknowledged_rig(STREAM);
        let mr = rig.mr(8, ALL);
        let write = SendOp::Write {
            remote_addr: 0x1000,
            rkey: 7,
        };
        rig.post(1, SendOp::Send, &[]);
        rig.post(2, write, &[mr.sge()]);
        rig.sent();
        receive_terminate(&mut rig, &terminate);
        let expected_status = |id| match blamed {
            Some(seq) if seq == id => status_of(terminate.code),
            // The peer has processed the requests before the blamed one.
            Some(seq) if seq > id => WcStatus::Success,
            _ => WcStatus::Flushed,
        };
        let expected = [1, 2].map(|id| (id, expected_status(id)));
        assert_eq!(brief(&rig.host.sends), expected, "{terminate:?}");
    }
}

/// If several Writes cover the offset of the refused segment, its end identifies the Write. The
/// peer has to report the segment's length for that.
#[test]
fn segment_end_identifies_write() {
    // Identifier, tagged offset and length of each Write.
    let writes = [(1, 0x1000, 16), (2, 0x1008, 16), (3, 0x1000, 32)];
    // Offset, payload and L bit of the refused segment, and the request to blame.
    let cases = [
        (0x1000, Some(16), true, 1),
        (0x1008, Some(16), true, 2),
        (0x1008, Some(8), true, 1),
        (0x1000, Some(32), true, 3),
        (0x1000, Some(8), false, 1),
        (0x1000, Some(16), false, 3),
        (0x1018, Some(8), true, 3),
        (0x1010, Some(8), true, 2),
        (0x1010, None, true, 2),
        (0x100f, None, true, 1),
    ];
    for (to, octets, last, blamed) in cases {
        let mut rig = acknowledged_rig(STREAM);
        let mr = rig.mr(32, ALL);
        for (id, remote_addr, len) in writes {
            let write = SendOp::Write {
                remote_addr,
                rkey: 7,
            };
            rig.post(id, write, &[mr.part(0, len)]);
        }
        rig.sent();
        let header = Header::Tagged(TaggedHeader {
            last,
            opcode: Opcode::WRITE,
            stag: Stag(7),
            to,
        });
        let terminate = Terminate {
            code: TerminateCode::DDP_TAGGED_BASE_BOUNDS,
            ddp_segment_len: octets.map(|octets| octets + 14),
            ddp_header: Some(header),
            read_request: None,
        };
        receive_terminate(&mut rig, &terminate);
        let failed = rig
            .host
            .sends
            .iter()
            .find(|c| c.status == WcStatus::RemoteAccess);
        assert_eq!(
            failed.map(|c| c.wr_id),
            Some(blamed),
            "{to:x} {octets:?} {last}"
        );
    }
}
