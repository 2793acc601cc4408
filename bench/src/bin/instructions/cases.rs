//! The table of cases. Each case prepares its data, warms up, and then performs its work inside
//! `measured`. It also checks the result, so that a case without effect fails instead of appearing
//! fast.

use crate::arena::Arena;
use crate::link::{ALL_ACCESS, End, link};
use crate::measured;
use iwarp_proto::crc32c;
use iwarp_proto::ddp::{Header, Stag, TaggedHeader, UntaggedHeader};
use iwarp_proto::mpa::framing::{FpduOptions, MarkerClock, decode_fpdu, encode_fpdu};
use iwarp_proto::rdmap::Opcode;
use iwarp_rnic::memory::{Accessor, MemoryTable};
use iwarp_rnic::{RecvWr, SendWr};
use std::hint::black_box;

/// Work whose instructions are counted.
pub(crate) struct Case {
    /// The name on the command line and in the table of recorded values.
    pub(crate) name: &'static str,
    /// Number of repetitions inside `measured`. The counts are divided by it.
    pub(crate) count: u32,
    pub(crate) about: &'static str,
    /// Performs the work `count` times.
    pub(crate) run: fn(),
}

/// Effective maximum segment size of the loopback interface.
const LOOPBACK: u32 = 65_483;
/// Effective maximum segment size of Ethernet.
const ETHERNET: u32 = 1460;
const MI: usize = 1 << 20;
/// Number of small messages in a list.
const LIST: usize = 64;
/// Size of a small message in octets.
const SMALL: usize = 64;

pub(crate) const CASES: &[Case] = &[
    Case {
        name: "header-tagged-emit",
        count: 1000,
        about: "write a tagged DDP header",
        run: || emit(Header::Tagged(TAGGED)),
    },
    Case {
        name: "header-untagged-emit",
        count: 1000,
        about: "write an untagged DDP header",
        run: || emit(Header::Untagged(UNTAGGED)),
    },
    Case {
        name: "header-tagged-parse",
        count: 1000,
        about: "read and check a tagged DDP header",
        run: || parse(Header::Tagged(TAGGED)),
    },
    Case {
        name: "header-untagged-parse",
        count: 1000,
        about: "read and check an untagged DDP header",
        run: || parse(Header::Untagged(UNTAGGED)),
    },
    Case {
        name: "fpdu-encode-64",
        count: 1000,
        about: "frame a ULPDU of 64 octets, no CRC",
        run: || fpdu(true),
    },
    Case {
        name: "fpdu-decode-64",
        count: 1000,
        about: "decode the same FPDU",
        run: || fpdu(false),
    },
    Case {
        name: "crc32c-64",
        count: 1000,
        about: "portable CRC32C of 64 octets",
        run: || crc(64, 1000),
    },
    Case {
        name: "crc32c-1448",
        count: 100,
        about: "portable CRC32C of 1448 octets",
        run: || crc(1448, 100),
    },
    Case {
        name: "crc32c-64k",
        count: 4,
        about: "portable CRC32C of 64 KiB",
        run: || crc(65_536, 4),
    },
    Case {
        name: "post-write-64",
        count: 64,
        about: "post an RDMA Write of 64 octets",
        run: || small_tx(false, Part::Post),
    },
    Case {
        name: "tx-write-64",
        count: 64,
        about: "segment and frame such a Write, 64 of them in a plan",
        run: || small_tx(false, Part::Fill),
    },
    Case {
        name: "tx-write-64-crc",
        count: 64,
        about: "the same with CRC",
        run: || small_tx(true, Part::Fill),
    },
    Case {
        name: "tx-send-64",
        count: 64,
        about: "the same for a Send, no CRC",
        run: send_tx,
    },
    Case {
        name: "tx-written-64",
        count: 64,
        about: "complete such a Write after it was written",
        run: || small_tx(false, Part::Written),
    },
    Case {
        name: "tx-write-1m",
        count: 1,
        about: "segment and frame a Write of 1 MiB in FPDUs of 64 KiB",
        run: || large_tx(LOOPBACK),
    },
    Case {
        name: "tx-write-1m-mtu",
        count: 1,
        about: "the same, with FPDUs for a 1460-octet MSS",
        run: || large_tx(ETHERNET),
    },
    Case {
        name: "rx-write-64",
        count: 64,
        about: "place an RDMA Write of 64 octets",
        run: || small_rx(false, false),
    },
    Case {
        name: "rx-write-64-crc",
        count: 64,
        about: "the same with CRC",
        run: || small_rx(true, false),
    },
    Case {
        name: "rx-send-64",
        count: 64,
        about: "deliver a Send of 64 octets to a posted receive",
        run: || small_rx(false, true),
    },
    Case {
        name: "rx-write-1m",
        count: 1,
        about: "place a Write of 1 MiB that is read 64 KiB at a time",
        run: || large_rx(LOOPBACK),
    },
    Case {
        name: "rx-write-1m-mtu",
        count: 1,
        about: "the same, with FPDUs for a 1460-octet MSS",
        run: || large_rx(ETHERNET),
    },
    Case {
        name: "mr-look-up",
        count: 1000,
        about: "check an access by STag, 1000 regions registered",
        run: mr_look_up,
    },
    Case {
        name: "mr-register",
        count: 1000,
        about: "register and deregister a region",
        run: mr_register,
    },
    Case {
        name: "post-poll",
        count: 64,
        about: "post, send, complete and poll a signaled Write, one at a time",
        run: post_poll,
    },
    Case {
        name: "read-64",
        count: 64,
        about: "an RDMA Read of 64 octets, both sides, one at a time",
        run: read,
    },
    Case {
        name: "read-64-list",
        count: 64,
        about: "the same, with 16 outstanding",
        run: || reads(SMALL),
    },
    Case {
        name: "read-4k-list",
        count: 64,
        about: "the same for 4 KiB, sent without a copy, with the runs for the system call",
        run: || reads(4096),
    },
];

