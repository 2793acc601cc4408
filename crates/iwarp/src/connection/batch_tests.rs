//! Tests of the limits of a batch, and of the memory that it keeps in use.

use super::*;
use crate::connection::Options;
use crate::connection::testing::{done, pair, pair_with, until};

/// A refused request leaves the batch as it was.
#[test]
fn batch_has_limits() {
    let (a, b) = pair_with(&Options::new().send_depth(3).max_inline(16));
    let there = b.share::<u8>(64, Access::REMOTE_READ).unwrap().remote();
    let (short, long) = (
        a.allocate::<u8>(63).unwrap(),
        a.allocate::<u8>(1 << 32).unwrap(),
    );
    let mut batch = a.batch();
    batch.send(&[1; 16]).unwrap();
    assert!(matches!(
        batch.send(&[1; 17]),
        Err(Error::Refused(Refusal::TooLongToCopy {
            octets: 17,
            most: 16
        }))
    ));
    assert!(matches!(
        batch.send(&long),
        Err(Error::Refused(Refusal::Post(PostError::MessageTooLong)))
    ));
    assert!(matches!(
        batch.read_into(&short, &there),
        Err(Error::Refused(Refusal::TooLong {
            octets: 64,
            room: 63
        }))
    ));
    assert_eq!(batch.len(), 1);
    let room = a.inner.send_depth as usize;
    for _ in 1..room {
        batch.send(&short).unwrap();
    }
    assert!(matches!(
        batch.send(&short),
        Err(Error::Refused(Refusal::BatchTooLong { requests, room: max }))
            if (requests, max) == (room + 1, room)
    ));
    assert_eq!(batch.len(), room);
}

/// Memory that a batch reads into cannot be viewed, whatever else the batch does with it, until
/// the batch completes.
#[test]
fn batch_keeps_its_memory() {
    let (a, b) = pair();
    let there = b
        .share::<u8>(64, Access::REMOTE_READ | Access::REMOTE_WRITE)
        .unwrap();
    let there = there.remote();
    let regions = [(); 2].map(|()| a.allocate::<u8>(64).unwrap());
    let can_view = || regions.each_ref().map(|region| region.view().is_ok());
    let mut batch = a.batch();
    let enter = |batch: &mut Batch| {
        batch.write(&regions[0], &there).unwrap();
        for region in &regions {
            batch.read_into(region, &there).unwrap();
        }
        batch.write(&regions[1], &there).unwrap();
        assert_eq!(can_view(), [false; 2]);
    };
    enter(&mut batch);
    batch.clear();
    assert_eq!(can_view(), [true; 2]);
    enter(&mut batch);
    // No thread reads the answers.
    let mut baton = None;
    until("the baton is free", &[], || {
        baton = a.inner.qp().inner.rx.try_take();
        baton.is_some()
    });
    let mut submit = batch.submit();
    assert!(submit.poll_now().is_pending());
    assert_eq!(can_view(), [false; 2]);
    drop(submit);
    assert_eq!((batch.len(), can_view()), (0, [false; 2]));
    drop(baton);
    // The abandoned requests complete before those of the next batch.
    enter(&mut batch);
    done(&mut batch.submit(), &[&a]);
    assert_eq!(can_view(), [true; 2]);
}
