//! Tests of waiting with wakers and futures. A waker is code of the program, which any thread of
//! the engine may call. It may panic, or call any function of this crate. The tests do not check
//! times. If a wake-up is lost, or a lock is held during a waker, a test hangs, and the watchdog
//! aborts it.

use crate::common::{
    End, LIMIT, Server, V4, Watchdog, config, context, pair, parameters, queue_pair,
};
use iwarp::Error;
use iwarp::runtime::cm::{CmEvent, CmEventChannel, CmEventKind};
use iwarp::runtime::{
    AsyncEvent, AsyncEventKind, CompletionQueue, Context, EventQueue, QueuePair,
    SharedReceiveQueue, create_event_channel,
};
use iwarp::tokio::Watched;
use iwarp::verbs::{Cqe, QpInitAttr, RecvWr, SendOp, WcStatus, cm};
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::task::{Context as TaskContext, Wake, Waker};
use std::time::Duration;

struct Panics;

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("the waker of this test panics");
    }
}

struct SendingWaker(Sender<()>);

impl Wake for SendingWaker {
    fn wake(self: Arc<Self>) {
        let _ = self.0.send(());
    }
}

fn sending_waker() -> (Waker, Receiver<()>) {
    let (tell, woken) = channel();
    (Waker::from(Arc::new(SendingWaker(tell))), woken)
}

/// Registers three wakers: the first and the last panic, and the second sends to the returned
/// receiver.
fn surrounded(register: impl Fn(&Waker)) -> Receiver<()> {
    let (sending_waker, woken) = sending_waker();
    register(&Waker::from(Arc::new(Panics)));
    register(&sending_waker);
    register(&Waker::from(Arc::new(Panics)));
    woken
}

fn expect_woken(what: &str, woken: &Receiver<()>) {
    woken
        .recv_timeout(LIMIT)
        .unwrap_or_else(|_| panic!("the waker for {what} was not called"));
}

/// Returns a connected client and server. The server has a shared receive queue, for tests of its
/// limit event.
fn with_limit() -> (End, End, SharedReceiveQueue) {
    let server = Server::new(V4, &config());
    let client = End::new(V4, &config());
    client.connect(server.address, b"");
    let pd = server.ctx.allocate_pd();
    let srq = server.ctx.create_srq(pd, 16, 1).unwrap();
    let accepted = server.end_with(server.request(), Some((&srq, pd)), 16, 64);
    accepted.id.accept(&parameters(b"")).unwrap();
    client.expect(CmEventKind::Established);
    accepted.expect(CmEventKind::Established);
    (client, accepted, srq)
}

fn empty_recv(wr_id: u64) -> RecvWr<'static> {
    RecvWr { wr_id, sges: &[] }
}

/// An event of a destroyed queue pair would refer to a missing object.
#[test]
fn destroyed_qp_discards_its_events() {
    let (_a, b) = pair(V4, &config());
    let about_b = || {
        let events = std::iter::from_fn(|| b.ctx.try_async_event());
        let of_b = |kind| matches!(kind, AsyncEventKind::SqDrained(qp) if b.qp.is_subject(&qp));
        events.filter(|event| of_b(event.kind.clone())).count()
    };
    for destroyed in [false, true] {
        b.qp.modify(iwarp::verbs::State::Rts).unwrap();
        b.qp.modify(iwarp::verbs::State::Sqd).unwrap();
        if destroyed {
            b.qp.destroy();
        }
        assert_eq!(about_b(), usize::from(!destroyed));
    }
    // Without a connection there are no further events.
    let srq = b.ctx.create_srq(b.pd, 1, 1).unwrap();
    for destroyed in [false, true] {
        let qp = queue_pair(&b.ctx, b.pd, &b.cq, Some(&srq), 1);
        qp.modify(iwarp::verbs::State::Error).unwrap();
        if destroyed {
            qp.destroy();
        }
        assert_eq!(b.ctx.try_async_event().is_some(), !destroyed);
    }
}

/// No thread polls the target, so the progress thread writes its completions and events, and calls
/// the wakers. A panicking waker must not end that thread, and the other wakers must be called.
#[test]
fn panicking_waker_ends_nothing() {
    let _watchdog = Watchdog::new();
    let (client, target, srq) = with_limit();
    let (mine, theirs) = (client.mem(64), target.mem(64));
    for round in 1..4u64 {
        srq.post(&[empty_recv(round)]).unwrap();
        srq.set_limit(1).unwrap();
        let completion = surrounded(|w| target.cq.wake_at_next(w));
        let limit = surrounded(|w| target.ctx.async_events().wake_at_next(w));
        client.post(round, SendOp::Send, &[]);
        expect_woken("the completion", &completion);
        expect_woken("the limit", &limit);
        client.expect_status(round, WcStatus::Success);
        target.expect_status(round, WcStatus::Success);
        // The thread that serves the target must still run.
        theirs.set(0, round);
        let read = SendOp::Read {
            remote_addr: theirs.addr(),
            rkey: theirs.stag,
        };
        client.post(9, read, &[mine.sge(8)]);
        client.expect_status(9, WcStatus::Success);
        assert_eq!(mine.word(0), round);
    }
    let end = surrounded(|w| target.channel.wake_at_next(w));
    client.qp.disconnect();
    expect_woken("the end", &end);
    target.expect(CmEventKind::Disconnected);
}

