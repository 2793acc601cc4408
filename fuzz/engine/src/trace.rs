//! Shows the input that is running to another process, by a file that is mapped into memory. So an input that ends the process, or never
//! ends, is known all the same.
//!
//! The file has a head of two numbers of eight octets, those of the input and of its octets, and then the input.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

const HEAD: usize = 16;

/// The file, mapped for writing.
#[derive(Debug)]
pub(crate) struct Trace {
    at: *mut u8,
    len: usize,
}

impl Trace {
    /// Makes or empties the file, with room for inputs of up to `len_max` octets.
    pub(crate) fn new(path: &Path, len_max: usize) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(path)?;
        let len = HEAD + len_max;
        file.set_len(len as u64)?;
        Self::map(&file, len)
    }

    fn map(file: &File, len: usize) -> io::Result<Self> {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let at = unsafe { mmap(std::ptr::null_mut(), len, rights, MapFlags::SHARED, file, 0)? };
        Ok(Self { at: at.cast(), len })
    }

    /// Notes that the `number`th input begins to run.
    pub(crate) fn begins(&mut self, data: &[u8], number: u64) {
        let count = data.len().min(self.len - HEAD);
        // SAFETY: the mapping has room for the head and `count` octets, and this process has no references into it.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.at.add(HEAD), count) };
        for (i, value) in [number, count as u64].into_iter().enumerate() {
            // SAFETY: the head has two aligned words; mappings begin with a page.
            unsafe { &*self.at.cast::<AtomicU64>().add(i) }.store(value, Ordering::Release);
        }
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, and nobody refers to it any more.
        let _ = unsafe { munmap(self.at.cast(), self.len) };
    }
}

/// What the file says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Seen {
    /// The number of the input.
    pub(crate) number: u64,
    /// The input.
    pub(crate) data: Vec<u8>,
}

/// Reads the file. While the worker runs, the input may be half of one and half of the next.
pub(crate) fn read(path: &Path) -> io::Result<Seen> {
    let octets = std::fs::read(path)?;
    let word = |at: usize| -> u64 {
        let word = octets.get(8 * at..8 * at + 8);
        word.and_then(|word| word.try_into().ok())
            .map_or(0, u64::from_ne_bytes)
    };
    let rest = octets.get(HEAD..).unwrap_or_default();
    Ok(Seen {
        number: word(0),
        data: rest[..rest.len().min(word(1) as usize)].to_vec(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_process_sees_the_input() {
        let path = std::env::temp_dir().join(format!("iwarp-fuzz-trace-{}", std::process::id()));
        let mut trace = Trace::new(&path, 5).unwrap();
        trace.begins(&[1, 2, 3], 7);
        let seen = read(&path).unwrap();
        assert_eq!((seen.number, seen.data), (7, vec![1, 2, 3]));
        trace.begins(&[9; 10], 8);
        let seen = read(&path).unwrap();
        assert_eq!((seen.number, seen.data), (8, vec![9; 5]), "cut to the room");
        drop(trace);
        std::fs::remove_file(path).unwrap();
    }
}
