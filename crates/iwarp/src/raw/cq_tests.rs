//! Tests of completion queues: the effects of polling, arming and waiting, and which tasks are woken.

use super::super::qp::QueuePair;
use super::super::testing;
use super::*;
use crate::engine::{self, Source};
use iwarp_rnic::qp::State;
use iwarp_rnic::{RecvWr, WcStatus};
use std::sync::atomic::AtomicU32;
use std::task::Wake;

#[test]
fn each_event_is_owed_alone_and_with_others() {
    assert!(Owed::default().is_nothing());
    let owed: [fn(&mut Owed); 4] = [
        |owed| owed.notify = true,
        |owed| owed.wake = true,
        |owed| owed.overflow = true,
        |owed| owed.srq_limit = true,
    ];
    for one in owed {
        for other in owed {
            let mut owed = Owed::default();
            one(&mut owed);
            other(&mut owed);
            assert!(!owed.is_nothing(), "{owed:?}");
        }
    }
}

/// A poll stays for answers that come soon. A look of the progress thread that finds nothing is none.
#[test]
fn a_look_that_finds_nothing_is_no_answer() {
    let ctx = testing::context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = testing::queue_pair(&ctx, &cq, &cq);
    for _ in 0..5 {
        cq.inner.answers.took(cq.inner.pollers.empty_polls());
        Arc::clone(&qp.inner).ready(true, false, false);
    }
    assert!(!cq.inner.answers.come_soon());
    qp.destroy();
}

/// A program that only sends may poll only one of its two queues, for days.
#[test]
fn a_queue_that_nobody_polls_keeps_no_more_than_its_queue_pairs() {
    let ctx = testing::context();
    let [polled, other] = [0; 2].map(|_| ctx.create_cq(4, None).unwrap());
    let qps = [0; 2].map(|_| testing::queue_pair(&ctx, &polled, &other));
    let waiting = |cq: &CompletionQueue| cq.inner.deferred.lock().len();
    for round in 0..10 {
        for qp in &qps {
            qp.inner.put_off();
        }
        assert_eq!(waiting(&polled), 2);
        match round % 2 {
            0 => assert_eq!(polled.poll(&mut [Cqe::default()]), Ok(0)),
            _ => polled.send_put_off(),
        }
        assert_eq!(waiting(&polled), 0);
        // The list keeps its memory for the next ones.
        assert!(polled.inner.deferred.lock().capacity() >= 2);
    }
    assert_eq!(waiting(&other), 2);
    for (gone, qp) in qps.iter().enumerate() {
        qp.destroy();
        assert_eq!(waiting(&other), 1 - gone);
    }
}

/// A program that polls drives its queue pairs, and the progress thread leaves them alone. A program that arms is about to wait:
/// deferred requests are sent, and the queue pairs no longer count as driven.
#[test]
fn arming_hands_the_queue_pairs_over() {
    let ctx = testing::context();
    let channel = ctx.create_channel().unwrap();
    for channel in [None, Some(&channel)] {
        let cq = ctx.create_cq(4, channel).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        for solicited_only in [false, true] {
            poll_until_driven(&cq, &qp);
            qp.inner.put_off();
            assert_eq!(cq.inner.deferred.lock().len(), 1);
            cq.arm(solicited_only);
            assert_eq!(qp.inner.driven_until(now_ns()), None);
            assert_eq!(cq.inner.deferred.lock().len(), 0, "not sent");
            // The poll that follows is the last one before the wait.
            assert_eq!(cq.poll(&mut [Cqe::default()]), Ok(0));
            assert_eq!(qp.inner.driven_until(now_ns()), None);
        }
        qp.destroy();
    }
}

/// Polls until the progress thread would leave the queue pair alone.
fn poll_until_driven(cq: &CompletionQueue, qp: &QueuePair) {
    let end = now_ns() + 20_000_000_000;
    while qp.inner.driven_until(now_ns()).is_none() {
        assert!(now_ns() < end, "it is never driven");
        assert_eq!(cq.poll(&mut [Cqe::default()]), Ok(0));
    }
}

