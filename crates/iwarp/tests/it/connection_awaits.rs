//! Tests of misuse at every await of connections, channels and streams: futures that are dropped
//! after any number of polls, wakers that panic, handles that are forgotten or cloned, and forked
//! children.

use crate::common::alone;
use crate::common::calls::{ALL, LIMIT, pair, pair_with, poll_and_drop};
use iwarp::connection::Refusal;
use iwarp::{Channel, Connection, Error, Options, Stream};
use std::future::{Future, IntoFuture};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

/// Maximum number of polls after which the tests drop a future.
const MAX_POLLS: usize = 6;
/// Repetitions. Miri is slow, and notices an error the first time.
const ROUNDS: usize = if cfg!(miri) { 1 } else { 20 };

fn channels(options: &Options) -> (Channel, Channel) {
    let (a, b) = pair_with(options);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| Channel::open(b).wait_for(LIMIT).unwrap());
        (
            Channel::open(a).wait_for(LIMIT).unwrap(),
            other.join().unwrap(),
        )
    })
}

/// A waker that records that it was called.
struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Checks that a wake-up is passed on: if the first of two waiters is woken and dropped before it
/// polls, the second must be woken.
fn passes_on<F: Future + Unpin>(what: &str, make: impl Fn() -> F, cause: impl FnOnce()) {
    let mut waiting = [(); 2].map(|()| (make(), Arc::new(Flag(AtomicBool::new(false)))));
    let poll = |(future, flag): &mut (F, Arc<Flag>)| {
        Pin::new(future).poll(&mut Context::from_waker(&Waker::from(Arc::clone(flag))))
    };
    for one in &mut waiting {
        assert!(poll(one).is_pending(), "{what}");
    }
    cause();
    let is_woken = |one: &(F, Arc<Flag>)| one.1.0.load(Ordering::SeqCst);
    let end = Instant::now() + LIMIT;
    while !waiting.iter().any(is_woken) {
        assert!(Instant::now() < end, "{what}: no waiter was woken");
        std::thread::yield_now();
    }
    let [first, second] = waiting;
    let (woken, mut other) = if is_woken(&first) {
        (first, second)
    } else {
        (second, first)
    };
    drop(woken);
    loop {
        while !is_woken(&other) {
            assert!(
                Instant::now() < end,
                "{what}: the second waiter was not woken"
            );
            std::thread::yield_now();
        }
        other.1.0.store(false, Ordering::SeqCst);
        if poll(&mut other).is_ready() {
            return;
        }
    }
}

#[test]
fn dropped_waiter_passes_wakeup_on() {
    let (a, b) = pair();
    passes_on(
        "a message",
        || b.recv().into_future(),
        || a.send("x").wait().unwrap(),
    );
    let (a, b) = channels(&Options::new());
    passes_on(
        "a message of a channel",
        || b.recv().into_future(),
        || a.send("x").wait().unwrap(),
    );
    // Another call takes the message from the connection's inbox, and wakes a waiter of the
    // channel.
    let (a, b) = channels(&Options::new());
    let region = b.connection().share::<u64>(1, iwarp::Access::REMOTE_READ);
    let token = region.as_ref().unwrap().remote();
    passes_on(
        "a message that another call has taken",
        || b.recv().into_future(),
        || {
            a.send("x").wait().unwrap();
            // When a Read completes, all earlier messages have arrived.
            a.connection().read(&token).wait().unwrap();
            b.send("y").wait().unwrap();
        },
    );
    let (a, b) = channels(&Options::new().receives(6));
    // Both messages of the window are sent, and one is received and dropped.
    (0..2).for_each(|_| a.send("x").wait().unwrap());
    passes_on(
        "credit",
        || a.send("y").into_future(),
        || drop(b.recv().wait().unwrap()),
    );
}

