//! Attacks with MPA start-up frames (RFC 5044 section 7.1, RFC 6581 section 9) and with the first
//! FPDUs of a stream.

use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddrV4};

use anyhow::{Context as _, Result};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};
use rustix::process::{Resource, getrlimit, setrlimit};

use super::acts::{self, Target, UNKNOWN_STAG, write};
use super::kind::{Attack, Expect, Needs, mpa, other, tagged, untagged};
use super::peer::{self, Peer, Response};
use super::wire::{self, Op};

/// Flags in the private data of an enhanced request. First word: A (peer to peer) and B (RTR by
/// Send); second word: C (RTR by Write) and D (RTR by Read).
const PEER_TO_PEER: u16 = 0x8000;
const RTR_SEND: u16 = 0x4000;
const RTR_WRITE: u16 = 0x8000;
const RTR_READ: u16 = 0x4000;
/// The largest IRD or ORD.
const MAX_DEPTH: u16 = 0x3ffe;
/// The IRD or ORD value that means "not negotiated".
const NO_DEPTH: u16 = 0x3fff;

/// Returns a request whose private data begin with IRD and ORD, as in revision 2.
fn request(flags: u8, revision: u8, ird: u16, ord: u16) -> Vec<u8> {
    let mut out = wire::frame(wire::REQUEST, flags, revision, 24);
    out.extend(ird.to_be_bytes());
    out.extend(ord.to_be_bytes());
    out.extend([0; 20]);
    out
}

/// Connects with a valid request, and sends ULPDUs.
fn set_up(t: &Target, request: &[u8], ulpdus: &[Vec<u8>]) -> Result<Response> {
    let peer = Peer::request_connection(peer::connect(t.address)?, request)?;
    let mut peer = peer.context("the server rejected a valid request")?;
    for ulpdu in ulpdus {
        peer.send(ulpdu)?;
    }
    peer.read_response()
}

fn empty_write() -> Vec<u8> {
    wire::tagged(Op::Write, 0, 0, &[])
}

/// Appends an invalid Write to valid messages. Its Terminate shows that the server has accepted the
/// messages.
fn then_invalid_write(messages: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut all = messages.to_vec();
    all.push(write(UNKNOWN_STAG, 0));
    all
}

/// Returns an untagged message with message number 1.
fn first(op: Op, body: &[u8]) -> Vec<u8> {
    wire::untagged(op, 0, 1, body)
}

/// Connects with an enhanced peer-to-peer request, and sends messages. `send` and `others` are the
/// RTR flags.
fn peer_to_peer(t: &Target, send: u16, others: u16, messages: &[Vec<u8>]) -> Result<Response> {
    let request = request(
        wire::CRC | wire::ENHANCED,
        2,
        PEER_TO_PEER | send | 1,
        others | 1,
    );
    set_up(t, &request, messages)
}

fn private_data(t: &Target, octets: u16) -> Result<Response> {
    let mut all = wire::frame(wire::REQUEST, wire::CRC, 1, octets);
    all.resize(wire::FRAME_LEN + usize::from(octets), 0);
    acts::first_octets(t, &all)
}

/// Requests the largest IRD and ORD, and then sends more Reads than any device supports.
fn largest_depths(t: &Target) -> Result<Response> {
    let request = request(wire::CRC | wire::ENHANCED, 2, MAX_DEPTH, MAX_DEPTH);
    let peer = Peer::request_connection(peer::connect(t.address)?, &request)?;
    let mut peer = peer.context("the server rejected a request with large depths")?;
    let grant = peer.grant.unwrap_or(acts::NO_GRANT);
    acts::many_at_once(&mut peer, u32::from(MAX_DEPTH) + 100, |peer| {
        vec![peer.message(Op::Read, &acts::short_read(&grant))]
    })?;
    peer.read_response()
}

