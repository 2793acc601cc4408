//! Tests of connections that end during a network outage: messages of completed requests still
//! arrive, and the peer is notified of the end. A peer that never comes back is detected.
//!
//! `common::net` provides the network.

use crate::common::net::{FAR, NEAR, Net, inside, ip};
use crate::common::wire::{Hello, Wire};
use crate::common::*;
use iwarp::runtime::cm::{CmEventKind, CmId};
use iwarp::runtime::{Cqe, SendOp, State, WcStatus};
use iwarp::{Blame, Config};
use iwarp_proto::mpa::startup::FrameKind;
use iwarp_proto::rdmap::Opcode;
use std::net::TcpListener;
use std::time::Duration;

/// Returns a connection: the initiator in the near namespace, the responder in the far one.
fn pair(net: &Net, config: &Config) -> (End, End) {
    // The first end starts the progress thread, which inherits this thread's namespace.
    let near = End::new(NEAR, config);
    let server = net.at_far({
        let config = config.clone();
        move || Server::new(FAR, &config)
    });
    near.connect(server.address, b"");
    let far = server.accept();
    near.expect(CmEventKind::Established);
    far.expect(CmEventKind::Established);
    (near, far)
}

/// The linger time, and the unit in which outages are measured.
const BRIEF: Duration = Duration::from_millis(1000);

/// Returns a configuration without a timeout for silent peers.
fn patient() -> Config {
    let mut c = config();
    c.linger = BRIEF;
    c.peer_timeout = None;
    c
}

/// The ways to end a connection after which messages of completed requests still arrive.
#[derive(Debug, Clone, Copy)]
enum Way {
    Disconnect,
    Error,
    Reset,
    Destroy,
}

const WAYS: [Way; 4] = [Way::Disconnect, Way::Error, Way::Reset, Way::Destroy];

impl Way {
    fn end(self, end: &End) {
        match self {
            Self::Disconnect => end.id.disconnect().unwrap(),
            Self::Error => end.qp.modify(State::Error).unwrap(),
            Self::Reset => end.qp.modify(State::Reset).unwrap(),
            Self::Destroy => end.qp.destroy(),
        }
    }
}

#[test]
fn completed_sends_arrive_after_an_outage() {
    inside("completed_sends_arrive_after_an_outage", |net| {
        let pairs = WAYS.map(|way| (way, pair(net, &patient())));
        let before = sockets();
        let memory = net.outage(|| {
            let memory = pairs.each_ref().map(|(way, (near, far))| {
                let (from, to) = (near.mem(8), far.mem(8));
                from.set(0, 77);
                far.post_recv(1, &[to.sge(8)]);
                near.post(1, SendOp::Send, &[from.sge(8)]);
                near.expect_status(1, WcStatus::Success);
                way.end(near);
                (from, to)
            });
            // No acknowledgement can arrive, so the descriptors are closed after the linger time. A
            // reset would discard the Sends.
            until("the connections are closed", || {
                sockets() + WAYS.len() <= before
            });
            std::thread::sleep(BRIEF);
            memory
        });
        for ((way, (_near, far)), (_, to)) in pairs.iter().zip(memory) {
            println!("{way:?}");
            assert_eq!(far.expect_status(1, WcStatus::Success).byte_len, 8);
            assert_eq!(to.word(0), 77, "{way:?}");
            assert_eq!(far.expect_disconnected().status, 0, "{way:?}");
        }
    });
}

/// The peer has also sent data during the outage, which may arrive before our Send is transmitted.
/// If our socket were closed then, the kernel would answer with a reset, which discards our Send.
#[test]
fn completed_sends_arrive_from_both_ends() {
    inside("completed_sends_arrive_from_both_ends", |net| {
        let mut c = patient();
        c.peer_timeout = config().peer_timeout;
        let pairs = [0; 6].map(|_| pair(net, &c));
        let memory = net.outage(|| {
            // The peer sends first, so that its TCP also retransmits first.
            let memory = pairs.each_ref().map(|(_, far)| {
                let (from, to) = (far.mem(8), far.mem(8));
                far.post_recv(1, &[to.sge(8)]);
                far.post(2, SendOp::Send, &[from.sge(8)]);
                far.expect_status(2, WcStatus::Success);
                (from, to)
            });
            std::thread::sleep(BRIEF / 5);
            let ours = pairs.each_ref().map(|(near, _)| near.mem(8));
            for (i, ((near, _), mem)) in pairs.iter().zip(&ours).enumerate() {
                near.post(1, SendOp::Send, &[mem.sge(8)]);
                near.expect_status(1, WcStatus::Success);
                WAYS[i % WAYS.len()].end(near);
            }
            std::thread::sleep(BRIEF * 3);
            (memory, ours)
        });
        for (_near, far) in &pairs {
            far.expect_status(1, WcStatus::Success);
            far.expect_disconnected();
        }
        drop(memory);
    });
}

#[test]
fn idle_end_is_noticed_after_outage() {
    inside("idle_end_is_noticed_after_outage", |net| {
        let pairs = WAYS.map(|way| (way, pair(net, &patient())));
        let mut out = [Cqe::default(); 1];
        net.outage(|| {
            for (way, (near, _)) in &pairs {
                way.end(near);
            }
            std::thread::sleep(BRIEF * 2);
        });
        for (way, (_near, far)) in &pairs {
            println!("{way:?}");
            assert_eq!(far.expect_disconnected().status, 0, "{way:?}");
            assert_eq!(far.cq.poll(&mut out), Ok(0), "{way:?}");
        }
    });
}