/// A cancelled set-up does not affect the listener, and the other end is notified.
#[test]
fn setup_is_cancelled_at_every_await() {
    let listener = iwarp::listen("127.0.0.1:0").bind().unwrap();
    let to = listener.local_addr();
    std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            for polls in (0..MAX_POLLS).chain([usize::MAX]) {
                // The listener's own futures are cancelled, too.
                drop(poll_and_drop(listener.incoming(), polls.min(3)));
                drop(poll_and_drop(
                    listener.accept().into_future(),
                    polls.min(MAX_POLLS),
                ));
            }
            // Some of the cancelled connections are accepted, but send nothing.
            loop {
                let accepted = listener.accept().wait().unwrap();
                if accepted.recv().wait_for(LIMIT).is_ok() {
                    accepted.send("welcome").wait_for(LIMIT).unwrap();
                    break accepted;
                }
            }
        });
        for polls in 0..MAX_POLLS {
            drop(poll_and_drop(iwarp::connect(to).into_future(), polls));
        }
        // Connections that the server cancelled fail; the last one does not.
        let connected = loop {
            match iwarp::connect(to).wait() {
                Ok(connection) => {
                    let _ = connection.send("hello").wait_for(LIMIT);
                    match connection.recv().wait_for(LIMIT) {
                        Ok(_) => break connection,
                        Err(error) => assert!(!matches!(error, Error::TimedOut(_))),
                    }
                }
                Err(error) => assert!(!matches!(error, Error::TimedOut(_)), "no answer"),
            }
        };
        let accepted = server.join().unwrap();
        drop(connected);
        accepted.closed().wait_for(LIMIT).unwrap();
    });
}

/// Cancels every request of a connection after each number of polls: the connection remains usable,
/// and the regions become free.
#[test]
fn requests_are_cancelled_at_every_await() {
    for depth in if cfg!(miri) { vec![2] } else { vec![1, 2, 16] } {
        let (a, b) = pair_with(&Options::new().send_depth(depth).receives(16));
        let target = b.share::<u64>(8, ALL).unwrap();
        let (all, word) = (target.remote(), target.remote().at(7).unwrap());
        for polls in (0..MAX_POLLS).cycle().take(ROUNDS * MAX_POLLS) {
            let mut region = a.allocate::<u64>(8).unwrap();
            let _ = poll_and_drop(a.read(&all), polls);
            let _ = poll_and_drop(a.compare_swap(&word, 0, 0), polls);
            let _ = poll_and_drop(a.write(&region, &all).started(), polls);
            let _ = poll_and_drop(a.read_into(&region, &all).started(), polls);
            let _ = poll_and_drop(a.closed(), polls);
            if let Some(window) = poll_and_drop(a.bind(&region, ALL), polls) {
                let _ = poll_and_drop(a.invalidate(window.unwrap()), polls);
            }
            let _ = poll_and_drop(a.send_with_immediate("x", 7), polls);
            let _ = poll_and_drop(a.write_with_immediate(&[1_u64], &all, 8), polls);
            a.send("last").wait_for(LIMIT).unwrap();
            loop {
                let message = b.recv().wait_for(LIMIT).unwrap();
                if *message == *b"last" {
                    break;
                }
                assert!(matches!(message.immediate(), Some(7 | 8)));
            }
            a.get(&word).wait_for(LIMIT).unwrap();
            let begin = Instant::now();
            while region.get_mut().is_none() {
                assert!(begin.elapsed() < LIMIT, "{polls} polls, depth {depth}");
                std::thread::yield_now();
            }
        }
    }
}

