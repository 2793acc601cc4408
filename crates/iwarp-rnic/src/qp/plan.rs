//! A transmit plan: FPDUs ready for one vectored write.
//!
//! Headers, trailers and small payloads lie in the plan's own scratch memory. Large payloads stay in registered memory and
//! are named by STag. They are resolved when they are written: if the stream was blocked and the region was deregistered
//! meanwhile, that is noticed.

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

/// A run of octets of the plan.
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
    /// This send work request is done.
    Request(u32),
    /// A response has gone out.
    #[default]
    Response,
    /// The Terminate has gone out.
    Terminate,
}

/// What the octets of a [`Run`] are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunKind {
    /// Scratch of a plan, or staging. It is used again for other octets.
    Scratch,
    /// Registered memory.
    Memory,
}

/// A run of octets for a vectored read or write.
#[derive(Debug, Clone, Copy)]
pub struct Run<'t> {
    /// Whose octets they are.
    pub kind: RunKind,
    /// Where they lie.
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

/// Sizes of a transmit plan. Those that are too small for one FPDU of any kind are raised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TxSizes {
    /// Octets of memory of its own, for headers, trailers and copied payload.
    pub scratch: usize,
    /// It is closed when it holds this many octets. See [`TX_PLAN_BYTES`].
    pub bytes: usize,
    /// Most pieces, of its own and of registered memory, that it names. See [`TX_PLAN_PIECES`].
    pub pieces: usize,
    /// Most messages that end in it.
    pub messages: usize,
    /// Most TCP segments that need a write of their own.
    pub cuts: usize,
    /// Payload up to this many octets is copied beside its header. See [`TX_COPY_MAX`].
    pub copy_max: u32,
}

impl TxSizes {
    /// What suits a process.
    pub const DEFAULT: Self = Self {
        scratch: TX_SCRATCH,
        bytes: TX_PLAN_BYTES,
        pieces: TX_PLAN_PIECES,
        messages: TX_PLAN_MESSAGES,
        cuts: TX_PLAN_CUTS,
        copy_max: TX_COPY_MAX,
    };

    /// Most pieces of one FPDU: its head, its payload, its trailer, and the run before it.
    const FPDU_PIECES: usize = MAX_SGE as usize + 3;

