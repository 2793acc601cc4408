//! Attacks that consist of more than one invalid segment.

use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Result, bail};

use super::peer::{self, Grant, Peer, Response};
use super::wire::{self, Op, header_offset};

/// The attacked server, and parameters of the attack.
#[derive(Debug, Clone, Copy)]
pub(super) struct Target {
    pub(super) address: SocketAddr,
    /// Factor for repetitions: 1 without `--long`.
    pub(super) scale: u32,
    /// How long the server may keep a connection that it has closed while the peer reads nothing.
    pub(super) release_limit: Duration,
}

/// The grant of a server that grants no memory.
pub(super) const NO_GRANT: Grant = Grant {
    address: 0,
    len: 0,
    all: 0,
    local: 0,
    foreign: 0,
    window: 0,
    plain: false,
};
/// An STag that never exists, because the server never allocates this part of its table.
pub(super) const UNKNOWN_STAG: u32 = 0xf234_5678;

pub(super) fn write(stag: u32, offset: u64) -> Vec<u8> {
    wire::tagged(Op::Write, stag, offset, &[7; 8])
}

/// Sends the segments of `make`, `times` times, with one write, so that the server receives all
/// before it responds to the first.
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

/// Returns a request for a short Read. The responses to as many Reads as agreed, and a Terminate,
/// fit into the server's socket buffer. With a full buffer, the Terminate would be lost when the
/// server destroys its queue pair.
pub(super) fn short_read(grant: &Grant) -> Vec<u8> {
    wire::read_request(grant.all, grant.address, grant.len.min(64))
}

pub(super) fn first_octets(t: &Target, octets: &[u8]) -> Result<Response> {
    let mut stream = peer::connect(t.address)?;
    stream.write_all(octets)?;
    peer::wait_for_close(&mut stream)
}

pub(super) fn half_closed(t: &Target, octets: usize) -> Result<Response> {
    let mut stream = peer::connect(t.address)?;
    stream.write_all(&wire::frame(wire::REQUEST, wire::CRC, 1, 0)[..octets])?;
    stream.shutdown(std::net::Shutdown::Write)?;
    peer::wait_for_close(&mut stream)
}

pub(super) fn resets_in_set_up(t: &Target) -> Result<Response> {
    let request = wire::frame(wire::REQUEST, wire::CRC, 1, 0);
    for octets in 0..=request.len() {
        let mut stream = peer::connect(t.address)?;
        stream.write_all(&request[..octets])?;
        peer::reset(stream)?;
    }
    Ok(Response::Silence)
}

pub(super) fn resets_after_request(t: &Target) -> Result<Response> {
    let request = wire::frame(wire::REQUEST, wire::CRC, 1, 0);
    for pause_us in [0, 50, 100, 200, 500, 1000, 5000] {
        let mut stream = peer::connect(t.address)?;
        stream.write_all(&request)?;
        std::thread::sleep(Duration::from_micros(pause_us));
        peer::reset(stream)?;
    }
    Ok(Response::Silence)
}

/// Returns how long an attack keeps a connection open.
pub(super) fn pause(t: &Target) -> Duration {
    Duration::from_millis(200) * t.scale
}

pub(super) fn silence(t: &Target) -> Result<Response> {
    let stream = peer::connect(t.address)?;
    std::thread::sleep(pause(t));
    peer::reset(stream)?;
    Ok(Response::Silence)
}

pub(super) fn slow_loris(t: &Target) -> Result<Response> {
    let mut streams = open_connections(t, 16)?;
    for octet in &wire::frame(wire::REQUEST, wire::CRC, 1, 0)[..18] {
        for stream in &mut streams {
            // The server may have closed the connection after its own time limit.
            let _ = stream.write_all(&[*octet]);
        }
        std::thread::sleep(pause(t) / 18);
    }
    Ok(Response::Silence)
}

pub(super) fn open_connections(t: &Target, connections: u32) -> Result<Vec<TcpStream>> {
    (0..connections).map(|_| peer::connect(t.address)).collect()
}

/// Opens more silent connections than the limit per source address.
pub(super) fn half_open(t: &Target) -> Result<Response> {
    let streams = open_connections(t, 400)?;
    std::thread::sleep(pause(t));
    drop(streams);
    Ok(Response::Silence)
}

