//! Tests of the statistics socket that `iwarp stat` uses: the figures are correct, only permitted
//! users get an answer, and queries do not disturb the program. Each test runs in its own process,
//! because it counts the resources of the process.

use crate::common;
use crate::common::alone::path_of;
use crate::common::*;
use iwarp::runtime::{SendOp, WcStatus};
use iwarp::stat::{Answer, Question};
use serde_json::Value;
use std::io::Read as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// A directory for statistics sockets, which is removed when it is dropped.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("iwarp-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Requests the document of a process.
fn ask(pid: u32) -> Vec<Answer> {
    let mut question = Question::default();
    question.pid = Some(pid);
    question.patience = LIMIT;
    question.directory = std::env::var_os("IWARP_STAT")
        .map(PathBuf::from)
        .filter(|dir| dir.is_dir());
    question.ask().unwrap()
}

/// Requests the document of a process, which must answer exactly once. Returns the parsed document.
fn document_of(pid: u32) -> Value {
    let mut answers = ask(pid);
    assert_eq!(answers.len(), 1, "{answers:?}");
    let answer = answers.remove(0);
    assert_eq!(answer.pid, Some(pid));
    let document: Value = serde_json::from_slice(&answer.document.unwrap()).unwrap();
    assert_eq!(document["format"], 1);
    assert_eq!(document["process"]["pid"], pid);
    document
}

/// Returns the document of this process.
fn own() -> Value {
    document_of(std::process::id())
}

fn queue_pair(document: &Value, number: u32) -> &Value {
    let all = document["queue_pairs"].as_array().unwrap();
    let mut found = all.iter().filter(|qp| qp["number"] == number);
    let qp = found
        .next()
        .unwrap_or_else(|| panic!("{number}: {document}"));
    assert!(found.next().is_none(), "{number} twice");
    qp
}

fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("{value} is no number"))
}

#[test]
fn figures_match_the_queue_pairs() {
    alone("figures_match_the_queue_pairs", || {
        let (client, server) = pair(V4, &config());
        let (mine, theirs) = (client.mem(1 << 16), server.mem(1 << 16));
        let mut before = 0;
        for _ in 0..3 {
            let op = SendOp::Write {
                remote_addr: theirs.addr(),
                rkey: theirs.stag,
            };
            client.post(1, op, &[mine.sge(40_000)]);
            client.expect_status(1, WcStatus::Success);
            let read = SendOp::Read {
                remote_addr: theirs.addr(),
                rkey: theirs.stag,
            };
            client.post(2, read, &[mine.sge(8)]);
            client.expect_status(2, WcStatus::Success);
            // The thread that sends a response may count it after we have received it.
            let counted = || [client.qp.counters(), server.qp.counters()];
            let mut document = Value::Null;
            until("the counters do not change during a query", || {
                let before = counted();
                document = own();
                counted() == before
            });
            for end in [&client, &server] {
                let qp = queue_pair(&document, end.qp.num());
                for (name, value) in end.qp.counters().named() {
                    assert_eq!(number(&qp["counters"][name]), value, "{name}");
                }
                let (local, peer) = end.qp.addresses().unwrap();
                assert_eq!(qp["connection"]["local"], local.to_string());
                assert_eq!(qp["connection"]["peer"], peer.to_string());
                assert_eq!((&qp["state"], &qp["kind"]), (&"RTS".into(), &"cm".into()));
                assert_eq!((&qp["held_ns"], &qp["end"]), (&Value::Null, &Value::Null));
                assert!(number(&qp["connection"]["tcp_congestion_window_segments"]) > 0);
                assert!(number(&qp["connection"]["tcp_rtt_us"]) > 0);
            }
            let sent = number(&queue_pair(&document, client.qp.num())["counters"]["tx_payload"]);
            assert!(sent >= before + 40_000, "{before} and then {sent}");
            before = sent;
            // Both ends opened the same device.
            let devices = document["devices"].as_array().unwrap();
            assert_eq!(devices.len(), 1);
            let device = &devices[0];
            assert_eq!(device["name"], client.ctx.device().name);
            let mut both = client.ctx.counters();
            both.add(&server.ctx.counters());
            assert_eq!(number(&device["counters"]["tx_bytes"]), both.tx_bytes);
            assert_eq!(number(&device["queue_pairs"]), 2);
            assert_eq!(number(&device["completion_queues"]), 2);
            assert_eq!(number(&device["registrations"]), 2);
            assert_eq!(number(&device["registered_octets"]), 2 << 16);
        }
        // The device's counters include those of destroyed queue pairs.
        let total = client.ctx.counters().tx_bytes + server.ctx.counters().tx_bytes;
        client.ctx.deregister(mine.stag).unwrap();
        drop((client, mine));
        let device = &own()["devices"][0];
        assert!(number(&device["counters"]["tx_bytes"]) >= total);
        assert_eq!(number(&device["registered_octets"]), 1 << 16);
        assert_eq!(number(&device["completion_queues"]), 1);
    });
}

