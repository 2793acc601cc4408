//! Tests of connections under misuse: forgotten and dropped operations, panicking wakers, forks,
//! peers that disconnect at any point, full queues, many threads and tasks.

use iwarp::connection::Refusal;
use iwarp::verbs::{PostError, WcStatus};
use iwarp::{Access, Config, Connection, Error, Options};
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use crate::common::alone;
use crate::common::calls::{ALL, LIMIT, pair, pair_with, poll_and_drop};

/// A forgotten operation loses its slot of the queue; the connection still works.
#[test]
fn forgotten_operations_lose_only_slots() {
    let (a, b) = pair_with(&Options::new().send_depth(8));
    let target = b.share::<u64>(16, ALL).unwrap();
    let source = a.allocate::<u64>(1).unwrap();
    for i in 0..6 {
        let write = a.write(&source, &target.remote().at(i).unwrap());
        std::mem::forget(write.started());
    }
    std::mem::forget(a.recv());
    std::mem::forget(a.send("never posted"));
    let mut batch = a.batch();
    batch.send("never posted").unwrap();
    std::mem::forget(batch.submit());
    for n in 0..100 {
        assert_eq!(
            a.fetch_add(&target.remote().at(9).unwrap(), 1)
                .wait_for(LIMIT)
                .unwrap(),
            n
        );
    }
    b.send("still here").wait().unwrap();
    assert_eq!(*a.recv().wait_for(LIMIT).unwrap(), *b"still here");
}

/// Handles may be dropped in any order. An object is kept as long as another handle needs it.
#[test]
fn drops_in_any_order() {
    for order in 0..120 {
        let (a, b) = pair();
        b.send("kept").wait().unwrap();
        let message = a.recv().wait_for(LIMIT).unwrap();
        let region = a.allocate::<u64>(4).unwrap();
        let window = a.bind(&region, ALL).wait().unwrap();
        let element = window.remote().at(0).unwrap();
        b.write(&[order], &element).wait().unwrap();
        // The answer proves that the Write is placed, so the window may be dropped.
        assert_eq!(b.get(&element).wait().unwrap(), order);
        let mut handles: Vec<Box<dyn std::any::Any>> = vec![
            Box::new(message),
            Box::new(a.clone()),
            Box::new(region),
            Box::new(window),
            Box::new(a),
        ];
        let mut choice = order as usize;
        while !handles.is_empty() {
            let which = choice % handles.len();
            choice /= handles.len().max(1);
            drop(handles.swap_remove(which));
        }
        b.closed().wait_for(LIMIT).unwrap();
    }
}

#[test]
fn message_outlives_connection() {
    let (a, b) = pair();
    b.send("what was said").wait().unwrap();
    let message = a.recv().wait_for(LIMIT).unwrap();
    drop(a);
    b.closed().wait_for(LIMIT).unwrap();
    drop(b);
    assert_eq!(*message, *b"what was said");
}

/// An operation can be dropped at any await. Its request may be executed or not, and its region is
/// free afterwards.
#[test]
fn cancellation_at_every_await() {
    for depth in [1, 2, 8] {
        let (a, b) = pair_with(&Options::new().send_depth(depth));
        let target = b.share::<u64>(4, ALL).unwrap();
        let token = target.remote();
        let word = token.at(3).unwrap();
        let mut added = 0..=0;
        for polls in 0..200 {
            let polls = polls % 4;
            let mut source = a.allocate::<u64>(1).unwrap();
            let mut sink = a.allocate::<u64>(4).unwrap();
            let _ = poll_and_drop(a.write(&source, &token), polls);
            let _ = poll_and_drop(a.read_into(&sink, &token), polls);
            let _ = poll_and_drop(a.get(&token), polls);
            let add = poll_and_drop(a.fetch_add(&word, 1), polls);
            let least = added.start() + u64::from(add.is_some());
            added = least..=added.end() + u64::from(polls > 0);
            let mut batch = a.batch();
            batch.write(&source, &token).unwrap();
            let _ = poll_and_drop(batch.submit(), polls);
            drop(batch);
            let _ = poll_and_drop(a.bind(&sink, ALL), polls);
            // A later request has completed, so the dropped requests have completed, too.
            let begin = std::time::Instant::now();
            a.get(&token).wait_for(LIMIT).unwrap();
            // A wait with a timeout would check once more at its end, and hide a lost wake-up.
            assert!(begin.elapsed() < LIMIT, "a wake-up was lost");
            // The routing thread may still be freeing the regions.
            for region in [&mut source, &mut sink] {
                let begin = std::time::Instant::now();
                while region.get_mut().is_none() {
                    assert!(begin.elapsed() < LIMIT, "{polls} polls, depth {depth}");
                    std::thread::yield_now();
                }
            }
        }
        let sum = a.fetch_add(&word, 0).wait_for(LIMIT).unwrap();
        assert!(added.contains(&sum), "{sum} is not in {added:?}");
    }
}

