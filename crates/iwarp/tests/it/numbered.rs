//! Tests of queue pairs connected by GID and number: in either order, to a peer that connects late
//! or never, and to themselves.

use crate::common::loopback::{attributes, device, gid};
use crate::common::words::{Mem, poll};
use iwarp::runtime::{CompletionQueue, Context, QpAttributes, QueuePair, Retry, State};
use iwarp::{Config, Device, Error};
use iwarp_rnic::{Cqe, RecvWr, SendFlags, SendOp, SendWr, WcStatus};
use std::time::{Duration, Instant};

const WAIT: Option<Duration> = Some(Duration::from_secs(10));

/// A queue pair that is connected by GID and number (ARCHITECTURE.md, "Queue pairs connected by GID
/// and number"), with its context, completion queue and memory.
struct Numbered {
    ctx: Context,
    cq: CompletionQueue,
    qp: QueuePair,
    mem: Mem,
}

impl Numbered {
    fn new(device: &Device) -> Self {
        Self::with(device, Config::default())
    }

    fn with(device: &Device, config: Config) -> Self {
        let ctx = Context::open(device, config).unwrap();
        let (pd, cq) = (ctx.allocate_pd(), ctx.create_cq(64, None).unwrap());
        let attributes = attributes(pd, &cq, 1);
        let qp = ctx.create_addressable_qp(&attributes).unwrap();
        qp.modify(State::Init).unwrap();
        let mem = Mem::new(&ctx, pd, 4096);
        Self { ctx, cq, qp, mem }
    }

    fn connect(&self, other: &Self) {
        self.qp.connect_peer(gid(), other.qp.num()).unwrap();
        self.qp.modify(State::Rts).unwrap();
    }

    /// Writes one word to the peer and waits for the completion.
    fn write(&self, peer: &Self, value: u64) -> Cqe {
        self.mem.fill(value);
        let op = SendOp::Write {
            remote_addr: peer.mem.addr(),
            rkey: peer.mem.stag,
        };
        let wr = SendWr {
            wr_id: value,
            op,
            flags: SendFlags::SIGNALED,
            sges: &[self.mem.sge(8)],
            inline: &[],
        };
        self.qp.post_send(&[wr]).unwrap();
        poll(&self.cq)
    }

    fn destroy(&self) {
        self.qp.destroy();
        self.ctx.deregister(self.mem.stag).unwrap();
    }
}

/// A queue pair is reachable by each GID of its device, because it listens on its port at each
/// address. It can also connect to itself.
#[test]
fn numbered_qp_reached_by_each_gid() {
    for address in &device().addresses {
        let [a, b] = numbered_pair();
        let gid = address.gid();
        for (me, other) in [(&a, &b), (&b, &a)] {
            me.qp.connect_peer_from(gid, gid, other.qp.num()).unwrap();
            me.qp.modify(State::Rts).unwrap();
        }
        assert_eq!(a.write(&b, 1).status, WcStatus::Success);
        let (local, peer) = a.qp.addresses().unwrap();
        assert_eq!([local.ip(), peer.ip()], [address.ip; 2]);
        a.destroy();
        b.destroy();
        for own in &device().addresses {
            let alone = Numbered::new(&device());
            let num = alone.qp.num();
            alone.qp.connect_peer_from(own.gid(), gid, num).unwrap();
            alone.qp.modify(State::Rts).unwrap();
            assert_eq!(alone.write(&alone, 1).status, WcStatus::Success);
            alone.destroy();
        }
    }
}

#[test]
fn foreign_gid_is_refused() {
    let [a, b] = numbered_pair();
    let foreign = "::ffff:192.0.2.1".parse::<std::net::Ipv6Addr>().unwrap();
    let refused = a.qp.connect_peer_from(foreign.octets(), gid(), b.qp.num());
    assert!(
        matches!(refused, Err(Error::InvalidArgument(_))),
        "{refused:?}"
    );
    a.destroy();
    b.destroy();
}

fn numbered_pair() -> [Numbered; 2] {
    [Numbered::new(&device()), Numbered::new(&device())]
}

