//! Numbers of datagram queue pairs. Each contains the port of the queue pair's sockets, and is
//! unique on the device.

use super::member::Member;
use iwarp_proto::datagram::MULTICAST_QP;
use parking_lot::RwLock;
use std::collections::HashMap;
use std::sync::{Arc, Weak};

#[derive(Default)]
pub(crate) struct Numbers(RwLock<HashMap<u32, Option<Weak<dyn Member>>>>);

impl Numbers {
    pub(crate) fn contains(&self, num: u32) -> bool {
        self.0.read().contains_key(&num)
    }

    /// Takes a number that contains `port`, is not taken, and is not `used` by another kind of
    /// queue pair. The search of its other bits starts at `random`. Returns `None` if all are in
    /// use.
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

    /// Sets the queue pair of a number that was taken before.
    pub(crate) fn set<M: Member>(&self, qp: &Arc<M>) {
        let weak: Weak<dyn Member> = Arc::downgrade(qp) as _;
        self.0.write().insert(qp.num(), Some(weak));
    }

    pub(crate) fn remove(&self, num: u32) {
        self.0.write().remove(&num);
    }

    /// Returns the existing queue pairs; `None` if the list is locked and `wait` is `false`.
    pub(crate) fn all(&self, wait: bool) -> Option<Vec<Arc<dyn Member>>> {
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
    fn number_is_new_and_contains_port() {
        let numbers = Numbers::default();
        let high = |wanted: u32| move |num: u32| num >> 16 != wanted;
        // Numbers of connections and of other datagram queue pairs are skipped.
        for n in 1..=3 {
            assert_eq!(
                numbers.take(7, 5, |num| num >> 16 <= 5),
                Some((5 + n) << 16 | 7)
            );
        }
        assert_eq!(numbers.take(7, 0, high(6)), None, "the number is taken");
        assert_eq!(
            numbers.take(8, 0, high(6)),
            Some(6 << 16 | 8),
            "another port"
        );
        assert!(numbers.contains(6 << 16 | 7) && !numbers.contains(5 << 16 | 7));
        numbers.remove(6 << 16 | 7);
        assert!(!numbers.contains(6 << 16 | 7));
        assert_eq!(
            numbers.take(7, 9, high(6)),
            Some(6 << 16 | 7),
            "the search wraps around"
        );
        // Reserved numbers.
        assert_eq!(numbers.take(0, 0, high(0)), None);
        assert_eq!(numbers.take(1, 0, high(0)), None);
        assert_eq!(numbers.take(2, 0, high(0)), Some(2));
        assert_eq!(numbers.take(0xffff, 0, high(0xff)), None);
        assert_eq!(numbers.take(0xfffe, 0, high(0xff)), Some(0xff_fffe));
    }
}
