//! A list of fixed capacity.
//!
//! Few lists reach their capacity. Their memory stays uninitialized until it is used, so untouched
//! pages cost no real memory.
//!
//! Invariant: the first `len` items are initialized.
#![allow(unsafe_code)]

use crate::AllocError;
use alloc::vec::Vec;
use core::mem::MaybeUninit;

#[derive(Debug)]
pub(crate) struct List<T> {
    items: Vec<MaybeUninit<T>>,
    len: usize,
}

impl<T: Copy> List<T> {
    pub(crate) fn new(capacity: usize) -> Result<Self, AllocError> {
        let mut items = Vec::new();
        items.try_reserve_exact(capacity).map_err(|_| AllocError)?;
        // SAFETY: the vector has this capacity, and `MaybeUninit` needs no initialization.
        unsafe { items.set_len(capacity) };
        Ok(Self { items, len: 0 })
    }

    #[inline]
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub(crate) const fn room(&self) -> usize {
        self.items.len().saturating_sub(self.len)
    }

    /// Appends a value. The caller has checked `room`; a full list drops the value.
    #[inline]
    pub(crate) fn push(&mut self, value: T) {
        debug_assert!(self.room() > 0, "the list is full");
        if let Some(item) = self.items.get_mut(self.len) {
            item.write(value);
            self.len = self.len.wrapping_add(1);
        }
    }

    #[inline]
    pub(crate) fn get(&self, i: usize) -> Option<&T> {
        if i >= self.len {
            return None;
        }
        // SAFETY: `i < len`, so the item is initialized (the module's invariant).
        self.items
            .get(i)
            .map(|item| unsafe { item.assume_init_ref() })
    }

    #[inline]
    pub(crate) fn as_slice(&self) -> &[T] {
        let items = self.items.get(..self.len).unwrap_or(&[]);
        // SAFETY: the first `len` items are initialized (the module's invariant), and
        // `MaybeUninit<T>` has the layout of `T`.
        unsafe { core::slice::from_raw_parts(items.as_ptr().cast(), items.len()) }
    }

    pub(crate) const fn clear(&mut self) {
        self.len = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_stops_at_capacity() {
        let mut list = List::new(2).unwrap();
        assert_eq!((list.len(), list.room(), list.get(0)), (0, 2, None));
        list.push(7);
        assert_eq!((list.len(), list.as_slice()), (1, &[7][..]));
        list.push(8);
        assert_eq!((list.len(), list.room()), (2, 0));
        assert_eq!(list.as_slice(), &[7, 8]);
        assert_eq!((list.get(1), list.get(2)), (Some(&8), None));
        list.clear();
        assert_eq!((list.room(), list.get(0)), (2, None));
        assert!(List::<u64>::new(usize::MAX).is_err());
    }
}
