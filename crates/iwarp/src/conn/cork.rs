//! Decides whether a post sends at once, or defers sending until there are more requests.
//!
//! For small messages, the system call is nearly the whole cost. A program that posts one request
//! and then waits for completions needs it sent at once. A program that posts many requests in a
//! row needs a high message rate. So the first posts after an empty poll are sent at once. Posts
//! that follow in quick succession (a *burst*) are deferred until the next empty poll, until there
//! are enough bytes, or until a short timer expires. A poll that finds completions has no effect,
//! because the program will probably post again. At most half of the send queue is deferred. The
//! thresholds are in [`policy`](crate::engine::policy).

use crate::engine::policy::{self, Post, Verdict};
use crate::sys::clock::now_ns;
use iwarp_rnic::limits::TX_PLAN_BYTES;

/// Number of deferred bytes from which a post sends: as many as one plan, and so one system call,
/// can send. Fewer bytes per call would cause more short TCP segments.
const ENOUGH_BYTES: u64 = TX_PLAN_BYTES as u64;

#[derive(Debug, Default)]
pub(crate) struct Cork {
    /// Number of empty polls of the completion queues at the last post.
    polls: u32,
    /// Number of posts since the last empty poll.
    posts: u32,
    /// Time of the last post for which the clock was read.
    last_ns: u64,
    /// Bytes of deferred payload.
    bytes: u64,
    /// Number of posts since the clock was read.
    unread: u8,
    /// Maximum number of posts for which the clock need not be read.
    trust: u8,
    /// Requests are deferred, and the completion queue is notified.
    pub(crate) deferred: bool,
    /// The timer that sends deferred requests is set.
    pub(crate) timer: bool,
}

impl Cork {
    /// Decides about a post of `requests` with `bytes` of payload. `polls` is the number of empty
    /// polls of the completion queues so far. `has_room` tells whether the send queue has room for
    /// many more requests.
    #[inline]
    pub(crate) fn post(
        &mut self,
        polls: u32,
        requests: usize,
        bytes: u64,
        has_room: bool,
    ) -> Verdict {
        if polls != self.polls {
            self.polls = polls;
            self.posts = 0;
        }
        self.posts = self.posts.saturating_add(1);
        if policy::sends_first(self.posts) {
            return self.send();
        }
        self.decide(now_ns(), requests, bytes, has_room)
    }

    /// Decides about a post of one request by a program that polls before it waits.
    ///
    /// Reading the clock costs as much as the rest of a post. So this assumes, without reading the
    /// clock, that a burst goes on: for one post at first, and for more posts while the burst
    /// lasts. If the burst has ended, the requests are sent when the timer expires, at the latest.
    #[inline]
    pub(crate) fn post_more(&mut self, polls: u32, bytes: u64, has_room: bool) -> Verdict {
        if polls == self.polls && self.deferred && has_room {
            let deferred = self.bytes.saturating_add(bytes);
            if policy::joins_unread(self.unread, self.trust, deferred, ENOUGH_BYTES) {
                self.bytes = deferred;
                self.unread += 1;
                return Verdict::Join;
            }
        }
        let unread = std::mem::take(&mut self.unread);
        let verdict = self.post(polls, 1 + usize::from(unread), bytes, has_room);
        self.trust = policy::cork_trust(self.trust, verdict, has_room);
        verdict
    }

    fn decide(&mut self, now: u64, requests: usize, bytes: u64, has_room: bool) -> Verdict {
        let gap = now.wrapping_sub(self.last_ns);
        self.last_ns = now;
        self.bytes = self.bytes.saturating_add(bytes);
        let verdict = policy::cork_verdict(Post {
            posts: self.posts,
            gap,
            requests,
            bytes: self.bytes,
            enough: ENOUGH_BYTES,
            has_room,
            has_deferred: self.deferred,
        });
        match verdict {
            Verdict::Send | Verdict::SendInBurst => _ = self.send(),
            Verdict::Defer | Verdict::Join => self.deferred = true,
        }
        verdict
    }

    /// Records that a post has finished sending. The time of sending, which is longer than the gap
    /// of a burst, is no pause.
    #[inline]
    pub(crate) fn sent(&mut self) {
        self.last_ns = now_ns();
    }

    /// Records that all deferred requests are being sent.
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
    fn first_posts_are_sent_at_once() {
        let mut cork = Cork::default();
        for poll in 1..5 {
            assert_eq!(cork.post(poll, 1, 64, true), Verdict::Send);
        }
        assert_eq!(cork.post(4, 1, 64, true), Verdict::SendInBurst);
    }

    /// The clock is read rarely in a trusted burst, but the burst ends for the same reasons as any
    /// other.
    #[test]
    fn trusted_burst_ends_like_others() {
        let start_burst = |cork: &mut Cork| {
            cork.trust = CORK_UNREAD_MAX;
            cork.deferred = true;
            (cork.polls, cork.posts) = (3, 9);
        };
        let mut cork = Cork::default();
        start_burst(&mut cork);
        for unread in 1..=CORK_UNREAD_MAX {
            assert_eq!(cork.post_more(3, 64, true), Verdict::Join);
            assert_eq!(cork.unread, unread);
        }
        // Now the clock is read. `last_ns` is zero, so this is a pause.
        assert_eq!(cork.post_more(3, 64, true), Verdict::SendInBurst);
        assert_eq!((cork.unread, cork.trust, cork.deferred), (0, 0, false));

        start_burst(&mut cork);
        assert_eq!(cork.post_more(4, 64, true), Verdict::Send, "an empty poll");
        start_burst(&mut cork);
        assert_eq!(cork.post_more(3, 64, false), Verdict::SendInBurst);
        assert_eq!(cork.trust, CORK_UNREAD_MAX, "a full queue is no pause");
        start_burst(&mut cork);
        let enough = cork.post_more(3, ENOUGH_BYTES, true);
        assert_eq!(enough, Verdict::SendInBurst);
        start_burst(&mut cork);
        cork.deferred = false;
        cork.last_ns = u64::MAX;
        assert_ne!(
            cork.post_more(3, 64, true),
            Verdict::Join,
            "nothing is deferred"
        );
    }

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
                // The thread may lose its processor just before this post. The test then tries
                // again.
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
        assert_eq!(cork.decide(1100, 1, 110_000, true), Verdict::Defer);
        assert_eq!(cork.decide(1200, 1, 110_000, true), Verdict::Join);
        assert_eq!(cork.decide(1300, 1, 110_000, true), Verdict::SendInBurst);
        assert!(!cork.deferred);
        assert_eq!(cork.decide(1400, 1, 64, true), Verdict::Defer);
        let after_pause = 1400 + CORK_GAP_NS + CORK_REQUEST_NS + 1;
        assert_eq!(cork.decide(after_pause, 1, 64, true), Verdict::SendInBurst);
        assert_eq!(cork.decide(9000, 1, 64, false), Verdict::SendInBurst);
        let list = 9000 + CORK_GAP_NS + 64 * CORK_REQUEST_NS;
        assert_eq!(
            cork.decide(list, 64, 64, true),
            Verdict::Defer,
            "each request of a list prolongs the gap"
        );
        assert_eq!(cork.send(), Verdict::Send);
        cork.sent();
        assert_ne!(cork.last_ns, list);
        assert_eq!(
            cork.decide(cork.last_ns + CORK_GAP_NS, 1, 64, true),
            Verdict::Defer,
            "the gap begins when sending ends"
        );
    }
}
