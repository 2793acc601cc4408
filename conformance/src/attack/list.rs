//! The list of all attacks, and attacks with a single message.

use super::acts::{self, UNKNOWN_STAG, write};
use super::kind::{
    Attack, Expect, Needs, atomic, invalidate, mpa, operation, other, protection, read, segment,
    send, tagged, untagged,
};
use super::peer::Peer;
use super::wire::{self, Op, header_offset};
use super::{mixed, starting};

/// Returns a Send whose header octet at `offset` is replaced by `octet`.
fn changed(p: &mut Peer, offset: usize, octet: u8) -> Vec<u8> {
    let mut out = send(p, &[7; 8]);
    out[offset] = octet;
    out
}

/// An offset so large that an access of eight octets wraps around.
const WRAPS: u64 = u64::MAX - 3;

pub(super) fn all() -> impl Iterator<Item = &'static Attack> {
    [starting::ATTACKS, ATTACKS, mixed::ATTACKS]
        .into_iter()
        .flatten()
}

const ATTACKS: &[Attack] = &[
    // The set-up (RFC 5044 section 7.1).
    other(
        "set-up: another protocol",
        Needs::Port,
        Expect::ClosedWithoutTerminate,
        |t| acts::first_octets(t, b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n"),
    ),
    other(
        "set-up: a reply instead of a request",
        Needs::Port,
        Expect::ClosedWithoutTerminate,
        |t| acts::first_octets(t, &wire::frame(wire::REPLY, wire::CRC, 1, 0)),
    ),
    other(
        "set-up: revision 255",
        Needs::Listener,
        Expect::ClosedWithoutTerminate,
        |t| acts::first_octets(t, &wire::frame(wire::REQUEST, wire::CRC, 255, 0)),
    ),
    other(
        "set-up: 65535 octets of private data",
        Needs::Listener,
        Expect::ClosedWithoutTerminate,
        |t| acts::first_octets(t, &wire::frame(wire::REQUEST, wire::CRC, 1, u16::MAX)),
    ),
    other(
        "set-up: revision 2 without its data",
        Needs::Listener,
        Expect::ClosedWithoutTerminate,
        |t| {
            acts::first_octets(
                t,
                &wire::frame(wire::REQUEST, wire::CRC | wire::ENHANCED, 2, 0),
            )
        },
    ),
    other(
        "set-up: closed at once",
        Needs::Port,
        Expect::ClosedWithoutTerminate,
        |t| acts::half_closed(t, 0),
    ),
    other(
        "set-up: closed inside the request",
        Needs::Listener,
        Expect::ClosedWithoutTerminate,
        |t| acts::half_closed(t, 11),
    ),
    other(
        "set-up: reset at every octet",
        Needs::Port,
        Expect::Silence,
        acts::resets_in_set_up,
    ),
    other(
        "set-up: reset before and after the reply",
        Needs::Port,
        Expect::Silence,
        acts::resets_after_request,
    ),
    other(
        "set-up: silence",
        Needs::Port,
        Expect::Silence,
        acts::silence,
    ),
    other(
        "set-up: one octet at a time",
        Needs::Port,
        Expect::Silence,
        acts::slow_loris,
    ),
    other(
        "set-up: many half-open connections",
        Needs::Port,
        Expect::Silence,
        acts::half_open,
    ),
    // Frames (RFC 5044 sections 4 and 8).
    other("MPA: a wrong CRC", Needs::Mpa, mpa(2), acts::wrong_crc),
    segment("MPA: half a header", Needs::Mpa, mpa(3), |_, _| {
        vec![0x41, 0x43, 0, 0]
    }),
    segment("MPA: an empty ULPDU", Needs::Mpa, mpa(3), |_, _| Vec::new()),
    other(
        "MPA: a wrong marker",
        Needs::Markers,
        mpa(3),
        acts::wrong_marker,
    ),
    other(
        "MPA: no markers where they were agreed",
        Needs::Markers,
        Expect::Closed,
        acts::no_markers,
    ),
    other(
        "MPA: closed inside an FPDU",
        Needs::Mpa,
        Expect::Closed,
        acts::closed_inside,
    ),
    other(
        "MPA: reset at every octet of an FPDU",
        Needs::Listener,
        Expect::Silence,
        acts::resets_inside,
    ),
    other(
        "MPA: an FPDU octet by octet",
        Needs::Mpa,
        tagged(0),
        acts::slow_fpdu,
    ),
    other(
        "MPA: half-close after the set-up",
        Needs::Mpa,
        Expect::ClosedWithoutTerminate,
        |t| {
            let mut peer = Peer::set_up(t.address)?;
            peer.half_close()?;
            peer.read_response()
        },
    ),
    // Segments (RFC 5041 section 7.2).
    segment(
        "DDP: an unknown version",
        Needs::Mpa,
        untagged(6),
        |p, _| changed(p, header_offset::DDP_CONTROL, 0x42),
    ),
    segment(
        "DDP: an unknown version, tagged",
        Needs::Mpa,
        tagged(4),
        |_, g| {
            let mut out = write(g.all, g.address);
            out[header_offset::DDP_CONTROL] = 0xc3;
            out
        },
    ),
    segment("DDP: an unknown queue", Needs::Mpa, untagged(1), |p, _| {
        changed(p, header_offset::QN, 4)
    }),
    segment(
        "DDP: a skipped message number",
        Needs::Mpa,
        untagged(3),
        |p, _| {
            p.next_msn(Op::Send);
            send(p, &[7; 8])
        },
    ),
    segment(
        "DDP: a repeated message number",
        Needs::Mpa,
        untagged(3),
        |p, _| changed(p, header_offset::MSN, 0),
    ),
    segment(
        "DDP: an offset in a first segment",
        Needs::Mpa,
        untagged(4),
        |p, _| changed(p, header_offset::MO, 8),
    ),
    segment(
        "DDP: a message that is too long",
        Needs::Short,
        untagged(5),
        |p, _| send(p, &[7; 8192]),
    ),
    other(
        "DDP: a message without an end",
        Needs::Short,
        untagged(5),
        acts::endless_message,
    ),
    segment("DDP: an unknown STag", Needs::Mpa, tagged(0), |_, _| {
        write(UNKNOWN_STAG, 0)
    }),
    segment(
        "DDP: a Write beyond the end",
        Needs::Region,
        tagged(1),
        |_, g| write(g.all, g.address + u64::from(g.len) - 4),
    ),
    segment(
        "DDP: a Write before the start",
        Needs::Region,
        tagged(1),
        |_, g| write(g.all, g.address - 4),
    ),
    segment(
        "DDP: a Write whose offset wraps",
        Needs::Region,
        tagged(3),
        |_, g| write(g.all, WRAPS),
    ),
    segment(
        "DDP: a Write without the access right",
        Needs::Grant,
        protection(2),
        |_, g| write(g.local, g.address + u64::from(g.len) + 4096),
    ),
    segment(
        "DDP: a Write into another domain",
        Needs::Grant,
        tagged(2),
        |_, g| write(g.foreign, g.address + u64::from(g.len) + 8192),
    ),
    other(
        "DDP: STags guessed at random",
        Needs::Listener,
        tagged(0),
        acts::guesses,
    ),
    // Messages (RFC 5040 sections 4.8 and 7, RFC 7306 section 8).
    segment(
        "RDMAP: an unknown version",
        Needs::Mpa,
        operation(5),
        |p, _| changed(p, header_offset::RDMAP_CONTROL, 0x83),
    ),
    segment(
        "RDMAP: an unknown opcode",
        Needs::Mpa,
        operation(6),
        |p, _| changed(p, header_offset::RDMAP_CONTROL, 0x4c),
    ),
    segment(
        "RDMAP: an untagged Write",
        Needs::Mpa,
        operation(6),
        |p, _| changed(p, header_offset::RDMAP_CONTROL, 0x40),
    ),
    segment(
        "RDMAP: another operation's queue",
        Needs::Mpa,
        operation(6),
        |p, g| {
            let queued = if g.all == 0 { 1 } else { 9 };
            let mut out = changed(p, header_offset::QN, 1);
            out[header_offset::MSN] = queued;
            out
        },
    ),
    segment(
        "RDMAP: a Read of an unknown STag",
        Needs::Mpa,
        protection(0),
        |p, _| read(p, UNKNOWN_STAG, 0, 8),
    ),
    segment(
        "RDMAP: a Read beyond the end",
        Needs::Region,
        protection(1),
        |p, g| read(p, g.all, g.address + u64::from(g.len) - 4, 8),
    ),
    segment(
        "RDMAP: a Read of 4 GiB",
        Needs::Region,
        protection(1),
        |p, g| read(p, g.all, g.address, u32::MAX),
    ),
    segment(
        "RDMAP: a Read whose offset wraps",
        Needs::Region,
        protection(4),
        |p, g| read(p, g.all, WRAPS, 8),
    ),
    segment(
        "RDMAP: a Read without the access right",
        Needs::Grant,
        protection(2),
        |p, g| read(p, g.local, g.address + u64::from(g.len) + 4096, 8),
    ),
    segment(
        "RDMAP: a Read from another domain",
        Needs::Grant,
        protection(3),
        |p, g| read(p, g.foreign, g.address + u64::from(g.len) + 8192, 8),
    ),
    segment(
        "RDMAP: a short Read Request",
        Needs::Mpa,
        operation(0xff),
        |p, g| {
            let mut out = read(p, g.all, g.address, 8);
            out.truncate(18 + 20);
            out
        },
    ),
    segment(
        "RDMAP: an unsolicited Read Response",
        Needs::Mpa,
        operation(6),
        |_, g| wire::tagged(Op::ReadResponse, g.all, g.address, &[7; 8]),
    ),
    segment(
        "RDMAP: an unsolicited Atomic Response",
        Needs::Mpa,
        operation(6),
        |p, _| {
            let msn = p.next_msn(Op::AtomicResponse);
            wire::untagged(Op::AtomicResponse, 0, msn, &[7; 12])
        },
    ),
    segment(
        "RDMAP: an atomic at an unknown STag",
        Needs::Mpa,
        protection(0),
        |p, _| atomic(p, UNKNOWN_STAG, 0),
    ),
    segment(
        "RDMAP: an atomic without the access right",
        Needs::Grant,
        protection(2),
        |p, g| atomic(p, g.local, g.address + u64::from(g.len) + 4096),
    ),
    segment(
        "RDMAP: an atomic in another domain",
        Needs::Grant,
        protection(3),
        |p, g| atomic(p, g.foreign, g.address + u64::from(g.len) + 8192),
    ),
    segment(
        "RDMAP: an unknown atomic operation",
        Needs::Mpa,
        operation(6),
        |p, g| {
            let mut out = atomic(p, g.all, g.address);
            out[header_offset::ATOMIC_OP] = 1;
            out
        },
    ),
    segment(
        "RDMAP: an invalidation of an unknown STag",
        Needs::Mpa,
        protection(9),
        |p, _| invalidate(p, UNKNOWN_STAG),
    ),
    segment(
        "RDMAP: an invalidation of a region",
        Needs::Region,
        protection(9),
        |p, g| invalidate(p, g.all),
    ),
    segment(
        "RDMAP: an invalidation in another domain",
        Needs::Grant,
        protection(9),
        |p, g| invalidate(p, g.foreign),
    ),
    other(
        "RDMAP: more Reads than were agreed",
        Needs::Region,
        untagged(2),
        acts::too_many_reads,
    ),
    other(
        "RDMAP: a storm of Terminates",
        Needs::Mpa,
        Expect::ClosedWithoutTerminate,
        acts::many_terminates,
    ),
    other(
        "RDMAP: a Write after a Terminate",
        Needs::Grant,
        Expect::ClosedWithoutTerminate,
        acts::write_after_terminate,
    ),
    other(
        "RDMAP: a Read Response that is too long",
        Needs::Reader,
        tagged(1),
        |t| {
            acts::respond(t, |stag, offset, len| {
                wire::tagged(Op::ReadResponse, stag, offset, &vec![7; len + 8])
            })
        },
    ),
    other(
        "RDMAP: a Read Response to another STag",
        Needs::Reader,
        tagged(0),
        |t| {
            acts::respond(t, |_, offset, len| {
                wire::tagged(Op::ReadResponse, UNKNOWN_STAG, offset, &vec![7; len])
            })
        },
    ),
    other(
        "RDMAP: a Read Response to another offset",
        Needs::Reader,
        tagged(1),
        |t| {
            acts::respond(t, |stag, offset, len| {
                wire::tagged(Op::ReadResponse, stag, offset + 8, &vec![7; len])
            })
        },
    ),
    other(
        "RDMAP: a Write to the sink of a Read",
        Needs::Reader,
        tagged(0),
        |t| {
            acts::respond(t, |stag, offset, len| {
                wire::tagged(Op::Write, stag, offset, &vec![7; len])
            })
        },
    ),
    other(
        "RDMAP: no Read Response",
        Needs::Reader,
        Expect::Silence,
        acts::no_response,
    ),
    // Work (RFC 5042 section 6.4).
    other(
        "work: tiny FPDUs by the hundred thousand",
        Needs::Mpa,
        tagged(0),
        acts::tiny_fpdus,
    ),
    other(
        "work: a window of zero",
        Needs::Region,
        Expect::Silence,
        acts::zero_window,
    ),
    other(
        "work: Sends without a pause",
        Needs::Mpa,
        Expect::Any,
        acts::many_sends,
    ),
    other(
        "work: connections without a pause",
        Needs::Listener,
        Expect::Silence,
        acts::many_connections,
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        let mut seen = std::collections::HashSet::new();
        for attack in all() {
            assert!(seen.insert(attack.name), "{} twice", attack.name);
        }
    }
}
