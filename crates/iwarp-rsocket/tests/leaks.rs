//! Leak test: each way to end an rsocket is repeated, and descriptors, heap and mappings must be
//! what they were before.
//!
//! All three belong to the process, so this is one test. It is a program of its own because it
//! replaces the allocator.

#[path = "it/common/mod.rs"]
#[allow(
    dead_code,
    unused_imports,
    reason = "this program uses only some of these items"
)]
mod common;

use common::{Rs, listener};
use iwarp_rsocket as rs;
use iwarp_rsocket::Errno;
use std::alloc::{GlobalAlloc, Layout, System};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicIsize, Ordering};
use std::time::{Duration, Instant};

/// Counts the bytes of the process's heap that are in use.
struct Counting;

static IN_USE: AtomicIsize = AtomicIsize::new(0);

// SAFETY: forwards everything to the system's allocator; the counter does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        IN_USE.fetch_add(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Repetitions. A refused attempt is retried after 100 ms, so there are fewer of those.
const ROUNDS: usize = 250;
const SLOW_ROUNDS: usize = 10;
/// Allowed growth of the heap that does not depend on the rounds, such as that of hash tables.
const SLACK: isize = 96 << 10;
/// Allowed growth of the heap per round. Timers of closed connections are not cancelled, but kept
/// until they expire. A leaked identifier takes 60 KiB.
const SLACK_PER_ROUND: isize = 2 << 10;
/// A peer that does not close keeps a connection for 5 s after the farewell.
const PATIENCE: Duration = Duration::from_secs(30);

/// Allowed growth of the address space that does not depend on the rounds, in bytes.
const SLACK_MAPPED: usize = 8 << 20;

#[derive(Debug, Clone, Copy)]
struct Used {
    descriptors: usize,
    heap: isize,
    mapped: usize,
}

impl Used {
    fn now() -> Self {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: usize = statm.split(' ').next().unwrap().parse().unwrap();
        Self {
            descriptors: std::fs::read_dir("/proc/self/fd").unwrap().count(),
            heap: IN_USE.load(Ordering::Relaxed),
            mapped: pages * 4096,
        }
    }

    fn exceeds(self, before: Self, rounds: usize) -> bool {
        self.descriptors > before.descriptors
            || self.heap > before.heap + SLACK + SLACK_PER_ROUND * rounds as isize
            || self.mapped > before.mapped + SLACK_MAPPED
    }
}

struct Server {
    listener: Rs,
    address: SocketAddr,
    closed: SocketAddr,
    foreign: TcpListener,
}

impl Server {
    fn new() -> Self {
        let (listener, address) = listener(|l| l.set(rs::SOL_RDMA, rs::RDMA_IOMAPSIZE, 1));
        let unused = TcpListener::bind("127.0.0.1:0").unwrap();
        Self {
            listener,
            address,
            closed: unused.local_addr().unwrap(),
            foreign: TcpListener::bind("127.0.0.1:0").unwrap(),
        }
    }

    fn pair(&self) -> (Rs, Rs) {
        let client = Rs::new();
        rs::connect(client.0, self.address).unwrap();
        (client, Rs(rs::accept(self.listener.0).unwrap().0))
    }

    fn drain(&self) {
        self.listener.nonblocking();
        while let Ok((socket, _)) = rs::accept(self.listener.0) {
            rs::close(socket).unwrap();
        }
        rs::control(self.listener.0, libc::F_SETFL, 0).unwrap();
    }
}

fn begins(client: &Rs, to: SocketAddr) {
    client.nonblocking();
    let result = rs::connect(client.0, to);
    assert!(
        matches!(result, Ok(()) | Err(Errno::INPROGRESS | Errno::CONNREFUSED)),
        "{result:?}"
    );
}

fn resets(socket: &Rs) {
    let on = [1i32.to_ne_bytes(), 0i32.to_ne_bytes()].concat();
    rs::set_option(socket.0, libc::SOL_SOCKET, libc::SO_LINGER, &on).unwrap();
}

fn reads_to_end(socket: &Rs) {
    let mut sink = [0; 4096];
    while rs::recv(socket.0, &mut sink, 0).is_ok_and(|n| n > 0) {}
}

