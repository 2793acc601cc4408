//! Attacks that consist of more than one invalid segment.

use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Result, bail};

use super::peer::{self, Grant, Peer, Seen};
use super::wire::{self, Op, at};

/// The server, as an attack knows it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Target {
    pub(super) address: SocketAddr,
    /// Factor for repetitions: 1 in the short form.
    pub(super) scale: u32,
    /// How long the server may keep a closed connection whose peer reads nothing.
    pub(super) release_limit: Duration,
}

/// The grant of a server that grants nothing.
pub(super) const NOTHING: Grant = Grant {
    address: 0,
    len: 0,
    all: 0,
    local: 0,
    foreign: 0,
    window: 0,
    plain: false,
};
/// An STag that never exists: the server never allocates this part of its table.
pub(super) const UNKNOWN: u32 = 0xf234_5678;

pub(super) fn write(stag: u32, offset: u64) -> Vec<u8> {
    wire::tagged(Op::Write, stag, offset, &[7; 8])
}

/// Sends segments repeatedly in one piece, so that the server receives all before it has answered
/// the first.
pub(super) fn many_at_once(
    peer: &mut Peer,
    times: u32,
    make: impl Fn(&mut Peer) -> Vec<Vec<u8>>,
) -> Result<()> {
    let segments: Vec<_> = (0..times).flat_map(|_| make(peer)).collect();
    if peer.markers {
        return segments.iter().try_for_each(|segment| peer.send(segment));
    }
    let all: Vec<_> = segments
        .iter()
        .flat_map(|segment| wire::fpdu(segment))
        .collect();
    peer.put(&all)
}

/// Returns a request for a short Read. The agreed number of responses and a Terminate fit into a
/// socket buffer. If it were full, the Terminate would be lost when the server destroys its queue
/// pair.
pub(super) fn little(grant: &Grant) -> Vec<u8> {
    wire::read_request(grant.all, grant.address, grant.len.min(64))
}

pub(super) fn first_octets(t: &Target, octets: &[u8]) -> Result<Seen> {
    let mut stream = peer::connect(t.address)?;
    stream.write_all(octets)?;
    peer::end_of(&mut stream)
}

pub(super) fn half_closed(t: &Target, octets: usize) -> Result<Seen> {
    let mut stream = peer::connect(t.address)?;
    stream.write_all(&wire::frame(wire::REQUEST, wire::CRC, 1, 0)[..octets])?;
    stream.shutdown(std::net::Shutdown::Write)?;
    peer::end_of(&mut stream)
}

pub(super) fn resets_in_set_up(t: &Target) -> Result<Seen> {
    let request = wire::frame(wire::REQUEST, wire::CRC, 1, 0);
    for octets in 0..=request.len() {
        let mut stream = peer::connect(t.address)?;
        stream.write_all(&request[..octets])?;
        peer::reset(stream)?;
    }
    Ok(Seen::Held)
}

pub(super) fn resets_after_request(t: &Target) -> Result<Seen> {
    let request = wire::frame(wire::REQUEST, wire::CRC, 1, 0);
    for pause_us in [0, 50, 100, 200, 500, 1000, 5000] {
        let mut stream = peer::connect(t.address)?;
        stream.write_all(&request)?;
        std::thread::sleep(Duration::from_micros(pause_us));
        peer::reset(stream)?;
    }
    Ok(Seen::Held)
}

/// Returns how long an attack waits.
pub(super) fn pause(t: &Target) -> Duration {
    Duration::from_millis(200) * t.scale
}

pub(super) fn silence(t: &Target) -> Result<Seen> {
    let stream = peer::connect(t.address)?;
    std::thread::sleep(pause(t));
    peer::reset(stream)?;
    Ok(Seen::Held)
}

pub(super) fn slow_loris(t: &Target) -> Result<Seen> {
    let mut streams = crowd(t, 16)?;
    for octet in &wire::frame(wire::REQUEST, wire::CRC, 1, 0)[..18] {
        for stream in &mut streams {
            // The server may have closed the connection after its own time limit.
            let _ = stream.write_all(&[*octet]);
        }
        std::thread::sleep(pause(t) / 18);
    }
    Ok(Seen::Held)
}

pub(super) fn crowd(t: &Target, connections: u32) -> Result<Vec<TcpStream>> {
    (0..connections).map(|_| peer::connect(t.address)).collect()
}

