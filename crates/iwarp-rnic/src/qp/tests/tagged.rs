//! Tag matching on a shared receive queue.

use super::harness::*;
use crate::qp::*;
use crate::receive_queue::{SharedReceiveQueue, TakenRecv};
use crate::tags::TaggedBuffer;
use crate::tally::{Count, Counted};
use crate::{Access, RecvWr, SendFlags, SendOp, WcFlags, WcOpcode, WcStatus};
use iwarp_proto::ddp::Header;
use iwarp_proto::rdmap::{Opcode, ReadRequest};
use iwarp_proto::tag_matching::{Operation, Tmh};
use std::vec;
use std::vec::Vec;

/// Returns a queue pair whose shared receive queue has room for `depth` receives and 32 tagged
/// buffers.
fn receiver(depth: u32) -> Rig {
    let config = QpConfig {
        shared_receive: true,
        match_tags: true,
        // A rendezvous needs no slots of the program.
        max_send_wr: 0,
        max_send_sge: 0,
        max_inline: 0,
        ..QpConfig::default()
    };
    let stream = StreamConfig {
        initiator: false,
        ..STREAM
    };
    let mut rig = Rig::with(config, stream);
    let mut srq = SharedReceiveQueue::new(depth, 2).unwrap();
    srq.match_tags(32).unwrap();
    rig.host.srq = Some(srq);
    rig
}

fn srq(rig: &mut Rig) -> &mut SharedReceiveQueue {
    rig.host.srq.as_mut().unwrap()
}

fn receive(rig: &mut Rig, wr_id: u64, mr: &Mr) {
    let sges = [mr.sge()];
    let wr = RecvWr { wr_id, sges: &sges };
    srq(rig).post(&wr).unwrap();
}

fn post_tag(rig: &mut Rig, wr_id: u64, tag: u64, sges: &[crate::Sge]) -> u32 {
    let buffer = TaggedBuffer {
        wr_id,
        tag,
        mask: u64::MAX,
        sges,
    };
    srq(rig).tags().unwrap().add(&buffer).unwrap()
}

fn message(operation: Operation, tag: u64, payload: &[u8]) -> Vec<u8> {
    let header = Tmh {
        operation,
        app_ctx: 0xabcd_0123,
        tag,
    };
    [&header.octets()[..], payload].concat()
}

fn request(tag: u64, va: u64, rkey: u32, len: u32) -> Vec<u8> {
    let rvh = [
        &va.to_be_bytes()[..],
        &rkey.to_be_bytes(),
        &len.to_be_bytes(),
    ];
    message(Operation::Rendezvous, tag, &rvh.concat())
}

/// Returns identifier, status, opcode, length and flags of the completed receives.
fn completed(rig: &Rig) -> Vec<(u64, WcStatus, WcOpcode, u32, WcFlags)> {
    let cqes = rig.host.recvs.iter();
    cqes.map(|c| (c.wr_id, c.status, c.opcode, c.byte_len, c.flags))
        .collect()
}

const MATCH: WcFlags = WcFlags::TAG_MATCH;
const DATA: WcFlags = WcFlags::TAG_DATA;

#[test]
fn eager_message_fills_buffer() {
    let mut rig = receiver(4);
    let (pool, a, b) = (rig.mr(600, ALL), rig.mr(300, ALL), rig.mr(300, ALL));
    receive(&mut rig, 90, &pool);
    post_tag(&mut rig, 1, 7, &[a.part(0, 300), b.part(10, 250)]);
    let before = (rig.read(&a), rig.read(&b));
    let payload: Vec<u8> = (0..500u32).map(|i| (i * 7) as u8).collect();
    let octets = message(Operation::Eager, 7, &payload);
    // The segmentation does not matter, even if it splits the header.
    for (mo, end) in [(0, 3), (3, 3), (3, 20), (20, 516)] {
        let part = &octets[mo as usize..end];
        let ulpdu = untagged(Opcode::SEND, 0, 1, mo, end == 516, part);
        assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
    }
    assert_eq!(
        completed(&rig),
        [(1, WcStatus::Success, WcOpcode::TagRecv, 500, MATCH | DATA)]
    );
    assert_eq!(rig.host.recvs[0].tag(), Some((7, 0xabcd_0123)));
    assert_eq!(rig.read(&a), payload[..300]);
    let after = rig.read(&b);
    assert_eq!(after[10..210], payload[300..]);
    assert_eq!(
        (&after[..10], &after[210..]),
        (&before.1[..10], &before.1[210..])
    );
    // The receive is reused.
    assert_eq!(srq(&mut rig).len(), 1);
}

