//! Who drives: connections are served when the program polls, when it stops polling without a word, when it arms its queue,
//! and when it waits, in any order. No test asserts a time; a wake-up that is lost is a test that does not end.

mod common;

use common::wire::{Hello, initiator};
use common::{End, LIMIT, Mem, Server, V4, Watchdog, config, pair, queue_pair, until};
use iwarp::raw::CompletionChannel;
use iwarp::raw::cm::{CmEventKind, CmId, create_event_channel};
use iwarp::raw::{CompletionQueue, Context};
use iwarp::{Cqe, ProtectionDomain, RecvWr, SendOp, SendWr, Sge, State, WcStatus, cm};
use std::io::Read;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

const SOON: Option<Duration> = Some(Duration::from_secs(20));

/// One Write of 8 octets from `from` to `to`, polled to its completion.
fn write(from: &End, mine: &Mem, theirs: &Mem, value: u64) {
    mine.set(0, value);
    let op = SendOp::Write {
        remote_addr: theirs.addr(),
        rkey: theirs.stag,
    };
    from.post(value, op, &[mine.sge(8)]);
    from.expect_status(value, WcStatus::Success);
}

#[test]
fn a_target_that_stops_polling_is_served() {
    let _watchdog = Watchdog::new();
    let (client, server) = pair(V4, &config());
    let (mine, theirs) = (client.mem(64), server.mem(64));
    for round in 1..20u64 {
        // Long enough that the engine lets the socket rest.
        let polling = AtomicBool::new(true);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut none = [Cqe::default()];
                while polling.load(Ordering::Relaxed) {
                    assert_eq!(server.cq.poll(&mut none).unwrap(), 0);
                }
            });
            for i in 0..200 {
                write(&client, &mine, &theirs, round << 32 | i);
            }
            polling.store(false, Ordering::Relaxed);
        });
        // From here on nobody polls there.
        let value = round << 32 | 0xffff;
        write(&client, &mine, &theirs, value);
        until("the target is served", || theirs.word(0) == value);
        let read = SendOp::Read {
            remote_addr: theirs.addr(),
            rkey: theirs.stag,
        };
        let back = client.mem(8);
        client.post(1, read, &[back.sge(8)]);
        client.expect_status(1, WcStatus::Success);
        assert_eq!(back.word(0), value);
    }
}

/// What is posted in quick succession may wait for more, but not for ever: the timer that ends the wait is set anew after a
/// connection has ended while it ran.
#[test]
fn what_is_put_off_is_sent_on_the_second_connection_too() {
    let _watchdog = Watchdog::new();
    let server = Server::new(V4, &config());
    let mut client = End::new(V4, &config());
    let mine = client.mem(64);
    for value in 1..=2u64 {
        client.connect(server.address, b"");
        let target = server.accept();
        target.expect(CmEventKind::Established);
        client.expect(CmEventKind::Established);
        let theirs = target.mem(64);
        // An answer, so that nothing reminds the peer of us any more.
        let read = SendOp::Read {
            remote_addr: theirs.addr(),
            rkey: theirs.stag,
        };
        client.post(9, read, &[mine.sge(8)]);
        client.expect_status(9, WcStatus::Success);
        for i in 0..5 {
            mine.set(i as usize, value << 8 | i);
            let op = SendOp::Write {
                remote_addr: theirs.addr(),
                rkey: theirs.stag,
            };
            let from = Sge {
                addr: mine.addr() + 8 * i,
                ..mine.sge(8)
            };
            client.post(i, op, &[from]);
        }
        if value == 2 {
            // Nobody polls.
            until("all of it", || theirs.word(0) == value << 8 | 4);
        } else {
            client.qp.abort();
        }
        // The first of them may still be on their way to this memory.
        target.qp.destroy();
        target.ctx.deregister(theirs.stag).unwrap();
        client.id.destroy();
        client.qp.modify(State::Reset).unwrap();
        client.channel = create_event_channel().unwrap();
        client.id = CmId::create(&client.channel, Some(&client.ctx));
    }
}