#[test]
fn cancelled_receives_lose_nothing() {
    let (a, b) = pair();
    let sender = std::thread::spawn(move || {
        for n in 0..2000_u32 {
            b.send(&n.to_be_bytes()).wait_for(LIMIT).unwrap();
        }
        b
    });
    let mut expected = 0_u32;
    while expected < 2000 {
        let got = match expected % 3 {
            0 => a.recv().wait_for(Duration::from_micros(10)),
            1 => poll_and_drop(a.recv(), 2).unwrap_or(Err(Error::WouldBlock)),
            _ => a.recv().wait_for(LIMIT),
        };
        if let Ok(message) = got {
            assert_eq!(*message, expected.to_be_bytes());
            expected += 1;
        } else if expected % 3 != 2 {
            // At the same time another receive waits, and is cancelled, too.
            drop(a.recv().wait_for(Duration::ZERO).map(|message| {
                assert_eq!(*message, expected.to_be_bytes());
                expected += 1;
            }));
        }
    }
    sender.join().unwrap();
}

struct Panics(AtomicU64);

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
        panic!("the waker of this test panics");
    }
}

#[test]
fn panicking_waker_affects_no_others() {
    let (a, b) = pair();
    let panics = Arc::new(Panics(AtomicU64::new(0)));
    let waker = Waker::from(Arc::clone(&panics));
    for n in 0..50_u32 {
        let mut first = pin!(a.recv());
        let mut context = Context::from_waker(&waker);
        assert!(first.as_mut().poll(&mut context).is_pending());
        std::thread::scope(|scope| {
            let second = scope.spawn(|| a.recv().wait_for(LIMIT));
            b.send(&n.to_be_bytes()).wait_for(LIMIT).unwrap();
            b.send(&n.to_be_bytes()).wait_for(LIMIT).unwrap();
            assert_eq!(*second.join().unwrap().unwrap(), n.to_be_bytes());
        });
        let mut context = Context::from_waker(Waker::noop());
        let got = loop {
            if let Poll::Ready(message) = first.as_mut().poll(&mut context) {
                break message.unwrap();
            }
        };
        assert_eq!(*got, n.to_be_bytes());
    }
    assert!(panics.0.load(Ordering::Relaxed) > 0);
}

#[test]
fn forked_child_does_not_use_connection() {
    alone("forked_child_does_not_use_connection", || {
        let (a, b) = pair();
        let region = a.allocate::<u8>(8).unwrap();
        let posted = a.send(&region).started();
        let pool = a.endpoint().pool::<u8>(8, 1, Access::empty()).unwrap();
        let buffer = pool.take().wait().unwrap();
        // SAFETY: the child takes none of the parent's locks, and ends with `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused =
                |result: Result<(), Error>| matches!(result, Err(Error::Refused(Refusal::Forked)));
            let good = refused(a.send("x").wait())
                && refused(a.recv().wait().map(drop))
                && refused(a.closed().wait().map(drop))
                && refused(a.close())
                && refused(a.bind(&region, ALL).wait().map(drop))
                && refused(pool.take().wait().map(drop));
            drop((posted, region, buffer, pool));
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
        posted.wait_for(LIMIT).unwrap();
        assert_eq!((buffer.len(), pool.in_use()), (8, 1));
        assert_eq!(b.recv().wait_for(LIMIT).unwrap().len(), 8);
        b.send("the parent goes on").wait().unwrap();
        assert_eq!(*a.recv().wait_for(LIMIT).unwrap(), *b"the parent goes on");
    });
}

