//! Concurrent fast registrations, invalidations and accesses: no access sees a mix of two
//! registrations or continues after an invalidation has completed, and no thread sees a partly
//! written word.
#![allow(unsafe_code)]

use super::{Accessor, HostRange, MemoryTable};
use crate::{Access, FastRegister};
use iwarp_proto::ddp::Stag;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::vec::Vec;
use std::{thread, vec};

const ACCESSOR: Accessor = Accessor { pd: 1, qp: 1 };
const REGISTRATIONS: u64 = 5;
const ALL: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE);
/// Bytes between the ranges of two registrations.
const STRIDE: u64 = 4096;

/// Returns one of the registrations. An access that saw a mix of two would be refused, or would
/// cover other bytes.
fn registration(stag: Stag, i: u64) -> FastRegister {
    let rights = [
        Access::LOCAL_WRITE,
        Access::LOCAL_WRITE | Access::REMOTE_WRITE,
    ];
    FastRegister {
        new_stag: stag.with_key(i as u8),
        offset: i * STRIDE,
        len: 64 + i * 8,
        iova: (1 << 40) * (i + 1),
        access: rights[i as usize % 2],
        pages: None,
    }
}

/// Stops the readers, even if the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What the readers and the owner share.
struct Shared {
    table: MemoryTable,
    stag: Stag,
    /// Address of the registered bytes.
    base: u64,
    stop: AtomicBool,
    /// Accesses that succeeded.
    seen: AtomicU64,
}

impl Shared {
    /// Checks accesses to the `i`-th registration, which may be valid or not.
    fn read(&self, i: u64) {
        let table = &self.table;
        let wr = registration(self.stag, i);
        let (key, len) = (wr.new_stag, wr.len as u32);
        // Accesses beyond the registration are always refused.
        for (to, len) in [(wr.iova, len + 1), (wr.iova - 1, len), (wr.iova + 1, len)] {
            let beyond = table.check(key, to, len, Access::empty(), ACCESSOR);
            assert!(beyond.is_err());
        }
        let write = Access::REMOTE_WRITE;
        if !wr.access.contains(write) {
            assert!(table.check(key, wr.iova, len, write, ACCESSOR).is_err());
        }
        if let Some(info) = table.info(self.stag).filter(|info| info.valid) {
            let now = registration(self.stag, u64::from(info.stag.key()));
            assert_eq!(
                (info.iova, info.len, info.access),
                (now.iova, now.len, now.access)
            );
        }
        let Ok(held) = table.check(key, wr.iova, len, Access::empty(), ACCESSOR) else {
            return;
        };
        let at: Vec<_> = held.span().fragments().collect();
        assert_eq!(at[0].as_ptr().addr() as u64, self.base + wr.offset);
        // While the access lasts, the owner does not write to the memory.
        let mut copy = [1u8; 128];
        for _ in 0..3 {
            assert!(held.span().read(&mut copy[..len as usize]));
            assert!(copy[..len as usize].iter().all(|octet| *octet == 0));
        }
        self.seen.fetch_add(1, Ordering::Relaxed);
    }

    /// Registers and invalidates the `i`-th registration, and then writes to its memory.
    fn replace(&self, i: u64, yields: bool) {
        let wr = registration(self.stag, i);
        self.table.fast_register(&wr, ACCESSOR.pd).unwrap();
        if yields {
            thread::yield_now();
        }
        let complete = self.table.invalidate(wr.new_stag, ACCESSOR, false).unwrap();
        if !complete {
            while !self.table.is_unused(wr.new_stag) {
                thread::yield_now();
            }
        }
        let at: *mut u8 = core::ptr::with_exposed_provenance_mut((self.base + wr.offset) as usize);
        for fill in [0xee, 0] {
            // SAFETY: nobody else uses the memory now, and no reference to it exists.
            unsafe { core::ptr::write_bytes(at, fill, wr.len as usize) };
        }
    }
}

#[test]
fn accesses_are_ordered_with_registrations() {
    let octets = vec![0u64; (REGISTRATIONS * STRIDE / 8) as usize];
    let base = octets.as_ptr().expose_provenance() as u64;
    // SAFETY: `octets` outlives the threads, and is only accessed through raw pointers meanwhile.
    let range = unsafe { HostRange::new(base, REGISTRATIONS * STRIDE) }.unwrap();
    let mut table = MemoryTable::new();
    let stag = table
        .allocate_fast(range, ACCESSOR.pd, 0x1234_5600)
        .unwrap();
    let shared = &Shared {
        table,
        stag,
        base,
        stop: AtomicBool::new(false),
        seen: AtomicU64::new(0),
    };
    thread::scope(|scope| {
        let readers = [0, 1].map(|reader| {
            scope.spawn(move || {
                let mut i = reader;
                while !shared.stop.load(Ordering::Relaxed) {
                    i = (i + 1) % REGISTRATIONS;
                    shared.read(i);
                }
            })
        });
        let _stop = Stop(&shared.stop);
        let mut rounds = 0u64;
        while rounds < 3_000 || (shared.seen.load(Ordering::Relaxed) < 2_000 && rounds < 3_000_000)
        {
            rounds += 1;
            if readers.iter().any(|reader| reader.is_finished()) {
                // A reader has failed, and has printed why.
                break;
            }
            shared.replace(rounds % REGISTRATIONS, rounds.is_multiple_of(3));
        }
    });
    assert!(shared.seen.load(Ordering::Relaxed) > 0);
}

/// Eight aligned octets may be an Atomic Write, so their store must be atomic.
#[test]
fn eight_aligned_octets_are_atomic() {
    let mut octets = [0u64; 4];
    let base = octets.as_mut_ptr().expose_provenance() as u64;
    // SAFETY: `octets` outlives the threads, and is only accessed through raw pointers meanwhile.
    let range = unsafe { HostRange::new(base, 32) }.unwrap();
    let mut table = MemoryTable::new();
    let stag = table
        .register(range, base, ACCESSOR.pd, ALL, 0x1234_5600)
        .unwrap();
    let table = &table;
    let stop = &AtomicBool::new(false);
    let place = |at: u64, octet: u8| {
        let octets = [octet; 8];
        let range = (stag, base + at);
        table
            .write(range, Access::REMOTE_WRITE, ACCESSOR, &octets)
            .unwrap();
    };
    thread::scope(|scope| {
        let reader = scope.spawn(move || {
            let at: *mut u64 = core::ptr::with_exposed_provenance_mut((base + 8) as usize);
            // SAFETY: the word is registered memory, and all threads access it by atomic
            // instructions.
            let word = unsafe { AtomicU64::from_ptr(at) };
            let mut seen = 0u64;
            let mut last = 0;
            while !stop.load(Ordering::Relaxed) || seen < 100 {
                let now = word.load(Ordering::Acquire);
                assert_eq!(now, u64::from_ne_bytes([now as u8; 8]), "a torn word");
                seen += u64::from(now != last);
                last = now;
            }
        });
        let _stop = Stop(stop);
        let mut rounds = 0u64;
        while rounds < 50_000 && !reader.is_finished() {
            rounds += 1;
            place(8, rounds as u8);
        }
        // Continue until the reader has seen enough changes.
        stop.store(true, Ordering::Relaxed);
        while !reader.is_finished() {
            rounds += 1;
            place(8, rounds as u8);
        }
    });
    place(1, 0x77);
    let mut copy = [0; 32];
    let span = table
        .check(stag, base, 32, Access::empty(), ACCESSOR)
        .unwrap();
    assert!(span.span().read(&mut copy));
    assert_eq!(copy[1..9], [0x77; 8]);
}
