//! Reuses large buffers for the next input, because allocating them takes longer than most inputs.

use std::cell::RefCell;

use iwarp_rnic::qp::{RxBuffer, TxPlan};

thread_local! {
    static POOL: RefCell<Vec<Buffers>> = const { RefCell::new(Vec::new()) };
}

/// The buffers of a queue pair's driver.
#[derive(Debug)]
struct Buffers {
    rx: Box<RxBuffer>,
    tx: Box<TxPlan>,
}

/// An empty buffer and an empty plan. Dropping the value returns them to the pool.
#[derive(Debug)]
pub(super) struct PooledBuffers(Option<Buffers>);

/// Takes buffers from the pool, or allocates new ones.
pub(super) fn acquire() -> PooledBuffers {
    let found = POOL.with_borrow_mut(Vec::pop);
    PooledBuffers(Some(found.unwrap_or_else(|| Buffers {
        rx: RxBuffer::new().expect("memory"),
        tx: TxPlan::new().expect("memory"),
    })))
}

impl PooledBuffers {
    /// Returns separate borrows of the buffer and the plan.
    pub(super) fn both(&mut self) -> (&mut RxBuffer, &mut TxPlan) {
        let buffers = self
            .0
            .as_mut()
            .expect("the buffers are present until the drop");
        (&mut buffers.rx, &mut buffers.tx)
    }
}

impl Drop for PooledBuffers {
    fn drop(&mut self) {
        // After a panic, the buffers may be in any state, so do not reuse them.
        if std::thread::panicking() {
            return;
        }
        if let Some(mut buffers) = self.0.take() {
            buffers.rx.clear();
            buffers.tx.clear();
            POOL.with_borrow_mut(|pool| pool.push(buffers));
        }
    }
}
