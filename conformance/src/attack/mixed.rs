//! Attacks that combine several messages or connections, or act while requests are in flight.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::acts::{self, Target, UNKNOWN_STAG, write};
use super::kind::{
    Attack, Expect, Needs, atomic, invalidate, operation, other, protection, read, segment, send,
    tagged, untagged,
};
use super::peer::{self, Grant, Peer, Response};
use super::wire::{self, Op, header_offset};

/// Distance from the region's end to the word that the C server sets after it has bound its window.
const BOUND_FLAG: u32 = 16;
/// Offset of the window in the region, and its length in bytes.
const WINDOW: u64 = 4096;
const WINDOW_LEN: u32 = 8192;

/// TCP states in which the server has not closed its socket: ESTABLISHED and CLOSE_WAIT.
const NOT_CLOSED: [&str; 2] = ["01", "08"];

fn connect_with_grant(t: &Target) -> Result<(Peer, Grant)> {
    let peer = Peer::set_up(t.address)?;
    let grant = peer.grant.context("the server grants nothing")?;
    Ok((peer, grant))
}

/// Connects, and waits until the server has bound the window: polls a word of the region with
/// Reads.
fn connect_with_window(t: &Target) -> Result<(Peer, Grant)> {
    let (mut peer, grant) = connect_with_grant(t)?;
    let word = grant.address + u64::from(grant.len - BOUND_FLAG);
    for _ in 0..1000 {
        let request = wire::read_request(grant.all, word, 8);
        peer.request(Op::Read, &request)?;
        match peer.receive()? {
            Ok(ulpdu) if ulpdu.len() == 22 && ulpdu[14..] != [0; 8] => return Ok((peer, grant)),
            Ok(_) => std::thread::sleep(Duration::from_millis(1)),
            Err(end) => bail!("the server closed the connection before it bound the window: {end}"),
        }
    }
    bail!("the server did not bind the window")
}

/// Sends Read Requests without reading the responses, until the server's send buffer is full. Does
/// not shrink the own receive buffer, because the kernel would then drop packets instead of closing
/// the window.
fn fill(peer: &mut Peer, reads: u32, (stag, offset, len): (u32, u64, u32)) -> Result<()> {
    for _ in 0..reads {
        peer.request(Op::Read, &wire::read_request(stag, offset, len))?;
    }
    // The server's send buffer holds at most 4 MiB (tcp_wmem), the data of eight Reads of the whole
    // region.
    std::thread::sleep(Duration::from_millis(20));
    Ok(())
}