#[test]
fn other_messages_fill_receive() {
    let mut rig = receiver(4);
    let pool = rig.mr(64, ALL);
    let target = rig.mr(64, ALL);
    post_tag(&mut rig, 1, 7, &[target.sge()]);
    let before = rig.read(&target);
    let unexpected = message(Operation::Eager, 8, b"payload");
    let cases = [
        (&unexpected, WcOpcode::TagRecv),
        (&message(Operation::NoTag, 7, b"payload"), WcOpcode::TagNone),
        (&message(Operation::Finish, 7, b""), WcOpcode::TagNone),
        (&b"short".to_vec(), WcOpcode::TagNone),
        (&Vec::new(), WcOpcode::TagNone),
    ];
    for (i, (octets, opcode)) in cases.into_iter().enumerate() {
        receive(&mut rig, 90 + i as u64, &pool);
        let msn = 1 + i as u32;
        assert_eq!(rig.rx_ulpdu(&send(msn, octets)), RxStatus::Ok);
        let none = WcFlags::empty();
        let expected = (
            90 + i as u64,
            WcStatus::Success,
            opcode,
            octets.len() as u32,
            none,
        );
        assert_eq!(completed(&rig)[i], expected);
        assert_eq!(rig.host.recvs[i].tag(), None);
        assert_eq!(rig.read(&pool)[..octets.len()], octets[..]);
    }
    assert_eq!(rig.read(&target), before);
    assert!(!srq(&mut rig).tags().unwrap().is_synchronized());
}

#[test]
fn rendezvous_reads_and_notifies_sender() {
    let (mut a, mut b) = (Rig::new(), receiver(4));
    let source = a.mr(1000, ALL);
    for at in 0..1000 {
        a.write(&source, at, (at * 3) as u8);
    }
    let (finish, out) = (a.mr(64, ALL), a.mr(64, ALL));
    a.recv(50, &[finish.sge()]);
    let (pool, sink) = (b.mr(64, ALL), b.mr(2000, Access::LOCAL_WRITE));
    receive(&mut b, 90, &pool);
    post_tag(&mut b, 1, 7, &[sink.part(100, 700), sink.part(900, 700)]);
    let before = b.read(&sink);
    let octets = request(7, source.at, source.stag, 1000);
    for (at, octet) in (0..).zip(&octets) {
        a.write(&out, at, *octet);
    }
    a.post(2, SendOp::Send, &[out.part(0, octets.len() as u32)]);
    shuttle(&mut a, &mut b, 1000);
    let ok = WcStatus::Success;
    assert_eq!(
        completed(&b),
        [
            (1, ok, WcOpcode::TagRecv, 1000, MATCH),
            (1, ok, WcOpcode::TagRecv, 1000, DATA)
        ]
    );
    let placed = b.read(&sink);
    let expected: Vec<u8> = (0..1000u32).map(|at| (at * 3) as u8).collect();
    assert_eq!(placed[100..800], expected[..700]);
    assert_eq!(placed[900..1200], expected[700..]);
    for range in [0..100, 800..900, 1200..2000] {
        assert_eq!(placed[range.clone()], before[range]);
    }
    // The receiver's program has sent nothing, and gets no completion.
    assert_eq!(brief(&b.host.sends), []);
    assert_eq!(brief(&a.host.recvs), [(50, ok)]);
    let header = Tmh::parse(&a.read(&finish)).unwrap();
    let expected = Tmh {
        operation: Operation::Finish,
        app_ctx: 0xabcd_0123,
        tag: 7,
    };
    assert_eq!((header, a.host.recvs[0].byte_len), (expected, 16));
    assert_eq!(srq(&mut b).len(), 1);
}

