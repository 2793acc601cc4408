//! Selects and sorts queue pairs: the options `--peer` and `--sort`.

use super::document::{ProcessStats, QueuePair, counter};
use super::rates::{Previous, Rates};
use clap::ValueEnum;
use iwarp::Networks;
use std::cmp::{Ordering, Reverse};
use std::net::SocketAddr;
use std::str::FromStr;

/// What the table shows.
#[derive(Debug, Clone, Default)]
pub(super) struct View {
    /// `None`: by process, then connected queue pairs first, then by device and number.
    pub(super) sort: Option<Column>,
    /// `None`: also queue pairs without a connection.
    pub(super) peers: Option<Peers>,
}

/// A column of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Column {
    /// Number of the queue pair
    Qp,
    /// State, in alphabetical order
    State,
    /// Address and port of the peer
    Peer,
    /// Octets sent; octets per second with --watch
    Sent,
    /// Octets received; octets per second with --watch
    Received,
    /// Send requests that are not complete
    Out,
    /// Receives that are posted
    In,
    /// Segments that TCP sent again
    Retrans,
    /// TCP's round-trip time
    Rtt,
}

impl Column {
    /// Returns the name of the option's value.
    pub(super) fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |v| v.get_name().to_owned())
    }

    /// Returns the column after `current`, or the default order after the last.
    pub(super) fn after(current: Option<Self>) -> Option<Self> {
        let all = Self::value_variants();
        match current {
            None => all.first().copied(),
            Some(current) => {
                let at = all.iter().position(|c| *c == current)?;
                all.get(at + 1).copied()
            }
        }
    }

    /// Compares two rows. Text ascends, and numbers descend, so that the busiest come first.
    fn compare(self, a: &Row<'_>, b: &Row<'_>) -> Ordering {
        let connection = |row: &Row<'_>| row.qp.connection.clone().unwrap_or_default();
        let descending = |f: &dyn Fn(&Row<'_>) -> f64| f(b).total_cmp(&f(a));
        match self {
            Self::Qp => a.qp.number.cmp(&b.qp.number),
            Self::State => a.qp.state.cmp(&b.qp.state),
            Self::Peer => peer_key(a.qp).cmp(&peer_key(b.qp)),
            Self::Sent => descending(&|row| row.moved("tx_bytes", |r| r.sent_octets)),
            Self::Received => descending(&|row| row.moved("rx_bytes", |r| r.received_octets)),
            Self::Out => b.qp.sends_outstanding.cmp(&a.qp.sends_outstanding),
            Self::In => b.qp.receives_posted.cmp(&a.qp.receives_posted),
            Self::Retrans => {
                Reverse(connection(a).tcp_retransmits).cmp(&Reverse(connection(b).tcp_retransmits))
            }
            Self::Rtt => Reverse(connection(a).tcp_rtt_us).cmp(&Reverse(connection(b).tcp_rtt_us)),
        }
    }
}

/// Returns a key by which peers are sorted: queue pairs without a peer come last.
fn peer_key(qp: &QueuePair) -> (bool, Option<SocketAddr>, String) {
    let peer = qp.connection.as_ref().map(|c| c.peer.clone());
    let peer = peer.unwrap_or_default();
    (peer.is_empty(), peer.parse().ok(), peer)
}

/// A queue pair and its rates, if there is an earlier answer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row<'a> {
    pub(super) qp: &'a QueuePair,
    pub(super) rates: Option<Rates>,
}

impl Row<'_> {
    fn moved(&self, total: &str, rate_of: fn(Rates) -> f64) -> f64 {
        match self.rates {
            Some(rates) => rate_of(rates),
            None => counter(&self.qp.counters, total) as f64,
        }
    }
}

/// A process and its selected queue pairs, in order.
pub(super) struct Group<'a> {
    pub(super) stats: &'a ProcessStats,
    pub(super) rows: Vec<Row<'a>>,
}

