//! On-demand regions. Their addresses are not mapped, and the pager keeps the contents in a table,
//! so a direct access to the memory crashes the test.
#![allow(unsafe_code)]

use super::harness::*;
use crate::memory::{AccessError, Accessor, HostRange, MemoryError, Pager, WindowType};
use crate::{Access, Bind, SendOp, Sge, WcStatus};
use iwarp_proto::ddp::Stag;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::vec;
use std::vec::Vec;

std::thread_local! {
    /// The memory of a test, which has one thread.
    static OCTETS: RefCell<BTreeMap<u64, u8>> = const { RefCell::new(BTreeMap::new()) };
}

/// The region's first address. It is aligned, and nothing is mapped there.
const START: u64 = 0x1000;
/// The region's length.
const LEN: u64 = 1 << 40;

fn read(from: u64, to: &mut [u8]) -> bool {
    OCTETS.with_borrow(|octets| {
        (from..).zip(to).all(|(at, to)| match octets.get(&at) {
            Some(octet) => {
                *to = *octet;
                true
            }
            None => false,
        })
    })
}

fn write(to: u64, from: &[u8]) -> bool {
    OCTETS.with_borrow_mut(|octets| {
        (to..)
            .zip(from)
            .all(|(at, from)| match octets.get_mut(&at) {
                Some(octet) => {
                    *octet = *from;
                    true
                }
                None => false,
            })
    })
}

fn exchange(at: u64, old: u64, new: u64) -> Option<u64> {
    let mut octets = [0; 8];
    let found = read(at, &mut octets).then(|| u64::from_ne_bytes(octets))?;
    if found == old {
        write(at, &new.to_ne_bytes());
    }
    Some(found)
}

// SAFETY: the functions access the table only.
static PAGER: Pager = unsafe { Pager::new(read, write, exchange) };

/// Maps `len` bytes at an address, with values 0, 1, 2 ….
fn map(from: u64, len: u64) {
    OCTETS.with_borrow_mut(|octets| octets.extend((0..len).map(|i| (from + i, i as u8))));
}

fn content(from: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    assert!(read(from, &mut out));
    out
}

fn region(rig: &mut Rig, access: Access) -> Stag {
    region_with(rig, &PAGER, access)
}

fn region_with(rig: &mut Rig, pager: &'static Pager, access: Access) -> Stag {
    // SAFETY: the memory is accessed by the pager only.
    let range = unsafe { HostRange::new(START, LEN) }.unwrap();
    let random = rig.random();
    rig.table
        .register_on_demand((range, pager), START, PD, access, random)
        .unwrap()
}

#[test]
fn pager_copies_and_reports_missing_pages() {
    let mut rig = Rig::new();
    let stag = region(&mut rig, ALL);
    map(START + 64, 64);
    let accessor = rig.qp.accessor();
    let mut out = [0; 16];
    let range = |off: u64| (stag, START + off, 16);
    let at = |off: u64| (stag, START + off);
    let need = Access::REMOTE_WRITE;
    assert_eq!(rig.table.read(range(70), need, accessor, &mut out), Ok(()));
    assert_eq!(out, core::array::from_fn(|i| 6 + i as u8));
    assert_eq!(rig.table.write(at(64), need, accessor, &[9; 16]), Ok(()));
    assert_eq!(content(START + 64, 17), [&[9; 16][..], &[16]].concat());
    let missing = Err(AccessError::NotMapped);
    for off in [0, 60, 120, 1 << 30] {
        assert_eq!(
            rig.table.read(range(off), need, accessor, &mut out),
            missing
        );
        assert_eq!(rig.table.write(at(off), need, accessor, &out), missing);
        // Missing pages are detected by the access only.
        assert_eq!(rig.table.permits(range(off), need, accessor), Ok(()));
    }
    // On-demand memory is never borrowed, even if it is mapped.
    let held = rig.table.check(stag, START + 64, 8, need, accessor);
    assert_eq!(held.unwrap_err(), AccessError::NotMapped);
    let seen = rig
        .table
        .access(range(64), need, accessor, |span| span.len());
    assert_eq!(seen, missing.map(|()| 0));
    // Bounds and domains are checked first.
    let beyond_end = rig
        .table
        .permits((stag, START + LEN - 8, 9), need, accessor);
    assert_eq!(beyond_end, Err(AccessError::BaseOrBounds));
    let other = Accessor {
        pd: PD + 1,
        ..accessor
    };
    let foreign = rig.table.permits(range(64), need, other);
    assert_eq!(foreign, Err(AccessError::NotAssociated));
}

