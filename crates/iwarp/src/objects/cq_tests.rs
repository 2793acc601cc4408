//! Tests of completion queues: polling, arming, waiting, and waking of tasks.

use super::super::context::Context;
use super::*;
use crate::config::Config;
use crate::conn::qp::QueuePair;
use crate::engine::{self, Source};
use crate::testing;
use iwarp_rnic::counters::Counters;
use iwarp_rnic::qp::State;
use iwarp_rnic::{RecvWr, WcStatus};
use std::sync::atomic::AtomicU32;
use std::task::Wake;

#[test]
fn any_owed_event_is_not_nothing() {
    assert!(Owed::default().is_nothing());
    let setters: [fn(&mut Owed); 4] = [
        |owed| owed.notify = true,
        |owed| owed.wake = true,
        |owed| owed.overflow = true,
        |owed| owed.srq_limit = true,
    ];
    for set_first in setters {
        for set_second in setters {
            let mut owed = Owed::default();
            set_first(&mut owed);
            set_second(&mut owed);
            assert!(!owed.is_nothing(), "{owed:?}");
        }
    }
}

/// If the progress thread is notified but reads no data, that does not count as an answer.
#[test]
fn empty_read_is_no_answer() {
    let ctx = testing::context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = testing::queue_pair(&ctx, &cq, &cq);
    for _ in 0..5 {
        cq.inner
            .answers
            .record_taken(cq.inner.pollers.empty_polls());
        Arc::clone(&qp.inner).ready(true, false, false);
    }
    assert!(!cq.inner.answers.are_expected_soon());
    qp.destroy();
}

/// A program that only sends may never poll the receive queue. The list of deferred queue pairs of
/// that queue must not grow.
#[test]
fn unpolled_queue_lists_each_member_once() {
    let ctx = testing::context();
    let [polled, other] = [0; 2].map(|_| ctx.create_cq(4, None).unwrap());
    let qps = [0; 2].map(|_| testing::queue_pair(&ctx, &polled, &other));
    let deferred_count = |cq: &CompletionQueue| cq.inner.deferred.lock().len();
    for round in 0..10 {
        for qp in &qps {
            qp.inner.defer_sending();
        }
        assert_eq!(deferred_count(&polled), 2);
        match round % 2 {
            0 => assert_eq!(polled.poll(&mut [Cqe::default()]), Ok(0)),
            _ => polled.send_deferred_requests(),
        }
        assert_eq!(deferred_count(&polled), 0);
        assert!(polled.inner.deferred.lock().capacity() >= 2);
    }
    assert_eq!(deferred_count(&other), 2);
    for (gone, qp) in qps.iter().enumerate() {
        qp.destroy();
        let deferred = other.inner.deferred.lock();
        let nums = deferred.iter().filter_map(Weak::upgrade).map(|qp| qp.num());
        assert!(nums.eq(qps[gone + 1..].iter().map(QueuePair::num)));
    }
}

/// A program that arms is about to wait: its deferred requests are sent, and the progress thread
/// takes over the queue pairs.
#[test]
fn arming_hands_over_queue_pairs() {
    let ctx = testing::context();
    let channel = ctx.create_channel().unwrap();
    for channel in [None, Some(&channel)] {
        let cq = ctx.create_cq(4, channel).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        for solicited_only in [false, true] {
            poll_until_driven(&cq, &qp);
            qp.inner.defer_sending();
            assert_eq!(cq.inner.deferred.lock().len(), 1);
            cq.arm(solicited_only);
            assert_eq!(qp.inner.driven_until(now_ns()), None);
            assert_eq!(cq.inner.deferred.lock().len(), 0, "not sent");
            // A program polls once more before it waits. This poll must not renew the lease.
            assert_eq!(cq.poll(&mut [Cqe::default()]), Ok(0));
            assert_eq!(qp.inner.driven_until(now_ns()), None);
        }
        qp.destroy();
    }
}

fn poll_until_driven(cq: &CompletionQueue, qp: &QueuePair) {
    let deadline = now_ns() + 20_000_000_000;
    while qp.inner.driven_until(now_ns()).is_none() {
        assert!(now_ns() < deadline, "the lease is never held");
        assert_eq!(cq.poll(&mut [Cqe::default()]), Ok(0));
    }
}

