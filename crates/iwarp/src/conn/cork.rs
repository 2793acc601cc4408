//! Decides when posting sends at once, and when it waits for more requests.
//!
//! For small messages, the system call is nearly the whole cost. A program that posts one request
//! and then waits for completions needs it sent at once; a program that posts request after request
//! needs rate. So the first posts after an empty poll are sent at once. Posts that follow in quick
//! succession wait until the next empty poll, until enough has gathered, or until a short timer
//! expires. A poll that finds completions changes nothing, because the program is about to post
//! again. At most a part of the queue waits. The thresholds are in
//! [`policy`](crate::engine::policy).

use crate::engine::policy::{self, Post, Verdict};
use crate::sys::clock::now_ns;
use iwarp_rnic::limits::TX_PLAN_BYTES;

/// Bytes that are enough for one system call: as much as one plan holds. Each call ends with a
/// short TCP segment.
const ENOUGH_BYTES: u64 = TX_PLAN_BYTES as u64;

#[derive(Debug, Default)]
pub(crate) struct Cork {
    /// Empty polls of the completion queues when the current run of posts began.
    polls: u32,
    posts: u32,
    last_ns: u64,
    bytes: u64,
    /// Posts since the clock was read.
    unread: u8,
    /// Posts that may go without reading the clock.
    trust: u8,
    /// Requests wait, and the completion queue knows that.
    pub(crate) deferred: bool,
    pub(crate) timer: bool,
}

impl Cork {
    /// Decides about a post of `requests` with `bytes` of payload. `polls` counts the empty polls
    /// of its completion queues; `room` says whether the send queue has room for many more.
    #[inline]
    pub(crate) fn post(&mut self, polls: u32, requests: usize, bytes: u64, room: bool) -> Verdict {
        if polls != self.polls {
            self.polls = polls;
            self.posts = 0;
        }
        self.posts = self.posts.saturating_add(1);
        if policy::sends_first(self.posts) {
            return self.send();
        }
        self.judge(now_ns(), requests, bytes, room)
    }

    /// Decides about a post of one request of a program that polls before it waits.
    ///
    /// Reading the clock costs as much as the rest of a post. So a burst is assumed to go on for
    /// some posts without it: for one at first, and for more while the burst lasts. If it has
    /// ended, the requests wait at most until the timer expires.
    #[inline]
    pub(crate) fn post_more(&mut self, polls: u32, bytes: u64, room: bool) -> Verdict {
        if polls == self.polls && self.deferred && room {
            let waiting = self.bytes.saturating_add(bytes);
            if policy::joins_unread(self.unread, self.trust, waiting, ENOUGH_BYTES) {
                self.bytes = waiting;
                self.unread += 1;
                return Verdict::Join;
            }
        }
        let unread = std::mem::take(&mut self.unread);
        let verdict = self.post(polls, 1 + usize::from(unread), bytes, room);
        self.trust = policy::cork_trust(self.trust, verdict, room);
        verdict
    }

    fn judge(&mut self, now: u64, requests: usize, bytes: u64, room: bool) -> Verdict {
        let gap = now.wrapping_sub(self.last_ns);
        self.last_ns = now;
        self.bytes = self.bytes.saturating_add(bytes);
        let verdict = policy::cork_verdict(Post {
            posts: self.posts,
            gap,
            requests,
            bytes: self.bytes,
            enough: ENOUGH_BYTES,
            room,
            waits: self.deferred,
        });
        match verdict {
            Verdict::Send | Verdict::SendInBurst => _ = self.send(),
            Verdict::Defer | Verdict::Join => self.deferred = true,
        }
        verdict
    }

    /// Notes that a post has sent and returned. Sending takes longer than the gap of a burst, and
    /// is no pause of the program.
    #[inline]
    pub(crate) fn sent(&mut self) {
        self.last_ns = now_ns();
    }

