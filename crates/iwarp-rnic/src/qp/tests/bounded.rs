//! One call does a limited amount of work; later calls do the rest with the same result.

use super::harness::*;
use crate::limits::MAX_QP_WR;
use crate::qp::*;
use crate::{Access, Cqe, FastRegister, RecvWr, SendFlags, SendOp, WcStatus, Work};
use iwarp_proto::ddp::{Header, Stag, TaggedHeader, UntaggedHeader};
use iwarp_proto::rdmap::{Opcode, ReadRequest, Terminate, TerminateCode};
use proptest::prelude::*;
use std::vec;
use std::vec::Vec;

fn config_of_size(depth: u32, completions: u32) -> QpConfig {
    QpConfig {
        max_send_wr: depth,
        max_recv_wr: depth,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline: 0,
        budget: Budget {
            completions,
            ..Budget::DEFAULT
        },
        ..QpConfig::default()
    }
}

fn completed(rig: &Rig) -> usize {
    rig.host.sends.len() + rig.host.recvs.len()
}

/// Writes all due completions; no call writes more than `most`.
fn complete_all(rig: &mut Rig, most: usize) {
    while rig.qp.completions_due() {
        let before = completed(rig);
        let work = rig.qp.complete_due(&mut rig.host);
        let written = completed(rig) - before;
        assert!(written <= most, "{written} completions in one call");
        assert_eq!(work == Work::More, rig.qp.completions_due());
    }
}

/// A plan has a maximum number of messages and of cuts. Further messages go into the next plan, and
/// all complete.
#[test]
fn small_plan_loses_no_message() {
    for (messages, cuts, aligned) in [(1, 64, None), (3, 64, None), (64, 1, Some(1460))] {
        let mut rig = Rig::with(config_of_size(16, 64), STREAM);
        let mr = rig.mr(4096, ALL);
        rig.plan = TxPlan::with(TxSizes {
            messages,
            cuts,
            ..TxSizes::DEFAULT
        })
        .unwrap();
        if let Some(segment) = aligned {
            rig.qp.align(segment);
        }
        // The second of two adjacent messages does not fit into the first one's segment.
        for id in 0..8 {
            rig.post(id, SendOp::Send, &[mr.part(0, 1000)]);
        }
        let (mut plans, mut octets) = (0, 0);
        while rig.qp.wants_tx() {
            assert_eq!(rig.fill(), TxFill::Ready);
            let before = rig.host.sends.len();
            while !rig.plan.is_done() {
                octets += rig.write_some(60_000).len();
            }
            let done = rig.host.sends.len() - before;
            assert!(done > 0 && done <= messages);
            plans += 1;
        }
        assert_eq!(octets, 8 * 1024);
        let all: Vec<_> = (0..8).map(|id| (id, WcStatus::Success)).collect();
        assert_eq!(brief(&rig.host.sends), all);
        assert!(plans > 2 && (aligned.is_some() || plans == 8_usize.div_ceil(messages)));
    }
}

/// An error of the peer flushes two full queues. This once wrote 131,072 completions in one call.
#[test]
fn fault_flushes_in_steps() {
    let budget = Budget::default().completions;
    let mut rig = Rig::with(config_of_size(MAX_QP_WR, budget), STREAM);
    let mr = rig.mr(64, ALL);
    for i in 0..u64::from(MAX_QP_WR) {
        rig.recv(i, &[mr.part(0, 8)]);
        rig.post(i, SendOp::Send, &[mr.part(0, 8)]);
    }
    assert_eq!(rig.rx_ulpdu(&[0; 20]), RxStatus::Failed);
    assert_eq!(rig.qp.state(), State::Error);
    assert!(completed(&rig) <= budget as usize);
    complete_all(&mut rig, budget as usize);
    let all: Vec<_> = (0..u64::from(MAX_QP_WR))
        .map(|i| (i, WcStatus::Flushed))
        .collect();
    assert!(brief(&rig.host.sends) == all && brief(&rig.host.recvs) == all);
}

