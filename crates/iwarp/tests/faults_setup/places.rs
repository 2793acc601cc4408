//! Settings in each of their places: the listener, the accepted connection, and the connecting end.
//! The peer is written by hand, so what it sees can only come from the settings of the other end.

use crate::common::wire::{Hello, Wire, initiator, responder};
use crate::common::{End, Server, V4};
use iwarp::{Config, ReceiverNotReady, SendOp};
use iwarp_proto::mpa::startup::{Flags, FrameKind};
use iwarp_proto::rdmap::Opcode;
use std::any::Any;
use std::io::{ErrorKind, Read as _};
use std::net::TcpListener;
use std::time::Duration;

const SOON: Duration = Duration::from_millis(30);
const NEVER: Duration = Duration::from_secs(3600);

/// A stream on which something happens when a time limit is over, and what keeps it alive.
type Waiting = (Wire, Box<dyn Any>);

fn silent(config: &Config) -> Waiting {
    let server = Server::new(V4, config);
    (Wire::connect(server.address), Box::new(server))
}

/// The request has come, and neither accepted nor rejected.
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

fn unanswered(config: &Config) -> Waiting {
    let end = End::new(V4, config);
    let listener = TcpListener::bind((V4, 0)).unwrap();
    end.connect(listener.local_addr().unwrap(), b"");
    let mut wire = Wire::new(listener.accept().unwrap().0);
    wire.read_hello(FrameKind::Request);
    (wire, Box::new((listener, end)))
}

/// Two streams wait for the same thing, the first one for an hour at most. It has to outlast the
/// second one: with a limit from anywhere but the settings of its own device it would end first.
#[test]
fn time_limits_belong_to_their_device() {
    type Set = fn(&mut Config, Duration);
    let handshake: Set = |c, limit| c.handshake_timeout = limit;
    let answer: Set = |c, limit| c.answer_timeout = limit;
    let hold: Set = |c, limit| c.receiver_not_ready = ReceiverNotReady::Hold(limit);
    let speak: Set = |c, limit| c.speak_first = Some(limit);
    let rows: [(&str, Set, fn(&Config) -> Waiting); 7] = [
        ("MPA request", handshake, silent),
        ("close after a rejection", handshake, rejected),
        ("first message", handshake, accepted_without_message),
        ("responder speaks first", speak, accepted_and_speaking),
        ("receive of the responder", hold, accepted_without_receive),
        ("receive of the initiator", hold, connected_without_receive),
        ("MPA reply", answer, unanswered),
    ];
    for (what, set, begin) in rows {
        let begin = |limit| {
            let mut config = Config::default();
            set(&mut config, limit);
            begin(&config)
        };
        let (mut waits, _alive) = begin(NEVER);
        let (mut ends, _alive_too) = begin(SOON);
        let seen = ends.socket.read(&mut [0; 64]);
        let timed_out = |e: &std::io::Error| e.kind() == ErrorKind::WouldBlock;
        assert!(
            !seen.as_ref().is_err_and(timed_out),
            "{what}: nothing happens"
        );
        waits.socket.set_nonblocking(true).unwrap();
        let seen = waits.socket.read(&mut [0; 64]);
        assert!(seen.as_ref().is_err_and(timed_out), "{what}: {seen:?}");
    }
}

/// A row: whether our end asks for CRCs, and whether the peer does.
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

/// Both places of a queue pair whose device has these settings: accepted, and connecting.
fn both_places(config: &Config) -> [(Wire, End); 2] {
    let hello = Hello::enhanced(true, false);
    let accepted = initiator(&Server::new(V4, config), &hello);
    let end = End::new(V4, config);
    let wire = responder(&end, &hello);
    [accepted, (wire, end)]
}

#[test]
fn both_places_cut_messages_for_the_mss() {
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
fn both_places_ask_whether_a_send_is_placed() {
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
