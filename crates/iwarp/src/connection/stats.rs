//! Statistics of a connection.

use super::handle::Connection;
use std::time::Duration;

/// Statistics of a connection; see [`Connection::stats`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Traffic of this end.
    pub sent: Traffic,
    /// Traffic of the peer.
    pub received: Traffic,
    /// What TCP reports; `None` after the end of the connection.
    pub transport: Option<Transport>,
}

/// Traffic in one direction, since the connection was established.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Traffic {
    /// Bytes of payload: of Sends, Writes and answers to Reads.
    pub octets: u64,
    /// Messages: Sends, Writes, requests and answers of Reads and atomics, and the empty message
    /// with which an enhanced set-up ends (RFC 6581).
    pub messages: u64,
}

/// What TCP reports about a connection (`tcp(7)`, `TCP_INFO`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Transport {
    /// Smoothed round-trip time.
    pub rtt: Duration,
    /// Segments that were retransmitted since the connection was established.
    pub retransmits: u32,
    /// Bytes that are queued in the socket or in flight: the peer has not acknowledged them.
    pub octets_in_flight: u64,
}

impl Connection {
    /// Returns statistics. Takes two system calls, and does not block.
    pub fn stats(&self) -> Stats {
        let qp = self.inner.qp();
        let counters = qp.counters();
        let transport = qp.transport().map(|(info, octets_in_flight)| Transport {
            rtt: Duration::from_micros(info.rtt_us.into()),
            retransmits: info.retransmits,
            octets_in_flight,
        });
        Stats {
            sent: Traffic {
                octets: counters.tx_payload,
                messages: counters.tx_messages,
            },
            received: Traffic {
                octets: counters.rx_payload,
                messages: counters.rx_messages,
            },
            transport,
        }
    }
}