/// A program with many queue pairs that finds a completion of its own with each poll, and never polls in vain.
#[test]
fn a_target_that_is_busy_with_its_own_completions_is_served() {
    let _watchdog = Watchdog::new();
    let server = Server::new(V4, &config());
    let (mut wire, target) = initiator(&server, &Hello::enhanced(true, false));
    let (sink, busy) = initiator(&server, &Hello::enhanced(true, false));
    // So many that polling one queue means polling the whole set.
    let others: Vec<_> = (0..4)
        .map(|_| queue_pair(&busy.ctx, busy.pd, &busy.cq, None, 1))
        .collect();
    let (from, to) = (busy.mem(64), target.mem(64));
    let op = SendOp::Write {
        remote_addr: 0,
        rkey: 1,
    };
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The peer takes everything and looks at nothing.
            let mut octets = vec![0; 1 << 16];
            while (&sink.socket).read(&mut octets).unwrap() > 0 {}
        });
        scope.spawn(|| {
            let begin = Instant::now();
            while !done.load(Ordering::Relaxed) && begin.elapsed() < LIMIT {
                busy.post(1, op, &[from.sge(8)]);
                busy.expect_status(1, WcStatus::Success);
                // It computes for a moment, so that no post is a part of a burst and waits for others.
                let pause = Instant::now();
                while pause.elapsed() < Duration::from_micros(5) {
                    std::hint::spin_loop();
                }
            }
            busy.qp.disconnect();
        });
        let begin = Instant::now();
        let mut served = 0;
        while served < 50 && begin.elapsed() < LIMIT / 2 {
            wire.write_op(to.stag, to.addr(), &(served + 1u64).to_ne_bytes());
            while to.word(0) == served && begin.elapsed() < LIMIT / 2 {
                std::thread::sleep(Duration::from_millis(1));
            }
            served = to.word(0);
        }
        done.store(true, Ordering::Relaxed);
        assert_eq!(served, 50, "the target was not served");
    });
    target.qp.destroy();
    target.ctx.deregister(to.stag).unwrap();
    for qp in others {
        qp.destroy();
    }
}

/// Linux begins with segments of half the peer's first window, and loopback's are twice as large once the window has opened.
#[test]
fn fpdus_grow_with_the_segments_of_the_stream() {
    const LEN: u32 = 1 << 20;
    let _watchdog = Watchdog::new();
    let (client, server) = pair(V4, &config());
    let (mine, theirs) = (client.mem(LEN as usize), server.mem(LEN as usize));
    let op = SendOp::Write {
        remote_addr: theirs.addr(),
        rkey: theirs.stag,
    };
    let fpdus: Vec<u64> = (0..40)
        .map(|i| {
            let before = client.qp.counters().tx_fpdus;
            client.post(i, op, &[mine.sge(LEN)]);
            client.expect_status(i, WcStatus::Success);
            client.qp.counters().tx_fpdus - before
        })
        .collect();
    // The last one may still be on its way to this memory.
    server.qp.destroy();
    server.ctx.deregister(theirs.stag).unwrap();
    let (first, last) = (fpdus[0], fpdus[fpdus.len() - 1]);
    assert!(last <= first, "{fpdus:?}");
    let mtu = std::fs::read_to_string("/sys/class/net/lo/mtu").unwrap();
    if mtu.trim() == "65536" {
        // Payload of 64,752 octets at most.
        assert_eq!(last, 17, "{fpdus:?}");
    }
}

/// A connection through the safe interface: server's and client's end, the server's queues with a channel.
struct Echo {
    ctx: Context,
    pd: ProtectionDomain,
    channel: CompletionChannel,
}

impl Echo {
    fn new() -> Self {
        let ctx = common::context(V4, &config());
        Self {
            pd: ProtectionDomain::new(&ctx),
            channel: ctx.create_channel().unwrap(),
            ctx,
        }
    }

    /// Answers `n` messages, waiting for each with `wait`.
    fn run(&self, n: u64, wait: impl Fn(&CompletionQueue, &mut [Cqe]) -> usize + Sync) {
        let listener = cm::Listener::bind(&self.ctx, "127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let cq = self.ctx.create_cq(64, Some(&self.channel)).unwrap();
                let mr = self.pd.allocate(64, iwarp::Access::LOCAL_WRITE).unwrap();
                let qp = self.pd.queue_pair().build(&cq, &cq).unwrap();
                let sges = [mr.sge(..).unwrap()];
                let recv = RecvWr {
                    wr_id: 1,
                    sges: &sges,
                };
                qp.post_recv(&[recv, recv]).map_err(|e| e.1).unwrap();
                let request = listener.accept(SOON).unwrap();
                let connection = request.accept(qp, &Default::default()).unwrap();
                let mut done = [Cqe::default(); 4];
                let mut answered = 0;
                while answered < n {
                    let count = wait(&cq, &mut done);
                    for _ in done[..count].iter().filter(|c| c.wr_id == 1) {
                        connection.post_recv(&[recv]).map_err(|e| e.1).unwrap();
                        let answer = SendWr::inline(2, &[b"pong"]);
                        connection.post_send(&[answer]).map_err(|e| e.1).unwrap();
                        answered += 1;
                    }
                }
                // Gone before the client is satisfied, the last answer would be flushed.
                drop(connection.disconnect());
            });
            let cq = self.ctx.create_cq(64, None).unwrap();
            let mr = self.pd.allocate(64, iwarp::Access::LOCAL_WRITE).unwrap();
            let qp = self.pd.queue_pair().build(&cq, &cq).unwrap();
            let sges = [mr.sge(..).unwrap()];
            let recv = RecvWr {
                wr_id: 1,
                sges: &sges,
            };
            qp.post_recv(&[recv]).map_err(|e| e.1).unwrap();
            let connection = cm::Connector::new(&self.ctx).connect(address, qp).unwrap();
            let mut done = [Cqe::default()];
            for i in 0..n {
                // Now and then a pause, after which the server waits in earnest.
                if i % 97 == 96 {
                    std::thread::sleep(Duration::from_millis(2));
                }
                let ping = SendWr::inline(2, &[b"ping"]);
                connection.post_send(&[ping]).map_err(|e| e.1).unwrap();
                assert_eq!(cq.wait(&mut done, SOON).unwrap(), 1);
                assert_eq!((done[0].wr_id, done[0].status), (1, WcStatus::Success));
                if i + 1 < n {
                    connection.post_recv(&[recv]).map_err(|e| e.1).unwrap();
                }
            }
        });
    }
}

