//! A point (what one measurement measures), and the traits of a connection under test.
//!
//! `tcp.rs` implements the traits for TCP and `rdma.rs` for RDMA; the rest of `perf` uses only the
//! traits.

use clap::ValueEnum;
use iwarp::runtime::after_empty_poll;
use iwarp_cli_common::error::{Error, Result};
use iwarp_figures::Latencies;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

/// Largest message that a peer may request, in bytes.
pub(crate) const MAX_SIZE: u64 = 64 << 20;
/// Largest number of parallel connections.
pub(crate) const MAX_QPS: u32 = 64;
/// Largest number of outstanding operations per connection.
pub(crate) const MAX_DEPTH: u32 = 4096;
/// Smallest buffer of a connection, in bytes.
const MIN_BUFFER: u64 = 256 << 10;
/// An operation that takes longer than this ends the run: the peer hangs.
pub(crate) const STALL: Duration = Duration::from_secs(10);

/// The operation under test.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, ValueEnum, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Op {
    /// Plain TCP only, the baseline of all ratios
    Tcp,
    /// Plain TCP that, before it sleeps, polls for as long as the library.
    #[value(skip)]
    TcpPolls,
    /// RDMA Send into posted receives
    Send,
    /// RDMA Write
    Write,
    /// RDMA Read
    Read,
    /// Atomic FetchAdd, always 8 bytes
    #[value(name = "fetchadd")]
    FetchAdd,
}

impl Op {
    /// Returns `true` for plain TCP, however it waits.
    pub(crate) const fn is_tcp(self) -> bool {
        matches!(self, Self::Tcp | Self::TcpPolls)
    }

    /// Returns the name in tables and JSON.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::TcpPolls => "tcp, polls",
            Self::Send => "send",
            Self::Write => "write",
            Self::Read => "read",
            Self::FetchAdd => "fetchadd",
        }
    }
}

/// How an end waits for data or completions.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, ValueEnum, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Poll {
    /// Spin: lowest latency, one busy core per end
    Spin,
    /// Sleep until the kernel wakes the thread
    Event,
}

impl Poll {
    /// Returns the name in tables and JSON.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Spin => "spin",
            Self::Event => "event",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Metric {
    /// Ping-pong, one operation outstanding.
    Latency,
    /// A stream of operations, `depth` outstanding.
    Bandwidth,
}

/// Plain TCP or iWARP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Wire {
    Tcp,
    Rdma,
}

/// The parameters of the connections of a measurement. Points with equal links share them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Link {
    pub(crate) wire: Wire,
    /// MPA CRC (RDMA only).
    pub(crate) crc: bool,
    /// MPA markers (RDMA only).
    pub(crate) markers: bool,
    /// How the ends wait for completions. Always `Event` for TCP, because its connections do not
    /// depend on the way of waiting.
    pub(crate) poll: Poll,
    /// Parallel connections, 1–64; latency uses the first one.
    pub(crate) qps: u32,
    /// Outstanding operations per connection, 1–4096 (RDMA bandwidth).
    pub(crate) depth: u32,
    /// Largest message, in bytes: buffers are allocated once.
    pub(crate) max_size: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Point {
    pub(crate) op: Op,
    /// Message size in bytes, at least 1.
    pub(crate) size: u64,
    /// MPA CRC; `false` for TCP.
    pub(crate) crc: bool,
    /// How both ends wait.
    pub(crate) poll: Poll,
    pub(crate) metric: Metric,
}

/// Checks the values that a peer requests, before anything is allocated.
pub(crate) fn check_link(l: &Link) -> Result<()> {
    in_range("qps", u64::from(l.qps), u64::from(MAX_QPS))?;
    in_range("depth", u64::from(l.depth), u64::from(MAX_DEPTH))?;
    in_range("size", l.max_size, MAX_SIZE)
}

/// Returns the memory that one end of a link needs at most: two buffers per connection.
pub(crate) fn memory_of(l: &Link) -> u64 {
    u64::from(l.qps) * 2 * l.max_size.max(MIN_BUFFER)
}

pub(crate) fn check_point(p: &Point, l: &Link) -> Result<()> {
    in_range("size", p.size, l.max_size)?;
    if p.op.is_tcp() != (l.wire == Wire::Tcp) {
        return Err(Error::failed(format!(
            "operation {} cannot run on this connection",
            p.op.name()
        )));
    }
    if p.op == Op::FetchAdd && p.size != 8 {
        return Err(Error::failed("FetchAdd needs a size of 8 bytes"));
    }
    Ok(())
}

fn in_range(what: &str, v: u64, max: u64) -> Result<()> {
    if v == 0 || v > max {
        return Err(Error::failed(format!(
            "{what} must be between 1 and {max}, not {v}"
        )));
    }
    Ok(())
}

/// The role of this process in a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Starts operations and measures the time.
    Client,
    Server,
}