/// Requests posted in ERR complete after those still to be flushed, even if the queue was full.
#[test]
fn requests_posted_during_flush_complete() {
    let mut rig = Rig::with(config_of_size(4, 1), STREAM);
    let mr = rig.mr(64, ALL);
    for i in 0..4 {
        rig.recv(i, &[mr.part(0, 8)]);
        rig.post(i, SendOp::Send, &[mr.part(0, 8)]);
    }
    rig.qp.abort(&mut rig.host);
    assert_eq!(brief(&rig.host.sends), [(0, WcStatus::Flushed)]);
    for i in 4..20 {
        rig.post(i, SendOp::Send, &[mr.part(0, 8)]);
        rig.recv(i, &[mr.part(0, 8)]);
    }
    complete_all(&mut rig, 1);
    let all: Vec<_> = (0..20).map(|i| (i, WcStatus::Flushed)).collect();
    assert_eq!(brief(&rig.host.sends), all);
    assert_eq!(brief(&rig.host.recvs), all);
    // Nothing is left to flush, so a new request completes immediately.
    rig.post(20, SendOp::Send, &[mr.part(0, 8)]);
    rig.recv(20, &[mr.part(0, 8)]);
    assert_eq!((rig.host.sends.len(), rig.host.recvs.len()), (21, 21));
}

#[test]
fn reset_drops_unflushed_requests() {
    let mut rig = Rig::with(config_of_size(4, 1), STREAM);
    let mr = rig.mr(64, ALL);
    for i in 0..4 {
        rig.post(i, SendOp::Send, &[mr.part(0, 8)]);
    }
    rig.qp.abort(&mut rig.host);
    rig.qp.modify(State::Reset, &mut rig.host).unwrap();
    assert!(!rig.qp.completions_due());
    assert_eq!(rig.host.sends.len(), 1);
    // The next requests are not flushed.
    rig.qp.stream_gone(&mut rig.host);
    rig.start(STREAM);
    rig.post(9, SendOp::Send, &[mr.part(0, 8)]);
    let _ = rig.sent();
    assert_eq!(brief(&rig.host.sends)[1..], [(9, WcStatus::Success)]);
}

/// The last receive from a shared receive queue completes before its event, which is raised once.
#[test]
fn last_receive_precedes_event() {
    let config = QpConfig {
        shared_receive: true,
        ..config_of_size(8, 1)
    };
    let mut rig = Rig::with(config, STREAM);
    let mr = rig.mr(64, ALL);
    let mut srq = SharedReceiveQueue::new(4, 1).unwrap();
    srq.post(&RecvWr {
        wr_id: 1,
        sges: &[mr.sge()],
    })
    .unwrap();
    rig.host.srq = Some(srq);
    for i in 0..8 {
        rig.post(i, SendOp::Send, &[mr.part(0, 8)]);
    }
    let first = untagged(Opcode::SEND, 0, 1, 0, false, &[7; 8]);
    assert_eq!(rig.rx_ulpdu(&first), RxStatus::Ok);
    rig.qp.abort(&mut rig.host);
    assert!(rig.qp.take_events().contains(Events::LAST_WQE));
    assert_eq!(brief(&rig.host.recvs), [(1, WcStatus::Flushed)]);
    assert!(rig.qp.completions_due());
    complete_all(&mut rig, 1);
    assert_eq!(rig.qp.take_events(), Events::empty());
    assert_eq!(rig.host.sends.len(), 8);
}

