//! Tests of datagram queue pairs of `iwarp::runtime`, over loopback in one process: delivery,
//! drops, and packets of other senders.

mod counts;
mod groups;

use iwarp::runtime::{
    AsyncEventKind, CompletionQueue, Context, SharedReceiveQueue, State, UdAddress, UdAttributes,
    UdEvent, UdQueuePair, UdSendWr,
};
use iwarp::{Config, Device};
use iwarp_proto::crc32c::append;
use iwarp_proto::datagram::{HEADER_LEN, Header, MULTICAST_QP, PAYLOAD_MAX};
use iwarp_rnic::{Access, Cqe, PostError, RecvWr, SendFlags, Sge, WcFlags, WcOpcode, WcStatus};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

const GRH: usize = 40;
const QKEY: u32 = 0x1111_1111;
const TIMEOUT: Duration = Duration::from_secs(10);

/// A queue pair with memory for its messages.
struct End {
    ctx: Context,
    cq: CompletionQueue,
    qp: UdQueuePair,
    memory: Box<[u8]>,
    lkey: u32,
    /// The address to which tests send.
    gid: [u8; 16],
}

const SLOT: usize = GRH + PAYLOAD_MAX;
const SLOTS: usize = 64;

fn context(ip: &str) -> Context {
    let device = Device::by_address(ip.parse().unwrap()).unwrap();
    Context::open(&device, Config::default()).unwrap()
}