#[test]
fn completed_sends_arrive_before_cut_one() {
    inside("completed_sends_arrive_before_cut_one", |net| {
        for way in [Way::Disconnect, Way::Error, Way::Destroy] {
            println!("{way:?}");
            let end = End::new(NEAR, &patient());
            let listener = net.at_far(|| TcpListener::bind((FAR, 0)).unwrap());
            end.connect(listener.local_addr().unwrap(), b"");
            let mut wire = Wire::new(listener.accept().unwrap().0);
            wire.read_hello(FrameKind::Request);
            wire.write(&Hello::enhanced(true, false).octets(FrameKind::Reply));
            end.expect(CmEventKind::Established);
            wire.expect(Opcode::WRITE);
            let (small, large) = (end.mem(8), end.mem(1 << 20));
            small.set(0, 77);
            let before = sockets();
            net.outage(|| {
                end.post(1, SendOp::Send, &[small.sge(8)]);
                end.expect_status(1, WcStatus::Success);
                // These do not fit into the socket's buffer, so it ends with a partial FPDU.
                for wr_id in 2..20 {
                    end.post(wr_id, SendOp::Send, &[large.sge(1 << 20)]);
                }
                way.end(&end);
                until("the connection is closed", || sockets() < before);
                std::thread::sleep(BRIEF);
            });
            // Our initiator sends empty Writes to a silent responder. Skip those.
            let first = std::iter::repeat_with(|| wire.recv())
                .find(|(header, _)| header.opcode() != Opcode::WRITE)
                .unwrap();
            assert_eq!(first.0.opcode(), Opcode::SEND);
            assert_eq!(first.1, 77u64.to_ne_bytes(), "{way:?}");
            // The stream ends within a message, before all 18 MiB have arrived.
            let mut rest = Vec::new();
            let end = std::io::Read::read_to_end(&mut wire.socket, &mut rest);
            println!("{} octets more, then {end:?}", rest.len());
            assert!(rest.len() < 18 << 20);
        }
    });
}

/// TCP keeps a connection whose address was removed, and continues when the address is added again.
#[test]
fn removed_address_pauses_its_connections() {
    inside("removed_address_pauses_its_connections", |net| {
        let (near, far) = pair(net, &patient());
        let (from, to) = (near.mem(8), far.mem(8));
        let mut other = Healthy::new(V4);
        for round in 1..3 {
            ip(&format!("addr del {NEAR}/24 dev near"));
            // Attempts to connect from that address fail immediately, and others are unaffected.
            let (source, server) = ((NEAR, 0).into(), (FAR, 9).into());
            let stranger = CmId::create(&near.channel, None);
            let refused = stranger.resolve_addr(Some(source), server).unwrap_err();
            assert_eq!(refused.errno(), libc::EADDRNOTAVAIL);
            stranger.destroy();
            let id = CmId::create(&near.channel, Some(&near.ctx));
            let qp = queue_pair(&near.ctx, near.pd, &near.cq, None, 16);
            id.resolve_addr(Some(source), server).unwrap();
            near.expect(CmEventKind::AddrResolved);
            id.resolve_route().unwrap();
            near.expect(CmEventKind::RouteResolved);
            id.set_queue_pair(Some(&qp));
            id.connect(&parameters(b"")).unwrap();
            near.expect_failure(CmEventKind::ConnectError, libc::EADDRNOTAVAIL);
            qp.destroy();
            id.destroy();
            from.set(0, round);
            far.post_recv(round, &[to.sge(8)]);
            near.post(round, SendOp::Send, &[from.sge(8)]);
            other.check();
            std::thread::sleep(BRIEF);
            other.check();
            assert_eq!([near.qp.state(), far.qp.state()], [State::Rts; 2]);
            assert_eq!(to.word(0), round - 1, "data arrived without an address");
            ip(&format!("addr add {NEAR}/24 dev near"));
            near.expect_status(round, WcStatus::Success);
            far.expect_status(round, WcStatus::Success);
            assert_eq!(to.word(0), round);
        }
        near.id.disconnect().unwrap();
        near.expect_disconnected();
        far.expect_disconnected();
    });
}

#[test]
fn vanished_peer_is_noticed() {
    inside("vanished_peer_is_noticed", |net| {
        let mut c = config();
        c.peer_timeout = Some(Duration::from_secs(2));
        let idle = pair(net, &c);
        let busy = pair(net, &c);
        let unaware = pair(net, &patient());
        let memory = busy.0.mem(8);
        ip("link set near down");
        busy.0.post(1, SendOp::Send, &[memory.sge(8)]);
        busy.0.expect_status(1, WcStatus::Success);
        for end in [&idle.0, &idle.1, &busy.0, &busy.1] {
            assert_eq!(end.expect_disconnected().status, libc::ECONNRESET);
            assert_eq!(end.qp.fault().unwrap().blame, Blame::Transport);
        }
        for end in [&unaware.0, &unaware.1] {
            assert_eq!(end.qp.state(), State::Rts);
            assert!(end.channel.is_empty());
        }
    });
}