/// Cancels operations of channels: messages arrive whole and in order, and no credit is lost.
#[test]
fn channels_are_cancelled_at_every_await() {
    let (a, b) = channels(&Options::new().receives(8).send_depth(8));
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let mut sent = Vec::new();
            for n in 0..12 + 30 * (ROUNDS as u32 - 1) {
                match poll_and_drop(a.send(&n.to_be_bytes()), n as usize % MAX_POLLS) {
                    Some(done) => {
                        done.unwrap();
                        sent.push(n);
                    }
                    None => {
                        // The cancelled message may have been sent. This message was sent.
                        a.send(&[0xff]).wait_for(LIMIT).unwrap();
                    }
                }
            }
            a.finish().wait_for(LIMIT).unwrap();
            sent
        });
        let mut got = Vec::new();
        for polls in (0..MAX_POLLS).cycle() {
            let message = match poll_and_drop(b.recv(), polls) {
                Some(message) => message.unwrap(),
                None => b.recv().wait_for(LIMIT).unwrap(),
            };
            let Some(message) = message else { break };
            if message.len() == 4 {
                got.push(u32::from_be_bytes(message[..].try_into().unwrap()));
            }
        }
        let sent = sender.join().unwrap();
        assert!(got.is_sorted(), "in order");
        assert!(sent.iter().all(|n| got.contains(n)), "a message is lost");
    });
    let (c, d) = pair();
    for polls in 0..MAX_POLLS {
        drop(poll_and_drop(Channel::open(c.clone()), polls));
    }
    drop((c, d));
}

struct Panics(AtomicU64);

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
        panic!("the waker of this test panics");
    }
}

/// Polls with a waker that panics, until the future waits for another thread.
fn poll_panicking<F: Future>(mut future: Pin<&mut F>, panics: &Arc<Panics>) -> Poll<F::Output> {
    let waker = Waker::from(Arc::clone(panics));
    for _ in 0..MAX_POLLS {
        let polled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            future.as_mut().poll(&mut Context::from_waker(&waker))
        }));
        // A future that asks to be polled again has called the waker itself.
        if let Ok(Poll::Ready(done)) = polled {
            return Poll::Ready(done);
        }
    }
    Poll::Pending
}

/// Polls the future until it is ready.
fn finish<T>(mut future: Pin<&mut impl Future<Output = Result<T, Error>>>) -> T {
    loop {
        if let Some(done) = poll_and_drop(future.as_mut(), 1) {
            return done.unwrap();
        }
        std::thread::yield_now();
    }
}

#[test]
fn panicking_waker_affects_no_waiters() {
    let panics = Arc::new(Panics(AtomicU64::new(0)));
    let (a, b) = pair_with(&Options::new().send_depth(1));
    let target = b.share::<u64>(1, ALL).unwrap();
    let word = target.remote();
    for n in 0..50 {
        let mut first = pin!(a.fetch_add(&word, 1));
        let mut second = pin!(a.fetch_add(&word, 1));
        // The first request waits for its answer, the second for room in the queue.
        let done = [
            poll_panicking(first.as_mut(), &panics).is_ready(),
            poll_panicking(second.as_mut(), &panics).is_ready(),
        ];
        std::thread::scope(|scope| {
            // This request waits for room after them.
            let third = scope.spawn(|| a.fetch_add(&word, 1).wait_for(LIMIT));
            if !done[0] {
                finish(first);
            }
            if !done[1] {
                finish(second);
            }
            third.join().unwrap().unwrap();
        });
        assert_eq!(target.load(0).unwrap(), 3 * n + 3);
    }
    let mut end = pin!(a.closed());
    assert!(poll_panicking(end.as_mut(), &panics).is_pending());
    std::thread::scope(|scope| {
        let other = scope.spawn(|| a.closed().wait_for(LIMIT));
        drop(b);
        other.join().unwrap().unwrap();
    });
    assert!(panics.0.load(Ordering::Relaxed) > 0);

    let (c, d) = channels(&Options::new().receives(6));
    for _ in 0..50 {
        let mut first = pin!(d.recv());
        assert!(poll_panicking(first.as_mut(), &panics).is_pending());
        std::thread::scope(|scope| {
            let second = scope.spawn(|| d.recv().wait_for(LIMIT));
            c.send("one").wait_for(LIMIT).unwrap();
            c.send("two").wait_for(LIMIT).unwrap();
            let two = second.join().unwrap().unwrap();
            assert!(finish(first).is_some() && two.is_some());
        });
    }
}

