//! Attacks by start-up frames (RFC 5044 section 7.1, RFC 6581 section 9) and by the first FPDUs of
//! a stream.

use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddrV4};

use anyhow::{Context as _, Result};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};
use rustix::process::{Resource, getrlimit, setrlimit};

use super::acts::{self, Target, UNKNOWN, write};
use super::kind::{Attack, Expect, Needs, mpa, other, tagged, untagged};
use super::peer::{self, Peer, Seen};
use super::wire::{self, Op};

/// Flags of the first word of an enhanced request's private data: A (peer to peer) and B (Send),
/// and of the second: C (Write) and D (Read).
const PEER_TO_PEER: u16 = 0x8000;
const BY_SEND: u16 = 0x4000;
const BY_WRITE: u16 = 0x8000;
const BY_READ: u16 = 0x4000;
/// The largest Read depth.
const DEPTH: u16 = 0x3ffe;
/// The depth that requests no negotiation.
const NO_DEPTH: u16 = 0x3fff;

/// Returns a request whose private data begin with IRD and ORD, as in revision 2.
fn request(flags: u8, revision: u8, ird: u16, ord: u16) -> Vec<u8> {
    let mut out = wire::frame(wire::REQUEST, flags, revision, 24);
    out.extend(ird.to_be_bytes());
    out.extend(ord.to_be_bytes());
    out.extend([0; 20]);
    out
}

/// Connects by a legal request, and sends ULPDUs.
fn set_up(t: &Target, request: &[u8], ulpdus: &[Vec<u8>]) -> Result<Seen> {
    let peer = Peer::ask(peer::connect(t.address)?, request)?;
    let mut peer = peer.context("the server refuses a request that is legal")?;
    for ulpdu in ulpdus {
        peer.send(ulpdu)?;
    }
    peer.answer()
}

fn empty_write() -> Vec<u8> {
    wire::tagged(Op::Write, 0, 0, &[])
}

/// Appends an invalid Write to legal messages. Its answer shows that the server has processed them.
fn legal(messages: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut all = messages.to_vec();
    all.push(write(UNKNOWN, 0));
    all
}

/// Returns the first untagged message of its queue.
fn first(op: Op, body: &[u8]) -> Vec<u8> {
    wire::untagged(op, 0, 1, body)
}

/// Sends an enhanced peer-to-peer request, and messages.
fn peer_to_peer(t: &Target, send: u16, others: u16, messages: &[Vec<u8>]) -> Result<Seen> {
    let request = request(
        wire::CRC | wire::ENHANCED,
        2,
        PEER_TO_PEER | send | 1,
        others | 1,
    );
    set_up(t, &request, messages)
}

fn private_data(t: &Target, octets: u16) -> Result<Seen> {
    let mut all = wire::frame(wire::REQUEST, wire::CRC, 1, octets);
    all.resize(wire::FRAME + usize::from(octets), 0);
    acts::first_octets(t, &all)
}

/// Requests the largest depths, and then sends more Reads than any device supports.
fn absurd_depths(t: &Target) -> Result<Seen> {
    let request = request(wire::CRC | wire::ENHANCED, 2, DEPTH, DEPTH);
    let peer = Peer::ask(peer::connect(t.address)?, &request)?;
    let mut peer = peer.context("the server refuses large depths")?;
    let grant = peer.grant.unwrap_or(acts::NOTHING);
    acts::many_at_once(&mut peer, u32::from(DEPTH) + 100, |peer| {
        vec![peer.message(Op::Read, &acts::little(&grant))]
    })?;
    peer.answer()
}

/// Sends request and FPDUs without waiting for the reply (RFC 5044 section 7.1.2).
fn without_waiting(t: &Target) -> Result<Seen> {
    let mut stream = peer::connect(t.address)?;
    let mut all = request(wire::CRC, 1, 0, 0);
    for ulpdu in legal(&[empty_write()]) {
        all.extend(wire::fpdu(&ulpdu));
    }
    stream.write_all(&all)?;
    peer::end_of(&mut stream)
}

fn two_requests(t: &Target) -> Result<Seen> {
    let mut stream = peer::connect(t.address)?;
    stream.write_all(&request(wire::CRC, 1, 0, 0).repeat(2))?;
    // The server parses the second request as the start of a long FPDU.
    stream.shutdown(std::net::Shutdown::Write)?;
    peer::end_of(&mut stream)
}

/// Sends more concurrent requests than the listener has slots for, and reads no reply.
fn many_requests(t: &Target) -> Result<Seen> {
    let mut streams = acts::crowd(t, 200)?;
    for stream in &mut streams {
        stream.write_all(&request(wire::CRC, 1, 0, 0))?;
    }
    std::thread::sleep(acts::pause(t));
    drop(streams);
    Ok(Seen::Held)
}

