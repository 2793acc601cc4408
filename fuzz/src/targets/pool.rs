//! Large buffers that are reused for the next input, because creating them would take longer than
//! most inputs.

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

/// An empty buffer and an empty plan, which are returned on drop.
#[derive(Debug)]
pub(super) struct Lent(Option<Buffers>);

/// Takes a pair, or creates one.
pub(super) fn take() -> Lent {
    let found = POOL.with_borrow_mut(Vec::pop);
    Lent(Some(found.unwrap_or_else(|| Buffers {
        rx: RxBuffer::new().expect("memory"),
        tx: TxPlan::new().expect("memory"),
    })))
}

impl Lent {
    /// Returns both, as separate borrows.
    pub(super) fn both(&mut self) -> (&mut RxBuffer, &mut TxPlan) {
        let buffers = self.0.as_mut().expect("there until it is dropped");
        (&mut buffers.rx, &mut buffers.tx)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // After a panic they may be in any state.
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