/// A program that works in its wakers, as an executor that polls tasks in `wake`.
struct Busy {
    ctx: Context,
    cq: CompletionQueue,
    qp: QueuePair,
    srq: SharedReceiveQueue,
    ids: Vec<iwarp::runtime::cm::CmId>,
    channels: Vec<CmEventChannel>,
    /// Each completion and event that the waker has taken.
    done: Sender<Taken>,
}

#[derive(Debug)]
enum Taken {
    Completion(Cqe),
    Device(AsyncEvent),
    Connection(CmEvent),
}

impl Wake for Busy {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let waker = Waker::from(Arc::clone(self));
        // Each of these calls takes a lock of the runtime.
        let _ = (self.qp.state(), self.qp.addresses(), self.qp.counters());
        let _ = (self.ctx.region(1), self.ctx.counters(), self.cq.len());
        let _ = (self.srq.len(), self.srq.attributes());
        self.srq.post(&[empty_recv(1)]).unwrap();
        for id in &self.ids {
            let _ = (id.addresses(), id.channel(), id.queue_pair());
        }
        self.cq.arm(false);
        self.cq.wake_at_next(&waker);
        let mut out = [Cqe::default()];
        while self.cq.poll(&mut out).unwrap() > 0 {
            let _ = self.done.send(Taken::Completion(out[0]));
        }
        take(self.ctx.async_events(), &waker, |e| {
            let _ = self.done.send(Taken::Device(e));
        });
        for channel in &self.channels {
            take(channel, &waker, |e| {
                let _ = self.done.send(Taken::Connection(e));
            });
        }
    }
}

/// Registers `waker` and passes all events of `queue` to `taken`.
fn take<T>(queue: &EventQueue<T>, waker: &Waker, mut taken: impl FnMut(T)) {
    queue.wake_at_next(waker);
    while let Some(event) = queue.try_next() {
        taken(event);
    }
}

#[test]
fn waker_may_call_anything() {
    let _watchdog = Watchdog::new();
    let (client, target, srq) = with_limit();
    let server = Server::new(V4, &config());
    let (done, taken) = channel();
    let busy = Arc::new(Busy {
        ctx: target.ctx.clone(),
        cq: target.cq.clone(),
        qp: target.qp.clone(),
        srq: srq.clone(),
        ids: vec![target.id.clone(), server.id.clone()],
        channels: vec![Arc::clone(&target.channel), Arc::clone(&server.channel)],
        done,
    });
    let next = |what: &str, wanted: &dyn Fn(&Taken) -> bool| loop {
        let one = taken.recv_timeout(LIMIT);
        let one = one.unwrap_or_else(|_| panic!("{what} did not arrive"));
        if wanted(&one) {
            return one;
        }
    };
    let of_connection = |kind| move |t: &Taken| matches!(t, Taken::Connection(e) if e.kind == kind);
    busy.wake_by_ref();
    for round in 0..3 {
        srq.set_limit(15).unwrap();
        client.post(round, SendOp::Send, &[]);
        client.expect_status(round, WcStatus::Success);
        // The completion and the limit event may come in either order.
        let (mut limit, mut completion) = (false, false);
        while !(limit && completion) {
            match next("a completion or an event", &|_| true) {
                Taken::Completion(cqe) => completion = cqe.status == WcStatus::Success,
                Taken::Device(e) => {
                    limit |=
                        matches!(e.kind, AsyncEventKind::SrqLimitReached(of) if of.is_same(&srq));
                }
                Taken::Connection(e) => panic!("{e:?}"),
            }
        }
    }
    let other = End::new(V4, &config());
    other.connect(server.address, b"");
    let request = next("a request", &of_connection(CmEventKind::ConnectRequest));
    let Taken::Connection(request) = request else {
        unreachable!()
    };
    request.id.reject(b"no").unwrap();
    other.expect(CmEventKind::Rejected);
    client.qp.disconnect();
    next("the end", &of_connection(CmEventKind::Disconnected));
    next(
        "the event TimewaitExit",
        &of_connection(CmEventKind::TimewaitExit),
    );
}

#[derive(Default)]
struct Counts(AtomicU32);