#[test]
fn on_demand_region_forces_copies() {
    for copied in [false, true] {
        let mut stream = STREAM;
        (stream.crc, stream.emss) = (false, 60_000);
        let mut rig = Rig::with(Default::default(), stream);
        let key = copied.then(|| region(&mut rig, ALL));
        assert_eq!(rig.table.has_on_demand(), copied);
        let mr = rig.mr(60_000, ALL);
        let (remote_addr, rkey) = (0, 5);
        rig.post(1, SendOp::Write { remote_addr, rkey }, &[mr.sge()]);
        assert_eq!(rig.fill(), crate::qp::TxFill::Ready);
        // The octets are those at the time of the copy.
        rig.write(&mr, 40_000, 0xff);
        let sent = rig.sent();
        let all: Vec<u8> = sent.into_iter().flat_map(|(_, payload)| payload).collect();
        let wanted = if copied { 40_000u32 as u8 } else { 0xff };
        assert_eq!((all.len(), all[40_000]), (60_000, wanted));
        if let Some(key) = key {
            assert!(rig.table.deregister(key).is_ok());
            assert!(!rig.table.has_on_demand());
        }
    }
}

/// The memory of the end of a message is missing. The message fails at that point, no segment is
/// sent twice, and an earlier request is not affected.
#[test]
fn missing_page_fails_message() {
    for (mapped, segments) in [(0, 0), (5_000, 3)] {
        for alone in [false, true] {
            let mut rig = Rig::new();
            let stag = region(&mut rig, ALL);
            map(START, mapped);
            let sge = Sge {
                addr: START,
                len: 10_000,
                lkey: stag.0,
            };
            if !alone {
                rig.post(1, SendOp::Send, &[]);
            }
            rig.post(2, SendOp::Send, &[sge]);
            let sent = rig.sent();
            let sends = sent.iter().filter(|(h, _)| h.opcode().is_send());
            let payload: Vec<u8> = sends.clone().flat_map(|(_, p)| p.clone()).collect();
            let in_order = (0..payload.len()).map(|i| i as u8);
            assert!(payload.iter().copied().eq(in_order), "{mapped}");
            assert_eq!(sends.count(), segments + usize::from(!alone), "{mapped}");
            let before = (!alone).then_some((1, WcStatus::Success));
            let statuses = before.into_iter().chain([(2, WcStatus::LocalProtection)]);
            assert!(brief(&rig.host.sends).into_iter().eq(statuses), "{mapped}");
        }
    }
}

#[test]
fn window_on_demand_checks_bounds() {
    let mut rig = Rig::new();
    let stag = region(&mut rig, ALL);
    map(START + 64, 64);
    let random = rig.random();
    let mw = rig
        .table
        .allocate_window(WindowType::Type2, PD, random)
        .unwrap();
    let bind = Bind {
        mw_stag: mw,
        new_stag: mw,
        mr_stag: stag,
        addr: START + 64,
        len: 128,
        access: Access::REMOTE_READ | Access::REMOTE_WRITE,
    };
    let accessor = rig.qp.accessor();
    assert_eq!(rig.table.bind(&bind, accessor), Ok(()));
    assert_eq!(rig.table.deregister(stag).unwrap_err(), MemoryError::Busy);
    assert!(rig.table.has_on_demand());
    let need = Access::REMOTE_WRITE;
    let write = |off| rig.table.write((mw, START + off), need, accessor, &[7; 8]);
    assert_eq!(write(64), Ok(()));
    assert_eq!(content(START + 64, 9), [7, 7, 7, 7, 7, 7, 7, 7, 8]);
    assert_eq!(write(128), Err(AccessError::NotMapped));
    assert_eq!(write(63), Err(AccessError::BaseOrBounds));
    assert_eq!(write(185), Err(AccessError::BaseOrBounds));
}

