//! Tests of extended reliable connections (XRC): by number and by the connection manager, to
//! several shared receive queues, and invalid requests.

use crate::common::loopback::{attributes, device, gid};
use crate::common::words::{Mem, poll};
use iwarp::runtime::cm::{CmEvent, CmEventChannel, CmEventKind, CmId, ConnectionParameters};
use iwarp::runtime::{
    AsyncEventKind, CompletionQueue, Context, QueuePair, Retry, SharedReceiveQueue, State,
    XrcDomain, XrcSendWr, XrcTargetAttributes, create_event_channel,
};
use iwarp::{Config, Error};
use iwarp_rnic::{Cqe, PostError, RecvWr, SendFlags, SendOp, SendWr, WcOpcode, WcStatus};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(20);
/// RDMA Reads and atomics outstanding, per direction.
const DEPTH: u16 = 4;

/// A shared receive queue of a domain, with its own completion queue, protection domain and memory.
struct Queue {
    srq: SharedReceiveQueue,
    cq: CompletionQueue,
    mem: Mem,
}

impl Queue {
    fn new(ctx: &Context, domain: &XrcDomain, cqe: u32) -> Self {
        let (pd, cq) = (ctx.allocate_pd(), ctx.create_cq(cqe, None).unwrap());
        let srq = ctx.create_xrc_srq(domain, &cq, pd, 16, 2).unwrap();
        let mem = Mem::new(ctx, pd, 64);
        Self { srq, cq, mem }
    }

    fn num(&self) -> u32 {
        self.srq.num().unwrap()
    }

    fn post(&self, wr_id: u64) {
        let sges = [self.mem.sge(64)];
        self.srq.post(&[RecvWr { wr_id, sges: &sges }]).unwrap();
    }
}

/// An open device, and a domain with two queues.
struct Side {
    ctx: Context,
    domain: XrcDomain,
    queues: [Queue; 2],
    _other: Queue,
}

impl Side {
    fn new() -> Self {
        Self::with(16)
    }

    fn with(cqe: u32) -> Self {
        let ctx = Context::open(&device(), Config::default()).unwrap();
        // Allocate further protection domains, so that numbers of different devices differ.
        let _ = [(); 3].map(|()| ctx.allocate_pd());
        // Numbers increase, so the queue with the lowest number belongs to another domain.
        let other = ctx.open_xrc_domain(None, true, false).unwrap();
        let other = Queue::new(&ctx, &other, 1);
        let domain = ctx.open_xrc_domain(None, true, false).unwrap();
        let queues = [(); 2].map(|()| Queue::new(&ctx, &domain, cqe));
        Self {
            ctx,
            domain,
            queues,
            _other: other,
        }
    }

    fn target(&self, addressable: bool) -> QueuePair {
        let attributes = XrcTargetAttributes {
            max_ird: DEPTH,
            addressable,
        };
        let qp = self
            .ctx
            .create_xrc_target(&self.domain, attributes)
            .unwrap();
        qp.modify(State::Init).unwrap();
        qp
    }
}

/// An initiator with its completion queue and memory.
struct Initiator {
    ctx: Context,
    cq: CompletionQueue,
    qp: QueuePair,
    mem: Mem,
}

impl Initiator {
    fn new(addressable: bool) -> Self {
        let ctx = Context::open(&device(), Config::default()).unwrap();
        let (pd, cq) = (ctx.allocate_pd(), ctx.create_cq(64, None).unwrap());
        let attributes = attributes(pd, &cq, DEPTH);
        let qp = ctx.create_xrc_initiator(&attributes, addressable).unwrap();
        qp.modify(State::Init).unwrap();
        let mem = Mem::new(&ctx, pd, 64);
        Self { ctx, cq, qp, mem }
    }

    fn post(&self, wr_id: u64, op: SendOp, srq: u32) {
        let wr = SendWr {
            wr_id,
            op,
            flags: SendFlags::SIGNALED,
            sges: &[self.mem.sge(8)],
            inline: &[],
        };
        self.qp.post_send_xrc(&[XrcSendWr { wr, srq }]).unwrap();
    }
}

/// Connects an initiator and a target by number. Either the initiator or the target calls
/// `connect_peer` first.
fn by_number(initiator_first: bool) -> (Initiator, Side, QueuePair) {
    let (a, b) = (Initiator::new(true), Side::new());
    let target = b.target(true);
    let connect = |qp: &QueuePair, peer: &QueuePair| {
        qp.connect_peer(gid(), peer.num()).unwrap();
        // A target also works in RTR.
        if qp.xrc_end() == a.qp.xrc_end() {
            qp.modify(State::Rts).unwrap();
        }
    };
    let order = match initiator_first {
        true => [(&a.qp, &target), (&target, &a.qp)],
        false => [(&target, &a.qp), (&a.qp, &target)],
    };
    for (qp, peer) in order {
        connect(qp, peer);
    }
    (a, b, target)
}