#[test]
fn held_sends_and_end_are_reported() {
    alone("held_sends_and_end_are_reported", || {
        let mut long = config();
        long.receiver_not_ready = iwarp::ReceiverNotReady::Hold(LIMIT);
        let (client, server) = pair(V4, &long);
        let (mine, theirs) = (client.mem(64), server.mem(64));
        let of_server = || queue_pair(&own(), server.qp.num()).clone();
        client.post(1, SendOp::Send, &[mine.sge(8)]);
        until("the Send is held", || of_server()["held_ns"].is_u64());
        assert_eq!(number(&of_server()["counters"]["receiver_not_ready"]), 1);
        assert_eq!(number(&of_server()["receives_posted"]), 0);
        server.post_recv(2, &[theirs.sge(8)]);
        server.expect_status(2, WcStatus::Success);
        let after = of_server();
        assert_eq!(after["held_ns"], Value::Null);
        assert!(number(&after["held_total_ns"]) > 0);
        client.expect_status(1, WcStatus::Success);

        let op = SendOp::Write {
            remote_addr: theirs.addr(),
            rkey: theirs.stag ^ 0x1_0000,
        };
        client.post(3, op, &[mine.sge(8)]);
        server.expect_disconnected();
        client.expect_disconnected();
        let document = own();
        let (c, s) = (
            queue_pair(&document, client.qp.num()),
            queue_pair(&document, server.qp.num()),
        );
        assert_eq!(number(&s["counters"]["terminates_sent"]), 1);
        assert_eq!(number(&c["counters"]["terminates_received"]), 1);
        let end = c["end"].as_str().unwrap();
        assert!(end.starts_with("terminated by the peer ("), "{end}");
        assert_eq!(c["state"], "ERR");
    });
}

/// 1000 clients connect to the statistics socket and do not read. The answer is larger than a
/// socket's buffer, so they stay connected. The program must continue to work, and later clients
/// must get an answer.
#[test]
fn stalled_clients_block_and_leak_nothing() {
    let name = "stalled_clients_block_and_leak_nothing";
    let dir = Dir::new("stalled");
    alone_with(name, &[("IWARP_STAT", dir.path())], || {
        let dir = std::env::var_os("IWARP_STAT").unwrap();
        let mut healthy = Healthy::new(V4);
        healthy.check();
        let ctx = context(V4, &config());
        let (pd, cq) = (ctx.allocate_pd(), ctx.create_cq(16, None).unwrap());
        let crowd: Vec<_> = (0..2000)
            .map(|_| common::queue_pair(&ctx, pd, &cq, None, 1))
            .collect();
        let entry = entry_of(Path::new(&dir));
        let files = open_files();
        let mut stalled = Vec::new();
        let mut refused = 0;
        for _ in 0..1000 {
            let socket = rustix::net::socket_with(
                rustix::net::AddressFamily::UNIX,
                rustix::net::SocketType::STREAM,
                rustix::net::SocketFlags::NONBLOCK,
                None,
            )
            .unwrap();
            let address = rustix::net::SocketAddrUnix::new(&entry).unwrap();
            match rustix::net::connect(&socket, &address) {
                Ok(()) => stalled.push(socket),
                Err(_) => refused += 1,
            }
        }
        assert!(refused > 900, "too few connections were refused: {refused}");
        for _ in 0..100 {
            healthy.check();
        }
        // Each stalled connection has two descriptors in this process, one for each end. There must
        // be no further descriptors.
        assert!(open_files() <= files + 2 * stalled.len());
        stalled.truncate(8);
        // The engine closes stalled connections after a while, and then answers others.
        let mut question = Question::default();
        question.directory = Some(dir.into());
        until("another client is answered", || {
            healthy.check();
            let mut answers = question.ask().unwrap();
            answers.pop().is_some_and(|a| a.document.is_ok())
        });
        drop(stalled);
        until("all descriptors are closed", || open_files() == files);
        let document =
            serde_json::from_slice::<Value>(&question.ask().unwrap().remove(0).document.unwrap())
                .unwrap();
        let count = document["queue_pairs"].as_array().unwrap().len();
        assert_eq!(count, crowd.len() + 2);
    });
}

