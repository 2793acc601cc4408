//! Boxes and zeroed vectors whose allocation can fail.
//!
//! `Box::new` aborts if memory runs out, and builds the value on the stack first, where a kernel
//! has little room. `vec![0; n]` aborts as well. Zeroed pages from the operating system use no real
//! memory until they are touched.
//!
//! Invariant: memory from the allocator has the layout of what is written to it.
#![allow(unsafe_code)]

use crate::AllocError;
use alloc::alloc::{Layout, alloc, alloc_zeroed};
use alloc::boxed::Box;
use alloc::vec::Vec;

/// Allocates memory for a value, then builds the value in place. If the allocation fails, `make` is
/// dropped without being called.
#[inline]
pub(crate) fn try_box<T>(make: impl FnOnce() -> T) -> Result<Box<T>, AllocError> {
    const { assert!(size_of::<T>() > 0, "the allocator takes no empty layouts") };
    // SAFETY: the layout is not empty (asserted above).
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

pub(crate) fn zeros(n: usize) -> Result<Vec<u8>, AllocError> {
    if n == 0 {
        return Ok(Vec::new());
    }
    let layout = Layout::array::<u8>(n).map_err(|_| AllocError)?;
    // SAFETY: the layout is not empty, because `n` is not 0.
    let at = unsafe { alloc_zeroed(layout) };
    if at.is_null() {
        return Err(AllocError);
    }
    // SAFETY: `n` initialized bytes in memory of this layout, from the allocator that vectors use.
    Ok(unsafe { Vec::from_raw_parts(at, n, n) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::MAX_QP_WR;
    use crate::qp::{CreateError, QpConfig, QueuePair, State};
    use std::rc::Rc;

    #[test]
    fn box_owns_its_value() {
        let shared = Rc::new(5);
        let one = try_box(|| (Rc::clone(&shared), [7u64; 100])).unwrap();
        assert_eq!((Rc::strong_count(&shared), one.1[99]), (2, 7));
        drop(one);
        assert_eq!(Rc::strong_count(&shared), 1);
    }

    #[test]
    fn zeros_are_zero_and_writable() {
        for n in [0, 1, if cfg!(miri) { 3_000 } else { 300_000 }] {
            let mut octets = zeros(n).unwrap();
            assert_eq!((octets.len(), octets.iter().any(|o| *o != 0)), (n, false));
            octets.fill(1);
        }
        assert_eq!(zeros(usize::MAX), Err(AllocError));
    }

    #[test]
    fn queue_pair_is_boxed() {
        let config = QpConfig::default();
        let qp = QueuePair::boxed(config).unwrap();
        assert_eq!((qp.state(), *qp.config()), (State::Reset, config));
        let too_many = QpConfig {
            max_send_wr: MAX_QP_WR + 1,
            ..config
        };
        for result in [
            QueuePair::boxed(too_many).map(|_| ()),
            QueuePair::new(too_many).map(|_| ()),
        ] {
            assert_eq!(result, Err(CreateError::Invalid));
        }
    }
}