/// The end of the connection wakes all waiters, regardless of the requests in flight.
#[test]
fn peer_closes_during_requests() {
    for round in 0..40_u64 {
        let (a, b) = pair_with(&Options::new().send_depth(4).receives(4));
        let token = b.share::<u64>(64, ALL).unwrap().remote();
        let region = b.share::<u64>(64, ALL).unwrap();
        let token = if round % 2 == 0 {
            region.remote()
        } else {
            token
        };
        let (word, a) = (token.at(0).unwrap(), &a);
        std::thread::scope(|scope| {
            for task in 0..12 {
                scope.spawn(move || {
                    let buffer = a.allocate::<u64>(64).unwrap();
                    loop {
                        let done = match task % 4 {
                            0 => a.write(&buffer, &token).wait_for(LIMIT),
                            1 => a.read_into(&buffer, &token).wait_for(LIMIT),
                            2 => a.fetch_add(&word, 1).wait_for(LIMIT).map(drop),
                            _ => a.recv().wait_for(LIMIT).map(drop),
                        };
                        match done {
                            Ok(()) => {}
                            Err(Error::TimedOut(_)) => panic!("a wake-up was lost"),
                            Err(_) => break,
                        }
                    }
                });
            }
            let _ = b.send("x").wait_for(LIMIT);
            std::thread::sleep(Duration::from_micros(round * 100));
            match round % 3 {
                0 => drop(b),
                1 => b.close().unwrap(),
                _ => a.close().unwrap(),
            }
        });
        let _ = a.closed().wait_for(LIMIT);
        assert!(!matches!(
            a.closed().wait_for(LIMIT),
            Err(Error::TimedOut(_))
        ));
    }
}

/// Many threads share a connection whose queue is nearly always full.
#[test]
fn many_threads_and_little_room() {
    for depth in [1, 3, 128] {
        let (a, b) = pair_with(&Options::new().send_depth(depth));
        let target = b.share::<u64>(64, ALL).unwrap();
        let token = target.remote();
        let heard = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (a, token) = (a.clone(), token);
                scope.spawn(move || {
                    let mine = token.at(thread).unwrap();
                    let counter = token.at(63).unwrap();
                    for n in 0..100_u64 {
                        a.write(&[n], &mine).wait_for(LIMIT).unwrap();
                        assert_eq!(a.get(&mine).wait_for(LIMIT).unwrap(), n);
                        a.fetch_add(&counter, 1).wait_for(LIMIT).unwrap();
                        a.send(&n.to_be_bytes()).wait_for(LIMIT).unwrap();
                    }
                });
            }
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let message = b.recv().wait_for(LIMIT).unwrap();
                        let n = u64::from_be_bytes(message[..].try_into().unwrap());
                        heard.fetch_add(n, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(target.load(63).unwrap(), 800);
        assert_eq!(heard.load(Ordering::Relaxed), 8 * 4950);
        assert!(b.recv().now().unwrap().is_none());
    }
}

#[test]
fn many_tasks_some_cancelled() {
    let runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = { runtime }.worker_threads(3).enable_time().build().unwrap();
    let (a, b) = pair_with(&Options::new().send_depth(4));
    let target = b.share::<u64>(64, ALL).unwrap();
    let token = target.remote();
    runtime.block_on(async {
        let mut tasks = Vec::new();
        for task in 0..32_u64 {
            let a = a.clone();
            tasks.push(tokio::spawn(async move {
                let counter = token.at(0).unwrap();
                let mut seed = task.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
                let mut added = 0;
                while added < 50 {
                    seed ^= seed << 13;
                    seed ^= seed >> 7;
                    seed ^= seed << 17;
                    match seed % 3 {
                        // The operation is cancelled while it waits for room or for its answer.
                        0 => {
                            let read = a.get(&counter);
                            let limit = Duration::from_micros(seed % 50);
                            let _ = tokio::time::timeout(limit, read).await;
                        }
                        1 => drop(a.get(&counter).started()),
                        _ => {
                            a.fetch_add(&counter, 1).await.unwrap();
                            added += 1;
                        }
                    }
                }
            }));
        }
        for task in tasks {
            let done = tokio::time::timeout(LIMIT, task).await;
            done.expect("a wake-up was lost").unwrap();
        }
    });
    assert_eq!(target.load(0).unwrap(), 32 * 50);
}

/// Connects two ends; the connecting device injects `fault`.
fn faulty(options: Options, fault: &str) -> (Connection, Connection) {
    let mut config = Config::default();
    config.fault = Some(fault.parse().unwrap());
    pair_with(&options.config(config))
}

/// A request that fails when it is posted frees its slot, so that later requests have room.
#[test]
fn refused_requests_return_their_slots() {
    let (a, b) = faulty(Options::new().send_depth(2), "seed=1;post,every=2,op=send");
    for n in 0..12_u8 {
        let sent = a.send(&[n]).wait_for(LIMIT);
        match n % 2 {
            0 => sent.unwrap(),
            _ => assert!(matches!(sent, Err(Error::Refused(Refusal::Post(_))))),
        }
    }
    for n in (0..12).step_by(2) {
        assert_eq!(*b.recv().wait_for(LIMIT).unwrap(), [n]);
    }
}