fn entry_of(dir: &Path) -> PathBuf {
    let mut entries = std::fs::read_dir(dir).unwrap();
    let entry = entries.next().expect("an entry").unwrap().path();
    assert!(entries.next().is_none());
    entry
}

/// While a program polls the whole `epoll` set in a loop, the progress thread does not poll it.
/// Even then the process must answer.
#[test]
fn busy_polling_program_answers() {
    alone("busy_polling_program_answers", || {
        let (client, server) = pair(V4, &config());
        // With this many queue pairs, a poll of the completion queue polls the whole `epoll` set.
        let others: Vec<_> = (0..8)
            .map(|_| common::queue_pair(&client.ctx, client.pd, &client.cq, None, 1))
            .collect();
        let over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut none = [iwarp::runtime::Cqe::default()];
                while !over.load(std::sync::atomic::Ordering::Relaxed) {
                    assert_eq!(client.cq.poll(&mut none).unwrap(), 0);
                }
            });
            // `ask` has a time limit, so the polling thread is stopped even if there is no answer.
            let all: Vec<_> = (0..10).map(|_| ask(std::process::id())).collect();
            over.store(true, std::sync::atomic::Ordering::Relaxed);
            for answers in all {
                let document = answers[0].document.as_ref().unwrap();
                let document: Value = serde_json::from_slice(document).unwrap();
                let all = document["queue_pairs"].as_array().unwrap();
                assert_eq!(all.len(), others.len() + 2);
            }
        });
        drop(server);
    });
}

#[test]
fn asked_process_sleeps_again() {
    let name = "asked_process_sleeps_again";
    // Other tests query all processes of the default directory, which would wake this process.
    let dir = Dir::new("sleeper");
    alone_with(name, &[("IWARP_STAT", dir.path())], || {
        let (_client, _server) = pair(V4, &config());
        own();
        // By then the last reminder to the silent responder is sent, and the time limit of the
        // query has passed.
        std::thread::sleep(std::time::Duration::from_secs(6));
        let before = wake_ups();
        std::thread::sleep(std::time::Duration::from_secs(2));
        assert_eq!(wake_ups(), before);
        own();
        assert!(
            wake_ups() > before,
            "this counter does not count the thread that answers"
        );
    });
}

/// Returns how often the progress thread has slept.
fn wake_ups() -> u64 {
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let task = task.unwrap().path();
        let read = |file| std::fs::read_to_string(task.join(file)).unwrap_or_default();
        if read("comm").trim() == "iwarp-progress" {
            let status = read("status");
            let line = status
                .lines()
                .find(|l| l.starts_with("voluntary_ctxt_switches"));
            return line.unwrap().split('\t').nth(1).unwrap().parse().unwrap();
        }
    }
    panic!("no progress thread")
}

#[test]
fn forked_child_answers_for_itself() {
    alone("forked_child_answers_for_itself", || {
        let mut healthy = Healthy::new(V4);
        healthy.check();
        let parent = std::process::id();
        let (mut told, tell_parent) = UnixStream::pair().unwrap();
        // SAFETY: no other thread of this process holds a lock now, because the progress thread
        // sleeps and the harness waits.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                Healthy::new(V4).check();
                let document = own();
                assert_eq!(document["queue_pairs"].as_array().unwrap().len(), 0);
                let mut mine = Healthy::new(V4);
                mine.check();
                assert_eq!(own()["queue_pairs"].as_array().unwrap().len(), 2);
                // The parent still answers, with its own queue pairs.
                assert_eq!(queue_pairs_of(parent), 2);
                std::io::Write::write_all(&mut &tell_parent, b"x").unwrap();
                std::thread::sleep(LIMIT);
            }));
            // SAFETY: `_exit` skips the test harness's exit handlers, which belong to the parent.
            unsafe { libc::_exit(i32::from(good.is_err())) };
        }
        drop(tell_parent);
        let mut one = [0];
        let came = told.read_exact(&mut one);
        if came.is_ok() {
            assert_eq!(queue_pairs_of(child as u32), 2);
            assert_eq!(queue_pairs_of(parent), 2);
            healthy.check();
        }
        // SAFETY: the process is our child.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        came.expect("a check in the child failed");
    });
}

