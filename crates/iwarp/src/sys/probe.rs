//! Checks whether a range of addresses is mapped. Done once per memory registration, so that a bad address is an error and never
//! a crash.
//!
//! Nothing is read from or written to the range, and no page is brought in: only the kernel's list of mappings is consulted.
//! - Linux 6.11 and later: one `PROCMAP_QUERY` per mapping that the range touches; 4 µs for the usual single mapping, of any size.
//! - Before: the text of `/proc/self/maps`, 0.4 µs per mapping of the process (24 µs for a small one).
//! - Without `/proc`: `MADV_POPULATE_READ`/`_WRITE` (Linux 5.14). It touches no content but brings the pages in, so a large untouched
//!   range takes memory and time, as pinning it for a hardware RNIC would. If that is missing too, the range counts as bad.
//!
//! The answer does not promise that the range stays mapped (the application must ensure that until it deregisters), that a
//! mapped file is long enough, or that pages of a main stack that has not grown yet are there (they count as unmapped).
//! Invariant: the `unsafe` calls below only pass addresses as numbers to the kernel, and places for its answers that live on.

use super::mapping::page_size;
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};

/// Returns `true` if `[addr, addr + len)` is mapped in this process, all of it readable, and writable if `write`.
///
/// An empty range is valid anywhere. A range that wraps around is not.
pub(crate) fn probe_range(addr: u64, len: u64, write: bool) -> bool {
    let Some(end) = addr.checked_add(len) else {
        return false;
    };
    if len == 0 {
        return true;
    }
    match open_maps() {
        Some(maps) => match walk_query(&maps, addr, end, write) {
            Ok(good) => good,
            Err(Unsupported) => walk_text(
                BufReader::with_capacity(1 << 15, File::from(maps)),
                addr,
                end,
                write,
            ),
        },
        None => populate(addr, end, write),
    }
}

/// Opened anew each time: a descriptor kept across `fork` would show the parent's memory.
fn open_maps() -> Option<OwnedFd> {
    open(
        "/proc/self/maps",
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .ok()
}

/// The method is not available here.
#[derive(Debug, PartialEq, Eq)]
struct Unsupported;

/// `struct procmap_query` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct ProcmapQuery {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

const _: () = assert!(size_of::<ProcmapQuery>() == 104);

const PROCMAP_QUERY: Opcode = opcode::read_write::<ProcmapQuery>(b'f', 17);
const VMA_READABLE: u64 = 0x01;
const VMA_WRITABLE: u64 = 0x02;

fn walk_query(maps: impl AsFd, mut addr: u64, end: u64, write: bool) -> Result<bool, Unsupported> {
    let maps = maps.as_fd();
    while addr < end {
        let mut query = ProcmapQuery {
            size: size_of::<ProcmapQuery>() as u64,
            query_addr: addr,
            ..ProcmapQuery::default()
        };
        // SAFETY: the opcode takes exactly this structure, whose size it carries, reads and updates it and follows no pointer in
        // it, because the name and build-id sizes are 0.
        match unsafe { ioctl(maps, Updater::<PROCMAP_QUERY, _>::new(&mut query)) } {
            Ok(()) => {}
            // No mapping covers the address.
            Err(Errno::NOENT) => return Ok(false),
            Err(Errno::INTR) => continue,
            Err(_) => return Err(Unsupported),
        }
        if !allows(
            query.vma_flags & VMA_READABLE != 0,
            query.vma_flags & VMA_WRITABLE != 0,
            write,
        ) {
            return Ok(false);
        }
        if query.vma_end <= addr {
            // Not an answer that lets us advance.
            return Err(Unsupported);
        }
        addr = query.vma_end;
    }
    Ok(true)
}

fn allows(readable: bool, writable: bool, write: bool) -> bool {
    readable && (writable || !write)
}

/// The same from the text form. Lines are in the order of addresses.
fn walk_text(mut maps: impl BufRead, mut addr: u64, end: u64, write: bool) -> bool {
    let mut line = Vec::with_capacity(128);
    loop {
        line.clear();
        // Bytes, not text: the name of a mapped file may be anything.
        match maps.read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return false,
            Ok(_) => {}
        }
        let Some((start, stop, readable, writable)) = parse_line(&line) else {
            return false;
        };
        if stop <= addr {
            continue;
        }
        if start > addr || !allows(readable, writable, write) {
            return false;
        }
        addr = stop;
        if addr >= end {
            return true;
        }
    }
}

/// `start-end rwxp …`, in hexadecimal.
fn parse_line(line: &[u8]) -> Option<(u64, u64, bool, bool)> {
    let head = line.get(..line.len().min(64))?;
    let mut fields = head.split(|&byte| byte == b' ');
    let mut range = std::str::from_utf8(fields.next()?).ok()?.split('-');
    let start = u64::from_str_radix(range.next()?, 16).ok()?;
    let stop = u64::from_str_radix(range.next()?, 16).ok()?;
    let rights = fields.next()?;
    Some((
        start,
        stop,
        *rights.first()? == b'r',
        *rights.get(1)? == b'w',
    ))
}

fn populate(addr: u64, end: u64, write: bool) -> bool {
    let page = page_size() as u64;
    let start = addr - addr % page;
    let (Ok(start), Some(Ok(len))) = (
        usize::try_from(start),
        end.checked_next_multiple_of(page)
            .map(|end| usize::try_from(end - start)),
    ) else {
        return false;
    };
    let advise = |advice: libc::c_int| {
        loop {
            // SAFETY: populating changes no content and no permission; the kernel checks the range itself.
            let status =
                unsafe { libc::madvise(std::ptr::without_provenance_mut(start), len, advice) };
            if status == 0 {
                return true;
            }
            if std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
                return false;
            }
        }
    };
    // Writable implies readable on the machines of interest, but a write-only mapping must not pass.
    advise(libc::MADV_POPULATE_READ) && (!write || advise(libc::MADV_POPULATE_WRITE))
}

#[cfg(test)]
#[path = "probe_tests.rs"]
mod tests;
