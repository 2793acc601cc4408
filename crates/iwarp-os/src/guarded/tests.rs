//! Tests of guarded accesses: an access fails if any of its bytes is unmapped, and otherwise
//! succeeds completely.

use super::*;
use crate::mapping::{Mapping, page_size};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mprotect, munmap};
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::time::Instant;

type Copy = unsafe extern "C" fn(*mut u8, *const u8, usize) -> u32;

fn copies() -> Vec<(&'static str, Copy)> {
    #[allow(unused_mut, reason = "only x86-64 has a second function")]
    let mut all: Vec<(&'static str, Copy)> = vec![("copy", machine::copy)];
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx") {
        all.push(("copy_avx", machine::copy_avx));
    }
    all
}

/// Maps three pages, the last of which is inaccessible. The first two contain bytes 0, 1, 2 ….
pub fn with_a_hole() -> (Mapping, usize) {
    enable();
    let page = page_size();
    let mapping = Mapping::new(3 * page).expect("memory");
    for i in 0..2 * page {
        // SAFETY: the byte is inside the mapping, which nothing else accesses.
        unsafe { mapping.as_ptr().add(i).write(i as u8) };
    }
    // SAFETY: this is a whole page of a mapping that nothing else accesses.
    unsafe {
        mprotect(
            mapping.as_ptr().add(2 * page).cast(),
            page,
            MprotectFlags::empty(),
        )
    }
    .expect("protected");
    (mapping, 2 * page)
}

/// Lengths that execute every branch of the copy functions.
fn lengths() -> impl Iterator<Item = usize> {
    (0..=300).chain([511, 512, 513, 1024, 4000])
}

#[test]
fn copies_fail_at_first_unmapped_byte() {
    let (mapping, hole) = with_a_hole();
    let mut own = vec![0u8; 8192];
    for (name, copy) in copies() {
        for len in lengths() {
            for mapped in (0..=len).filter(|n| len <= 300 || n % 37 == 0 || *n >= len - 70) {
                let at = mapping.as_ptr().wrapping_add(hole - mapped);
                // SAFETY: `own` is long enough, and faults are caught.
                let copied =
                    unsafe { [copy(own.as_mut_ptr(), at, len), copy(at, own.as_ptr(), len)] };
                let want = u32::from(mapped == len);
                assert_eq!(
                    copied, [want; 2],
                    "{name}: {mapped} of {len} bytes are mapped"
                );
            }
        }
    }
}

#[test]
fn copies_of_mapped_bytes_succeed() {
    let source: Vec<u8> = (0..8192u32).map(|i| (i * 7 + i / 256) as u8).collect();
    for (name, copy) in copies() {
        for len in lengths() {
            for (from, to) in [(0, 0), (1, 0), (0, 1), (3, 17), (31, 33), (64, 5)] {
                let mut own = vec![0x5a; 8192];
                // SAFETY: both buffers are long enough.
                let copied =
                    unsafe { copy(own.as_mut_ptr().add(to), source.as_ptr().add(from), len) };
                assert_eq!(copied, 1);
                assert_eq!(own[to..to + len], source[from..from + len], "{name} {len}");
                let others = own[..to].iter().chain(&own[to + len..]);
                assert!(
                    others.into_iter().all(|octet| *octet == 0x5a),
                    "{name} {len}"
                );
            }
        }
    }
}

#[test]
fn stores_and_exchanges_fail_cleanly() {
    let (mapping, hole) = with_a_hole();
    let at = |offset: usize| mapping.as_ptr().wrapping_add(offset);
    // SAFETY: faults are caught, and nothing else accesses the mapping.
    unsafe {
        assert!(ProcessRange::store_octet(at(hole - 1), 9));
        assert!(!ProcessRange::store_octet(at(hole), 9));
        assert_eq!(at(hole - 1).read_volatile(), 9);
        assert!(ProcessRange::store_word(at(hole - 8).cast(), 77));
        assert!(!ProcessRange::store_word(at(hole).cast(), 77));
        let word = at(hole - 8).cast::<u64>();
        assert_eq!(word.read_volatile(), 77);
        assert_eq!(ProcessRange::exchange(word, 76, 1), Some(77));
        assert_eq!(word.read_volatile(), 77);
        assert_eq!(ProcessRange::exchange(word, 77, 1), Some(77));
        assert_eq!(word.read_volatile(), 1);
        assert_eq!(ProcessRange::exchange(at(hole).cast(), 77, 1), None);
    }
}