fn ok(cqe: &Cqe) -> (u64, WcOpcode) {
    assert_eq!(cqe.status, WcStatus::Success, "{cqe:?}");
    (cqe.wr_id, cqe.opcode)
}

#[test]
fn sends_reach_their_named_queue() {
    for initiator_first in [false, true] {
        let (a, b, target) = by_number(initiator_first);
        for round in 0..20u64 {
            let queue = &b.queues[round as usize % 2];
            queue.post(100 + round);
            a.mem.fill(round);
            a.post(round, SendOp::Send, queue.num());
            // The completion is written to the queue's completion queue, with the target's number.
            let cqe = poll(&queue.cq);
            assert_eq!(ok(&cqe), (100 + round, WcOpcode::Recv));
            assert_eq!((cqe.qp_num, cqe.byte_len), (target.num(), 8));
            assert_eq!(queue.mem.word(0), round);
            assert_eq!(ok(&poll(&a.cq)), (round, WcOpcode::Send));
        }
        target.destroy();
        a.qp.destroy();
    }
}

/// `post_send_all_xrc` accepts all requests of a list, or none if they do not fit.
#[test]
fn list_is_sent_or_refused_whole() {
    let (a, b, target) = by_number(true);
    let queue = &b.queues[0];
    let sges = [a.mem.sge(8)];
    let send = |wr_id| XrcSendWr {
        wr: SendWr::new(wr_id, SendOp::Send, &sges).signaled(),
        srq: queue.num(),
    };
    let too_many: Vec<_> = (1000..2000).map(send).collect();
    assert!(a.qp.post_send_all_xrc(&too_many).is_err());
    (0..4).for_each(|n| queue.post(n));
    let list: Vec<_> = (0..4).map(send).collect();
    a.qp.post_send_all_xrc(&list).unwrap();
    for n in 0..4 {
        assert_eq!(ok(&poll(&queue.cq)), (n, WcOpcode::Recv));
        assert_eq!(ok(&poll(&a.cq)), (n, WcOpcode::Send));
    }
    target.destroy();
    a.qp.destroy();
}

#[test]
fn operations_reach_named_queues_memory() {
    let (a, b, target) = by_number(true);
    for queue in &b.queues {
        let (remote_addr, rkey) = (queue.mem.addr(), queue.mem.stag);
        a.mem.fill(7);
        a.post(1, SendOp::Write { remote_addr, rkey }, queue.num());
        assert_eq!(ok(&poll(&a.cq)), (1, WcOpcode::Write));
        assert_eq!(queue.mem.word(0), 7);
        let add = SendOp::FetchAdd {
            remote_addr,
            rkey,
            add: 5,
            mask: 0,
        };
        a.post(2, add, queue.num());
        assert_eq!(ok(&poll(&a.cq)), (2, WcOpcode::FetchAdd));
        // The request names no queue, so the queue of the last request applies.
        a.post(3, SendOp::Read { remote_addr, rkey }, 0);
        assert_eq!(ok(&poll(&a.cq)), (3, WcOpcode::Read));
        assert_eq!(a.mem.word(0), 12);
        queue.post(9);
        let imm = 4;
        let op = SendOp::WriteImm {
            remote_addr,
            rkey,
            imm,
        };
        a.post(4, op, queue.num());
        let cqe = poll(&queue.cq);
        assert_eq!(ok(&cqe), (9, WcOpcode::RecvWriteImm));
        assert_eq!(cqe.imm_or_stag, 4);
        assert_eq!(ok(&poll(&a.cq)), (4, WcOpcode::Write));
    }
    target.destroy();
    a.qp.destroy();
}

/// Each queue has a protection domain. A request that names a queue cannot access memory of another
/// queue's protection domain.
#[test]
fn memory_of_another_queue_is_refused() {
    let (a, b, target) = by_number(false);
    let op = SendOp::Write {
        remote_addr: b.queues[1].mem.addr(),
        rkey: b.queues[1].mem.stag,
    };
    a.mem.fill(1);
    a.post(1, op, b.queues[0].num());
    assert_eq!(poll(&a.cq).status, WcStatus::RemoteAccess);
    assert_eq!(b.queues[1].mem.word(0), 0);
    target.destroy();
    a.qp.destroy();
}

