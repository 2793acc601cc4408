//! One direction of a simulated TCP connection.
//!
//! Like TCP, it preserves the order and loses nothing until it is reset. Everything else is random:
//! segment lengths, arrival times, room for unread octets, and lengths of reads. Times are
//! nanoseconds of virtual time.

use std::collections::VecDeque;

use crate::rng::Rng;

/// The parameters of a direction.
#[derive(Debug, Clone, Copy)]
pub struct PipeConfig {
    /// Largest number of unread octets, which models the buffers of both sockets.
    pub capacity: usize,
    /// Shortest time from writing to arrival.
    pub delay: u64,
    /// Largest additional time of a segment.
    pub jitter: u64,
    /// Time of each octet on the wire.
    pub per_octet: u64,
    /// Longest segment.
    pub segment_max: usize,
    /// Percentage of reads that return fewer octets than are available.
    pub short_reads: u64,
}

/// A bit that the network flips.
#[derive(Debug, Clone, Copy)]
pub struct Flip {
    /// Position of the octet in the stream.
    pub at: u64,
    /// Number of the bit in that octet, from 0 for the lowest.
    pub bit: u8,
}

#[derive(Debug)]
struct Segment {
    at: u64,
    octets: Vec<u8>,
    read: usize,
}

/// What a read would return now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// No octet has arrived.
    Nothing,
    /// This many octets have arrived.
    Octets(usize),
    /// The writer has shut down and everything has been read.
    Fin,
    /// The connection was reset.
    Reset,
}

/// One direction of a connection.
#[derive(Debug)]
pub struct Pipe {
    config: PipeConfig,
    rng: Rng,
    segments: VecDeque<Segment>,
    unread: usize,
    /// Arrival time of the last segment. Later segments do not arrive earlier.
    last_at: u64,
    fin: Option<u64>,
    reset: Option<u64>,
    written: u64,
    flip: Option<Flip>,
    /// Number of octets that were read.
    taken: u64,
}

impl Pipe {
    /// Creates an open direction.
    pub const fn new(config: PipeConfig, rng: Rng, flip: Option<Flip>) -> Self {
        Self {
            config,
            rng,
            segments: VecDeque::new(),
            unread: 0,
            last_at: 0,
            fin: None,
            reset: None,
            written: 0,
            flip,
            taken: 0,
        }
    }

    /// Writes as many octets as fit, and calls `arrive` with the arrival time of each segment.
    /// Returns the number of octets written.
    pub fn write(&mut self, now: u64, octets: &[u8], mut arrive: impl FnMut(u64)) -> usize {
        if self.reset.is_some() {
            // A kernel accepts octets until it has processed the reset.
            return octets.len();
        }
        assert!(self.fin.is_none(), "write after shutdown");
        let room = self.config.capacity - self.unread;
        let mut rest = &octets[..octets.len().min(room)];
        let taken = rest.len();
        while !rest.is_empty() {
            let most = rest.len().min(self.config.segment_max);
            let n = self.rng.range(1, most as u64) as usize;
            let n = if self.rng.chance(70) { most } else { n };
            let (head, tail) = rest.split_at(n);
            rest = tail;
            let mut head = head.to_vec();
            if let Some(flip) = self.flip
                && (self.written..self.written + n as u64).contains(&flip.at)
            {
                head[(flip.at - self.written) as usize] ^= 1 << flip.bit;
            }
            self.written += n as u64;
            self.unread += n;
            let jitter = self.rng.below(self.config.jitter + 1);
            let at = (now + self.config.delay + jitter).max(self.last_at)
                + self.config.per_octet * n as u64;
            self.last_at = at;
            arrive(at);
            self.segments.push_back(Segment {
                at,
                octets: head,
                read: 0,
            });
        }
        taken
    }

    /// Sends a FIN. Returns its arrival time.
    pub fn shutdown(&mut self, now: u64) -> u64 {
        let at = (now + self.config.delay).max(self.last_at);
        self.last_at = at;
        self.fin = Some(at);
        at
    }

