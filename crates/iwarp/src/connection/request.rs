//! A request: its operation, its data or memory, and how it is posted.

use super::farewell::Farewell;
use super::handle::{Connection, Inner};
use super::owned::Owned;
use super::payload::{Carried, Payload};
use super::router::{Held, SlotId, Unposted};
use crate::error::Result;
use crate::failure::RequestKind;
use crate::verbs::{MemoryRegion, MemoryWindow, WriteAccess};
use bytemuck::Pod;
use iwarp_rnic::memory::Stag;
use iwarp_rnic::{Access, SendFlags, SendOp, SendWr, Sge};
use std::sync::Arc;

#[derive(Debug, Clone, Copy)]
pub(super) enum Op {
    Send,
    SendImmediate(u32),
    SendInvalidate(u32),
    Write(Target),
    WriteImmediate(Target, u32),
    Read(Target),
    FetchAdd(Target, u64),
    CompareSwap(Target, u64, u64),
    /// The tagged offset and the rights to grant.
    Bind(u64, Access),
    Invalidate,
    /// Completes when all earlier requests are visible in the peer's memory.
    Flush,
}

/// A location in the peer's memory. Packed, so that an operation fits into two cache lines.
#[derive(Debug, Clone, Copy)]
#[repr(Rust, packed(4))]
pub(super) struct Target {
    pub(super) addr: u64,
    pub(super) rkey: u32,
}

impl Op {
    pub(super) const fn kind(self) -> RequestKind {
        match self {
            Self::Send | Self::SendImmediate(_) | Self::SendInvalidate(_) => RequestKind::Send,
            Self::Write(_) | Self::WriteImmediate(..) => RequestKind::Write,
            Self::Read(_) | Self::Flush => RequestKind::Read,
            Self::FetchAdd(..) => RequestKind::FetchAdd,
            Self::CompareSwap(..) => RequestKind::CompareSwap,
            Self::Bind(..) => RequestKind::Bind,
            Self::Invalidate => RequestKind::Invalidate,
        }
    }

    /// Returns the operation for the queue pair. `window` is that of a bind or invalidation.
    #[inline]
    fn of_verbs(self, local: &Local<'_>, octets: u64) -> SendOp {
        let window = match local {
            Local::Window(window) => Some(window),
            _ => None,
        };
        match (self, window) {
            (Self::SendImmediate(value), _) => SendOp::SendImm(value),
            (Self::SendInvalidate(stag), _) => SendOp::SendInv(stag),
            (Self::Write(to), _) => to.write(),
            (Self::WriteImmediate(to, imm), _) => SendOp::WriteImm {
                remote_addr: to.addr,
                rkey: to.rkey,
                imm,
            },
            (Self::Read(from), _) => from.read(),
            (Self::FetchAdd(word, add), _) => SendOp::FetchAdd {
                remote_addr: word.addr,
                rkey: word.rkey,
                add,
                mask: 0,
            },
            (Self::CompareSwap(word, compare, swap), _) => SendOp::CmpSwap {
                remote_addr: word.addr,
                rkey: word.rkey,
                compare,
                swap,
                compare_mask: u64::MAX,
                swap_mask: u64::MAX,
            },
            (Self::Bind(at, access), Some(window)) => {
                SendOp::Bind(window.bind_at(at, octets, access))
            }
            (Self::Invalidate, Some(window)) => SendOp::LocalInvalidate {
                stag: Stag(window.rkey()),
            },
            (Self::Flush, _) => SendOp::Flush {
                remote_addr: 0,
                rkey: 0,
            },
            // Unreachable: binds and invalidations have a window.
            (Self::Send | Self::Bind(..) | Self::Invalidate, _) => SendOp::Send,
        }
    }
}

impl Target {
    pub(super) const fn write(self) -> SendOp {
        SendOp::Write {
            remote_addr: self.addr,
            rkey: self.rkey,
        }
    }

    pub(super) const fn read(self) -> SendOp {
        SendOp::Read {
            remote_addr: self.addr,
            rkey: self.rkey,
        }
    }
}