/// If the first request of a batch cannot be posted, the batch can be submitted again. If a later
/// request cannot be posted, the batch fails, and the posted requests keep their memory.
#[test]
fn batch_is_refused_or_fails_whole() {
    for (seed, refused) in (2..).zip([1, 4, 16, 17, 20]) {
        let fault = format!("seed={seed};post,nth={refused},op=send");
        let (a, b) = faulty(Options::new(), &fault);
        let mut region = a.allocate::<u8>(1).unwrap();
        let mut batch = a.batch();
        for _ in 0..20 {
            batch.send(&region).unwrap();
        }
        let failed = batch.submit().wait_for(LIMIT);
        if refused == 1 {
            assert!(matches!(failed, Err(Error::Refused(Refusal::Post(_)))));
            assert_eq!(batch.len(), 20);
            batch.submit().wait_for(LIMIT).unwrap();
            for _ in 0..20 {
                assert_eq!(*b.recv().wait_for(LIMIT).unwrap(), [0]);
            }
            assert!(region.get_mut().is_some());
        } else {
            assert!(matches!(failed, Err(Error::Closed)), "{refused}");
            batch.clear();
            assert!(region.get_mut().is_none(), "{refused}");
            for _ in 1..refused {
                assert_eq!(*b.recv().wait_for(LIMIT).unwrap(), [0]);
            }
        }
    }
}

/// Requests longer than a message are refused when they are added; the batch and the connection
/// remain usable.
#[test]
fn batch_refuses_oversized_messages() {
    let (a, b) = pair_with(&Options::new().send_depth(2));
    let huge = a.allocate::<u8>((1 << 31) + 1).unwrap();
    let mut batch = a.batch();
    batch.send("first").unwrap();
    let too_long = batch.send(&huge);
    assert!(matches!(
        too_long,
        Err(Error::Refused(Refusal::Post(PostError::MessageTooLong)))
    ));
    batch.send("second").unwrap();
    batch.submit().wait_for(LIMIT).unwrap();
    // Single requests are refused in the same way.
    let refused = a.send(&huge).wait_for(LIMIT);
    assert!(matches!(
        refused,
        Err(Error::Refused(Refusal::Post(PostError::MessageTooLong)))
    ));
    for text in ["first", "second"] {
        assert_eq!(*b.recv().wait_for(LIMIT).unwrap(), *text.as_bytes());
    }
}

/// Every call returns the same error for a length above the maximum of an element, and above that
/// of a message.
#[test]
fn every_call_refuses_lengths_alike() {
    let (a, b) = pair();
    for octets in [(1_usize << 31) + 1, (1 << 32) + 1] {
        let huge = a.allocate::<u8>(octets).unwrap();
        let there = b.share::<u8>(octets, ALL).unwrap().remote();
        let mut batch = a.batch();
        let results = [
            a.send(&huge).wait_for(LIMIT).map(drop),
            a.send_with_immediate(&huge, 1).wait_for(LIMIT).map(drop),
            a.write(&huge, &there).wait_for(LIMIT).map(drop),
            a.write_with_immediate(&huge, &there, 1)
                .wait_for(LIMIT)
                .map(drop),
            a.read_into(&huge, &there).wait_for(LIMIT).map(drop),
            batch.send(&huge).map(drop),
            batch.write(&huge, &there).map(drop),
        ];
        for (call, result) in results.into_iter().enumerate() {
            assert!(
                matches!(
                    result,
                    Err(Error::Refused(Refusal::Post(PostError::MessageTooLong)))
                ),
                "call {call} of {octets}: {result:?}"
            );
        }
    }
    assert!(a.send("still here").wait_for(LIMIT).is_ok());
    assert_eq!(*b.recv().wait_for(LIMIT).unwrap(), *b"still here");
}

#[test]
fn lost_completions_end_the_connection() {
    let (a, _b) = faulty(Options::new(), "seed=7;cq-overflow,nth=3,op=send");
    std::thread::scope(|scope| {
        let receives = scope.spawn(|| a.recv().wait_for(LIMIT));
        for _ in 0..2 {
            a.send("arrives").wait_for(LIMIT).unwrap();
        }
        let lost = a.send("lost").wait_for(LIMIT);
        assert!(matches!(lost, Err(Error::Operation(e)) if e.status() == WcStatus::Fatal));
        assert!(receives.join().unwrap().is_err());
    });
    assert!(a.send("late").wait_for(LIMIT).is_err());
    let end = a.closed().wait_for(LIMIT);
    assert!(!matches!(end, Err(Error::TimedOut(_))), "{end:?}");
}
