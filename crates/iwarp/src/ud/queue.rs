//! The send queue of a datagram queue pair: a ring of fixed size, with memory for the elements and
//! inline data of each request.

use super::address::UdAddress;
use crate::error::{Error, Result};
use crate::sys::guarded::MemoryTable;
use iwarp_proto::datagram::PAYLOAD_MAX;
use iwarp_rnic::memory::Accessor;
use iwarp_rnic::{Access, PostError, SendFlags, Sge, WcStatus};
use std::collections::VecDeque;

/// A send work request of a datagram (`ibv_post_send(3)`). Posting copies its elements and inline
/// data.
#[derive(Debug, Clone, Copy)]
pub struct UdSendWr<'a> {
    /// The program's value, which is returned in the completion.
    pub wr_id: u64,
    /// Immediate data in host order.
    pub immediate: Option<u32>,
    /// Options. A fence has no effect.
    pub flags: SendFlags,
    /// The destination.
    pub to: UdAddress,
    /// Number of the destination queue pair; ignored for a group.
    pub remote_qp: u32,
    /// The destination's Q_Key. If its highest bit is set, the Q_Key of the sending queue pair is
    /// used instead.
    pub remote_qkey: u32,
    /// The payload, if [`SendFlags::INLINE`] is not set.
    pub sges: &'a [Sge],
    /// The payload, if [`SendFlags::INLINE`] is set. The pieces are concatenated.
    pub inline: &'a [&'a [u8]],
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Waiting {
    pub(super) wr_id: u64,
    pub(super) immediate: Option<u32>,
    pub(super) flags: SendFlags,
    pub(super) to: UdAddress,
    pub(super) remote_qp: u32,
    pub(super) qkey: u32,
    /// Number of elements, or of octets of inline data.
    count: usize,
    /// Octets of payload; possibly more than a datagram can carry.
    pub(super) len: u64,
}

pub(super) struct SendQueue {
    ring: VecDeque<Waiting>,
    depth: usize,
    /// Number of completed requests whose slots are still in use, because they were not
    /// [released](Self::release).
    held: usize,
    /// Total number of requests that have completed or were dropped.
    position: u32,
    head: usize,
    max_sge: usize,
    max_inline: usize,
    sges: Vec<Sge>,
    inline: Vec<u8>,
}

fn filled<T: Clone>(len: usize, value: T) -> Result<Vec<T>> {
    let mut list = Vec::new();
    list.try_reserve_exact(len)
        .map_err(|_| Error::OutOfMemory)?;
    list.resize(len, value);
    Ok(list)
}

impl SendQueue {
    pub(super) fn new(depth: u32, max_sge: u32, max_inline: u32) -> Result<Self> {
        let (depth, max_sge, max_inline) = (depth as usize, max_sge as usize, max_inline as usize);
        let mut ring = VecDeque::new();
        ring.try_reserve_exact(depth)
            .map_err(|_| Error::OutOfMemory)?;
        Ok(Self {
            ring,
            depth,
            held: 0,
            position: 0,
            head: 0,
            max_sge,
            max_inline,
            sges: filled(depth * max_sge, Sge::default())?,
            inline: filled(depth * max_inline, 0)?,
        })
    }

    pub(super) fn len(&self) -> usize {
        self.ring.len()
    }

    pub(super) fn room(&self) -> usize {
        self.depth - self.ring.len() - self.held
    }

    /// Frees the slots of `n` requests that have completed.
    pub(super) const fn release(&mut self, n: u32) {
        self.held = self.held.saturating_sub(n as usize);
    }

    /// Returns the number of requests that have completed or were dropped. This is the position of
    /// the next completion.
    pub(super) const fn position(&self) -> u32 {
        self.position
    }

    pub(super) fn get(&self, offset: usize) -> Option<&Waiting> {
        self.ring.get(offset)
    }

    const fn slot(&self, offset: usize) -> usize {
        (self.head + offset) % self.depth
    }

    /// Checks that a request is within the limits of the queue. Does not check whether the queue is
    /// full.
    pub(super) fn check(&self, wr: &UdSendWr<'_>) -> Result<(), PostError> {
        if wr.flags.contains(SendFlags::INLINE) {
            let len: usize = wr.inline.iter().map(|piece| piece.len()).sum();
            if len > self.max_inline {
                return Err(PostError::InlineTooLong);
            }
        } else if wr.sges.len() > self.max_sge {
            return Err(PostError::TooManySges);
        }
        Ok(())
    }

    pub(super) fn push(&mut self, wr: &UdSendWr<'_>, qkey: u32) -> Result<(), PostError> {
        self.check(wr)?;
        if self.room() == 0 {
            return Err(PostError::QueueFull);
        }
        let slot = self.slot(self.ring.len());
        let (count, len) = if wr.flags.contains(SendFlags::INLINE) {
            let mut to = &mut self.inline[slot * self.max_inline..];
            let mut len = 0;
            for piece in wr.inline {
                let (now, rest) = to.split_at_mut(piece.len());
                now.copy_from_slice(piece);
                (to, len) = (rest, len + piece.len());
            }
            (len, len as u64)
        } else {
            let to = &mut self.sges[slot * self.max_sge..];
            to[..wr.sges.len()].copy_from_slice(wr.sges);
            let len = wr.sges.iter().map(|sge| u64::from(sge.len)).sum();
            (wr.sges.len(), len)
        };
        self.ring.push_back(Waiting {
            wr_id: wr.wr_id,
            immediate: wr.immediate,
            flags: wr.flags,
            to: wr.to,
            remote_qp: wr.remote_qp,
            qkey,
            count,
            len,
        });
        Ok(())
    }

