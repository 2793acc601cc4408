//! Tests of datagrams over a link that drops, duplicates, reorders and corrupts packets. No corrupt
//! datagram is delivered, none is delivered twice, and the connection manager still finds queue
//! pairs.
//!
//! `common::lossy` provides the link. Without network namespaces the tests are skipped, and print
//! what is missing; with `IWARP_REQUIRE_NAMESPACES=1` they fail. Without `/dev/net/tun`, as in many
//! containers, they are always skipped.

use crate::common::lossy::{FAR, Fates, Link, NEAR, Shares};
use crate::common::net::{Net, inside};
use crate::common::{Mem, context, expect, until};
use iwarp::Config;
use iwarp::runtime::cm::{CmEventKind, CmId, ConnectionParameters};
use iwarp::runtime::{
    CompletionQueue, Cqe, RecvWr, SendFlags, State, UdAddress, UdAttributes, UdDrops, UdQueuePair,
    UdSendWr, WcStatus, create_event_channel,
};
use std::collections::HashSet;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const SEED: u64 = 0x1a5_51ed;
const QKEY: u32 = 5;
/// Words before a message in its receive.
const GRH_WORDS: usize = 5;
/// Words of the longest message, which needs three packets.
const WORDS: usize = 400;
const RECEIVES: u32 = 256;

/// Runs a test on the link, if it can be created.
fn on_link(name: &str, shares: Shares, body: impl FnOnce(&Net, &Link)) {
    inside(name, |net| match Link::new(net, shares, SEED) {
        Ok(link) => body(net, &link),
        Err(e) => {
            let missing = [ErrorKind::NotFound, ErrorKind::PermissionDenied];
            assert!(missing.contains(&e.kind()), "no lossy link: {e}");
            println!("skipped: no TUN devices (/dev/net/tun): {e}");
        }
    });
}

/// A queue pair that sends or receives.
struct End {
    cq: CompletionQueue,
    qp: UdQueuePair,
    slots: Vec<Mem>,
}

impl End {
    fn new(ip: IpAddr, receives: u32) -> Self {
        let ctx = context(ip, &Config::default());
        let (pd, cq) = (ctx.allocate_pd(), ctx.create_cq(1024, None).unwrap());
        let qp = ctx.create_ud_qp(&UdAttributes {
            pd,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            srq: None,
            max_send_wr: 64,
            max_recv_wr: receives.max(1),
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
            signal_all: true,
        });
        let qp = qp.unwrap();
        qp.set_qkey(QKEY);
        for to in [State::Init, State::Rtr, State::Rts] {
            qp.modify(to).unwrap();
        }
        let len = (GRH_WORDS + WORDS) * 8;
        let slots = (0..receives.max(1)).map(|_| Mem::new(&ctx, pd, len));
        let slots = slots.collect();
        let this = Self { cq, qp, slots };
        (0..receives as usize).for_each(|slot| this.receive(slot));
        this
    }

    fn receive(&self, slot: usize) {
        let sges = [self.slots[slot].sge(((GRH_WORDS + WORDS) * 8) as u32)];
        let wr_id = slot as u64;
        self.qp.post_recv(&[RecvWr { wr_id, sges: &sges }]).unwrap();
    }

    fn poll(&self) -> Option<Cqe> {
        let mut cqe = [Cqe::default()];
        (self.cq.poll(&mut cqe).unwrap() == 1).then_some(cqe[0])
    }

    /// Sends the message with this number, which determines its contents. Waits until the socket
    /// has accepted it.
    fn send(&self, number: u64, source: IpAddr, (to, num): (IpAddr, u32)) {
        let words = length_of(number);
        for index in 0..words {
            self.slots[0].set(index, word_of(number, index));
        }
        let gid = |ip| match ip {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            IpAddr::V6(ip) => ip.octets(),
        };
        let sges = [self.slots[0].sge((words * 8) as u32)];
        let wr = UdSendWr {
            wr_id: number,
            immediate: None,
            flags: SendFlags::SIGNALED,
            to: UdAddress::new(gid(source), gid(to), 0, 0).unwrap(),
            remote_qp: num,
            remote_qkey: QKEY,
            sges: &sges,
            inline: &[],
        };
        self.qp.post_send(&[wr]).unwrap();
        until("a datagram is sent", || self.poll().is_some());
    }
}

/// Returns the length of a message. Most messages fit into one packet.
const fn length_of(number: u64) -> usize {
    match number % 8 {
        0 => WORDS,
        short => 1 + short as usize * 20,
    }
}

const fn word_of(number: u64, index: usize) -> u64 {
    match index {
        0 => number,
        _ => number.wrapping_mul(0x9e37_79b9) ^ index as u64,
    }
}

/// Datagrams of each sender.
const COUNT: u64 = 3000;
const SENDERS: u64 = 2;