#[derive(Debug)]
pub(super) enum Local<'a> {
    None,
    /// Copied when the request is posted: into the request or into the slot's staging memory.
    Copied(&'a [u8]),
    /// Copied, too, unless it is longer than the staging memory of a slot.
    Owned(Owned),
    /// A region from which data is sent, and the offset in bytes.
    Region(MemoryRegion, usize),
    /// A region into which data is placed, and the offset in bytes.
    Target(WriteAccess, usize),
    /// The answer is placed in the slot's staging memory.
    Answer,
    /// The window to bind or invalidate.
    Window(MemoryWindow),
    /// Nothing, but the connection stays until the request has completed.
    Farewell(Arc<Inner>),
    /// Memory of a channel to which data was copied, from its beginning on.
    Staged(MemoryRegion, Farewell),
}

impl<'a> Local<'a> {
    #[inline]
    pub(super) fn of<T: Pod>(payload: Payload<'a, T>) -> Self {
        match payload.0 {
            Carried::Copied(elements) => Local::Copied(bytemuck::cast_slice(elements)),
            Carried::Owned(owned) => Local::Owned(owned),
            Carried::Region(region) => Local::Region(region.memory, region.at),
        }
    }

    pub(super) fn into_held(self) -> Option<Held> {
        match self {
            Local::Region(memory, _) => Some(Held::One(memory)),
            Local::Target(writes, _) => Some(Held::Target(writes)),
            Local::Window(window) => Some(Held::Window(window)),
            Local::Farewell(connection) => Some(Held::Connection(Farewell::new(connection))),
            Local::Staged(memory, farewell) => Some(Held::Staged(memory, farewell)),
            Local::None | Local::Copied(_) | Local::Owned(_) | Local::Answer => None,
        }
    }

    /// Returns the data to copy when the request is posted.
    pub(super) fn copied(&self) -> Option<&[u8]> {
        match self {
            Local::Copied(octets) => Some(octets),
            Local::Owned(owned) => Some(owned.octets()),
            _ => None,
        }
    }

    /// Returns what a request of the backlog needs when it is posted. The operation keeps windows
    /// and regions.
    pub(super) fn queued(&mut self) -> Local<'static> {
        match self {
            Local::Copied(octets) => Local::Owned(Owned::new(octets.to_vec())),
            Local::Owned(_) => match std::mem::replace(self, Local::None) {
                Local::Owned(owned) => Local::Owned(owned),
                _ => Local::None,
            },
            Local::Region(memory, at) => Local::Region(memory.clone(), *at),
            Local::Staged(memory, _) => Local::Region(memory.clone(), 0),
            Local::Target(writes, at) => Local::Target(writes.clone(), *at),
            Local::Answer => Local::Answer,
            Local::None | Local::Window(_) | Local::Farewell(_) => Local::None,
        }
    }
}

/// A request to post, with the memory that it keeps until it completes.
#[derive(Debug)]
pub(super) struct Request<'a> {
    pub(super) op: Op,
    pub(super) local: Local<'a>,
    pub(super) octets: u64,
    /// Header of a channel's message, before the data of `local`; all zero for none.
    pub(super) header: [u8; HEADER],
}

/// Length of the header of a channel's message, in bytes.
pub(super) const HEADER: usize = 8;

impl<'a> Request<'a> {
    #[inline]
    pub(super) const fn new(op: Op, local: Local<'a>, octets: u64) -> Self {
        Self {
            op,
            local,
            octets,
            header: [0; HEADER],
        }
    }

    pub(super) const fn empty() -> Self {
        Self::new(Op::Send, Local::None, 0)
    }

    /// Returns a request that sends the first `octets` bytes of `memory`.
    pub(super) const fn staged(
        op: Op,
        memory: MemoryRegion,
        farewell: Farewell,
        octets: u64,
    ) -> Self {
        Self::new(op, Local::Staged(memory, farewell), octets)
    }

    /// Returns an empty Send. If its operation is dropped, the connection stays until it has
    /// completed.
    pub(super) const fn farewell(connection: Arc<Inner>) -> Self {
        Self::new(Op::Send, Local::Farewell(connection), 0)
    }

    /// Returns the bind of a window to `octets` bytes at `addr`.
    pub(super) const fn binding(window: MemoryWindow, addr: u64, octets: u64, to: Access) -> Self {
        Self::new(Op::Bind(addr, to), Local::Window(window), octets)
    }

    /// Returns the invalidation of a window, executed in order with other requests.
    pub(super) const fn invalidating(window: MemoryWindow) -> Self {
        Self::new(Op::Invalidate, Local::Window(window), 0)
    }

