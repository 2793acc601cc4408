//! Checks whether a range of addresses is mapped. This is done once per memory registration, so
//! that a bad address is an error and never a crash.
//!
//! The contents of the range are neither read nor written. The kernel's list of mappings is
//! consulted, and the last page of a mapped file is faulted in (`MADV_POPULATE_READ`, Linux 5.14),
//! because a file that is too short lacks its last pages.
//! - Linux 6.11 and later: one `PROCMAP_QUERY` per mapping that the range touches; 4 µs for the
//!   usual single mapping, of any size.
//! - Before: the text of `/proc/self/maps`, 0.4 µs per mapping of the process (24 µs for a small
//!   one).
//! - Without `/proc`: `MADV_POPULATE_READ`/`_WRITE` (Linux 5.14). It changes no contents but faults
//!   in the pages, so a large untouched range takes memory and time, as pinning it for a hardware
//!   RNIC would. If that is missing too, the range counts as bad.
//!
//! The answer does not promise that the range stays mapped (the application must ensure that until
//! it deregisters), or that a mapped file keeps its length. Pages of a main stack that has not
//! grown yet count as unmapped.
//!
//! Invariant: the `unsafe` calls below only pass addresses as numbers to the kernel, and variables
//! for its answers that live on.

use super::mapping::page_size;
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};

/// Returns `true` if all of `[addr, addr + len)` is mapped in this process, readable, and, if
/// `write`, writable, and no part of it lies beyond the end of a mapped file.
/// behind the end of a mapped file.
/// An empty range is always valid. A range that wraps around is not.
/// An empty range is valid anywhere. A range that wraps around is not.
pub fn probe_range(addr: u64, len: u64, write: bool) -> bool {
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

/// Opened each time: a descriptor kept across `fork` would show the parent's memory.
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
        // SAFETY: the opcode takes exactly this structure, which contains its size. The kernel
        // reads and updates it, and follows no pointer in it, because the name and build-id sizes
        // are 0.
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
            // The answer does not advance.
            return Err(Unsupported);
        }
        addr = query.vma_end;
        if query.inode != 0 && !reaches(addr.min(end)) {
            return Ok(false);
        }
    }
    Ok(true)
}

fn allows(readable: bool, writable: bool, write: bool) -> bool {
    readable && (writable || !write)
}

/// As [`walk_query`], from the text form. Lines are sorted by address.
fn walk_text(mut maps: impl BufRead, mut addr: u64, end: u64, write: bool) -> bool {
    let mut line = Vec::with_capacity(128);
    loop {
        line.clear();
        // Bytes, not text: the name of a mapped file may be anything.
        match maps.read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return false,
            Ok(_) => {}
        }
        let Some(mapping) = parse_line(&line) else {
            return false;
        };
        if mapping.end <= addr {
            continue;
        }
        if mapping.start > addr || !allows(mapping.readable, mapping.writable, write) {
            return false;
        }
        addr = mapping.end;
        if mapping.is_file && !reaches(addr.min(end)) {
            return false;
        }
        if addr >= end {
            return true;
        }
    }
}

/// Returns `true` if the file that is mapped before `end` has that page. It counts as present if
/// the kernel does not report it: before Linux 5.14, and for memory of devices.
fn reaches(end: u64) -> bool {
    let page = page_size() as u64;
    let last = end.saturating_sub(1) / page * page;
    let start = std::ptr::without_provenance_mut(last as usize);
    // SAFETY: populating changes no content and no permission; the kernel checks the range itself.
    let status = unsafe { libc::madvise(start, page as usize, libc::MADV_POPULATE_READ) };
    status == 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT)
}

/// A line of the text form.
struct Mapped {
    start: u64,
    end: u64,
    readable: bool,
    writable: bool,
    is_file: bool,
}

/// `start-end rwxp offset device inode …`; numbers are hexadecimal except the last.
fn parse_line(line: &[u8]) -> Option<Mapped> {
    let head = line.get(..line.len().min(100))?;
    let mut fields = head.split(u8::is_ascii_whitespace);
    let mut range = std::str::from_utf8(fields.next()?).ok()?.split('-');
    let start = u64::from_str_radix(range.next()?, 16).ok()?;
    let end = u64::from_str_radix(range.next()?, 16).ok()?;
    let rights = fields.next()?;
    Some(Mapped {
        start,
        end,
        readable: *rights.first()? == b'r',
        writable: *rights.get(1)? == b'w',
        is_file: fields.nth(2)? != b"0",
    })
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
            // SAFETY: populating changes no content and no permission; the kernel checks the range
            // itself.
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
    // Writable implies readable on common processors, but a write-only mapping must not pass.
    advise(libc::MADV_POPULATE_READ) && (!write || advise(libc::MADV_POPULATE_WRITE))
}

#[cfg(test)]
#[path = "probe_tests.rs"]
mod tests;
