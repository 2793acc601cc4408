//! Attacks that combine several messages or connections, or act while requests are in flight.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::acts::{self, Target, UNKNOWN, write};
use super::kind::{
    Attack, Expect, Needs, atomic, invalidate, operation, other, protection, read, segment, send,
    tagged, untagged,
};
use super::peer::{self, Grant, Peer, Seen};
use super::wire::{self, Op, at};

/// Distance from the region's end to the word by which the C server reports that its window is
/// bound.
const BOUND: u32 = 16;
/// Offset of the window in the region, and its length in bytes.
const WINDOW: u64 = 4096;
const WINDOW_LEN: u32 = 8192;

/// States of an unclosed end in the kernel's table: ESTABLISHED and CLOSE_WAIT.
const OPEN: [&str; 2] = ["01", "08"];

fn granted(t: &Target) -> Result<(Peer, Grant)> {
    let peer = Peer::set_up(t.address)?;
    let grant = peer.grant.context("the server grants nothing")?;
    Ok((peer, grant))
}

/// Connects, and polls a word by Reads until the window is bound.
fn lent(t: &Target) -> Result<(Peer, Grant)> {
    let (mut peer, grant) = granted(t)?;
    let word = grant.address + u64::from(grant.len - BOUND);
    for _ in 0..1000 {
        let request = wire::read_request(grant.all, word, 8);
        peer.request(Op::Read, &request)?;
        match peer.receive()? {
            Ok(ulpdu) if ulpdu.len() == 22 && ulpdu[14..] != [0; 8] => return Ok((peer, grant)),
            Ok(_) => std::thread::sleep(Duration::from_millis(1)),
            Err(end) => bail!("instead of a word: {end}"),
        }
    }
    bail!("the window is not bound")
}

/// Sends Read Requests and stops reading. Leaves the socket's buffer size alone: a shrunken buffer
/// would drop packets instead of closing the window.
fn fill(peer: &mut Peer, reads: u32, (stag, offset, len): (u32, u64, u32)) -> Result<()> {
    for _ in 0..reads {
        peer.request(Op::Read, &wire::read_request(stag, offset, len))?;
    }
    // Afterwards the server's socket is full: it holds at most 4 MiB (tcp_wmem), which is eight
    // Reads of a region.
    std::thread::sleep(Duration::from_millis(20));
    Ok(())
}

