//! One direction of a simulated TCP connection.
//!
//! Like TCP, it preserves the order and loses nothing until it is reset. Segment lengths, arrival
//! times, buffer sizes, and lengths of reads are random. Times are nanoseconds of virtual time.

use std::collections::VecDeque;

use crate::rng::Rng;

/// The parameters of a direction.
#[derive(Debug, Clone, Copy)]
pub struct PipeConfig {
    /// Largest number of unread octets, which models the buffers of both sockets.
    pub capacity: usize,
    /// Shortest time from the write to the arrival.
    pub delay: u64,
    /// Largest random delay that is added for each segment.
    pub jitter: u64,
    /// Transmission time of an octet.
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
    pub position: u64,
    /// Number of the bit in the octet; bit 0 is the least significant.
    pub bit: u8,
}

#[derive(Debug)]
struct Segment {
    arrival: u64,
    octets: Vec<u8>,
    /// Number of octets that were read.
    read: usize,
}

/// What a read would return now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peeked {
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
    /// Arrival time of the last segment. Later segments do not arrive before it.
    last_arrival: u64,
    /// Arrival time of the FIN.
    fin: Option<u64>,
    /// Arrival time of a reset.
    reset: Option<u64>,
    written: u64,
    flip: Option<Flip>,
    /// Number of octets that were read.
    read: u64,
}

impl Pipe {
    /// Creates an open direction.
    pub const fn new(config: PipeConfig, rng: Rng, flip: Option<Flip>) -> Self {
        Self {
            config,
            rng,
            segments: VecDeque::new(),
            unread: 0,
            last_arrival: 0,
            fin: None,
            reset: None,
            written: 0,
            flip,
            read: 0,
        }
    }

    /// Writes as many octets as fit, and calls `arrive` with the arrival time of each segment.
    /// Returns the number of octets written.
    pub fn write(&mut self, now: u64, octets: &[u8], mut arrive: impl FnMut(u64)) -> usize {
        if self.reset.is_some() {
            // Like a kernel that has not yet processed the reset.
            return octets.len();
        }
        assert!(self.fin.is_none(), "write after shutdown");
        let room = self.config.capacity - self.unread;
        let mut rest = &octets[..octets.len().min(room)];
        let accepted = rest.len();
        while !rest.is_empty() {
            let longest = rest.len().min(self.config.segment_max);
            let n = self.rng.range(1, longest as u64) as usize;
            let n = if self.rng.chance(70) { longest } else { n };
            let (head, tail) = rest.split_at(n);
            rest = tail;
            let mut head = head.to_vec();
            if let Some(flip) = self.flip
                && (self.written..self.written + n as u64).contains(&flip.position)
            {
                head[(flip.position - self.written) as usize] ^= 1 << flip.bit;
            }
            self.written += n as u64;
            self.unread += n;
            let jitter = self.rng.below(self.config.jitter + 1);
            let arrival = (now + self.config.delay + jitter).max(self.last_arrival)
                + self.config.per_octet * n as u64;
            self.last_arrival = arrival;
            arrive(arrival);
            self.segments.push_back(Segment {
                arrival,
                octets: head,
                read: 0,
            });
        }
        accepted
    }

    /// Sends a FIN. Returns its arrival time.
    pub fn shutdown(&mut self, now: u64) -> u64 {
        let arrival = (now + self.config.delay).max(self.last_arrival);
        self.last_arrival = arrival;
        self.fin = Some(arrival);
        arrival
    }

    /// Resets the direction; the reset arrives at the reader at time `arrival`. Octets that are
    /// unread at that time are lost.
    pub fn reset(&mut self, arrival: u64) {
        self.reset = Some(self.reset.map_or(arrival, |r| r.min(arrival)));
    }

    /// Returns what a read would return at time `now`.
    pub fn peek(&self, now: u64) -> Peeked {
        if self.reset.is_some_and(|at| at <= now) {
            return Peeked::Reset;
        }
        let arrived = self.segments.iter().take_while(|s| s.arrival <= now);
        let n: usize = arrived.map(|s| s.octets.len() - s.read).sum();
        match self.fin {
            _ if n > 0 => Peeked::Octets(n),
            Some(at) if at <= now && self.segments.is_empty() => Peeked::Fin,
            _ => Peeked::Nothing,
        }
    }

    /// Replaces the contents of `out` by at most `max_len` octets that have arrived.
    pub fn read(&mut self, now: u64, max_len: usize, out: &mut Vec<u8>) {
        out.clear();
        let max_len = if max_len > 1 && self.rng.chance(self.config.short_reads) {
            self.rng.range(1, max_len as u64) as usize
        } else {
            max_len
        };
        while let Some(s) = self.segments.front_mut().filter(|s| s.arrival <= now) {
            let n = (s.octets.len() - s.read).min(max_len - out.len());
            out.extend_from_slice(&s.octets[s.read..s.read + n]);
            s.read += n;
            if s.read < s.octets.len() {
                break;
            }
            self.segments.pop_front();
        }
        self.unread -= out.len();
        self.read += out.len() as u64;
    }

    /// Returns the number of octets that were written.
    pub const fn written(&self) -> u64 {
        self.written
    }

    /// Returns `true` if the flipped bit has been read.
    pub fn flip_was_read(&self) -> bool {
        self.flip.is_some_and(|flip| flip.position < self.read)
    }

    /// Returns `true` if all written octets were read.
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
    fn pipe_keeps_order_and_capacity() {
        let mut pipe = Pipe::new(CONFIG, Rng::new(1), None);
        let octets: Vec<u8> = (0..1200u32).map(|i| (i * 7) as u8).collect();
        let mut last = 0;
        let n = pipe.write(0, &octets, |at| {
            assert!(at >= last);
            last = at;
        });
        assert_eq!(n, 1000);
        assert_eq!(pipe.write(0, &octets[n..], |_| ()), 0);
        assert_eq!(pipe.peek(4), Peeked::Nothing);
        pipe.shutdown(1);
        let (mut all, mut some) = (Vec::new(), Vec::new());
        let mut now = 0;
        while all.len() < 1000 {
            now += 10;
            while let Peeked::Octets(n) = pipe.peek(now) {
                pipe.read(now, n, &mut some);
                assert!(!some.is_empty() && some.len() <= n);
                all.extend_from_slice(&some);
            }
        }
        assert_eq!(all, &octets[..1000]);
        assert_eq!(pipe.peek(last), Peeked::Fin);
    }

    #[test]
    fn flip_changes_one_bit() {
        let flip = Flip {
            position: 10,
            bit: 3,
        };
        let mut pipe = Pipe::new(CONFIG, Rng::new(2), Some(flip));
        pipe.write(0, &[0; 20], |_| ());
        let mut out = Vec::new();
        let mut all = Vec::new();
        while let Peeked::Octets(n) = pipe.peek(1000) {
            assert_eq!(pipe.flip_was_read(), all.len() > 10);
            pipe.read(1000, n, &mut out);
            all.extend_from_slice(&out);
        }
        let mut want = [0; 20];
        want[10] = 8;
        assert_eq!(all, want);
        assert!(pipe.flip_was_read());
        pipe.reset(2000);
        assert_eq!(pipe.peek(1999), Peeked::Nothing);
        assert_eq!(pipe.peek(2000), Peeked::Reset);
    }
}