/// Polls of a queue with many queue pairs drive the whole process by `epoll`, so the sockets of its
/// queue pairs must stay in the set.
#[test]
fn large_queue_pauses_no_members() {
    let ctx = testing::context();
    let cq = ctx.create_cq(4, None).unwrap();
    let few: Vec<_> = (0..POLL_DIRECTLY_MAX)
        .map(|_| testing::queue_pair(&ctx, &cq, &cq))
        .collect();
    poll_until_driven(&cq, &few[0]);
    let one_more = testing::queue_pair(&ctx, &cq, &cq);
    assert_eq!(few[0].inner.driven_until(now_ns()), None);
    let deadline = now_ns() + 20_000_000_000;
    while engine::whole_process_lease().end(now_ns()).is_none() {
        assert!(
            now_ns() < deadline,
            "the lease of the process is never held"
        );
        assert_eq!(cq.poll(&mut [Cqe::default()]), Ok(0));
    }
    assert_eq!(few[0].inner.driven_until(now_ns()), None);
    one_more.destroy();
    poll_until_driven(&cq, &few[0]);
    for qp in few {
        qp.destroy();
    }
}

/// If two threads create queue pairs at the same time, only one of them counts at a time. Otherwise
/// the pollers could get an older count last.
#[test]
fn members_are_counted_by_one_thread() {
    let ctx = testing::context();
    let cq = ctx.create_cq(4, None).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let qps = std::thread::scope(|scope| {
        // This thread plays one that has counted and not yet notified the pollers.
        let counting_members = cq.inner.counting_members.lock();
        let creates = scope.spawn(|| {
            let create = |_| testing::queue_pair(&ctx, &cq, &cq);
            let qps: Vec<_> = (0..=POLL_DIRECTLY_MAX).map(create).collect();
            sender.send(()).unwrap();
            qps
        });
        while cq.inner.qps.read().is_empty() {
            std::thread::yield_now();
        }
        let early = receiver.recv_timeout(Duration::from_millis(100));
        assert!(early.is_err(), "another thread counted meanwhile");
        cq.inner.pollers.set_many_qps(false);
        drop(counting_members);
        creates.join().unwrap()
    });
    assert!(cq.inner.pollers.have_many_qps());
    qps.iter().for_each(QueuePair::destroy);
    assert!(!cq.inner.pollers.have_many_qps());
}

/// The thread that writes a completion sets `ready`, writes, and checks for wakers. A task on
/// another processor may register its waker just after that check, and not yet see `ready`. So
/// registering a waker makes the next poll lock the ring.
#[test]
fn poll_after_registering_sees_completion() {
    let ctx = testing::context();
    let cq = ctx.create_cq(4, None).unwrap();
    // The state that the task sees: the completion is in the ring, but `ready` is not yet visible.
    let _ = cq.inner.ring.lock().push(completion(7));
    let mut out = [Cqe::default(); 2];
    assert_eq!(cq.poll(&mut out), Ok(0), "`ready` is not set");
    cq.wake_at_next(Waker::noop());
    assert_eq!(cq.poll(&mut out), Ok(1));
    assert_eq!(out[0].wr_id, 7);
    // A wait that can be cancelled also makes the poll lock the ring.
    let _ = cq.inner.ring.lock().push(completion(8));
    let mut wait = cq.registration();
    cq.register_wait(&mut wait, Waker::noop());
    assert_eq!(cq.poll(&mut out), Ok(1));
    assert_eq!(out[0].wr_id, 8);
}

fn completion(wr_id: u64) -> Cqe {
    Cqe {
        wr_id,
        ..Cqe::default()
    }
}

fn complete(cq: &CompletionQueue, wr_id: u64) -> bool {
    let mut owed = Owed::default();
    let mut ring = cq.inner.ring.lock();
    cq.inner.push(&mut ring, completion(wr_id), &mut owed);
    drop(ring);
    cq.inner.raise_due(owed)
}

#[derive(Default)]
struct WakeCounter(AtomicU32);

