//! References to registered memory, created only where no one else can write it.
//!
//! Invariant of the `unsafe` code: a reference exists only while nothing can write the memory, and
//! a mutable one only while nothing can read it either. Who could write it?
//!
//! - *Peers*, by rights of the region. Memory with `REMOTE_WRITE` or `REMOTE_ATOMIC` is never
//!   referred to, and for a mutable reference there may be no remote rights at all. The rights of a
//!   registration never change.
//! - *Peers*, by a window. A window holds a handle of the memory and, if it grants rights to write,
//!   also a [`WriteAccess`](crate::verbs::WriteAccess), until it is deallocated. No access of the
//!   peer is in progress after that, because deallocation waits for the table's lock. The message
//!   by which a peer invalidates a window changes nothing here: the window must be dropped.
//! - *Requests* of this end that place data there: RDMA Reads, alone or in a batch. They hold a
//!   handle and a `WriteAccess` from their creation until they complete. After a failed completion
//!   both are kept until this crate's accesses have ended. If an operation is forgotten, both are
//!   kept forever.
//! - *Calls* of this end that copy data in, such as [`Region::write_at`]: they hold a `WriteAccess`
//!   while they copy.
//! - *Other requests*: the keys of this memory never leave the module `connection`, which alone has
//!   its endpoint's device and protection domain. So no other request can name it.
//! - *Other processes*, by a file. Memory of files is never referred to.
//!
//! [`Region::view`] counts a reference, and a `WriteAccess` is not created while there is one. The
//! counts are one atomic number (`verbs/borrows.rs`), so neither overtakes the other. Sends and
//! Writes read viewed memory, which references allow. [`Region::get_mut`] needs the only handle,
//! exclusively borrowed, so that there is neither a request nor a view. A buffer of a pool has
//! handles of its own, beside those of its block. A [`ReceivedBytes`] refers to memory of the
//! receive queue of one connection that is not posted while the value lives.

use super::region::{REMOTE, Region, resolve};
use crate::error::{Error, Result};
use crate::failure::Refusal;
use crate::verbs::MemoryRegion;
use bytemuck::Pod;
use iwarp_rnic::Access;
use std::ops::{Deref, RangeBounds};

impl<T: Pod> Region<T> {
    /// Returns the elements in place, for reading. While the [`View`] or a clone of it exists,
    /// nothing can write the memory of the region: requests that would, and calls like
    /// [`write_at`](Self::write_at), are refused ([`Refusal::Viewed`]). Sends and Writes from it
    /// are not. The whole memory counts, also that of other slices.
    ///
    /// The memory can be viewed if no peer has rights to write it, and it is not a file. To grant a
    /// peer such rights for some time, use a [`Window`](super::Window).
    ///
    /// ```
    /// # use iwarp::{Connection, Region, RemoteRegion};
    /// /// Reads the peer's numbers, and adds them up in place.
    /// async fn sum(
    ///     connection: &Connection,
    ///     from: &RemoteRegion<u64>,
    ///     into: &Region<u64>,
    /// ) -> iwarp::Result<u64> {
    ///     connection.read_into(into, from).await?;
    ///     Ok(into.view()?[..from.len()].iter().sum())
    /// }
    /// ```
    ///
    /// # Errors
    /// [`Refusal::NeverViewed`]; [`Refusal::BeingWritten`]: an operation that reads into the memory
    /// exists, or a window with rights to write; [`Refusal::NotElements`]: misaligned.
    pub fn view(&self) -> Result<View<T>> {
        let refused = |refusal| Err(Error::Refused(refusal));
        if !self.memory.can_be_referred_to() {
            return refused(Refusal::NeverViewed);
        }
        let first = self.memory.pointer(self.at, self.octets())?;
        if !first.cast::<T>().is_aligned() {
            let (octets, element) = (self.octets(), size_of::<T>());
            return refused(Refusal::NotElements { octets, element });
        }
        match self.memory.borrows().try_refer() {
            true => Ok(View(self.clone())),
            false => refused(Refusal::BeingWritten),
        }
    }

    /// Returns the elements in place if no one else can access them: the region is not shared and
    /// not a file, no request uses it, and no clone, slice, view or window of it exists. Otherwise
    /// returns `None`.
    pub fn get_mut(&mut self) -> Option<&mut [T]> {
        let (at, octets) = (self.at, self.octets());
        let private = !self.memory.access().intersects(REMOTE) && self.memory.can_be_referred_to();
        if !private || !self.memory.is_only_handle() {
            return None;
        }
        let first = self.memory.pointer(at, octets).ok()?.cast::<T>();
        // Pages are aligned for every element of at most their size.
        if !first.is_aligned() {
            return None;
        }
        // SAFETY: `len` plain elements in memory that is kept by this only handle; by the invariant
        // above nothing else accesses it while the handle is borrowed.
        Some(unsafe { std::slice::from_raw_parts_mut(first, self.len) })
    }
}