/// A rendezvous is counted when its payload has arrived. A failed buffer is counted as failed.
#[test]
fn matched_buffers_count_as_receives() {
    let count = |rig: &Rig| rig.qp.tally(Counted::Recv);
    let counts = |succeeded, failed, octets| Count {
        succeeded,
        failed,
        octets,
    };
    let (mut a, mut b) = (Rig::new(), receiver(4));
    b.qp.enable_tally().unwrap();
    let (source, finish) = (a.mr(1000, ALL), a.mr(64, ALL));
    a.recv(50, &[finish.sge()]);
    let (pool, sink) = (b.mr(64, ALL), b.mr(1000, ALL));
    receive(&mut b, 90, &pool);
    for wr_id in 0..3 {
        post_tag(&mut b, wr_id, 7, &[sink.sge()]);
    }
    let eager = message(Operation::Eager, 7, &[5; 30]);
    assert_eq!(b.rx_ulpdu(&send(1, &eager)), RxStatus::Ok);
    assert_eq!(count(&b), counts(1, 0, 30));
    let rendezvous = request(7, source.at, source.stag, 900);
    assert_eq!(b.rx_ulpdu(&send(2, &rendezvous)), RxStatus::Ok);
    assert_eq!(count(&b), counts(1, 0, 30), "its payload has not arrived");
    let answer = {
        let octets = b.octets_out();
        assert_eq!(a.rx(&octets), RxStatus::Ok);
        a.octets_out()
    };
    assert_eq!(b.rx(&answer), RxStatus::Ok);
    assert_eq!(count(&b), counts(2, 0, 930));
    let refused = request(7, source.at, source.stag ^ 1, 900);
    assert_eq!(b.rx_ulpdu(&send(3, &refused)), RxStatus::Ok);
    b.qp.modify(State::Error, &mut b.host).unwrap();
    assert_eq!(count(&b), counts(2, 1, 930));
}

#[test]
fn excess_rendezvous_wait() {
    const MANY: u64 = 30;
    let (mut a, mut b) = (Rig::new(), receiver(40));
    let (source, out) = (a.mr(64, ALL), a.mr(32, ALL));
    let finish = a.mr(16, ALL);
    let (pool, sink) = (b.mr(64, ALL), b.mr(64, ALL));
    receive(&mut b, 90, &pool);
    for round in 0..3 {
        for wr_id in 0..MANY {
            a.recv(wr_id, &[finish.sge()]);
            post_tag(&mut b, wr_id, 7, &[sink.sge()]);
        }
        for (at, octet) in (0..).zip(&request(7, source.at, source.stag, 64)) {
            a.write(&out, at, *octet);
        }
        for wr_id in 0..MANY {
            a.post(wr_id, SendOp::Send, &[out.sge()]);
        }
        shuttle(&mut a, &mut b, 700);
        let done = round * MANY as usize + MANY as usize;
        let completed = completed(&b);
        let valid: Vec<u64> = completed
            .iter()
            .filter(|c| c.4 == DATA)
            .map(|c| c.0)
            .collect();
        assert_eq!(completed.len(), 2 * done);
        assert_eq!(valid.len(), done);
        assert!(valid[done - MANY as usize..].iter().copied().eq(0..MANY));
        assert_eq!(a.host.recvs.len(), done);
    }
    assert_eq!((brief(&b.host.sends), srq(&mut b).len()), (vec![], 1));
}

#[test]
fn refused_read_ends_all_rendezvous() {
    let (mut a, mut b) = (Rig::new(), receiver(40));
    let out = a.mr(32, ALL);
    let (pool, sink) = (b.mr(64, ALL), b.mr(64, ALL));
    receive(&mut b, 90, &pool);
    for wr_id in 0..20 {
        post_tag(&mut b, wr_id, 7, &[sink.sge()]);
    }
    // The request contains an invalid key.
    for (at, octet) in (0..).zip(&request(7, 0x1000, out.stag ^ 1, 8)) {
        a.write(&out, at, *octet);
    }
    for wr_id in 0..20 {
        a.post(wr_id, SendOp::Send, &[out.sge()]);
    }
    shuttle(&mut a, &mut b, 1000);
    assert_eq!(b.qp.state(), State::Error);
    let failed: Vec<_> = completed(&b).into_iter().filter(|c| c.4 != MATCH).collect();
    assert_eq!(failed[0].1, WcStatus::RemoteAccess);
    assert!(failed[1..].iter().all(|c| c.1 == WcStatus::Flushed));
    let matched = completed(&b).len() - failed.len();
    assert_eq!(matched, failed.len(), "each rendezvous ended once");
    // The receive is back in the queue, and the entries of all completed buffers are free again.
    assert_eq!(srq(&mut b).len(), 1);
    let free = (0..40).filter(|wr_id| {
        let buffer = TaggedBuffer {
            wr_id: *wr_id,
            tag: 9,
            mask: u64::MAX,
            sges: &[],
        };
        srq(&mut b).tags().unwrap().add(&buffer).is_ok()
    });
    assert_eq!(free.count(), 32 - (20 - matched));
}