/// Returns the number of queue pairs in a process's document.
fn queue_pairs_of(pid: u32) -> usize {
    document_of(pid)["queue_pairs"].as_array().unwrap().len()
}

/// A child that does not use the library must not keep its parent's statistics socket open. After
/// the parent's death, clients could connect to it and would never get an answer.
#[test]
fn child_closes_parents_socket() {
    let name = "child_closes_parents_socket";
    let dir = Dir::new("orphan");
    let (mut over, keep) = UnixStream::pair().unwrap();
    // SAFETY: the descriptor is open. The call lets child processes inherit it.
    unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&keep), libc::F_SETFD, 0) };
    alone_with(name, &[("IWARP_STAT", dir.path())], || {
        let (_client, _server) = pair(V4, &config());
        // This process has created its own directory. `_exit` below runs no destructors, so the
        // directory is removed here.
        let _ = std::fs::remove_dir(&dir.0);
        let dir = std::env::var_os("IWARP_STAT").unwrap();
        entry_of(Path::new(&dir));
        // SAFETY: the child only sleeps, and calls only system calls.
        unsafe {
            if libc::fork() == 0 {
                libc::alarm(20);
                libc::pause();
                libc::_exit(0);
            }
            // The process ends without exit handlers, which would remove the entry, as if it were
            // killed.
            libc::_exit(0);
        }
    });
    drop(keep);
    if std::env::var_os("IWARP_STAT").is_some_and(|d| Path::new(&d) == dir.0) {
        return;
    }
    let mut question = Question::default();
    question.directory = Some(dir.0.clone());
    // The grandchild closes the inherited socket when it starts to run, possibly after the child
    // has ended.
    while !question.ask().unwrap().is_empty() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    // The grandchild holds the other end of this pair. The pair is still open, so the grandchild is
    // still running, and the statistics socket was not closed by its exit.
    over.set_nonblocking(true).unwrap();
    let alive = over
        .read(&mut [0])
        .is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock);
    assert!(alive, "the grandchild kept the socket until it ended");
    assert!(std::fs::read_dir(&dir.0).unwrap().next().is_none());
}

#[test]
fn entry_is_removed_at_exit() {
    let name = "entry_is_removed_at_exit";
    let dir = Dir::new("entry");
    alone_with(name, &[("IWARP_STAT", dir.path())], || {
        if let Some(dir) = std::env::var_os("IWARP_STAT") {
            let _pair = pair(V4, &config());
            entry_of(Path::new(&dir));
        }
    });
    if dir.0.exists() {
        assert!(std::fs::read_dir(&dir.0).unwrap().next().is_none());
    }
}

#[test]
fn disabled_process_cannot_be_asked() {
    let name = "disabled_process_cannot_be_asked";
    alone_with(name, &[("IWARP_STAT", "off")], || {
        let mut healthy = Healthy::new(V4);
        healthy.check();
        assert!(ask(std::process::id()).is_empty());
    });
}

/// If the statistics socket cannot be created, the program works without it.
#[test]
fn missing_socket_fails_nothing() {
    let name = "missing_socket_fails_nothing";
    alone_with(name, &[("IWARP_STAT", "/proc/nowhere")], || {
        let mut healthy = Healthy::new(V4);
        healthy.check();
        assert!(ask(std::process::id()).is_empty());
    });
}