/// Waits until the server has closed its socket, while the peer does not read the data. Only the
/// kernel's table of sockets shows this: the kernel keeps a closed socket, without an inode, until
/// the data is sent. For a server in the kernel, whose sockets have no inodes, the TCP state shows
/// it.
fn wait_for_release(t: &Target, own: SocketAddr) -> Result<Response> {
    let ends = [t.address, own].map(|end| format!(":{:04X}", end.port()));
    let start = Instant::now();
    while start.elapsed() < t.release_limit {
        let table = std::fs::read_to_string("/proc/net/tcp")?;
        let held = table.lines().any(|line| {
            let fields: Vec<_> = line.split_whitespace().collect();
            let is_servers = fields.get(1..3).is_some_and(|found| {
                let mut both = found.iter().zip(&ends);
                both.all(|(found, end)| found.ends_with(end.as_str()))
            });
            let state = fields.get(3).copied().unwrap_or_default();
            is_servers && (NOT_CLOSED.contains(&state) || fields.get(9) != Some(&"0"))
        });
        if !held {
            return Ok(Response::Closed);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(Response::Silence)
}

/// Clears the flag that marks the last segment of a message.
fn without_last_flag(mut segment: Vec<u8>) -> Vec<u8> {
    segment[header_offset::DDP_CONTROL] &= !0x40;
    segment
}

fn at_offset(mut segment: Vec<u8>, offset: u32) -> Vec<u8> {
    segment[header_offset::MO - 3..=header_offset::MO].copy_from_slice(&offset.to_be_bytes());
    segment
}

fn with_msn(mut segment: Vec<u8>, msn: u32) -> Vec<u8> {
    segment[header_offset::MSN - 3..=header_offset::MSN].copy_from_slice(&msn.to_be_bytes());
    segment
}

/// Sends segments on a connection with outstanding requests.
fn sequence(t: &Target, make: fn(&mut Peer, &Grant) -> Vec<Vec<u8>>) -> Result<Response> {
    let mut peer = Peer::set_up(t.address)?;
    peer.send_valid_requests()?;
    let grant = peer.grant.unwrap_or(acts::NO_GRANT);
    for segment in make(&mut peer, &grant) {
        peer.send(&segment)?;
    }
    peer.read_response()
}

/// Tries invalid queue numbers, each on a new connection.
fn queues(t: &Target) -> Result<Response> {
    let mut seen = Response::Silence;
    for queue in [4_u32, 5, 7, 255, 256, 0x8000_0000, 0x8000_0001, u32::MAX] {
        let mut peer = Peer::set_up(t.address)?;
        peer.send_valid_requests()?;
        let mut out = send(&mut peer, &[7; 8]);
        out[header_offset::QN - 3..=header_offset::QN].copy_from_slice(&queue.to_be_bytes());
        peer.send(&out)?;
        seen = peer.read_response()?;
        if seen != Response::Terminate(0x1201) {
            break;
        }
    }
    Ok(seen)
}

/// Uses the grant of another connection, which is still open.
fn with_stolen_grant(
    t: &Target,
    victim: fn(&Target) -> Result<(Peer, Grant)>,
    make: fn(&mut Peer, &Grant) -> Vec<u8>,
) -> Result<Response> {
    let (_owner, grant) = victim(t)?;
    let mut thief = Peer::set_up(t.address)?;
    thief.send_valid_requests()?;
    let segment = make(&mut thief, &grant);
    thief.send(&segment)?;
    thief.read_response()
}

/// Sends the segments of `make`, which use the window.
fn with_window(t: &Target, make: fn(&mut Peer, &Grant) -> Vec<Vec<u8>>) -> Result<Response> {
    let (mut peer, grant) = connect_with_window(t)?;
    for segment in make(&mut peer, &grant) {
        peer.send(&segment)?;
    }
    peer.read_response()
}

/// Invalidates a window before the server responds to Reads from it. The server checks access when
/// it responds.
fn invalidated_in_use(t: &Target) -> Result<Response> {
    let (mut peer, grant) = connect_with_window(t)?;
    fill(&mut peer, 12, (grant.all, grant.address, grant.len))?;
    for _ in 0..4 {
        let request = wire::read_request(grant.window, grant.address + WINDOW, WINDOW_LEN);
        peer.request(Op::Read, &request)?;
    }
    let segment = invalidate(&mut peer, grant.window);
    peer.send(&segment)?;
    std::thread::sleep(Duration::from_millis(20));
    peer.read_response()
}

/// Runs `then` while the server's send buffer is full. The server must release the connection
/// nevertheless.
fn with_full_buffer(t: &Target, then: fn(&mut Peer) -> Result<()>) -> Result<Response> {
    let (mut peer, grant) = connect_with_grant(t)?;
    fill(&mut peer, 16, (grant.all, grant.address, grant.len))?;
    // Get the address now: after `then`, the socket may have none.
    let own = peer.stream.local_addr()?;
    then(&mut peer)?;
    wait_for_release(t, own)
}

/// Opens many connections that request as much data as possible and read nothing.
fn many_greedy_connections(t: &Target) -> Result<Response> {
    let mut all = Vec::new();
    for _ in 0..50 * t.scale.min(4) {
        let (mut peer, grant) = connect_with_grant(t)?;
        peer.shrink_receive_buffer()?;
        for _ in 0..16 {
            let request = wire::read_request(grant.all, grant.address, grant.len);
            peer.request(Op::Read, &request)?;
        }
        all.push(peer);
    }
    std::thread::sleep(acts::pause(t));
    for peer in all {
        peer::reset(peer.stream)?;
    }
    Ok(Response::Silence)
}

/// Reads the responses in small pieces.
fn slow_reader(t: &Target) -> Result<Response> {
    use std::io::Read as _;
    let (mut peer, grant) = connect_with_grant(t)?;
    fill(&mut peer, 16, (grant.all, grant.address, grant.len))?;
    for _ in 0..100 * t.scale {
        peer.stream.read_exact(&mut [0; 100])?;
        std::thread::sleep(Duration::from_millis(1));
    }
    peer::reset(peer.stream)?;
    Ok(Response::Silence)
}

/// Resets connections after different delays while Reads, Writes and atomics are in flight.
fn resets_in_flight(t: &Target) -> Result<Response> {
    for pause_us in [0, 20, 50, 100, 200, 500, 1000] {
        let mut peer = Peer::set_up(t.address)?;
        peer.send_valid_requests()?;
        std::thread::sleep(Duration::from_micros(pause_us));
        peer::reset(peer.stream)?;
    }
    Ok(Response::Silence)
}

/// Sends more Reads and atomics, alternating, than agreed, and reads no responses.
fn reads_and_atomics(t: &Target) -> Result<Response> {
    let (mut peer, grant) = connect_with_grant(t)?;
    acts::many_at_once(&mut peer, 1000, |peer| {
        let read = peer.message(Op::Read, &acts::short_read(&grant));
        let add = wire::fetch_add(grant.all, grant.address);
        vec![read, peer.message(Op::Atomic, &add)]
    })?;
    peer.read_response()
}

/// Sends a Write that never ends, always to the same memory. It reaches 4 GiB, the limit of a
/// message (RFC 5040 section 4.3), only with `--long`.
fn endless_write(t: &Target) -> Result<Response> {
    let (mut peer, grant) = connect_with_grant(t)?;
    let segment = without_last_flag(wire::tagged(
        Op::Write,
        grant.all,
        grant.address,
        &[7; 32768],
    ));
    let many = wire::fpdu(&segment).repeat(32);
    let rounds = if t.scale == 1 { 16 } else { 4096 };
    for _ in 0..rounds {
        peer.put(&many)?;
    }
    let last = match t.scale {
        1 => write(UNKNOWN_STAG, 0),
        _ => wire::tagged(Op::Write, grant.all, grant.address, &[7; 8]),
    };
    peer.send(&last)?;
    match peer.read_response()? {
        // With `--long`, the Write has exceeded 4 GiB.
        Response::Terminate(0x1101) if t.scale > 1 => Ok(Response::Terminate(0x1100)),
        other => Ok(other),
    }
}

/// Responds to a Terminate with several Terminates and other messages.
fn terminate_for_terminate(t: &Target) -> Result<Response> {
    let mut peer = Peer::set_up(t.address)?;
    peer.send_valid_requests()?;
    peer.send(&write(UNKNOWN_STAG, 0))?;
    let code = loop {
        match peer.receive()? {
            Ok(ulpdu) if ulpdu.len() >= 20 && ulpdu[1] & 0xf == Op::Terminate as u8 => {
                break u16::from_be_bytes([ulpdu[18], ulpdu[19]]);
            }
            Ok(_) => {}
            Err(end) => return Ok(end),
        }
    };
    for _ in 0..3 {
        peer.send(&wire::untagged(Op::Terminate, 0, 1, &[0x11, 0, 0, 0]))?;
        peer.send(&write(UNKNOWN_STAG, 0))?;
    }
    peer.half_close()?;
    match peer.read_response()? {
        Response::Closed => Ok(Response::Terminate(code)),
        _ => Ok(Response::Garbage),
    }
}

/// Sends an octet of urgent data between two FPDUs. If the server's TCP removes the octet from the
/// stream, the server next receives an invalid Write; if not, an FPDU with a wrong CRC.
fn urgent(t: &Target) -> Result<Response> {
    let mut peer = Peer::set_up(t.address)?;
    peer.send_valid_requests()?;
    rustix::net::send(&peer.stream, &[0x55], rustix::net::SendFlags::OOB)?;
    acts::many_at_once(&mut peer, 1000, |_| vec![write(UNKNOWN_STAG, 0)])?;
    peer.read_response()
}

/// Sends an FPDU with nonzero padding. RFC 5044 forbids senders to do so, but receivers check only
/// the CRC.
fn padding(t: &Target) -> Result<Response> {
    let mut peer = Peer::set_up(t.address)?;
    peer.send_valid_requests()?;
    let ulpdu = wire::tagged(Op::Write, 0, 0, &[]);
    peer.send_padded(&ulpdu, 0xff)?;
    peer.send(&write(UNKNOWN_STAG, 0))?;
    peer.read_response()
}

/// Returns immediate data of `octets` octets (RFC 7306 section 6).
fn immediate(p: &mut Peer, octets: usize) -> Vec<u8> {
    let msn = p.next_msn(Op::Immediate);
    wire::untagged(Op::Immediate, 0, msn, &vec![0; octets])
}

fn region_end(grant: &Grant) -> u64 {
    grant.address + u64::from(grant.len)
}

pub(super) const ATTACKS: &[Attack] = &[
    // Fields at their limits.
    other(
        "DDP: queues of all sizes",
        Needs::Listener,
        untagged(1),
        queues,
    ),
    segment(
        "DDP: the last message number",
        Needs::Mpa,
        untagged(3),
        |p, _| with_msn(send(p, &[7; 8]), u32::MAX),
    ),
    segment(
        "DDP: the last message number, of a Read",
        Needs::Mpa,
        untagged(3),
        |p, g| with_msn(read(p, g.all, g.address, 0), u32::MAX),
    ),
    segment(
        "DDP: a message number half the range ahead",
        Needs::Mpa,
        untagged(3),
        |p, _| with_msn(send(p, &[7; 8]), 1 << 31 | 1),
    ),
    other(
        "DDP: an offset near 4 GiB in a second segment",
        Needs::Mpa,
        untagged(4),
        |t| {
            sequence(t, |p, _| {
                let first = without_last_flag(send(p, &[7; 8]));
                vec![first.clone(), at_offset(first, u32::MAX - 7)]
            })
        },
    ),
    other(
        "DDP: two messages of a queue, interleaved",
        Needs::Mpa,
        untagged(3),
        |t| {
            sequence(t, |p, _| {
                let (first, second) = (
                    without_last_flag(send(p, &[7; 8])),
                    without_last_flag(send(p, &[8; 8])),
                );
                vec![first.clone(), second, at_offset(first, 8)]
            })
        },
    ),
    other(
        "DDP: immediate data inside of a Send",
        Needs::Mpa,
        Expect::Closed,
        |t| {
            sequence(t, |p, _| {
                vec![
                    without_last_flag(send(p, &[7; 8])),
                    with_msn(immediate(p, 8), 1),
                ]
            })
        },
    ),
    other(
        "DDP: empty segments of one message, without an end",
        Needs::Mpa,
        tagged(0),
        |t| {
            sequence(t, |p, _| {
                let mut all = vec![without_last_flag(send(p, &[])); 20_000];
                all.push(write(UNKNOWN_STAG, 0));
                all
            })
        },
    ),
    segment(
        "RDMAP: a Read Request in two segments",
        Needs::Mpa,
        operation(0xff),
        |p, g| without_last_flag(read(p, g.all, g.address, 8)),
    ),
    segment(
        "RDMAP: a Read Request that is too long",
        Needs::Mpa,
        operation(0xff),
        |p, g| {
            let mut out = read(p, g.all, g.address, 8);
            out.push(0);
            out
        },
    ),
    segment(
        "RDMAP: a short atomic",
        Needs::Mpa,
        operation(0xff),
        |p, g| {
            let mut out = atomic(p, g.all, g.address);
            out.truncate(18 + 51);
            out
        },
    ),
    segment(
        "RDMAP: an empty atomic",
        Needs::Mpa,
        operation(0xff),
        |p, g| {
            let mut out = atomic(p, g.all, g.address);
            out.truncate(18);
            out
        },
    ),
    segment(
        "RDMAP: an atomic that is not aligned",
        Needs::Atomic,
        operation(7),
        |p, g| atomic(p, g.all, g.address + 4),
    ),
    segment(
        "RDMAP: an atomic beyond the end",
        Needs::Atomic,
        protection(1),
        |p, g| atomic(p, g.all, region_end(g)),
    ),
    segment(
        "RDMAP: an atomic whose offset wraps",
        Needs::Region,
        Expect::Closed,
        |p, g| atomic(p, g.all, u64::MAX - 3),
    ),
    segment(
        "RDMAP: immediate data of seven octets",
        Needs::Mpa,
        operation(0xff),
        |p, _| immediate(p, 7),
    ),
    segment(
        "RDMAP: empty immediate data",
        Needs::Mpa,
        operation(0xff),
        |p, _| immediate(p, 0),
    ),
    segment(
        "RDMAP: immediate data of a kilobyte",
        Needs::Mpa,
        operation(0xff),
        |p, _| immediate(p, 1024),
    ),
    other(
        "RDMAP: an empty Terminate",
        Needs::Mpa,
        Expect::ClosedWithoutTerminate,
        |t| sequence(t, |_, _| vec![wire::untagged(Op::Terminate, 0, 1, &[])]),
    ),
    other(
        "RDMAP: a Terminate of 60 KiB",
        Needs::Mpa,
        Expect::ClosedWithoutTerminate,
        |t| {
            sequence(t, |_, _| {
                vec![wire::untagged(Op::Terminate, 0, 1, &[0xff; 60_000])]
            })
        },
    ),
    // This Terminate announces a segment's header and length.
    other(
        "RDMAP: a Terminate without the headers that it announces",
        Needs::Mpa,
        Expect::ClosedWithoutTerminate,
        |t| {
            sequence(t, |_, _| {
                vec![wire::untagged(Op::Terminate, 0, 1, &[0x11, 0, 0xe0, 0])]
            })
        },
    ),
    segment(
        "RDMAP: a tagged Terminate",
        Needs::Mpa,
        operation(6),
        |_, _| wire::tagged(Op::Terminate, 0, 0, &[0x20, 2, 0, 0]),
    ),
    other(
        "RDMAP: a Terminate for a Terminate",
        Needs::Mpa,
        tagged(0),
        terminate_for_terminate,
    ),
    // A zero-length access is valid with any STag (RFC 5040 section 5.2.1, RFC 5041 section 7.1).
    other(
        "RDMAP: an empty Read of an unknown STag",
        Needs::Mpa,
        tagged(0),
        |t| {
            sequence(t, |p, _| {
                vec![read(p, UNKNOWN_STAG, u64::MAX, 0), write(UNKNOWN_STAG, 0)]
            })
        },
    ),
    // The server does not check the sink of a Read Request.
    other(
        "RDMAP: a Read whose sink wraps",
        Needs::Region,
        tagged(0),
        |t| {
            sequence(t, |p, g| {
                let mut request = read(p, g.all, g.address, 4096);
                request[18..22].fill(0xff);
                request[22..30].fill(0xff);
                vec![request, write(UNKNOWN_STAG, 0)]
            })
        },
    ),
    // The data are placed in the peer's memory, not in the server's.
    other(
        "RDMAP: a Read whose sink overlaps its source",
        Needs::Region,
        tagged(0),
        |t| {
            sequence(t, |p, g| {
                let mut request = read(p, g.all, g.address, 4096);
                request[18..22].copy_from_slice(&g.all.to_be_bytes());
                request[22..30].copy_from_slice(&(g.address + 8).to_be_bytes());
                vec![request, write(UNKNOWN_STAG, 0)]
            })
        },
    ),
    other("MPA: the longest FPDU", Needs::Region, tagged(0), |t| {
        sequence(t, |_, g| {
            vec![
                wire::tagged(Op::Write, g.all, g.address, &[0; 65535 - 14]),
                write(UNKNOWN_STAG, 0),
            ]
        })
    }),
    other(
        "MPA: padding that is not zero",
        Needs::Mpa,
        tagged(0),
        padding,
    ),
    other(
        "MPA: urgent data",
        Needs::Mpa,
        Expect::Either(0x1100, 0x2002),
        urgent,
    ),
    // Grants of other connections.
    other(
        "DDP: a Write by another connection's STag",
        Needs::Grant,
        tagged(2),
        |t| with_stolen_grant(t, connect_with_grant, |_, g| write(g.all, g.address)),
    ),
    other(
        "RDMAP: a Read by another connection's STag",
        Needs::Grant,
        protection(3),
        |t| with_stolen_grant(t, connect_with_grant, |p, g| read(p, g.all, g.address, 8)),
    ),
    other(
        "RDMAP: an atomic by another connection's STag",
        Needs::Grant,
        protection(3),
        |t| with_stolen_grant(t, connect_with_grant, |p, g| atomic(p, g.all, g.address)),
    ),
    other(
        "RDMAP: a Read by another connection's window",
        Needs::Window,
        protection(3),
        |t| {
            with_stolen_grant(t, connect_with_window, |p, g| {
                read(p, g.window, g.address + WINDOW, 8)
            })
        },
    ),
    other(
        "RDMAP: an invalidation of another connection's window",
        Needs::Window,
        protection(9),
        |t| with_stolen_grant(t, connect_with_window, |p, g| invalidate(p, g.window)),
    ),
    // Windows.
    other(
        "DDP: a Write into a window for Reads",
        Needs::Window,
        protection(2),
        |t| with_window(t, |_, g| vec![write(g.window, g.address + WINDOW)]),
    ),
    other(
        "RDMAP: a Read beyond the end of a window",
        Needs::Window,
        protection(1),
        |t| {
            with_window(t, |p, g| {
                let offset = g.address + WINDOW + u64::from(WINDOW_LEN) - 4;
                vec![read(p, g.window, offset, 8)]
            })
        },
    ),
    other(
        "RDMAP: a Read by a window that was invalidated",
        Needs::Window,
        protection(0),
        |t| {
            with_window(t, |p, g| {
                vec![
                    invalidate(p, g.window),
                    read(p, g.window, g.address + WINDOW, 8),
                ]
            })
        },
    ),
    other(
        "RDMAP: two invalidations of a window",
        Needs::Window,
        protection(9),
        |t| {
            with_window(t, |p, g| {
                vec![invalidate(p, g.window), invalidate(p, g.window)]
            })
        },
    ),
    other(
        "RDMAP: an invalidation of a window that is being read",
        Needs::Window,
        protection(0),
        invalidated_in_use,
    ),
    // Requests in flight.
    other(
        "RDMAP: more Reads and atomics than were agreed",
        Needs::Atomic,
        untagged(2),
        reads_and_atomics,
    ),
    other(
        "RDMAP: reset with all in flight",
        Needs::Listener,
        Expect::Silence,
        resets_in_flight,
    ),
    other(
        "work: a Write without an end",
        Needs::Region,
        tagged(0),
        endless_write,
    ),
    other(
        "work: a window of zero, and a wrong Write",
        Needs::Grant,
        Expect::ClosedWithoutTerminate,
        |t| with_full_buffer(t, |p| p.send(&write(UNKNOWN_STAG, 0))),
    ),
    other(
        "work: a window of zero, and half-close",
        Needs::Grant,
        Expect::ClosedWithoutTerminate,
        |t| with_full_buffer(t, |p| p.half_close()),
    ),
    other(
        "work: a window of zero, and the server destroys its queue pair",
        Needs::Grant,
        Expect::ClosedWithoutTerminate,
        |t| with_full_buffer(t, |p| p.request(Op::Send, b"Leave")),
    ),
    other(
        "work: many clients that request much and read nothing",
        Needs::Grant,
        Expect::Silence,
        many_greedy_connections,
    ),
    other(
        "work: responses that are read slowly",
        Needs::Region,
        Expect::Silence,
        slow_reader,
    ),
];
