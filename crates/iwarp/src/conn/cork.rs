//! Decides when posting sends at once, and when it waits for more requests.
//!
//! For small messages, the system call is nearly the whole cost. A program that posts one request and then waits for
//! completions needs it sent at once; a program that posts request after request needs rate. So the first posts after a poll
//! without result are sent at once. Posts that follow in quick succession wait until the next poll without result, until enough
//! has gathered, or until a short timer expires. A poll that finds completions changes nothing, because the program is about to
//! post again. At most a part of the queue waits.

use crate::sys::clock::now_ns;
use iwarp_rnic::limits::TX_PLAN_BYTES;
use std::time::Duration;

/// Posts between two polls without result that are sent at once.
const AT_ONCE: u32 = 2;
/// Posts further apart than this, from the end of one to the beginning of the next, are no burst.
const BURST_GAP_NS: u64 = 1_000;
/// What each request adds to that: the clock is read when a list is posted, and each request takes time to make and to post.
const REQUEST_NS: u64 = 100;
/// Enough for one system call: as much as one plan holds. Each call ends with a short TCP segment.
const ENOUGH_BYTES: u64 = TX_PLAN_BYTES as u64;
/// Posts in a burst for which the clock is not read.
const MOST_UNREAD: u8 = 15;
/// How long a program may go without polling before its posts are sent anyway.
pub(crate) const FLUSH_AFTER: Duration = Duration::from_micros(100);

/// The posting behaviour of one queue pair.
#[derive(Debug, Default)]
pub(crate) struct Cork {
    /// Polls without result of the completion queues when the current run of posts began.
    polls: u32,
    posts: u32,
    last_ns: u64,
    /// Octets of payload that wait.
    bytes: u64,
    /// Posts since the clock was read, and how many there may be.
    unread: u8,
    trust: u8,
    /// Requests wait, and the completion queue knows that.
    pub(crate) put_off: bool,
    /// The timer is set.
    pub(crate) timer: bool,
}

/// What a post does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Send now.
    Send,
    /// The same; then tell [`Cork::sent`], because the next post is measured against its end.
    SendInBurst,
    /// Wait; the completion queue and the timer have to be told.
    PutOff,
    /// Wait together with earlier ones.
    Join,
}

impl Cork {
    /// A post of `requests` and `bytes` octets; `polls` counts those in vain of its completion queues, `room` whether the queue has room for much more.
    #[inline]
    pub(crate) fn post(&mut self, polls: u32, requests: usize, bytes: u64, room: bool) -> Verdict {
        if polls != self.polls {
            self.polls = polls;
            self.posts = 0;
        }
        self.posts = self.posts.saturating_add(1);
        if self.posts < AT_ONCE {
            return self.send();
        }
        self.judge(now_ns(), requests, bytes, room)
    }

    /// As [`post`](Self::post) for one request, of a program that polls before it waits. A burst is taken to go on for some posts without a
    /// look at the clock, which costs as much as all the rest of a post: for one at first, and for more as long as it does. If it does
    /// not, requests wait for the timer at most.
    #[inline]
    pub(crate) fn post_more(&mut self, polls: u32, bytes: u64, room: bool) -> Verdict {
        if polls == self.polls && self.put_off && self.unread < self.trust && room {
            let waiting = self.bytes.saturating_add(bytes);
            if waiting < ENOUGH_BYTES {
                self.bytes = waiting;
                self.unread += 1;
                return Verdict::Join;
            }
        }
        let unread = std::mem::take(&mut self.unread);
        let verdict = self.post(polls, 1 + usize::from(unread), bytes, room);
        self.trust = match verdict {
            Verdict::Send | Verdict::PutOff => self.trust,
            Verdict::Join => (2 * self.trust + 1).min(MOST_UNREAD),
            Verdict::SendInBurst if room => 0,
            Verdict::SendInBurst => self.trust,
        };
        verdict
    }

    fn judge(&mut self, now: u64, requests: usize, bytes: u64, room: bool) -> Verdict {
        let gap = now.wrapping_sub(self.last_ns);
        let most = BURST_GAP_NS.saturating_add(REQUEST_NS.saturating_mul(requests as u64));
        self.last_ns = now;
        self.bytes = self.bytes.saturating_add(bytes);
        if self.posts <= AT_ONCE || gap > most || !room || self.bytes >= ENOUGH_BYTES {
            self.send();
            return Verdict::SendInBurst;
        }
        if std::mem::replace(&mut self.put_off, true) {
            Verdict::Join
        } else {
            Verdict::PutOff
        }
    }

