//! Tests of mappings: anonymous memory, huge pages, and files.

use super::*;
use crate::probe::probe_range;
use rustix::fs::{MemfdFlags, memfd_create};
use std::ffi::CString;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;

#[test]
fn mapping_is_aligned_and_zeroed() {
    let page = page_size();
    for len in [1, page - 1, page, page + 1, 3 << 20] {
        let mapping = Mapping::new(len).expect("memory");
        assert_eq!(mapping.len(), len);
        assert_eq!(mapping.addr() as usize % page, 0);
        // SAFETY: nothing else accesses the memory, and both bytes are inside the mapping.
        unsafe {
            assert_eq!(mapping.as_ptr().add(len - 1).read(), 0);
            mapping.as_ptr().write(1);
            mapping.as_ptr().add(len - 1).write(2);
        }
    }
}

#[test]
fn empty_and_excessive_lengths() {
    let empty = Mapping::new(0).expect("empty");
    assert!(empty.is_empty() && (empty.addr() as usize).is_multiple_of(page_size()));
    assert!(matches!(
        Mapping::new(usize::MAX),
        Err(MappingError::TooLong { .. })
    ));
    assert!(matches!(
        Mapping::new(isize::MAX as usize),
        Err(MappingError::TooLong { .. })
    ));
    let huge = 1usize << 62;
    match Mapping::new(huge) {
        Err(MappingError::Refused { len, source }) => {
            assert_eq!(len, huge);
            assert_eq!(source.kind(), io::ErrorKind::OutOfMemory);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn drop_unmaps_pages() {
    // Large, so that no other test thread gets the same range immediately.
    let len = 1 << 30;
    let mapping = Mapping::new(len).expect("memory");
    let addr = mapping.addr();
    assert!(probe_range(addr, len as u64, true));
    drop(mapping);
    assert!(!probe_range(addr, len as u64, true));
}

/// Returns an unlinked file with these bytes.
fn file_of(octets: &[u8]) -> File {
    let name = CString::new("iwarp-test").unwrap();
    let file = memfd_create(&name, MemfdFlags::CLOEXEC).expect("a file in memory");
    let mut file = File::from(file);
    file.write_all(octets).unwrap();
    file
}

#[test]
fn file_is_mapped_from_any_offset() {
    let page = page_size();
    let octets: Vec<u8> = (0..3 * page).map(|i| (i % 251) as u8).collect();
    let file = file_of(&octets);
    for (offset, len) in [
        (0, 3 * page),
        (1, 5),
        (page - 1, 2),
        (2 * page + 7, page - 7),
    ] {
        let mapping = Mapping::of_file(&file, offset as u64, len, true).expect("mapped");
        assert!(mapping.is_file());
        let at = mapping.addr();
        assert_eq!((mapping.len(), at as usize % page), (len, offset % page));
        // SAFETY: the bytes are inside the file, which only this thread uses.
        unsafe {
            assert_eq!(mapping.as_ptr().read(), octets[offset]);
            assert_eq!(
                mapping.as_ptr().add(len - 1).read(),
                octets[offset + len - 1]
            );
            mapping.as_ptr().write(255);
        }
        let mut first = [0];
        file.read_exact_at(&mut first, offset as u64).unwrap();
        assert_eq!(first, [255], "a store changes the file");
        file.write_all_at(&octets[offset..=offset], offset as u64)
            .unwrap();
    }
}

/// All pages of a mapping that begins inside a page are unmapped.
#[test]
fn drop_unmaps_file() {
    let len = 1 << 30;
    let file = file_of(&[]);
    file.set_len(len + 100).unwrap();
    let mapping = Mapping::of_file(&file, 100, len as usize, false).expect("mapped");
    let (first, last) = (mapping.addr() - 100, mapping.addr() + len - 1);
    assert!(probe_range(first, len, false) && probe_range(last, 1, false));
    assert!(!probe_range(first, len, true), "it is read-only");
    drop(mapping);
    assert!(!probe_range(first, 1, false) && !probe_range(last, 1, false));
}

#[test]
fn range_outside_file_is_refused() {
    let file = file_of(&[1; 10]);
    assert!(Mapping::of_file(&file, 10, 0, true).is_ok_and(|mapping| mapping.is_empty()));
    for (offset, len, end) in [
        (0, 11, 11),
        (10, 1, 11),
        (11, 0, 11),
        (9, usize::MAX, u64::MAX),
    ] {
        match Mapping::of_file(&file, offset, len, true) {
            Err(MappingError::OutsideFile { end: is, len: 10 }) => assert_eq!(is, end),
            other => panic!("{offset} {len}: {other:?}"),
        }
    }
    let constant = File::open("/proc/self/exe").unwrap();
    match Mapping::of_file(&constant, 0, 1, true) {
        Err(MappingError::Refused { source, .. }) => {
            assert_eq!(source.kind(), io::ErrorKind::PermissionDenied);
        }
        other => panic!("{other:?}"),
    }
}

/// Returns the flags of the mapping at an address, from the kernel's report.
fn flags_of(addr: u64) -> String {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut found = false;
    for line in maps.lines() {
        let range = line
            .split(' ')
            .next()
            .and_then(|range| range.split_once('-'));
        if let Some((start, end)) = range
            && let Ok(start) = u64::from_str_radix(start, 16)
            && let Ok(end) = u64::from_str_radix(end, 16)
        {
            found = (start..end).contains(&addr);
        }
        if found && let Some(flags) = line.strip_prefix("VmFlags:") {
            return format!("{flags} ");
        }
    }
    panic!("no mapping at {addr:#x}")
}

#[test]
fn transparent_huge_pages_are_requested() {
    for len in [1, TRANSPARENT, TRANSPARENT + 1, 5 * TRANSPARENT] {
        let mapping = Mapping::transparent_huge(len).expect("memory");
        let (addr, end) = (mapping.addr(), mapping.addr() + len as u64);
        assert!((addr as usize).is_multiple_of(TRANSPARENT), "{addr:#x}");
        assert!(probe_range(addr, len as u64, true));
        // A kernel without transparent huge pages has no such folder.
        if std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            assert!(flags_of(end - 1).contains(" hg "), "{}", flags_of(end - 1));
        }
    }
    assert!(Mapping::transparent_huge(usize::MAX).is_err());
    assert!(Mapping::transparent_huge(0).is_ok_and(|mapping| mapping.is_empty()));
}

/// Machines may have reserved such pages, or not.
#[test]
fn huge_pages_are_mapped_or_missing() {
    for page in [HugePage::Mib2, HugePage::Gib1] {
        let size = page.size();
        match Mapping::huge(1, page) {
            Ok(mapping) => {
                assert!((mapping.addr() as usize).is_multiple_of(size));
                assert!(flags_of(mapping.addr()).contains(" ht "));
            }
            Err(MappingError::NoHugePages { pages, size: is }) => {
                assert_eq!((pages, is), (1, size));
            }
            Err(MappingError::NoSuchHugePage { size: is }) => assert_eq!(is, size),
            Err(other) => panic!("{other:?}"),
        }
        // More than any machine has.
        match Mapping::huge(1 << 50, page) {
            Err(MappingError::NoHugePages { pages, .. }) => assert_eq!(pages, (1 << 50) / size),
            Err(MappingError::NoSuchHugePage { size: is }) => assert_eq!(is, size),
            other => panic!("{other:?}"),
        }
        assert!(matches!(
            Mapping::huge(usize::MAX, page),
            Err(MappingError::TooLong { .. })
        ));
    }
}
