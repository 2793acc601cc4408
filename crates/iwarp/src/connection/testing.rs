//! Fixtures for unit tests of connections.

use super::{Channel, Connection, Options};
use crate::connection::wait::Wait;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Poll, Wake, Waker};
use std::time::{Duration, Instant};

pub(super) const LIMIT: Duration = Duration::from_secs(60);

/// Connects two ends within this process. Returns the connecting and the accepting one.
pub(super) fn pair_with(options: &Options) -> (Connection, Connection) {
    let listener = options.clone().listen("127.0.0.1:0").bind().unwrap();
    let to = listener.local_addr();
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| listener.accept().wait().unwrap());
        let connected = options.clone().connect(to).wait().unwrap();
        (connected, accepted.join().unwrap())
    })
}

pub(super) fn pair() -> (Connection, Connection) {
    pair_with(&Options::new())
}

/// Polls until `look` returns `true`. This thread routes the completions of `ends`: nothing sleeps,
/// so no other thread does.
pub(super) fn until(what: &str, ends: &[&Connection], mut look: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !look() {
        assert!(Instant::now() < end, "{what} does not happen");
        ends.iter().for_each(|end| end.inner.router.drive());
    }
}

pub(super) fn done<W: Wait>(what: &mut W, ends: &[&Connection]) -> W::Output {
    let mut result = None;
    until("what is waited for", ends, || {
        if let Poll::Ready(done) = what.poll_now() {
            result = Some(done.unwrap());
        }
        result.is_some()
    });
    result.unwrap()
}

pub(super) fn channels(options: &Options) -> (Channel, Channel) {
    let (a, b) = pair_with(options);
    let ends = [&a, &b];
    let (mut first, mut second) = (Channel::open(a.clone()), Channel::open(b.clone()));
    // The connecting end sends the first hello.
    assert!(first.poll_now().is_pending());
    let second = done(&mut second, &ends);
    (done(&mut first, &ends), second)
}

#[derive(Default)]
pub(super) struct Calls(AtomicUsize);

impl Calls {
    pub(super) fn new() -> (Arc<Self>, Waker) {
        let calls = Arc::new(Self::default());
        (Arc::clone(&calls), Waker::from(calls))
    }

    pub(super) fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

impl Wake for Calls {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}
