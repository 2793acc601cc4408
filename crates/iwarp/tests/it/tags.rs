//! Tests of shared receive queues that match tags, also with several concurrent senders.

use crate::common::words::{Mem, poll};
use iwarp::runtime::{
    CompletionQueue, Context, QpAttributes, QueuePair, SharedReceiveQueue, State, TagOperation,
    TagRequest, TaggedBuffer,
};
use iwarp::{Config, Device, Error};
use iwarp_proto::tag_matching::{Operation, Tmh};
use iwarp_rnic::{Cqe, RecvWr, SendWr, WcFlags, WcOpcode, WcStatus};
use std::time::{Duration, Instant};

const WAIT: Duration = Duration::from_secs(20);

fn device() -> Device {
    Device::by_address([127, 0, 0, 1].into()).unwrap()
}

fn queue_pair(
    ctx: &Context,
    pd: u32,
    cq: &CompletionQueue,
    srq: Option<&SharedReceiveQueue>,
) -> QueuePair {
    let attributes = QpAttributes {
        pd,
        send_cq: cq.clone(),
        recv_cq: cq.clone(),
        srq: srq.cloned(),
        unreliable: false,
        max_send_wr: 64,
        max_recv_wr: 64,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline: 64,
        signal_all: true,
        max_ird: 4,
        max_ord: 4,
    };
    let qp = ctx.create_addressable_qp(&attributes).unwrap();
    qp.modify(State::Init).unwrap();
    qp
}

fn connect(me: &QueuePair, other: &QueuePair) {
    let ip = [127, 0, 0, 1].into();
    let gid = device().address(ip).unwrap().gid();
    me.connect_peer(gid, other.num()).unwrap();
    me.modify(State::Rts).unwrap();
}

fn message(operation: Operation, tag: u64, rest: &[u8]) -> Vec<u8> {
    let header = Tmh {
        operation,
        app_ctx: 7,
        tag,
    };
    [&header.octets()[..], rest].concat()
}

/// Index of the word in the receiver's memory at which its tagged buffers start.
const BUFFERS: usize = 256;

/// A queue that matches tags, and the memory of its buffers.
struct Receiver {
    ctx: Context,
    pd: u32,
    cq: CompletionQueue,
    srq: SharedReceiveQueue,
    mem: Mem,
}

impl Receiver {
    /// Creates a receiver with this number of receives of 64 octets.
    fn new(receives: u64) -> Self {
        let ctx = Context::open(&device(), Config::default()).unwrap();
        let (pd, cq) = (ctx.allocate_pd(), ctx.create_cq(4096, None).unwrap());
        let srq = ctx.create_tag_srq(&cq, pd, 64, 1, 1024).unwrap();
        let mem = Mem::new(&ctx, pd, 4096);
        let receiver = Self {
            ctx,
            pd,
            cq,
            srq,
            mem,
        };
        for wr_id in 0..receives {
            receiver.receive(1000 + wr_id);
        }
        receiver
    }

    fn receive(&self, wr_id: u64) {
        let sges = [self.mem.sge(64)];
        self.srq.post(&[RecvWr { wr_id, sges: &sges }]).unwrap();
    }

    fn ask(&self, operation: TagOperation<'_>, handled: Option<u32>) -> (Option<u32>, Cqe) {
        let request = TagRequest {
            wr_id: 5,
            operation,
            signaled: true,
            handled,
        };
        let handle = self.srq.post_tag(&request).unwrap();
        (handle, poll(&self.cq))
    }

    fn add(&self, wr_id: u64, tag: u64) -> (u32, Cqe) {
        // The buffer is separate from the receives, which may contain messages whose headers are
        // not read yet.
        let mut sges = [self.mem.sge(64)];
        sges[0].addr += 8 * BUFFERS as u64;
        let buffer = TaggedBuffer {
            wr_id,
            tag,
            mask: u64::MAX,
            sges: &sges,
        };
        let (handle, cqe) = self.ask(TagOperation::Add(buffer), None);
        assert_eq!((cqe.opcode, cqe.wr_id), (WcOpcode::TagAdd, 5));
        (handle.unwrap(), cqe)
    }
}