/// An access beyond the end of a file raises SIGBUS.
#[test]
fn truncated_file_fails_copy() {
    enable();
    let page = page_size();
    let file = memfd_create("iwarp-guarded", MemfdFlags::CLOEXEC).expect("a file");
    ftruncate(&file, 2 * page as u64).expect("its length");
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel chooses the address, so the mapping does not replace another one.
    let start = unsafe { mmap(null_mut(), 2 * page, protection, MapFlags::SHARED, &file, 0) }
        .expect("mapped")
        .cast::<u8>();
    let mut own = vec![0; 2 * page];
    // SAFETY: both buffers have two pages, and faults are caught.
    unsafe {
        assert!(copy(start, own.as_mut_ptr(), 2 * page));
        ftruncate(&file, page as u64).expect("shorter");
        assert!(copy(start, own.as_mut_ptr(), page));
        assert!(!copy(start, own.as_mut_ptr(), page + 1));
        assert!(!copy(own.as_ptr(), start.add(page), 1));
        munmap(start.cast(), 2 * page).expect("unmapped");
    }
}

/// The kernel kills a process if a thread faults while it blocks the signal.
#[test]
fn blocked_signals_are_unblocked() {
    let (mapping, hole) = with_a_hole();
    let at = mapping.addr() as usize + hole;
    let copy_with_blocked_signals = move || {
        block_all_signals();
        keep_installed();
        let mut own = 0u8;
        // SAFETY: faults are caught.
        unsafe { copy(std::ptr::with_exposed_provenance(at), &raw mut own, 1) }
    };
    let thread = std::thread::spawn(copy_with_blocked_signals);
    assert!(!thread.join().expect("no panic"));
}

#[test]
fn regular_check_has_an_interval() {
    enable();
    let unblocks_at = |now| {
        block_all_signals();
        keep_regularly(now);
        !blocks_faults()
    };
    let check = move || {
        assert!(unblocks_at(7));
        assert!(!unblocks_at(6 + KEEP_INTERVAL_NS));
        assert!(unblocks_at(7 + KEEP_INTERVAL_NS));
        assert!(!unblocks_at(8 + KEEP_INTERVAL_NS));
    };
    std::thread::spawn(check).join().expect("thread");
}

fn block_all_signals() {
    let mut all = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: the set is local.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), null_mut());
    }
}

/// Returns `true` if this thread blocks SIGSEGV.
fn blocks_faults() -> bool {
    let mut mask = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: the set is local, and the call fills it.
    unsafe {
        libc::pthread_sigmask(libc::SIG_BLOCK, null(), mask.as_mut_ptr());
        libc::sigismember(mask.as_ptr(), libc::SIGSEGV) == 1
    }
}

/// Prints the figures for the documentation of the module. It checks nothing.
#[test]
#[ignore = "prints a measurement"]
fn copy_cost() {
    unsafe extern "C" fn platform(to: *mut u8, from: *const u8, len: usize) -> u32 {
        // SAFETY: guaranteed by the caller.
        unsafe { std::ptr::copy_nonoverlapping(from, to, std::hint::black_box(len)) };
        1
    }
    let mut all = copies();
    all.insert(0, ("memcpy", platform));
    let (source, mut own) = (vec![1u8; 1 << 20], vec![0u8; 1 << 20]);
    for len in [
        1, 8, 20, 64, 100, 128, 256, 512, 1448, 2048, 4096, 16_384, 65_536, 262_144,
    ] {
        let rounds = (200_000_000 / (len + 400)).max(200);
        let mut best = vec![f64::MAX; all.len()];
        for _ in 0..7 {
            for ((_, copy), best) in all.iter().zip(&mut best) {
                let start = Instant::now();
                for i in 0..rounds {
                    // SAFETY: both buffers are long enough.
                    unsafe {
                        copy(
                            own.as_mut_ptr().add(i & 63),
                            source.as_ptr().add(i & 31),
                            len,
                        )
                    };
                }
                *best = best.min(start.elapsed().as_nanos() as f64 / rounds as f64);
            }
        }
        print!("{len:7}");
        for ((name, _), ns) in all.iter().zip(&best) {
            print!("  {name} {ns:8.1} ({:.2})", ns / best[0]);
        }
        println!();
    }
}
