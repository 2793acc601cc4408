//! What is measured (a point), and what a connection under test must be able to do (the traits).
//!
//! TCP implements them in `tcp.rs`, RDMA in `rdma.rs`; everything else of `perf` knows only this
//! file.

use clap::ValueEnum;
use iwarp::runtime::after_empty_poll;
use iwarp_cli_common::error::{Error, Result};
use iwarp_figures::Latencies;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

/// Largest message that a peer may ask for, in octets.
pub(crate) const MAX_SIZE: u64 = 64 << 20;
/// Largest number of parallel connections.
pub(crate) const MAX_QPS: u32 = 64;
/// Largest number of outstanding operations per connection.
pub(crate) const MAX_DEPTH: u32 = 4096;
/// Smallest buffer of a connection, in octets.
const MIN_BUFFER: u64 = 256 << 10;
/// An operation that takes longer than this ends the run, because the peer hangs.
pub(crate) const STALL: Duration = Duration::from_secs(10);

/// The operation under test.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, ValueEnum, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Op {
    /// Plain TCP only, the baseline of all ratios
    Tcp,
    /// Plain TCP that polls for as long as the library does before it sleeps.
    #[value(skip)]
    TcpPolls,
    /// RDMA Send into posted receives
    Send,
    /// RDMA Write
    Write,
    /// RDMA Read
    Read,
    /// Atomic FetchAdd, always 8 octets
    #[value(name = "fetchadd")]
    FetchAdd,
}

impl Op {
    /// Returns `true` for plain TCP, however it waits.
    pub(crate) const fn is_tcp(self) -> bool {
        matches!(self, Self::Tcp | Self::TcpPolls)
    }

    /// The name in tables and JSON.
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

/// How a side waits for data or completions.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, ValueEnum, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Poll {
    /// Spin: lowest latency, one busy core per side
    Spin,
    /// Sleep until the kernel wakes the thread
    Event,
}

impl Poll {
    /// The name in tables and JSON.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Spin => "spin",
            Self::Event => "event",
        }
    }
}

/// Latency or bandwidth.
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
    /// Plain TCP.
    Tcp,
    /// iWARP.
    Rdma,
}

/// Everything that is fixed when the connections of a measurement are set up. Points with equal
/// links share them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Link {
    /// TCP or RDMA.
    pub(crate) wire: Wire,
    /// MPA CRC (RDMA only).
    pub(crate) crc: bool,
    /// MPA markers (RDMA only).
    pub(crate) markers: bool,
    /// How completions are awaited; TCP connections serve both ways and always say `Event` here.
    pub(crate) poll: Poll,
    /// Parallel connections, 1–64; latency uses the first.
    pub(crate) qps: u32,
    /// Outstanding operations per connection, 1–4096 (RDMA bandwidth).
    pub(crate) depth: u32,
    /// Largest message that will be asked for, in octets: buffers are made once.
    pub(crate) max_size: u64,
}

/// One measured point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Point {
    /// Operation.
    pub(crate) op: Op,
    /// Message size in octets, at least 1.
    pub(crate) size: u64,
    /// MPA CRC; `false` for TCP.
    pub(crate) crc: bool,
    /// How both sides wait.
    pub(crate) poll: Poll,
    /// Latency or bandwidth.
    pub(crate) metric: Metric,
}

/// Checks what a peer sent before anything is allocated for it.
///
/// # Errors
/// Names the first value out of range.
pub(crate) fn check_link(l: &Link) -> Result<()> {
    in_range("qps", u64::from(l.qps), u64::from(MAX_QPS))?;
    in_range("depth", u64::from(l.depth), u64::from(MAX_DEPTH))?;
    in_range("size", l.max_size, MAX_SIZE)
}

/// Memory that one end of a link needs at most, in octets: two buffers for each connection.
pub(crate) fn memory_of(l: &Link) -> u64 {
    u64::from(l.qps) * 2 * l.max_size.max(MIN_BUFFER)
}