/// The first Write of a connection need not name a queue, if all queues of the domain have the same
/// protection domain.
#[test]
fn write_without_queue_reaches_domain_queue() {
    let (a, b, target) = by_number(false);
    let lowest = b.queues.iter().min_by_key(|q| q.num()).unwrap();
    let op = SendOp::Write {
        remote_addr: lowest.mem.addr(),
        rkey: lowest.mem.stag,
    };
    a.mem.fill(1);
    a.post(1, op, 0);
    ok(&poll(&a.cq));
    assert_eq!(lowest.mem.word(0), 1);
    target.destroy();
    a.qp.destroy();
}

#[test]
fn send_waits_for_its_queues_receive() {
    let (a, b, target) = by_number(true);
    b.queues[1].post(7);
    a.post(1, SendOp::Send, b.queues[0].num());
    while target.counters().receiver_not_ready == 0 {
        std::thread::yield_now();
    }
    // `post_send_xrc` accepts a part of a list that does not fit.
    let sges = [b.queues[0].mem.sge(64); 3];
    let list = [(8, 1), (9, 3)].map(|(wr_id, elements)| RecvWr {
        wr_id,
        sges: &sges[..elements],
    });
    let failed = b.queues[0].srq.post(&list).unwrap_err();
    let too_many = matches!(failed.error(), Error::Post(PostError::TooManySges));
    assert!(failed.accepted() == 1 && too_many, "{failed}");
    assert_eq!(ok(&poll(&b.queues[0].cq)).0, 8);
    ok(&poll(&a.cq));
    assert!(b.queues[1].cq.is_empty());
    target.destroy();
    a.qp.destroy();
}

#[test]
fn waiting_send_fails_with_destroyed_queue() {
    let (a, b, target) = by_number(true);
    a.post(1, SendOp::Send, b.queues[0].num());
    a.post(2, SendOp::Send, b.queues[1].num());
    while target.counters().receiver_not_ready == 0 {
        std::thread::yield_now();
    }
    b.queues[0].srq.destroy();
    assert_eq!(poll(&a.cq).status, WcStatus::RemoteInvalidRequest);
    assert_eq!(poll(&a.cq).status, WcStatus::Flushed);
    target.destroy();
    a.qp.destroy();
}

#[test]
fn foreign_queues_are_refused() {
    let other = |b: &Side| {
        let domain = b.ctx.open_xrc_domain(None, true, false).unwrap();
        Queue::new(&b.ctx, &domain, 4)
    };
    for case in 0..3 {
        let (a, b, target) = by_number(case == 0);
        let foreign = other(&b);
        foreign.post(1);
        let gone = Queue::new(&b.ctx, &b.domain, 4);
        gone.post(1);
        gone.srq.destroy();
        let srq = [0, foreign.num(), gone.num()][case];
        a.post(1, SendOp::Send, srq);
        assert_eq!(poll(&a.cq).status, WcStatus::RemoteInvalidRequest, "{case}");
        assert!(foreign.cq.is_empty() && gone.cq.is_empty());
        assert_eq!(target.state(), State::Error);
        target.destroy();
        a.qp.destroy();
    }
}

#[test]
fn overflow_fails_targets_of_queue() {
    let (a, mut b, target) = by_number(true);
    b.queues[0] = Queue::new(&b.ctx, &b.domain, 1);
    let queue = &b.queues[0];
    let room = queue.cq.capacity();
    for wr_id in 0..=u64::from(room) {
        queue.post(wr_id);
        a.post(wr_id, SendOp::Send, queue.num());
    }
    while target.state() != State::Error {
        std::thread::yield_now();
    }
    target.destroy();
    a.qp.destroy();
}

#[test]
fn limit_event_is_raised_once() {
    let (a, b, target) = by_number(true);
    let queue = &b.queues[0];
    for wr_id in 0..3 {
        queue.post(wr_id);
    }
    queue.srq.set_limit(3).unwrap();
    a.post(1, SendOp::Send, queue.num());
    a.post(2, SendOp::Send, queue.num());
    let is_limit = |kind: &AsyncEventKind| match kind {
        AsyncEventKind::SrqLimitReached(srq) => srq.is_same(&queue.srq),
        _ => false,
    };
    // Other events, such as `CommunicationEstablished`, precede it.
    while !is_limit(&b.ctx.async_event(Some(LIMIT)).unwrap().kind) {}
    poll(&a.cq);
    poll(&a.cq);
    while let Some(event) = b.ctx.try_async_event() {
        assert!(!is_limit(&event.kind), "{event:?}");
    }
    target.destroy();
    a.qp.destroy();
}

