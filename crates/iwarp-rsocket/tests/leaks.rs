//! Leak test: repeats each way to end an rsocket. The process must not use more descriptors, heap
//! and mappings than before.
//!
//! All three belong to the process, so there is a single test. It is a separate program, because it
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
struct CountingAllocator;

static IN_USE: AtomicIsize = AtomicIsize::new(0);

// SAFETY: forwards everything to the system's allocator; the counter does not allocate.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        IN_USE.fetch_add(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: guaranteed by the caller.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Repetitions. Fewer for refused attempts, which are repeated after 100 ms.
const ROUNDS: usize = 250;
const SLOW_ROUNDS: usize = 10;
/// Allowed growth of the heap, independent of the number of rounds: for example hash tables.
const SLACK: isize = 96 << 10;
/// Allowed growth of the heap per round: timers of closed connections stay until they expire. A
/// leaked identifier takes 60 KiB.
const SLACK_PER_ROUND: isize = 2 << 10;
/// Timeout for closed connections. They may last 5 s after the farewell if the peer does not close.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Allowed growth of the address space in bytes, independent of the number of rounds.
const SLACK_MAPPED: usize = 8 << 20;

#[derive(Debug, Clone, Copy)]
struct Usage {
    descriptors: usize,
    heap: isize,
    mapped: usize,
}

impl Usage {
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

fn begin_connect(client: &Rs, to: SocketAddr) {
    client.nonblocking();
    let result = rs::connect(client.0, to);
    assert!(
        matches!(result, Ok(()) | Err(Errno::INPROGRESS | Errno::CONNREFUSED)),
        "{result:?}"
    );
}

fn set_zero_linger(socket: &Rs) {
    let on = [1i32.to_ne_bytes(), 0i32.to_ne_bytes()].concat();
    rs::set_option(socket.0, libc::SOL_SOCKET, libc::SO_LINGER, &on).unwrap();
}

fn read_to_end(socket: &Rs) {
    let mut sink = [0; 4096];
    while rs::recv(socket.0, &mut sink, 0).is_ok_and(|n| n > 0) {}
}

type Scenario = (&'static str, usize, fn(&Server));

/// The ways to end an rsocket. Sockets still alive at the end of a scenario are closed there, the
/// newest first.
const SCENARIOS: &[Scenario] = &[
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
        begin_connect(&Rs::new(), server.closed);
    }),
    ("close during an attempt", ROUNDS, |server| {
        begin_connect(&Rs::new(), server.address);
        server.drain();
    }),
    (
        "close during an attempt to a TCP server",
        ROUNDS,
        |server| {
            begin_connect(&Rs::new(), server.foreign.local_addr().unwrap());
            drop(server.foreign.accept().unwrap());
        },
    ),
    ("client closes first", ROUNDS, |server| {
        let (client, accepted) = server.pair();
        drop(client);
        read_to_end(&accepted);
    }),
    ("server closes first", ROUNDS, |server| {
        let (client, accepted) = server.pair();
        drop(accepted);
        read_to_end(&client);
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
        set_zero_linger(&client);
        drop(client);
        read_to_end(&accepted);
    }),
    ("both shut down the sending side", ROUNDS, |server| {
        let (client, accepted) = server.pair();
        for socket in [&client, &accepted] {
            rs::shutdown(socket.0, libc::SHUT_WR).unwrap();
        }
        read_to_end(&client);
        read_to_end(&accepted);
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

/// Waits until the usage does not exceed `before`, or until a timeout. Returns the usage then.
fn wait_until_settled(before: Usage, rounds: usize) -> Usage {
    let start = Instant::now();
    loop {
        let now = Usage::now();
        if !now.exceeds(before, rounds) || start.elapsed() > SETTLE_TIMEOUT {
            return now;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn ending_rsockets_leaks_nothing() {
    // SAFETY: sets the C library's allocator to one arena, because a new one takes 64 MiB.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    let server = Server::new();
    let mut leaks = Vec::new();
    for (name, rounds, end) in SCENARIOS {
        // Let pools and tables grow to their final sizes.
        for _ in 0..*rounds {
            end(&server);
        }
        // Pools may still grow once, depending on the timing of threads. A leak grows each time.
        let grown = (0..2).map(|_| {
            let before = wait_until_stable();
            for _ in 0..*rounds {
                end(&server);
            }
            let after = wait_until_settled(before, *rounds);
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

fn wait_until_stable() -> Usage {
    let start = Instant::now();
    let mut last = Usage::now();
    while start.elapsed() < SETTLE_TIMEOUT {
        std::thread::sleep(Duration::from_millis(300));
        let now = Usage::now();
        if now.descriptors == last.descriptors && now.heap == last.heap {
            break;
        }
        last = now;
    }
    last
}