/// Takes a datagram, if one was delivered, and checks its contents, its sender, and that it was not
/// delivered before. Returns `false` if there is none.
fn take_one(receiver: &End, senders: &[End], delivered: &mut HashSet<u64>) -> bool {
    let Some(cqe) = receiver.poll() else {
        return false;
    };
    assert_eq!(cqe.status, WcStatus::Success);
    let slot = cqe.wr_id as usize;
    let word = |index| receiver.slots[slot].word(GRH_WORDS + index);
    let number = word(0);
    assert!(number < COUNT * SENDERS, "{number:#x} was not sent");
    let words = length_of(number);
    assert_eq!(cqe.byte_len as usize, (GRH_WORDS + words) * 8);
    for index in 0..words {
        assert_eq!(
            word(index),
            word_of(number, index),
            "word {index} of {number}"
        );
    }
    let sender = &senders[(number / COUNT) as usize];
    assert_eq!(cqe.src_qp(), sender.qp.num());
    assert!(delivered.insert(number), "{number} is delivered twice");
    receiver.receive(slot);
    true
}

#[test]
fn lossy_link_only_loses_datagrams() {
    let shares = Shares {
        dropped: 50,
        doubled: 100,
        overtaken: 100,
        spoiled: 50,
    };
    on_link("lossy_link_only_loses_datagrams", shares, |net, link| {
        // The first end starts the progress thread, which inherits this thread's namespace.
        let senders: Vec<End> = (0..SENDERS).map(|_| End::new(NEAR[0], 0)).collect();
        let receiver = net.at_far(|| End::new(FAR[0], RECEIVES));
        let mut delivered = HashSet::new();
        let mut take =
            |most: usize| (0..most).all(|_| take_one(&receiver, &senders, &mut delivered));
        for i in 0..COUNT {
            for (sender, n) in senders.iter().zip(0..) {
                let version = (i % 2) as usize;
                let to = (FAR[version], receiver.qp.num());
                sender.send(n * COUNT + i, NEAR[version], to);
            }
            take(64);
        }
        let mut quiet = Instant::now();
        while quiet.elapsed() < Duration::from_millis(500) {
            if take(1) {
                quiet = Instant::now();
            }
        }
        check_losses(delivered.len() as u64, receiver.qp.drops(), &link.fates);
    });
}

/// Checks that the link has affected packets in each way, and that each loss has a cause.
fn check_losses(delivered: u64, drops: UdDrops, fates: &Fates) {
    let sent = COUNT * SENDERS;
    println!("{delivered} of {sent}, {drops:?}, {fates:?}");
    let of = |fate: &AtomicU32| u64::from(fate.load(Ordering::Relaxed));
    for fate in [
        &fates.dropped,
        &fates.doubled,
        &fates.overtaken,
        &fates.spoiled,
    ] {
        assert!(of(fate) > 50, "the link has affected too few packets");
    }
    // Corruption is detected by the CRC, duplicates by the number.
    assert!(drops.crc > 50 && drops.copies > 50);
    assert!(drops.crc <= of(&fates.spoiled));
    // Losses have a cause, except those of the kernel's own queues.
    assert!(delivered < sent);
    assert!(delivered > sent / 10);
    assert_eq!((drops.foreign, drops.qkey, drops.too_long), (0, 0, 0));
}

#[test]
fn numbered_peer_found_despite_loss() {
    const COUNT: usize = 40;
    let shares = Shares {
        dropped: 100,
        doubled: 100,
        overtaken: 100,
        spoiled: 20,
    };
    on_link("numbered_peer_found_despite_loss", shares, |net, link| {
        let ctx = context(NEAR[0], &Config::default());
        let (server, listener) = net.at_far(|| {
            let server = create_event_channel().unwrap();
            let listener =
                CmId::create_for_datagrams(&server, Some(&context(FAR[0], &Config::default())));
            listener.bind(SocketAddr::new(FAR[0], 0)).unwrap();
            listener.listen(0).unwrap();
            (server, listener)
        });
        let address = listener.addresses().0.unwrap();
        let client = create_event_channel().unwrap();
        let ids: Vec<CmId> = (0..COUNT)
            .map(|n| {
                let id = CmId::create_for_datagrams(&client, Some(&ctx));
                id.resolve_addr(None, address).unwrap();
                expect(&client, CmEventKind::AddrResolved);
                id.resolve_route().unwrap();
                expect(&client, CmEventKind::RouteResolved);
                let parameters = ConnectionParameters {
                    private_data: vec![n as u8],
                    ..Default::default()
                };
                id.connect(&parameters).unwrap();
                id
            })
            .collect();
        let mut asked = HashSet::new();
        for _ in 0..COUNT {
            let request = expect(&server, CmEventKind::ConnectRequest);
            let n = request.private_data[0];
            assert!(asked.insert(n), "{n} sends two requests");
            request
                .id
                .accept_datagrams(1000 + u32::from(n), QKEY, &[n])
                .unwrap();
        }
        for _ in 0..COUNT {
            let answer = expect(&client, CmEventKind::Established);
            let n = ids.iter().position(|id| id.is_same(&answer.id)).unwrap();
            assert_eq!(answer.private_data, [n as u8]);
            let end = answer.datagrams.unwrap();
            assert_eq!((end.num, end.ip), (1000 + n as u32, FAR[0]));
        }
        assert!(server.try_next().is_none() && client.try_next().is_none());
        println!("{:?}", link.fates);
        assert!(link.fates.dropped.load(Ordering::Relaxed) > 3);
    });
}