/// An ordinary queue pair and a target that name each other as peers are not connected, as on
/// InfiniBand.
#[test]
fn other_queue_pairs_cannot_reach_target() {
    let b = Side::new();
    let target = b.target(true);
    let cq = b.ctx.create_cq(4, None).unwrap();
    let qp = b
        .ctx
        .create_addressable_qp(&attributes(b.ctx.allocate_pd(), &cq, DEPTH))
        .unwrap();
    qp.modify(State::Init).unwrap();
    qp.connect_peer(gid(), target.num()).unwrap();
    target.connect_peer(gid(), qp.num()).unwrap();
    qp.modify(State::Rts).unwrap();
    qp.set_retry(Retry {
        timeout: 1,
        ..Retry::default()
    })
    .unwrap();
    qp.post_send(&[SendWr::send(1, &[])]).unwrap();
    assert_eq!(poll(&cq).status, WcStatus::TransportRetryExceeded);
    assert!(target.addresses().is_none());
    target.destroy();
    qp.destroy();
}

#[test]
fn initiator_cannot_be_own_peer() {
    let a = Initiator::new(true);
    let refused = a.qp.connect_peer(gid(), a.qp.num());
    assert!(
        matches!(refused, Err(Error::InvalidArgument(_))),
        "{refused:?}"
    );
    a.qp.destroy();
}

#[test]
fn initiator_and_target_refuse_posts() {
    let (a, b, target) = by_number(true);
    let wr = RecvWr {
        wr_id: 1,
        sges: &[],
    };
    let failed = a.qp.post_recv(&[wr]).unwrap_err();
    assert!(
        matches!(failed.error(), Error::Post(PostError::QueueFull)),
        "{failed:?}"
    );
    assert_eq!(failed.accepted(), 0);
    let failed = target.post_recv(&[wr]).unwrap_err();
    assert!(
        matches!((failed.accepted(), failed.error()), (0, Error::Post(_))),
        "{failed:?}"
    );
    target.modify(State::Rts).unwrap();
    let failed = target.post_send(&[SendWr::send(1, &[])]).unwrap_err();
    assert!(
        matches!((failed.accepted(), failed.error()), (0, Error::Post(_))),
        "{failed:?}"
    );
    drop(b);
    target.destroy();
    a.qp.destroy();
}

/// After a reset, a target takes no receives before a request of the new connection names a queue.
#[test]
fn target_is_reused() {
    let (a, b, target) = by_number(true);
    for round in 0..3 {
        let queue = &b.queues[round % 2];
        queue.post(1);
        a.post(1, SendOp::Send, queue.num());
        ok(&poll(&queue.cq));
        ok(&poll(&a.cq));
        for qp in [&a.qp, &target] {
            qp.modify(State::Reset).unwrap();
        }
        for (qp, peer) in [(&a.qp, &target), (&target, &a.qp)] {
            qp.modify(State::Init).unwrap();
            qp.connect_peer(gid(), peer.num()).unwrap();
            qp.modify(State::Rts).unwrap();
        }
    }
    target.destroy();
    a.qp.destroy();
}

#[test]
fn domain_is_identified_by_file() {
    let ctx = Context::open(&device(), Config::default()).unwrap();
    let directory = std::env::temp_dir();
    let name = |n: u32| directory.join(format!("iwarp-xrc-{}-{n}", std::process::id()));
    let files = [0, 1].map(|n| std::fs::File::create(name(n)).unwrap());
    let again = std::fs::File::open(name(0)).unwrap();
    let open = |file: &std::fs::File, create, exclusive| {
        ctx.open_xrc_domain(Some(file.as_fd()), create, exclusive)
    };
    let errno = |result: Result<XrcDomain, Error>| result.unwrap_err().errno();
    assert_eq!(errno(open(&files[0], false, false)), libc::EAGAIN);
    let first = open(&files[0], true, true).unwrap();
    assert!(open(&again, false, false).unwrap().is_same(&first));
    assert!(!open(&files[1], true, false).unwrap().is_same(&first));
    assert_eq!(errno(open(&again, true, true)), libc::EINVAL);
    assert_eq!(errno(open(&again, false, true)), libc::EINVAL);
    assert_eq!(errno(ctx.open_xrc_domain(None, false, false)), libc::EINVAL);
    let anonymous = [(); 2].map(|()| ctx.open_xrc_domain(None, true, false).unwrap());
    assert!(!anonymous[0].is_same(&anonymous[1]));
    // A domain is destroyed with its last handle.
    drop(first);
    assert_eq!(errno(open(&again, false, false)), libc::EAGAIN);
    // Another context of the same device has its own domains.
    let other = Context::open(&device(), Config::default()).unwrap();
    let cq = ctx.create_cq(1, None).unwrap();
    let made = other.create_xrc_srq(&anonymous[0], &cq, 1, 1, 1);
    assert!(matches!(made, Err(Error::InvalidArgument(_))), "{made:?}");
    for n in [0, 1] {
        std::fs::remove_file(name(n)).unwrap();
    }
}