#[test]
fn another_user_is_not_answered() {
    let name = "another_user_is_not_answered";
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can become another user");
        return;
    }
    let dir = Dir::new("other");
    // Other users may read the directory, so only the permissions of the socket exclude them.
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&dir.0, open).unwrap();
    alone_with(name, &[("IWARP_STAT", dir.path())], || {
        let (_client, _server) = pair(V4, &config());
        let dir = std::env::var_os("IWARP_STAT").unwrap();
        let entry = entry_of(Path::new(&dir));
        let as_nobody = |work: &dyn Fn() -> i32| {
            // SAFETY: no other thread of this process holds a lock now, and the child ends with
            // `_exit`.
            unsafe {
                let child = libc::fork();
                if child == 0 {
                    let changed = libc::setgid(65534) == 0 && libc::setuid(65534) == 0;
                    libc::_exit(if changed { work() } else { 99 });
                }
                let mut status = 0;
                libc::waitpid(child, &raw mut status, 0);
                libc::WEXITSTATUS(status)
            }
        };
        let octets = || match UnixStream::connect(&entry) {
            Ok(mut socket) => {
                let mut answer = Vec::new();
                let read = socket.read_to_end(&mut answer);
                i32::from(!answer.is_empty()) + 10 * i32::from(read.is_ok())
            }
            Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => 42,
            Err(_) => 98,
        };
        assert_eq!(
            as_nobody(&octets),
            42,
            "the permissions of the socket do not exclude another user"
        );
        // Even with a socket that everybody may connect to, the process does not answer another
        // user.
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        std::fs::set_permissions(&entry, open).unwrap();
        assert_eq!(as_nobody(&octets) % 10, 0, "another user got an answer");
        // A client uses only the entries of its own user's processes.
        let mut question = Question::default();
        question.directory = Some(dir.clone().into());
        let found = || question.ask().map_or(97, |all| all.len() as i32);
        assert_eq!(as_nobody(&found), 0);
        assert_eq!(found(), 1, "root is answered");
    });
}

/// Environment variable that is set in the process whose totals are checked.
const COUNTED: &str = "PRINTS_TOTALS_AT_ITS_END";

/// Performs Writes and Reads on a connection whose ends use devices with the same name. Prints the
/// sums of their counters.
fn count() {
    let mut config = config();
    config.stats = true;
    let (client, server) = pair(V4, &config);
    let (mine, theirs) = (client.mem(1 << 16), server.mem(1 << 16));
    let (remote_addr, rkey) = (theirs.addr(), theirs.stag);
    client.post(1, SendOp::Write { remote_addr, rkey }, &[mine.sge(40_000)]);
    client.expect_status(1, WcStatus::Success);
    client.post(2, SendOp::Read { remote_addr, rkey }, &[mine.sge(8)]);
    client.expect_status(2, WcStatus::Success);
    let sum = || {
        let mut sum = client.qp.counters();
        sum.add(&server.qp.counters());
        sum
    };
    // The thread that sends a response may count it after we have received it.
    until("all that was sent is counted", || {
        let sum = sum();
        sum.tx_bytes == sum.rx_bytes && sum.tx_fpdus == sum.rx_fpdus
    });
    let device = client.ctx.device().name.clone();
    // One end is closed before the process exits.
    let c = sum();
    drop(server);
    println!(
        "\n{COUNTED}: {device}: sent {} octets in {} FPDUs ({} messages), \
             received {} octets in {} FPDUs ({} messages, ",
        c.tx_bytes, c.tx_fpdus, c.tx_messages, c.rx_bytes, c.rx_fpdus, c.rx_messages,
    );
}

#[test]
fn stats_are_printed_at_exit() {
    if std::env::var_os(COUNTED).is_some() {
        return count();
    }
    let out = std::process::Command::new(std::env::current_exe().unwrap())
        .arg(path_of("stats_are_printed_at_exit"))
        .args(["--exact", "--nocapture"])
        .env(COUNTED, "1")
        .output()
        .unwrap();
    let [out, err] = [out.stdout, out.stderr].map(|octets| String::from_utf8(octets).unwrap());
    let mark = format!("{COUNTED}: ");
    let wanted = out.lines().find_map(|line| line.strip_prefix(&mark));
    let wanted = wanted.unwrap_or_else(|| panic!("{out}{err}"));
    let told = err
        .lines()
        .filter(|line| line.starts_with("iwarp: process "));
    let told: Vec<_> = told.collect();
    assert!(
        told.len() == 1 && told[0].contains(wanted),
        "{err} {wanted}"
    );
}
