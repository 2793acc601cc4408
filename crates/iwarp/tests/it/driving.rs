//! Tests of which thread drives a connection (ARCHITECTURE.md, "Which thread drives"). Connections
//! must be served while the program polls, after it has stopped polling, after it has armed its
//! completion queue, and while it waits, in any order. The tests do not check times. If a wake-up
//! is lost, a test hangs, and the watchdog aborts it.

use crate::common;
use crate::common::wire::{Hello, initiator};
use crate::common::{End, LIMIT, Mem, Server, V4, Watchdog, config, pair, queue_pair, until};
use iwarp::runtime::cm::{CmEventKind, CmId};
use iwarp::runtime::{CompletionChannel, CompletionQueue, Context, create_event_channel};
use iwarp::verbs::{
    Cqe, ProtectionDomain, QpInitAttr, RecvWr, SendOp, SendWr, Sge, State, WcStatus, cm,
};
use std::io::Read;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

const SOON: Option<Duration> = Some(Duration::from_secs(20));

/// Writes `value`, 8 octets, from `mine` to `theirs`, and polls until the Write is complete.
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
fn target_without_polls_is_served() {
    let _watchdog = Watchdog::new();
    let (client, server) = pair(V4, &config());
    let (mine, theirs) = (client.mem(64), server.mem(64));
    for round in 1..20u64 {
        // The target polls long enough that the progress thread stops watching its socket.
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
        // From here on no thread polls the target's queue.
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

/// Requests that are posted in quick succession may be delayed, so that one system call sends
/// several. A timer ends the delay. If a connection ends while the timer runs, the timer must be
/// set again for the queue pair's next connection.
#[test]
fn second_connection_sends_delayed_requests() {
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
        // A client sends reminders (empty Writes) to a silent responder, which would also send the
        // delayed requests. The responder's answer ends them.
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
            // No thread polls the client's queue, so only the timer can send the rest.
            until("the last Write is placed", || {
                theirs.word(0) == value << 8 | 4
            });
        } else {
            client.qp.abort();
        }
        // The first Writes may still be on their way to this memory.
        target.qp.destroy();
        target.ctx.deregister(theirs.stag).unwrap();
        client.id.destroy();
        client.qp.modify(State::Reset).unwrap();
        client.channel = create_event_channel().unwrap();
        client.id = CmId::create(&client.channel, Some(&client.ctx));
    }
}

/// A program with many queue pairs finds a completion at each poll, so its polls never reach the
/// sockets of its other queue pairs. The progress thread has to serve those.
#[test]
fn busy_target_is_served() {
    let _watchdog = Watchdog::new();
    let server = Server::new(V4, &config());
    let (mut wire, target) = initiator(&server, &Hello::enhanced(true, false));
    let (sink, busy) = initiator(&server, &Hello::enhanced(true, false));
    // With this many queue pairs, a poll of the completion queue polls the `epoll` set instead of
    // each socket.
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
            // The peer reads and discards everything.
            let mut octets = vec![0; 1 << 16];
            while (&sink.socket).read(&mut octets).unwrap() > 0 {}
        });
        scope.spawn(|| {
            let begin = Instant::now();
            while !done.load(Ordering::Relaxed) && begin.elapsed() < LIMIT {
                busy.post(1, op, &[from.sge(8)]);
                busy.expect_status(1, WcStatus::Success);
                // The program computes between posts, because posts in quick succession would be
                // delayed.
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

/// At first Linux limits a TCP segment to half of the peer's initial window. On loopback, segments
/// become twice as large when the window has grown. FPDUs must grow with them.
#[test]
fn fpdus_grow_with_segments() {
    //= rfc5041 section 3
    //= type=test
    //# 1. LLPs MUST expose MULPDU and MULPDU changes.
    //= rfc5044 section 3
    //= type=test
    //# MPA MUST provide information to DDP on the current maximum size of the
    //# record that is acceptable to send (MULPDU).
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
    // The last Write may still be on its way to this memory.
    server.qp.destroy();
    server.ctx.deregister(theirs.stag).unwrap();
    let (first, last) = (fpdus[0], fpdus[fpdus.len() - 1]);
    assert!(last <= first, "{fpdus:?}");
    let mtu = std::fs::read_to_string("/sys/class/net/lo/mtu").unwrap();
    if mtu.trim() == "65536" {
        // An FPDU carries at most 64,752 octets of payload. If the socket accepts only a part of a
        // plan, the next FPDU is shorter, so some Writes may need one FPDU more.
        assert_eq!(fpdus.iter().min(), Some(&17), "{fpdus:?}");
    }
}

/// A client and a server that use the safe interface. The server's completion queue has a
/// completion channel.
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

    /// Sends `n` messages to a server that answers each of them. The server waits for completions
    /// with `wait`. No Send is signaled, so each takes a slot of its own.
    fn run(&self, n: u64, wait: impl Fn(&CompletionQueue, &mut [Cqe]) -> usize + Sync) {
        let listener = cm::ListeningId::bind(&self.ctx, "127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let cq = self.ctx.create_cq(64, Some(&self.channel)).unwrap();
                let mr = self.pd.reg_mr(64, iwarp::Access::LOCAL_WRITE).unwrap();
                let attr = QpInitAttr::new(&cq, &cq).cap(n as u32, 2);
                let qp = self.pd.create_qp(&attr).unwrap();
                let sges = [mr.sge(..).unwrap()];
                let recv = RecvWr {
                    wr_id: 1,
                    sges: &sges,
                };
                qp.post_recv(&[recv, recv]).unwrap();
                let request = listener.accept(SOON).unwrap();
                let connection = request.accept(qp, &Default::default()).unwrap();
                let mut done = [Cqe::default(); 4];
                let mut answered = 0;
                while answered < n {
                    let count = wait(&cq, &mut done);
                    for _ in done[..count].iter().filter(|c| c.wr_id == 1) {
                        connection.post_recv(&[recv]).unwrap();
                        let answer = SendWr::inline(2, &[b"pong"]);
                        connection.post_send(&[answer]).unwrap();
                        answered += 1;
                    }
                }
                // Dropping the connection would flush the last answer. Disconnecting sends it
                // first.
                drop(connection.disconnect());
            });
            let cq = self.ctx.create_cq(64, None).unwrap();
            let mr = self.pd.reg_mr(64, iwarp::Access::LOCAL_WRITE).unwrap();
            let attr = QpInitAttr::new(&cq, &cq).cap(n as u32, 2);
            let qp = self.pd.create_qp(&attr).unwrap();
            let sges = [mr.sge(..).unwrap()];
            let recv = RecvWr {
                wr_id: 1,
                sges: &sges,
            };
            qp.post_recv(&[recv]).unwrap();
            let connection = cm::Connector::new(&self.ctx).connect(address, qp).unwrap();
            let mut done = [Cqe::default()];
            for i in 0..n {
                // After a pause of this length, the server no longer polls, and has to sleep.
                if i % 97 == 96 {
                    std::thread::sleep(Duration::from_millis(2));
                }
                let ping = SendWr::inline(2, &[b"ping"]);
                connection.post_send(&[ping]).unwrap();
                assert_eq!(cq.wait(&mut done, SOON).unwrap(), 1);
                assert_eq!((done[0].wr_id, done[0].status), (1, WcStatus::Success));
                if i + 1 < n {
                    connection.post_recv(&[recv]).unwrap();
                }
            }
        });
    }
}