#[test]
fn tag_requests_complete_in_own_cq() {
    let receiver = Receiver::new(1);
    let (first, cqe) = receiver.add(1, 5);
    assert_eq!(
        (cqe.status, cqe.flags),
        (WcStatus::Success, WcFlags::empty())
    );
    let (_, removed) = receiver.ask(TagOperation::Remove(first), None);
    assert_eq!(
        (removed.status, removed.opcode),
        (WcStatus::Success, WcOpcode::TagRemove)
    );
    let (_, gone) = receiver.ask(TagOperation::Remove(first), None);
    assert_eq!(gone.status, WcStatus::TagMatching);
    // No unexpected message has arrived, so the program and the queue are out of sync.
    let (_, ahead) = receiver.ask(TagOperation::Synchronize, Some(1));
    assert_eq!(
        (ahead.opcode, ahead.flags),
        (WcOpcode::TagSync, WcFlags::TAG_SYNC)
    );
    let (_, again) = receiver.ask(TagOperation::Synchronize, Some(0));
    assert_eq!(again.flags, WcFlags::empty());
    let plain = receiver.ctx.create_srq(receiver.pd, 4, 1).unwrap();
    let request = TagRequest {
        wr_id: 1,
        operation: TagOperation::Synchronize,
        signaled: true,
        handled: None,
    };
    let refused = plain.post_tag(&request);
    assert!(
        matches!(refused, Err(Error::InvalidArgument(_))),
        "{refused:?}"
    );
    for tags in [0, 1025] {
        let refused = receiver
            .ctx
            .create_tag_srq(&receiver.cq, receiver.pd, 4, 1, tags);
        assert!(matches!(refused, Err(Error::InvalidArgument(_))));
    }
}

/// A request may contain the number of unexpected messages that the program has handled. Its
/// completion reports whether that is the current number.
#[test]
fn tag_requests_report_unexpected_count() {
    let receiver = Receiver::new(1);
    let (first, _) = receiver.add(1, 5);
    let buffer = TaggedBuffer {
        wr_id: 2,
        tag: 6,
        mask: u64::MAX,
        sges: &[],
    };
    // A buffer can be removed once, regardless of the number of handled messages.
    for operation in [
        TagOperation::Synchronize,
        TagOperation::Add(buffer),
        TagOperation::Remove(first),
        TagOperation::Remove(first),
    ] {
        for (handled, flags) in [(1, WcFlags::TAG_SYNC), (0, WcFlags::empty())] {
            let (_, cqe) = receiver.ask(operation, Some(handled));
            assert_eq!(cqe.flags, flags, "{operation:?} with {handled}");
        }
    }
}

/// An error is reported even for an unsignaled request, and an armed queue raises its event.
#[test]
fn completions_of_requests_raise_events() {
    let ctx = Context::open(&device(), Config::default()).unwrap();
    let (pd, channel) = (ctx.allocate_pd(), ctx.create_channel().unwrap());
    let cq = ctx.create_cq(8, Some(&channel)).unwrap();
    let srq = ctx.create_tag_srq(&cq, pd, 4, 1, 1).unwrap();
    let post = |operation, signaled| {
        cq.arm(false);
        let request = TagRequest {
            wr_id: 9,
            operation,
            signaled,
            handled: None,
        };
        let handle = srq.post_tag(&request).unwrap();
        let event = channel.try_event().is_some();
        let n = cq.poll(&mut [Cqe::default(); 2]).unwrap();
        assert_eq!(n, usize::from(event), "{operation:?}");
        (handle, event)
    };
    let buffer = TaggedBuffer {
        wr_id: 1,
        tag: 7,
        mask: u64::MAX,
        sges: &[],
    };
    let (handle, event) = post(TagOperation::Add(buffer), false);
    assert!(!event);
    let handle = handle.unwrap();
    assert_eq!(post(TagOperation::Remove(handle), true), (None, true));
    // The buffer was removed already.
    assert_eq!(post(TagOperation::Remove(handle), false), (None, true));
    assert_eq!(post(TagOperation::Synchronize, false), (None, false));
    assert_eq!(post(TagOperation::Synchronize, true), (None, true));
}

const SENDERS: usize = 4;
/// Messages of each kind and sender.
const EACH: u64 = 25;

/// A sender, and the queue pair of the receiver to which it is connected.
struct Sender {
    cq: CompletionQueue,
    here: QueuePair,
    there: QueuePair,
}

