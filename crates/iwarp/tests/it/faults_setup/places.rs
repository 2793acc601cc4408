//! Tests of each setting at each end where it applies: the listener, the accepted connection, and
//! the connecting end. The peer is hand-written, so only the settings of our end affect what it
//! sees.

use crate::common::wire::{Hello, Wire, initiator, responder};
use crate::common::{End, HANDSHAKE, Server, V4, context, expect};
use iwarp::runtime::cm::{CmEventKind, CmId};
use iwarp::runtime::{QueuePair, SendOp, create_event_channel};
use iwarp::{Admission, Config, ReceiverNotReady};
use iwarp_proto::mpa::startup::{Flags, FrameKind};
use iwarp_proto::rdmap::Opcode;
use std::any::Any;
use std::io::{ErrorKind, Read as _};
use std::net::TcpListener;
use std::time::Duration;

const NEVER: Duration = Duration::from_secs(3600);

/// A stream that ends when a time limit expires, and the objects that keep our end alive.
type Waiting = (Wire, Box<dyn Any>);

fn silent(config: &Config) -> Waiting {
    let server = Server::new(V4, config);
    (Wire::connect(server.address), Box::new(server))
}

/// Returns a connection whose request has arrived and is not answered.
fn requested(config: &Config, hello: &Hello) -> (Server, Wire) {
    let server = Server::new(V4, config);
    let mut wire = Wire::connect(server.address);
    wire.write(&hello.octets(FrameKind::Request));
    (server, wire)
}

fn rejected(config: &Config) -> Waiting {
    let (server, mut wire) = requested(config, &Hello::plain());
    server.request().id.reject(b"no").unwrap();
    wire.read_hello(FrameKind::Reply);
    (wire, Box::new(server))
}

fn accepted_without_message(config: &Config) -> Waiting {
    let (server, mut wire) = requested(config, &Hello::enhanced(true, false));
    let end = server.accept();
    wire.read_hello(FrameKind::Reply);
    (wire, Box::new((server, end)))
}

fn accepted_and_speaking(config: &Config) -> Waiting {
    let server = Server::new(V4, config);
    let (wire, end) = initiator(&server, &Hello::client_server());
    end.post(1, SendOp::Send, &[]);
    (wire, Box::new((server, end)))
}

fn accepted_without_receive(config: &Config) -> Waiting {
    let server = Server::new(V4, config);
    let (mut wire, end) = initiator(&server, &Hello::enhanced(true, false));
    wire.untagged(Opcode::SEND, b"early");
    (wire, Box::new((server, end)))
}

fn connected_without_receive(config: &Config) -> Waiting {
    let end = End::new(V4, config);
    let mut wire = responder(&end, &Hello::enhanced(true, false));
    wire.untagged(Opcode::SEND, b"early");
    (wire, Box::new(end))
}

/// A queue pair that is destroyed when it is dropped.
struct Numbered(QueuePair);

impl Drop for Numbered {
    fn drop(&mut self) {
        self.0.destroy();
    }
}

fn numbered_without_message(config: &Config) -> Waiting {
    let ctx = context(V4, config);
    let cq = ctx.create_cq(16, None).unwrap();
    let qp = Numbered(super::numbered(&ctx, ctx.allocate_pd(), &cq));
    (super::ask(&qp.0), Box::new((qp, cq, ctx)))
}

fn unanswered(config: &Config) -> Waiting {
    let end = End::new(V4, config);
    let listener = TcpListener::bind((V4, 0)).unwrap();
    end.connect(listener.local_addr().unwrap(), b"");
    let mut wire = Wire::new(listener.accept().unwrap().0);
    wire.read_hello(FrameKind::Request);
    (wire, Box::new((listener, end)))
}

