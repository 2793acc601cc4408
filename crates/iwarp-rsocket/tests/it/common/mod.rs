//! Test helpers: pairs of connected rsockets, a data pattern in which each byte depends on its
//! position, and time limits.

#[path = "../../../../iwarp/tests/it/common/alone.rs"]
pub(crate) mod alone;

pub(crate) use alone::{alone, alone_with};

use iwarp_rsocket as rs;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

#[derive(Debug)]
pub(crate) struct Rs(pub(crate) RawFd);

impl Drop for Rs {
    fn drop(&mut self) {
        let _ = rs::close(self.0);
    }
}

impl Rs {
    pub(crate) fn new() -> Self {
        Self(rs::socket(libc::AF_INET, libc::SOCK_STREAM, 0).unwrap())
    }

    pub(crate) fn set(&self, level: i32, name: i32, value: i32) {
        rs::set_option(self.0, level, name, &value.to_ne_bytes()).unwrap();
    }

    pub(crate) fn get(&self, level: i32, name: i32) -> i32 {
        let got = rs::get_option(self.0, level, name).unwrap();
        i32::from_ne_bytes(got[..4].try_into().unwrap())
    }

    pub(crate) fn nonblocking(&self) {
        rs::control(self.0, libc::F_SETFL, libc::O_NONBLOCK).unwrap();
    }

    pub(crate) fn send_all(&self, mut data: &[u8]) {
        while !data.is_empty() {
            let n = rs::send(self.0, data, 0).unwrap();
            data = &data[n..];
        }
    }

    /// Receives `len` bytes, or fewer at the end of the stream.
    pub(crate) fn recv_n(&self, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        let n = rs::recv(self.0, &mut out, libc::MSG_WAITALL).unwrap();
        out.truncate(n);
        out
    }

    pub(crate) fn poll(&self, events: i16, timeout_ms: u64) -> i16 {
        let mut set = [libc::pollfd {
            fd: self.0,
            events,
            revents: 0,
        }];
        rs::poll(&mut set, Some(Duration::from_millis(timeout_ms))).unwrap();
        set[0].revents
    }
}

/// Returns a listener on a free port, and its address. `tune` sets its options before it is bound.
pub(crate) fn listener(tune: impl Fn(&Rs)) -> (Rs, SocketAddr) {
    let l = Rs::new();
    tune(&l);
    rs::bind(l.0, "127.0.0.1:0".parse().unwrap()).unwrap();
    rs::listen(l.0, 16).unwrap();
    let address = rs::local_address(l.0).unwrap();
    assert_ne!(address.port(), 0);
    (l, address)
}

/// Returns a connected client and server. `tune` sets the options of the client and the listener.
pub(crate) fn pair_with(tune: impl Fn(&Rs)) -> (Rs, Rs) {
    let (l, address) = listener(&tune);
    let c = Rs::new();
    tune(&c);
    rs::connect(c.0, address).unwrap();
    let (s, peer) = rs::accept(l.0).unwrap();
    assert_eq!(peer, Some(rs::local_address(c.0).unwrap()));
    (c, Rs(s))
}

pub(crate) fn pair() -> (Rs, Rs) {
    pair_with(|_| {})
}

/// Returns a byte of the data pattern. The pattern has no short period, so misplaced data is
/// detected.
pub(crate) fn octet(position: usize) -> u8 {
    let x = (position as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x >> 56) as u8 ^ position as u8
}

pub(crate) fn pattern(from: usize, len: usize) -> Vec<u8> {
    (from..from + len).map(octet).collect()
}

pub(crate) struct TimeLimit(Instant, Duration);

pub(crate) fn time_limit(limit: Duration) -> TimeLimit {
    TimeLimit(Instant::now(), limit)
}

impl TimeLimit {
    pub(crate) fn assert_within(&self) {
        assert!(self.0.elapsed() < self.1, "took longer than {:?}", self.1);
    }
}