/// The memory of a forgotten request is never returned to the program, because nobody observes the
/// request's completion.
#[test]
fn forgotten_requests_keep_their_regions() {
    let (a, b) = pair_with(&Options::new().send_depth(8));
    let target = b.share::<u64>(1, ALL).unwrap();
    let there = target.remote();
    let mut region = a.allocate::<u64>(1).unwrap();
    let mut others = a.allocate::<u64>(1).unwrap();
    std::mem::forget(a.write(&region, &there).started());
    let mut batch = a.batch();
    batch.write(&others, &there).unwrap();
    let mut submit = batch.submit();
    assert!(poll_and_drop(&mut submit, 1).is_none_or(|done| done.is_ok()));
    std::mem::forget(submit);
    // The batch can be reused, because it does not hold anything of the request in flight.
    batch.clear();
    batch.send("next").unwrap();
    batch.submit().wait_for(LIMIT).unwrap();
    drop(batch);
    assert_eq!(*b.recv().wait_for(LIMIT).unwrap(), *b"next");
    assert!(region.get_mut().is_none());
    // If the batch has not completed, its list of regions is lost.
    let _ = others.get_mut();
    assert_eq!(region.clone().get_mut(), None, "there are two handles");
}

/// Clones share one connection: closing any of them closes it, and any may be dropped last.
#[test]
fn clones_share_everything() {
    for last in 0..4 {
        let (a, b) = pair();
        let mut clones: Vec<Connection> = (0..4).map(|_| a.clone()).collect();
        drop(a);
        std::thread::scope(|scope| {
            for clone in &clones {
                scope.spawn(|| {
                    clone.send("x").wait_for(LIMIT).unwrap();
                    clone.recv().wait_for(LIMIT).unwrap();
                });
                b.recv().wait_for(LIMIT).unwrap();
                b.send("y").wait_for(LIMIT).unwrap();
            }
        });
        let kept = clones.swap_remove(last);
        drop(clones);
        kept.send("still up").wait_for(LIMIT).unwrap();
        assert_eq!(*b.recv().wait_for(LIMIT).unwrap(), *b"still up");
        let other = kept.clone();
        kept.close().unwrap();
        assert!(matches!(
            other.send("x").wait_for(LIMIT),
            Err(Error::Closed)
        ));
        assert!(matches!(other.recv().wait_for(LIMIT), Err(Error::Closed)));
        b.closed().wait_for(LIMIT).unwrap();
    }
}

/// In a forked child, every call fails, and dropping handles has no effect.
#[test]
fn forked_child_is_refused_everywhere() {
    alone("forked_child_is_refused_everywhere", || {
        let (a, b) = pair();
        let region = a.allocate::<u64>(1).unwrap();
        let target = b.share::<u64>(1, ALL).unwrap();
        let word = target.remote();
        let window = a.bind(&region, ALL).wait_for(LIMIT).unwrap();
        let (c, d) = channels(&Options::new());
        let started = a.fetch_add(&word, 1).started();
        // The answer has arrived, but no call has taken it.
        let answered = a.get(&word).started();
        a.get(&word).wait_for(LIMIT).unwrap();
        let mut waiting = Box::pin(d.recv());
        assert!(poll_and_drop(waiting.as_mut(), 3).is_none());
        // SAFETY: the child takes none of the parent's locks, and ends with `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let forked =
                |result: Result<(), Error>| matches!(result, Err(Error::Refused(Refusal::Forked)));
            let good = [
                forked(a.write(&[1_u64], &word).wait()),
                forked(a.get(&word).wait().map(drop)),
                forked(a.read_into(&region, &word).wait()),
                forked(started.wait().map(drop)),
                forked(answered.wait().map(drop)),
                forked(c.send("x").wait()),
                forked(d.recv().wait().map(drop)),
            ];
            let good = good == [true; 7];
            drop((waiting, window, region));
            drop((a, b));
            // SAFETY: `_exit` is async-signal-safe.
            unsafe { libc::_exit(i32::from(!good)) };
        }
        let mut status = 0;
        // SAFETY: `status` is valid for writes, and `child` is our child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(
            libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
            "{status}"
        );
        assert_eq!(started.wait_for(LIMIT).unwrap(), 0);
        assert_eq!(answered.wait_for(LIMIT).unwrap(), 1);
        drop(waiting);
        c.send("the parent goes on").wait_for(LIMIT).unwrap();
        assert_eq!(
            *d.recv().wait_for(LIMIT).unwrap().unwrap(),
            *b"the parent goes on"
        );
        drop(window);
    });
}