/// Posts a Read and 199 Sends, and answers the Read. Some requests complete immediately; the others
/// are due.
fn answer_first_of_200(rig: &mut Rig) {
    let mr = rig.mr(64, ALL);
    let read = SendOp::Read {
        remote_addr: 0,
        rkey: 1,
    };
    rig.post(0, read, &[mr.part(0, 8)]);
    for i in 1..200 {
        rig.post(i, SendOp::Send, &[mr.part(0, 8)]);
    }
    let request = ReadRequest::parse(&rig.sent()[0].1).unwrap();
    assert_eq!(brief(&rig.host.sends), []);
    let answer = tagged(Opcode::READ_RESPONSE, request.sink_stag.0, 0, true, &[1; 8]);
    assert_eq!(rig.rx_ulpdu(&answer), RxStatus::Ok);
    assert!(rig.host.sends.len() < 100 && rig.qp.completions_due());
}

/// Requests that are done succeed even if their completions are written after the end of the
/// stream, also on the next stream of the queue pair.
#[test]
fn done_requests_are_not_flushed() {
    let mut rig = Rig::with(config_of_size(200, 10), STREAM);
    for round in 0..2 {
        answer_first_of_200(&mut rig);
        rig.qp.stream_failed(&mut rig.host);
        complete_all(&mut rig, 10);
        let all: Vec<_> = (0..200).map(|i| (i, WcStatus::Success)).collect();
        assert_eq!(brief(&rig.host.sends), all, "round {round}");
        // A flushed request on another stream must not affect the stream after that.
        rig.qp.modify(State::Reset, &mut rig.host).unwrap();
        rig.start(STREAM);
        rig.post(0, SendOp::Send, &[]);
        rig.qp.stream_failed(&mut rig.host);
        rig.qp.modify(State::Reset, &mut rig.host).unwrap();
        rig.host = TestHost::default();
        rig.start(STREAM);
    }
}

#[test]
fn response_completes_in_steps() {
    let mut rig = Rig::with(config_of_size(200, 10), STREAM);
    answer_first_of_200(&mut rig);
    complete_all(&mut rig, 10);
    let all: Vec<_> = (0..200).map(|i| (i, WcStatus::Success)).collect();
    assert_eq!(brief(&rig.host.sends), all);
}

#[test]
fn sq_drained_follows_last_completion() {
    let mut rig = Rig::with(config_of_size(100, 10), STREAM);
    let mr = rig.mr(64, ALL);
    let read = SendOp::Read {
        remote_addr: 0,
        rkey: 1,
    };
    rig.post(0, read, &[mr.part(0, 8)]);
    for i in 1..100 {
        rig.post(i, SendOp::Send, &[mr.part(0, 8)]);
    }
    let request = ReadRequest::parse(&rig.sent()[0].1).unwrap();
    rig.qp.modify(State::Sqd, &mut rig.host).unwrap();
    let answer = tagged(Opcode::READ_RESPONSE, request.sink_stag.0, 0, true, &[1; 8]);
    assert_eq!(rig.rx_ulpdu(&answer), RxStatus::Ok);
    while rig.qp.completions_due() {
        assert!(!rig.qp.take_events().contains(Events::SQ_DRAINED));
        let _ = rig.qp.complete_due(&mut rig.host);
    }
    assert_eq!(rig.host.sends.len(), 100);
    assert!(rig.qp.take_events().contains(Events::SQ_DRAINED));
}

/// The drained event waits until the plan is written, because the program may stop the peer after
/// the event.
#[test]
fn drain_waits_for_response() {
    let mut rig = Rig::new();
    let mr = rig.mr(64, ALL);
    let request = read_request(9, 64, mr.stag, mr.at);
    let request = untagged(Opcode::READ_REQUEST, 1, 1, 0, true, &request);
    assert_eq!(rig.rx_ulpdu(&request), RxStatus::Ok);
    assert_eq!(rig.fill(), TxFill::Ready);
    rig.qp.modify(State::Sqd, &mut rig.host).unwrap();
    assert_eq!(rig.qp.take_events(), Events::empty());
    rig.write_some(10);
    assert_eq!(rig.qp.take_events(), Events::empty());
    rig.write_some(1000);
    assert_eq!(rig.qp.take_events(), Events::SQ_DRAINED);
}