/// Opens more connections than one address may have in start-up.
pub(super) fn half_open(t: &Target) -> Result<Seen> {
    let streams = crowd(t, 400)?;
    std::thread::sleep(pause(t));
    drop(streams);
    Ok(Seen::Held)
}

pub(super) fn wrong_crc(t: &Target) -> Result<Seen> {
    let mut peer = Peer::set_up(t.address)?;
    peer.busy()?;
    let mut fpdu = wire::fpdu(&write(UNKNOWN, 0));
    if let Some(last) = fpdu.last_mut() {
        *last ^= 0x10;
    }
    peer.put(&fpdu)?;
    peer.answer()
}

pub(super) fn wrong_marker(t: &Target) -> Result<Seen> {
    let mut peer = Peer::set_up(t.address)?;
    peer.send(&wire::tagged(Op::Write, 0, 0, &[]))?;
    let grant = peer.grant.unwrap_or(NOTHING);
    let long = wire::tagged(Op::Write, grant.all, grant.address, &[7; 1000]);
    peer.send_marked(&wire::fpdu(&long), 4)?;
    peer.answer()
}

pub(super) fn no_markers(t: &Target) -> Result<Seen> {
    let mut peer = Peer::set_up(t.address)?;
    peer.put(&wire::fpdu(&wire::tagged(Op::Write, 0, 0, &[7; 1000])))?;
    peer.half_close()?;
    peer.answer()
}

pub(super) fn closed_inside(t: &Target) -> Result<Seen> {
    let mut peer = Peer::set_up(t.address)?;
    peer.busy()?;
    let fpdu = wire::fpdu(&write(UNKNOWN, 0));
    peer.put(&fpdu[..fpdu.len() / 2])?;
    peer.half_close()?;
    peer.answer()
}

pub(super) fn resets_inside(t: &Target) -> Result<Seen> {
    let fpdu = wire::fpdu(&write(UNKNOWN, 0));
    let step = if t.scale == 1 { 4 } else { 1 };
    for octets in (0..=fpdu.len()).step_by(step) {
        let mut peer = Peer::set_up(t.address)?;
        peer.busy()?;
        peer.put(&fpdu[..octets])?;
        peer::reset(peer.stream)?;
    }
    Ok(Seen::Held)
}

pub(super) fn slow_fpdu(t: &Target) -> Result<Seen> {
    let mut peer = Peer::set_up(t.address)?;
    peer.busy()?;
    for octet in wire::fpdu(&write(UNKNOWN, 0)) {
        peer.put(&[octet])?;
        std::thread::sleep(Duration::from_millis(1));
    }
    peer.answer()
}

/// Sends segments of one message without a last one.
pub(super) fn endless_message(t: &Target) -> Result<Seen> {
    let mut peer = Peer::set_up(t.address)?;
    peer.busy()?;
    let mut offset = 0_u32;
    for _ in 0..100 {
        let mut segment = wire::untagged(Op::Send, 0, 1, &[7; 1024]);
        segment[at::DDP_CONTROL] = 0x01;
        segment[at::MO - 3..=at::MO].copy_from_slice(&offset.to_be_bytes());
        peer.send(&segment)?;
        offset += 1024;
    }
    peer.answer()
}

/// Guesses STags. Each wrong guess costs a connection.
pub(super) fn guesses(t: &Target) -> Result<Seen> {
    let mut random = 0x9e37_79b9_u32;
    let mut seen = Seen::Held;
    for _ in 0..20 * t.scale {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let mut peer = Peer::set_up(t.address)?;
        peer.busy()?;
        // Only the first of these guesses may be examined.
        for n in 0..16 {
            peer.send(&write(random.rotate_left(n), 0))?;
        }
        seen = peer.answer()?;
        if seen != Seen::Terminate(0x1100) {
            break;
        }
    }
    Ok(seen)
}

/// Sends too many Read Requests without reading the answers.
pub(super) fn too_many_reads(t: &Target) -> Result<Seen> {
    let mut peer = Peer::set_up(t.address)?;
    let Some(grant) = peer.grant else {
        bail!("the server grants nothing");
    };
    many_at_once(&mut peer, 1000, |peer| {
        vec![peer.message(Op::Read, &little(&grant))]
    })?;
    peer.answer()
}