/// Two streams wait for the same event: the first with a limit of an hour, the second with a short
/// limit. If a limit were not taken from the settings of its own device, the first stream would end
/// first.
#[test]
fn time_limits_belong_to_their_device() {
    type Set = fn(&mut Config, Duration);
    type Row = (&'static str, Set, fn(&Config) -> Waiting);
    let handshake: Set = |c, limit| c.handshake_timeout = limit;
    let answer: Set = |c, limit| c.answer_timeout = limit;
    let hold: Set = |c, limit| c.receiver_not_ready = ReceiverNotReady::Hold(limit);
    let speak: Set = |c, limit| c.speak_first = Some(limit);
    let rows: [Row; 8] = [
        ("MPA request", handshake, silent),
        ("close after a rejection", handshake, rejected),
        ("first message", handshake, accepted_without_message),
        (
            "first message by number",
            handshake,
            numbered_without_message,
        ),
        ("responder speaks first", speak, accepted_and_speaking),
        ("receive of the responder", hold, accepted_without_receive),
        ("receive of the initiator", hold, connected_without_receive),
        ("MPA reply", answer, unanswered),
    ];
    // The rows wait in parallel.
    std::thread::scope(|scope| {
        for (what, set, begin) in rows {
            scope.spawn(move || {
                outlasts(what, |limit| {
                    let mut config = Config::default();
                    set(&mut config, limit);
                    begin(&config)
                })
            });
        }
    });
}

/// Checks that a stream with a short limit ends, and that an older stream with a long limit does
/// not.
fn outlasts(what: &str, begin: impl Fn(Duration) -> Waiting) {
    let (mut waits, _alive) = begin(NEVER);
    let (mut ends, _alive_too) = begin(HANDSHAKE);
    let timed_out = |e: &std::io::Error| e.kind() == ErrorKind::WouldBlock;
    let seen = ends.socket.read(&mut [0; 64]);
    assert!(
        !seen.as_ref().is_err_and(timed_out),
        "{what}: no stream ends"
    );
    waits.socket.set_nonblocking(true).unwrap();
    let seen = waits.socket.read(&mut [0; 64]);
    assert!(seen.as_ref().is_err_and(timed_out), "{what}: {seen:?}");
}

/// Each row: whether our end requests CRCs, and whether the peer requests them.
#[test]
fn either_end_may_ask_for_crcs() {
    for (ours, theirs) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut config = Config::default();
        config.crc = ours;
        for mut hello in [Hello::plain(), Hello::enhanced(true, false)] {
            if !theirs {
                hello.flags = match hello.prefix {
                    Some(_) => Flags::ENHANCED,
                    None => Flags::default(),
                };
            }
            let server = Server::new(V4, &config);
            let (wire, _end) = initiator(&server, &hello);
            assert_eq!(wire.crc, ours || theirs, "accepted: {ours} {theirs}");
        }
        let end = End::new(V4, &config);
        let listener = TcpListener::bind((V4, 0)).unwrap();
        end.connect(listener.local_addr().unwrap(), b"");
        let mut wire = Wire::new(listener.accept().unwrap().0);
        let asked = wire.read_hello(FrameKind::Request).flags.has(Flags::CRC);
        assert_eq!(asked, ours, "connecting");
    }
}

/// Returns an accepted and a connecting end of a device with these settings.
fn both_places(config: &Config) -> [(Wire, End); 2] {
    let hello = Hello::enhanced(true, false);
    let accepted = initiator(&Server::new(V4, config), &hello);
    let end = End::new(V4, config);
    let wire = responder(&end, &hello);
    [accepted, (wire, end)]
}

#[test]
fn both_places_segment_for_mss() {
    for (mss, pieces) in [(None, 1), (Some(1000), 5)] {
        let mut config = Config::default();
        config.mss = mss;
        for (mut wire, end) in both_places(&config) {
            let mem = end.mem(4096);
            end.post(1, SendOp::Send, &[mem.sge(4096)]);
            let mut lengths = Vec::new();
            while lengths.iter().sum::<usize>() < 4096 {
                lengths.push(wire.recv().1.len());
            }
            assert_eq!(lengths.len(), pieces, "{mss:?}: {lengths:?}");
        }
    }
}

#[test]
fn both_places_probe_placement_of_sends() {
    for placed in [false, true] {
        let mut config = Config::default();
        config.placed = placed;
        for (mut wire, end) in both_places(&config) {
            end.post(1, SendOp::Send, &[]);
            wire.expect(Opcode::SEND);
            match placed {
                true => drop(wire.expect(Opcode::READ_REQUEST)),
                false => assert_eq!(end.poll().wr_id, 1),
            }
        }
    }
}

/// Each row: the device's admitted peers, the listener's, and whether this host is admitted.
#[test]
fn listener_admission_wins_over_device() {
    let (us, others) = ("127.0.0.0/8", "192.0.2.0/24");
    for (device, own, let_in) in [
        (us, None, true),
        (others, None, false),
        (us, Some(others), false),
        (others, Some(us), true),
    ] {
        let mut config = Config::default();
        config.admission.peers = device.parse().unwrap();
        let channel = create_event_channel().unwrap();
        let id = CmId::create(&channel, Some(&context(V4, &config)));
        if let Some(own) = own {
            let mut admission = Admission::default();
            admission.peers = own.parse().unwrap();
            id.set_admission(admission);
        }
        id.bind((V4, 0).into()).unwrap();
        id.listen(4).unwrap();
        let mut wire = Wire::connect(id.addresses().0.unwrap());
        if let_in {
            wire.write(&Hello::plain().octets(FrameKind::Request));
            expect(&channel, CmEventKind::ConnectRequest).id.destroy();
        } else {
            wire.ends_with_reset();
        }
        id.destroy();
    }
}
