//! Tests that a process with many connections has several progress threads (ARCHITECTURE.md, "Which
//! thread drives").

use crate::common::{End, LIMIT, Mem, V4, Watchdog, alone, config, pair, until};
use iwarp::runtime::{SendOp, WcStatus};
use rustix::process::{Resource, getrlimit};
use std::path::PathBuf;
use std::time::Instant;

/// Number of pairs of connections. Both ends are in this process, so it has twice as many
/// connections.
const PAIRS: u64 = 40;
/// Number of connections per engine before another engine is started.
const EACH: usize = 16;

/// Returns the directories in `/proc` of threads with the name of progress threads. A thread has
/// its creator's name until it first runs, so the watch thread may be among them briefly.
fn progress_threads() -> Vec<PathBuf> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let named = |task: &PathBuf| {
        // A thread may end during the loop.
        let name = std::fs::read_to_string(task.join("comm"));
        name.is_ok_and(|name| name.trim() == "iwarp-progress")
    };
    tasks
        .map(|task| task.unwrap().path())
        .filter(named)
        .collect()
}

struct Connection {
    client: End,
    server: End,
    mine: Mem,
    theirs: Mem,
}

impl Connection {
    fn new(threads: u16) -> Self {
        let mut config = config();
        config.progress_threads = threads;
        let (client, server) = pair(V4, &config);
        let (mine, theirs) = (client.mem(64), server.mem(64));
        Self {
            client,
            server,
            mine,
            theirs,
        }
    }

    /// Posts a Write and a FetchAdd. The target's program does not take part.
    fn post(&self, value: u64) {
        self.mine.set(0, value);
        let (remote_addr, rkey) = (self.theirs.addr(), self.theirs.stag);
        let write = SendOp::Write { remote_addr, rkey };
        self.client.post(value, write, &[self.mine.sge(8)]);
        let add = SendOp::FetchAdd {
            remote_addr: remote_addr + 8,
            rkey,
            add: value,
            mask: 0,
        };
        let result = iwarp::runtime::Sge {
            addr: self.mine.addr() + 16,
            ..self.mine.sge(8)
        };
        self.client.post(value, add, &[result]);
    }
}

/// All connections move data at the same time, are served by several threads, and end.
#[test]
fn many_connections_share_several_threads() {
    alone("many_connections_share_several_threads", || {
        let _watchdog = Watchdog::new();
        let few: Vec<_> = (0..EACH as u64 / 2).map(|_| Connection::new(4)).collect();
        until("one is enough for so many", || {
            progress_threads().len() == 1
        });
        let mut all = few;
        all.extend((all.len() as u64..PAIRS).map(|_| Connection::new(4)));
        // A thread has its name only after it has started to run.
        until("four threads", || progress_threads().len() == 4);
        let mut sum = 0;
        for round in 1..=50 {
            sum += round;
            for connection in &all {
                connection.post(round);
            }
            for connection in &all {
                connection.client.expect_status(round, WcStatus::Success);
                connection.client.expect_status(round, WcStatus::Success);
                assert_eq!(connection.theirs.word(0), round);
                assert_eq!(connection.theirs.word(1), sum);
                assert_eq!(connection.mine.word(2), sum - round);
            }
        }
        // The ends of the connections are noticed by all threads.
        for connection in &all {
            connection.client.id.disconnect().unwrap();
        }
        for connection in &all {
            connection.server.expect_disconnected();
        }
        drop(all);
        let begin = Instant::now();
        let again = Connection::new(4);
        assert!(begin.elapsed() < LIMIT);
        assert_eq!(progress_threads().len(), 4, "the threads remain");
        again.post(7);
        until("the Write and the FetchAdd", || {
            again.theirs.word(1) == 7 && again.theirs.word(0) == 7
        });
    });
}

#[test]
fn one_thread_serves_any_number() {
    alone("one_thread_serves_any_number", || {
        let _watchdog = Watchdog::new();
        let all: Vec<_> = (0..PAIRS).map(|_| Connection::new(1)).collect();
        until("one is enough", || progress_threads().len() == 1);
        for connection in &all {
            connection.post(5);
        }
        for connection in &all {
            connection.client.expect_status(5, WcStatus::Success);
            connection.client.expect_status(5, WcStatus::Success);
            assert_eq!(connection.theirs.word(1), 5);
        }
    });
}

/// Returns the size of this process's descriptor table.
fn room_for_descriptors() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let size = status.lines().find_map(|l| l.strip_prefix("FDSize:"));
    size.unwrap().trim().parse().unwrap()
}

/// The library grows the descriptor table early. Each thread that opens a socket while the kernel
/// grows the table would wait for milliseconds.
#[test]
fn first_connection_raises_descriptor_limit() {
    alone("first_connection_raises_descriptor_limit", || {
        let _watchdog = Watchdog::new();
        let before = room_for_descriptors();
        assert!(before < 1024, "{before}");
        let _connection = Connection::new(1);
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let enough = limit.min(16 << 10);
        until("room", || room_for_descriptors() >= enough);
    });
}

/// Returns how often the only progress thread of this process has slept.
fn sleeps() -> u64 {
    let mut tasks = Vec::new();
    until("one progress thread", || {
        tasks = progress_threads();
        tasks.len() == 1
    });
    let task = &tasks[0];
    let status = std::fs::read_to_string(task.join("status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.unwrap().trim().parse().unwrap()
}

/// A program polls one completion queue, while its peer uses a queue pair of another completion
/// queue. The polls also serve that queue pair, so the progress thread is not woken for each
/// request; on one processor the two threads would alternate. It is woken when the polls pause.
#[test]
fn polls_of_one_queue_serve_others() {
    // Few enough for one time slice.
    const REQUESTS: u64 = 400;
    alone("polls_of_one_queue_serve_others", || {
        let _watchdog = Watchdog::new();
        let connection = Connection::new(1);
        let (mut value, mut sum) = (0, 0);
        until("polls that are not disturbed", || {
            let before = sleeps();
            for _ in 0..REQUESTS {
                value += 1;
                sum += value;
                connection.post(value);
                for _ in 0..2 {
                    connection.client.expect_status(value, WcStatus::Success);
                }
            }
            sleeps() - before < REQUESTS / 40
        });
        assert_eq!(connection.theirs.word(1), sum);
    });
}