    /// A post has sent and returned. Sending takes longer than the gap, and is no pause of the program.
    #[inline]
    pub(crate) fn sent(&mut self) {
        self.last_ns = now_ns();
    }

    /// Everything that waits is sent.
    #[inline]
    pub(crate) fn send(&mut self) -> Verdict {
        self.bytes = 0;
        self.put_off = false;
        Verdict::Send
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_posts_after_a_poll_go_at_once() {
        let mut cork = Cork::default();
        for poll in 1..5 {
            assert_eq!(cork.post(poll, 1, 64, true), Verdict::Send);
        }
        assert_eq!(cork.post(4, 1, 64, true), Verdict::SendInBurst);
    }

    /// A program that polls before it waits: the clock is read seldom in a burst, and what ends a burst ends it here, too.
    #[test]
    fn a_burst_is_trusted_and_has_the_same_bounds() {
        let burst = |cork: &mut Cork| {
            // As if the posts before had followed each other quickly.
            cork.trust = MOST_UNREAD;
            cork.put_off = true;
            (cork.polls, cork.posts) = (3, 9);
        };
        let mut cork = Cork::default();
        burst(&mut cork);
        for unread in 1..=MOST_UNREAD {
            assert_eq!(cork.post_more(3, 64, true), Verdict::Join);
            assert_eq!(cork.unread, unread);
        }
        // Now the clock is read, and the last reading was at the epoch.
        assert_eq!(cork.post_more(3, 64, true), Verdict::SendInBurst);
        assert_eq!((cork.unread, cork.trust, cork.put_off), (0, 0, false));

        burst(&mut cork);
        assert_eq!(cork.post_more(4, 64, true), Verdict::Send, "a poll in vain");
        burst(&mut cork);
        assert_eq!(cork.post_more(3, 64, false), Verdict::SendInBurst);
        assert_eq!(cork.trust, MOST_UNREAD, "a full queue is no pause");
        burst(&mut cork);
        let enough = cork.post_more(3, ENOUGH_BYTES, true);
        assert_eq!(enough, Verdict::SendInBurst);
        burst(&mut cork);
        cork.put_off = false;
        cork.last_ns = u64::MAX;
        assert_ne!(cork.post_more(3, 64, true), Verdict::Join, "nothing waits");
    }

    /// As long as a burst goes on, the clock is read less and less often, but not seldom.
    #[test]
    fn trust_grows_with_the_burst() {
        let limit = now_ns() + 20_000_000_000;
        for (trust, next) in [
            (0, 1),
            (1, 3),
            (3, 7),
            (7, MOST_UNREAD),
            (MOST_UNREAD, MOST_UNREAD),
        ] {
            loop {
                assert!(now_ns() < limit, "posts never follow each other closely");
                let mut cork = Cork {
                    polls: 3,
                    posts: 9,
                    last_ns: now_ns(),
                    unread: MOST_UNREAD,
                    trust,
                    put_off: true,
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
    fn a_burst_is_put_off_until_there_is_enough() {
        let mut cork = Cork {
            polls: 7,
            posts: AT_ONCE,
            last_ns: 1000,
            ..Cork::default()
        };
        cork.posts += 1;
        assert_eq!(cork.judge(1100, 1, 110_000, true), Verdict::PutOff);
        assert_eq!(cork.judge(1200, 1, 110_000, true), Verdict::Join);
        assert_eq!(cork.judge(1300, 1, 110_000, true), Verdict::SendInBurst);
        assert!(!cork.put_off);
        assert_eq!(cork.judge(1400, 1, 64, true), Verdict::PutOff);
        let late = 1400 + BURST_GAP_NS + REQUEST_NS + 1;
        assert_eq!(cork.judge(late, 1, 64, true), Verdict::SendInBurst);
        assert_eq!(cork.judge(9000, 1, 64, false), Verdict::SendInBurst);
        let list = 9000 + BURST_GAP_NS + 64 * REQUEST_NS;
        assert_eq!(
            cork.judge(list, 64, 64, true),
            Verdict::PutOff,
            "lists take their time"
        );
        assert_eq!(cork.send(), Verdict::Send);
        cork.sent();
        assert_ne!(cork.last_ns, list);
        assert_eq!(
            cork.judge(cork.last_ns + BURST_GAP_NS, 1, 64, true),
            Verdict::PutOff,
            "the time it took to send is no gap"
        );
    }
}