/// Cancelled reads and writes of a stream lose no data.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_are_cancelled_at_every_await() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let (a, b) = channels(&Options::new().receives(6).message_size(64));
    let (mut from, mut to) = (Stream::from(a), Stream::from(b));
    let sender = tokio::spawn(async move {
        let octets: Vec<u8> = (0..20_000_u32).map(|n| (n % 251) as u8).collect();
        let mut at = 0;
        while at < octets.len() {
            // It is unknown how much a cancelled write has sent, so the test counts only completed
            // writes.
            match tokio::time::timeout(LIMIT, from.write(&octets[at..])).await {
                Ok(n) => at += n.unwrap(),
                Err(_) => panic!("a wake-up was lost"),
            }
        }
        from.shutdown().await.unwrap();
    });
    let mut got = Vec::new();
    for round in 0_u64.. {
        let mut piece = [0; 48];
        let limit = match round % 3 {
            0 => Duration::ZERO,
            1 => Duration::from_micros(round % 40),
            _ => LIMIT,
        };
        match tokio::time::timeout(limit, to.read(&mut piece)).await {
            Ok(n) => match n.unwrap() {
                0 => break,
                n => got.extend_from_slice(&piece[..n]),
            },
            Err(_) => assert!(limit < LIMIT, "a wake-up was lost"),
        }
    }
    sender.await.unwrap();
    assert!(got.len() == 20_000 && got.iter().enumerate().all(|(n, o)| *o == (n % 251) as u8));
}

#[test]
fn message_goes_to_first_waiter() {
    let (a, b) = pair();
    let flag = Arc::new(Flag(AtomicBool::new(false)));
    let waker = Waker::from(Arc::clone(&flag));
    let mut waiting = [(); 2].map(|()| a.recv().into_future());
    for one in &mut waiting {
        let polled = Pin::new(one).poll(&mut Context::from_waker(&waker));
        assert!(polled.is_pending());
    }
    b.send("one").wait_for(LIMIT).unwrap();
    let end = Instant::now() + LIMIT;
    while !flag.0.load(Ordering::SeqCst) {
        assert!(Instant::now() < end, "no waiter was woken");
        std::thread::yield_now();
    }
    assert!(a.recv().now().unwrap().is_none());
    let [first, _second] = &mut waiting;
    match Pin::new(first).poll(&mut Context::from_waker(&waker)) {
        Poll::Ready(message) => assert_eq!(*message.unwrap(), *b"one"),
        Poll::Pending => panic!("another waiter got the message"),
    }
}

/// Counts wake-ups; its reference count shows whether a waker is kept.
struct Counts(AtomicU64);

impl Wake for Counts {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Polls a future, and returns `true` if it is pending. Drops the future.
type Polls<'a> = Box<dyn FnMut(&Waker) -> bool + 'a>;

fn polls<'a, F: Future + Unpin + 'a>(mut future: F) -> Polls<'a> {
    Box::new(move |waker| {
        let mut context = Context::from_waker(waker);
        Pin::new(&mut future).poll(&mut context).is_pending()
    })
}

