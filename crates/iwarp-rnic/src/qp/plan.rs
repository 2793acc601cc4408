//! A transmit plan: FPDUs ready for one vectored write.
//!
//! Headers, trailers and small payloads are in the plan's own scratch memory. Large payloads stay
//! in registered memory and are referred to by STag. The STags are looked up when the plan is
//! written, so a region that was deregistered while the stream was blocked is detected.

use crate::boxed::{try_box, zeros};
use crate::limits::{
    MAX_FPDU, MAX_SGE, TX_COPY_MAX, TX_PLAN_BYTES, TX_PLAN_CUTS, TX_PLAN_MESSAGES, TX_PLAN_PIECES,
    TX_SCRATCH,
};
use crate::list::List;
use crate::memory::{AccessError, Accessor, Fragment, Memory, MemoryTable, Users};
use crate::storage::filled;
use crate::{Access, AllocError};
use alloc::boxed::Box;
use alloc::vec::Vec;
use iwarp_proto::ddp::Stag;

#[derive(Debug, Clone, Copy)]
enum Piece {
    Scratch {
        at: u32,
        len: u32,
    },
    Memory {
        stag: Stag,
        to: u64,
        len: u32,
        need: Access,
    },
}

impl Piece {
    const fn len(&self) -> u32 {
        match self {
            Self::Scratch { len, .. } | Self::Memory { len, .. } => *len,
        }
    }
}

impl Default for Piece {
    fn default() -> Self {
        Self::Scratch { at: 0, len: 0 }
    }
}

/// An event that happens when the plan has been written up to an offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Milestone {
    /// This send work request was sent completely.
    Request(u32),
    #[default]
    Response,
    Terminate,
}

/// The kind of memory of a [`Run`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunKind {
    /// Scratch of a plan or staging, which is reused.
    Scratch,
    /// Registered memory.
    Memory,
}

/// Contiguous memory for a vectored read or write.
#[derive(Debug, Clone, Copy)]
pub struct Run<'t> {
    /// The kind of memory.
    pub kind: RunKind,
    /// Address and length.
    pub fragment: Fragment<'t>,
}

impl<'t> Run<'t> {
    pub(super) const fn scratch(fragment: Fragment<'t>) -> Self {
        let kind = RunKind::Scratch;
        Self { kind, fragment }
    }

    pub(super) const fn memory(fragment: Fragment<'t>) -> Self {
        let kind = RunKind::Memory;
        Self { kind, fragment }
    }
}

/// Sizes of a transmit plan. A size that is too small for one FPDU is increased.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TxSizes {
    /// Bytes of scratch, for headers, trailers and copied payload.
    pub scratch: usize,
    /// The plan is closed when it holds this many octets. See [`TX_PLAN_BYTES`].
    pub bytes: usize,
    /// Maximum pieces of scratch and registered memory. See [`TX_PLAN_PIECES`].
    pub pieces: usize,
    /// Maximum messages that end in the plan.
    pub messages: usize,
    /// Maximum positions at which a write must end because a TCP segment ends there.
    pub cuts: usize,
    /// Payload up to this many octets is copied next to its header. See [`TX_COPY_MAX`].
    pub copy_max: u32,
}

impl TxSizes {
    /// Default sizes for a process.
    pub const DEFAULT: Self = Self {
        scratch: TX_SCRATCH,
        bytes: TX_PLAN_BYTES,
        pieces: TX_PLAN_PIECES,
        messages: TX_PLAN_MESSAGES,
        cuts: TX_PLAN_CUTS,
        copy_max: TX_COPY_MAX,
    };

    /// Maximum pieces of one FPDU: its head, payload and trailer, and the scratch before it.
    const FPDU_PIECES: usize = MAX_SGE as usize + 3;

    fn with_minimums(self) -> Self {
        Self {
            // An FPDU with markers is built from a copy of its ULPDU in scratch.
            scratch: self.scratch.max(2 * MAX_FPDU),
            bytes: self.bytes.max(1),
            pieces: self.pieces.max(Self::FPDU_PIECES),
            messages: self.messages.max(1),
            cuts: self.cuts.max(1),
            copy_max: self.copy_max,
        }
    }
}