fn gid(ip: &str) -> [u8; 16] {
    match ip.parse().unwrap() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

fn attributes(pd: u32, cq: &CompletionQueue) -> UdAttributes {
    UdAttributes {
        pd,
        send_cq: cq.clone(),
        recv_cq: cq.clone(),
        srq: None,
        max_send_wr: 64,
        max_recv_wr: 64,
        max_send_sge: 3,
        max_recv_sge: 3,
        max_inline: 64,
        signal_all: false,
    }
}

impl End {
    fn on(ctx: &Context, srq: Option<SharedReceiveQueue>) -> Self {
        let ctx = ctx.clone();
        let pd = srq
            .as_ref()
            .map_or_else(|| ctx.allocate_pd(), SharedReceiveQueue::pd);
        let cq = ctx.create_cq(256, None).unwrap();
        let qp = ctx
            .create_ud_qp(&UdAttributes {
                srq,
                ..attributes(pd, &cq)
            })
            .unwrap();
        qp.set_qkey(QKEY);
        for to in [State::Init, State::Rtr, State::Rts] {
            qp.modify(to).unwrap();
        }
        let memory = vec![0xa5u8; SLOT * SLOTS].into_boxed_slice();
        let addr = memory.as_ptr() as u64;
        // SAFETY: the memory is valid until the end of the test, and is read only after
        // completions.
        let lkey =
            unsafe { ctx.register(addr, memory.len() as u64, addr, pd, Access::LOCAL_WRITE) }
                .unwrap();
        Self {
            ctx,
            cq,
            qp,
            memory,
            lkey,
            gid: gid("127.0.0.1"),
        }
    }

    fn new(ip: &str) -> Self {
        let gid = gid(ip);
        Self {
            gid,
            ..Self::on(&context(ip), None)
        }
    }

    /// Returns an address handle for datagrams to this end from the same address.
    fn address(&self) -> UdAddress {
        UdAddress::new(self.gid, self.gid, 0, 0).unwrap()
    }

    fn sge(&self, slot: usize, offset: usize, len: usize) -> Sge {
        Sge {
            addr: self.memory.as_ptr() as u64 + (slot * SLOT + offset) as u64,
            len: len as u32,
            lkey: self.lkey,
        }
    }

    fn octets(&self, slot: usize, len: usize) -> Vec<u8> {
        (0..len)
            // SAFETY: the test owns the memory. The RNIC writes to it only before a receive
            // completes.
            .map(|i| unsafe { self.memory.as_ptr().add(slot * SLOT + i).read_volatile() })
            .collect()
    }

    fn fill(&self, slot: usize, octets: &[u8]) {
        for (i, octet) in octets.iter().enumerate() {
            let start = self.memory.as_ptr().cast_mut();
            // SAFETY: the test owns the memory, and no receive is pending.
            unsafe { start.add(slot * SLOT + i).write_volatile(*octet) };
        }
    }

    /// Posts a receive for `payload` octets into a slot.
    fn receive(&self, slot: usize, payload: usize) {
        let sges = [self.sge(slot, 0, GRH + payload)];
        let wr = RecvWr {
            wr_id: slot as u64,
            sges: &sges,
        };
        self.qp.post_recv(&[wr]).unwrap();
    }

    fn send_to(&self, to: &Self, octets: &[u8]) {
        let pieces = [octets];
        self.qp.post_send(&[request(to, &pieces)]).unwrap();
    }

    fn poll(&self) -> Option<Cqe> {
        let mut cqe = [Cqe::default()];
        (self.cq.poll(&mut cqe).unwrap() == 1).then_some(cqe[0])
    }

    fn next(&self) -> Cqe {
        let start = Instant::now();
        loop {
            if let Some(cqe) = self.poll() {
                return cqe;
            }
            assert!(start.elapsed() < TIMEOUT, "no completion");
        }
    }

    /// Polls until `done` returns `true`. No request may complete until then.
    fn poll_until(&self, done: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !done(self) {
            assert_eq!(self.poll(), None);
            assert!(start.elapsed() < TIMEOUT, "{:?}", self.qp.drops());
        }
    }
}

fn request<'a>(to: &End, pieces: &'a [&'a [u8]]) -> UdSendWr<'a> {
    UdSendWr {
        wr_id: 100,
        immediate: None,
        flags: SendFlags::INLINE,
        to: to.address(),
        remote_qp: to.qp.num(),
        remote_qkey: QKEY,
        sges: &[],
        inline: pieces,
    }
}

#[test]
fn datagram_has_its_sender() {
    for ip in ["127.0.0.1", "::1"] {
        let (a, b) = (End::new(ip), End::new(ip));
        let text: Vec<u8> = (0..PAYLOAD_MAX).map(|i| (i * 7) as u8).collect();
        a.fill(0, &text);
        // Both ends have several elements, with different lengths.
        let from = [a.sge(0, 0, 1), a.sge(0, 1, 4000), a.sge(0, 4001, 95)];
        let into = [
            b.sge(1, 0, 10),
            b.sge(1, 10, 100),
            b.sge(1, 110, SLOT - 110),
        ];
        let recv = RecvWr {
            wr_id: 7,
            sges: &into,
        };
        b.qp.post_recv(&[recv]).unwrap();
        let wr = UdSendWr {
            immediate: Some(0xaabb_ccdd),
            flags: SendFlags::SIGNALED | SendFlags::SOLICITED,
            sges: &from,
            ..request(&b, &[])
        };
        a.qp.post_send(&[wr]).unwrap();
        let sent = a.next();
        assert_eq!((sent.wr_id, sent.status), (100, WcStatus::Success));
        assert_eq!((sent.qp_num, sent.opcode), (a.qp.num(), WcOpcode::Send));
        let got = b.next();
        assert_eq!((got.wr_id, got.status), (7, WcStatus::Success));
        assert_eq!((got.qp_num, got.opcode), (b.qp.num(), WcOpcode::Recv));
        assert_eq!(got.byte_len as usize, SLOT);
        assert_eq!((got.src_qp(), got.imm_or_stag), (a.qp.num(), 0xaabb_ccdd));
        let ip: IpAddr = ip.parse().unwrap();
        let mut flags = WcFlags::GRH | WcFlags::WITH_IMM | WcFlags::SOLICITED;
        flags.set(WcFlags::IPV4, ip.is_ipv4());
        assert_eq!(got.flags, flags);
        let octets = b.octets(1, SLOT);
        assert_eq!(octets[GRH..], text);
        match ip {
            IpAddr::V4(_) => assert_eq!(octets[32..40], [127, 0, 0, 1, 127, 0, 0, 1]),
            IpAddr::V6(_) => assert_eq!(octets[8..24], a.gid),
        }
        let counters = (a.qp.counters(), b.qp.counters());
        assert_eq!(counters.0.tx_payload, PAYLOAD_MAX as u64);
        assert_eq!(counters.1.rx_payload, PAYLOAD_MAX as u64);
        assert_eq!(counters.0.tx_bytes, counters.1.rx_bytes);
    }
}

#[test]
fn only_right_qkey_is_accepted() {
    let (a, b) = (End::new("127.0.0.1"), End::new("127.0.0.1"));
    b.receive(0, 100);
    let pieces: [&[u8]; 1] = [b"hello"];
    let mut wr = request(&b, &pieces);
    wr.remote_qkey = QKEY + 1;
    a.qp.post_send(&[wr]).unwrap();
    b.poll_until(|b| b.qp.drops().qkey == 1);
    // A Q_Key with its highest bit set selects the sender's own Q_Key.
    a.qp.set_qkey(0x77);
    b.qp.set_qkey(0x77);
    wr.remote_qkey = 0x8000_0000;
    a.qp.post_send(&[wr]).unwrap();
    assert_eq!(b.next().byte_len as usize, GRH + 5);
}

#[test]
fn datagram_without_fitting_receive_is_dropped() {
    let (a, b) = (End::new("127.0.0.1"), End::new("127.0.0.1"));
    a.send_to(&b, b"nothing is posted");
    b.poll_until(|b| b.qp.drops().no_receive == 1);
    b.receive(3, 4);
    a.send_to(&b, b"five!");
    b.poll_until(|b| b.qp.drops().too_long == 1);
    assert_eq!(b.octets(3, GRH + 5), [0xa5; GRH + 5], "nothing is written");
    a.send_to(&b, b"four");
    assert_eq!(
        (b.next().wr_id, b.octets(3, 44)[GRH..].to_vec()),
        (3, b"four".to_vec())
    );
}

/// A plain UDP socket that writes datagrams of our format to `to`.
struct Stranger {
    socket: UdpSocket,
    to: SocketAddr,
    /// The header of a datagram that the receiver accepts.
    good: Header,
}

impl Stranger {
    fn new(to: &End) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let port = socket.local_addr().unwrap().port();
        Self {
            socket,
            to: ([127, 0, 0, 1], to.qp.num() as u16).into(),
            good: Header {
                destination: to.qp.num(),
                source: 0x70000 | u32::from(port),
                qkey: QKEY,
                immediate: None,
                solicited: false,
                sequence: 5,
            },
        }
    }

    /// Sends a datagram with a correct CRC that `spoil` has then changed.
    fn send_spoiled(&self, header: Header, spoil: impl Fn(&mut Vec<u8>)) {
        let mut datagram = vec![0x77; HEADER_LEN + 9];
        header.seal(append, &mut datagram).unwrap();
        spoil(&mut datagram);
        self.socket.send_to(&datagram, self.to).unwrap();
    }

    fn send(&self, header: Header) {
        self.send_spoiled(header, |_| {});
    }
}

#[test]
fn strangers_datagrams_are_ignored() {
    let b = End::new("127.0.0.1");
    b.receive(0, 1000);
    let stranger = Stranger::new(&b);
    let good = stranger.good;
    stranger.send_spoiled(good, |d| d[40] ^= 1);
    stranger.send_spoiled(good, |d| d[0] = 0);
    stranger.send_spoiled(good, |d| d.truncate(3));
    stranger.send_spoiled(good, |d| d.resize(60_000, 0));
    let other_high = b.qp.num() ^ 0x10000;
    for destination in [other_high, MULTICAST_QP] {
        stranger.send(Header {
            destination,
            ..good
        });
    }
    let source = good.source ^ 1;
    stranger.send(Header { source, ..good });
    stranger.send(Header { qkey: 0, ..good });
    b.poll_until(|b| {
        let d = b.qp.drops();
        (d.crc, d.foreign, d.qkey) == (1, 6, 1)
    });
    assert_eq!(b.octets(0, SLOT), [0xa5; SLOT]);
}

#[test]
fn repeated_datagram_is_delivered_once() {
    let b = End::new("127.0.0.1");
    let stranger = Stranger::new(&b);
    let good = stranger.good;
    b.receive(0, 1000);
    b.receive(1, 1000);
    for _ in 0..3 {
        stranger.send(good);
    }
    assert_eq!(b.next().src_qp(), good.source);
    b.poll_until(|b| b.qp.drops().copies == 2);
    let sequence = good.sequence + 1;
    stranger.send(Header { sequence, ..good });
    assert_eq!(b.next().wr_id, 1);
    // After a reset another queue pair may have this sender's number, with a different sequence.
    for to in [State::Reset, State::Init, State::Rtr, State::Rts] {
        b.qp.modify(to).unwrap();
    }
    b.receive(2, 1000);
    stranger.send(good);
    assert_eq!(b.next().wr_id, 2);
}

#[test]
fn bad_send_stops_only_sends() {
    let (a, b) = (End::new("127.0.0.1"), End::new("127.0.0.1"));
    (0..3).for_each(|slot| b.receive(slot, 100));
    (0..3).for_each(|slot| a.receive(slot, 100));
    let pieces: [&[u8]; 1] = [b"in front"];
    let front = request(&b, &pieces);
    let bad_key = [Sge {
        lkey: a.lkey ^ 0x100,
        ..a.sge(0, 0, 4)
    }];
    let long = [a.sge(0, 0, PAYLOAD_MAX), a.sge(2, 0, 1)];
    for (sges, status) in [
        (&bad_key[..], WcStatus::LocalProtection),
        (&long[..], WcStatus::LocalLength),
    ] {
        let bad = UdSendWr {
            wr_id: 1,
            flags: SendFlags::empty(),
            sges,
            ..request(&b, &[])
        };
        let behind = UdSendWr { wr_id: 2, ..front };
        a.qp.post_send(&[front, bad, behind]).unwrap();
        let got: Vec<_> = (0..2)
            .map(|_| a.next())
            .map(|c| (c.wr_id, c.status))
            .collect();
        assert_eq!(got, [(1, status), (2, WcStatus::Flushed)]);
        assert_eq!(
            b.next().byte_len as usize,
            GRH + 8,
            "earlier requests are sent"
        );
        assert_eq!(a.qp.state(), State::Sqe);
        a.qp.post_send(&[behind]).unwrap();
        assert_eq!(a.next().status, WcStatus::Flushed);
        b.send_to(&a, b"meanwhile");
        assert_eq!(
            a.next().status,
            WcStatus::Success,
            "the queue pair still receives"
        );
        a.qp.modify(State::Rts).unwrap();
    }
    // Receives are unaffected.
    b.send_to(&a, b"still here");
    assert_eq!(a.next().status, WcStatus::Success);
}

#[test]
fn foreign_receive_memory_ends_qp() {
    let (a, b) = (End::new("127.0.0.1"), End::new("127.0.0.1"));
    let other = b.ctx.allocate_pd();
    let addr = b.memory.as_ptr() as u64;
    // SAFETY: as in `End::on`.
    let foreign = unsafe { b.ctx.register(addr, 4096, addr, other, Access::LOCAL_WRITE) }.unwrap();
    let sges = [
        b.sge(1, 0, GRH),
        Sge {
            lkey: foreign,
            ..b.sge(0, 0, 50)
        },
    ];
    let wr = RecvWr {
        wr_id: 1,
        sges: &sges,
    };
    b.qp.post_recv(&[wr]).unwrap();
    b.receive(2, 10);
    a.send_to(&b, b"hello");
    let got: Vec<_> = (0..2)
        .map(|_| b.next())
        .map(|c| (c.wr_id, c.status))
        .collect();
    assert_eq!(
        got,
        [(1, WcStatus::LocalProtection), (2, WcStatus::Flushed)]
    );
    assert_eq!(b.qp.state(), State::Error);
    assert_eq!(
        b.octets(1, GRH),
        [0xa5; GRH],
        "nothing is written, because all elements are checked first"
    );
}

#[test]
fn qps_share_srq_with_limit_event() {
    let ctx = context("127.0.0.1");
    let srq = ctx.create_srq(ctx.allocate_pd(), 8, 1).unwrap();
    let (a, b) = (
        End::on(&ctx, Some(srq.clone())),
        End::on(&ctx, Some(srq.clone())),
    );
    let c = End::on(&ctx, None);
    let sges = [a.sge(0, 0, 100)];
    for wr_id in 0..3 {
        srq.post(&[RecvWr { wr_id, sges: &sges }]).unwrap();
    }
    srq.set_limit(2).unwrap();
    c.send_to(&a, b"to a");
    assert_eq!((a.next().wr_id, srq.len()), (0, 2));
    c.send_to(&b, b"to b");
    assert_eq!((b.next().wr_id, srq.len()), (1, 1));
    let event = ctx.async_event(Some(TIMEOUT)).unwrap();
    assert!(matches!(event.kind, AsyncEventKind::SrqLimitReached(of) if of.is_same(&srq)));
    // Each queue pair reports LAST_WQE_REACHED once.
    for qp in [&a.qp, &b.qp] {
        qp.modify(State::Error).unwrap();
        let event = ctx.try_async_event().unwrap().kind;
        assert!(
            matches!(
                &event,
                AsyncEventKind::Datagram(of, UdEvent::LastWqeReached)
                    if qp.is_subject(of)
            ),
            "{event:?}"
        );
        qp.modify(State::Error).unwrap();
        assert!(ctx.try_async_event().is_none());
    }
}

#[test]
fn fitting_list_is_accepted_whole() {
    let (a, b) = (End::new("127.0.0.1"), End::new("127.0.0.1"));
    // Nothing is sent, so the queue stays full.
    a.qp.modify(State::Sqd).unwrap();
    let all = [request(&b, &[]); 65];
    let refused = |list: &[UdSendWr<'_>]| {
        let failed = a.qp.post_send_all(list).unwrap_err();
        assert!(matches!(
            failed.error(),
            iwarp::Error::Post(PostError::QueueFull)
        ));
        failed.accepted()
    };
    assert_eq!(refused(&all), 64);
    a.qp.post_send_all(&all[..63]).unwrap();
    assert_eq!(refused(&all[..2]), 1);
    a.qp.post_send_all(&all[..1]).unwrap();
    assert_eq!(refused(&all[..1]), 0);
}

/// The queue accepts as many requests as it has room for. A slot is in use until its completion is
/// polled.
#[test]
fn longer_lists_fill_the_queue() {
    for state in [State::Rts, State::Sqd] {
        let (a, b) = (End::new("127.0.0.1"), End::new("127.0.0.1"));
        // The index of a refused request is relative to the list.
        let mut list = [request(&b, &[]); 70];
        list[6].to = UdAddress::new(gid("192.0.2.1"), b.gid, 0, 0).unwrap();
        assert_eq!(a.qp.post_send(&list).unwrap_err().accepted(), 6);
        assert_eq!(a.qp.counters().tx_messages, 6);
        a.qp.modify(state).unwrap();
        let refused = |list: &[UdSendWr<'_>]| {
            let failed = a.qp.post_send(list).unwrap_err();
            assert!(matches!(
                failed.error(),
                iwarp::Error::Post(PostError::QueueFull)
            ));
            failed.accepted()
        };
        assert_eq!(refused(&[request(&b, &[]); 70]), 58);
        assert_eq!(refused(&[request(&b, &[])]), 0);
        // In SQD nothing is sent.
        let sent = if state == State::Rts { 64 } else { 6 };
        assert_eq!(a.qp.counters().tx_messages, sent);
    }
}

#[test]
fn unready_qp_drops_datagrams() {
    let (a, b) = (End::new("127.0.0.1"), End::new("127.0.0.1"));
    for to in [State::Reset, State::Init] {
        b.qp.modify(to).unwrap();
    }
    b.receive(0, 100);
    for count in 1..4 {
        a.send_to(&b, b"too early");
        b.poll_until(|b| b.qp.drops().state == count);
    }
    b.qp.modify(State::Rtr).unwrap();
    a.send_to(&b, b"in time");
    assert_eq!(b.next().byte_len as usize, GRH + 7);
}

/// A queue pair receives at each address of its device.
#[test]
fn qp_is_reached_at_each_address() {
    let (a, b) = (End::new("127.0.0.1"), End::new("127.0.0.1"));
    let own = [gid("127.0.0.1"), gid("::1")];
    // Consecutive requests use different sockets.
    let order = [0, 1, 1, 0, 1, 0, 0, 1];
    for slot in 0..order.len() {
        b.receive(slot, 100);
    }
    let pieces: [&[u8]; 1] = [b"here"];
    let wrs = order.map(|index: usize| UdSendWr {
        to: UdAddress::new(own[index], own[index], 0, 0).unwrap(),
        ..request(&b, &pieces)
    });
    a.qp.post_send(&wrs).unwrap();
    let mut received = [0; 2];
    for _ in order {
        let got = b.next();
        assert_eq!((got.status, got.byte_len), (WcStatus::Success, 44));
        let octets = b.octets(got.wr_id as usize, GRH + 4);
        // The header has the source and the destination address.
        let v6 = usize::from(octets[0] >> 4 == 6);
        match v6 {
            0 => assert_eq!(octets[32..40], [127, 0, 0, 1, 127, 0, 0, 1]),
            _ => assert_eq!([&octets[8..24], &octets[24..40]], [own[1], own[1]]),
        }
        received[v6] += 1;
    }
    assert_eq!(received, [4, 4]);
}

/// A loopback address cannot send to other networks. The request completes even so, and later
/// requests are sent.
#[test]
fn unsendable_datagram_is_lost_alone() {
    let (a, b) = (End::new("127.0.0.1"), End::new("127.0.0.1"));
    b.receive(0, 100);
    b.receive(1, 100);
    let pieces: [&[u8]; 1] = [b"good"];
    let good = UdSendWr {
        flags: SendFlags::INLINE | SendFlags::SIGNALED,
        ..request(&b, &pieces)
    };
    let bad = UdSendWr {
        to: UdAddress::new(a.gid, gid("192.0.2.1"), 0, 0).unwrap(),
        ..good
    };
    let before = a.qp.sequence();
    a.qp.post_send(&[good, bad, good]).unwrap();
    for _ in 0..3 {
        assert_eq!(a.next().status, WcStatus::Success);
    }
    for _ in 0..2 {
        assert_eq!(b.next().byte_len as usize, GRH + 4);
    }
    assert_eq!(a.qp.drops().unsent, 1);
    // The sequence numbers are unique, because a datagram with the number of another would be
    // dropped as a duplicate.
    assert_eq!(a.qp.sequence().wrapping_sub(before), 3);
}

#[test]
fn foreign_source_address_is_refused() {
    let (a, b) = (End::new("127.0.0.1"), End::new("127.0.0.1"));
    let pieces: [&[u8]; 1] = [b"no"];
    let good = request(&b, &pieces);
    let bad = UdSendWr {
        to: UdAddress::new(gid("192.0.2.1"), b.gid, 0, 0).unwrap(),
        ..good
    };
    b.receive(0, 100);
    b.receive(1, 100);
    let failed = a.qp.post_send(&[good, bad, good]).unwrap_err();
    assert!(matches!(
        (failed.accepted(), failed.error()),
        (1, iwarp::Error::Post(PostError::InvalidRequest))
    ));
    let refused = a.qp.post_send_all(&[good, bad]).unwrap_err();
    assert_eq!(refused.accepted(), 1);
    // The request before the refused one was sent. Of the refused `post_send_all`, none was sent.
    assert_eq!(b.next().byte_len as usize, GRH + 2);
    a.send_to(&b, b"last");
    assert_eq!(b.next().byte_len as usize, GRH + 4);
}

#[test]
fn states_are_those_of_the_verbs() {
    let ctx = context("127.0.0.1");
    let (pd, cq) = (ctx.allocate_pd(), ctx.create_cq(16, None).unwrap());
    let recv_cq = ctx.create_cq(16, None).unwrap();
    let mut attributes = attributes(pd, &cq);
    attributes.recv_cq = recv_cq.clone();
    let qp = ctx.create_ud_qp(&attributes).unwrap();
    let peer = End::on(&ctx, None);
    let pieces: [&[u8]; 1] = [b"hello"];
    let wr = request(&peer, &pieces);
    let recv = RecvWr {
        wr_id: 5,
        sges: &[],
    };
    assert!(qp.post_recv(&[recv]).is_err(), "RESET");
    assert!(qp.modify(State::Rtr).is_err(), "not from RESET");
    qp.modify(State::Init).unwrap();
    qp.post_recv(&[recv]).unwrap();
    assert!(qp.post_send(&[wr]).is_err(), "INIT");
    qp.modify(State::Rtr).unwrap();
    qp.modify(State::Rts).unwrap();
    qp.modify(State::Sqd).unwrap();
    let event = ctx.async_event(Some(TIMEOUT)).unwrap().kind;
    assert!(matches!(
        event,
        AsyncEventKind::Datagram(_, UdEvent::SqDrained)
    ));
    qp.post_send(&[wr]).unwrap();
    assert_eq!(qp.counters().tx_messages, 0, "nothing is sent in SQD");
    qp.modify(State::Rts).unwrap();
    assert_eq!(qp.counters().tx_messages, 1);
    qp.modify(State::Sqd).unwrap();
    qp.post_send(&[wr]).unwrap();
    qp.modify(State::Error).unwrap();
    let mut cqes = [Cqe::default(); 4];
    for (cq, wr_id) in [(&cq, 100), (&recv_cq, 5)] {
        assert_eq!(cq.poll(&mut cqes).unwrap(), 1);
        assert_eq!((cqes[0].wr_id, cqes[0].status), (wr_id, WcStatus::Flushed));
    }
    qp.post_send(&[wr]).unwrap();
    qp.post_recv(&[recv]).unwrap();
    assert_eq!(
        (cq.len(), recv_cq.len()),
        (1, 1),
        "requests are flushed immediately"
    );
    qp.modify(State::Reset).unwrap();
    for cq in [&cq, &recv_cq] {
        assert_eq!(cq.poll(&mut cqes).unwrap(), 0, "RESET drops completions");
    }
    let num = qp.num();
    qp.destroy();
    qp.destroy();
    assert!(qp.post_send(&[wr]).is_err() && qp.modify(State::Init).is_err());
    assert!(
        UdpSocket::bind(("127.0.0.1", num as u16)).is_err(),
        "the socket is open while a handle exists"
    );
    // The pending event also holds a handle.
    drop((qp, event));
    expect_free(num);
}

/// Waits until the port of a destroyed queue pair is free. A thread of the engine may still use the
/// socket for a moment.
fn expect_free(num: u32) {
    let start = Instant::now();
    while UdpSocket::bind(("127.0.0.1", num as u16)).is_err() {
        assert!(start.elapsed() < TIMEOUT, "the port is not free");
        std::thread::yield_now();
    }
}

#[test]
fn dropped_qp_leaves_nothing() {
    let ctx = context("127.0.0.1");
    let (pd, cq) = (ctx.allocate_pd(), ctx.create_cq(16, None).unwrap());
    let num = ctx.create_ud_qp(&attributes(pd, &cq)).unwrap().num();
    assert_eq!(cq.queue_pairs(), 0);
    expect_free(num);
}

#[test]
fn numbers_of_both_kinds_differ() {
    let ctx = context("127.0.0.1");
    let (pd, cq) = (ctx.allocate_pd(), ctx.create_cq(16, None).unwrap());
    let qps: Vec<_> = (0..50)
        .map(|_| ctx.create_ud_qp(&attributes(pd, &cq)).unwrap())
        .collect();
    let mut numbers: Vec<_> = qps.iter().map(UdQueuePair::num).collect();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!((numbers.len(), cq.queue_pairs()), (50, 50));
}

#[test]
fn full_cq_fails_qp() {
    let ctx = context("127.0.0.1");
    let (pd, cq) = (ctx.allocate_pd(), ctx.create_cq(1, None).unwrap());
    let qp = ctx.create_ud_qp(&attributes(pd, &cq)).unwrap();
    for to in [State::Init, State::Rtr, State::Rts] {
        qp.modify(to).unwrap();
    }
    let peer = End::on(&ctx, None);
    let pieces: [&[u8]; 1] = [b"hello"];
    let wr = request(&peer, &pieces);
    let wr = UdSendWr {
        flags: wr.flags | SendFlags::SIGNALED,
        ..wr
    };
    qp.post_send(&[wr, wr]).unwrap();
    let kinds: Vec<_> = (0..2)
        .map(|_| ctx.async_event(Some(TIMEOUT)).unwrap().kind)
        .collect();
    assert!(matches!(kinds[0], AsyncEventKind::CqError(_)));
    assert!(matches!(&kinds[1], AsyncEventKind::Datagram(of, UdEvent::Fatal) if qp.is_subject(of)));
    assert_eq!(qp.state(), State::Error);
}

#[test]
fn sleeping_thread_is_woken() {
    let ctx = context("127.0.0.1");
    let channel = ctx.create_channel().unwrap();
    let cq = ctx.create_cq(16, Some(&channel)).unwrap();
    let pd = ctx.allocate_pd();
    let qp = ctx.create_ud_qp(&attributes(pd, &cq)).unwrap();
    let a = End::on(&ctx, None);
    qp.set_qkey(QKEY);
    qp.modify(State::Init).unwrap();
    let memory = [0u8; 100];
    let addr = memory.as_ptr() as u64;
    // SAFETY: as in `End::on`.
    let lkey = unsafe { ctx.register(addr, 100, addr, pd, Access::LOCAL_WRITE) }.unwrap();
    let sges = [Sge {
        addr,
        len: 100,
        lkey,
    }];
    qp.post_recv(&[RecvWr {
        wr_id: 1,
        sges: &sges,
    }])
    .unwrap();
    qp.modify(State::Rtr).unwrap();
    cq.arm(false);
    let sender = std::thread::spawn({
        let (to, num) = (a.address(), qp.num());
        move || {
            std::thread::sleep(Duration::from_millis(50));
            let pieces: [&[u8]; 1] = [b"wake up"];
            let wr = UdSendWr {
                to,
                remote_qp: num,
                ..request(&a, &pieces)
            };
            a.qp.post_send(&[wr]).unwrap();
            a
        }
    });
    channel.event(Some(TIMEOUT)).unwrap();
    let mut cqe = [Cqe::default()];
    assert_eq!(cq.take_ready(&mut cqe).unwrap(), 1);
    assert_eq!(cqe[0].byte_len as usize, GRH + 7);
    drop(sender.join().unwrap());
}

/// Two threads send as fast as they can to a thread that polls. Datagrams may be lost. The
/// delivered datagrams are complete, in order, and delivered once.
#[test]
fn flood_only_loses_datagrams() {
    let b = End::new("127.0.0.1");
    let room = 2000;
    (0..SLOTS).for_each(|slot| b.receive(slot, room));
    let body = |sender: usize, i: usize| -> Vec<u8> {
        let len = 8 + (i * 37 + sender * 11) % (room - 8);
        let mut octets = vec![(i + sender) as u8; len];
        octets[..4].copy_from_slice(&(sender as u32).to_be_bytes());
        octets[4..8].copy_from_slice(&(i as u32).to_be_bytes());
        octets
    };
    let to = (b.address(), b.qp.num());
    let count = 20_000usize;
    let mut received = [0usize; 2];
    std::thread::scope(|scope| {
        let senders: Vec<_> = (0..2)
            .map(|sender| {
                scope.spawn(move || {
                    let a = End::new("127.0.0.1");
                    for i in 0..count {
                        a.fill(i % SLOTS, &body(sender, i));
                        let sges = [a.sge(i % SLOTS, 0, body(sender, i).len())];
                        let wr = UdSendWr {
                            wr_id: i as u64,
                            immediate: None,
                            flags: SendFlags::SIGNALED,
                            to: to.0,
                            remote_qp: to.1,
                            remote_qkey: QKEY,
                            sges: &sges,
                            inline: &[],
                        };
                        a.qp.post_send(&[wr]).unwrap();
                        assert_eq!(a.next().status, WcStatus::Success);
                    }
                })
            })
            .collect();
        let mut next = [0usize; 2];
        let mut quiet = Instant::now();
        loop {
            let Some(cqe) = b.poll() else {
                let over = senders.iter().all(|s| s.is_finished());
                if over && quiet.elapsed() > Duration::from_millis(200) {
                    break;
                }
                continue;
            };
            quiet = Instant::now();
            assert_eq!(cqe.status, WcStatus::Success);
            let slot = cqe.wr_id as usize;
            let octets = b.octets(slot, cqe.byte_len as usize);
            let number = |offset: usize| {
                u32::from_be_bytes(octets[GRH + offset..GRH + offset + 4].try_into().unwrap())
                    as usize
            };
            let (sender, i) = (number(0), number(4));
            assert!(
                i >= next[sender],
                "datagram {i} of sender {sender} is late or repeated"
            );
            assert_eq!(octets[GRH..], body(sender, i));
            next[sender] = i + 1;
            received[sender] += 1;
            b.receive(slot, room);
        }
    });
    assert!(received.iter().all(|n| *n > 0), "{received:?}");
    assert_eq!(b.qp.drops().crc, 0);
}