const TAGGED: TaggedHeader = TaggedHeader {
    last: true,
    opcode: Opcode::WRITE,
    stag: Stag(0x1234_5678),
    to: 0x0011_2233_4455_6677,
};

const UNTAGGED: UntaggedHeader = UntaggedHeader {
    last: true,
    opcode: Opcode::SEND,
    invalidate_stag: Stag(0),
    qn: 0,
    msn: 7,
    mo: 0,
};

fn emit(header: Header) {
    let mut out = [0u8; 32];
    let len = header.emit(&mut out);
    let mut total = 0;
    measured(|| {
        for _ in 0..1000 {
            total += black_box(&header).emit(black_box(&mut out));
        }
    });
    assert_eq!(total, len * 1000);
    assert_eq!(Header::parse(&out), Ok(header));
}

fn parse(header: Header) {
    let mut out = [0u8; 32];
    header.emit(&mut out);
    let mut good = 0;
    measured(|| {
        for _ in 0..1000 {
            good += usize::from(Header::parse(black_box(&out)).is_ok());
        }
    });
    assert_eq!(good, 1000);
}

fn fpdu(encode: bool) {
    let options = FpduOptions::default();
    let mut ulpdu = [0u8; 64];
    TAGGED.emit(&mut ulpdu);
    let mut out = [0u8; 80];
    let len = encode_fpdu(&ulpdu, &options, &mut MarkerClock::default(), &mut out).expect("fits");
    let (wire, mut back) = (out, [0u8; 80]);
    let mut good = 0;
    measured(|| {
        for _ in 0..1000 {
            let mut clock = MarkerClock::default();
            good += usize::from(if encode {
                encode_fpdu(black_box(&ulpdu), &options, &mut clock, &mut out) == Ok(len)
            } else {
                decode_fpdu(black_box(&wire[..len]), &options, &mut clock, &mut back).is_ok()
            });
        }
    });
    assert_eq!((good, out == wire), (1000, true));
    assert!(encode || back[..64] == ulpdu);
}

