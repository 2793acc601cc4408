//! Tests of the range check: all three methods must return the right result for known memory.

use super::*;
use crate::mapping::Mapping;
use rustix::mm::{MprotectFlags, mprotect};

type Method = (&'static str, fn(u64, u64, bool) -> bool);

fn by_query(addr: u64, end: u64, write: bool) -> bool {
    let maps = open_maps().expect("/proc");
    walk_query(&maps, addr, end, write).expect("checked by `methods`")
}

fn by_text(addr: u64, end: u64, write: bool) -> bool {
    let maps = open_maps().expect("/proc");
    walk_text(BufReader::new(File::from(maps)), addr, end, write)
}

/// Returns the methods that this kernel supports. `/proc/self/maps` must be available.
fn methods() -> Vec<Method> {
    let mut all: Vec<Method> = vec![("text", by_text)];
    let addr = &raw const all as u64;
    let maps = open_maps().expect("/proc");
    match walk_query(&maps, addr, addr + 1, false) {
        Ok(_) => all.push(("query", by_query)),
        Err(Unsupported) => println!("skipped: no PROCMAP_QUERY (before Linux 6.11)"),
    }
    if populate(addr, addr + 1, true) {
        all.push(("populate", populate));
    } else {
        println!("skipped: no MADV_POPULATE_WRITE (before Linux 5.14)");
    }
    all
}

/// Maps five pages: read-write, read-write, read-only, inaccessible, read-write. Returns them and
/// the page size.
fn five_pages() -> (Mapping, u64) {
    let page = page_size();
    let mapping = Mapping::new(5 * page).expect("memory");
    // SAFETY: these are whole pages of a mapping that nothing else accesses.
    unsafe {
        let start = mapping.as_ptr();
        mprotect(start.add(2 * page).cast(), page, MprotectFlags::READ).expect("read-only");
        mprotect(start.add(3 * page).cast(), page, MprotectFlags::empty()).expect("none");
    }
    (mapping, page as u64)
}

#[test]
fn methods_agree_at_page_borders() {
    let (mapping, page) = five_pages();
    let base = mapping.addr();
    // (offset of the start, offset of the end, readable, writable)
    let cases = [
        (0, 1, true, true),
        (0, 2 * page, true, true),
        (page - 1, page + 1, true, true),
        (0, 2 * page + 1, true, false),
        (2 * page - 1, 2 * page + 1, true, false),
        (2 * page, 3 * page, true, false),
        (0, 3 * page, true, false),
        (0, 3 * page + 1, false, false),
        (3 * page, 3 * page + 1, false, false),
        (3 * page + 5, 5 * page, false, false),
        (4 * page - 1, 4 * page + 1, false, false),
        (4 * page, 5 * page, true, true),
        (0, 5 * page, false, false),
    ];
    for (name, method) in methods() {
        for (start, end, readable, writable) in cases {
            assert_eq!(
                method(base + start, base + end, false),
                readable,
                "{name} {start}..{end} read"
            );
            assert_eq!(
                method(base + start, base + end, true),
                writable,
                "{name} {start}..{end} write"
            );
        }
    }
    for (start, end, readable, writable) in cases {
        assert_eq!(probe_range(base + start, end - start, false), readable);
        assert_eq!(probe_range(base + start, end - start, true), writable);
    }
}

#[test]
fn heap_stack_and_constants_are_mapped() {
    static CONSTANT: [u8; 100] = [1; 100];
    let heap = vec![0u8; 10_000];
    let mut stack = [0u8; 64];
    assert!(probe_range(heap.as_ptr() as u64, 10_000, true));
    assert!(probe_range(stack.as_mut_ptr() as u64, 64, true));
    assert!(probe_range(CONSTANT.as_ptr() as u64, 100, false));
    assert!(
        !probe_range(CONSTANT.as_ptr() as u64, 100, true),
        "read-only data"
    );
}

/// The mapping has three pages, but the file only two, the second one incomplete. Every range that
/// includes a byte of the third page is invalid.
#[test]
fn pages_beyond_end_of_file_fail() {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

    let page = page_size();
    let file = memfd_create("iwarp-probe", MemfdFlags::CLOEXEC).expect("a file");
    ftruncate(&file, page as u64 + 10).expect("its length");
    for flags in [MapFlags::SHARED, MapFlags::PRIVATE] {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the address, so the mapping does not replace another one.
        let start = unsafe { mmap(std::ptr::null_mut(), 3 * page, protection, flags, &file, 0) };
        let start = start.expect("mapped");
        let (base, page) = (start as u64, page as u64);
        for (name, method) in methods() {
            for (from, end, valid) in [
                (0, 1, true),
                (0, 2 * page, true),
                (page, page + 11, true),
                (0, 2 * page + 1, false),
                (2 * page, 2 * page + 1, false),
                (3 * page - 1, 3 * page, false),
                (page + 1, 3 * page, false),
            ] {
                let found = method(base + from, base + end, true);
                assert_eq!(found, valid, "{name} {flags:?} {from}..{end}");
            }
        }
        // SAFETY: the mapping was created above, and is no longer used.
        unsafe { munmap(start, 3 * page as usize) }.expect("unmapped");
    }
}

#[test]
fn empty_and_unmapped_ranges() {
    assert!(probe_range(8, 0, true), "an empty range");
    assert!(!probe_range(0, 1, false));
    assert!(!probe_range(8, 8, false));
    assert!(
        !probe_range(u64::MAX, 1, false),
        "ends beyond the last address"
    );
    assert!(!probe_range(u64::MAX - 5, 100, false), "wraps around");
    assert!(!probe_range(u64::MAX - 4096, 10, true), "kernel address");
    let one = 1u8;
    assert!(!probe_range(&raw const one as u64, u64::MAX >> 1, false));
    assert!(probe_range(0, 0, true));
    assert!(probe_range(u64::MAX, 0, true));
    for (name, method) in methods() {
        assert!(!method(u64::MAX - 8192, u64::MAX - 4096, true), "{name}");
        assert!(!method(8, 16, false), "{name}");
    }
}

#[test]
fn probe_does_not_fault_in_pages() {
    let len = 1usize << 28;
    let mapping = Mapping::new(len).expect("memory");
    // SAFETY: the byte is inside the mapping, which nothing else accesses.
    unsafe { mapping.as_ptr().write(0x5A) };
    assert!(probe_range(mapping.addr(), len as u64, true));
    // SAFETY: as above.
    assert_eq!(unsafe { mapping.as_ptr().read() }, 0x5A);
    let mut resident = vec![0u8; len / page_size()];
    // SAFETY: the mapping exists, and the vector has a byte for each page of it.
    let status = unsafe { libc::mincore(mapping.as_ptr().cast(), len, resident.as_mut_ptr()) };
    assert_eq!(status, 0);
    let pages = resident.iter().filter(|&&octet| octet & 1 == 1).count();
    // One page, or one huge page if the system allocates them by default.
    assert!(pages <= 512, "{pages} pages are in memory");
}

#[test]
fn maps_text_is_parsed() {
    let maps: &[u8] = b"1000-3000 rw-p 00000000 00:00 0 \n\
        3000-4000 r--p 00000000 fd:01 9 /a file\xff with \xfe bytes\n\
        6000-7000 -w-p 00000000 00:00 0 [odd]\n";
    let walk = |addr, end, write| walk_text(maps, addr, end, write);
    assert!(walk(0x1000, 0x3000, true));
    assert!(walk(0x2fff, 0x4000, false));
    assert!(!walk(0x2fff, 0x3001, true));
    assert!(!walk(0x3fff, 0x4001, false));
    assert!(!walk(0xfff, 0x1001, false));
    assert!(!walk(0x6000, 0x6001, true), "write-only");
    assert!(!walk(0x8000, 0x8001, false));
    assert!(!walk_text(&b"nonsense\n"[..], 0x1000, 0x1001, false));
    assert!(!walk_text(&b""[..], 0x1000, 0x1001, false));
}

/// Prints the figures for the documentation of the module: `cargo test -p iwarp-os --release
/// probe_cost -- --ignored --nocapture`. It checks nothing.
#[test]
#[ignore = "prints a measurement"]
fn probe_cost() {
    let small = vec![0u8; 4096];
    let large = Mapping::new(1 << 30).expect("memory");
    for (name, addr, len) in [
        ("4 KiB", small.as_ptr() as u64, 4096),
        ("1 GiB", large.addr(), 1 << 30),
    ] {
        for (method, probe) in methods() {
            if method == "populate" && len > 1 << 20 {
                continue;
            }
            let rounds = 2000u32;
            let start = std::time::Instant::now();
            for _ in 0..rounds {
                assert!(probe(addr, addr + len, true));
            }
            println!("{name} by {method}: {:?}", start.elapsed() / rounds);
        }
    }
}