#[test]
fn table_counts_on_demand_regions() {
    let mut rig = Rig::new();
    let ordinary = [0; 2].map(|_| Stag(rig.mr(64, ALL).stag));
    let deregister = |rig: &mut Rig, stag| rig.table.deregister(stag).unwrap();
    assert!(!rig.table.has_on_demand());
    deregister(&mut rig, ordinary[0]);
    assert!(!rig.table.has_on_demand());
    let on_demand = [0; 2].map(|_| region(&mut rig, ALL));
    let is_on_demand = |rig: &Rig, stag| rig.table.info(stag).unwrap().on_demand;
    assert!(!is_on_demand(&rig, ordinary[1]));
    assert!(is_on_demand(&rig, on_demand[0]) && is_on_demand(&rig, on_demand[1]));
    for stag in [on_demand[0], ordinary[1]] {
        deregister(&mut rig, stag);
        assert!(rig.table.has_on_demand());
    }
    deregister(&mut rig, on_demand[1]);
    assert!(!rig.table.has_on_demand());
}

/// Another processor changes the word twice between the read and the exchange; no change is lost.
#[test]
fn word_update_survives_races() {
    std::thread_local! {
        static CHANGES: Cell<u32> = const { Cell::new(2) };
    }
    fn exchange_after_change(at: u64, old: u64, new: u64) -> Option<u64> {
        let left = CHANGES.get();
        if left > 0 {
            CHANGES.set(left - 1);
            let found = exchange(at, old, old + 100)?;
            assert_eq!(found, old);
        }
        exchange(at, old, new)
    }
    // SAFETY: the functions access the table only.
    static RACING: Pager = unsafe { Pager::new(read, write, exchange_after_change) };
    let mut rig = Rig::new();
    let stag = region_with(&mut rig, &RACING, ALL);
    map(START, 8);
    let accessor = rig.qp.accessor();
    let start = u64::from_ne_bytes([0, 1, 2, 3, 4, 5, 6, 7]);
    let old = rig
        .table
        .update_word((stag, START), accessor, |word| word + 1);
    assert_eq!((old, CHANGES.get()), (Ok(Some(start + 200)), 0));
    assert_eq!(content(START, 8), (start + 201).to_ne_bytes());
}

#[test]
fn word_update_needs_mapping_and_alignment() {
    let mut rig = Rig::new();
    let stag = region(&mut rig, ALL);
    map(START + 64, 64);
    let accessor = rig.qp.accessor();
    let old = u64::from_ne_bytes([0, 1, 2, 3, 4, 5, 6, 7]);
    let add = |off| {
        rig.table
            .update_word((stag, START + off), accessor, |word| word + 1)
    };
    assert_eq!(add(64), Ok(Some(old)));
    assert_eq!(add(64), Ok(Some(old + 1)));
    assert_eq!(add(65), Ok(None));
    assert_eq!(add(128), Err(AccessError::NotMapped));
    let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let changed = rig.table.reregister(stag, None, None, Some(rights));
    assert_eq!(changed.unwrap().0, stag);
    let add = rig
        .table
        .update_word((stag, START + 64), accessor, |word| word);
    assert_eq!(add, Err(AccessError::AccessDenied));
    // The region is still on-demand.
    assert!(rig.table.info(stag).unwrap().on_demand);
}