pub(super) fn wrong_crc(t: &Target) -> Result<Response> {
    let mut peer = Peer::set_up(t.address)?;
    peer.send_valid_requests()?;
    let mut fpdu = wire::fpdu(&write(UNKNOWN_STAG, 0));
    if let Some(last) = fpdu.last_mut() {
        *last ^= 0x10;
    }
    peer.put(&fpdu)?;
    peer.read_response()
}

pub(super) fn wrong_marker(t: &Target) -> Result<Response> {
    let mut peer = Peer::set_up(t.address)?;
    peer.send(&wire::tagged(Op::Write, 0, 0, &[]))?;
    let grant = peer.grant.unwrap_or(NO_GRANT);
    let long = wire::tagged(Op::Write, grant.all, grant.address, &[7; 1000]);
    peer.send_marked(&wire::fpdu(&long), 4)?;
    peer.read_response()
}

pub(super) fn no_markers(t: &Target) -> Result<Response> {
    let mut peer = Peer::set_up(t.address)?;
    peer.put(&wire::fpdu(&wire::tagged(Op::Write, 0, 0, &[7; 1000])))?;
    peer.half_close()?;
    peer.read_response()
}

pub(super) fn closed_inside(t: &Target) -> Result<Response> {
    let mut peer = Peer::set_up(t.address)?;
    peer.send_valid_requests()?;
    let fpdu = wire::fpdu(&write(UNKNOWN_STAG, 0));
    peer.put(&fpdu[..fpdu.len() / 2])?;
    peer.half_close()?;
    peer.read_response()
}

pub(super) fn resets_inside(t: &Target) -> Result<Response> {
    let fpdu = wire::fpdu(&write(UNKNOWN_STAG, 0));
    let step = if t.scale == 1 { 4 } else { 1 };
    for octets in (0..=fpdu.len()).step_by(step) {
        let mut peer = Peer::set_up(t.address)?;
        peer.send_valid_requests()?;
        peer.put(&fpdu[..octets])?;
        peer::reset(peer.stream)?;
    }
    Ok(Response::Silence)
}

pub(super) fn slow_fpdu(t: &Target) -> Result<Response> {
    let mut peer = Peer::set_up(t.address)?;
    peer.send_valid_requests()?;
    for octet in wire::fpdu(&write(UNKNOWN_STAG, 0)) {
        peer.put(&[octet])?;
        std::thread::sleep(Duration::from_millis(1));
    }
    peer.read_response()
}

/// Sends segments of a message, but never the last segment.
pub(super) fn endless_message(t: &Target) -> Result<Response> {
    let mut peer = Peer::set_up(t.address)?;
    peer.send_valid_requests()?;
    let mut offset = 0_u32;
    for _ in 0..100 {
        let mut segment = wire::untagged(Op::Send, 0, 1, &[7; 1024]);
        segment[header_offset::DDP_CONTROL] = 0x01;
        segment[header_offset::MO - 3..=header_offset::MO].copy_from_slice(&offset.to_be_bytes());
        peer.send(&segment)?;
        offset += 1024;
    }
    peer.read_response()
}

/// Guesses STags. Each wrong guess must end the connection.
pub(super) fn guesses(t: &Target) -> Result<Response> {
    let mut random = 0x9e37_79b9_u32;
    let mut seen = Response::Silence;
    for _ in 0..20 * t.scale {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let mut peer = Peer::set_up(t.address)?;
        peer.send_valid_requests()?;
        // The server must process only the first of these guesses.
        for n in 0..16 {
            peer.send(&write(random.rotate_left(n), 0))?;
        }
        seen = peer.read_response()?;
        if seen != Response::Terminate(0x1100) {
            break;
        }
    }
    Ok(seen)
}

/// Sends more Read Requests than agreed, without reading the responses.
pub(super) fn too_many_reads(t: &Target) -> Result<Response> {
    let mut peer = Peer::set_up(t.address)?;
    let Some(grant) = peer.grant else {
        bail!("the server grants nothing");
    };
    many_at_once(&mut peer, 1000, |peer| {
        vec![peer.message(Op::Read, &short_read(&grant))]
    })?;
    peer.read_response()
}

