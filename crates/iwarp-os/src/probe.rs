//! Checks whether a range of addresses is mapped. Each memory registration does this, so that a bad
//! address is an error and not a crash.
//!
//! The check neither reads nor writes the contents of the range. It gets the mappings from the
//! kernel:
//! - Linux 6.11 and later: one `PROCMAP_QUERY` per mapping in the range. It takes 4 µs for the
//!   usual single mapping, of any size.
//! - Earlier kernels: the text of `/proc/self/maps`. It takes 0.4 µs per mapping of the process, or
//!   24 µs in a small process.
//! - Without `/proc`: `MADV_POPULATE_READ` and `MADV_POPULATE_WRITE` (Linux 5.14) on the whole
//!   range. They do not change the contents, but fault in the pages. So a large unused range takes
//!   memory and time, as pinning it for a hardware RNIC would. Before Linux 5.14, every range then
//!   counts as unmapped.
//!
//! If a file is shorter than its mapping, the last pages do not exist. So the check also faults in
//! the last page of a mapped file (`MADV_POPULATE_READ`, Linux 5.14).
//!
//! The check cannot ensure that the range remains mapped (the application must ensure that until it
//! deregisters), or that a mapped file keeps its length. The main stack counts as mapped
//! only as far down as it has grown.
//!
//! Invariant: the `unsafe` calls pass to the kernel only addresses, as numbers, and local variables
//! in which it stores results.

use super::mapping::page_size;
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};

/// Returns `true` if all of `[addr, addr + len)` is mapped and readable in this process, and
/// writable if `write` is set. Pages beyond the end of a mapped file count as unmapped. An empty
/// range is always valid. A range that wraps around is never valid.
pub fn probe_range(addr: u64, len: u64, write: bool) -> bool {
    if cfg!(miri) {
        return true;
    }
    let Some(end) = addr.checked_add(len) else {
        return false;
    };
    if len == 0 {
        return true;
    }
    match open_maps() {
        Some(maps) => match walk_query(&maps, addr, end, write) {
            Ok(valid) => valid,
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

/// Opens the list of mappings. A descriptor that is kept across a `fork` would refer to the
/// parent's memory, so every check opens the file.
fn open_maps() -> Option<OwnedFd> {
    open(
        "/proc/self/maps",
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .ok()
}

/// The kernel does not support the method.
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
        // SAFETY: the structure is the one that the opcode requires, and contains its size. The
        // kernel reads and updates it. It follows no pointer in it, because the sizes of the name
        // and the build ID are 0.
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
            // An invalid result, with which the loop would not end.
            return Err(Unsupported);
        }
        addr = query.vma_end;
        if query.inode != 0 && !last_page_exists(addr.min(end)) {
            return Ok(false);
        }
    }
    Ok(true)
}

fn allows(readable: bool, writable: bool, write: bool) -> bool {
    readable && (writable || !write)
}

/// Like [`walk_query`], but reads the text of `/proc/self/maps`. Its lines are sorted by address.
fn walk_text(mut maps: impl BufRead, mut addr: u64, end: u64, write: bool) -> bool {
    let mut line = Vec::with_capacity(128);
    loop {
        line.clear();
        // The name of a mapped file need not be UTF-8.
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
        if mapping.is_file && !last_page_exists(addr.min(end)) {
            return false;
        }
        if addr >= end {
            return true;
        }
    }
}

/// Returns `true` if the mapped file contains the last page before `end`. Also returns `true` if
/// the kernel does not report that: before Linux 5.14, and for memory of devices.
fn last_page_exists(end: u64) -> bool {
    let page = page_size() as u64;
    let last = end.saturating_sub(1) / page * page;
    let start = std::ptr::without_provenance_mut(last as usize);
    // SAFETY: populating pages changes neither contents nor permissions. The kernel checks the
    // range.
    let status = unsafe { libc::madvise(start, page as usize, libc::MADV_POPULATE_READ) };
    status == 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT)
}

/// A line of `/proc/self/maps`.
struct Mapped {
    start: u64,
    end: u64,
    readable: bool,
    writable: bool,
    is_file: bool,
}

/// Parses `start-end rwxp offset device inode …`. The inode is decimal, the other numbers are
/// hexadecimal.
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

/// Like [`walk_query`], but faults in the pages.
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
            // SAFETY: populating pages changes neither contents nor permissions. The kernel checks
            // the range.
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
    // Also check reading: a write-only mapping is not valid, although most processors allow reading
    // it.
    advise(libc::MADV_POPULATE_READ) && (!write || advise(libc::MADV_POPULATE_WRITE))
}

#[cfg(test)]
#[path = "probe_tests.rs"]
mod tests;