#[test]
fn too_long_message_ends_stream() {
    let long = message(Operation::Eager, 7, &[1; 33]);
    for octets in [long, request(7, 0x1000, 1, 33)] {
        let mut rig = receiver(4);
        let (pool, target) = (rig.mr(64, ALL), rig.mr(32, ALL));
        receive(&mut rig, 90, &pool);
        post_tag(&mut rig, 1, 7, &[target.sge()]);
        let before = rig.read(&target);
        let _ = rig.rx_ulpdu(&send(1, &octets));
        assert_eq!(rig.qp.state(), State::Error);
        let completed = completed(&rig);
        assert_eq!(
            (completed.len(), completed[0].0, completed[0].1),
            (1, 1, WcStatus::LocalLength)
        );
        assert_eq!(rig.read(&target), before);
        assert_eq!(srq(&mut rig).len(), 1);
    }
}

/// Passes a message with tag 7 in two segments. Another receive is posted in between, so that the
/// queue is full and the message's own receive cannot be returned.
fn pass_message_while_queue_fills(rig: &mut Rig, msn: u32, wr_id: u64, pool: &Mr) {
    let octets = message(Operation::Eager, 7, &[5; 8]);
    let first = untagged(Opcode::SEND, 0, msn, 0, false, &octets[..4]);
    assert_eq!(rig.rx_ulpdu(&first), RxStatus::Ok);
    receive(rig, wr_id, pool);
    let rest = untagged(Opcode::SEND, 0, msn, 4, true, &octets[4..]);
    assert_eq!(rig.rx_ulpdu(&rest), RxStatus::Ok);
}

#[test]
fn unneeded_receive_is_kept() {
    let mut rig = receiver(1);
    let (pool, target) = (rig.mr(64, ALL), rig.mr(64, ALL));
    receive(&mut rig, 90, &pool);
    post_tag(&mut rig, 1, 7, &[target.sge()]);
    post_tag(&mut rig, 2, 7, &[target.sge()]);
    pass_message_while_queue_fills(&mut rig, 1, 91, &pool);
    assert_eq!(srq(&mut rig).len(), 1);
    // The next message uses the receive that was kept.
    assert_eq!(rig.rx_ulpdu(&send(2, b"none")), RxStatus::Ok);
    assert_eq!(brief(&rig.host.recvs)[1..], [(90, WcStatus::Success)]);
    pass_message_while_queue_fills(&mut rig, 3, 92, &pool);
    rig.qp.modify(State::Error, &mut rig.host).unwrap();
    assert_eq!(
        brief(&rig.host.recvs)[2..],
        [(2, WcStatus::Success), (91, WcStatus::Flushed)]
    );
}

#[test]
fn solicited_message_completes_solicited() {
    let cases = [
        (vec![1, 2, 3], WcOpcode::TagNone),
        (message(Operation::Eager, 6, &[5; 8]), WcOpcode::TagRecv),
        (message(Operation::Eager, 7, &[5; 8]), WcOpcode::TagRecv),
        (request(7, 0x1000, 7, 8), WcOpcode::TagRecv),
    ];
    for (octets, opcode) in cases {
        for (send, solicited) in [(Opcode::SEND, false), (Opcode::SEND_SE, true)] {
            let mut rig = receiver(4);
            let (pool, target) = (rig.mr(64, ALL), rig.mr(64, ALL));
            receive(&mut rig, 90, &pool);
            post_tag(&mut rig, 1, 7, &[target.sge()]);
            let ulpdu = untagged(send, 0, 1, 0, true, &octets);
            assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
            let cqe = rig.host.recvs[0];
            assert_eq!(cqe.opcode, opcode);
            assert_eq!(cqe.flags.contains(WcFlags::SOLICITED), solicited);
        }
    }
}

/// Other queue pairs use the same queue, so a returned receive may be overwritten immediately.
#[test]
fn receive_is_returned_after_last_use() {
    let mut rig = receiver(4);
    let (pool, target, source) = (rig.mr(600, ALL), rig.mr(600, ALL), rig.mr(32, ALL));
    rig.host.overwritten_on_return = Some(pool);
    receive(&mut rig, 90, &pool);
    post_tag(&mut rig, 1, 7, &[target.sge()]);
    let payload: Vec<u8> = (0..500u32).map(|i| (i * 3) as u8).collect();
    let eager = message(Operation::Eager, 7, &payload);
    assert_eq!(rig.rx_ulpdu(&send(1, &eager)), RxStatus::Ok);
    assert!(rig.read(&pool).iter().all(|octet| *octet == 0xee));
    assert_eq!(rig.read(&target)[..500], payload);
    assert_eq!(rig.host.recvs[0].tag(), Some((7, 0xabcd_0123)));
    // This also applies to a rendezvous request, whose headers are needed later.
    post_tag(&mut rig, 2, 8, &[target.sge()]);
    let rendezvous_request = request(8, source.at, source.stag, 32);
    assert_eq!(rig.rx_ulpdu(&send(2, &rendezvous_request)), RxStatus::Ok);
    assert_eq!(rig.host.recvs[1].tag(), Some((8, 0xabcd_0123)));
    let sent = rig.sent();
    let read = ReadRequest::parse(&sent[0].1).unwrap();
    let fields = (read.source_stag.0, read.source_to, read.size);
    assert_eq!(fields, (source.stag, source.at, 32));
}