/// Connects two queue pairs by number, in either order. Each end posts its requests directly after
/// its own `connect_peer`, so the first end posts before the second end connects.
fn by_number(client_first: bool) {
    let ends = numbered_pair();
    let (a, b) = if client_first { (0, 1) } else { (1, 0) };
    for (me, other) in [(a, b), (b, a)] {
        let me = &ends[me];
        me.qp
            .post_recv(&[RecvWr {
                wr_id: 3,
                sges: &[me.mem.sge(64)],
            }])
            .unwrap();
        me.connect(&ends[other]);
        let wr = SendWr::inline(4, &[b"by number"]).signaled();
        me.qp.post_send(&[wr]).unwrap();
    }
    for end in &ends {
        for _ in 0..2 {
            let cqe = poll(&end.cq);
            assert_eq!(cqe.status, WcStatus::Success, "{cqe:?}");
        }
        assert_eq!(end.qp.state(), State::Rts);
    }
    let gid = gid();
    assert!(
        ends[0].qp.connect_peer(gid, 7).is_ok(),
        "connect_peer fails on a connected queue pair"
    );
    for end in &ends {
        end.destroy();
    }
}

#[test]
fn numbered_writes_complete_when_placed() {
    let [a, b] = numbered_pair();
    a.connect(&b);
    b.connect(&a);
    for value in 1..200 {
        assert_eq!(a.write(&b, value).status, WcStatus::Success);
        assert_eq!(b.mem.word(0), value);
        assert_eq!(b.write(&a, value << 32).status, WcStatus::Success);
        assert_eq!(a.mem.word(0), value << 32);
    }
    a.destroy();
    b.destroy();
}

#[test]
fn numbered_qps_reconnect_after_reset() {
    let [a, b] = numbered_pair();
    a.connect(&b);
    b.connect(&a);
    for round in 1..30 {
        assert_eq!(a.write(&b, round).status, WcStatus::Success);
        assert_eq!(b.mem.word(0), round);
        // The peer refuses this Write. The request must complete with the status for the peer's
        // reason.
        let wrong = SendWr {
            wr_id: 1000,
            op: SendOp::Write {
                remote_addr: b.mem.addr(),
                rkey: b.mem.stag ^ 1,
            },
            flags: SendFlags::SIGNALED,
            sges: &[a.mem.sge(8)],
            inline: &[],
        };
        a.qp.post_recv(&[RecvWr {
            wr_id: 9,
            sges: &[],
        }])
        .unwrap();
        a.qp.post_send(&[wrong]).unwrap();
        let cqe = poll(&a.cq);
        assert_eq!((cqe.wr_id, cqe.status), (1000, WcStatus::RemoteAccess));
        // The flushed receive is not polled. The reset must remove its completion, which the next
        // round would find.
        for (me, other) in [(&b, &a), (&a, &b)] {
            me.qp.modify(State::Reset).unwrap();
            me.qp.modify(State::Init).unwrap();
            me.connect(other);
        }
    }
    a.destroy();
    b.destroy();
}

#[test]
fn queue_pairs_connect_by_number() {
    by_number(true);
    by_number(false);
}