/// Opens more silent connections than a listener has slots for. On loopback each has its own source
/// address, so that a limit per address does not apply.
fn half_open_from_everywhere(t: &Target) -> Result<Seen> {
    let before = getrlimit(Resource::Nofile);
    let mut all = before;
    all.current = all.maximum;
    setrlimit(Resource::Nofile, all)?;
    let held = hold_from_everywhere(t);
    setrlimit(Resource::Nofile, before)?;
    held.map(|()| Seen::Held)
}

fn hold_from_everywhere(t: &Target) -> Result<()> {
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
fn storm(t: &Target) -> Result<Seen> {
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
        for one in all {
            let joined = one.join();
            joined.unwrap_or_else(|_| anyhow::bail!("a thread has panicked"))?;
        }
        Ok(Seen::Held)
    })
}

pub(super) const ATTACKS: &[Attack] = &[
    // The receiver must ignore reserved bits: it accepts the connection, and answers an invalid
    // Write as usual.
    other("set-up: reserved bits", Needs::Mpa, tagged(0), |t| {
        let request = request(wire::CRC | 0x1f, 1, 0, 0);
        set_up(t, &request, &legal(&[empty_write()]))
    }),
    other(
        "set-up: a request that rejects",
        Needs::Mpa,
        tagged(0),
        |t| {
            let request = request(wire::CRC | wire::REJECTED, 1, 0, 0);
            set_up(t, &request, &legal(&[empty_write()]))
        },
    ),
    other(
        "set-up: 513 octets of private data",
        Needs::Listener,
        Expect::Ended,
        |t| private_data(t, 513),
    ),
    other(
        "set-up: revision 2, three octets of private data",
        Needs::Listener,
        Expect::Ended,
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
        absurd_depths,
    ),
    other(
        "set-up: depths that are not negotiated",
        Needs::Mpa,
        tagged(0),
        |t| {
            let request = request(wire::CRC | wire::ENHANCED, 2, NO_DEPTH, NO_DEPTH);
            set_up(t, &request, &legal(&[empty_write()]))
        },
    ),
    other(
        "set-up: an RTR message of no kind",
        Needs::Mpa,
        tagged(0),
        |t| peer_to_peer(t, 0, 0, &legal(&[empty_write()])),
    ),
    other(
        "set-up: another RTR message than the agreed one",
        Needs::Mpa,
        tagged(0),
        |t| {
            let read = first(Op::Read, &wire::read_request(0, 0, 0));
            peer_to_peer(t, 0, BY_WRITE, &legal(&[read]))
        },
    ),
    other(
        "set-up: RTR messages again and again",
        Needs::Mpa,
        tagged(0),
        |t| {
            let all = vec![empty_write(); 1000];
            peer_to_peer(t, BY_SEND, BY_WRITE | BY_READ, &legal(&all))
        },
    ),
    other(
        "set-up: an RTR Read that reads",
        Needs::Mpa,
        Expect::Terminate(0x0100),
        |t| {
            let read = first(Op::Read, &wire::read_request(UNKNOWN, 0, 8));
            peer_to_peer(t, 0, BY_READ, &[empty_write(), read])
        },
    ),
    other(
        "set-up: no CRC where it was agreed",
        Needs::Mpa,
        mpa(2),
        |t| {
            let peer = Peer::ask(peer::connect(t.address)?, &request(0, 1, 0, 0))?;
            let mut peer = peer.context("the server refuses a request without CRC")?;
            peer.send(&empty_write())?;
            let mut fpdu = wire::fpdu(&empty_write());
            let body = fpdu.len() - 4;
            fpdu[body..].fill(0);
            peer.put(&fpdu)?;
            peer.answer()
        },
    ),
    // Before a responder has received a whole FPDU it may send nothing, not even a Terminate (RFC
    // 5044 section 7.1.2).
    other(
        "set-up: the first FPDU is wrong",
        Needs::Mpa,
        Expect::Ended,
        |t| {
            let peer = Peer::ask(peer::connect(t.address)?, &request(wire::CRC, 1, 0, 0))?;
            let mut peer = peer.context("refused")?;
            peer.put(&[0xff; 64])?;
            peer.half_close()?;
            peer.answer()
        },
    ),
    other(
        "set-up: the first FPDU is a Terminate",
        Needs::Mpa,
        Expect::Ended,
        |t| {
            let terminate = first(Op::Terminate, &[0x20, 2, 0, 0]);
            set_up(t, &request(wire::CRC, 1, 0, 0), &[terminate])
        },
    ),
    other(
        "set-up: FPDUs without waiting for the reply",
        Needs::Mpa,
        Expect::Over,
        without_waiting,
    ),
    other(
        "set-up: two requests",
        Needs::Mpa,
        Expect::Over,
        two_requests,
    ),
    other(
        "set-up: requests in a crowd, and nobody reads the replies",
        Needs::Listener,
        Expect::Held,
        many_requests,
    ),
    other(
        "set-up: half-open from more addresses than there are places",
        Needs::Port,
        Expect::Held,
        half_open_from_everywhere,
    ),
    other(
        "set-up: requests from many threads, which leave at once",
        Needs::Listener,
        Expect::Held,
        storm,
    ),
];