pub(super) fn many_terminates(t: &Target) -> Result<Response> {
    let mut peer = Peer::set_up(t.address)?;
    peer.send_valid_requests()?;
    for _ in 0..1000 {
        let terminate = wire::untagged(Op::Terminate, 0, 1, &[0x20, 2, 0, 0]);
        peer.send(&terminate)?;
    }
    peer.half_close()?;
    peer.read_response()
}

/// Sends a Write after a Terminate. At the end of the connection, the server checks that the word
/// is unchanged.
pub(super) fn write_after_terminate(t: &Target) -> Result<Response> {
    let mut peer = Peer::set_up(t.address)?;
    let Some(grant) = peer.grant else {
        bail!("the server grants nothing");
    };
    peer.send_valid_requests()?;
    peer.send(&wire::untagged(Op::Terminate, 0, 1, &[0x20, 2, 0, 0]))?;
    let last_word = grant.address + u64::from(grant.len) - 8;
    peer.send(&write(grant.all, last_word))?;
    peer.half_close()?;
    peer.read_response()
}

/// Responds to the server's Read Request with the segment that `make` builds from the sink's STag,
/// offset and length.
pub(super) fn respond(t: &Target, make: fn(u32, u64, usize) -> Vec<u8>) -> Result<Response> {
    let mut peer = Peer::set_up(t.address)?;
    let request = provoke_read(&mut peer)?;
    let word = |at: usize| -> u32 {
        let octets = request.iter().skip(at).take(4);
        octets.fold(0, |n, octet| n << 8 | u32::from(*octet))
    };
    let offset = u64::from(word(22)) << 32 | u64::from(word(26));
    peer.send(&make(word(18), offset, word(30) as usize))?;
    peer.read_response()
}

/// Sends a memory address to the server, as a client of `rping` does. Returns the server's Read
/// Request.
pub(super) fn provoke_read(peer: &mut Peer) -> Result<Vec<u8>> {
    let mut info = 0x1000_u64.to_be_bytes().to_vec();
    info.extend(0x1234_5600_u32.to_be_bytes());
    info.extend(64_u32.to_be_bytes());
    peer.request(Op::Send, &info)?;
    match peer.receive()? {
        Ok(ulpdu) if ulpdu.len() == 46 && ulpdu[1] & 0xf == Op::Read as u8 => Ok(ulpdu),
        other => bail!("the server sent no Read Request: {other:02x?}"),
    }
}

pub(super) fn no_response(t: &Target) -> Result<Response> {
    let mut peer = Peer::set_up(t.address)?;
    provoke_read(&mut peer)?;
    std::thread::sleep(pause(t));
    peer::reset(peer.stream)?;
    Ok(Response::Silence)
}

/// Sends empty Writes, which are valid because they access no memory. The Terminate for the invalid
/// Write after them shows that the server has processed all.
pub(super) fn tiny_fpdus(t: &Target) -> Result<Response> {
    let mut peer = Peer::set_up(t.address)?;
    let fpdu = wire::fpdu(&wire::tagged(Op::Write, 0, 0, &[]));
    let many = fpdu.repeat(1000);
    for _ in 0..100 * t.scale.min(10) {
        peer.put(&many)?;
    }
    peer.send(&write(UNKNOWN_STAG, 0))?;
    peer.read_response()
}

/// Requests much data without reading it, and then resets the connection.
pub(super) fn zero_window(t: &Target) -> Result<Response> {
    let mut peer = Peer::set_up(t.address)?;
    let Some(grant) = peer.grant else {
        bail!("the server grants nothing");
    };
    peer.shrink_receive_buffer()?;
    for _ in 0..16 {
        let request = wire::read_request(grant.all, grant.address, grant.len);
        peer.request(Op::Read, &request)?;
    }
    std::thread::sleep(pause(t));
    peer::reset(peer.stream)?;
    Ok(Response::Silence)
}

/// Sends many messages. The response depends on the server program.
pub(super) fn many_sends(t: &Target) -> Result<Response> {
    let mut peer = Peer::set_up(t.address)?;
    for _ in 0..2000 * t.scale {
        peer.request(Op::Send, &[0; 16])?;
    }
    peer.half_close()?;
    peer.read_response()
}

pub(super) fn many_connections(t: &Target) -> Result<Response> {
    for _ in 0..20 * t.scale {
        let peer = Peer::set_up(t.address)?;
        peer::reset(peer.stream)?;
    }
    Ok(Response::Silence)
}