impl Default for TxSizes {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// FPDUs ready to be written. Plans are reused: filling one does not allocate.
#[derive(Debug)]
pub struct TxPlan {
    scratch: Vec<u8>,
    /// Bytes of scratch in use.
    used: usize,
    /// Beginning of the scratch that is in use but not in a piece yet. Adjacent small FPDUs share
    /// one piece.
    open: usize,
    pieces: List<Piece>,
    /// With more pieces than this, another FPDU may not fit.
    pieces_max: usize,
    milestones: List<(usize, Milestone)>,
    next_milestone: usize,
    bytes: usize,
    bytes_max: usize,
    copy_max: u32,
    written: usize,
    /// Offsets at which a write must end, so that a TCP segment ends there.
    cuts: List<usize>,
    next_cut: usize,
    /// Octets since the last segment boundary, if FPDUs are aligned with segments.
    in_segment: Option<usize>,
    /// The memory used by the write in progress.
    users: Users<Vec<Stag>>,
}

impl TxPlan {
    /// Creates an empty plan of the [default sizes](TxSizes::DEFAULT). It occupies about 360 KiB of
    /// memory, so queue pairs should share plans.
    pub fn new() -> Result<Box<Self>, AllocError> {
        Self::with(TxSizes::DEFAULT)
    }

    /// Creates an empty plan. No later call allocates.
    pub fn with(sizes: TxSizes) -> Result<Box<Self>, AllocError> {
        let sizes = sizes.with_minimums();
        let plan = Self {
            scratch: zeros(sizes.scratch)?,
            used: 0,
            open: 0,
            pieces: List::new(sizes.pieces)?,
            pieces_max: sizes.pieces.saturating_sub(TxSizes::FPDU_PIECES),
            milestones: List::new(sizes.messages)?,
            next_milestone: 0,
            bytes: 0,
            bytes_max: sizes.bytes,
            copy_max: sizes.copy_max,
            written: 0,
            cuts: List::new(sizes.cuts)?,
            next_cut: 0,
            in_segment: None,
            users: Users::new(filled(sizes.pieces)?),
        };
        try_box(move || plan)
    }

    /// Returns the maximum payload that is copied next to its header.
    pub(super) const fn copy_max(&self) -> u32 {
        self.copy_max
    }

    /// Returns the number of unwritten octets.
    pub const fn remaining(&self) -> usize {
        self.bytes.wrapping_sub(self.written)
    }

    /// Returns `true` if everything is written.
    pub const fn is_done(&self) -> bool {
        self.written >= self.bytes
    }

    /// Returns the number of octets of the plan, written or not.
    pub const fn len(&self) -> usize {
        self.bytes
    }

    /// Returns `true` if the plan is empty.
    pub const fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Returns `true` if the plan contains a Terminate that is not completely written.
    pub fn has_terminate(&self) -> bool {
        let pending = self.milestones.as_slice().get(self.next_milestone..);
        pending.is_some_and(|pending| {
            pending
                .iter()
                .any(|(_, milestone)| *milestone == Milestone::Terminate)
        })
    }

    /// Empties the plan for the next use.
    pub fn clear(&mut self) {
        debug_assert!(self.users.is_empty(), "a write has not been released");
        self.used = 0;
        self.open = 0;
        self.pieces.clear();
        self.milestones.clear();
        self.next_milestone = 0;
        self.bytes = 0;
        self.written = 0;
        self.cuts.clear();
        self.next_cut = 0;
        self.in_segment = None;
    }

    /// Returns `true` if there is room for one more FPDU that needs `scratch` bytes of scratch.
    #[inline]
    pub(super) const fn has_room(&self, scratch: usize) -> bool {
        self.bytes < self.bytes_max
            && self.scratch.len().wrapping_sub(self.used) >= scratch
            && self.pieces.len() <= self.pieces_max
            && self.milestones.room() > 0
            && self.cuts.room() > 0
    }

    /// Returns the next `len` bytes of scratch, to be filled before they become part of the plan.
    /// The caller has checked [`has_room`](Self::has_room).
    #[inline]
    pub(super) fn scratch(&mut self, len: usize) -> Option<&mut [u8]> {
        self.scratch.get_mut(self.used..self.used.wrapping_add(len))
    }

    /// Adds the next `len` bytes of scratch to the plan.
    #[inline]
    pub(super) const fn add_scratch(&mut self, len: usize) {
        self.used = self.used.wrapping_add(len);
        self.bytes = self.bytes.wrapping_add(len);
    }

    /// Adds a range of registered memory to the plan.
    #[inline]
    pub(super) fn add_memory(&mut self, stag: Stag, to: u64, len: u32, need: Access) {
        if len != 0 {
            self.seal();
            self.bytes = self.bytes.wrapping_add(len as usize);
            self.pieces.push(Piece::Memory {
                stag,
                to,
                len,
                need,
            });
        }
    }

    /// Turns the scratch since the last piece into a piece. Must be called before the plan is
    /// written.
    #[inline]
    pub(super) fn seal(&mut self) {
        if self.used > self.open {
            self.pieces.push(Piece::Scratch {
                at: self.open as u32,
                len: self.used.wrapping_sub(self.open) as u32,
            });
            self.open = self.used;
        }
    }

