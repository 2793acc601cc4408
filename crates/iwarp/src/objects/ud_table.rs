//! The table of datagram queue pairs by their numbers. A number contains the port of the queue
//! pair's sockets, and is unique on the device.

use super::any_qp::AnyQp;
use iwarp_proto::datagram::MULTICAST_QP;
use parking_lot::RwLock;
use std::collections::HashMap;
use std::sync::{Arc, Weak};

/// Datagram queue pairs by number. The value is `None` until [`set`](Self::set) stores the queue
/// pair.
#[derive(Default)]
pub(crate) struct UdTable(RwLock<HashMap<u32, Option<Weak<dyn AnyQp>>>>);

impl UdTable {
    pub(crate) fn contains(&self, num: u32) -> bool {
        self.0.read().contains_key(&num)
    }

    /// Allocates a number whose low 16 bits are `port`. The search for free high bits starts at
    /// `random`. `used` returns `true` for a number that a queue pair of another kind has. Returns
    /// `None` if all numbers with this port are in use.
    pub(crate) fn take(&self, port: u16, random: u32, used: impl Fn(u32) -> bool) -> Option<u32> {
        let mut all = self.0.write();
        let numbers = (0..=0xff).map(|i| (random.wrapping_add(i) & 0xff) << 16 | u32::from(port));
        // 0 and 1 are used for management on other transports.
        let num = numbers.into_iter().find(|num| {
            *num > 1 && *num != MULTICAST_QP && !used(*num) && !all.contains_key(num)
        })?;
        all.insert(num, None);
        Some(num)
    }

    /// Stores the queue pair of a number that [`take`](Self::take) has returned.
    pub(crate) fn set<M: AnyQp>(&self, qp: &Arc<M>) {
        let weak: Weak<dyn AnyQp> = Arc::downgrade(qp) as _;
        self.0.write().insert(qp.num(), Some(weak));
    }

    pub(crate) fn remove(&self, num: u32) {
        self.0.write().remove(&num);
    }

    /// Returns the queue pairs that exist. Without `wait`, returns `None` if the table is locked.
    pub(crate) fn all(&self, wait: bool) -> Option<Vec<Arc<dyn AnyQp>>> {
        let all = match wait {
            true => self.0.read(),
            false => self.0.try_read()?,
        };
        Some(all.values().flatten().filter_map(Weak::upgrade).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_is_unused_and_contains_port() {
        let numbers = UdTable::default();
        // Reports all numbers as used except those with these high bits.
        let only = |high: u32| move |num: u32| num >> 16 != high;
        // `take` skips numbers that `used` reports (here, high bits up to 5) and numbers that it
        // has returned before.
        for n in 1..=3 {
            assert_eq!(
                numbers.take(7, 5, |num| num >> 16 <= 5),
                Some((5 + n) << 16 | 7)
            );
        }
        assert_eq!(numbers.take(7, 0, only(6)), None, "the number is taken");
        assert_eq!(
            numbers.take(8, 0, only(6)),
            Some(6 << 16 | 8),
            "another port"
        );
        assert!(numbers.contains(6 << 16 | 7) && !numbers.contains(5 << 16 | 7));
        numbers.remove(6 << 16 | 7);
        assert!(!numbers.contains(6 << 16 | 7));
        assert_eq!(
            numbers.take(7, 9, only(6)),
            Some(6 << 16 | 7),
            "the search wraps around"
        );
        // UdTable 0, 1 and that of multicast are reserved.
        assert_eq!(numbers.take(0, 0, only(0)), None);
        assert_eq!(numbers.take(1, 0, only(0)), None);
        assert_eq!(numbers.take(2, 0, only(0)), Some(2));
        assert_eq!(numbers.take(0xffff, 0, only(0xff)), None);
        assert_eq!(numbers.take(0xfffe, 0, only(0xff)), Some(0xff_fffe));
    }
}
