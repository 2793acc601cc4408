//! Storage of fixed size, allocated once and fallibly: a ring, and vectors of default values.

use crate::AllocError;
use alloc::vec::Vec;

#[derive(Debug)]
pub(crate) struct Ring<T> {
    slots: Vec<T>,
    head: u32,
    len: u32,
}

impl<T: Copy + Default> Ring<T> {
    pub(crate) fn new(capacity: u32) -> Result<Self, AllocError> {
        Ok(Self {
            slots: filled(capacity as usize)?,
            head: 0,
            len: 0,
        })
    }

    pub(crate) const fn capacity(&self) -> u32 {
        self.slots.len() as u32
    }

    pub(crate) const fn len(&self) -> u32 {
        self.len
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) const fn is_full(&self) -> bool {
        self.len >= self.capacity()
    }

    #[inline]
    const fn slot(&self, i: u32) -> usize {
        let at = (self.head as usize).wrapping_add(i as usize);
        if at >= self.slots.len() {
            at.wrapping_sub(self.slots.len())
        } else {
            at
        }
    }

    /// Appends a value. Returns its slot number, or the value if the ring is full.
    #[inline]
    pub(crate) fn push(&mut self, value: T) -> Result<u32, T> {
        if self.is_full() {
            return Err(value);
        }
        let slot = self.slot(self.len);
        match self.slots.get_mut(slot) {
            Some(s) => {
                *s = value;
                self.len = self.len.wrapping_add(1);
                Ok(slot as u32)
            }
            None => Err(value),
        }
    }

    /// Returns the slot number of the next element to be pushed.
    #[inline]
    pub(crate) const fn tail_slot(&self) -> u32 {
        self.slot(self.len) as u32
    }

    #[inline]
    pub(crate) fn prefetch(&self, slot: u32, fetch: &impl Fn(*const u8)) {
        if let Some(slot) = self.slots.get(slot as usize) {
            fetch(core::ptr::from_ref(slot).cast());
        }
    }

    #[inline]
    pub(crate) fn front(&self) -> Option<&T> {
        if self.is_empty() {
            None
        } else {
            self.slots.get(self.head as usize)
        }
    }

    #[inline]
    pub(crate) fn front_mut(&mut self) -> Option<&mut T> {
        if self.is_empty() {
            None
        } else {
            self.slots.get_mut(self.head as usize)
        }
    }

    /// Returns the slot number of the `i`-th element, if it exists.
    #[inline]
    pub(crate) const fn position(&self, i: u32) -> Option<usize> {
        if i < self.len {
            Some(self.slot(i))
        } else {
            None
        }
    }

    /// Returns the element in a slot that is in use.
    #[inline]
    pub(crate) fn at(&self, slot: usize) -> Option<&T> {
        self.slots.get(slot)
    }

    #[inline]
    pub(crate) fn get(&self, i: u32) -> Option<&T> {
        if i >= self.len {
            None
        } else {
            self.slots.get(self.slot(i))
        }
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, i: u32) -> Option<&mut T> {
        if i >= self.len {
            return None;
        }
        let slot = self.slot(i);
        self.slots.get_mut(slot)
    }

    #[inline]
    pub(crate) fn pop(&mut self) -> Option<T> {
        let value = *self.front()?;
        self.skip();
        Some(value)
    }

    #[inline]
    pub(crate) const fn skip(&mut self) {
        if self.len > 0 {
            self.len = self.len.wrapping_sub(1);
            let next = self.head.wrapping_add(1);
            // An empty ring starts at the first slot again, so that few cache lines are used.
            self.head = match self.len == 0 || next >= self.capacity() {
                true => 0,
                false => next,
            };
        }
    }

    pub(crate) const fn skip_many(&mut self, n: u32) {
        if n >= self.len {
            self.clear();
        } else {
            self.head = self.slot(n) as u32;
            self.len = self.len.wrapping_sub(n);
        }
    }

    #[inline]
    pub(crate) const fn head_slot(&self) -> u32 {
        self.head
    }

    pub(crate) const fn clear(&mut self) {
        self.head = 0;
        self.len = 0;
    }
}

/// Returns a vector of `n` default values; fails instead of aborting if there is no memory.
pub(crate) fn filled<T: Clone + Default>(n: usize) -> Result<Vec<T>, AllocError> {
    let mut v = Vec::new();
    v.try_reserve_exact(n).map_err(|_| AllocError)?;
    v.resize(n, T::default());
    Ok(v)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    proptest! {
        #[test]
        fn ring_is_bounded_queue(
            ops in proptest::collection::vec(any::<Option<u16>>(), 0..200),
            cap in 0u32..9,
        ) {
            let mut ring = Ring::new(cap).unwrap();
            let mut model = VecDeque::new();
            for op in ops {
                match op {
                    Some(v) if model.len() < cap as usize => {
                        prop_assert!(ring.push(v).is_ok());
                        model.push_back(v);
                    }
                    Some(v) => prop_assert_eq!(ring.push(v), Err(v)),
                    None => prop_assert_eq!(ring.pop(), model.pop_front()),
                }
                prop_assert_eq!(ring.len() as usize, model.len());
                prop_assert_eq!(ring.front(), model.front());
                for i in 0..cap {
                    prop_assert_eq!(ring.get(i), model.get(i as usize));
                }
            }
        }
    }

    #[test]
    fn empty_ring_stays_empty() {
        let mut ring = Ring::<u8>::new(2).unwrap();
        ring.skip();
        ring.skip_many(1);
        assert!(ring.is_empty() && ring.pop().is_none());
        for value in [1, 2] {
            assert!(ring.push(value).is_ok());
        }
        ring.skip_many(1);
        assert_eq!((ring.front(), ring.len()), (Some(&2), 1));
        ring.skip_many(2);
        assert!(ring.is_empty());
    }
}