/// What happens to a queue pair in acknowledged mode, in the property test below.
#[derive(Debug, Clone, Copy)]
enum Step {
    Post {
        read: bool,
        signaled: bool,
    },
    /// Fills a plan that is not written.
    Fill,
    Transmit,
    /// The peer answers the oldest Read.
    Answer,
    Complete,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (any::<bool>(), any::<bool>())
            .prop_map(|(read, signaled)| Step::Post { read, signaled }),
        1 => Just(Step::Fill),
        2 => Just(Step::Transmit),
        1 => Just(Step::Answer),
        1 => Just(Step::Complete),
    ];
    proptest::collection::vec(step, 0..60)
}

/// Returns the completions of a queue pair with this budget. The stream ends with a Terminate
/// without a header, or a reset.
fn run(budget: u32, placed: bool, steps: &[Step], terminated: bool) -> Vec<Cqe> {
    let mut rig = Rig::fresh(config_of_size(64, budget));
    if placed {
        rig.qp.complete_when_placed();
    }
    rig.start(STREAM);
    let mr = rig.mr(64, ALL);
    let mut reads = vec![];
    for (i, step) in (0..).zip(steps) {
        match *step {
            Step::Post { read, signaled } => {
                let op = match read {
                    true => SendOp::Read {
                        remote_addr: 0,
                        rkey: 1,
                    },
                    false => SendOp::Send,
                };
                let flags = match signaled {
                    true => SendFlags::SIGNALED,
                    false => SendFlags::empty(),
                };
                // The queue is deep enough for all requests, so delayed completions do not matter.
                rig.try_post(i, op, flags, &[mr.part(0, 8)]).unwrap();
            }
            Step::Fill => {
                if rig.plan.is_done() {
                    let _ = rig.fill();
                }
            }
            Step::Transmit => {
                let sent = rig.sent();
                let requests = sent
                    .iter()
                    .filter(|(h, _)| h.opcode() == Opcode::READ_REQUEST);
                reads.extend(requests.filter_map(|(_, p)| ReadRequest::parse(p)));
            }
            Step::Answer if reads.is_empty() => {}
            Step::Answer => {
                let read = reads.remove(0);
                let payload = vec![3; read.size as usize];
                let ulpdu = tagged(Opcode::READ_RESPONSE, read.sink_stag.0, 0, true, &payload);
                assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
            }
            Step::Complete => {
                let _ = rig.qp.complete_due(&mut rig.host);
            }
        }
    }
    if terminated {
        let code = TerminateCode::RDMAP_LOCAL_CATASTROPHIC;
        let mut body = [0; crate::limits::CONTROL_MAX];
        let n = Terminate::new(code).emit(&mut body);
        let _ = rig.rx_ulpdu(&untagged(Opcode::TERMINATE, 2, 1, 0, true, &body[..n]));
    } else {
        rig.qp.stream_failed(&mut rig.host);
    }
    // The system call that wrote the plan returns.
    let n = rig.plan.remaining();
    rig.qp.tx_written(&mut rig.plan, n, &mut rig.host);
    complete_all(&mut rig, budget as usize);
    rig.host.sends
}

/// Executes local requests; no call executes more than `most`.
fn run_local_requests(rig: &mut Rig, most: usize) {
    while rig.qp.wants_tx() {
        let before = rig.host.sends.len();
        let fill = rig.fill();
        let executed = rig.host.sends.len() - before;
        assert!(executed <= most, "{executed} requests in one call");
        match fill {
            TxFill::Ready => {
                rig.write_some(1 << 20);
            }
            TxFill::Idle => assert!(!rig.qp.wants_tx()),
            more => assert_eq!((more, executed), (TxFill::More, most)),
        }
        complete_all(rig, 1);
    }
}

