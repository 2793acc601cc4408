//! A receive that was taken from its queue (`receive_queue`) or from the tagged buffers (`tags`).

use crate::limits::MAX_SGE;
use crate::storage::filled;
use crate::{AllocError, Sge};
use alloc::vec::Vec;

/// A receive that was taken from its queue and is being filled.
#[derive(Debug, Default)]
pub struct TakenRecv {
    /// The `wr_id` of the work request.
    pub wr_id: u64,
    /// The first element; an empty element if there is none.
    pub(crate) first: Sge,
    /// All elements, if there are several.
    pub(crate) several: Vec<Sge>,
    pub(crate) num_sge: u8,
    /// Sum of the elements' lengths.
    pub len: u64,
}

impl TakenRecv {
    /// Returns space for a request with up to `max_sge` elements. Requests of queues that allow
    /// more do not fit.
    pub fn new(max_sge: u32) -> Result<Self, AllocError> {
        let room = match max_sge.min(MAX_SGE) {
            0 | 1 => 0,
            several => several as usize,
        };
        Ok(Self {
            several: filled(room)?,
            ..Self::default()
        })
    }

    /// Stores a request with these elements, limited to `len` octets in total.
    pub(crate) fn fill(&mut self, wr_id: u64, sges: &[Sge], len: u32) {
        let mut left = len;
        let mut number = 0u8;
        self.first = Sge::default();
        self.len = 0;
        for sge in sges.iter().take(self.several.len().max(1)) {
            let part = Sge {
                len: sge.len.min(left),
                ..*sge
            };
            left = left.wrapping_sub(part.len);
            self.len = self.len.wrapping_add(u64::from(part.len));
            if number == 0 {
                self.first = part;
            }
            if let Some(to) = self.several.get_mut(number as usize) {
                *to = part;
            }
            number = number.wrapping_add(1);
        }
        (self.wr_id, self.num_sge) = (wr_id, number);
    }

    /// Returns the elements.
    #[inline]
    pub fn sges(&self) -> &[Sge] {
        match self.num_sge {
            0 => &[],
            1 => core::slice::from_ref(&self.first),
            several => self.several.get(..several as usize).unwrap_or(&[]),
        }
    }

    /// Returns the first element; an empty element if there is none.
    #[inline(always)]
    pub(crate) const fn first(&self) -> &Sge {
        &self.first
    }
}