/// Sends a request and FPDUs without waiting for the reply, which RFC 5044 section 7.1.2 forbids.
fn without_waiting(t: &Target) -> Result<Response> {
    let mut stream = peer::connect(t.address)?;
    let mut all = request(wire::CRC, 1, 0, 0);
    for ulpdu in then_invalid_write(&[empty_write()]) {
        all.extend(wire::fpdu(&ulpdu));
    }
    stream.write_all(&all)?;
    peer::wait_for_close(&mut stream)
}

fn two_requests(t: &Target) -> Result<Response> {
    let mut stream = peer::connect(t.address)?;
    stream.write_all(&request(wire::CRC, 1, 0, 0).repeat(2))?;
    // The server parses the second request as the start of a long FPDU.
    stream.shutdown(std::net::Shutdown::Write)?;
    peer::wait_for_close(&mut stream)
}

/// Sends more concurrent requests than the listener's limit, and reads no replies.
fn many_requests(t: &Target) -> Result<Response> {
    let mut streams = acts::open_connections(t, 200)?;
    for stream in &mut streams {
        stream.write_all(&request(wire::CRC, 1, 0, 0))?;
    }
    std::thread::sleep(acts::pause(t));
    drop(streams);
    Ok(Response::Silence)
}

/// Opens more silent connections than the listener's limit. On loopback, each has a different
/// source address, so that the limit per address does not apply.
fn half_open_from_many_addresses(t: &Target) -> Result<Response> {
    let before = getrlimit(Resource::Nofile);
    let mut all = before;
    all.current = all.maximum;
    setrlimit(Resource::Nofile, all)?;
    let held = hold_from_many_addresses(t);
    setrlimit(Resource::Nofile, before)?;
    held.map(|()| Response::Silence)
}

fn hold_from_many_addresses(t: &Target) -> Result<()> {
    let mut streams = Vec::new();
    for n in 0..1200_u32 {
        let own = Ipv4Addr::from_bits(Ipv4Addr::new(127, 1, 0, 1).to_bits() + n);
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
        if t.address.ip().is_loopback() {
            bind(&socket, &SocketAddrV4::new(own, 0))?;
        }
        connect(&socket, &t.address)?;
        streams.push(socket);
    }
    std::thread::sleep(acts::pause(t));
    Ok(())
}

/// Opens and closes connections from several threads.
fn open_and_close_from_threads(t: &Target) -> Result<Response> {
    let rounds = 20 * t.scale;
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..8)
            .map(|n| {
                scope.spawn(move || -> Result<()> {
                    for round in 0..rounds {
                        let mut stream = peer::connect(t.address)?;
                        stream.write_all(&request(wire::CRC, 1, 0, 0))?;
                        match (n + round) % 3 {
                            0 => peer::reset(stream)?,
                            1 => stream.shutdown(std::net::Shutdown::Write)?,
                            _ => drop(stream),
                        }
                    }
                    Ok(())
                })
            })
            .collect();
        for thread in all {
            let joined = thread.join();
            joined.unwrap_or_else(|_| anyhow::bail!("a thread has panicked"))?;
        }
        Ok(Response::Silence)
    })
}