/// The polls of a queue with many queue pairs drive the whole process, and not each of them: none of them may rest.
#[test]
fn queue_pairs_of_a_large_queue_are_not_driven_one_by_one() {
    let ctx = testing::context();
    let cq = ctx.create_cq(4, None).unwrap();
    let few: Vec<_> = (0..POLL_DIRECTLY)
        .map(|_| testing::queue_pair(&ctx, &cq, &cq))
        .collect();
    poll_until_driven(&cq, &few[0]);
    let one_more = testing::queue_pair(&ctx, &cq, &cq);
    assert_eq!(few[0].inner.driven_until(now_ns()), None);
    let end = now_ns() + 20_000_000_000;
    while engine::everything().end(now_ns()).is_none() {
        assert!(now_ns() < end, "nobody drives");
        assert_eq!(cq.poll(&mut [Cqe::default()]), Ok(0));
    }
    assert_eq!(few[0].inner.driven_until(now_ns()), None);
    one_more.destroy();
    poll_until_driven(&cq, &few[0]);
    for qp in few {
        qp.destroy();
    }
}

/// Threads that create and destroy queue pairs at the same time count them one after the other: what is told last is what was counted last.
#[test]
fn queue_pairs_are_counted_by_one_thread_at_a_time() {
    let ctx = testing::context();
    let cq = ctx.create_cq(4, None).unwrap();
    let (told, tells) = std::sync::mpsc::channel();
    let qps = std::thread::scope(|scope| {
        // As if another thread had counted, and had not yet told the pollers.
        let counting = cq.inner.counting.lock();
        let creates = scope.spawn(|| {
            let create = |_| testing::queue_pair(&ctx, &cq, &cq);
            let qps: Vec<_> = (0..=POLL_DIRECTLY).map(create).collect();
            told.send(()).unwrap();
            qps
        });
        while cq.inner.qps.read().is_empty() {
            std::thread::yield_now();
        }
        let early = tells.recv_timeout(Duration::from_millis(100));
        assert!(early.is_err(), "they were counted meanwhile");
        cq.inner.pollers.set_many(false);
        drop(counting);
        creates.join().unwrap()
    });
    assert!(cq.inner.pollers.are_for_many());
    qps.iter().for_each(QueuePair::destroy);
    assert!(!cq.inner.pollers.are_for_many());
}

/// The thread that writes a completion marks the queue as not empty, writes, and looks for wakers. A task on another processor may
/// register meanwhile and miss both. Registering therefore makes the next poll take the lock.
#[test]
fn the_poll_after_asking_to_be_woken_misses_no_completion() {
    let ctx = testing::context();
    let cq = ctx.create_cq(4, None).unwrap();
    // The view of that task: the completion is in the ring, but the mark is not yet visible.
    let _ = cq.inner.ring.lock().push(completion(7));
    let mut out = [Cqe::default(); 2];
    assert_eq!(
        cq.poll(&mut out),
        Ok(0),
        "the state that this test is about"
    );
    cq.wake_at_next(Waker::noop());
    assert_eq!(cq.poll(&mut out), Ok(1));
    assert_eq!(out[0].wr_id, 7);
    // Check the same for a wait that may be given up.
    let _ = cq.inner.ring.lock().push(completion(8));
    let mut wait = cq.waits();
    cq.wake_wait(&mut wait, Waker::noop());
    assert_eq!(cq.poll(&mut out), Ok(1));
    assert_eq!(out[0].wr_id, 8);
}

fn completion(wr_id: u64) -> Cqe {
    Cqe {
        wr_id,
        ..Cqe::default()
    }
}

/// Writes a completion as a driver does.
fn complete(cq: &CompletionQueue, wr_id: u64) -> bool {
    let mut owed = Owed::default();
    let mut ring = cq.inner.ring.lock();
    cq.inner.push(&mut ring, completion(wr_id), &mut owed);
    drop(ring);
    cq.inner.settle(owed)
}

#[derive(Default)]
struct Counts(AtomicU32);

