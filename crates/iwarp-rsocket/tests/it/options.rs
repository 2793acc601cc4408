//! Tests of the options of new, connected, listening and accepted rsockets. Each option is tested
//! alone, and together with all other options.

use crate::common::Rs;
use iwarp_rsocket as rs;
use iwarp_rsocket::Errno;
use std::os::fd::RawFd;

/// The effect of an option on a connected socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Connected {
    Changes,
    /// Accepted without effect, because the buffers exist already.
    Stays,
    Refused,
}

/// An option: two values to set, and the values that are then read.
struct Row {
    level: i32,
    name: i32,
    set: [Vec<u8>; 2],
    get: [Vec<u8>; 2],
    connected: Connected,
    /// An accepted connection inherits the listener's value.
    inherited: bool,
}

fn int(value: i32) -> Vec<u8> {
    value.to_ne_bytes().to_vec()
}

fn row(level: i32, name: i32, set: [Vec<u8>; 2]) -> Row {
    Row {
        level,
        name,
        get: set.clone(),
        set,
        connected: Connected::Changes,
        inherited: true,
    }
}

fn flag(level: i32, name: i32) -> Row {
    // Any number but zero is true.
    let get = [int(1), int(0)];
    Row {
        get,
        ..row(level, name, [int(5), int(0)])
    }
}

/// A queue size, which cannot change after connecting.
fn queue_size(name: i32, values: [i32; 2]) -> Row {
    Row {
        connected: Connected::Refused,
        ..row(rs::SOL_RDMA, name, values.map(int))
    }
}

/// A buffer size. As in the kernel, twice the value is read.
fn buffer_size(name: i32) -> Row {
    let values = [20_000, 48_000];
    Row {
        get: values.map(|n| int(2 * n)),
        connected: Connected::Stays,
        ..row(libc::SOL_SOCKET, name, values.map(int))
    }
}

fn rows() -> Vec<Row> {
    let linger = |on: i32, seconds: i32| [on.to_ne_bytes(), seconds.to_ne_bytes()].concat();
    let time = |seconds: i64, micros: i64| [seconds.to_ne_bytes(), micros.to_ne_bytes()].concat();
    let socket = libc::SOL_SOCKET;
    vec![
        flag(socket, libc::SO_REUSEADDR),
        flag(socket, libc::SO_REUSEPORT),
        flag(socket, libc::SO_OOBINLINE),
        flag(libc::IPPROTO_TCP, libc::TCP_NODELAY),
        flag(libc::IPPROTO_IPV6, libc::IPV6_V6ONLY),
        Row {
            inherited: false,
            ..flag(socket, libc::SO_KEEPALIVE)
        },
        row(socket, libc::SO_LINGER, [linger(1, 7), linger(1, 9)]),
        row(socket, libc::SO_RCVTIMEO, [time(3, 250_000), time(0, 7000)]),
        row(socket, libc::SO_SNDTIMEO, [time(5, 0), time(0, 0)]),
        row(libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, [int(77), int(1234)]),
        row(libc::IPPROTO_IP, libc::IP_TOS, [int(0x48), int(0x20)]),
        buffer_size(libc::SO_RCVBUF),
        buffer_size(libc::SO_SNDBUF),
        queue_size(rs::RDMA_SQSIZE, [40, 50]),
        queue_size(rs::RDMA_RQSIZE, [60, 70]),
        queue_size(rs::RDMA_INLINE, [48, 32]),
        queue_size(rs::RDMA_IOMAPSIZE, [4, 8]),
    ]
}

impl Row {
    fn apply(&self, fd: RawFd, i: usize) -> rs::Result<()> {
        rs::set_option(fd, self.level, self.name, &self.set[i])
    }

    fn check(&self, fd: RawFd, i: usize, context: &str) {
        let got = rs::get_option(fd, self.level, self.name).unwrap();
        let (level, name) = (self.level, self.name);
        assert_eq!(got, self.get[i], "{context}: option {name} of {level}");
    }