    /// Records that `milestone` happens when everything so far is written.
    #[inline]
    pub(super) fn add_milestone(&mut self, milestone: Milestone) {
        self.milestones.push((self.bytes, milestone));
    }

    /// Records that an FPDU was added at `start`. If it does not fit into the rest of a TCP
    /// segment, a new segment has to begin with it.
    ///
    /// FPDUs that fill segments exactly need no cut, because TCP ends a segment there anyway.
    //= rfc5044 section 5.1
    //# MPA transmitters SHOULD also use whatever facilities the TCP stack
    //# presents to cause the TCP transmitter to start TCP segments at FPDU
    //# boundaries.  Multiple FPDUs MAY be packed into a single TCP segment
    //# as determined by the EMSS calculation as long as they are entirely
    //# contained in the TCP segment.
    pub(super) fn align(&mut self, start: usize, segment: usize) {
        let len = self.bytes.saturating_sub(start);
        let used = self.in_segment.unwrap_or(0);
        let end = if used != 0 && used.saturating_add(len) > segment {
            self.cuts.push(start);
            len
        } else {
            used.saturating_add(len)
        };
        self.in_segment = Some(if end == segment { 0 } else { end });
    }

    /// Returns how many of the unwritten octets one call may write, so that TCP segments end where
    /// FPDUs end.
    #[inline]
    pub fn together(&self) -> usize {
        let end = self.cuts.get(self.next_cut).copied().unwrap_or(self.bytes);
        end.saturating_sub(self.written)
    }

    /// Returns `true` if TCP must not append later octets to the segment that ends after
    /// [`together`](Self::together) octets (`MSG_EOR`).
    #[inline]
    pub const fn ends_segment(&self) -> bool {
        self.in_segment.is_some()
    }

    /// Records that `n` more octets were written.
    pub(super) fn advance(&mut self, n: usize) {
        self.written = self.written.wrapping_add(n);
        while self
            .cuts
            .get(self.next_cut)
            .is_some_and(|cut| *cut <= self.written)
        {
            self.next_cut = self.next_cut.wrapping_add(1);
        }
    }

    /// Returns `true` if the first unwritten octet begins a message.
    pub(super) fn is_between_messages(&self) -> bool {
        let before = self.next_milestone.checked_sub(1);
        let ended = before.and_then(|i| self.milestones.get(i));
        self.written == 0 || ended.is_some_and(|(at, _)| *at == self.written)
    }

    /// Returns the index and the milestone of the message that contains the first unwritten
    /// registered memory. Returns `None` if the end of that message is not in the plan, or if no
    /// such memory is left.
    pub(super) fn first_unwritten_memory(&self) -> Option<(usize, Milestone)> {
        let mut end = 0usize;
        let in_memory = self.pieces.as_slice().iter().any(|piece| {
            end = end.saturating_add(piece.len() as usize);
            matches!(piece, Piece::Memory { .. }) && end > self.written
        });
        let all = self.milestones.as_slice().iter().enumerate();
        let mut following = all.skip_while(|(_, (at, _))| *at < end);
        match in_memory {
            true => following.next().map(|(i, (_, milestone))| (i, *milestone)),
            false => None,
        }
    }

    /// Returns how many responses to the peer end at or after the message with this index.
    pub(super) fn responses_from(&self, index: usize) -> u32 {
        let all = self.milestones.as_slice().iter().skip(index);
        all.filter(|(_, milestone)| *milestone == Milestone::Response)
            .count() as u32
    }

    /// Removes and returns the next milestone that has been reached.
    #[inline]
    pub(super) fn next_event(&mut self) -> Option<Milestone> {
        let (at, milestone) = *self.milestones.get(self.next_milestone)?;
        if at > self.written {
            return None;
        }
        self.next_milestone = self.next_milestone.wrapping_add(1);
        Some(milestone)
    }

    /// Calls `visit` for the runs that one `sendmsg` is to write ([`together`](Self::together)), at
    /// most `most`.
    ///
    /// The runs are valid while `memory` is borrowed and the plan does not change. Until
    /// [`release`](Self::release), the plan is a user of their memory, so no invalidation of it
    /// completes. An error means that the program deregistered memory in use by a request: the
    /// stream cannot continue ([`QueuePair::abort`](super::QueuePair::abort)).
    pub fn runs<'t, M: Memory>(
        &'t mut self,
        memory: &'t MemoryTable<M>,
        accessor: Accessor,
        most: usize,
        visit: impl FnMut(Run<'t>),
    ) -> Result<(), AccessError> {
        let together = self.together();
        self.visit(memory, accessor, (together, most), visit)
    }

