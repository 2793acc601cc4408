//! Pairs of connections, and futures that are cancelled.

use iwarp::{Access, Connection, Options};
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// Time limit of waits. A wait that takes longer has lost its wake-up.
pub(crate) const LIMIT: Duration = Duration::from_secs(if cfg!(miri) { 3600 } else { 60 });
/// All rights that can be granted to peers.
pub(crate) const ALL: Access = Access::REMOTE_READ
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_ATOMIC);

/// Connects two ends in this process. Returns the connecting end and the accepting end.
pub(crate) fn pair_with(options: &Options) -> (Connection, Connection) {
    let listener = options.clone().listen("127.0.0.1:0").bind().unwrap();
    let to = listener.local_addr();
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| listener.accept().wait().unwrap());
        let connected = options.clone().connect(to).wait().unwrap();
        (connected, accepted.join().unwrap())
    })
}

pub(crate) fn pair() -> (Connection, Connection) {
    pair_with(&Options::new())
}

/// Polls a future up to `polls` times, then drops it. Returns its result if it was ready.
pub(crate) fn poll_and_drop<F: Future>(future: F, polls: usize) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..polls {
        if let Poll::Ready(done) = future.as_mut().poll(&mut context) {
            return Some(done);
        }
    }
    None
}