#[test]
fn idle_numbered_qp_ignores_peer_end() {
    let [a, b] = numbered_pair();
    let receive = [RecvWr {
        wr_id: 3,
        sges: &[b.mem.sge(64)],
    }];
    b.qp.post_recv(&receive).unwrap();
    b.qp.post_recv(&receive).unwrap();
    // An idle queue pair does not notice the end of its peer, even with a short timeout.
    let impatient = Retry {
        timeout: 1,
        retry_cnt: 0,
        ..Retry::default()
    };
    b.qp.set_retry(impatient).unwrap();
    a.connect(&b);
    b.connect(&a);
    let wr = SendWr::inline(4, &[b"the last word"]).signaled();
    a.qp.post_send(&[wr]).unwrap();
    assert_eq!(poll(&a.cq).status, WcStatus::Success);
    a.destroy();
    assert_eq!(poll(&b.cq).status, WcStatus::Success);
    // Polling reads the end of the stream.
    let end = Instant::now() + Duration::from_millis(300);
    let mut out = [Cqe::default()];
    while Instant::now() < end {
        assert_eq!(b.cq.poll(&mut out).unwrap(), 0, "{:?}", out[0]);
    }
    assert_eq!(b.qp.state(), State::Rts);
    // The next request fails, and the posted receive is flushed.
    let wr = SendWr::inline(5, &[b"no receiver"]).signaled();
    b.qp.post_send(&[wr]).unwrap();
    let mut failed: Vec<u64> = (0..2)
        .map(|_| {
            let cqe = poll(&b.cq);
            assert_ne!(cqe.status, WcStatus::Success, "{cqe:?}");
            cqe.wr_id
        })
        .collect();
    failed.sort_unstable();
    assert_eq!(failed, [3, 5]);
    assert_eq!(b.qp.state(), State::Error);
    b.destroy();
}

/// Waits for the completions of these requests, in any order, and returns their statuses in the
/// order given.
fn statuses<const N: usize>(cq: &CompletionQueue, ids: [u64; N]) -> [WcStatus; N] {
    let cqes: Vec<Cqe> = (0..N).map(|_| poll(cq)).collect();
    ids.map(|id| {
        let found = cqes.iter().find(|cqe| cqe.wr_id == id);
        found.unwrap_or_else(|| panic!("{id}: {cqes:?}")).status
    })
}

#[test]
fn self_connection_repeats() {
    for (markers, crc) in [(false, true), (true, true), (false, false)] {
        let mut config = Config::default();
        (config.markers, config.crc) = (markers, crc);
        let a = Numbered::with(&device(), config);
        for round in 1..20u64 {
            a.connect(&a);
            a.qp.post_recv(&[RecvWr {
                wr_id: 3,
                sges: &[a.mem.sge(64)],
            }])
            .unwrap();
            let octets = round.to_ne_bytes();
            let pieces: [&[u8]; 1] = [&octets];
            let wr = SendWr::inline(4, &pieces).signaled();
            a.qp.post_send(&[wr]).unwrap();
            assert_eq!(statuses(&a.cq, [3, 4]), [WcStatus::Success; 2]);
            assert_eq!(a.mem.word(0), round);
            assert_eq!(a.write(&a, round << 32).status, WcStatus::Success);
            a.qp.modify(State::Reset).unwrap();
            a.qp.modify(State::Init).unwrap();
        }
        a.destroy();
    }
}

#[test]
fn absent_peer_times_out_on_schedule() {
    let [a, b] = numbered_pair();
    let retry = |timeout| Retry {
        timeout,
        ..Retry::default()
    };
    // The configured limit is 0.54 s, so the minimum of two seconds applies.
    a.qp.set_retry(retry(14)).unwrap();
    a.connect(&b);
    let start = Instant::now();
    for wr_id in 1..3 {
        let wr = SendWr::inline(wr_id, &[b"no receiver"]).signaled();
        a.qp.post_send(&[wr]).unwrap();
    }
    let failed = [WcStatus::TransportRetryExceeded, WcStatus::Flushed];
    assert_eq!(statuses(&a.cq, [1, 2]), failed);
    assert!(start.elapsed() >= Duration::from_secs(2));
    assert_eq!(a.qp.state(), State::Error);
    // The late peer finds no queue pair. After a reset, the queue pair finds the late peer.
    b.qp.set_retry(retry(0)).unwrap();
    b.connect(&a);
    let wr = SendWr::inline(3, &[b"in a while"]).signaled();
    b.qp.post_send(&[wr]).unwrap();
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(b.cq.poll(&mut [Cqe::default()]).unwrap(), 0);
    a.qp.modify(State::Reset).unwrap();
    a.qp.modify(State::Init).unwrap();
    a.qp.post_recv(&[RecvWr {
        wr_id: 4,
        sges: &[a.mem.sge(64)],
    }])
    .unwrap();
    a.connect(&b);
    assert_eq!(poll(&a.cq).status, WcStatus::Success);
    assert_eq!(poll(&b.cq).status, WcStatus::Success);
    a.destroy();
    b.destroy();
}

