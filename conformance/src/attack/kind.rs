//! The type of an attack: which servers it suits, what it sends, and the response that the RFCs
//! require. Also builds segments that several attacks send.

use anyhow::{Result, bail};

use super::acts::{NO_GRANT, Target};
use super::peer::{Grant, Peer, Response};
use super::wire::{self, Op};

/// The property of a server that an attack needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Needs {
    /// Any TCP listener.
    Port,
    /// An MPA listener.
    Mpa,
    /// An MPA listener that keeps accepting connections after others have failed.
    Listener,
    /// An MPA listener whose receive buffers are short.
    Short,
    /// A server that grants a region with all remote rights.
    Region,
    /// Such a region, on a device that supports atomics.
    Atomic,
    /// The verbs server in C, which grants and denies access to several kinds of memory.
    Grant,
    /// The verbs server in C with a memory window.
    Window,
    /// A server that reads the memory that a Send of 16 octets describes, as rping does.
    Reader,
    /// A listener that requests markers.
    Markers,
}

/// The required response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Expect {
    /// A Terminate with this layer, type and code, and then a FIN.
    Terminate(u16),
    /// A Terminate with one of two codes.
    Either(u16, u16),
    /// A FIN or reset, with or without a Terminate.
    Closed,
    /// A FIN or reset without a Terminate, which the RFC forbids in this case.
    ClosedWithoutTerminate,
    /// None: the attacker closes the connection before the server can respond.
    Silence,
    /// Any: it depends on the server program.
    Any,
}

impl Expect {
    pub(super) fn holds(self, seen: Response) -> bool {
        match self {
            Self::Terminate(code) => seen == Response::Terminate(code),
            Self::Either(first, second) => {
                seen == Response::Terminate(first) || seen == Response::Terminate(second)
            }
            Self::Closed => matches!(seen, Response::Terminate(_) | Response::Closed),
            Self::ClosedWithoutTerminate => seen == Response::Closed,
            Self::Silence => seen == Response::Silence,
            Self::Any => true,
        }
    }

    pub(super) fn name(self) -> String {
        match self {
            Self::Terminate(code) => format!("Terminate {code:04x}"),
            Self::Either(first, second) => format!("{first:04x} or {second:04x}"),
            Self::Closed => "end".into(),
            Self::ClosedWithoutTerminate => "end, no Terminate".into(),
            Self::Silence => "-".into(),
            Self::Any => "any".into(),
        }
    }
}

pub(super) type Run = fn(&Target) -> Result<Response>;
/// Builds the segment that violates the protocol.
pub(super) type BuildSegment = fn(&mut Peer, &Grant) -> Vec<u8>;

enum Method {
    /// Sends one segment on a connection that has outstanding requests.
    Segment(BuildSegment),
    /// Runs a function.
    Run(Run),
}

pub(super) struct Attack {
    pub(super) name: &'static str,
    pub(super) needs: Needs,
    pub(super) expect: Expect,
    method: Method,
}

impl Attack {
    pub(super) fn run(&self, target: &Target) -> Result<Response> {
        match self.method {
            Method::Run(run) => run(target),
            Method::Segment(make) => {
                let mut peer = Peer::set_up(target.address)?;
                peer.send_valid_requests()?;
                let grant = match peer.grant {
                    Some(grant) => grant,
                    None if matches!(self.needs, Needs::Grant | Needs::Region) => {
                        bail!("the server grants no memory")
                    }
                    None => NO_GRANT,
                };
                let segment = make(&mut peer, &grant);
                peer.send(&segment)?;
                peer.read_response()
            }
        }
    }
}

/// These functions expect a Terminate of one layer and type with `code` (RFC 5040 section 4.8).
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
    make: BuildSegment,
) -> Attack {
    Attack {
        name,
        needs,
        expect,
        method: Method::Segment(make),
    }
}

pub(super) const fn other(name: &'static str, needs: Needs, expect: Expect, run: Run) -> Attack {
    Attack {
        name,
        needs,
        expect,
        method: Method::Run(run),
    }
}

pub(super) fn read(p: &mut Peer, stag: u32, offset: u64, len: u32) -> Vec<u8> {
    let msn = p.next_msn(Op::Read);
    wire::untagged(Op::Read, 0, msn, &wire::read_request(stag, offset, len))
}

pub(super) fn atomic(p: &mut Peer, stag: u32, offset: u64) -> Vec<u8> {
    let msn = p.next_msn(Op::Atomic);
    wire::untagged(Op::Atomic, 0, msn, &wire::fetch_add(stag, offset))
}

pub(super) fn send(p: &mut Peer, body: &[u8]) -> Vec<u8> {
    let msn = p.next_msn(Op::Send);
    wire::untagged(Op::Send, 0, msn, body)
}

pub(super) fn invalidate(p: &mut Peer, stag: u32) -> Vec<u8> {
    let msn = p.next_msn(Op::SendInvalidate);
    wire::untagged(Op::SendInvalidate, stag, msn, &[7; 8])
}
