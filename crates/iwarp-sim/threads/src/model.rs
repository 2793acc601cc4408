//! One execution: programs that poll, work and wait, peers that send to them, and the invariants.
//!
//! In any order of the threads, all messages reach their programs. A message that no program's
//! lease covers is processed without delay, and a message that a lease covers is processed when the
//! lease ends. Timers are not late. A thread that sleeps forever because it is not woken is a
//! deadlock, which the scheduler reports.

use crate::engine::{Engine, Source};
use crate::queue::{Queue, Socket};
use crate::schedule::Order;
use crate::sync::parking::Mutex;
use crate::sys::poller::AsFd as _;
use crate::world::{self, Plant};
use shuttle::{Config, FailurePersistence, Runner, thread};
use std::collections::HashMap;
use std::sync::Arc;

/// How long the progress thread may leave sockets that other threads are driving (`CONTENDED` of
/// the engine).
const CONTENDED: u64 = 50_000;
/// Longest lease after the last poll (`LONGEST` of the lease).
const LONGEST: u64 = 2_000_000;
/// Time for reading clocks.
const SLACK: u64 = 5_000;
/// The kind of timer that is used here.
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

/// What the thread that advances the time checks.
#[derive(Default)]
struct Watched {
    sockets: Mutex<Vec<Arc<Socket>>>,
    queues: Mutex<Vec<Arc<Queue>>>,
    alarms: Mutex<Vec<u64>>,
    /// Per socket, since when a message that no lease covers has been waiting.
    alone: Mutex<HashMap<usize, u64>>,
}

impl Watched {
    /// No thread can run before `then`. Checks that all of them may sleep that long.
    fn check(&self, then: u64) {
        let now = world::now();
        let mut alone = self.alone.lock();
        for socket in &*self.sockets.lock() {
            socket.check();
            if !socket.has_more() {
                alone.remove(&socket.number());
            } else {
                let lease = socket.lease(now);
                let longest = world::last_poll() + LONGEST;
                assert!(
                    lease.is_none_or(|end| end <= longest),
                    "a lease lasts too long"
                );
                if lease.is_some() {
                    alone.remove(&socket.number());
                }
                let until = lease.unwrap_or_else(|| {
                    let since = alone.entry(socket.number()).or_insert(now);
                    *since + CONTENDED
                });
                assert!(
                    then <= until + SLACK,
                    "a message that no lease covers waits for {} ns",
                    then - until
                );
            }
        }
        self.queues.lock().iter().for_each(|queue| queue.check());
        for at in &*self.alarms.lock() {
            assert!(then <= at + SLACK, "a timer is late");
        }
    }
}

/// Advances the time whenever no thread can run.
fn time_passes(watched: &Watched) {
    loop {
        match world::first_end() {
            Some(end) => {
                watched.check(end);
                world::spend(end.saturating_sub(world::now()));
                thread::yield_now();
            }
            // Only an event can help now.
            None => thread::park(),
        }
    }
}

/// A source with timers only.
struct Clock {
    watched: Arc<Watched>,
}

impl Source for Clock {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        false
    }

    fn timer(self: Arc<Self>, _: u32) {
        let mut alarms = self.watched.alarms.lock();
        let now = world::now();
        let first = alarms.iter().enumerate().min_by_key(|(_, at)| **at);
        let first = first.map(|(index, at)| (index, *at));
        let (index, at) = first.expect("a timer for each alarm");
        assert!(at <= now, "a timer is early");
        alarms.swap_remove(index);
    }
}

impl Clock {
    /// Sets a timer, and removes it when it has expired.
    fn set(&self, engine: &Engine, token: u64, delay: u64) {
        let at = world::now() + delay;
        self.watched.alarms.lock().push(at);
        engine.at(at, token, ALARM);
    }
}

/// Works for at most this long without checking anything else.
fn work(most: u64) {
    let end = world::now() + 20_000 + world::random(most);
    world::sleep_until(Some(end), || false);
}

/// Polls long enough to earn a lease, or only a few times, and posts meanwhile.
fn burst(queue: &Arc<Queue>) {
    let pause = 5_000 + world::random(40_000);
    let polls = match world::random(64) {
        0..16 => world::random(6),
        // The longest lease takes 32 ms to earn.
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
        // From now on, polls may query the set instead of each socket.
        Socket::connect(queue, 1);
        work(500_000);
    }
}

/// Runs a program until it has taken all completions of its queue.
fn program(queue: &Arc<Queue>, alarm: &dyn Fn(u64)) {
    while !queue.is_over() {
        match world::random(8) {
            0..3 => queue.wait(),
            3 => work(4_000_000),
            4 => alarm(10_000 + world::random(3_000_000)),
            _ => burst(queue),
        }
    }
}

/// Runs peers that send `count` messages to each socket.
fn peers(sockets: &[Arc<Socket>], count: usize) {
    let mut left = vec![count; sockets.len()];
    while left.iter().any(|left| *left > 0) {
        let at = world::random(sockets.len() as u64) as usize;
        if left[at] == 0 {
            continue;
        }
        left[at] -= 1;
        sockets[at].receive();
        let pause = match world::random(6) {
            0..3 => 0,
            3 => world::random(20_000),
            4 => world::random(500_000),
            _ => world::random(5_000_000),
        };
        let end = world::now() + pause;
        world::sleep_until(Some(end), || false);
    }
}

fn execution(plant: Option<Plant>) {
    world::begin(plant);
    let watched = Arc::new(Watched::default());
    // Started first, so that the scheduler knows its number.
    let time = Arc::clone(&watched);
    world::spawn_detached(move || time_passes(&time));

    let engines = 1 + world::random(2) as usize;
    let first = Engine::current().expect("the world has no limits");
    if engines > 1 {
        // As if it had its share of connections, so that another engine is started.
        (0..16).for_each(|_| first.joins());
    }
    let clock = Arc::new(Clock {
        watched: Arc::clone(&watched),
    });
    let token = first.token();
    first.add_timed(token, Arc::clone(&clock) as Arc<dyn Source>);

    let each = 1 + world::random(6) as usize;
    let mut threads = Vec::new();
    let mut sockets = Vec::new();
    for _ in 0..=world::random(2) {
        let members = 1 + world::random(4) as usize;
        let queue = Queue::new(each * members);
        watched.queues.lock().push(Arc::clone(&queue));
        for _ in 0..members {
            let socket = Socket::connect(&queue, engines);
            watched.sockets.lock().push(Arc::clone(&socket));
            sockets.push(socket);
        }
        for _ in 0..=world::random(2) {
            let (queue, clock, engine) =
                (Arc::clone(&queue), Arc::clone(&clock), Arc::clone(&first));
            threads.push(thread::spawn(move || {
                program(&queue, &|delay| clock.set(&engine, token, delay));
            }));
        }
    }
    threads.push(thread::spawn(move || peers(&sockets, each)));
    for thread in threads {
        thread.join().expect("a thread");
    }
}