    /// Sets the second value on a connected socket that has the first value.
    fn change_connected(&self, fd: RawFd, context: &str) {
        let result = self.apply(fd, 1);
        let refused = self.connected == Connected::Refused;
        let expected = if refused { Err(Errno::INVAL) } else { Ok(()) };
        let (level, name) = (self.level, self.name);
        assert_eq!(result, expected, "{context}: option {name} of {level}");
        let changed = self.connected == Connected::Changes;
        self.check(fd, usize::from(changed), context);
    }
}

/// Connects a client. Calls `before` with the listener before `listen`, and `after` after it.
fn connection(client: &Rs, before: impl Fn(&Rs), after: impl Fn(&Rs)) -> (Rs, Rs) {
    let l = Rs::new();
    before(&l);
    rs::bind(l.0, "127.0.0.1:0".parse().unwrap()).unwrap();
    rs::listen(l.0, 4).unwrap();
    after(&l);
    rs::connect(client.0, rs::local_address(l.0).unwrap()).unwrap();
    let accepted = Rs(rs::accept(l.0).unwrap().0);
    (l, accepted)
}

/// Sets each option alone, then all options together. No option changes another option.
#[test]
fn options_apply_in_each_state() {
    let all = rows();
    let alone = all.iter().map(std::slice::from_ref);
    for set in alone.chain([&all[..]]) {
        for listened in [false, true] {
            let client = Rs::new();
            let apply = |fd, i| set.iter().for_each(|row| row.apply(fd, i).unwrap());
            let check = |fd, i, context: &str| {
                set.iter().for_each(|row| row.check(fd, i, context));
            };
            for i in [1, 0] {
                apply(client.0, i);
                check(client.0, i, "new");
            }
            let (l, accepted) = connection(
                &client,
                |l| apply(l.0, usize::from(listened)),
                |l| {
                    apply(l.0, 0);
                    check(l.0, 0, "listener");
                },
            );
            check(client.0, 0, "after connect");
            for row in set {
                // An option that is not inherited has its second value, which is off.
                row.check(accepted.0, usize::from(!row.inherited), "accepted");
            }
            for row in set {
                row.change_connected(client.0, "connected");
                if !row.inherited {
                    row.apply(accepted.0, 0).unwrap();
                }
                row.change_connected(accepted.0, "accepted and changed");
            }
            check(l.0, 0, "listener, when its connection was changed");
            client.send_all(b"x");
            assert_eq!(accepted.recv_n(1), b"x");
        }
    }
}

/// Descriptor flags are not inherited, and setting one flag does not change the other.
#[test]
fn descriptor_flags_are_not_inherited() {
    let flags = |fd: RawFd| {
        let get = |command, flag| rs::control(fd, command, 0).unwrap() & flag != 0;
        (
            get(libc::F_GETFL, libc::O_NONBLOCK),
            get(libc::F_GETFD, libc::FD_CLOEXEC),
        )
    };
    let set = |fd, (nonblocking, close_on_exec): (bool, bool)| {
        let nonblocking = if nonblocking { libc::O_NONBLOCK } else { 0 };
        rs::control(fd, libc::F_SETFL, nonblocking).unwrap();
        rs::control(fd, libc::F_SETFD, i32::from(close_on_exec)).unwrap();
    };
    for values in [(false, true), (false, false)] {
        let client = Rs::new();
        set(client.0, values);
        let (l, accepted) = connection(&client, |l| set(l.0, values), |_| {});
        assert_eq!(flags(client.0), values);
        assert_eq!(flags(l.0), values);
        assert_eq!(flags(accepted.0), (false, false));
        for other in [(true, true), (true, false), (false, true), (false, false)] {
            set(accepted.0, other);
            assert_eq!(flags(accepted.0), other);
        }
    }
    let both = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    for (given, expected) in [
        (0, (false, false)),
        (libc::SOCK_NONBLOCK, (true, false)),
        (libc::SOCK_CLOEXEC, (false, true)),
        (both, (true, true)),
    ] {
        let socket = rs::socket(libc::AF_INET, libc::SOCK_STREAM | given, 0).unwrap();
        assert_eq!(flags(socket), expected);
        rs::close(socket).unwrap();
    }
}
