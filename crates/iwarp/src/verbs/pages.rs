//! The memory of a region: pages of its own or of a file, a vector of the program, `Bytes`, or a
//! part of another region.
//!
//! Invariant of the `unsafe` code: [`Elements`] owns the allocation of a `Vec<T>` of plain
//! elements, as raw parts. Its address does not change until it is dropped. References to it are
//! created only by [`Elements::octets`], before it is registered.

use super::MemoryRegion;
use crate::sys::mapping::Mapping;
use bytemuck::Pod;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

/// Memory that a region owns.
#[derive(Debug)]
pub(crate) enum Pages {
    Mapped(Mapping),
    Elements(Elements),
    #[cfg(feature = "bytes")]
    Bytes(bytes::Bytes),
    /// Bytes of a registered block: its handle, an offset, and a length inside it.
    Part(MemoryRegion, usize, usize),
}

impl Pages {
    /// Returns the first byte. Shared bytes must not be written.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        match self {
            Self::Mapped(mapping) => mapping.as_ptr(),
            Self::Elements(elements) => elements.first.as_ptr(),
            #[cfg(feature = "bytes")]
            Self::Bytes(bytes) => bytes.as_ptr().cast_mut(),
            Self::Part(block, at, len) => match block.pointer(*at, *len) {
                Ok(first) => first,
                // Unreachable: the part is inside the block.
                Err(_) => NonNull::dangling().as_ptr(),
            },
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Mapped(mapping) => mapping.len(),
            Self::Elements(elements) => elements.len,
            #[cfg(feature = "bytes")]
            Self::Bytes(bytes) => bytes.len(),
            Self::Part(_, _, len) => *len,
        }
    }

    /// Returns `true` if the bytes are those of a file, which may change or disappear.
    pub(crate) fn is_file(&self) -> bool {
        match self {
            Self::Mapped(mapping) => mapping.is_file(),
            Self::Part(block, ..) => block.is_file(),
            _ => false,
        }
    }

    /// Returns the address as a number, by which the RNIC accesses the memory.
    pub(crate) fn addr(&self) -> u64 {
        self.as_ptr().expose_provenance() as u64
    }
}

/// The allocation of a vector of plain elements.
pub(crate) struct Elements {
    first: NonNull<u8>,
    /// Length in bytes.
    len: usize,
    /// Capacity in elements.
    capacity: usize,
    free: unsafe fn(NonNull<u8>, usize),
}

// SAFETY: the elements are `Send`, and nothing else refers to the allocation.
unsafe impl Send for Elements {}
// SAFETY: shared access is to plain bytes, which nothing changes meanwhile.
unsafe impl Sync for Elements {}

impl Elements {
    pub(crate) fn new<T: Pod + Send>(elements: Vec<T>) -> Self {
        /// # Safety
        /// `first` and `capacity` are those of a vector of `T` that is not used any more.
        unsafe fn free<T>(first: NonNull<u8>, capacity: usize) {
            // SAFETY: guaranteed by the caller. Plain elements are not dropped.
            drop(unsafe { Vec::<T>::from_raw_parts(first.as_ptr().cast(), 0, capacity) });
        }
        let mut elements = ManuallyDrop::new(elements);
        // The pointer of a vector is never null.
        let first = NonNull::new(elements.as_mut_ptr()).unwrap_or(NonNull::dangling());
        Self {
            first: first.cast(),
            len: size_of_val(elements.as_slice()),
            capacity: elements.capacity(),
            free: free::<T>,
        }
    }

    /// Returns the bytes. No request or peer may write them meanwhile.
    pub(crate) const fn octets(&self) -> &[u8] {
        // SAFETY: plain elements are initialised bytes, and the allocation is owned.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.len) }
    }
}

impl std::fmt::Debug for Elements {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Elements")
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

impl Drop for Elements {
    fn drop(&mut self) {
        // SAFETY: the parts are those of the vector, which is dropped once, here.
        unsafe { (self.free)(self.first, self.capacity) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_keep_bytes_and_alignment() {
        let mut words = Vec::with_capacity(9);
        words.extend([1u64, 2, 3]);
        let at = words.as_ptr().cast::<u8>();
        let elements = Elements::new(words);
        assert_eq!(elements.octets().as_ptr(), at);
        assert_eq!(
            elements.octets(),
            bytemuck::cast_slice::<u64, u8>(&[1, 2, 3])
        );
        let pages = Pages::Elements(elements);
        assert_eq!((pages.as_ptr().cast_const(), pages.len()), (at, 24));
        assert!(Elements::new(Vec::<u16>::new()).octets().is_empty());
    }
}