    /// Copies the payload of the request at `offset` into `to`, which has the same length.
    ///
    /// # Errors
    /// The status of the completion, if the request's memory cannot be read.
    pub(super) fn copy_payload(
        &self,
        offset: usize,
        memory: &MemoryTable,
        accessor: Accessor,
        mut to: &mut [u8],
    ) -> Result<(), WcStatus> {
        let Some(wr) = self.ring.get(offset) else {
            return Ok(());
        };
        let slot = self.slot(offset);
        if wr.flags.contains(SendFlags::INLINE) {
            let from = slot * self.max_inline;
            to.copy_from_slice(&self.inline[from..from + wr.count]);
            return Ok(());
        }
        let from = slot * self.max_sge;
        for sge in &self.sges[from..from + wr.count] {
            let (now, rest) = to.split_at_mut(sge.len as usize);
            let range = (sge.stag(), sge.addr, sge.len);
            memory
                .read(range, Access::empty(), accessor, now)
                .map_err(|_| WcStatus::LocalProtection)?;
            to = rest;
        }
        Ok(())
    }

    pub(super) fn pop(&mut self) -> Option<Waiting> {
        let wr = self.ring.pop_front()?;
        self.head = self.slot(1);
        self.held += 1;
        self.position = self.position.wrapping_add(1);
        Some(wr)
    }

    pub(super) fn clear(&mut self) {
        self.position = self.position.wrapping_add(self.ring.len() as u32);
        self.ring.clear();
        self.head = 0;
        self.held = 0;
    }
}

impl Waiting {
    /// Returns `true` if a datagram can carry the payload.
    pub(super) const fn fits(&self) -> bool {
        self.len <= PAYLOAD_MAX as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inline<'a>(wr_id: u64, pieces: &'a [&'a [u8]]) -> UdSendWr<'a> {
        UdSendWr {
            wr_id,
            immediate: None,
            flags: SendFlags::INLINE,
            to: UdAddress::new([1; 16], [1; 16], 0, 0).unwrap(),
            remote_qp: 2,
            remote_qkey: 3,
            sges: &[],
            inline: pieces,
        }
    }

    #[test]
    fn inline_data_belongs_to_its_request() {
        let mut queue = SendQueue::new(3, 1, 4).unwrap();
        let (memory, accessor) = (MemoryTable::new(), Accessor { pd: 1, qp: 2 });
        for round in 0..10u8 {
            let wide = [round; 4];
            for wr_id in 0..3 {
                let pieces: [&[u8]; 2] = [&wide[..1], &wide[1..=wr_id]];
                queue.push(&inline(wr_id as u64, &pieces), 9).unwrap();
            }
            assert_eq!(queue.push(&inline(3, &[]), 9), Err(PostError::QueueFull));
            // A request completes.
            assert_eq!(queue.pop().unwrap().wr_id, 0);
            // Its slot stays in use until the completion is polled.
            assert_eq!(queue.push(&inline(3, &[]), 9), Err(PostError::QueueFull));
            assert_eq!(
                (queue.room(), queue.position()),
                (0, 4 * u32::from(round) + 1)
            );
            queue.release(1);
            queue.push(&inline(3, &[&[0xee]]), 9).unwrap();
            for (offset, len) in [(0, 2), (1, 3)] {
                let mut to = vec![0; len];
                queue
                    .copy_payload(offset, &memory, accessor, &mut to)
                    .unwrap();
                assert_eq!(to, vec![round; len]);
            }
            let mut last = [0];
            queue.copy_payload(2, &memory, accessor, &mut last).unwrap();
            assert_eq!(last, [0xee]);
            while queue.pop().is_some() {}
            assert_eq!(
                (queue.room(), queue.position()),
                (0, 4 * u32::from(round) + 4)
            );
            queue.release(3);
        }
    }

    #[test]
    fn cleared_queue_is_empty() {
        let mut queue = SendQueue::new(3, 1, 4).unwrap();
        for round in 0..3 {
            assert_eq!((queue.len(), queue.room()), (0, 3));
            queue.push(&inline(7, &[&[round]]), 9).unwrap();
            queue.push(&inline(8, &[&[round]]), 9).unwrap();
            assert_eq!((queue.len(), queue.room()), (2, 1));
            assert_eq!(queue.pop().unwrap().wr_id, 7);
            queue.clear();
            assert!(queue.pop().is_none() && queue.get(0).is_none());
        }
    }

    #[test]
    fn oversized_requests_are_refused() {
        let queue = SendQueue::new(1, 1, 4).unwrap();
        assert_eq!(queue.check(&inline(0, &[&[0; 3], &[0; 1]])), Ok(()));
        let longer = inline(0, &[&[0; 3], &[0; 3]]);
        assert_eq!(queue.check(&longer), Err(PostError::InlineTooLong));
        let long = inline(0, &[&[0; 3], &[0; 2]]);
        assert_eq!(queue.check(&long), Err(PostError::InlineTooLong));
        let several = UdSendWr {
            flags: SendFlags::empty(),
            sges: &[Sge::default(); 2],
            ..long
        };
        assert_eq!(queue.check(&several), Err(PostError::TooManySges));
    }

    #[test]
    fn unregistered_memory_is_not_sent() {
        let mut queue = SendQueue::new(1, 1, 0).unwrap();
        let sges = [Sge {
            addr: 0x1000,
            len: 4,
            lkey: 77,
        }];
        let wr = UdSendWr {
            flags: SendFlags::empty(),
            sges: &sges,
            inline: &[],
            ..inline(0, &[])
        };
        queue.push(&wr, 1).unwrap();
        let copied = queue.copy_payload(
            0,
            &MemoryTable::new(),
            Accessor { pd: 1, qp: 2 },
            &mut [0; 4],
        );
        assert_eq!(copied, Err(WcStatus::LocalProtection));
    }
}