/// Checks a point against the link it shall run on.
///
/// # Errors
/// Names the first value that does not fit.
pub(crate) fn check_point(p: &Point, l: &Link) -> Result<()> {
    in_range("size", p.size, l.max_size)?;
    if p.op.is_tcp() != (l.wire == Wire::Tcp) {
        return Err(Error::failed(format!(
            "operation {} cannot run on this connection",
            p.op.name()
        )));
    }
    if p.op == Op::FetchAdd && p.size != 8 {
        return Err(Error::failed("FetchAdd works on 8 octets"));
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

/// Which end of a point this process plays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Starts operations and holds the clock.
    Client,
    /// Answers.
    Server,
}

/// A wire that can be listened on and connected to.
pub(crate) trait Transport {
    /// Server: starts listening on `at` for exactly the connections of `link`, which come from the
    /// address `from`. Over TCP they say who they are.
    ///
    /// # Errors
    /// When the address cannot be bound or the link cannot be offered.
    fn listen(&self, link: &Link, at: SocketAddr, from: IpAddr) -> Result<Box<dyn Pending>>;

    /// Client: connects to where the peer's `listen` said it listens. Bounded by [`STALL`].
    ///
    /// # Errors
    /// When the peer cannot be reached or refuses.
    fn connect(&self, link: &Link, to: SocketAddr) -> Result<Box<dyn Session>>;
}

/// A listening server side, before its client has connected.
pub(crate) trait Pending: Send {
    /// Where the client shall connect to.
    fn port(&self) -> u16;
    /// Waits, bounded by [`STALL`], for all connections of the link.
    ///
    /// # Errors
    /// When nobody came in time.
    fn accept(self: Box<Self>) -> Result<Box<dyn Session>>;
}

/// Established connections of one link. Both processes call the same method with the same
/// arguments, and the control connection makes sure that the server has finished `prepare` before
/// the client starts.
pub(crate) trait Session: Send {
    /// Gets ready for `iters` operations of `point`: post receives, fill buffers.
    ///
    /// # Errors
    /// When resources are missing.
    fn prepare(&mut self, role: Role, point: &Point, iters: u64) -> Result<()> {
        let _ = (role, point, iters);
        Ok(())
    }

    /// `iters` round trips, one outstanding. The client records each whole round trip in
    /// nanoseconds. Send and Write answer each message with one of the same kind; Read and FetchAdd
    /// are round trips by themselves and the server only stays until they are over.
    ///
    /// # Errors
    /// When a connection breaks or stalls.
    fn latency(
        &mut self,
        role: Role,
        point: &Point,
        iters: u64,
        hist: &mut Latencies,
    ) -> Result<()>;

    /// `iters` messages altogether, spread over the connections. The client gives the time from its
    /// first operation until it *knows* that the last octet has arrived (an acknowledgement in
    /// band, or the last Read's completion), so that every operation is measured by the same rule;
    /// the server's value is ignored.
    ///
    /// # Errors
    /// When a connection breaks or stalls.
    fn bandwidth(&mut self, role: Role, point: &Point, iters: u64) -> Result<Duration>;
}

/// A time limit for spinning loops. It looks at the clock only now and then.
#[derive(Debug)]
pub(crate) struct SpinGuard {
    spins: u32,
    deadline: Option<Instant>,
}

impl SpinGuard {
    /// A guard whose time starts when it is first looked at.
    pub(crate) fn new() -> Self {
        Self {
            spins: 0,
            deadline: None,
        }
    }

    /// Call this after every turn without result that has looked at no completion queue, because
    /// the peer may be waiting for this processor. Polling a completion queue yields by itself.
    ///
    /// # Errors
    /// As [`SpinGuard::turn`].
    pub(crate) fn turn_of_its_own(&mut self) -> Result<()> {
        after_empty_poll();
        self.turn()
    }

    /// Call this after every turn without result.
    ///
    /// # Errors
    /// After [`STALL`] without [`SpinGuard::reset`].
    pub(crate) fn turn(&mut self) -> Result<()> {
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

    /// Call this when something has happened: the time starts anew.
    pub(crate) fn reset(&mut self) {
        (self.spins, self.deadline) = (0, None);
    }
}

/// The error of a peer that is connected but silent.
pub(crate) fn stalled() -> Error {
    Error::failed(format!(
        "the peer did nothing for {} seconds",
        STALL.as_secs()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_peer_asks_for_is_checked() {
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
        assert!(
            check_link(&Link {
                qps: 0,
                ..link.clone()
            })
            .is_err()
        );
        assert!(
            check_link(&Link {
                qps: 65,
                ..link.clone()
            })
            .is_err()
        );
        assert!(
            check_link(&Link {
                depth: 4097,
                ..link.clone()
            })
            .is_err()
        );
        assert!(
            check_link(&Link {
                max_size: MAX_SIZE + 1,
                ..link.clone()
            })
            .is_err()
        );
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
        assert!(
            check_point(
                &Point {
                    op: Op::FetchAdd,
                    ..p
                },
                &rdma
            )
            .is_err()
        );
        assert!(
            check_point(
                &Point {
                    op: Op::FetchAdd,
                    size: 8,
                    ..p
                },
                &rdma
            )
            .is_ok()
        );
    }
}