/// Waits until the server has closed its end of a connection whose data this end does not read.
/// Only the kernel's table shows that, because the kernel keeps sending from a socket without an
/// inode. A kernel server's socket never has an inode.
fn let_go(t: &Target, own: SocketAddr) -> Result<Seen> {
    let ends = [t.address, own].map(|end| format!(":{:04X}", end.port()));
    let start = Instant::now();
    while start.elapsed() < t.release_limit {
        let table = std::fs::read_to_string("/proc/net/tcp")?;
        let held = table.lines().any(|line| {
            let fields: Vec<_> = line.split_whitespace().collect();
            let of_server = fields.get(1..3).is_some_and(|found| {
                let mut both = found.iter().zip(&ends);
                both.all(|(found, end)| found.ends_with(end.as_str()))
            });
            let state = fields.get(3).copied().unwrap_or_default();
            of_server && (OPEN.contains(&state) || fields.get(9) != Some(&"0"))
        });
        if !held {
            return Ok(Seen::Ended);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(Seen::Held)
}

/// Marks a segment as not the last of its message.
fn open_ended(mut segment: Vec<u8>) -> Vec<u8> {
    segment[at::DDP_CONTROL] &= !0x40;
    segment
}

fn at_offset(mut segment: Vec<u8>, offset: u32) -> Vec<u8> {
    segment[at::MO - 3..=at::MO].copy_from_slice(&offset.to_be_bytes());
    segment
}

fn numbered(mut segment: Vec<u8>, msn: u32) -> Vec<u8> {
    segment[at::MSN - 3..=at::MSN].copy_from_slice(&msn.to_be_bytes());
    segment
}

/// Sends segments on a connection with outstanding requests.
fn sequence(t: &Target, make: fn(&mut Peer, &Grant) -> Vec<Vec<u8>>) -> Result<Seen> {
    let mut peer = Peer::set_up(t.address)?;
    peer.busy()?;
    let grant = peer.grant.unwrap_or(acts::NOTHING);
    for segment in make(&mut peer, &grant) {
        peer.send(&segment)?;
    }
    peer.answer()
}

/// Tries invalid queue numbers, each on a new connection.
fn queues(t: &Target) -> Result<Seen> {
    let mut seen = Seen::Held;
    for queue in [4_u32, 5, 7, 255, 256, 0x8000_0000, 0x8000_0001, u32::MAX] {
        let mut peer = Peer::set_up(t.address)?;
        peer.busy()?;
        let mut out = send(&mut peer, &[7; 8]);
        out[at::QN - 3..=at::QN].copy_from_slice(&queue.to_be_bytes());
        peer.send(&out)?;
        seen = peer.answer()?;
        if seen != Seen::Terminate(0x1201) {
            break;
        }
    }
    Ok(seen)
}

/// Uses the grant of another, live connection.
fn stolen(
    t: &Target,
    victim: fn(&Target) -> Result<(Peer, Grant)>,
    make: fn(&mut Peer, &Grant) -> Vec<u8>,
) -> Result<Seen> {
    let (_owner, grant) = victim(t)?;
    let mut thief = Peer::set_up(t.address)?;
    thief.busy()?;
    let segment = make(&mut thief, &grant);
    thief.send(&segment)?;
    thief.answer()
}

/// Sends segments that use the window.
fn windowed(t: &Target, make: fn(&mut Peer, &Grant) -> Vec<Vec<u8>>) -> Result<Seen> {
    let (mut peer, grant) = lent(t)?;
    for segment in make(&mut peer, &grant) {
        peer.send(&segment)?;
    }
    peer.answer()
}

/// Invalidates a window before the server has answered Reads from it. The server checks access when
/// it answers.
fn invalidated_in_use(t: &Target) -> Result<Seen> {
    let (mut peer, grant) = lent(t)?;
    fill(&mut peer, 12, (grant.all, grant.address, grant.len))?;
    for _ in 0..4 {
        let request = wire::read_request(grant.window, grant.address + WINDOW, WINDOW_LEN);
        peer.request(Op::Read, &request)?;
    }
    let segment = invalidate(&mut peer, grant.window);
    peer.send(&segment)?;
    std::thread::sleep(Duration::from_millis(20));
    peer.answer()
}

/// Runs `then` while the server's socket is full. The server must release the connection
/// nevertheless.
fn full(t: &Target, then: fn(&mut Peer) -> Result<()>) -> Result<Seen> {
    let (mut peer, grant) = granted(t)?;
    fill(&mut peer, 16, (grant.all, grant.address, grant.len))?;
    // After `then`, the socket may have no address.
    let own = peer.stream.local_addr()?;
    then(&mut peer)?;
    let_go(t, own)
}

/// Makes many connections request as much as possible and read nothing.
fn greedy_crowd(t: &Target) -> Result<Seen> {
    let mut all = Vec::new();
    for _ in 0..50 * t.scale.min(4) {
        let (mut peer, grant) = granted(t)?;
        peer.narrow()?;
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
    Ok(Seen::Held)
}

/// Reads the answers in small pieces.
fn slow_reader(t: &Target) -> Result<Seen> {
    use std::io::Read as _;
    let (mut peer, grant) = granted(t)?;
    fill(&mut peer, 16, (grant.all, grant.address, grant.len))?;
    for _ in 0..100 * t.scale {
        peer.stream.read_exact(&mut [0; 100])?;
        std::thread::sleep(Duration::from_millis(1));
    }
    peer::reset(peer.stream)?;
    Ok(Seen::Held)
}

/// Resets connections after different delays while Reads, Writes and atomics are in flight.
fn resets_in_flight(t: &Target) -> Result<Seen> {
    for pause_us in [0, 20, 50, 100, 200, 500, 1000] {
        let mut peer = Peer::set_up(t.address)?;
        peer.busy()?;
        std::thread::sleep(Duration::from_micros(pause_us));
        peer::reset(peer.stream)?;
    }
    Ok(Seen::Held)
}

/// Sends more alternating Reads and atomics than agreed, and reads no answers.
fn reads_and_atomics(t: &Target) -> Result<Seen> {
    let (mut peer, grant) = granted(t)?;
    acts::many_at_once(&mut peer, 1000, |peer| {
        let read = peer.message(Op::Read, &acts::little(&grant));
        let add = wire::fetch_add(grant.all, grant.address);
        vec![read, peer.message(Op::Atomic, &add)]
    })?;
    peer.answer()
}

/// Sends one endless Write to the same memory. Only the long form reaches 4 GiB, the limit of a
/// message (RFC 5040 section 4.3).
fn endless_write(t: &Target) -> Result<Seen> {
    let (mut peer, grant) = granted(t)?;
    let segment = open_ended(wire::tagged(
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
    let wrong = match t.scale {
        1 => write(UNKNOWN, 0),
        _ => wire::tagged(Op::Write, grant.all, grant.address, &[7; 8]),
    };
    peer.send(&wrong)?;
    match peer.answer()? {
        // The long form has exceeded 4 GiB.
        Seen::Terminate(0x1101) if t.scale > 1 => Ok(Seen::Terminate(0x1100)),
        other => Ok(other),
    }
}

/// Answers a Terminate with several Terminates and other messages.
fn terminate_for_terminate(t: &Target) -> Result<Seen> {
    let mut peer = Peer::set_up(t.address)?;
    peer.busy()?;
    peer.send(&write(UNKNOWN, 0))?;
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
        peer.send(&write(UNKNOWN, 0))?;
    }
    peer.half_close()?;
    match peer.answer()? {
        Seen::Ended => Ok(Seen::Terminate(code)),
        _ => Ok(Seen::Garbage),
    }
}

/// Sends an octet of urgent data between two FPDUs. If TCP removes it from the stream, the next
/// FPDU is an invalid Write; otherwise the stream is shifted, and a CRC is wrong.
fn urgent(t: &Target) -> Result<Seen> {
    let mut peer = Peer::set_up(t.address)?;
    peer.busy()?;
    rustix::net::send(&peer.stream, &[0x55], rustix::net::SendFlags::OOB)?;
    acts::many_at_once(&mut peer, 1000, |_| vec![write(UNKNOWN, 0)])?;
    peer.answer()
}

/// Sends an FPDU with nonzero padding, which the RFC forbids to senders; receivers check only the
/// CRC.
fn padding(t: &Target) -> Result<Seen> {
    let mut peer = Peer::set_up(t.address)?;
    peer.busy()?;
    let ulpdu = wire::tagged(Op::Write, 0, 0, &[]);
    peer.send_padded(&ulpdu, 0xff)?;
    peer.send(&write(UNKNOWN, 0))?;
    peer.answer()
}

/// Returns immediate data of `octets` octets (RFC 7306 section 6).
fn immediate(p: &mut Peer, octets: usize) -> Vec<u8> {
    let msn = p.next(Op::Immediate);
    wire::untagged(Op::Immediate, 0, msn, &vec![0; octets])
}

fn aligned_end(grant: &Grant) -> u64 {
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
        |p, _| numbered(send(p, &[7; 8]), u32::MAX),
    ),
    segment(
        "DDP: the last message number, of a Read",
        Needs::Mpa,
        untagged(3),
        |p, g| numbered(read(p, g.all, g.address, 0), u32::MAX),
    ),
    segment(
        "DDP: a message number half the range ahead",
        Needs::Mpa,
        untagged(3),
        |p, _| numbered(send(p, &[7; 8]), 1 << 31 | 1),
    ),
    other(
        "DDP: an offset near 4 GiB in a second segment",
        Needs::Mpa,
        untagged(4),
        |t| {
            sequence(t, |p, _| {
                let first = open_ended(send(p, &[7; 8]));
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
                let (first, second) = (open_ended(send(p, &[7; 8])), open_ended(send(p, &[8; 8])));
                vec![first.clone(), second, at_offset(first, 8)]
            })
        },
    ),
    other(
        "DDP: immediate data inside of a Send",
        Needs::Mpa,
        Expect::Over,
        |t| {
            sequence(t, |p, _| {
                vec![open_ended(send(p, &[7; 8])), numbered(immediate(p, 8), 1)]
            })
        },
    ),
    other(
        "DDP: empty segments of one message, without an end",
        Needs::Mpa,
        tagged(0),
        |t| {
            sequence(t, |p, _| {
                let mut all = vec![open_ended(send(p, &[])); 20_000];
                all.push(write(UNKNOWN, 0));
                all
            })
        },
    ),
    segment(
        "RDMAP: a Read Request in two segments",
        Needs::Mpa,
        operation(0xff),
        |p, g| open_ended(read(p, g.all, g.address, 8)),
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
        "RDMAP: an atomic of nothing",
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
        "RDMAP: an atomic behind the end",
        Needs::Atomic,
        protection(1),
        |p, g| atomic(p, g.all, aligned_end(g)),
    ),
    segment(
        "RDMAP: an atomic whose offset wraps",
        Needs::Region,
        Expect::Over,
        |p, g| atomic(p, g.all, u64::MAX - 3),
    ),
    segment(
        "RDMAP: immediate data of seven octets",
        Needs::Mpa,
        operation(0xff),
        |p, _| immediate(p, 7),
    ),
    segment(
        "RDMAP: immediate data of nothing",
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
        "RDMAP: a Terminate of nothing",
        Needs::Mpa,
        Expect::Ended,
        |t| sequence(t, |_, _| vec![wire::untagged(Op::Terminate, 0, 1, &[])]),
    ),
    other(
        "RDMAP: a Terminate of 60 KiB",
        Needs::Mpa,
        Expect::Ended,
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
        Expect::Ended,
        |t| {
            sequence(t, |_, _| {
                vec![wire::untagged(Op::Terminate, 0, 1, &[0x11, 0, 0xe0, 0])]
            })
        },
    ),
    segment(
        "RDMAP: a Terminate with a tag",
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
    // A zero-length access is not refused (RFC 5040 section 5.2.1, RFC 5041 section 7.1).
    other(
        "RDMAP: a Read of nothing from no such STag",
        Needs::Mpa,
        tagged(0),
        |t| {
            sequence(t, |p, _| {
                vec![read(p, UNKNOWN, u64::MAX, 0), write(UNKNOWN, 0)]
            })
        },
    ),
    // The server does not check the peer's sink.
    other(
        "RDMAP: a Read whose sink wraps",
        Needs::Region,
        tagged(0),
        |t| {
            sequence(t, |p, g| {
                let mut request = read(p, g.all, g.address, 4096);
                request[18..22].fill(0xff);
                request[22..30].fill(0xff);
                vec![request, write(UNKNOWN, 0)]
            })
        },
    ),
    // The answer is placed at the peer, not at the server.
    other(
        "RDMAP: a Read whose sink overlaps its source",
        Needs::Region,
        tagged(0),
        |t| {
            sequence(t, |p, g| {
                let mut request = read(p, g.all, g.address, 4096);
                request[18..22].copy_from_slice(&g.all.to_be_bytes());
                request[22..30].copy_from_slice(&(g.address + 8).to_be_bytes());
                vec![request, write(UNKNOWN, 0)]
            })
        },
    ),
    other("MPA: the longest FPDU", Needs::Region, tagged(0), |t| {
        sequence(t, |_, g| {
            vec![
                wire::tagged(Op::Write, g.all, g.address, &[0; 65535 - 14]),
                write(UNKNOWN, 0),
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
        |t| stolen(t, granted, |_, g| write(g.all, g.address)),
    ),
    other(
        "RDMAP: a Read by another connection's STag",
        Needs::Grant,
        protection(3),
        |t| stolen(t, granted, |p, g| read(p, g.all, g.address, 8)),
    ),
    other(
        "RDMAP: an atomic by another connection's STag",
        Needs::Grant,
        protection(3),
        |t| stolen(t, granted, |p, g| atomic(p, g.all, g.address)),
    ),
    other(
        "RDMAP: a Read by another connection's window",
        Needs::Window,
        protection(3),
        |t| stolen(t, lent, |p, g| read(p, g.window, g.address + WINDOW, 8)),
    ),
    other(
        "RDMAP: an invalidation of another connection's window",
        Needs::Window,
        protection(9),
        |t| stolen(t, lent, |p, g| invalidate(p, g.window)),
    ),
    // Windows.
    other(
        "DDP: a Write into a window for Reads",
        Needs::Window,
        protection(2),
        |t| windowed(t, |_, g| vec![write(g.window, g.address + WINDOW)]),
    ),
    other(
        "RDMAP: a Read behind the end of a window",
        Needs::Window,
        protection(1),
        |t| {
            windowed(t, |p, g| {
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
            windowed(t, |p, g| {
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
            windowed(t, |p, g| {
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
        Expect::Held,
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
        Expect::Ended,
        |t| full(t, |p| p.send(&write(UNKNOWN, 0))),
    ),
    other(
        "work: a window of zero, and half-close",
        Needs::Grant,
        Expect::Ended,
        |t| full(t, |p| p.half_close()),
    ),
    other(
        "work: a window of zero, and the server leaves",
        Needs::Grant,
        Expect::Ended,
        |t| full(t, |p| p.request(Op::Send, b"Leave")),
    ),
    other(
        "work: a crowd that asks for much and takes nothing",
        Needs::Grant,
        Expect::Held,
        greedy_crowd,
    ),
    other(
        "work: answers that are taken slowly",
        Needs::Region,
        Expect::Held,
        slow_reader,
    ),
];
