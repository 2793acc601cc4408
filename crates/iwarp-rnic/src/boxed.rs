//! A value in memory of its own, by an allocation that can fail.
//!
//! `Box::new` ends the program if there is no memory, and makes the value on the stack first, where a kernel has little room.
//!
//! Invariant: memory from the allocator has the layout of the value that is written to it.
#![allow(unsafe_code)]

use crate::AllocError;
use alloc::alloc::{Layout, alloc};
use alloc::boxed::Box;

/// Allocates memory for a value, and then makes the value. If there is no memory, `make` is dropped with all that it has.
#[inline]
pub(crate) fn try_box<T>(make: impl FnOnce() -> T) -> Result<Box<T>, AllocError> {
    const { assert!(size_of::<T>() > 0, "the allocator takes no empty layouts") };
    // SAFETY: the layout is not empty.
    let at = unsafe { alloc(Layout::new::<T>()) }.cast::<T>();
    if at.is_null() {
        return Err(AllocError);
    }
    // SAFETY: fresh memory with the layout of `T`, from the allocator that boxes use.
    unsafe {
        at.write(make());
        Ok(Box::from_raw(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::MAX_QP_WR;
    use crate::qp::{CreateError, QpConfig, QueuePair, State};
    use std::rc::Rc;

    #[test]
    fn a_box_owns_its_value() {
        let shared = Rc::new(5);
        let one = try_box(|| (Rc::clone(&shared), [7u64; 100])).unwrap();
        assert_eq!((Rc::strong_count(&shared), one.1[99]), (2, 7));
        drop(one);
        assert_eq!(Rc::strong_count(&shared), 1);
    }

    #[test]
    fn a_queue_pair_is_made_in_its_box() {
        let config = QpConfig::default();
        let qp = QueuePair::boxed(config).unwrap();
        assert_eq!((qp.state(), *qp.config()), (State::Reset, config));
        let too_many = QpConfig {
            max_send_wr: MAX_QP_WR + 1,
            ..config
        };
        for made in [
            QueuePair::boxed(too_many).map(|_| ()),
            QueuePair::new(too_many).map(|_| ()),
        ] {
            assert_eq!(made, Err(CreateError::Invalid));
        }
    }
}