fn crc(len: usize, count: usize) {
    let data = vec![0x5a; len];
    let mut last = 0;
    measured(|| {
        for _ in 0..count {
            last = crc32c::append(0, black_box(&data));
        }
    });
    let (a, b) = data.split_at(len / 3);
    assert_eq!(last, crc32c::append(crc32c::append(0, a), b));
}

/// The part of sending that is counted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Post,
    Fill,
    Written,
}

fn measured_if(condition: bool, f: impl FnOnce()) {
    if condition { measured(f) } else { f() }
}

fn post_writes(a: &mut End, b: &End, signal: bool) {
    let to = b.arena.addr();
    for i in 0..LIST {
        let sges = [a.sge(i * SMALL, SMALL)];
        let wr = SendWr::write(1, to + (i * SMALL) as u64, b.stag, &sges);
        a.post(&if signal { wr.signaled() } else { wr });
    }
}

fn small_tx(crc: bool, part: Part) {
    let (mut a, b) = link(crc, LOOPBACK, LIST * SMALL);
    for warm_up in [true, false] {
        measured_if(!warm_up && part == Part::Post, || {
            post_writes(&mut a, &b, true)
        });
        measured_if(!warm_up && part == Part::Fill, || assert!(a.fill()));
        measured_if(!warm_up && part == Part::Written, || a.written());
        assert_eq!(a.poll(), LIST);
    }
}

fn send_tx() {
    let (mut a, _) = link(false, LOOPBACK, LIST * SMALL);
    for warm_up in [true, false] {
        for i in 0..LIST {
            let sges = [a.sge(i * SMALL, SMALL)];
            a.post(&SendWr::send(1, &sges).signaled());
        }
        measured_if(!warm_up, || assert!(a.fill()));
        a.written();
        assert_eq!(a.poll(), LIST);
    }
}

fn large_tx(emss: u32) {
    let (mut a, b) = link(false, emss, MI);
    let sges = [a.sge(0, MI)];
    for warm_up in [true, false] {
        a.post(&SendWr::write(1, b.arena.addr(), b.stag, &sges).signaled());
        measured_if(!warm_up, || {
            while a.fill() {
                a.written();
            }
        });
        assert_eq!(a.poll(), 1);
    }
}

/// Returns all pending octets of `a`.
fn drain(a: &mut End) -> Vec<u8> {
    let mut octets = Vec::new();
    while a.fill() {
        a.copy_out(&mut octets);
        a.written();
    }
    octets
}

fn small_rx(crc: bool, send: bool) {
    let (mut a, mut b) = link(crc, LOOPBACK, LIST * SMALL);
    for i in 0..LIST {
        let sges = [b.sge(i * SMALL, SMALL)];
        b.post_recv(&RecvWr {
            wr_id: 1,
            sges: &sges,
        });
    }
    if send {
        for i in 0..LIST {
            let sges = [a.sge(i * SMALL, SMALL)];
            a.post(&SendWr::send(1, &sges));
        }
    } else {
        post_writes(&mut a, &b, false);
    }
    let octets = drain(&mut a);
    b.receive(&octets, usize::MAX);
    assert!(b.arena.is_filled_with(0x5a));
    assert_eq!(b.poll(), if send { LIST } else { 0 });
}

fn large_rx(emss: u32) {
    let (mut a, mut b) = link(false, emss, MI);
    let sges = [a.sge(0, MI)];
    a.post(&SendWr::write(1, b.arena.addr(), b.stag, &sges));
    let octets = drain(&mut a);
    b.receive(&octets, 65_536);
    assert!(b.arena.is_filled_with(0x5a));
}

/// Pseudorandom numbers, the same in every run.
struct Pseudorandom(u64);

impl Iterator for Pseudorandom {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        Some((self.0 >> 32) as u32)
    }
}