pub(super) fn terminates(t: &Target) -> Result<Seen> {
    let mut peer = Peer::set_up(t.address)?;
    peer.busy()?;
    for _ in 0..1000 {
        let terminate = wire::untagged(Op::Terminate, 0, 1, &[0x20, 2, 0, 0]);
        peer.send(&terminate)?;
    }
    peer.half_close()?;
    peer.answer()
}

/// Sends a Write after a Terminate. The server checks at its exit that the word is unchanged.
pub(super) fn write_after_terminate(t: &Target) -> Result<Seen> {
    let mut peer = Peer::set_up(t.address)?;
    let Some(grant) = peer.grant else {
        bail!("the server grants nothing");
    };
    peer.busy()?;
    peer.send(&wire::untagged(Op::Terminate, 0, 1, &[0x20, 2, 0, 0]))?;
    let last_word = grant.address + u64::from(grant.len) - 8;
    peer.send(&write(grant.all, last_word))?;
    peer.half_close()?;
    peer.answer()
}

/// Answers the server's Read Request with the segment that `make` returns for the sink's STag,
/// offset and length.
pub(super) fn respond(t: &Target, make: fn(u32, u64, usize) -> Vec<u8>) -> Result<Seen> {
    let mut peer = Peer::set_up(t.address)?;
    let request = being_read(&mut peer)?;
    let word = |at: usize| -> u32 {
        let octets = request.iter().skip(at).take(4);
        octets.fold(0, |n, octet| n << 8 | u32::from(*octet))
    };
    let offset = u64::from(word(22)) << 32 | u64::from(word(26));
    peer.send(&make(word(18), offset, word(30) as usize))?;
    peer.answer()
}

/// Sends a memory address to the server, as a client of `rping` does. Returns the server's Read
/// Request.
pub(super) fn being_read(peer: &mut Peer) -> Result<Vec<u8>> {
    let mut info = 0x1000_u64.to_be_bytes().to_vec();
    info.extend(0x1234_5600_u32.to_be_bytes());
    info.extend(64_u32.to_be_bytes());
    peer.request(Op::Send, &info)?;
    match peer.receive()? {
        Ok(ulpdu) if ulpdu.len() == 46 && ulpdu[1] & 0xf == Op::Read as u8 => Ok(ulpdu),
        other => bail!("no Read Request: {other:02x?}"),
    }
}

pub(super) fn no_response(t: &Target) -> Result<Seen> {
    let mut peer = Peer::set_up(t.address)?;
    being_read(&mut peer)?;
    std::thread::sleep(pause(t));
    peer::reset(peer.stream)?;
    Ok(Seen::Held)
}

/// Sends empty Writes, which are legal because they access no memory. The answer to the final
/// invalid Write shows that the server has read all.
pub(super) fn tiny_fpdus(t: &Target) -> Result<Seen> {
    let mut peer = Peer::set_up(t.address)?;
    let fpdu = wire::fpdu(&wire::tagged(Op::Write, 0, 0, &[]));
    let many = fpdu.repeat(1000);
    for _ in 0..100 * t.scale.min(10) {
        peer.put(&many)?;
    }
    peer.send(&write(UNKNOWN, 0))?;
    peer.answer()
}

/// Requests much data, and reads nothing.
pub(super) fn zero_window(t: &Target) -> Result<Seen> {
    let mut peer = Peer::set_up(t.address)?;
    let Some(grant) = peer.grant else {
        bail!("the server grants nothing");
    };
    peer.narrow()?;
    for _ in 0..16 {
        let request = wire::read_request(grant.all, grant.address, grant.len);
        peer.request(Op::Read, &request)?;
    }
    std::thread::sleep(pause(t));
    peer::reset(peer.stream)?;
    Ok(Seen::Held)
}

/// Sends many messages. The server's program decides what to do with them.
pub(super) fn many_sends(t: &Target) -> Result<Seen> {
    let mut peer = Peer::set_up(t.address)?;
    for _ in 0..2000 * t.scale {
        peer.request(Op::Send, &[0; 16])?;
    }
    peer.half_close()?;
    peer.answer()
}

pub(super) fn many_connections(t: &Target) -> Result<Seen> {
    for _ in 0..20 * t.scale {
        let peer = Peer::set_up(t.address)?;
        peer::reset(peer.stream)?;
    }
    Ok(Seen::Held)
}