/// The elements of a region, in place: dereferences to a slice. Created by [`Region::view`]. A
/// clone or a [slice](Self::slice) is cheap.
///
/// Forgetting a view ([`std::mem::forget`]) makes the memory read-only for as long as it exists.
#[derive(Debug)]
pub struct View<T: Pod>(Region<T>);

impl<T: Pod> View<T> {
    /// Returns a part of the elements.
    ///
    /// # Errors
    /// [`Refusal::OutOfRange`].
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<Self> {
        let (start, len) = resolve(range, self.0.len)?;
        let mut part = self.clone();
        part.0.at += start * size_of::<T>();
        part.0.len = len;
        Ok(part)
    }

    /// Returns the region, for example to send it.
    pub const fn region(&self) -> &Region<T> {
        &self.0
    }
}

impl<T: Pod> Deref for View<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self.0.memory.pointer(self.0.at, self.0.octets()) {
            // SAFETY: `view` has checked the alignment, which `slice` preserves. The memory
            // contains `len` plain elements, and is kept by the handle. By the invariant above,
            // nothing writes it while the reference is counted.
            Ok(first) => unsafe { std::slice::from_raw_parts(first.cast(), self.0.len) },
            Err(_) => &[],
        }
    }
}

impl<T: Pod> AsRef<[T]> for View<T> {
    fn as_ref(&self) -> &[T] {
        self
    }
}

impl<T: Pod> Clone for View<T> {
    fn clone(&self) -> Self {
        if !self.0.memory.borrows().try_refer() {
            // There are 2^32 others, and no writer. Without a count, writers could begin too early.
            std::process::abort();
        }
        Self(self.0.clone())
    }
}

impl<T: Pod> Drop for View<T> {
    fn drop(&mut self) {
        self.0.memory.borrows().end_reference();
    }
}

#[cfg(feature = "bytes")]
impl From<View<u8>> for bytes::Bytes {
    /// Keeps the bytes in the region.
    fn from(view: View<u8>) -> Self {
        Self::from_owner(view)
    }
}

/// Bytes of a received message. A clone refers to the same bytes.
#[derive(Debug, Clone)]
pub(super) struct ReceivedBytes {
    memory: MemoryRegion,
    at: usize,
    len: usize,
}

impl ReceivedBytes {
    /// Refers to `len` bytes at `at`. Returns `None` if they are outside the memory, or if a peer
    /// could write them.
    ///
    /// # Safety
    /// While the value or a clone of it lives, no request that names these bytes may be posted, and
    /// nothing may be copied into them.
    pub(super) unsafe fn new(memory: MemoryRegion, at: usize, len: usize) -> Option<Self> {
        let inside = at.checked_add(len).is_some_and(|end| end <= memory.len());
        let private = memory.access() & (REMOTE | Access::MW_BIND) == Access::empty();
        (inside && private).then_some(Self { memory, at, len })
    }

    /// Restricts it to `len` of its bytes from `at` on, which the caller has checked.
    pub(super) const fn restrict(&mut self, at: usize, len: usize) {
        self.at += at;
        self.len = len;
    }

    /// Returns the octets.
    pub(super) fn octets(&self) -> &[u8] {
        match self.memory.pointer(self.at, self.len) {
            // SAFETY: initialised memory of a mapping that the handle keeps; `new` requires that
            // nothing writes it.
            Ok(first) => unsafe { std::slice::from_raw_parts(first, self.len) },
            Err(_) => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::verbs::Borrows;
    use std::cell::UnsafeCell;
    use std::sync::Arc;

    struct Memory {
        borrows: Borrows,
        words: UnsafeCell<[u64; 4]>,
    }

    // SAFETY: the words are accessed only as the counts allow. Miri checks this.
    unsafe impl Sync for Memory {}

    /// Miri reports a race if a reference and a writer overlap, or do not synchronise.
    #[test]
    fn references_exclude_writers() {
        let memory = Arc::new(Memory {
            borrows: Borrows::default(),
            words: UnsafeCell::new([0; 4]),
        });
        let rounds = if cfg!(miri) { 30 } else { 10_000 };
        let threads: Vec<_> = (0..3)
            .map(|n| {
                let memory = Arc::clone(&memory);
                std::thread::spawn(move || {
                    for round in 0..rounds {
                        // One thread writes: writers do not exclude each other.
                        if n == 0 && memory.borrows.try_write() {
                            // SAFETY: no reference exists, and this is the only writer.
                            unsafe { *memory.words.get() = [round; 4] };
                            memory.borrows.end_write();
                        }
                        if n > 0 && memory.borrows.try_refer() {
                            // SAFETY: no writer exists.
                            let words: &[u64; 4] = unsafe { &*memory.words.get() };
                            assert_eq!(*words, [words[0]; 4]);
                            memory.borrows.end_reference();
                        }
                        std::thread::yield_now();
                    }
                })
            })
            .collect();
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
    }
}