impl Sender {
    /// Connects to the receiver, which gets a buffer for each message. The sender gets a receive
    /// for the end of each rendezvous.
    fn new(receiver: &Receiver, number: u64, mem: &Mem) -> Self {
        let ctx = &receiver.ctx;
        let cq = ctx.create_cq(256, None).unwrap();
        let here = queue_pair(ctx, receiver.pd, &cq, None);
        let there = queue_pair(ctx, receiver.pd, &cq, Some(&receiver.srq));
        connect(&here, &there);
        connect(&there, &here);
        for i in 0..2 * EACH {
            receiver.add(number * 100 + i, number);
        }
        let sges = [mem.sge(64)];
        for wr_id in 0..EACH {
            here.post_recv(&[RecvWr { wr_id, sges: &sges }]).unwrap();
        }
        Self { cq, here, there }
    }

    /// Takes completions. Returns how many rendezvous have ended.
    fn poll(&self) -> u64 {
        let mut out = [Cqe::default(); 64];
        let n = self.cq.poll(&mut out).unwrap();
        assert!(out[..n].iter().all(|cqe| cqe.status == WcStatus::Success));
        let ends = out[..n].iter().filter(|cqe| cqe.opcode == WcOpcode::Recv);
        ends.count() as u64
    }
}

/// There are more senders than receives. Each message uses a receive only briefly, and then the
/// next waiting message uses it.
#[test]
fn senders_share_one_receive() {
    let receiver = Receiver::new(1);
    let mem = Mem::new(&receiver.ctx, receiver.pd, 64);
    mem.fill(0x5a5a);
    let senders = (0..SENDERS as u64).map(|number| Sender::new(&receiver, number, &mem));
    let senders: Vec<Sender> = senders.collect();
    let source = [
        &mem.addr().to_be_bytes()[..],
        &mem.stag.to_be_bytes(),
        &8u32.to_be_bytes(),
    ]
    .concat();
    for _ in 0..EACH {
        for (number, sender) in senders.iter().enumerate() {
            let eager = message(Operation::Eager, number as u64, &[number as u8; 40]);
            let request = message(Operation::Rendezvous, number as u64, &source);
            for octets in [&eager, &request] {
                let pieces = [&octets[..]];
                let wr = SendWr::inline(1, &pieces).signaled();
                sender.here.post_send(&[wr]).unwrap();
            }
        }
    }
    let start = Instant::now();
    let (mut valid, mut matched) = (0, 0);
    let mut out = [Cqe::default(); 64];
    let mut finished = [0; SENDERS];
    while valid < 2 * EACH * SENDERS as u64 || finished.iter().any(|n| *n < EACH) {
        assert!(start.elapsed() < WAIT, "{valid} {matched} {finished:?}");
        let n = receiver.cq.poll(&mut out).unwrap();
        for cqe in &out[..n] {
            assert_eq!(
                (cqe.status, cqe.opcode),
                (WcStatus::Success, WcOpcode::TagRecv)
            );
            valid += u64::from(cqe.flags.contains(WcFlags::TAG_DATA));
            matched += u64::from(cqe.flags.contains(WcFlags::TAG_MATCH));
        }
        for (finished, sender) in finished.iter_mut().zip(&senders) {
            *finished += sender.poll();
        }
    }
    assert_eq!(matched, 2 * EACH * SENDERS as u64);
    // The receive contains the last message.
    let last = receiver.mem.word(BUFFERS);
    assert!(last == mem.word(0) || last.to_ne_bytes().iter().all(|octet| *octet < 4));
    assert_eq!(receiver.srq.len(), 1, "the receive was returned each time");
    for sender in senders {
        sender.here.destroy();
        sender.there.destroy();
    }
}

#[test]
fn unreliable_connections_match_nothing() {
    let receiver = Receiver::new(1);
    let attributes = QpAttributes {
        pd: receiver.pd,
        send_cq: receiver.cq.clone(),
        recv_cq: receiver.cq.clone(),
        srq: Some(receiver.srq.clone()),
        unreliable: true,
        max_send_wr: 1,
        max_recv_wr: 1,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline: 0,
        signal_all: false,
        max_ird: 0,
        max_ord: 0,
    };
    let refused = receiver.ctx.create_qp(&attributes);
    assert!(matches!(refused, Err(Error::InvalidArgument(_))));
}