impl View {
    /// Returns the selected queue pairs in order. With `peers`, processes without such a queue pair
    /// are left out.
    pub(super) fn groups<'a>(
        &self,
        stats: &'a [ProcessStats],
        previous: &Previous,
    ) -> Vec<Group<'a>> {
        let group = |one: &'a ProcessStats| {
            let all = one.document.queue_pairs.iter();
            let mut rows: Vec<_> = all
                .filter(|qp| self.peers.as_ref().is_none_or(|peers| peers.matches(qp)))
                .map(|qp| Row {
                    qp,
                    rates: previous.rates(one, qp),
                })
                .collect();
            if let Some(column) = self.sort {
                rows.sort_by(|a, b| column.compare(a, b));
            }
            Group { stats: one, rows }
        };
        let mut groups: Vec<_> = stats.iter().map(group).collect();
        if self.peers.is_some() {
            groups.retain(|group| !group.rows.is_empty());
        }
        if let Some(column) = self.sort {
            // A process is placed by its first queue pair; those without one come last.
            groups.sort_by(|a, b| match (a.rows.first(), b.rows.first()) {
                (Some(a), Some(b)) => column.compare(a, b),
                (a, b) => b.is_some().cmp(&a.is_some()),
            });
        }
        groups
    }
}

/// The peers of `--peer`: one address and port, or networks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Peers {
    One(SocketAddr),
    In(Networks),
}

impl FromStr for Peers {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(one) = text.parse() {
            return Ok(Self::One(one));
        }
        text.parse().map(Self::In).map_err(|e| {
            format!("{e}; write an address, an address and a port, or networks: 10.0.0.0/8,::1")
        })
    }
}

impl Peers {
    /// Returns `true` if the queue pair is connected to one of these peers.
    pub(super) fn matches(&self, qp: &QueuePair) -> bool {
        qp.connection
            .as_ref()
            .is_some_and(|c| self.contain(&c.peer))
    }

    /// Returns `true` if `peer`, an address and a port, is one of these peers.
    pub(super) fn contain(&self, peer: &str) -> bool {
        let Ok(peer) = peer.parse::<SocketAddr>() else {
            return false;
        };
        match self {
            Self::One(one) => {
                one.ip().to_canonical() == peer.ip().to_canonical() && one.port() == peer.port()
            }
            Self::In(networks) => networks.contains(peer.ip()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn stats(pid: u32, queue_pairs: &[(u32, &str, u64)]) -> ProcessStats {
        let queue_pairs: Vec<_> = queue_pairs
            .iter()
            .map(|(number, peer, sent)| {
                json!({"number": number, "counters": {"tx_bytes": sent},
                       "connection": {"peer": peer, "tcp_rtt_us": 1000 - sent}})
            })
            .collect();
        let text = json!({"format": 1, "queue_pairs": queue_pairs});
        ProcessStats::read(Some(pid), 0, text.to_string().as_bytes()).unwrap()
    }

    fn shown(stats: &[ProcessStats], sort: Option<Column>, peers: &str) -> Vec<(u32, Vec<u32>)> {
        let peers = (!peers.is_empty()).then(|| peers.parse().unwrap());
        let view = View { sort, peers };
        let groups = view.groups(stats, &Previous::default());
        let numbers = |g: &Group<'_>| g.rows.iter().map(|row| row.qp.number).collect();
        groups.iter().map(|g| (g.stats.pid, numbers(g))).collect()
    }

    #[test]
    fn groups_are_sorted_and_filtered() {
        let all = [
            stats(1, &[(5, "10.0.0.9:1", 10), (6, "10.0.0.10:1", 20)]),
            stats(2, &[]),
            stats(3, &[(4, "[::1]:2", 500), (9, "10.0.0.9:2", 1)]),
        ];
        let sorted = |column| shown(&all, Some(column), "");
        assert_eq!(
            shown(&all, None, ""),
            [(1, vec![5, 6]), (2, vec![]), (3, vec![4, 9])]
        );
        assert_eq!(
            sorted(Column::Sent),
            [(3, vec![4, 9]), (1, vec![6, 5]), (2, vec![])]
        );
        assert_eq!(
            sorted(Column::Rtt),
            [(3, vec![9, 4]), (1, vec![5, 6]), (2, vec![])]
        );
        // Addresses are compared as numbers: 9 comes before 10.
        assert_eq!(
            sorted(Column::Peer),
            [(1, vec![5, 6]), (3, vec![9, 4]), (2, vec![])]
        );
        assert_eq!(shown(&all, None, "::1"), [(3, vec![4])]);
        assert_eq!(shown(&all, None, "10.0.0.9:2"), [(3, vec![9])]);
        assert_eq!(
            shown(&all, None, "10.0.0.8/30"),
            [(1, vec![5, 6]), (3, vec![9])]
        );
        assert!("host".parse::<Peers>().is_err());
    }

    #[test]
    fn each_column_follows_another() {
        let mut seen = Vec::new();
        let mut current = Column::after(None);
        while let Some(column) = current {
            seen.push(column);
            current = Column::after(current);
        }
        assert_eq!(seen, Column::value_variants());
    }
}
