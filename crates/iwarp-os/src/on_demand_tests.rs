//! Tests of access to memory that may be unmapped: by the kernel, and in a child.

use super::*;
use crate::mapping::{Mapping, page_size};
use rustix::mm::{MprotectFlags, mprotect, munmap};
use std::sync::atomic::AtomicUsize;

/// Maps three pages: a writable one, an inaccessible one (the hole), and a read-only one. Returns
/// their address and the page size. They are never unmapped.
fn three_pages() -> (u64, u64) {
    let page = page_size();
    let mapping = Mapping::new(3 * page).expect("memory");
    let start = mapping.as_ptr();
    // SAFETY: these are whole pages of a mapping that nothing else accesses.
    unsafe {
        mprotect(start.add(page).cast(), page, MprotectFlags::empty()).expect("none");
        mprotect(start.add(2 * page).cast(), page, MprotectFlags::READ).expect("read-only");
    }
    let addr = mapping.addr();
    std::mem::forget(mapping);
    (addr, page as u64)
}

type Copies = (fn(u64, &mut [u8]) -> bool, fn(u64, &[u8]) -> bool);

fn child_read(from: u64, to: &mut [u8]) -> bool {
    let to = (to.as_mut_ptr().expose_provenance() as u64, to.len());
    let (to, len) = to;
    ChildAccess::new(Access::Copy { from, to, len }).run()
}

fn child_write(to: u64, from: &[u8]) -> bool {
    let (from, len) = (from.as_ptr().expose_provenance() as u64, from.len());
    ChildAccess::new(Access::Copy { from, to, len }).run()
}

const METHODS: [Copies; 2] = [(read, write), (child_read, child_write)];

#[test]
fn copies_of_unmapped_pages_fail() {
    for (read, write) in METHODS {
        let (at, page) = three_pages();
        assert!(write(at + 3, b"octets"));
        let mut back = [0xaa; 8];
        assert!(read(at + 2, &mut back));
        assert_eq!(&back, b"\0octets\0");
        assert!(write(at + page - 6, b"behind"));
        // In the hole, across both of its borders, and at addresses that are never mapped.
        for to in [
            at + page,
            at + page - 3,
            at + 2 * page - 3,
            0,
            8,
            u64::MAX - 64,
        ] {
            assert!(!write(to, b"octets"), "{:x}", to.wrapping_sub(at));
            assert!(!read(to, &mut back), "{:x}", to.wrapping_sub(at));
        }
        // The read-only page.
        assert!(read(at + 2 * page, &mut back));
        assert_eq!(back, [0; 8]);
        assert!(!write(at + 2 * page, b"octets"));
        assert!(read(at + 2 * page, &mut back));
        assert_eq!(back, [0; 8]);
    }
}

#[test]
fn empty_copy_makes_no_call() {
    let (at, page) = three_pages();
    for (read, _) in METHODS {
        assert!(read(at + page, &mut []));
    }
    assert!(copy_in_parts(0, |_, _| panic!("no call")) == Copied::All);
}

#[test]
fn refusal_differs_from_unmapped_page() {
    let refuse = |errno: i32| {
        copy_in_parts(1, |_, _| {
            // SAFETY: the pointer is to this thread's `errno`.
            unsafe { *libc::__errno_location() = errno };
            -1
        })
    };
    assert_eq!(refuse(libc::EFAULT), Copied::Unmapped);
    assert_eq!(refuse(libc::ENOSYS), Copied::Refused);
    assert_eq!(refuse(libc::EPERM), Copied::Refused);
    let parts = AtomicUsize::new(0);
    let copied = copy_in_parts(10, |done, remaining| {
        assert_eq!(done as usize + remaining, 10);
        parts.fetch_add(1, Ordering::Relaxed);
        remaining.min(4) as isize
    });
    assert_eq!((copied, parts.into_inner()), (Copied::All, 3));
}

#[test]
fn exchange_works_on_mapped_words() {
    let (at, page) = three_pages();
    assert!(write(at + 16, &7u64.to_ne_bytes()));
    assert_eq!(exchange(at + 16, 8, 9), Some(7));
    assert_eq!(exchange(at + 16, 7, 9), Some(7));
    assert_eq!(exchange(at + 16, 7, 10), Some(9));
    for not_writable in [at + page, at + 2 * page, 0] {
        assert_eq!(exchange(not_writable, 0, 1), None);
    }
}

#[test]
fn exchanges_are_atomic_among_threads() {
    static WORD: AtomicU64 = AtomicU64::new(0);
    let at = WORD.as_ptr().expose_provenance() as u64;
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let mut old = 0;
                    while let found = exchange(at, old, old + 1).expect("mapped")
                        && found != old
                    {
                        old = found;
                    }
                    WORD.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(WORD.load(Ordering::Relaxed), 400);
}

/// A page becomes inaccessible and accessible again, while it is accessed continuously.
#[test]
fn remapped_memory_never_faults() {
    let (at, page) = three_pages();
    std::thread::scope(|scope| {
        let changing = scope.spawn(|| {
            let start = with_exposed_provenance_mut::<c_void>(at as usize);
            for _ in 0..2_000 {
                // SAFETY: only this test uses the page, which is not unmapped.
                unsafe {
                    mprotect(start, page as usize, MprotectFlags::empty()).expect("inaccessible");
                    mprotect(
                        start,
                        page as usize,
                        MprotectFlags::READ | MprotectFlags::WRITE,
                    )
                    .expect("accessible");
                }
            }
        });
        let mut octets = [0; 64];
        while !changing.is_finished() {
            let _ = read(at + page - 100, &mut octets);
            let _ = write(at + 8, &octets);
            let _ = exchange(at + 16, 0, 0);
        }
    });
    assert!(read(at, &mut [0; 8]));
    // SAFETY: nothing accesses the page any longer.
    unsafe { munmap(with_exposed_provenance_mut(at as usize), page as usize).expect("unmapped") };
}

#[test]
fn prefetch_faults_in_mapped_pages() {
    let (at, page) = three_pages();
    assert!(prefetch(at + 5, page - 5, Prefetch::Write).is_ok());
    assert!(prefetch(at + 2 * page, 1, Prefetch::Read).is_ok());
    let errno = |result: io::Result<()>| result.expect_err("refused").raw_os_error();
    for (from, len, how) in [
        (at + page, 1, Prefetch::Read),
        (at, page + 1, Prefetch::Read),
        (at + 2 * page, 1, Prefetch::Write),
        (u64::MAX - 3, 8, Prefetch::Read),
    ] {
        assert_eq!(errno(prefetch(from, len, how)), Some(libc::EFAULT));
    }
}