    #[cold]
    pub(super) fn span(&self, connection: &Connection) -> Box<tracing::Span> {
        Box::new(tracing::debug_span!(
            parent: &connection.inner.span,
            "operation",
            kind = self.op.kind().name(),
            octets = self.octets
        ))
    }

    /// Returns the work request's operation.
    #[inline]
    pub(super) fn send_op(&self) -> SendOp {
        self.op.of_verbs(&self.local, self.octets)
    }

    /// Registers data that is too long to be copied.
    pub(super) fn register_long(&mut self, inner: &Inner) -> Result<()> {
        match &self.local {
            Local::Owned(owned) if owned.octets().len() > inner.longest_copy(self.headed()) => {}
            _ => return Ok(()),
        }
        if let Local::Owned(owned) = std::mem::replace(&mut self.local, Local::None) {
            let memory = inner.register(owned.into_pages())?;
            self.local = Local::Region(memory, 0);
        }
        Ok(())
    }

    /// Moves what is needed to post the request into a request of the backlog.
    #[cold]
    pub(super) fn queued(&mut self) -> Unposted {
        let request = Request {
            op: self.op,
            local: self.local.queued(),
            octets: self.octets,
            header: self.header,
        };
        Unposted::One(self.send_op(), request)
    }

    /// Posts the request as the operation `op`.
    #[inline]
    pub(super) fn post(&self, inner: &Inner, id: SlotId, op: SendOp) -> Result<()> {
        let mut wr = SendWr::new(id.wr_id(), op, &[]).with_flags(SendFlags::SIGNALED);
        let (inline, elements);
        if self.header[0] != 0 {
            return self.post_from_staging(inner, id, op);
        }
        match &self.local {
            Local::Region(memory, at) => {
                elements = [self.part_of(memory, *at)?];
                wr.sges = &elements;
            }
            Local::Staged(memory, _) => {
                elements = [self.part_of(memory, 0)?];
                wr.sges = &elements;
            }
            Local::Target(writes, at) => {
                elements = [self.part_of(writes.memory(), *at)?];
                wr.sges = &elements;
            }
            Local::Copied(octets) if self.octets <= u64::from(inner.max_inline) => {
                inline = [*octets];
                wr.inline = &inline;
                wr = wr.with_flags(SendFlags::INLINE);
            }
            _ => return self.post_from_staging(inner, id, op),
        }
        inner.qp().post_more(&wr)
    }

    fn part_of(&self, memory: &MemoryRegion, at: usize) -> Result<Sge> {
        let octets = self.octets - self.headed().len() as u64;
        // A length that does not fit exceeds the region, and is refused as too long for an element.
        let octets = usize::try_from(octets).unwrap_or(usize::MAX);
        memory.sge(at..at.saturating_add(octets))
    }

    const fn headed(&self) -> &[u8] {
        match self.header {
            [0, ..] => &[],
            _ => &self.header,
        }
    }

    /// Posts a request that uses the slot's staging memory: one with a header, long copied data, or
    /// an answer.
    fn post_from_staging(&self, inner: &Inner, id: SlotId, op: SendOp) -> Result<()> {
        let header = self.headed();
        let copied = self.local.copied().unwrap_or_default();
        let (inline, elements);
        let mut wr = SendWr::new(id.wr_id(), op, &[]).with_flags(SendFlags::SIGNALED);
        match &self.local {
            Local::None | Local::Window(_) | Local::Farewell(_) if header.is_empty() => {}
            Local::Copied(_)
            | Local::Owned(_)
            | Local::None
            | Local::Window(_)
            | Local::Farewell(_)
                if self.octets <= u64::from(inner.max_inline) =>
            {
                inline = [header, copied];
                wr.inline = &inline;
                wr = wr.with_flags(SendFlags::INLINE);
            }
            local => {
                let (staging, at) = inner.staging(id)?;
                staging.write_at(at, header)?;
                staging.write_at(at + header.len(), copied)?;
                let answer = match local {
                    // Not longer than the slot's staging memory.
                    Local::Answer => self.octets as usize,
                    _ => 0,
                };
                let staged = header.len() + copied.len() + answer;
                let staged = staging.sge(at..at + staged)?;
                wr.sges = match local {
                    Local::Region(memory, at) => {
                        elements = [staged, self.part_of(memory, *at)?];
                        &elements
                    }
                    _ => {
                        elements = [staged, Sge::default()];
                        &elements[..1]
                    }
                };
            }
        }
        inner.qp().post_more(&wr)
    }
}
