//! One execution: programs that poll, compute and wait, peers that send to them, and the
//! invariants.
//!
//! In any order of the threads, every message is delivered to its program. A message is processed
//! without delay unless a program's lease covers its socket, and at the latest when the lease ends.
//! Timers are not late. If a thread is not woken and sleeps forever, the scheduler reports a
//! deadlock.

use crate::engine::{Engine, Source};
use crate::queue::{Queue, Socket};
use crate::schedule::Order;
use crate::sync::parking::Mutex;
use crate::sys::poller::AsFd as _;
use crate::world::{self, Plant};
use shuttle::{Config, FailurePersistence, Runner, thread};
use std::collections::HashMap;
use std::sync::Arc;

/// How long the progress thread may ignore sockets that other threads are driving (`CONTENDED` of
/// the engine).
const CONTENDED: u64 = 50_000;
/// Longest lease after the last poll (`LONGEST` of `engine/lease.rs`).
const LONGEST: u64 = 2_000_000;
/// Tolerance, because reading the clock takes time.
const SLACK: u64 = 5_000;
/// The kind of the timers.
const ALARM: u32 = 1;

/// Runs one execution of a seed. Panics, and prints the seed, if an invariant is violated.
pub fn run(seed: u64, plant: Option<Plant>) {
    let mut config = Config::new();
    config.failure_persistence = FailurePersistence::None;
    config.silence_warnings = true;
    let passed = std::panic::catch_unwind(|| {
        Runner::new(Order::new(seed), config).run(move || execution(plant));
    });
    if let Err(panic) = passed {
        if plant.is_none() {
            eprintln!("seed {seed} failed; IWARP_THREADS_SEED={seed} runs it alone");
        }
        std::panic::resume_unwind(panic);
    }
}

/// The objects whose invariants are checked whenever the time advances.
#[derive(Default)]
struct Checked {
    sockets: Mutex<Vec<Arc<Socket>>>,
    queues: Mutex<Vec<Arc<Queue>>>,
    alarms: Mutex<Vec<u64>>,
    /// For each socket with a message that no lease covers, the time since which that is so.
    unleased_since: Mutex<HashMap<usize, u64>>,
}

impl Checked {
    /// Called when all threads sleep until `wake_time`. Checks that they may sleep that long.
    fn check(&self, wake_time: u64) {
        let now = world::now();
        let mut unleased_since = self.unleased_since.lock();
        for socket in &*self.sockets.lock() {
            socket.check();
            if !socket.is_readable() {
                unleased_since.remove(&socket.number());
            } else {
                let lease = socket.lease(now);
                let longest = world::last_poll() + LONGEST;
                assert!(
                    lease.is_none_or(|end| end <= longest),
                    "a lease lasts too long"
                );
                if lease.is_some() {
                    unleased_since.remove(&socket.number());
                }
                let until = lease.unwrap_or_else(|| {
                    let since = unleased_since.entry(socket.number()).or_insert(now);
                    *since + CONTENDED
                });
                assert!(
                    wake_time <= until + SLACK,
                    "a message is processed {} ns too late",
                    wake_time - until
                );
            }
        }
        self.queues.lock().iter().for_each(|queue| queue.check());
        for at in &*self.alarms.lock() {
            assert!(wake_time <= at + SLACK, "a timer is late");
        }
    }
}

/// Advances the time whenever no other thread can run.
fn run_clock(checked: &Checked) {
    loop {
        match world::first_wake_time() {
            Some(wake_time) => {
                checked.check(wake_time);
                world::spend(wake_time.saturating_sub(world::now()));
                thread::yield_now();
            }
            // All threads sleep without a time limit. Only an event can wake one.
            None => thread::park(),
        }
    }
}

/// A source that only has timers.
struct Timers {
    checked: Arc<Checked>,
}

impl Source for Timers {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        false
    }

    fn timer(self: Arc<Self>, _: u32) {
        let mut alarms = self.checked.alarms.lock();
        let now = world::now();
        let first = alarms.iter().enumerate().min_by_key(|(_, at)| **at);
        let first = first.map(|(index, at)| (index, *at));
        let (index, at) = first.expect("a timer that was set");
        assert!(at <= now, "a timer is early");
        alarms.swap_remove(index);
    }
}

