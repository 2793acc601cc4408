//! Leak tests: each repeats a way to end an rsocket. The process must not use more descriptors,
//! heap and mappings than before. All three belong to the process, so each test runs in its own.

use crate::common::{Rs, alone, listener};
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

    /// Closes connections that nobody has accepted. On a busy machine, one of a round may arrive
    /// after the round.
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

/// Defines a test for each way to end an rsocket: name, rounds, and the way. Sockets still alive at
/// the end of a round are closed there, the newest first.
macro_rules! ends {
    ($($name:ident, $rounds:ident, $end:expr;)*) => {
        $(
            #[test]
            fn $name() {
                alone(stringify!($name), || check($rounds, $end));
            }
        )*
    };
}

ends! {
    closed_unused_socket_leaks_nothing, ROUNDS, |_| drop(Rs::new());
    closed_listener_leaks_nothing, ROUNDS, |_| drop(listener(|_| {}));
    refused_connect_leaks_nothing, SLOW_ROUNDS, |server| {
        let client = Rs::new();
        assert_eq!(
            rs::connect(client.0, server.closed),
            Err(Errno::CONNREFUSED)
        );
    };
    second_refusal_leaks_nothing, SLOW_ROUNDS, |server| {
        let client = Rs::new();
        for _ in 0..2 {
            assert_eq!(
                rs::connect(client.0, server.closed),
                Err(Errno::CONNREFUSED)
            );
        }
    };
    close_during_refusal_leaks_nothing, ROUNDS, |server| {
        begin_connect(&Rs::new(), server.closed);
    };
    close_during_connect_leaks_nothing, ROUNDS, |server| {
        begin_connect(&Rs::new(), server.address);
        server.drain();
    };
    close_during_tcp_connect_leaks_nothing, ROUNDS, |server| {
        begin_connect(&Rs::new(), server.foreign.local_addr().unwrap());
        drop(server.foreign.accept().unwrap());
    };
    client_close_leaks_nothing, ROUNDS, |server| {
        let (client, accepted) = server.pair();
        drop(client);
        read_to_end(&accepted);
    };
    server_close_leaks_nothing, ROUNDS, |server| {
        let (client, accepted) = server.pair();
        drop(accepted);
        read_to_end(&client);
    };
    close_before_end_leaks_nothing, ROUNDS, |server| drop(server.pair());
    unread_data_leaks_nothing, ROUNDS, |server| {
        let (client, accepted) = server.pair();
        client.send_all(&[1; 5000]);
        accepted.send_all(&[2; 5000]);
    };
    close_before_accept_leaks_nothing, ROUNDS, |_| {
        let (l, address) = listener(|_| {});
        let client = Rs::new();
        rs::connect(client.0, address).unwrap();
        drop(l);
    };
    zero_linger_leaks_nothing, ROUNDS, |server| {
        let (client, accepted) = server.pair();
        set_zero_linger(&client);
        drop(client);
        read_to_end(&accepted);
    };
    shutdown_of_writing_leaks_nothing, ROUNDS, |server| {
        let (client, accepted) = server.pair();
        for socket in [&client, &accepted] {
            rs::shutdown(socket.0, libc::SHUT_WR).unwrap();
        }
        read_to_end(&client);
        read_to_end(&accepted);
    };
    shutdown_of_both_leaks_nothing, ROUNDS, |server| {
        let (client, accepted) = server.pair();
        for socket in [&client, &accepted] {
            rs::shutdown(socket.0, libc::SHUT_RDWR).unwrap();
        }
    };
    mapped_buffer_leaks_nothing, ROUNDS, |server| {
        let client = Rs::new();
        rs::connect(client.0, server.address).unwrap();
        let accepted = Rs(rs::accept(server.listener.0).unwrap().0);
        let mut buffer = vec![0u8; 4096];
        // SAFETY: the buffer lives until the socket is closed.
        let mapped = unsafe { rs::iomap(client.0, buffer.as_mut_ptr(), buffer.len(), true, None) };
        mapped.unwrap();
        drop((client, accepted));
    };
    keepalive_leaks_nothing, ROUNDS, |server| {
        let (client, accepted) = server.pair();
        client.set(libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1);
        drop((client, accepted));
    };
    closed_datagram_socket_leaks_nothing, ROUNDS, |_| {
        let socket = rs::socket(libc::AF_INET, libc::SOCK_DGRAM, 0).unwrap();
        rs::close(socket).unwrap();
    };
}

/// Waits until the usage does not exceed `before`, or until a timeout. Returns the usage then.
fn wait_until_settled(server: &Server, before: Usage, rounds: usize) -> Usage {
    let start = Instant::now();
    loop {
        server.drain();
        let now = Usage::now();
        if !now.exceeds(before, rounds) || start.elapsed() > SETTLE_TIMEOUT {
            return now;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Repeats `end`. The process must not use more afterwards than after as many earlier rounds.
fn check(rounds: usize, end: fn(&Server)) {
    // SAFETY: sets the C library's allocator to one arena, because a new one takes 64 MiB.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    let server = Server::new();
    // Let pools and tables grow to their final sizes.
    for _ in 0..rounds {
        end(&server);
    }
    // Pools may still grow once, depending on the timing of threads. A leak grows each time.
    let grows = || {
        let before = wait_until_stable(&server);
        for _ in 0..rounds {
            end(&server);
        }
        let after = wait_until_settled(&server, before, rounds);
        println!("{rounds} rounds: {before:?}, then {after:?}");
        after.exceeds(before, rounds)
    };
    assert!(!(grows() && grows()), "{rounds} rounds leak");
}

fn wait_until_stable(server: &Server) -> Usage {
    let start = Instant::now();
    let mut last = Usage::now();
    while start.elapsed() < SETTLE_TIMEOUT {
        server.drain();
        std::thread::sleep(Duration::from_millis(300));
        let now = Usage::now();
        if now.descriptors == last.descriptors && now.heap == last.heap {
            break;
        }
        last = now;
    }
    last
}