    /// Makes a reset arrive at the reader at `at`. Octets that were not read by then are lost.
    pub fn reset_at(&mut self, at: u64) {
        self.reset = Some(self.reset.map_or(at, |r| r.min(at)));
    }

    /// Returns what a read would return at time `now`.
    pub fn peek(&self, now: u64) -> Found {
        if self.reset.is_some_and(|at| at <= now) {
            return Found::Reset;
        }
        let here = self.segments.iter().take_while(|s| s.at <= now);
        let n: usize = here.map(|s| s.octets.len() - s.read).sum();
        match self.fin {
            _ if n > 0 => Found::Octets(n),
            Some(at) if at <= now && self.segments.is_empty() => Found::Fin,
            _ => Found::Nothing,
        }
    }

    /// Reads at most `most` arrived octets to `out`, whose contents are replaced.
    pub fn read(&mut self, now: u64, most: usize, out: &mut Vec<u8>) {
        out.clear();
        let most = if most > 1 && self.rng.chance(self.config.short_reads) {
            self.rng.range(1, most as u64) as usize
        } else {
            most
        };
        while let Some(s) = self.segments.front_mut().filter(|s| s.at <= now) {
            let n = (s.octets.len() - s.read).min(most - out.len());
            out.extend_from_slice(&s.octets[s.read..s.read + n]);
            s.read += n;
            if s.read < s.octets.len() {
                break;
            }
            self.segments.pop_front();
        }
        self.unread -= out.len();
        self.taken += out.len() as u64;
    }

    /// Returns the number of octets that were written.
    pub const fn written(&self) -> u64 {
        self.written
    }

    /// Returns `true` if the flipped bit has been read.
    pub fn flip_was_read(&self) -> bool {
        self.flip.is_some_and(|flip| flip.at < self.taken)
    }

    /// Returns `true` if all octets were read, including those that would arrive later.
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: PipeConfig = PipeConfig {
        capacity: 1000,
        delay: 5,
        jitter: 50,
        per_octet: 1,
        segment_max: 64,
        short_reads: 50,
    };

    #[test]
    fn octets_arrive_in_order_and_are_bounded() {
        let mut pipe = Pipe::new(CONFIG, Rng::new(1), None);
        let octets: Vec<u8> = (0..1200u32).map(|i| (i * 7) as u8).collect();
        let mut last = 0;
        let n = pipe.write(0, &octets, |at| {
            assert!(at >= last);
            last = at;
        });
        assert_eq!(n, 1000);
        assert_eq!(pipe.write(0, &octets[n..], |_| ()), 0);
        assert_eq!(pipe.peek(4), Found::Nothing);
        pipe.shutdown(1);
        let (mut all, mut some) = (Vec::new(), Vec::new());
        let mut now = 0;
        while all.len() < 1000 {
            now += 10;
            while let Found::Octets(n) = pipe.peek(now) {
                pipe.read(now, n, &mut some);
                assert!(!some.is_empty() && some.len() <= n);
                all.extend_from_slice(&some);
            }
        }
        assert_eq!(all, &octets[..1000]);
        assert_eq!(pipe.peek(last), Found::Fin);
    }

    #[test]
    fn flip_changes_one_bit() {
        let flip = Flip { at: 10, bit: 3 };
        let mut pipe = Pipe::new(CONFIG, Rng::new(2), Some(flip));
        pipe.write(0, &[0; 20], |_| ());
        let mut out = Vec::new();
        let mut all = Vec::new();
        while let Found::Octets(n) = pipe.peek(1000) {
            assert_eq!(pipe.flip_was_read(), all.len() > 10);
            pipe.read(1000, n, &mut out);
            all.extend_from_slice(&out);
        }
        let mut want = [0; 20];
        want[10] = 8;
        assert_eq!(all, want);
        assert!(pipe.flip_was_read());
        pipe.reset_at(2000);
        assert_eq!(pipe.peek(1999), Found::Nothing);
        assert_eq!(pipe.peek(2000), Found::Reset);
    }
}