/// A message that has found no receive later uses the receive that was kept.
#[test]
fn kept_receive_waits_for_message() {
    let mut rig = receiver(1);
    let (pool, target) = (rig.mr(64, ALL), rig.mr(64, ALL));
    receive(&mut rig, 90, &pool);
    post_tag(&mut rig, 1, 7, &[target.sge()]);
    pass_message_while_queue_fills(&mut rig, 1, 91, &pool);
    rig.host.not_ready = true;
    assert_eq!(rig.rx_ulpdu(&send(2, b"none")), RxStatus::Held);
    assert_eq!(rig.offer_again(), RxStatus::Held);
    rig.host.not_ready = false;
    assert_eq!(rig.offer_again(), RxStatus::Ok);
    assert_eq!(rig.rx_ulpdu(&send(3, b"none")), RxStatus::Ok);
    let taken = [1, 90, 91].map(|wr_id| (wr_id, WcStatus::Success));
    assert_eq!(brief(&rig.host.recvs), taken);
}

#[test]
fn reset_frees_rendezvous_buffers() {
    let mut rig = receiver(4);
    let (pool, target) = (rig.mr(64, ALL), rig.mr(64, ALL));
    receive(&mut rig, 90, &pool);
    let handle = post_tag(&mut rig, 1, 7, &[target.sge()]);
    assert_eq!(
        rig.rx_ulpdu(&send(1, &request(7, 0x1000, 1, 8))),
        RxStatus::Ok
    );
    let sent = rig.sent();
    assert!(matches!(sent[0].0, Header::Untagged(h) if h.opcode == Opcode::READ_REQUEST));
    rig.qp.modify(State::Reset, &mut rig.host).unwrap();
    assert_eq!(rig.host.recvs.len(), 1);
    let tags = srq(&mut rig).tags().unwrap();
    assert_eq!(tags.end_read(handle), None);
    assert_eq!(tags.next_read(1, &mut TakenRecv::default()), None);
}

/// A reset during Reads does not reduce the number of concurrent Reads afterwards.
#[test]
fn reset_frees_read_slots() {
    let mut rig = receiver(4);
    let (pool, target) = (rig.mr(64, ALL), rig.mr(64, ALL));
    receive(&mut rig, 90, &pool);
    for round in 0..3 {
        let stream = StreamConfig {
            initiator: false,
            ord: 16,
            ..STREAM
        };
        rig.qp.modify(State::Reset, &mut rig.host).unwrap();
        rig.qp.stream_gone(&mut rig.host);
        rig.start(stream);
        for msn in 1..11 {
            post_tag(&mut rig, u64::from(msn), 7, &[target.sge()]);
            let ulpdu = send(msn, &request(7, 0x1000, 1, 8));
            assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
        }
        assert_eq!(rig.sent().len(), 8, "round {round}");
    }
    // A receive that was kept because its queue was full is dropped as well.
    let mut rig = receiver(1);
    let (pool, target) = (rig.mr(64, ALL), rig.mr(64, ALL));
    receive(&mut rig, 90, &pool);
    post_tag(&mut rig, 1, 7, &[target.sge()]);
    let octets = message(Operation::Eager, 7, &[5; 8]);
    let first = untagged(Opcode::SEND, 0, 1, 0, false, &octets[..4]);
    assert_eq!(rig.rx_ulpdu(&first), RxStatus::Ok);
    receive(&mut rig, 91, &pool);
    let rest = untagged(Opcode::SEND, 0, 1, 4, true, &octets[4..]);
    assert_eq!(rig.rx_ulpdu(&rest), RxStatus::Ok);
    rig.qp.modify(State::Reset, &mut rig.host).unwrap();
    rig.qp.stream_gone(&mut rig.host);
    rig.start(STREAM);
    assert_eq!(rig.rx_ulpdu(&send(1, b"none")), RxStatus::Ok);
    assert_eq!(rig.host.recvs.last().unwrap().wr_id, 91);
}