const ROUNDS: u64 = 1500;

/// Waits for completions as verbs programs do: polls, arms the completion queue, polls again for
/// completions that arrived in between, and calls `wait`.
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
fn completion_events_by_blocking_calls() {
    let _watchdog = Watchdog::new();
    let echo = Echo::new();
    echo.run(ROUNDS, |cq, done| {
        by_events(cq, done, || {
            echo.channel.event(SOON).unwrap();
        })
    });
}

#[test]
fn completion_events_by_watching_the_descriptor() {
    let _watchdog = Watchdog::new();
    let echo = Echo::new();
    echo.run(ROUNDS, |cq, done| {
        by_events(cq, done, || {
            // This thread waits without calling the library, so only the descriptor can wake it.
            until("an event", || echo.channel.try_event().is_some());
        })
    });
}

#[test]
fn alternating_polls_and_blocking_waits() {
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

/// With fewer processors than threads, the peer of a polling thread may need the same processor. In
/// this test the polls take less than a time slice, so the other thread runs only if the polls
/// yield the processor.
#[test]
fn polling_thread_yields_its_processor() {
    const POLLS: u32 = 3200;
    const THREADS: u32 = 20;
    let _watchdog = Watchdog::new();
    let ctx = common::context(V4, &config());
    let cq = ctx.create_cq(1, None).unwrap();
    // The polling thread and its peer are pinned to one processor; the test's other threads are
    // not. Each polling thread is new, so it has not yet observed other work on this processor.
    let turns: u32 = (0..THREADS)
        .map(|_| {
            std::thread::scope(|scope| {
                let pinned = scope.spawn(|| turns_between_polls(&cq, POLLS));
                pinned.join().unwrap()
            })
        })
        .sum();
    // A thread yields after 64 polls, and less often if there is other work. Without yielding, the
    // other thread nearly always runs only after the last poll.
    assert!(turns >= 2 * THREADS, "{turns} turns of {THREADS} threads");
}

/// Polls in one thread while another thread on the same processor reads the number of polls.
/// Returns how many different numbers the other thread has read.
fn turns_between_polls(cq: &CompletionQueue, all: u32) -> u32 {
    on_one_processor();
    let polls = AtomicU32::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for poll in 1..=all {
                assert_eq!(cq.poll(&mut [Cqe::default()]), Ok(0));
                polls.store(poll, Ordering::Relaxed);
            }
        });
        let (mut turns, mut last) = (0, 0);
        while last < all {
            let now = polls.load(Ordering::Relaxed);
            turns += u32::from(now != last);
            last = now;
            std::thread::yield_now();
        }
        turns
    })
}

/// Pins the calling thread to the first processor that it may use.
fn on_one_processor() {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let allowed = sched_getaffinity(None).unwrap();
    let mut one = CpuSet::new();
    one.set((0..CpuSet::MAX_CPU).find(|&i| allowed.is_set(i)).unwrap());
    sched_setaffinity(None, &one).unwrap();
}