const ROUNDS: u64 = 1500;

/// As programs do it: poll, arm, poll what came before, wait for the event.
fn by_events(cq: &CompletionQueue, done: &mut [Cqe], wait: impl Fn()) -> usize {
    loop {
        for arm in [true, false] {
            let n = cq.poll(done).unwrap();
            if n > 0 {
                return n;
            }
            if arm {
                cq.arm(false);
            }
        }
        wait();
    }
}

#[test]
fn blocking_waits() {
    let _watchdog = Watchdog::new();
    Echo::new().run(ROUNDS, |cq, done| cq.wait(done, SOON).unwrap());
}

#[test]
fn events_taken_in_the_usual_loop() {
    let _watchdog = Watchdog::new();
    let echo = Echo::new();
    echo.run(ROUNDS, |cq, done| {
        by_events(cq, done, || {
            echo.channel.event(SOON).unwrap();
        })
    });
}

#[test]
fn events_seen_by_watching_the_descriptor() {
    let _watchdog = Watchdog::new();
    let echo = Echo::new();
    echo.run(ROUNDS, |cq, done| {
        by_events(cq, done, || {
            // The library does not know that this thread waits.
            until("an event", || echo.channel.try_event().is_some());
        })
    });
}

#[test]
fn now_polling_now_waiting() {
    let _watchdog = Watchdog::new();
    let turn = AtomicU32::new(0);
    Echo::new().run(ROUNDS, |cq, done| {
        if turn.fetch_add(1, Ordering::Relaxed) % 100 < 50 {
            let mut n = 0;
            until("a completion", || {
                n = cq.poll(done).unwrap();
                n > 0
            });
            n
        } else {
            cq.wait(done, SOON).unwrap()
        }
    });
}

/// Where there are fewer processors than threads, the peer that a polling thread waits for may need its processor. Nothing but
/// the polls themselves gives it away here: they take less time than the scheduler leaves a thread alone.
#[test]
fn a_thread_that_polls_offers_its_processor() {
    const POLLS: u32 = 3200;
    let _watchdog = Watchdog::new();
    let ctx = common::context(V4, &config());
    let cq = ctx.create_cq(1, None).unwrap();
    let polls = AtomicU32::new(0);
    // A thread of its own: its affinity is inherited by those that it starts, and ends with it.
    let turns = std::thread::scope(|scope| {
        let pinned = scope.spawn(|| {
            on_one_processor();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for poll in 1..=POLLS {
                        assert_eq!(cq.poll(&mut [Cqe::default()]), Ok(0));
                        polls.store(poll, Ordering::Relaxed);
                    }
                });
                let (mut turns, mut last) = (0, 0);
                while last < POLLS {
                    let now = polls.load(Ordering::Relaxed);
                    turns += u32::from(now != last);
                    last = now;
                    std::thread::yield_now();
                }
                turns
            })
        });
        pinned.join().unwrap()
    });
    // One for every 16 polls, and a few less if the scheduler has other plans.
    assert!(turns >= POLLS / 16 / 4, "{turns} turns");
}

/// Pins the calling thread to the first processor that it may use.
fn on_one_processor() {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let allowed = sched_getaffinity(None).unwrap();
    let mut one = CpuSet::new();
    one.set((0..CpuSet::MAX_CPU).find(|&i| allowed.is_set(i)).unwrap());
    sched_setaffinity(None, &one).unwrap();
}