/// If this end cannot send Reads, the program itself asks the sender for the payload.
#[test]
fn rendezvous_without_reads_is_for_program() {
    for ord in [0, 1] {
        let mut rig = receiver(4);
        rig.qp.modify(State::Reset, &mut rig.host).unwrap();
        rig.qp.stream_gone(&mut rig.host);
        rig.start(StreamConfig { ord, ..STREAM });
        let (pool, target) = (rig.mr(64, ALL), rig.mr(64, ALL));
        receive(&mut rig, 90, &pool);
        post_tag(&mut rig, 1, 7, &[target.sge()]);
        let octets = request(7, 0x1000, 1, 8);
        assert_eq!(rig.rx_ulpdu(&send(1, &octets)), RxStatus::Ok);
        let expected = match ord {
            0 => (90, octets.len() as u32, WcFlags::empty()),
            _ => (1, 8, MATCH),
        };
        let completed = completed(&rig);
        assert_eq!(completed.len(), 1);
        let (wr_id, status, opcode, len, flags) = completed[0];
        assert_eq!((status, opcode), (WcStatus::Success, WcOpcode::TagRecv));
        assert_eq!((wr_id, len, flags), expected);
        assert_eq!(rig.sent().len(), usize::from(ord));
    }
}

/// A slot is reserved for the notification of each rendezvous, even while earlier notifications are
/// still to be written.
#[test]
fn every_rendezvous_sender_is_notified() {
    const MANY: u32 = 20;
    let mut rig = receiver(40);
    rig.qp.modify(State::Reset, &mut rig.host).unwrap();
    rig.qp.stream_gone(&mut rig.host);
    rig.start(StreamConfig { ord: 16, ..STREAM });
    let (pool, target) = (rig.mr(64, ALL), rig.mr(64, ALL));
    receive(&mut rig, 90, &pool);
    let begin = |rig: &mut Rig, msn: u32| {
        post_tag(rig, u64::from(msn), 7, &[target.sge()]);
        let ulpdu = send(msn, &request(7, 0x1000, 1, 8));
        assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
    };
    let answer = |rig: &mut Rig, sink: u32| {
        let answer = tagged(Opcode::READ_RESPONSE, sink, 0, true, &[1; 8]);
        assert_eq!(rig.rx_ulpdu(&answer), RxStatus::Ok);
    };
    begin(&mut rig, 1);
    let (_, rendezvous_request) = &rig.sent()[0];
    answer(
        &mut rig,
        ReadRequest::parse(rendezvous_request).unwrap().sink_stag.0,
    );
    // One message is waiting to be sent. As many Reads as possible follow it in one plan.
    for msn in 2..=MANY {
        begin(&mut rig, msn);
    }
    let mut finished = 0;
    while rig.qp.wants_tx() {
        assert_eq!(rig.fill(), TxFill::Ready);
        for (header, body) in rig.plan_segments() {
            match ReadRequest::parse(&body) {
                Some(rendezvous_request) if header.opcode() == Opcode::READ_REQUEST => {
                    answer(&mut rig, rendezvous_request.sink_stag.0);
                }
                _ => finished += 1,
            }
        }
        rig.write_some(1 << 20);
    }
    assert_eq!(finished, MANY as usize);
    assert_eq!(completed(&rig).len(), 2 * MANY as usize);
}

#[test]
fn rendezvous_use_no_program_slots() {
    let config = QpConfig {
        shared_receive: true,
        match_tags: true,
        max_send_wr: 2,
        ..QpConfig::default()
    };
    let mut rig = Rig::with(config, STREAM);
    rig.host.srq = receiver(4).host.srq;
    let (pool, target) = (rig.mr(64, ALL), rig.mr(64, ALL));
    receive(&mut rig, 90, &pool);
    for wr_id in 0..4 {
        post_tag(&mut rig, wr_id, 7, &[target.sge()]);
    }
    for msn in 1..5 {
        assert_eq!(
            rig.rx_ulpdu(&send(msn, &request(7, 0x1000, 1, 8))),
            RxStatus::Ok
        );
    }
    rig.post(1, SendOp::Send, &[target.sge()]);
    rig.post(2, SendOp::Send, &[target.sge()]);
    let third = rig.try_post(3, SendOp::Send, SendFlags::SIGNALED, &[target.sge()]);
    assert_eq!(third, Err(crate::PostError::QueueFull));
}
