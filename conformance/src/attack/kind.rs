//! The type of an attack: what it needs of the server, what it sends, and the answer that the RFCs
//! require; and the segments that several attacks send.

use anyhow::{Result, bail};

use super::acts::{NOTHING, Target};
use super::peer::{Grant, Peer, Seen};
use super::wire::{self, Op};

/// The property of a server that an attack needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Needs {
    Port,
    /// An MPA listener.
    Mpa,
    /// An MPA listener that accepts any number of connections, whatever their fate.
    Listener,
    /// An MPA listener with short receives.
    Short,
    /// A program that grants memory with all rights.
    Region,
    /// A region on a device with atomics.
    Atomic,
    /// The verbs server in C, which grants and denies access to several kinds of memory.
    Grant,
    /// The verbs server in C with a memory window.
    Window,
    /// A program that reads the memory named by a message of 16 octets, as rping does.
    Reader,
    /// A listener that requests markers.
    Markers,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Expect {
    /// A Terminate with this layer, type and code, and the end of the stream.
    Terminate(u16),
    /// A Terminate with one of two codes.
    Either(u16, u16),
    /// The end of the stream, with or without a Terminate.
    Over,
    /// The end of the stream without a Terminate, which the RFC does not allow here.
    Ended,
    /// None: the attacker closes before an answer is possible.
    Held,
    /// Any: the server's program decides.
    Any,
}

impl Expect {
    pub(super) fn holds(self, seen: Seen) -> bool {
        match self {
            Self::Terminate(code) => seen == Seen::Terminate(code),
            Self::Either(one, other) => {
                seen == Seen::Terminate(one) || seen == Seen::Terminate(other)
            }
            Self::Over => matches!(seen, Seen::Terminate(_) | Seen::Ended),
            Self::Ended => seen == Seen::Ended,
            Self::Held => seen == Seen::Held,
            Self::Any => true,
        }
    }

    pub(super) fn name(self) -> String {
        match self {
            Self::Terminate(code) => format!("Terminate {code:04x}"),
            Self::Either(one, other) => format!("{one:04x} or {other:04x}"),
            Self::Over => "end".into(),
            Self::Ended => "end, no Terminate".into(),
            Self::Held => "-".into(),
            Self::Any => "any".into(),
        }
    }
}

pub(super) type Run = fn(&Target) -> Result<Seen>;
/// Builds the segment of a violation.
pub(super) type Make = fn(&mut Peer, &Grant) -> Vec<u8>;

enum How {
    /// Sends one segment on a connection with outstanding requests.
    Segment(Make),
    /// Runs a function.
    Run(Run),
}

pub(super) struct Attack {
    pub(super) name: &'static str,
    pub(super) needs: Needs,
    pub(super) expect: Expect,
    how: How,
}

impl Attack {
    pub(super) fn run(&self, target: &Target) -> Result<Seen> {
        match self.how {
            How::Run(run) => run(target),
            How::Segment(make) => {
                let mut peer = Peer::set_up(target.address)?;
                peer.busy()?;
                let grant = match peer.grant {
                    Some(grant) => grant,
                    None if matches!(self.needs, Needs::Grant | Needs::Region) => {
                        bail!("the server grants nothing")
                    }
                    None => NOTHING,
                };
                let segment = make(&mut peer, &grant);
                peer.send(&segment)?;
                peer.answer()
            }
        }
    }
}

/// Codes of Terminates by layer and type (RFC 5040 section 4.8).
pub(super) const fn protection(code: u16) -> Expect {
    Expect::Terminate(0x0100 | code)
}
pub(super) const fn operation(code: u16) -> Expect {
    Expect::Terminate(0x0200 | code)
}
pub(super) const fn tagged(code: u16) -> Expect {
    Expect::Terminate(0x1100 | code)
}
pub(super) const fn untagged(code: u16) -> Expect {
    Expect::Terminate(0x1200 | code)
}
pub(super) const fn mpa(code: u16) -> Expect {
    Expect::Terminate(0x2000 | code)
}

pub(super) const fn segment(
    name: &'static str,
    needs: Needs,
    expect: Expect,
    make: Make,
) -> Attack {
    Attack {
        name,
        needs,
        expect,
        how: How::Segment(make),
    }
}

pub(super) const fn other(name: &'static str, needs: Needs, expect: Expect, run: Run) -> Attack {
    Attack {
        name,
        needs,
        expect,
        how: How::Run(run),
    }
}

pub(super) fn read(p: &mut Peer, stag: u32, offset: u64, len: u32) -> Vec<u8> {
    let msn = p.next(Op::Read);
    wire::untagged(Op::Read, 0, msn, &wire::read_request(stag, offset, len))
}

pub(super) fn atomic(p: &mut Peer, stag: u32, offset: u64) -> Vec<u8> {
    let msn = p.next(Op::Atomic);
    wire::untagged(Op::Atomic, 0, msn, &wire::fetch_add(stag, offset))
}

pub(super) fn send(p: &mut Peer, body: &[u8]) -> Vec<u8> {
    let msn = p.next(Op::Send);
    wire::untagged(Op::Send, 0, msn, body)
}

pub(super) fn invalidate(p: &mut Peer, stag: u32) -> Vec<u8> {
    let msn = p.next(Op::SendInvalidate);
    wire::untagged(Op::SendInvalidate, stag, msn, &[7; 8])
}