    /// Notes that everything that waits is sent.
    #[inline]
    pub(crate) fn send(&mut self) -> Verdict {
        self.bytes = 0;
        self.deferred = false;
        Verdict::Send
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::policy::{CORK_AT_ONCE, CORK_GAP_NS, CORK_REQUEST_NS, CORK_UNREAD_MAX};

    #[test]
    fn first_posts_go_at_once() {
        let mut cork = Cork::default();
        for poll in 1..5 {
            assert_eq!(cork.post(poll, 1, 64, true), Verdict::Send);
        }
        assert_eq!(cork.post(4, 1, 64, true), Verdict::SendInBurst);
    }

    /// The clock is read seldom in a burst, and everything that ends a burst also ends a trusted
    /// one.
    #[test]
    fn trusted_burst_keeps_its_bounds() {
        let burst = |cork: &mut Cork| {
            // As if the posts before had followed each other quickly.
            cork.trust = CORK_UNREAD_MAX;
            cork.deferred = true;
            (cork.polls, cork.posts) = (3, 9);
        };
        let mut cork = Cork::default();
        burst(&mut cork);
        for unread in 1..=CORK_UNREAD_MAX {
            assert_eq!(cork.post_more(3, 64, true), Verdict::Join);
            assert_eq!(cork.unread, unread);
        }
        // Now the clock is read, and the last reading was at the epoch.
        assert_eq!(cork.post_more(3, 64, true), Verdict::SendInBurst);
        assert_eq!((cork.unread, cork.trust, cork.deferred), (0, 0, false));

        burst(&mut cork);
        assert_eq!(cork.post_more(4, 64, true), Verdict::Send, "an empty poll");
        burst(&mut cork);
        assert_eq!(cork.post_more(3, 64, false), Verdict::SendInBurst);
        assert_eq!(cork.trust, CORK_UNREAD_MAX, "a full queue is no pause");
        burst(&mut cork);
        let enough = cork.post_more(3, ENOUGH_BYTES, true);
        assert_eq!(enough, Verdict::SendInBurst);
        burst(&mut cork);
        cork.deferred = false;
        cork.last_ns = u64::MAX;
        assert_ne!(cork.post_more(3, 64, true), Verdict::Join, "nothing waits");
    }

    /// The clock is read at a decreasing rate with a fixed minimum while a burst goes on.
    #[test]
    fn trust_grows_with_the_burst() {
        let limit = now_ns() + 20_000_000_000;
        for (trust, next) in [
            (0, 1),
            (1, 3),
            (3, 7),
            (7, CORK_UNREAD_MAX),
            (CORK_UNREAD_MAX, CORK_UNREAD_MAX),
        ] {
            loop {
                assert!(now_ns() < limit, "posts never follow each other closely");
                let mut cork = Cork {
                    polls: 3,
                    posts: 9,
                    last_ns: now_ns(),
                    unread: CORK_UNREAD_MAX,
                    trust,
                    deferred: true,
                    ..Cork::default()
                };
                // The thread may lose its processor just here. Then it is tried again.
                if cork.post_more(3, 64, true) == Verdict::Join {
                    assert_eq!((cork.trust, cork.unread), (next, 0));
                    break;
                }
            }
        }
    }

    #[test]
    fn burst_waits_until_enough() {
        let mut cork = Cork {
            polls: 7,
            posts: CORK_AT_ONCE,
            last_ns: 1000,
            ..Cork::default()
        };
        cork.posts += 1;
        assert_eq!(cork.judge(1100, 1, 110_000, true), Verdict::Defer);
        assert_eq!(cork.judge(1200, 1, 110_000, true), Verdict::Join);
        assert_eq!(cork.judge(1300, 1, 110_000, true), Verdict::SendInBurst);
        assert!(!cork.deferred);
        assert_eq!(cork.judge(1400, 1, 64, true), Verdict::Defer);
        let after_pause = 1400 + CORK_GAP_NS + CORK_REQUEST_NS + 1;
        assert_eq!(cork.judge(after_pause, 1, 64, true), Verdict::SendInBurst);
        assert_eq!(cork.judge(9000, 1, 64, false), Verdict::SendInBurst);
        let list = 9000 + CORK_GAP_NS + 64 * CORK_REQUEST_NS;
        assert_eq!(
            cork.judge(list, 64, 64, true),
            Verdict::Defer,
            "lists take their time"
        );
        assert_eq!(cork.send(), Verdict::Send);
        cork.sent();
        assert_ne!(cork.last_ns, list);
        assert_eq!(
            cork.judge(cork.last_ns + CORK_GAP_NS, 1, 64, true),
            Verdict::Defer,
            "the time it took to send is no gap"
        );
    }
}