#[test]
fn local_requests_run_in_steps() {
    for initiator in [true, false] {
        let mut config = config_of_size(64, 1);
        config.budget.local_requests = 3;
        let stream = StreamConfig {
            initiator,
            ..STREAM
        };
        let mut rig = Rig::with(config, stream);
        let (range, random) = (rig.range(64), rig.random());
        let stag = rig.table.allocate_fast(range, PD, random).unwrap();
        let register = SendOp::FastRegister(FastRegister {
            new_stag: stag,
            offset: 0,
            len: 64,
            iova: 0,
            access: Access::LOCAL_WRITE,
            pages: None,
        });
        // A responder that has received nothing executes only local requests; an initiator also
        // sends.
        for i in 0..9 {
            rig.post(2 * i, register, &[]);
            rig.post(2 * i + 1, SendOp::LocalInvalidate { stag }, &[]);
        }
        if initiator {
            rig.post(18, SendOp::Send, &[]);
            rig.post(19, register, &[]);
        }
        run_local_requests(&mut rig, 3);
        let n = if initiator { 20 } else { 18 };
        let all: Vec<_> = (0..n).map(|i| (i, WcStatus::Success)).collect();
        assert_eq!(brief(&rig.host.sends), all);
    }
}

#[test]
fn refused_request_is_searched_in_steps() {
    for by_header in [true, false] {
        let mut rig = Rig::fresh(config_of_size(MAX_QP_WR, 100));
        rig.qp.complete_when_placed();
        rig.start(STREAM);
        let mr = rig.mr(64, ALL);
        let depth = 1000;
        for i in 0..depth {
            let write = SendOp::Write {
                remote_addr: i * 8,
                rkey: 7,
            };
            let op = if by_header { write } else { SendOp::Send };
            rig.post(i, op, &[mr.part(0, 8)]);
        }
        rig.octets_out();
        let refused = 700;
        let header = match by_header {
            true => Header::Tagged(TaggedHeader {
                last: true,
                opcode: Opcode::WRITE,
                stag: Stag(7),
                to: refused * 8,
            }),
            false => Header::Untagged(UntaggedHeader {
                last: true,
                opcode: Opcode::SEND,
                invalidate_stag: Stag(0),
                qn: 0,
                msn: refused as u32 + 1,
                mo: 0,
            }),
        };
        let mut body = [0; crate::limits::CONTROL_MAX];
        let terminate = Terminate::about(TerminateCode::RDMAP_ACCESS, 22, header, None);
        let n = terminate.emit(&mut body);
        let _ = rig.rx_ulpdu(&untagged(Opcode::TERMINATE, 2, 1, 0, true, &body[..n]));
        assert_eq!(rig.qp.state(), State::Error);
        assert_eq!(completed(&rig), 0, "the search comes first");
        // A request is posted during the search.
        rig.post(depth, SendOp::Send, &[]);
        let mut calls = 0;
        while completed(&rig) == 0 {
            assert_eq!(rig.qp.complete_due(&mut rig.host), Work::More);
            calls += 1;
        }
        // The Terminate and the post have examined 100 requests each. A search by number starts at
        // the newest request.
        assert_eq!(calls, if by_header { 6 } else { 1 });
        complete_all(&mut rig, 100);
        let sends = brief(&rig.host.sends);
        assert_eq!(sends.len() as u64, depth + 1);
        for (i, (id, status)) in (0..).zip(sends) {
            assert_eq!(id, i);
            match i.cmp(&refused) {
                core::cmp::Ordering::Less => assert_eq!(status, WcStatus::Success),
                core::cmp::Ordering::Equal => assert_eq!(status, WcStatus::RemoteAccess),
                core::cmp::Ordering::Greater => assert_eq!(status, WcStatus::Flushed),
            }
        }
    }
}

proptest! {
    #[test]
    fn small_budget_keeps_completions(
        steps in steps(),
        placed: bool,
        terminated: bool,
        budget in 1u32..4,
    ) {
        let all = run(u32::MAX, placed, &steps, terminated);
        prop_assert_eq!(run(budget, placed, &steps, terminated), all);
    }
}