    fn raised(self) -> Self {
        Self {
            // An FPDU with markers is made from one without.
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

/// FPDUs ready to be written. Reused: filling a plan allocates nothing.
#[derive(Debug)]
pub struct TxPlan {
    scratch: Vec<u8>,
    /// Octets of the scratch that are in use.
    used: usize,
    /// Where the scratch begins that is in use and in no piece yet. Small FPDUs that follow each other become one piece.
    open: usize,
    pieces: List<Piece>,
    /// With more than these there may be no room for those of one FPDU.
    pieces_max: usize,
    milestones: List<(usize, Milestone)>,
    next_milestone: usize,
    bytes: usize,
    bytes_max: usize,
    copy_max: u32,
    written: usize,
    /// Offsets where a write must end, so that a TCP segment ends there.
    cuts: List<usize>,
    next_cut: usize,
    /// Octets since the last place where a segment ends, if FPDUs are aligned with segments.
    in_segment: Option<usize>,
    /// The memory that the write in progress uses.
    users: Users<Vec<Stag>>,
}

impl TxPlan {
    /// Makes an empty plan of the [usual sizes](TxSizes::DEFAULT). It takes about 360 KiB of memory; share plans between queue pairs.
    pub fn new() -> Result<Box<Self>, AllocError> {
        Self::with(TxSizes::DEFAULT)
    }

    /// Makes an empty plan. Everything that it will ever need is allocated here.
    pub fn with(sizes: TxSizes) -> Result<Box<Self>, AllocError> {
        let sizes = sizes.raised();
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

    /// Payload up to this many octets is copied beside its header.
    pub(super) const fn copy_max(&self) -> u32 {
        self.copy_max
    }

    /// Returns how many octets are not yet written.
    pub const fn remaining(&self) -> usize {
        self.bytes.wrapping_sub(self.written)
    }

    /// Returns `true` if everything is written.
    pub const fn is_done(&self) -> bool {
        self.written >= self.bytes
    }

    /// Octets of the whole plan.
    pub const fn len(&self) -> usize {
        self.bytes
    }

    /// Returns `true` if nothing was put in.
    pub const fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Returns `true` if it has a Terminate that is not written to its end.
    pub fn has_terminate(&self) -> bool {
        let left = self.milestones.as_slice().get(self.next_milestone..);
        left.is_some_and(|left| left.iter().any(|(_, what)| *what == Milestone::Terminate))
    }

    /// Empties it for the next use.
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

    /// Returns `true` if there is room for one more FPDU that needs `scratch` octets of scratch.
    #[inline]
    pub(super) const fn has_room(&self, scratch: usize) -> bool {
        self.bytes < self.bytes_max
            && self.scratch.len().wrapping_sub(self.used) >= scratch
            && self.pieces.len() <= self.pieces_max
            && self.milestones.room() > 0
            && self.cuts.room() > 0
    }

    /// Returns the next `len` octets of scratch, to be written before they become part of the plan. The caller has asked
    /// [`has_room`](Self::has_room).
    #[inline]
    pub(super) fn scratch(&mut self, len: usize) -> Option<&mut [u8]> {
        self.scratch.get_mut(self.used..self.used.wrapping_add(len))
    }

    /// Makes the next `len` octets of scratch a part of the plan.
    #[inline]
    pub(super) const fn add_scratch(&mut self, len: usize) {
        self.used = self.used.wrapping_add(len);
        self.bytes = self.bytes.wrapping_add(len);
    }

    /// Makes a range of registered memory a part of the plan.
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

    /// Makes a piece of the scratch that is in none yet. After this the plan may be written.
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

    /// Notes that `what` happens when everything so far is written.
    #[inline]
    pub(super) fn add_milestone(&mut self, what: Milestone) {
        self.milestones.push((self.bytes, what));
    }

    /// Notes that an FPDU was added at `start`. If it does not fit into the rest of a TCP segment, a new segment has to begin
    /// with it.
    ///
    /// FPDUs that fill segments exactly need no cut: TCP itself cuts there.
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

    /// Returns how many of the unwritten octets may be written together.
    #[inline]
    pub fn together(&self) -> usize {
        let end = self.cuts.get(self.next_cut).copied().unwrap_or(self.bytes);
        end.saturating_sub(self.written)
    }

    /// After writing [`together`](Self::together) octets, TCP must not put later ones into the same segment (`MSG_EOR`).
    #[inline]
    pub const fn ends_segment(&self) -> bool {
        self.in_segment.is_some()
    }

    /// Notes that `n` more octets were written.
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

    /// Returns `true` if a message begins at the first octet that is not written.
    pub(super) fn is_between_messages(&self) -> bool {
        let before = self.next_milestone.checked_sub(1);
        let ended = before.and_then(|i| self.milestones.get(i));
        self.written == 0 || ended.is_some_and(|(at, _)| *at == self.written)
    }

    /// Returns the index of the message that the first unwritten octets of registered memory belong to, and what happens at its
    /// end. `None`: that is the message whose end is not in the plan, or no such octets are left.
    pub(super) fn next_from_memory(&self) -> Option<(usize, Milestone)> {
        let mut end = 0usize;
        let in_memory = self.pieces.as_slice().iter().any(|piece| {
            end = end.saturating_add(piece.len() as usize);
            matches!(piece, Piece::Memory { .. }) && end > self.written
        });
        let all = self.milestones.as_slice().iter().enumerate();
        let mut behind = all.skip_while(|(_, (at, _))| *at < end);
        match in_memory {
            true => behind.next().map(|(i, (_, what))| (i, *what)),
            false => None,
        }
    }

    /// Returns how many answers to the peer end at or behind the message with this index.
    pub(super) fn answers_from(&self, index: usize) -> u32 {
        let all = self.milestones.as_slice().iter().skip(index);
        all.filter(|(_, what)| *what == Milestone::Response).count() as u32
    }

    /// Takes the next event that has happened by now.
    #[inline]
    pub(super) fn next_event(&mut self) -> Option<Milestone> {
        let (at, what) = *self.milestones.get(self.next_milestone)?;
        if at > self.written {
            return None;
        }
        self.next_milestone = self.next_milestone.wrapping_add(1);
        Some(what)
    }

    /// Visits the runs that are to be written [`together`](Self::together), for `sendmsg`, at most `most`.
    ///
    /// They are valid while `memory` is borrowed and the plan does not change. Until [`release`](Self::release), the plan is a user
    /// of their memory, so that no invalidation of it completes. An error means that the program
    /// deregistered memory while a request used it: the stream cannot go on ([`QueuePair::abort`](super::QueuePair::abort)).
    pub fn runs<'t, M: Memory>(
        &'t mut self,
        memory: &'t MemoryTable<M>,
        who: Accessor,
        most: usize,
        visit: impl FnMut(Run<'t>),
    ) -> Result<(), AccessError> {
        let together = self.together();
        self.visit(memory, who, (together, most), visit)
    }

    /// As [`runs`](Self::runs), for all unwritten octets, in any number of runs.
    pub fn all_runs<'t, M: Memory>(
        &'t mut self,
        memory: &'t MemoryTable<M>,
        who: Accessor,
        visit: impl FnMut(Run<'t>),
    ) -> Result<(), AccessError> {
        let remaining = self.remaining();
        self.visit(memory, who, (remaining, usize::MAX), visit)
    }

    /// Visits the runs of so many unwritten octets, and at most so many runs.
    #[inline]
    fn visit<'t, M: Memory>(
        &'t mut self,
        memory: &'t MemoryTable<M>,
        who: Accessor,
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
                let span = users.check(memory, range, need, who)?;
                let rest = span.map(|span| span.split_at(from).1.fragments());
                Ok(rest.is_some_and(|mut rest| rest.all(|fragment| add(Run::memory(fragment)))))
            }
        });
        if result.is_err() {
            self.users.release(memory);
        }
        result
    }

    /// Ends the use of the memory of [`runs`](Self::runs): the write that they were for is over. To be called after each write, whatever
    /// came of it.
    pub fn release<M: Memory>(&mut self, memory: &MemoryTable<M>) {
        self.users.release(memory);
    }

    /// Copies unwritten octets to `out`, for streams that are not sockets. Returns how many.
    pub fn copy_to<M: Memory>(
        &self,
        memory: &MemoryTable<M>,
        who: Accessor,
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
                        let source = memory.check(stag, to, len, need, who)?;
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

/// Visits every part that is not yet written, in order, until `visit` returns `false`.
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
        if let Some(behind) = skip.checked_sub(len as usize) {
            skip = behind;
            continue;
        }
        let from = skip as u32;
        skip = 0;
        let go_on = match *piece {
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
        if !go_on {
            break;
        }
    }
    Ok(())
}

/// A piece of a plan, without what is written of it.
enum Part<'t> {
    Scratch(&'t [u8]),
    /// STag, tagged offset and length. It is checked as a whole, so that the rest of it is not sent after a change of the region; its first
    /// `from` octets are written.
    Memory {
        range: (Stag, u64, u32),
        need: Access,
        from: u32,
    },
}