#[test]
fn new_limit_applies_to_waiting_requests() {
    let retry = |timeout| Retry {
        timeout,
        ..Retry::default()
    };
    // The earlier limit of `patient` was shorter and would have expired first. Its new limit
    // expires half a minute after those of the others.
    let [patient, a, b] = [(); 3].map(|()| Numbered::new(&device()));
    for (from, first, then) in [
        (&patient, Retry::default(), retry(20)),
        (&a, retry(0), Retry::default()),
    ] {
        from.qp.set_retry(first).unwrap();
        assert_eq!(from.qp.retry(), first);
        from.connect(&b);
        let wr = SendWr::inline(1, &[b"no receiver"]).signaled();
        from.qp.post_send(&[wr]).unwrap();
        from.qp.set_retry(then).unwrap();
        assert_eq!(from.qp.retry(), then);
    }
    let failed = poll(&a.cq);
    assert_eq!(failed.status, WcStatus::TransportRetryExceeded);
    assert_eq!(patient.cq.poll(&mut [Cqe::default()]), Ok(0));
    for one in [patient, a, b] {
        one.destroy();
    }
}

/// Each port has 256 queue pair numbers. The numbers of destroyed queue pairs are reused.
#[test]
fn numbers_of_a_port_are_reused() {
    let ctx = Context::open(&device(), Config::default()).unwrap();
    let (pd, cq) = (ctx.allocate_pd(), ctx.create_cq(1, None).unwrap());
    let make = || ctx.create_addressable_qp(&attributes(pd, &cq, 1)).unwrap();
    let first = make();
    let port = first.num() & 0xffff;
    for _ in 0..300 {
        let qp = make();
        assert_eq!(qp.num() & 0xffff, port);
        qp.destroy();
    }
    // When the last queue pair of a port is destroyed, its listener is closed.
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], port as u16));
    assert!(std::net::TcpListener::bind(address).is_err());
    first.destroy();
    // Another test may use the port for a moment.
    let end = Instant::now() + WAIT.unwrap();
    while std::net::TcpListener::bind(address).is_err() {
        assert!(Instant::now() < end, "the port is not free");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waiting for a peer does not keep a dropped queue pair, its device or its number in use.
#[test]
fn waiting_qp_is_not_kept_alive() {
    let a = Numbered::new(&device());
    let Numbered { ctx, cq, qp, mem } = a;
    let num = qp.num();
    qp.connect_peer(gid(), num ^ 1 << 23).unwrap();
    drop((qp, cq));
    let end = Instant::now() + WAIT.unwrap();
    while ctx.queue_pair(num).is_some() {
        assert!(Instant::now() < end, "the queue pair still exists");
        std::thread::sleep(Duration::from_millis(1));
    }
    ctx.deregister(mem.stag).unwrap();
}

#[test]
fn invalid_peer_or_timeout_is_refused() {
    let a = Numbered::new(&device());
    for gid in ["::", "::ffff:0.0.0.0", "ff02::1", "::ffff:224.0.0.1"] {
        let gid: std::net::Ipv6Addr = gid.parse().unwrap();
        let refused = a.qp.connect_peer(gid.octets(), 7);
        assert!(matches!(refused, Err(Error::InvalidArgument(_))), "{gid}");
    }
    let refused = a.qp.set_retry(Retry {
        timeout: 32,
        ..Retry::default()
    });
    assert!(matches!(refused, Err(Error::InvalidArgument(_))));
    assert_eq!(a.qp.state(), State::Init);
    a.destroy();
}

/// A queue pair that holds a Send does not read from the socket. It notices the peer's end by a
/// reset.
#[test]
fn peer_reset_gives_retry_exceeded() {
    let [a, b] = numbered_pair();
    a.connect(&b);
    b.connect(&a);
    for end in [&a, &b] {
        let wr = SendWr::inline(4, &[b"held"]).signaled();
        end.qp.post_send(&[wr]).unwrap();
    }
    let end = Instant::now() + WAIT.unwrap();
    while [&a, &b].map(|e| e.qp.counters().receiver_not_ready) != [1, 1] {
        assert!(Instant::now() < end, "the Sends are not held");
        std::thread::sleep(Duration::from_millis(1));
    }
    b.qp.abort();
    let cqe = poll(&a.cq);
    let unanswered = WcStatus::TransportRetryExceeded;
    assert_eq!((cqe.wr_id, cqe.status), (4, unanswered));
    assert_eq!(a.qp.state(), State::Error);
    a.destroy();
    b.destroy();
}

/// A program may destroy its queue pair as soon as it has received the last message, and notify the
/// peer by other means. On InfiniBand the sender's request is complete then.
#[test]
fn arrived_message_completes_after_receiver_ends() {
    type End = fn(&QueuePair);
    let ends: [End; 3] = [
        QueuePair::destroy,
        |qp| qp.modify(State::Error).unwrap(),
        |qp| qp.modify(State::Reset).unwrap(),
    ];
    for round in 0..90 {
        let [a, b] = numbered_pair();
        let receive = RecvWr {
            wr_id: 1,
            sges: &[b.mem.sge(64)],
        };
        b.qp.post_recv(&[receive]).unwrap();
        a.connect(&b);
        b.connect(&a);
        let sender_leaves = round % 2 == 0;
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let cqe = poll(&b.cq);
                ends[round % ends.len()](&b.qp);
                tell.send(()).unwrap();
                assert_eq!((cqe.wr_id, cqe.status), (1, WcStatus::Success));
            });
            let wr = SendWr::inline(2, &[b"the last word"]).signaled();
            a.qp.post_send(&[wr]).unwrap();
            told.recv().unwrap();
            if sender_leaves {
                a.qp.modify(State::Error).unwrap();
            }
            let cqe = poll(&a.cq);
            assert_eq!(
                (cqe.wr_id, cqe.status),
                (2, WcStatus::Success),
                "round {round}"
            );
        });
        a.destroy();
        b.destroy();
    }
}