impl Wake for Counts {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A task that waits while the queue is full must be woken when the queue overflows.
#[test]
fn an_overflow_wakes_tasks() {
    let ctx = testing::context();
    let cq = ctx.create_cq(4, None).unwrap();
    let (task, capacity) = (Arc::new(Counts::default()), u64::from(cq.capacity()));
    let waker = Waker::from(Arc::clone(&task));
    for wr_id in 0..capacity {
        assert!(!complete(&cq, wr_id));
    }
    for overflows in 1..3 {
        cq.wake_at_next(&waker);
        assert_eq!(complete(&cq, 99), overflows == 1, "it is told of once");
        assert_eq!(task.0.load(Ordering::Relaxed), overflows);
    }
    let mut out = vec![Cqe::default(); 2 * capacity as usize];
    assert_eq!(cq.poll(&mut out), Ok(capacity as usize));
    assert_eq!(cq.poll(&mut out), Err(CqError::Overflow));
    assert!(matches!(
        ctx.try_async_event().map(|e| e.kind),
        Some(AsyncEventKind::CqError(dead)) if dead.is_same(&cq)
    ));
}

/// `ibv_destroy_qp(3)` drops completions. Afterwards the queue pair's number may be used again, so a completion that remained
/// could be taken for one of another queue pair.
#[test]
fn destroying_a_queue_pair_drops_its_completions() {
    let ctx = testing::context();
    let [send, recv] = [0; 2].map(|_| ctx.create_cq(4, None).unwrap());
    for cqs in [[&send, &send], [&recv, &recv], [&send, &recv]] {
        let [gone, stays] = [0; 2].map(|_| testing::queue_pair(&ctx, cqs[0], cqs[1]));
        for qp in [&gone, &stays] {
            qp.modify(State::Init).unwrap();
            let wr = RecvWr {
                wr_id: u64::from(qp.num()),
                sges: &[],
            };
            qp.post_recv(&[wr]).unwrap();
            qp.modify(State::Error).unwrap();
        }
        assert_eq!(cqs[1].len(), 2);
        gone.destroy();
        let mut out = [Cqe::default(); 4];
        assert_eq!(cqs[1].poll(&mut out), Ok(1));
        assert_eq!(
            (out[0].qp_num, out[0].status),
            (stays.num(), WcStatus::Flushed)
        );
        stays.destroy();
    }
}

/// A channel knows the queues that report to it as long as they exist. It expects one wait of each that is armed, if its last waits were
/// short: a program that arms more often does not wait here.
#[test]
fn a_channel_expects_a_wait_of_each_queue() {
    let ctx = testing::context();
    let channel = ctx.create_channel().unwrap();
    let short = |waits| (0..waits).for_each(|_| channel.slept(Duration::ZERO));
    // A thread begins to wait, and does not poll for any time.
    let waits = || assert!(!channel.busy_poll(Duration::ZERO));
    let [_first, gone] = [0; 2].map(|_| ctx.create_cq(4, Some(&channel)).unwrap());
    drop(gone);
    let _others = [0; 2].map(|_| ctx.create_cq(4, Some(&channel)).unwrap());
    assert!(!channel.expects_wait(), "no wait was short");
    short(2);
    for _ in 0..4 {
        let expected = [0; 3].map(|_| channel.expects_wait());
        assert_eq!(expected, [true; 3], "armed once each");
        waits();
    }
    let expected = [0; 4].map(|_| channel.expects_wait());
    assert_eq!(expected, [true, true, true, false]);
    waits();
    short(3);
    assert!(!channel.expects_wait(), "it takes more short waits now");
    short(1);
    assert!(channel.expects_wait());
    waits();
    channel.slept(Duration::MAX);
    assert!(!channel.expects_wait(), "the last one was long");
}

/// A success counts as seen when it has been polled. What was flushed is none.
#[test]
fn a_success_is_unseen_until_it_is_polled() {
    let ctx = testing::context();
    let [send, recv] = [0; 2].map(|_| ctx.create_cq(4, None).unwrap());
    for [of_send, of_recv] in [[&send, &send], [&send, &recv]] {
        let [qp, other] = [0; 2].map(|_| testing::queue_pair(&ctx, of_send, of_recv));
        for (cq, status, unseen) in [
            (of_send, WcStatus::Success, true),
            (of_recv, WcStatus::Success, true),
            (of_recv, WcStatus::Flushed, false),
        ] {
            assert!(!qp.has_unseen_success());
            let _ = cq.inner.ring.lock().push(Cqe {
                qp_num: qp.num(),
                status,
                ..completion(1)
            });
            assert_eq!(qp.has_unseen_success(), unseen, "{status:?}");
            assert!(!other.has_unseen_success());
            assert_eq!(cq.take_ready(&mut [Cqe::default()]), Ok(1));
        }
        qp.destroy();
        other.destroy();
    }
}