    /// Like [`runs`](Self::runs), for all unwritten octets in any number of runs.
    pub fn all_runs<'t, M: Memory>(
        &'t mut self,
        memory: &'t MemoryTable<M>,
        accessor: Accessor,
        visit: impl FnMut(Run<'t>),
    ) -> Result<(), AccessError> {
        let remaining = self.remaining();
        self.visit(memory, accessor, (remaining, usize::MAX), visit)
    }

    /// Calls `visit` for the runs of the first `left` unwritten octets, at most `most` runs.
    #[inline]
    fn visit<'t, M: Memory>(
        &'t mut self,
        memory: &'t MemoryTable<M>,
        accessor: Accessor,
        (mut left, mut most): (usize, usize),
        mut visit: impl FnMut(Run<'t>),
    ) -> Result<(), AccessError> {
        self.release(memory);
        if most == 0 {
            return Ok(());
        }
        let written = self.written;
        let Self {
            scratch,
            pieces,
            users,
            ..
        } = self;
        let scratch: &'t [u8] = scratch;
        let mut add = |run: Run<'t>| {
            let fragment = run.fragment.first(left);
            left = left.saturating_sub(fragment.len());
            most = most.saturating_sub(1);
            visit(Run { fragment, ..run });
            left > 0 && most > 0
        };
        let result = for_each_part(pieces.as_slice(), scratch, written, |part| match part {
            Part::Scratch(octets) => Ok(add(Run::scratch(Fragment::of(octets)))),
            Part::Memory { range, need, from } => {
                let span = users.check(memory, range, need, accessor)?;
                let rest = span.map(|span| span.split_at(from).1.fragments());
                Ok(rest.is_some_and(|mut rest| rest.all(|fragment| add(Run::memory(fragment)))))
            }
        });
        if result.is_err() {
            self.users.release(memory);
        }
        result
    }

    /// Ends the use of the memory of [`runs`](Self::runs). Call it after each write, even if the
    /// write failed.
    pub fn release<M: Memory>(&mut self, memory: &MemoryTable<M>) {
        self.users.release(memory);
    }

    /// Copies unwritten octets to `out`, for streams that are not sockets. Returns how many.
    pub fn copy_to<M: Memory>(
        &self,
        memory: &MemoryTable<M>,
        accessor: Accessor,
        out: &mut [u8],
    ) -> Result<usize, AccessError> {
        let mut n = 0;
        for_each_part(
            self.pieces.as_slice(),
            &self.scratch,
            self.written,
            |part| {
                let Some(rest) = out.get_mut(n..) else {
                    return Ok(false);
                };
                let len = match part {
                    Part::Scratch(s) => {
                        let len = s.len().min(rest.len());
                        for (to, from) in rest.iter_mut().zip(s) {
                            *to = *from;
                        }
                        len
                    }
                    Part::Memory { range, need, from } => {
                        let (stag, to, len) = range;
                        let source = memory.check(stag, to, len, need, accessor)?;
                        let source = source.span().split_at(from).1;
                        if !source.read(rest) {
                            return Err(AccessError::NotMapped);
                        }
                        rest.len().min(source.len() as usize)
                    }
                };
                n = len.wrapping_add(n);
                Ok(n < out.len())
            },
        )?;
        Ok(n)
    }
}

/// Calls `visit` for each unwritten part, in order, until it returns `false`.
#[inline]
fn for_each_part<'t>(
    pieces: &[Piece],
    scratch: &'t [u8],
    written: usize,
    mut visit: impl FnMut(Part<'t>) -> Result<bool, AccessError>,
) -> Result<(), AccessError> {
    let mut skip = written;
    for piece in pieces {
        let len = piece.len();
        if let Some(beyond) = skip.checked_sub(len as usize) {
            skip = beyond;
            continue;
        }
        let from = skip as u32;
        skip = 0;
        let more = match *piece {
            Piece::Scratch { at, len } => {
                let range = at.wrapping_add(from) as usize..at.wrapping_add(len) as usize;
                visit(Part::Scratch(scratch.get(range).unwrap_or(&[])))?
            }
            Piece::Memory {
                stag,
                to,
                len,
                need,
            } => visit(Part::Memory {
                range: (stag, to, len),
                need,
                from,
            })?,
        };
        if !more {
            break;
        }
    }
    Ok(())
}

/// The unwritten part of a piece.
enum Part<'t> {
    Scratch(&'t [u8]),
    /// `range` is STag, tagged offset and length; its first `from` octets are already written. The
    /// entire range is checked again, so that the rest is not sent after the region has changed.
    Memory {
        range: (Stag, u64, u32),
        need: Access,
        from: u32,
    },
}
