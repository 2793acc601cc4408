//! The memory of null regions (`ibv_alloc_null_mr(3)`): a long range of zeros to read, and a long
//! range to write, whose contents nobody reads.
//!
//! Invariant: both ranges are mapped once and never unmapped. The zeros cannot be written, so the
//! kernel uses one page for all of them. The other range maps a few megabytes of an anonymous file
//! repeatedly. Only the RNIC writes to it.

use super::process_lock::ProcessLock;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::null_mut;

/// Length of each range in bytes: the longest message.
pub const NULL_LEN: u64 = iwarp_rnic::limits::MAX_MESSAGE as u64;
/// Length of the file that the writable range maps.
const PART: usize = 4 << 20;
const LEN: usize = NULL_LEN.next_multiple_of(PART as u64) as usize;

/// The addresses of the two ranges.
#[derive(Debug, Clone, Copy)]
pub struct NullMemory {
    /// Address of the readable range.
    pub zeros: u64,
    /// Address of the writable range.
    pub sink: u64,
}

/// Returns the ranges. The first call maps them.
///
/// # Errors
/// The process has no address space, no mappings or no descriptors left.
pub fn null_memory() -> io::Result<NullMemory> {
    static MAPPED: ProcessLock<Option<NullMemory>> = ProcessLock::new("sys::null::MAPPED", None);
    let mut mapped = MAPPED.lock();
    if let Some(memory) = *mapped {
        return Ok(memory);
    }
    let file = memfd_create("iwarp-null", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, PART as u64)?;
    let zeros = Range::reserve(ProtFlags::READ)?;
    let sink = Range::reserve(ProtFlags::empty())?;
    sink.fill(&file)?;
    let memory = NullMemory {
        zeros: zeros.keep(),
        sink: sink.keep(),
    };
    Ok(*mapped.insert(memory))
}

/// A range that is unmapped on drop unless it is kept.
struct Range(*mut u8);

impl Range {
    fn reserve(protection: ProtFlags) -> io::Result<Self> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the kernel chooses the address, so the mapping does not replace another one.
        let start = unsafe { mmap_anonymous(null_mut(), LEN, protection, flags) }?;
        Ok(Self(start.cast()))
    }

    /// Maps the file repeatedly over the whole range.
    fn fill(&self, file: &OwnedFd) -> io::Result<()> {
        for offset in (0..LEN).step_by(PART) {
            let at = self.0.wrapping_add(offset).cast();
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            let flags = MapFlags::SHARED | MapFlags::FIXED;
            // SAFETY: the mapping replaces a part of this range, which we own and nothing uses yet.
            unsafe { mmap(at, PART, protection, flags, file, 0) }?;
        }
        Ok(())
    }

    fn keep(self) -> u64 {
        let address = self.0.expose_provenance() as u64;
        std::mem::forget(self);
        address
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: we own the pages, and nothing uses them.
        let _ = unsafe { munmap(self.0.cast(), LEN) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_memory_reads_zeros() {
        let memory = null_memory().unwrap();
        assert_eq!(null_memory().unwrap().zeros, memory.zeros);
        let (zeros, sink) = (memory.zeros as *const u8, memory.sink as *mut u8);
        for at in [0, PART - 1, PART, (NULL_LEN - 1) as usize] {
            // SAFETY: the offset is inside both ranges.
            unsafe {
                sink.add(at).write_volatile(0xff);
                assert_eq!(zeros.add(at).read_volatile(), 0);
            }
        }
    }
}