impl Wake for Counts {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

fn poll_once<F: Future>(future: F, waker: &Waker) -> bool {
    pin!(future)
        .poll(&mut TaskContext::from_waker(waker))
        .is_ready()
}

/// A task that waits for several events drops the futures that are not ready, and creates new
/// futures at the next poll. The wakers of dropped futures must be removed, because each poll would
/// use more memory otherwise.
#[test]
fn dropped_waits_leave_no_waker_behind() {
    let end = End::new(V4, &config());
    let polls: [&dyn Fn(&Waker); 3] = [
        &|w| assert!(!poll_once(end.channel.recv(), w)),
        &|w| assert!(!poll_once(end.ctx.async_events().recv(), w)),
        &|w| {
            let mut out = [Cqe::default()];
            assert!(!poll_once(end.cq.completions(&mut out), w));
        },
    ];
    for poll in polls {
        let task = Arc::new(Counts::default());
        let waker = Waker::from(Arc::clone(&task));
        for _ in 0..100 {
            poll(&waker);
            let other = Arc::new(Counts::default());
            poll(&Waker::from(Arc::clone(&other)));
            assert_eq!(Arc::strong_count(&other), 1);
        }
        assert_eq!(
            Arc::strong_count(&task),
            2,
            "the test's handle and the waker's"
        );
    }
    // A future that is polled many times registers one waker. After a wake-up, it has no registered
    // waker.
    let task = Arc::new(Counts::default());
    let waker = Waker::from(Arc::clone(&task));
    let mut wait = pin!(end.channel.recv());
    for _ in 0..100 {
        let poll = wait.as_mut().poll(&mut TaskContext::from_waker(&waker));
        assert!(poll.is_pending());
    }
    assert_eq!(Arc::strong_count(&task), 3);
    end.id.resolve_addr(None, (V4, 1).into()).unwrap();
    assert_eq!(task.0.load(Ordering::Relaxed), 1);
    assert_eq!(Arc::strong_count(&task), 2);
}

#[test]
fn wait_without_room_is_refused() {
    let _watchdog = Watchdog::new();
    let (client, target) = pair(V4, &config());
    target.post_recv(1, &[]);
    client.post(2, SendOp::Send, &[]);
    client.expect_status(2, WcStatus::Success);
    let refused = |r: iwarp::Result<usize>| assert!(matches!(r, Err(Error::InvalidArgument(_))));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let limit = tokio::time::timeout(LIMIT, target.cq.completions(&mut []));
        refused(limit.await.expect("the call should have failed"));
        let channel = Watched::new(target.ctx.create_channel().unwrap()).unwrap();
        let limit = tokio::time::timeout(LIMIT, channel.completions(&target.cq, &mut []));
        refused(limit.await.expect("the call should have failed"));
    });
    refused(target.cq.wait(&mut [], None));
    target.expect_status(1, WcStatus::Success);
}

/// `Duration::MAX` from now overflows the clock. As a timeout it means "no limit", and must not
/// panic.
#[test]
fn maximum_duration_is_valid_timeout() {
    const LONGEST: Option<Duration> = Some(Duration::MAX);
    let _watchdog = Watchdog::new();
    let ctx = context(V4, &config());
    let pd = iwarp::verbs::ProtectionDomain::new(&ctx);
    let listener = cm::ListeningId::bind(&ctx, (V4, 0).into()).unwrap();
    let address = listener.local_addr();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let cq = ctx.create_cq(16, None).unwrap();
            let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq)).unwrap();
            let connection = cm::Connector::new(&ctx).connect(address, qp).unwrap();
            let send = iwarp::verbs::SendWr::inline(1, &[b"x"]).signaled();
            connection.post_send(&[send]).unwrap();
            assert_eq!(cq.wait(&mut [Cqe::default()], LONGEST).unwrap(), 1);
            // An access to memory that is not granted: the peer's program gets an asynchronous
            // event.
            let op = SendOp::Write {
                remote_addr: 0,
                rkey: 0,
            };
            let write = iwarp::verbs::SendWr {
                op,
                ..iwarp::verbs::SendWr::inline(2, &[b"x"])
            };
            connection.post_send(&[write]).unwrap();
            let ended = connection.wait_disconnected(LONGEST);
            assert!(matches!(ended, Err(Error::ConnectionLost(_))), "{ended:?}");
        });
        let request = listener.accept(LONGEST).unwrap();
        let channel = ctx.create_channel().unwrap();
        let cq = ctx.create_cq(16, Some(&channel)).unwrap();
        let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq)).unwrap();
        let mr = pd.reg_mr(64, iwarp::Access::LOCAL_WRITE).unwrap();
        let sges = [mr.sge(..).unwrap()];
        qp.post_recv(&[RecvWr {
            wr_id: 1,
            sges: &sges,
        }])
        .unwrap();
        cq.arm(false);
        let connection = request.accept(qp, &Default::default()).unwrap();
        assert!(channel.event(LONGEST).unwrap().is_same(&cq));
        assert_eq!(cq.wait(&mut [Cqe::default()], LONGEST).unwrap(), 1);
        let event = ctx.async_event(LONGEST).unwrap();
        assert!(matches!(event.kind, AsyncEventKind::QpAccessError(_)));
        connection.disconnect().unwrap();
    });
    // This timeout is also valid for events of an unconnected identifier.
    let events = create_event_channel().unwrap();
    let pd = ctx.allocate_pd();
    let cq = ctx.create_cq(1, None).unwrap();
    let qp = queue_pair(&ctx, pd, &cq, None, 1);
    let id = iwarp::runtime::cm::CmId::create(&events, Some(&ctx));
    id.resolve_addr(None, address).unwrap();
    assert_eq!(
        events.next(LONGEST).unwrap().kind,
        CmEventKind::AddrResolved
    );
    qp.destroy();
    id.destroy();
}