impl Wake for WakeCounter {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn overflow_wakes_tasks() {
    let ctx = testing::context();
    let cq = ctx.create_cq(4, None).unwrap();
    let (task, capacity) = (Arc::new(WakeCounter::default()), u64::from(cq.capacity()));
    let waker = Waker::from(Arc::clone(&task));
    for wr_id in 0..capacity {
        assert!(!complete(&cq, wr_id));
    }
    for overflows in 1..3 {
        cq.wake_at_next(&waker);
        assert_eq!(
            complete(&cq, 99),
            overflows == 1,
            "only the first overflow is reported"
        );
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

/// After `ibv_destroy_qp(3)` the number may be reused. The program would take a remaining
/// completion for one of the new queue pair.
#[test]
fn destroy_drops_completions() {
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

#[test]
fn reset_drops_only_own_completions() {
    let ctx = testing::context();
    let count = 3 * PURGE_STEP;
    let cq = ctx.create_cq(count, None).unwrap();
    let [gone, stays] = [0; 2].map(|_| testing::queue_pair(&ctx, &cq, &cq));
    let mut owed = Owed::default();
    for n in 0..count {
        let qp = if n % 3 == 0 { &stays } else { &gone };
        let cqe = Cqe {
            qp_num: qp.num(),
            ..completion(n.into())
        };
        cq.inner.push(&mut cq.inner.ring.lock(), cqe, &mut owed);
    }
    gone.modify(State::Reset).unwrap();
    let mut out = vec![Cqe::default(); count as usize];
    let remaining = cq.take_ready(&mut out).unwrap();
    let wr_ids: Vec<_> = out[..remaining].iter().map(|cqe| cqe.wr_id).collect();
    assert!(wr_ids.into_iter().eq((0..count.into()).step_by(3)));
    for qp in [gone, stays] {
        qp.destroy();
    }
}

/// If its last waits were short, a channel expects that a thread waits on it after each queue was
/// armed once. A program that arms more often does not wait on the channel.
#[test]
fn channel_expects_wait_of_each_queue() {
    let ctx = testing::context();
    let channel = ctx.create_channel().unwrap();
    let short = |waits| (0..waits).for_each(|_| channel.record_sleep(Duration::ZERO));
    // A wait without time to poll.
    let wait = || assert!(!channel.busy_poll(Duration::ZERO));
    let [_first, gone] = [0; 2].map(|_| ctx.create_cq(4, Some(&channel)).unwrap());
    drop(gone);
    let _others = [0; 2].map(|_| ctx.create_cq(4, Some(&channel)).unwrap());
    assert!(!channel.expects_wait(), "no wait was short");
    short(2);
    for _ in 0..4 {
        let expected = [0; 3].map(|_| channel.expects_wait());
        assert_eq!(expected, [true; 3], "each queue was armed once");
        wait();
    }
    let expected = [0; 4].map(|_| channel.expects_wait());
    assert_eq!(expected, [true, true, true, false]);
    wait();
    short(3);
    assert!(!channel.expects_wait(), "more short waits are needed now");
    short(1);
    assert!(channel.expects_wait());
    wait();
    channel.record_sleep(Duration::MAX);
    assert!(!channel.expects_wait(), "the last wait was long");
}

#[test]
fn success_is_unseen_until_polled() {
    let ctx = testing::context();
    let [send, recv] = [0; 2].map(|_| ctx.create_cq(4, None).unwrap());
    for [send_cq, recv_cq] in [[&send, &send], [&send, &recv]] {
        let [qp, other] = [0; 2].map(|_| testing::queue_pair(&ctx, send_cq, recv_cq));
        for (cq, status, unseen) in [
            (send_cq, WcStatus::Success, true),
            (recv_cq, WcStatus::Success, true),
            (recv_cq, WcStatus::Flushed, false),
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

fn queue_with_window(window: Duration) -> CompletionQueue {
    let ctx = testing::context_with(Config {
        busy_poll: window,
        ..Config::default()
    });
    ctx.create_cq(4, None).unwrap()
}

/// A wait polls first if the last two waits took at most four windows.
#[test]
fn short_waits_make_next_wait_poll() {
    let window = Duration::from_millis(1);
    let (short, long) = (window * 4, window * 4 + Duration::from_nanos(1));
    for (waits, polls) in [
        (&[][..], false),
        (&[short], false),
        (&[short, short], true),
        (&[short, long], false),
        (&[long, short], false),
    ] {
        let cq = queue_with_window(window);
        waits.iter().for_each(|waited| cq.record_sleep(*waited));
        assert!(!complete(&cq, 1));
        assert_eq!(cq.busy_poll(Duration::MAX), polls, "{waits:?}");
        assert!(!cq.busy_poll(Duration::ZERO), "the limit is zero");
    }
}

/// A polling wait ends if `done` returns `true`, if there is a completion, or if one was lost.
#[test]
fn polling_wait_ends_for_each_reason() {
    let cq = queue_with_window(Duration::from_millis(1));
    let short = |waits| (0..waits).for_each(|_| cq.record_sleep(Duration::ZERO));
    short(2);
    assert!(cq.busy_poll_until(Duration::MAX, || true), "`done` is true");
    assert!(!complete(&cq, 1));
    assert!(cq.busy_poll(Duration::MAX), "there is a completion");
    let mut out = [Cqe::default(); 8];
    assert_eq!(cq.take_ready(&mut out), Ok(1));
    assert!(!cq.busy_poll(Duration::MAX), "there is no completion");
    // Polling found nothing, so many short waits must follow before the next wait polls.
    short(2000);
    while !complete(&cq, 2) {}
    assert_eq!(cq.take_ready(&mut out), Ok(cq.capacity() as usize));
    assert!(cq.busy_poll(Duration::MAX), "a completion was lost");
}

/// A drive reports an answer if a queue pair got one; if not, whether bytes were moved.
#[test]
fn drive_reports_what_arrived() {
    let ctx = testing::context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qps = [0; 2].map(|_| testing::queue_pair(&ctx, &cq, &cq));
    let seen = || cq.inner.drive(false).seen;
    assert_eq!(seen(), Seen::Nothing);
    for qp in &qps {
        qp.inner.bytes_transferred.add(1);
        assert_eq!([seen(), seen()], [Seen::Part, Seen::Nothing]);
        let mut counters = Counters::default();
        (counters.rx_messages, counters.rx_payload) = (1, 4);
        qp.inner.peer_answers.record(&counters);
        qp.inner.bytes_transferred.add(1);
        assert_eq!([seen(), seen()], [Seen::Answer; 2]);
        qp.inner.peer_answers.record_request();
        assert_eq!(seen(), Seen::Nothing);
    }
    qps.iter().for_each(QueuePair::destroy);
}

#[test]
fn long_drives_keep_the_lease() {
    let ctx = testing::context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = testing::queue_pair(&ctx, &cq, &cq);
    let deadline = now_ns() + 20_000_000_000;
    while qp.inner.driven_until(now_ns()).is_none() {
        assert!(now_ns() < deadline, "the lease is never held");
        // Each millisecond, simulate a drive that moves 1 GiB, which takes about a second.
        qp.inner.bytes_transferred.add(1 << 30);
        cq.inner.drive(false);
        std::thread::sleep(Duration::from_millis(1));
    }
    qp.destroy();
}

/// Simulates, twice, a program that takes completions and does not poll until the progress thread
/// receives data. Returns whether answers are expected after that.
fn expects_answers(cq: &CompletionQueue) -> bool {
    for _ in 0..2 {
        cq.inner.after_taking(&[]);
        cq.inner.record_arrival();
    }
    cq.inner.answers.are_expected_soon()
}

fn success_of(opcode: WcOpcode) -> Cqe {
    Cqe {
        opcode,
        status: WcStatus::Success,
        ..Cqe::default()
    }
}

/// A poll that finds only completions of Sends and Writes waits for the answer. After a wait
/// without result no answer is expected, which shows that the poll has waited.
#[test]
fn own_completions_wait_for_answer() {
    let (send, write) = (success_of(WcOpcode::Send), success_of(WcOpcode::Write));
    let read = success_of(WcOpcode::Read);
    let recv = success_of(WcOpcode::Recv);
    let flushed = Cqe {
        status: WcStatus::Flushed,
        ..send
    };
    for (completions, waits) in [
        (&[send][..], true),
        (&[write], true),
        (&[write, send], true),
        (&[read], false),
        (&[recv], false),
        (&[flushed], false),
        (&[send, recv], false),
        (&[recv, send], false),
    ] {
        for many in [false, true] {
            // The window is zero, so a wait ends after its first drive.
            let cq = queue_with_window(Duration::ZERO);
            assert!(expects_answers(&cq));
            cq.inner.pollers.set_many_qps(many);
            cq.inner.after_taking(completions);
            let waited = !cq.inner.answers.are_expected_soon();
            assert_eq!(waited, waits && !many, "{completions:?} {many}");
        }
    }
}

/// A program that watches memory does not poll for the answer. So after a wait without result, the
/// progress thread must receive it, even if the program takes more of its own completions.
#[test]
fn fruitless_answer_wait_returns_lease() {
    let limit = now_ns() + 20_000_000_000;
    loop {
        assert!(now_ns() < limit, "the lease is never held");
        let cq = queue_with_window(Duration::ZERO);
        let is_driven = || cq.inner.pollers.driven_until(now_ns()).is_some();
        while !is_driven() && now_ns() < limit {
            assert_eq!(cq.poll(&mut [Cqe::default()]), Ok(0));
        }
        assert!(expects_answers(&cq));
        // On a busy machine the lease may end before the wait. The test then tries again.
        if !is_driven() {
            continue;
        }
        cq.inner.after_taking(&[success_of(WcOpcode::Send)]);
        assert!(!is_driven(), "the wait keeps the lease");
        cq.inner.pollers.record_taken(64);
        assert!(!is_driven(), "a completion renews the lease");
        return;
    }
}

#[test]
fn answer_wait_sends_deferred_requests() {
    let cq = queue_with_window(Duration::ZERO);
    let ctx = Context {
        inner: Arc::clone(&cq.inner.ctx),
    };
    let qp = testing::queue_pair(&ctx, &cq, &cq);
    assert!(expects_answers(&cq));
    let send = success_of(WcOpcode::Send);
    // The queue holds another completion, so the wait ends at once.
    cq.inner.ready.store(true, Ordering::Relaxed);
    cq.inner.await_answer(&[send]);
    assert!(cq.inner.answers.are_expected_soon());
    cq.inner.ready.store(false, Ordering::Relaxed);
    let mut counters = Counters::default();
    (counters.rx_messages, counters.rx_payload) = (1, 4);
    qp.inner.peer_answers.record(&counters);
    qp.inner.defer_sending();
    cq.inner.await_answer(&[send]);
    assert!(cq.inner.answers.are_expected_soon());
    assert!(cq.inner.deferred.lock().is_empty(), "not sent");
    qp.destroy();
}

/// Pollers of many queue pairs drive the whole process, so the progress thread drives nothing.
#[test]
fn pollers_of_many_expect_no_answer() {
    let cq = queue_with_window(Duration::ZERO);
    cq.inner.pollers.set_many_qps(true);
    assert!(!expects_answers(&cq) && !expects_answers(&cq));
    cq.inner.pollers.set_many_qps(false);
    assert!(expects_answers(&cq));
}

#[test]
fn dropped_queue_pairs_are_removed() {
    let ctx = testing::context();
    let cq = ctx.create_cq(4, None).unwrap();
    let live = testing::queue_pair(&ctx, &cq, &cq);
    for _ in 0..100 {
        drop(testing::queue_pair(&ctx, &cq, &cq));
        assert_eq!(cq.queue_pairs(), 1);
    }
    assert!(cq.inner.qps.read().len() < 10);
    assert_eq!(ctx.inner.qp_numbers(), Some(vec![live.num()]));
    live.destroy();
    assert_eq!(cq.queue_pairs(), 0);
}

/// Registering a waker sets `ready` although the queue may be empty. The next poll must still
/// drive.
#[test]
fn poll_of_empty_ready_queue_drives() {
    let ctx = testing::context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = testing::queue_pair(&ctx, &cq, &cq);
    cq.wake_at_next(Waker::noop());
    qp.inner.defer_sending();
    assert_eq!(cq.poll(&mut [Cqe::default()]), Ok(0));
    assert!(cq.inner.deferred.lock().is_empty(), "not sent");
    qp.destroy();
}

#[test]
fn lost_completion_wakes_tasks() {
    let ctx = testing::context();
    let cq = ctx.create_cq(4, None).unwrap();
    let lose = || {
        let mut owed = Owed::default();
        cq.inner.record_loss(&mut cq.inner.ring.lock(), &mut owed);
        (owed.wake, owed.overflow)
    };
    assert_eq!(lose(), (false, true));
    assert_eq!(cq.poll(&mut [Cqe::default()]), Err(CqError::Overflow));
    cq.wake_at_next(Waker::noop());
    assert_eq!(lose(), (true, false));
}

/// A program whose waits are short arms very often, and its waits drive the sockets. So arming
/// keeps the lease, and need not wake the progress thread each time.
#[test]
fn expected_wait_keeps_lease_when_arming() {
    let ctx = testing::context();
    let channel = ctx.create_channel().unwrap();
    let cq = ctx.create_cq(4, Some(&channel)).unwrap();
    let qp = testing::queue_pair(&ctx, &cq, &cq);
    for expected in [false, true] {
        let now = loop {
            poll_until_driven(&cq, &qp);
            let now = now_ns();
            if qp.inner.driven_until(now).is_some() {
                break now;
            }
        };
        if expected {
            (0..10).for_each(|_| channel.record_sleep(Duration::ZERO));
        }
        qp.inner.defer_sending();
        cq.arm(false);
        assert_eq!(qp.inner.driven_until(now).is_some(), expected);
        assert!(cq.inner.deferred.lock().is_empty(), "not sent");
    }
    qp.destroy();
}
