//! The requests of a listener for datagrams: which senders are challenged, which requests are
//! repeated, and how many may wait.
//!
//! Nothing is kept for a sender that has not returned a cookie, so that spoofed addresses cannot
//! fill the table. A reply is kept for some time: if it is lost, the request comes again.

use iwarp_proto::sidr::{MESSAGE_LEN, Message};
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;

/// The largest number of replies that are kept.
const REPLIES_MAX: usize = 1024;
/// How long a reply is kept. By default a requester repeats its request for at most 64 s.
const REPLY_LIFE_NS: u64 = 64_000_000_000;
/// A cookie is valid for at least this time, and less than twice as long.
const COOKIE_LIFE_NS: u64 = 64_000_000_000;

/// Identifies a request: the requester's address, and the number that it has given the request.
pub(super) type Key = (SocketAddr, u64);

/// A sealed reply.
pub(super) type Reply = Box<[u8; MESSAGE_LEN]>;

/// What to do about a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Advice {
    /// Send a challenge with this cookie.
    Challenge(u64),
    /// Nothing.
    Ignore,
    /// Send this reply again.
    Again(Reply),
    /// Pass it to the program. It counts as waiting until it is answered.
    New,
}

enum Entry {
    Waiting,
    Answered(Reply),
}

/// See the module.
pub(super) struct RequestTable {
    /// A key that no peer knows.
    secret: RandomState,
    entries: HashMap<Key, Entry>,
    /// Answered requests with the times of their replies, the oldest first.
    answered: VecDeque<(Key, u64)>,
    waiting: usize,
    waiting_max: usize,
}

impl RequestTable {
    /// Creates a table in which `waiting_max` requests can wait for the program's answer.
    pub(super) fn new(waiting_max: usize) -> Self {
        Self {
            secret: RandomState::new(),
            entries: HashMap::new(),
            answered: VecDeque::new(),
            waiting: 0,
            waiting_max,
        }
    }

    fn cookie(&self, key: Key, epoch: u64) -> u64 {
        // Zero is no cookie.
        self.secret.hash_one((key, epoch)) | 1
    }

    /// Decides about a request that came at the time `now`, in nanoseconds.
    pub(super) fn take(&mut self, peer: SocketAddr, request: &Message<'_>, now: u64) -> Advice {
        let key = (peer, request.id);
        let epoch = now / COOKIE_LIFE_NS;
        let current = self.cookie(key, epoch);
        let before = self.cookie(key, epoch.wrapping_sub(1));
        if request.cookie != current && request.cookie != before {
            return Advice::Challenge(current);
        }
        match self.entries.get(&key) {
            Some(Entry::Waiting) => return Advice::Ignore,
            Some(Entry::Answered(reply)) => return Advice::Again(reply.clone()),
            None => {}
        }
        // The peer repeats it, and there may be room then.
        if self.waiting >= self.waiting_max {
            return Advice::Ignore;
        }
        self.waiting += 1;
        self.entries.insert(key, Entry::Waiting);
        Advice::New
    }

    /// Keeps the reply to a request that waits.
    pub(super) fn answer(&mut self, key: Key, reply: Reply, now: u64) {
        self.waiting = self.waiting.saturating_sub(1);
        self.entries.insert(key, Entry::Answered(reply));
        self.answered.push_back((key, now));
        while let Some((oldest, at)) = self.answered.front() {
            let is_late = now.saturating_sub(*at) >= REPLY_LIFE_NS;
            if self.answered.len() <= REPLIES_MAX && !is_late {
                break;
            }
            self.entries.remove(oldest);
            self.answered.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use iwarp_proto::sidr::Kind;

    fn reply() -> Reply {
        Box::new([7; MESSAGE_LEN])
    }

    fn peer(n: u8) -> SocketAddr {
        ([10, 0, 0, n], 99).into()
    }

    fn request(id: u64, cookie: u64) -> Message<'static> {
        Message {
            kind: Kind::Request,
            id,
            cookie,
            private_data: &[],
        }
    }

    fn cookie_for(requests: &mut RequestTable, peer: SocketAddr, id: u64, now: u64) -> u64 {
        match requests.take(peer, &request(id, 0), now) {
            Advice::Challenge(cookie) => cookie,
            other => panic!("{other:?}"),
        }
    }

    fn arrive(requests: &mut RequestTable, id: u64, now: u64) -> Advice {
        let cookie = cookie_for(requests, peer(1), id, now);
        requests.take(peer(1), &request(id, cookie), now)
    }

    #[test]
    fn request_needs_its_cookie() {
        let mut requests = RequestTable::new(9);
        let cookie = cookie_for(&mut requests, peer(1), 5, 0);
        for (from, id) in [(peer(2), 5), (peer(1), 6)] {
            let advice = requests.take(from, &request(id, cookie), 0);
            assert!(matches!(advice, Advice::Challenge(other) if other != cookie));
        }
        assert!(requests.entries.is_empty(), "nothing is kept for strangers");
        let late = COOKIE_LIFE_NS;
        assert_eq!(
            requests.take(peer(1), &request(5, cookie), late),
            Advice::New
        );
        let later = 2 * COOKIE_LIFE_NS;
        let advice = requests.take(peer(1), &request(5, cookie), later);
        assert!(matches!(advice, Advice::Challenge(_)), "{advice:?}");
        let other = RequestTable::new(9).cookie((peer(1), 5), 0);
        assert_ne!(other, cookie, "another listener has another secret");
    }

    #[test]
    fn repeated_request_gets_its_reply() {
        let mut requests = RequestTable::new(9);
        assert_eq!(arrive(&mut requests, 5, 0), Advice::New);
        assert_eq!(arrive(&mut requests, 5, 1), Advice::Ignore, "it waits");
        requests.answer((peer(1), 5), reply(), 2);
        assert_eq!(arrive(&mut requests, 5, 3), Advice::Again(reply()));
        assert_eq!(arrive(&mut requests, 6, 3), Advice::New, "another one");
    }

    #[test]
    fn table_is_bounded() {
        let mut requests = RequestTable::new(3);
        for id in 0..3 {
            assert_eq!(arrive(&mut requests, id, 0), Advice::New);
        }
        assert_eq!(arrive(&mut requests, 3, 0), Advice::Ignore, "no room");
        requests.answer((peer(1), 0), reply(), 0);
        assert_eq!(arrive(&mut requests, 3, 0), Advice::New);
        let mut requests = RequestTable::new(1);
        for id in 0..3000 {
            assert_eq!(arrive(&mut requests, id, 0), Advice::New);
            requests.answer((peer(1), id), reply(), 0);
        }
        assert_eq!(requests.entries.len(), REPLIES_MAX);
        assert_eq!(arrive(&mut requests, 2999, 0), Advice::Again(reply()));
        // Old replies are dropped at the next answer.
        let late = REPLY_LIFE_NS;
        arrive(&mut requests, 9999, late);
        requests.answer((peer(1), 9999), reply(), late);
        assert_eq!((requests.entries.len(), requests.waiting), (1, 0));
    }
}