/// Returns a listener and a resolved client.
fn managed(client: &QueuePair, server: &Context) -> (CmId, [CmEventChannel; 2], CmId) {
    let channels = [(); 2].map(|()| create_event_channel().unwrap());
    let listener = CmId::create(&channels[1], Some(server));
    listener
        .bind(SocketAddr::from(([127, 0, 0, 1], 0)))
        .unwrap();
    listener.listen(4).unwrap();
    let address = listener.addresses().0.unwrap();
    let id = CmId::create(&channels[0], Some(&client.context()));
    id.resolve_addr(None, address).unwrap();
    expect(&channels[0], CmEventKind::AddrResolved);
    id.resolve_route().unwrap();
    expect(&channels[0], CmEventKind::RouteResolved);
    id.set_queue_pair(Some(client));
    (id, channels, listener)
}

fn expect(channel: &CmEventChannel, kind: CmEventKind) -> CmEvent {
    let event = channel.next(Some(LIMIT)).unwrap();
    assert_eq!(event.kind, kind, "{event:?}");
    event
}

fn with_data(private_data: &[u8]) -> ConnectionParameters {
    ConnectionParameters {
        private_data: private_data.to_vec(),
        ..ConnectionParameters::default()
    }
}

#[test]
fn cm_connects_initiator_and_target() {
    let (a, b) = (Initiator::new(false), Side::new());
    let (id, channels, listener) = managed(&a.qp, &b.ctx);
    id.connect(&with_data(b"hello")).unwrap();
    let request = expect(&channels[1], CmEventKind::ConnectRequest);
    assert_eq!(request.private_data, b"hello");
    assert_eq!(request.xrc, a.qp.xrc_end());
    let target = b.target(false);
    request.id.set_queue_pair(Some(&target));
    let srqn = b.queues[1].num().to_be_bytes();
    request.id.accept(&with_data(&srqn)).unwrap();
    let established = expect(&channels[0], CmEventKind::Established);
    assert_eq!(established.private_data, srqn);
    b.queues[1].post(3);
    a.post(1, SendOp::Send, b.queues[1].num());
    assert_eq!(ok(&poll(&b.queues[1].cq)).0, 3);
    assert_eq!(ok(&poll(&a.cq)).0, 1);
    for id in [&id, &request.id, &listener] {
        id.destroy();
    }
    target.destroy();
    a.qp.destroy();
}

#[test]
fn accept_with_wrong_kind_allows_retry() {
    let (a, b) = (Initiator::new(false), Side::new());
    let (id, channels, listener) = managed(&a.qp, &b.ctx);
    id.connect(&with_data(b"")).unwrap();
    let request = expect(&channels[1], CmEventKind::ConnectRequest);
    let cq = b.ctx.create_cq(4, None).unwrap();
    let wrong = b.ctx.create_qp(&attributes(1, &cq, DEPTH)).unwrap();
    request.id.set_queue_pair(Some(&wrong));
    let refused = request.id.accept(&with_data(b""));
    assert!(
        matches!(refused, Err(Error::InvalidArgument(_))),
        "{refused:?}"
    );
    let target = b.target(false);
    request.id.set_queue_pair(Some(&target));
    request.id.accept(&with_data(b"")).unwrap();
    expect(&channels[0], CmEventKind::Established);
    // The reverse: an ordinary client, and a server that tries to accept it with a target.
    let client = Initiator::new(false);
    let ordinary = client
        .ctx
        .create_qp(&attributes(1, &client.cq, DEPTH))
        .unwrap();
    let (other, others, second) = managed(&ordinary, &b.ctx);
    other.connect(&with_data(b"")).unwrap();
    let event = expect(&others[1], CmEventKind::ConnectRequest);
    assert_eq!(event.xrc, None);
    let another = b.target(false);
    event.id.set_queue_pair(Some(&another));
    assert!(event.id.accept(&with_data(b"")).is_err());
    for id in [&id, &request.id, &listener, &other, &event.id, &second] {
        id.destroy();
    }
    for qp in [&target, &another, &wrong, &ordinary, &a.qp] {
        qp.destroy();
    }
}