pub(super) const ATTACKS: &[Attack] = &[
    // The receiver must ignore reserved bits: it accepts the connection, and responds to an invalid
    // Write as usual.
    other("set-up: reserved bits", Needs::Mpa, tagged(0), |t| {
        let request = request(wire::CRC | 0x1f, 1, 0, 0);
        set_up(t, &request, &then_invalid_write(&[empty_write()]))
    }),
    other(
        "set-up: a request that rejects",
        Needs::Mpa,
        tagged(0),
        |t| {
            let request = request(wire::CRC | wire::REJECT, 1, 0, 0);
            set_up(t, &request, &then_invalid_write(&[empty_write()]))
        },
    ),
    other(
        "set-up: 513 octets of private data",
        Needs::Listener,
        Expect::ClosedWithoutTerminate,
        |t| private_data(t, 513),
    ),
    other(
        "set-up: revision 2, three octets of private data",
        Needs::Listener,
        Expect::ClosedWithoutTerminate,
        |t| {
            let mut all = wire::frame(wire::REQUEST, wire::CRC | wire::ENHANCED, 2, 3);
            all.extend([0; 3]);
            acts::first_octets(t, &all)
        },
    ),
    other(
        "set-up: more Reads than the largest depths",
        Needs::Region,
        untagged(2),
        largest_depths,
    ),
    other(
        "set-up: depths that are not negotiated",
        Needs::Mpa,
        tagged(0),
        |t| {
            let request = request(wire::CRC | wire::ENHANCED, 2, NO_DEPTH, NO_DEPTH);
            set_up(t, &request, &then_invalid_write(&[empty_write()]))
        },
    ),
    other(
        "set-up: a request that offers no RTR message",
        Needs::Mpa,
        tagged(0),
        |t| peer_to_peer(t, 0, 0, &then_invalid_write(&[empty_write()])),
    ),
    other(
        "set-up: another RTR message than the agreed one",
        Needs::Mpa,
        tagged(0),
        |t| {
            let read = first(Op::Read, &wire::read_request(0, 0, 0));
            peer_to_peer(t, 0, RTR_WRITE, &then_invalid_write(&[read]))
        },
    ),
    other(
        "set-up: repeated RTR messages",
        Needs::Mpa,
        tagged(0),
        |t| {
            let all = vec![empty_write(); 1000];
            peer_to_peer(t, RTR_SEND, RTR_WRITE | RTR_READ, &then_invalid_write(&all))
        },
    ),
    other(
        "set-up: an RTR Read that is not empty",
        Needs::Mpa,
        Expect::Terminate(0x0100),
        |t| {
            let read = first(Op::Read, &wire::read_request(UNKNOWN_STAG, 0, 8));
            peer_to_peer(t, 0, RTR_READ, &[empty_write(), read])
        },
    ),
    other(
        "set-up: no CRC where it was agreed",
        Needs::Mpa,
        mpa(2),
        |t| {
            let peer = Peer::request_connection(peer::connect(t.address)?, &request(0, 1, 0, 0))?;
            let mut peer = peer.context("the server rejected a request without CRC")?;
            peer.send(&empty_write())?;
            let mut fpdu = wire::fpdu(&empty_write());
            let body = fpdu.len() - 4;
            fpdu[body..].fill(0);
            peer.put(&fpdu)?;
            peer.read_response()
        },
    ),
    // Before a responder has received a valid FPDU it must not send anything, not even a Terminate
    // (RFC 5044 section 7.1.2).
    other(
        "set-up: the first FPDU is wrong",
        Needs::Mpa,
        Expect::ClosedWithoutTerminate,
        |t| {
            let peer =
                Peer::request_connection(peer::connect(t.address)?, &request(wire::CRC, 1, 0, 0))?;
            let mut peer = peer.context("the server rejected a valid request")?;
            peer.put(&[0xff; 64])?;
            peer.half_close()?;
            peer.read_response()
        },
    ),
    other(
        "set-up: the first FPDU is a Terminate",
        Needs::Mpa,
        Expect::ClosedWithoutTerminate,
        |t| {
            let terminate = first(Op::Terminate, &[0x20, 2, 0, 0]);
            set_up(t, &request(wire::CRC, 1, 0, 0), &[terminate])
        },
    ),
    other(
        "set-up: FPDUs without waiting for the reply",
        Needs::Mpa,
        Expect::Closed,
        without_waiting,
    ),
    other(
        "set-up: two requests",
        Needs::Mpa,
        Expect::Closed,
        two_requests,
    ),
    other(
        "set-up: many requests, and no client reads the reply",
        Needs::Listener,
        Expect::Silence,
        many_requests,
    ),
    other(
        "set-up: half-open from many addresses, beyond the limit",
        Needs::Port,
        Expect::Silence,
        half_open_from_many_addresses,
    ),
    other(
        "set-up: requests from many threads, closed at once",
        Needs::Listener,
        Expect::Silence,
        open_and_close_from_threads,
    ),
];
