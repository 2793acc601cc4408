//! Tests of the slots: what each end may do with them, and how many there are.

use super::super::testing::pair;
use super::*;

fn encoded(slot: u32, stag: u32) -> Vec<u8> {
    [slot.to_be_bytes(), stag.to_be_bytes()].concat()
}

#[test]
fn immediate_data_names_slot_and_length() {
    for (slot, len, starved, several, immediate) in [
        (0, 1, false, false, 0),
        (5, 4096, false, false, 0x0500_0fff),
        (63, SLOT_LEN_MAX, true, true, u32::MAX),
        (0, 256, true, false, 0x8000_00ff),
        (1, 256, false, true, 0x4100_00ff),
    ] {
        let announced = Announced {
            slot,
            len,
            starved,
            several,
        };
        assert_eq!(announced.encode(), immediate);
        assert_eq!(Announced::decode(immediate), announced);
    }
}

#[test]
fn last_returned_slot_is_used_first() {
    let mut slots = PeerSlots {
        len: 100,
        ..PeerSlots::default()
    };
    let taken = |slots: &mut PeerSlots| slots.take().map(|g| (g.slot, g.stag, g.starved));
    assert!(slots.want() && !slots.want());
    assert_eq!(taken(&mut slots), None);
    assert!(slots.add(&[encoded(0, 10), encoded(1, 11)].concat()));
    assert!(slots.are_lent() && slots.has_free());
    // Before the first slot was lent, the sender was not starved.
    assert_eq!(taken(&mut slots), Some((1, 11, false)));
    assert_eq!(taken(&mut slots), Some((0, 10, false)));
    assert_eq!(taken(&mut slots), None);
    for (slot, len) in [(1, 70), (0, 30)] {
        slots.set_len(slot, len);
    }
    assert_eq!(slots.in_flight(), 100);
    assert!(slots.add(&encoded(1, 21)));
    assert_eq!(slots.in_flight(), 30);
    assert_eq!(taken(&mut slots), Some((1, 21, true)));
    assert!(slots.add(&encoded(0, 20)));
    let unused = slots.take().unwrap();
    assert!(!slots.has_free());
    slots.put_back(unused);
    assert_eq!(taken(&mut slots), Some((0, 20, false)));
}

#[test]
fn slot_is_lent_once() {
    let lent = || {
        let mut slots = PeerSlots {
            len: 100,
            ..PeerSlots::default()
        };
        assert!(slots.add(&encoded(2, 1)));
        slots
    };
    assert!(lent().add(&[]));
    assert!(lent().add(&encoded(SLOTS_MAX as u32 - 1, 1)));
    let refused = [
        encoded(2, 1),
        [encoded(3, 1), encoded(3, 2)].concat(),
        encoded(SLOTS_MAX as u32, 1),
        encoded(0x100, 1),
        encoded(1, 1)[..7].to_vec(),
    ];
    for slots in refused {
        assert!(!lent().add(&slots), "{slots:?}");
    }
    // A peer that has offered no slots lends none.
    assert!(!PeerSlots::default().add(&encoded(0, 1)));
}

#[test]
fn slots_double_while_program_waits() {
    let (a, _b) = pair();
    let mut slots = OwnSlots::new(true);
    let grow = |slots: &mut OwnSlots, waits| {
        slots.want(waits);
        let missing = slots.missing();
        let added = allocate(a.inner.pd(), a.inner.qp().num(), missing).unwrap();
        slots.add(added);
        missing
    };
    assert_eq!(slots.missing(), 0);
    // While a thread allocates slots, no other one does.
    slots.want(false);
    assert_eq!(slots.missing(), 4);
    slots.want(false);
    assert_eq!(slots.missing(), 0);
    slots.add(Vec::new());
    assert_eq!(grow(&mut slots, false), 4);
    assert_eq!(grow(&mut slots, false), 0, "the program does not wait");
    assert_eq!(grow(&mut slots, true), 4);
    assert_eq!(grow(&mut slots, true), 0, "there are enough");
    assert!(slots.are_due(false));
}

/// A slot is written once, and lent again when a quarter of all is due or the program waits.
#[test]
fn finished_slots_are_lent_again() {
    let (a, _b) = pair();
    let mut slots = OwnSlots::new(true);
    slots.add(allocate(a.inner.pd(), a.inner.qp().num(), SLOTS_MAX).unwrap());
    let mut out = [0; ENCODED_SLOT * SLOTS_MAX];
    assert!(slots.written(0).is_none(), "it is not lent yet");
    assert_eq!(slots.take_owed().lend(&mut out).unwrap(), out.len());
    let numbers: Vec<_> = out.chunks(ENCODED_SLOT).map(|slot| slot[3]).collect();
    assert_eq!(numbers, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert!(!slots.are_due(true));
    let memory = slots.written(7).unwrap();
    assert!(slots.written(7).is_none(), "it was written already");
    assert!(slots.written(8).is_none());
    let bytes = memory.take_back(10).unwrap();
    slots.finished(7);
    assert_eq!((slots.are_due(false), slots.are_due(true)), (false, true));
    slots.finished(6);
    assert!(slots.are_due(false));
    let refused = slots.take_owed().lend(&mut out);
    assert!(refused.is_err(), "it has a reader");
    drop(bytes);
}