type Way = (&'static str, usize, fn(&Server));

/// The ways to end an rsocket. Values alive at the end of a row are closed there, the last one
/// first.
const WAYS: &[Way] = &[
    ("close an unused socket", ROUNDS, |_| drop(Rs::new())),
    ("close a listener", ROUNDS, |_| drop(listener(|_| {}))),
    ("refused", SLOW_ROUNDS, |server| {
        let client = Rs::new();
        assert_eq!(
            rs::connect(client.0, server.closed),
            Err(Errno::CONNREFUSED)
        );
    }),
    ("refused twice", SLOW_ROUNDS, |server| {
        let client = Rs::new();
        for _ in 0..2 {
            assert_eq!(
                rs::connect(client.0, server.closed),
                Err(Errno::CONNREFUSED)
            );
        }
    }),
    ("close during a refused attempt", ROUNDS, |server| {
        begins(&Rs::new(), server.closed);
    }),
    ("close during an attempt", ROUNDS, |server| {
        begins(&Rs::new(), server.address);
        server.drain();
    }),
    (
        "close during an attempt to a TCP server",
        ROUNDS,
        |server| {
            begins(&Rs::new(), server.foreign.local_addr().unwrap());
            drop(server.foreign.accept().unwrap());
        },
    ),
    ("client closes first", ROUNDS, |server| {
        let (client, accepted) = server.pair();
        drop(client);
        reads_to_end(&accepted);
    }),
    ("server closes first", ROUNDS, |server| {
        let (client, accepted) = server.pair();
        drop(accepted);
        reads_to_end(&client);
    }),
    ("both close without reading the end", ROUNDS, |server| {
        drop(server.pair());
    }),
    ("close with unread data", ROUNDS, |server| {
        let (client, accepted) = server.pair();
        client.send_all(&[1; 5000]);
        accepted.send_all(&[2; 5000]);
    }),
    ("the listener closes before accept", ROUNDS, |_| {
        let (l, address) = listener(|_| {});
        let client = Rs::new();
        rs::connect(client.0, address).unwrap();
        drop(l);
    }),
    ("linger of zero seconds", ROUNDS, |server| {
        let (client, accepted) = server.pair();
        resets(&client);
        drop(client);
        reads_to_end(&accepted);
    }),
    ("both shut down the sending side", ROUNDS, |server| {
        let (client, accepted) = server.pair();
        for socket in [&client, &accepted] {
            rs::shutdown(socket.0, libc::SHUT_WR).unwrap();
        }
        reads_to_end(&client);
        reads_to_end(&accepted);
    }),
    ("both shut down both sides", ROUNDS, |server| {
        let (client, accepted) = server.pair();
        for socket in [&client, &accepted] {
            rs::shutdown(socket.0, libc::SHUT_RDWR).unwrap();
        }
    }),
    ("close with a mapped buffer", ROUNDS, |server| {
        let client = Rs::new();
        rs::connect(client.0, server.address).unwrap();
        let accepted = Rs(rs::accept(server.listener.0).unwrap().0);
        let mut buffer = vec![0u8; 4096];
        // SAFETY: the buffer lives until the socket is closed.
        let mapped = unsafe { rs::iomap(client.0, buffer.as_mut_ptr(), buffer.len(), true, None) };
        mapped.unwrap();
        drop((client, accepted));
    }),
    ("close with keep-alive messages", ROUNDS, |server| {
        let (client, accepted) = server.pair();
        client.set(libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1);
        drop((client, accepted));
    }),
    ("close a datagram socket", ROUNDS, |_| {
        let socket = rs::socket(libc::AF_INET, libc::SOCK_DGRAM, 0).unwrap();
        rs::close(socket).unwrap();
    }),
];

/// Waits, for a bounded time, until no more is in use than `before`. Returns what is in use then.
fn settled(before: Used, rounds: usize) -> Used {
    let start = Instant::now();
    loop {
        let now = Used::now();
        if !now.exceeds(before, rounds) || start.elapsed() > PATIENCE {
            return now;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn no_way_to_end_leaks() {
    // SAFETY: sets the C library's allocator to one arena, because a new one takes 64 MiB.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    let server = Server::new();
    let mut leaks = Vec::new();
    for (name, rounds, end) in WAYS {
        // Pools and tables grow to their final sizes.
        for _ in 0..*rounds {
            end(&server);
        }
        // Pools may still grow once, because threads met in another order. A leak grows each time.
        let grown = (0..2).map(|_| {
            let before = quiet();
            for _ in 0..*rounds {
                end(&server);
            }
            let after = settled(before, *rounds);
            println!("{name}: {rounds} rounds: {before:?}, then {after:?}");
            (before, after)
        });
        let grown: Vec<_> = grown
            .take_while(|(before, after)| after.exceeds(*before, *rounds))
            .collect();
        if let [_, (before, after)] = grown[..] {
            leaks.push(format!("{name}: {before:?} became {after:?}"));
        }
    }
    assert!(leaks.is_empty(), "{}", leaks.join("\n"));
}

fn quiet() -> Used {
    let start = Instant::now();
    let mut last = Used::now();
    while start.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(300));
        let now = Used::now();
        if now.descriptors == last.descriptors && now.heap == last.heap {
            break;
        }
        last = now;
    }
    last
}