/// A wire under test.
pub(crate) trait Transport {
    /// Server: listens on `at` for the connections of `link` from the address `from`. TCP
    /// connections identify themselves.
    fn listen(&self, link: &Link, at: SocketAddr, from: IpAddr) -> Result<Box<dyn Pending>>;

    /// Client: connects to the listening peer, within [`STALL`].
    fn connect(&self, link: &Link, to: SocketAddr) -> Result<Box<dyn Session>>;
}

/// A listening server, before its client has connected.
pub(crate) trait Pending: Send {
    fn port(&self) -> u16;
    /// Waits, at most [`STALL`], for all connections of the link.
    fn accept(self: Box<Self>) -> Result<Box<dyn Session>>;
}

/// The established connections of one link. Both processes call the same methods with the same
/// arguments. The control connection ensures that the server prepares before the client starts.
pub(crate) trait Session: Send {
    /// Prepares `iters` operations of `point`: posts receives, clears buffers.
    fn prepare(&mut self, role: Role, point: &Point, iters: u64) -> Result<()> {
        let _ = (role, point, iters);
        Ok(())
    }

    /// Performs `iters` round trips, one at a time. The client records the duration of each in
    /// nanoseconds. Sends and Writes are answered by the same operation. Reads and FetchAdds are
    /// round trips by themselves, and the server only waits until they are over.
    fn latency(
        &mut self,
        role: Role,
        point: &Point,
        iters: u64,
        hist: &mut Latencies,
    ) -> Result<()>;

    /// Transfers `iters` messages in all, spread over the connections. The client returns the time
    /// from its first operation until it *knows* that the last byte has arrived: by an in-band
    /// acknowledgement, or by the last Read's completion. The server's value is ignored.
    fn bandwidth(&mut self, role: Role, point: &Point, iters: u64) -> Result<Duration>;
}

/// A time limit for spinning loops. It reads the clock only every 4096 turns.
#[derive(Debug)]
pub(crate) struct SpinGuard {
    spins: u32,
    deadline: Option<Instant>,
}

impl SpinGuard {
    /// Creates a guard; its time starts with the first turns without progress.
    pub(crate) fn new() -> Self {
        Self {
            spins: 0,
            deadline: None,
        }
    }

    /// Like [`no_progress`](Self::no_progress), for a turn that polled no completion queue. Yields
    /// the processor, for which the peer may be waiting. Polling a completion queue does that, too.
    pub(crate) fn yield_without_progress(&mut self) -> Result<()> {
        after_empty_poll();
        self.no_progress()
    }

    /// Call this after each turn without progress.
    ///
    /// # Errors
    /// Fails when there has been no progress for [`STALL`].
    pub(crate) fn no_progress(&mut self) -> Result<()> {
        std::hint::spin_loop();
        self.spins = self.spins.wrapping_add(1);
        if self.spins.is_multiple_of(1 << 12) {
            let now = Instant::now();
            if now > *self.deadline.get_or_insert(now + STALL) {
                return Err(stalled());
            }
        }
        Ok(())
    }

    /// Restarts the time limit. Call this after progress.
    pub(crate) fn reset(&mut self) {
        (self.spins, self.deadline) = (0, None);
    }
}

/// Returns the error for a silent peer.
pub(crate) fn stalled() -> Error {
    Error::failed(format!(
        "the peer made no progress for {} seconds",
        STALL.as_secs()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_requests_are_checked() {
        let link = Link {
            wire: Wire::Tcp,
            crc: false,
            markers: false,
            poll: Poll::Event,
            qps: 1,
            depth: 1,
            max_size: 64,
        };
        assert!(check_link(&link).is_ok());
        let refused = |link: Link| assert!(check_link(&link).is_err(), "{link:?}");
        refused(Link {
            qps: 0,
            ..link.clone()
        });
        refused(Link {
            qps: 65,
            ..link.clone()
        });
        refused(Link {
            depth: 4097,
            ..link.clone()
        });
        refused(Link {
            max_size: MAX_SIZE + 1,
            ..link.clone()
        });
        let p = Point {
            op: Op::Tcp,
            size: 64,
            crc: false,
            poll: Poll::Spin,
            metric: Metric::Latency,
        };
        assert!(check_point(&p, &link).is_ok());
        assert!(check_point(&Point { size: 65, ..p }, &link).is_err());
        assert!(check_point(&Point { size: 0, ..p }, &link).is_err());
        assert!(check_point(&Point { op: Op::Write, ..p }, &link).is_err());
        let rdma = Link {
            wire: Wire::Rdma,
            ..link
        };
        let add = Point {
            op: Op::FetchAdd,
            ..p
        };
        assert!(check_point(&add, &rdma).is_err());
        assert!(check_point(&Point { size: 8, ..add }, &rdma).is_ok());
    }
}
