//! The requests that a datagram listener has received. The table decides whether a request is
//! challenged, is a repetition, or is passed to the program.
//!
//! The table stores nothing for a sender that has not returned a cookie, so that spoofed addresses
//! cannot fill it. A reply is kept for some time, because the requester repeats its request if the
//! reply is lost.

use iwarp_proto::sidr::{MESSAGE_LEN, Message};
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;

/// Maximum number of kept replies.
const REPLIES_MAX: usize = 1024;
/// How long a reply is kept. By default a requester repeats its request for at most 64 s.
const REPLY_LIFE_NS: u64 = 64_000_000_000;
/// A cookie is valid for at least this time, and less than twice as long.
const COOKIE_LIFE_NS: u64 = 64_000_000_000;

/// Identifies a request: the requester's address, and the number that the requester gave it.
pub(super) type Key = (SocketAddr, u64);

/// The octets of a reply, with its CRC ([`Message::seal`]).
pub(super) type Reply = Box<[u8; MESSAGE_LEN]>;

/// What the listener does with a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Advice {
    /// Send a challenge with this cookie.
    Challenge(u64),
    Ignore,
    /// Send this reply again.
    Resend(Reply),
    /// Pass the request to the program. The request is waiting until the program answers.
    New,
}

enum Entry {
    Waiting,
    Answered(Reply),
}
pub(super) struct RequestTable {
    /// The secret key of cookies.
    secret: RandomState,
    entries: HashMap<Key, Entry>,
    /// Answered requests with the times of their replies, oldest first.
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
        // Zero means that a request has no cookie.
        self.secret.hash_one((key, epoch)) | 1
    }

    /// Returns what to do with a request that arrived at `now`, in nanoseconds.
    pub(super) fn handle(&mut self, peer: SocketAddr, request: &Message<'_>, now: u64) -> Advice {
        let key = (peer, request.id);
        let epoch = now / COOKIE_LIFE_NS;
        let current = self.cookie(key, epoch);
        let before = self.cookie(key, epoch.wrapping_sub(1));
        if request.cookie != current && request.cookie != before {
            return Advice::Challenge(current);
        }
        match self.entries.get(&key) {
            Some(Entry::Waiting) => return Advice::Ignore,
            Some(Entry::Answered(reply)) => return Advice::Resend(reply.clone()),
            None => {}
        }
        // The peer will repeat the request. By then the program may have answered others.
        if self.waiting >= self.waiting_max {
            return Advice::Ignore;
        }
        self.waiting += 1;
        self.entries.insert(key, Entry::Waiting);
        Advice::New
    }

    /// Stores the reply to a waiting request.
    pub(super) fn answer(&mut self, key: Key, reply: Reply, now: u64) {
        self.waiting = self.waiting.saturating_sub(1);
        self.entries.insert(key, Entry::Answered(reply));
        self.answered.push_back((key, now));
        while let Some((oldest, replied)) = self.answered.front() {
            let is_expired = now.saturating_sub(*replied) >= REPLY_LIFE_NS;
            if self.answered.len() <= REPLIES_MAX && !is_expired {
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
        match requests.handle(peer, &request(id, 0), now) {
            Advice::Challenge(cookie) => cookie,
            other => panic!("{other:?}"),
        }
    }

    fn arrive(requests: &mut RequestTable, id: u64, now: u64) -> Advice {
        let cookie = cookie_for(requests, peer(1), id, now);
        requests.handle(peer(1), &request(id, cookie), now)
    }

    #[test]
    fn request_needs_its_cookie() {
        let mut requests = RequestTable::new(9);
        let cookie = cookie_for(&mut requests, peer(1), 5, 0);
        for (from, id) in [(peer(2), 5), (peer(1), 6)] {
            let advice = requests.handle(from, &request(id, cookie), 0);
            assert!(matches!(advice, Advice::Challenge(other) if other != cookie));
        }
        assert!(
            requests.entries.is_empty(),
            "requests without a valid cookie are not stored"
        );
        let late = COOKIE_LIFE_NS;
        assert_eq!(
            requests.handle(peer(1), &request(5, cookie), late),
            Advice::New
        );
        let later = 2 * COOKIE_LIFE_NS;
        let advice = requests.handle(peer(1), &request(5, cookie), later);
        assert!(matches!(advice, Advice::Challenge(_)), "{advice:?}");
        let other = RequestTable::new(9).cookie((peer(1), 5), 0);
        assert_ne!(other, cookie, "each listener has its own secret");
    }

    #[test]
    fn repeated_request_gets_its_reply() {
        let mut requests = RequestTable::new(9);
        assert_eq!(arrive(&mut requests, 5, 0), Advice::New);
        assert_eq!(
            arrive(&mut requests, 5, 1),
            Advice::Ignore,
            "the request waits for its answer"
        );
        requests.answer((peer(1), 5), reply(), 2);
        assert_eq!(arrive(&mut requests, 5, 3), Advice::Resend(reply()));
        assert_eq!(arrive(&mut requests, 6, 3), Advice::New, "another request");
    }

    #[test]
    fn table_is_bounded() {
        let mut requests = RequestTable::new(3);
        for id in 0..3 {
            assert_eq!(arrive(&mut requests, id, 0), Advice::New);
        }
        assert_eq!(
            arrive(&mut requests, 3, 0),
            Advice::Ignore,
            "too many requests wait"
        );
        requests.answer((peer(1), 0), reply(), 0);
        assert_eq!(arrive(&mut requests, 3, 0), Advice::New);
        let mut requests = RequestTable::new(1);
        for id in 0..3000 {
            assert_eq!(arrive(&mut requests, id, 0), Advice::New);
            requests.answer((peer(1), id), reply(), 0);
        }
        assert_eq!(requests.entries.len(), REPLIES_MAX);
        assert_eq!(arrive(&mut requests, 2999, 0), Advice::Resend(reply()));
        // Old replies are dropped at the next answer.
        let late = REPLY_LIFE_NS;
        arrive(&mut requests, 9999, late);
        requests.answer((peer(1), 9999), reply(), late);
        assert_eq!((requests.entries.len(), requests.waiting), (1, 0));
    }
}
