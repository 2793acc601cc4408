//! Checks whether memory is in huge pages (`MAP_HUGETLB`), as `IBV_ACCESS_HUGETLB` promises.

use std::fs::File;
use std::io::{self, BufRead, BufReader};

/// Returns `true` if all pages of the range are huge, or if the range is empty. Fails if the
/// mappings of this process cannot be read.
pub(crate) fn is_huge(addr: u64, len: u64) -> io::Result<bool> {
    covers(BufReader::new(File::open("/proc/self/smaps")?), addr, len)
}

/// Parses `proc_pid_smaps(5)`: for each mapping, a line with its range, then lines with its
/// properties, such as the page size.
fn covers(smaps: impl BufRead, addr: u64, len: u64) -> io::Result<bool> {
    /// Ordinary pages have 4 to 64 KiB, depending on the architecture.
    const ORDINARY_MAX_KIB: u64 = 64;
    let Some(end) = addr.checked_add(len) else {
        return Ok(false);
    };
    // Mappings are sorted by address, so the covered part grows from the start of the range.
    let mut covered = addr;
    let mut mapping = (0, 0);
    for line in smaps.lines() {
        if covered >= end {
            break;
        }
        let line = line?;
        if let Some(range) = range(&line) {
            mapping = range;
        } else if let Some(kib) = page_kib(&line)
            && kib > ORDINARY_MAX_KIB
            && (mapping.0..mapping.1).contains(&covered)
        {
            covered = mapping.1;
        }
    }
    Ok(covered >= end)
}

/// Parses the range of a mapping: `7f0000000000-7f0000200000 rw-p …`.
fn range(line: &str) -> Option<(u64, u64)> {
    let (start, rest) = line.split_once('-')?;
    let (end, _) = rest.split_once(' ')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some((number(start)?, number(end)?))
}

/// Parses a mapping's page size: `KernelPageSize:     2048 kB`.
fn page_kib(line: &str) -> Option<u64> {
    let rest = line.strip_prefix("KernelPageSize:")?;
    rest.trim().strip_suffix("kB")?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
7f0000000000-7f0000200000 rw-p 00000000 00:0f 12 /anon_hugepage (deleted)
Size:               2048 kB
KernelPageSize:     2048 kB
MMUPageSize:        2048 kB
7f0000200000-7f0000600000 rw-p 00000000 00:0f 13 /anon_hugepage (deleted)
Size:               4096 kB
KernelPageSize:     2048 kB
7f0000600000-7f0000700000 rw-p 00000000 00:00 0
Size:               1024 kB
KernelPageSize:        4 kB
7f0000800000-7f0000a00000 rw-p 00000000 00:0f 14 /anon_hugepage (deleted)
KernelPageSize:     2048 kB
";

    #[test]
    fn ordinary_pages_are_not_huge() {
        let base = 0x7f00_0000_0000;
        for (from, len, huge) in [
            (0, 0x20_0000, true),
            (0x10_0000, 0x30_0000, true),
            (0, 0x60_0000, true),
            (0, 0x60_0001, false),
            (0x60_0000, 1, false),
            (0x70_0000, 1, false),
            (0x70_0000, 0x20_0000, false),
            (0x80_0000, 0x20_0000, true),
            (0x9f_ffff, 2, false),
            (0x60_0000, 0, true),
            (0, u64::MAX, false),
        ] {
            let found = covers(SMAPS.as_bytes(), base + from, len).unwrap();
            assert_eq!(found, huge, "{from:#x}, {len:#x}");
        }
    }

    #[test]
    fn heap_is_not_huge() {
        let heap = vec![0u8; 10_000];
        assert!(!is_huge(heap.as_ptr().addr() as u64, 10_000).unwrap());
    }
}
