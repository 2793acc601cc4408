//! Recorded vectors: a queue pair's behaviour for fixed sequences of requests and peer octets.
//!
//! Each line of `vectors/recorded.txt` contains a kind of sequence, a seed, and the length and CRC
//! of all observable state. A difference means that behaviour has changed, on the wire or towards
//! the program. If that is intended, record again and check the fields that have changed: `cargo
//! test -p iwarp-rnic --lib record_vectors -- --ignored`.

mod messages;
mod peers;

use crate::Cqe;
use iwarp_proto::crc32c;
use std::format;
use std::string::String;
use std::vec::Vec;

/// A generator that returns the same numbers for a seed on every machine (splitmix64).
pub(super) struct Numbers(u64);

impl Numbers {
    pub(super) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) const fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub(super) const fn within(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from)
    }

    pub(super) const fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub(super) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }

    /// Returns a length of payload: mostly small, sometimes of several segments.
    pub(super) const fn length(&mut self) -> u32 {
        match self.below(9) {
            0..=5 => self.below(80) as u32,
            6 | 7 => self.below(2200) as u32,
            _ => self.within(2000, 5000) as u32,
        }
    }
}

/// All observable state of one sequence, by name.
#[derive(Debug, PartialEq)]
pub(super) struct Seen {
    fields: Vec<(&'static str, Vec<u8>)>,
    end: String,
    counters: Vec<(&'static str, u64)>,
}

impl Seen {
    /// Returns the state of a queue pair at the end.
    pub(super) fn of(rig: &mut super::harness::Rig) -> Self {
        let events = rig.qp.take_events();
        let end = match rig.qp.fault() {
            Some(fault) => format!(
                "{:?} {:?} {:?} {:?}",
                rig.qp.state(),
                events,
                fault.blame,
                fault.code
            ),
            None => format!("{:?} {events:?}", rig.qp.state()),
        };
        let mut counters = *rig.qp.counters();
        // A socket driver would also have passed the held octets.
        counters.rx_bytes += rig.offered.len() as u64;
        Self {
            fields: Vec::new(),
            end,
            counters: counters.named().to_vec(),
        }
        .with("sends", completions(&rig.host.sends))
        .with("recvs", completions(&rig.host.recvs))
    }

    pub(super) fn with(mut self, name: &'static str, octets: Vec<u8>) -> Self {
        self.fields.push((name, octets));
        self
    }

    /// Returns the line for the file, without kind and seed.
    fn line(&self) -> String {
        let mut counters = Vec::new();
        for (_, value) in &self.counters {
            counters.extend(value.to_le_bytes());
        }
        let mut line = String::new();
        let counters = [("counters", counters)];
        for (name, octets) in self.fields.iter().chain(&counters) {
            line += &format!("{name}={}:{:08x} ", octets.len(), crc32c::append(0, octets));
        }
        line + "end=" + &self.end
    }
}

fn completions(cqes: &[Cqe]) -> Vec<u8> {
    let mut out = Vec::new();
    for c in cqes {
        out.extend(c.wr_id.to_le_bytes());
        out.extend(format!("{:?} {:?} ", c.status, c.opcode).bytes());
        for field in [
            c.byte_len,
            c.qp_num,
            c.flags.bits(),
            c.imm_or_stag,
            c.vendor_err,
        ] {
            out.extend(field.to_le_bytes());
        }
    }
    out
}

/// A kind of sequence, the number of recorded seeds, and the function that runs a seed.
type Kind = (&'static str, u64, fn(u64) -> Vec<Seen>);

const KINDS: [Kind; 4] = [
    ("send", 60, messages::send),
    ("receive", 60, messages::receive),
    ("read", 40, messages::read),
    ("peer", 140, peers::run),
];

const RECORDED: &str = include_str!("vectors/recorded.txt");

#[test]
fn recorded_vectors_are_reproduced() {
    let mut recorded = RECORDED.lines();
    let mut differences = Vec::new();
    for (kind, count, run) in KINDS {
        for seed in 0..count {
            for (end, seen) in run(seed).iter().enumerate() {
                let now = format!("{kind} {seed}.{end} {}", seen.line());
                let recorded_line = recorded.next().unwrap_or_default();
                if now != recorded_line {
                    differences.push(format!(
                        "then {recorded_line}\n now {now}\n     {:?}",
                        seen.counters
                    ));
                }
            }
        }
    }
    assert_eq!(recorded.next(), None, "more was recorded");
    let few: Vec<_> = differences.iter().take(5).map(String::as_str).collect();
    assert!(
        few.is_empty(),
        "{} differ\n{}",
        differences.len(),
        few.join("\n")
    );
}

/// Records the vectors again, into the source tree.
#[test]
#[ignore = "writes a file of the source tree"]
fn record_vectors() {
    let mut all = String::new();
    for (kind, count, run) in KINDS {
        for seed in 0..count {
            for (end, seen) in run(seed).iter().enumerate() {
                all += &format!("{kind} {seed}.{end} {}\n", seen.line());
            }
        }
    }
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/src/qp/tests/vectors/recorded.txt"
    );
    std::fs::write(path, all).unwrap();
}