impl Timers {
    fn set(&self, engine: &Engine, token: u64, delay: u64) {
        let at = world::now() + delay;
        self.checked.alarms.lock().push(at);
        engine.at(at, token, ALARM);
    }
}

/// Computes for a random time, 20 µs to 20 µs plus `max_extra`, without polling.
fn compute(max_extra: u64) {
    let end = world::now() + 20_000 + world::random(max_extra);
    world::sleep_until(Some(end), || false);
}

/// Polls a few times, or often enough to earn a lease. Posts requests between the polls.
fn poll_burst(queue: &Arc<Queue>) {
    let pause = 5_000 + world::random(40_000);
    let polls = match world::random(64) {
        0..16 => world::random(6),
        // It takes 32 ms of polling to earn the longest lease.
        16 => 1000,
        _ => 30 + world::random(60),
    };
    for _ in 0..polls {
        if queue.is_over() {
            return;
        }
        if world::random(2) == 0 {
            queue.post();
        }
        queue.poll();
        world::spend(pause);
    }
    if world::random(6) == 0 {
        // With one more socket, polls may query the epoll set instead of each socket.
        Socket::connect(queue, 1);
        compute(500_000);
    }
}

/// Runs a program until it has polled all completions of its queue.
fn run_program(queue: &Arc<Queue>, set_timer: &dyn Fn(u64)) {
    while !queue.is_over() {
        match world::random(8) {
            0..3 => queue.wait(),
            3 => compute(4_000_000),
            4 => set_timer(10_000 + world::random(3_000_000)),
            _ => poll_burst(queue),
        }
    }
}

/// Runs peers that send `count` messages to each socket.
fn run_peers(sockets: &[Arc<Socket>], count: usize) {
    let mut remaining = vec![count; sockets.len()];
    while remaining.iter().any(|n| *n > 0) {
        let i = world::random(sockets.len() as u64) as usize;
        if remaining[i] == 0 {
            continue;
        }
        remaining[i] -= 1;
        sockets[i].receive();
        let pause = match world::random(6) {
            0..3 => 0,
            3 => world::random(20_000),
            4 => world::random(500_000),
            _ => world::random(5_000_000),
        };
        let wake_time = world::now() + pause;
        world::sleep_until(Some(wake_time), || false);
    }
}

fn execution(plant: Option<Plant>) {
    world::begin(plant);
    let checked = Arc::new(Checked::default());
    // Must be the first task: the scheduler identifies it by its number (`CLOCK_TASK`).
    let for_clock = Arc::clone(&checked);
    world::spawn_detached(move || run_clock(&for_clock));

    let engines = 1 + world::random(2) as usize;
    let first = Engine::current().expect("the world has no limits");
    if engines > 1 {
        // Count 16 connections of this engine, so that the next connection starts another engine.
        (0..16).for_each(|_| first.connection_added());
    }
    let timers = Arc::new(Timers {
        checked: Arc::clone(&checked),
    });
    let token = first.token();
    first.add_timed(token, Arc::clone(&timers) as Arc<dyn Source>);

    let messages = 1 + world::random(6) as usize;
    let mut threads = Vec::new();
    let mut sockets = Vec::new();
    for _ in 0..=world::random(2) {
        let socket_count = 1 + world::random(4) as usize;
        let queue = Queue::new(messages * socket_count);
        checked.queues.lock().push(Arc::clone(&queue));
        for _ in 0..socket_count {
            let socket = Socket::connect(&queue, engines);
            checked.sockets.lock().push(Arc::clone(&socket));
            sockets.push(socket);
        }
        for _ in 0..=world::random(2) {
            let (queue, timers, engine) =
                (Arc::clone(&queue), Arc::clone(&timers), Arc::clone(&first));
            threads.push(thread::spawn(move || {
                run_program(&queue, &|delay| timers.set(&engine, token, delay));
            }));
        }
    }
    threads.push(thread::spawn(move || run_peers(&sockets, messages)));
    for thread in threads {
        thread.join().expect("the thread did not panic");
    }
}