/// On an unreliable queue pair a message without a receive is dropped, and the next message is
/// delivered.
#[test]
fn unreliable_qp_drops_without_receive() {
    let [a, b] = [(); 2].map(|()| {
        let ctx = Context::open(&device(), Config::default()).unwrap();
        let (pd, cq) = (ctx.allocate_pd(), ctx.create_cq(64, None).unwrap());
        let attributes = QpAttributes {
            unreliable: true,
            ..attributes(pd, &cq, 1)
        };
        let qp = ctx.create_addressable_qp(&attributes).unwrap();
        qp.modify(State::Init).unwrap();
        let mem = Mem::new(&ctx, pd, 4096);
        Numbered { ctx, cq, qp, mem }
    });
    a.connect(&b);
    b.connect(&a);
    let send = |wr_id, text: &str| {
        let inline = [text.as_bytes()];
        let wr = SendWr::inline(wr_id, &inline).signaled();
        a.qp.post_send(&[wr]).unwrap();
        assert_eq!(poll(&a.cq).status, WcStatus::Success);
    };
    send(1, "lost");
    // The Write that follows is placed, so the message was dropped.
    assert_eq!(a.write(&b, 77).status, WcStatus::Success);
    let begin = Instant::now();
    while b.mem.word(0) != 77 {
        assert!(
            begin.elapsed() < Duration::from_secs(20),
            "no datagram arrives"
        );
        assert_eq!(b.cq.poll(&mut [Cqe::default()]), Ok(0));
    }
    b.qp.post_recv(&[RecvWr {
        wr_id: 2,
        sges: &[b.mem.sge(64)],
    }])
    .unwrap();
    send(3, "arrives!");
    let received = poll(&b.cq);
    assert_eq!((received.wr_id, received.byte_len), (2, 8));
    assert_eq!(b.mem.word(0).to_ne_bytes(), *b"arrives!");
    a.destroy();
    b.destroy();
}