fn mr_look_up() {
    let arena = Arena::new(4096);
    let mut table = MemoryTable::new();
    let stags: Vec<Stag> = Pseudorandom(1)
        .take(1000)
        .map(|random| {
            table
                .register(arena.range(), arena.addr(), 1, ALL_ACCESS, random)
                .expect("the table has a free slot")
        })
        .collect();
    let accessor = Accessor { pd: 1, qp: 1 };
    let mut octets = 0;
    measured(|| {
        for &stag in black_box(&stags) {
            let range = (stag, arena.addr() + 8, 64);
            let _ = table.access(range, ALL_ACCESS, accessor, |span| {
                octets += black_box(span).len();
            });
        }
    });
    assert_eq!(octets, 64_000);
}

fn mr_register() {
    let arena = Arena::new(4096);
    let mut table = MemoryTable::new();
    let mut random = Pseudorandom(2);
    // Fill the table first, so that its growth is not counted.
    for number in random.by_ref().take(1000) {
        table
            .register(arena.range(), 0, 1, ALL_ACCESS, number)
            .expect("the table has a free slot");
    }
    measured(|| {
        for number in random.by_ref().take(1000) {
            let stag = table
                .register(arena.range(), 0, 1, ALL_ACCESS, black_box(number))
                .expect("the table has a free slot");
            assert!(table.deregister(black_box(stag)).is_ok());
        }
    });
    assert_eq!(table.len(), 1000);
}

fn post_poll() {
    let (mut a, b) = link(false, LOOPBACK, LIST * SMALL);
    for warm_up in [true, false] {
        measured_if(!warm_up, || {
            for i in 0..LIST {
                let sges = [a.sge(i * SMALL, SMALL)];
                let to = b.arena.addr() + (i * SMALL) as u64;
                a.post(&SendWr::write(1, to, b.stag, &sges).signaled());
                assert!(a.fill());
                a.written();
                assert_eq!(a.poll(), 1);
            }
        });
    }
}

fn read() {
    let (mut a, mut b) = link(false, LOOPBACK, LIST * SMALL);
    a.arena.fill(0);
    b.arena.fill(0x77);
    for i in 0..LIST {
        let sges = [a.sge(i * SMALL, SMALL)];
        let from = b.arena.addr() + (i * SMALL) as u64;
        let mut octets = Vec::new();
        measured(|| {
            a.post(&SendWr::read(1, from, b.stag, &sges).signaled());
            assert!(a.fill());
        });
        a.copy_out(&mut octets);
        a.written();
        b.receive(&octets, usize::MAX);
        octets.clear();
        measured(|| assert!(b.fill()));
        b.copy_out(&mut octets);
        b.written();
        a.receive(&octets, usize::MAX);
        measured(|| assert_eq!(a.poll(), 1));
    }
    assert!(a.arena.is_filled_with(0x77));
}

/// Reads in lists of 16, which is the maximum number of outstanding Reads.
fn reads(size: usize) {
    let list = 16;
    let (mut a, mut b) = link(false, LOOPBACK, LIST * size);
    a.arena.fill(0);
    b.arena.fill(0x77);
    for first in (0..LIST).step_by(list) {
        let mut octets = Vec::new();
        measured(|| {
            for i in first..first + list {
                let sges = [a.sge(i * size, size)];
                let from = b.arena.addr() + (i * size) as u64;
                a.post(&SendWr::read(1, from, b.stag, &sges).signaled());
            }
            assert!(a.fill());
        });
        a.copy_out(&mut octets);
        a.written();
        b.receive(&octets, usize::MAX);
        octets.clear();
        measured(|| {
            assert!(b.fill());
            assert!(b.find_runs() > 0);
        });
        b.copy_out(&mut octets);
        b.written();
        a.receive(&octets, usize::MAX);
        measured(|| assert_eq!(a.poll(), list));
    }
    assert!(a.arena.is_filled_with(0x77));
}