fn reads<'a>(channel: &Channel) -> Polls<'a> {
    let (mut half, _) = Stream::from(channel.clone()).into_split();
    Box::new(move |waker| {
        let (mut context, mut out) = (Context::from_waker(waker), [0]);
        let mut out = tokio::io::ReadBuf::new(&mut out);
        let half = Pin::new(&mut half);
        tokio::io::AsyncRead::poll_read(half, &mut context, &mut out).is_pending()
    })
}

fn writes<'a>(channel: &Channel) -> Polls<'a> {
    let (_, mut half) = Stream::from(channel.clone()).into_split();
    Box::new(move |waker| {
        let mut context = Context::from_waker(waker);
        let half = Pin::new(&mut half);
        tokio::io::AsyncWrite::poll_write(half, &mut context, b"x").is_pending()
    })
}

/// Calls `test` with each kind of future that a program can wait for. None becomes ready.
fn each_wait(test: &dyn Fn(&str, Polls<'_>)) {
    let (a, b) = pair();
    test("a message", polls(a.recv()));
    test("the end", polls(a.closed()));
    test("a hello", polls(Channel::open(b.clone())));

    let (c, _d) = channels(&Options::new().receives(6));
    test("a message of a channel", polls(c.recv()));
    test("octets of a stream", reads(&c));
    // The window is two messages.
    (0..2).for_each(|_| c.send("x").wait_for(LIMIT).unwrap());
    test("credit of a channel", polls(c.send("x")));
    test("credit of a stream", writes(&c));
}

/// A waiter that polls repeatedly is in each list only once, and is removed when it is dropped. A
/// stale waker would be called instead of another waiter's.
#[test]
fn cancelled_waits_drop_their_wakers() {
    each_wait(&|what, mut polls| {
        let counts = Arc::new(Counts(AtomicU64::new(0)));
        let waker = Waker::from(Arc::clone(&counts));
        for _ in 0..10 {
            assert!(polls(&waker), "{what}");
        }
        // One clone is at the connection, and possibly one at the channel; the others are the
        // test's.
        assert!((3..=4).contains(&Arc::strong_count(&counts)), "{what}");
        drop((polls, waker));
        assert_eq!(Arc::strong_count(&counts), 1, "{what}");
    });
}

/// A forked child does not change the lists when it drops waiters, because a thread of the parent
/// may have been changing them during the fork.
#[test]
fn forked_child_keeps_waiter_lists() {
    alone("forked_child_keeps_waiter_lists", || {
        each_wait(&|what, mut polls| {
            let counts = Arc::new(Counts(AtomicU64::new(0)));
            let waker = Waker::from(Arc::clone(&counts));
            for _ in 0..3 {
                assert!(polls(&waker), "{what}");
            }
            // SAFETY: the child takes none of the parent's locks, and ends with `_exit`.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let before = Arc::strong_count(&counts);
                drop(polls);
                let good = Arc::strong_count(&counts) == before;
                // SAFETY: `_exit` is async-signal-safe.
                unsafe { libc::_exit(i32::from(!good)) };
            }
            let mut status = 0;
            // SAFETY: `status` is valid for writes, and `child` is our child.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(
                (libc::WIFEXITED(status), libc::WEXITSTATUS(status)),
                (true, 0),
                "{what}"
            );
        });
    });
}

/// Messages of a stream with credit are queued, and posted one after the other.
#[test]
fn stream_waits_for_room() {
    use std::io::Read;
    use tokio::io::AsyncWriteExt;
    // There is credit for all messages, but only one is in flight.
    let (a, b) = channels(&Options::new().send_depth(1).receives(64));
    let (mut from, mut to) = (Stream::from(a), Stream::from(b));
    let runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = { runtime }.enable_time().build().unwrap();
    runtime.block_on(async {
        let writes = async {
            for n in 0..40 {
                from.write_all(&[n]).await.unwrap();
            }
        };
        let bounded = tokio::time::timeout(LIMIT, writes).await;
        bounded.expect("a wake-up was lost");
    });
    let mut back = [0; 40];
    to.read_exact(&mut back).unwrap();
    assert!((0..40).eq(back));
}
