//! Tests of on-demand regions: mapped memory works for every operation, unmapped memory is an error
//! of the end that named it, and a program survives unmapping under traffic.
#![allow(unsafe_code)]

use crate::common::*;
use iwarp::runtime::{SendOp, Sge, WcStatus};
use iwarp::{Access, Blame, Config};
use iwarp_proto::rdmap::TerminateCode as Code;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicBool, Ordering};

const ALL: Access = Access::all().difference(Access::ZERO_BASED);
/// The whole address space.
const WHOLE: u64 = u64::MAX;
/// Size of each of the two ranges of a `Place`.
const HALF: usize = 256 << 10;

/// A mapped range followed by an unmapped range. It is never freed.
struct Place {
    at: u64,
}

impl Place {
    fn new() -> Self {
        // SAFETY: the kernel chooses the address of the new mapping.
        let start = unsafe {
            mmap_anonymous(
                null_mut(),
                2 * HALF,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }
        .unwrap();
        let place = Self {
            at: start.expose_provenance() as u64,
        };
        place.protect(HALF, MprotectFlags::empty());
        place
    }

    /// Changes the protection of the `HALF` bytes at `from`.
    fn protect(&self, from: usize, flags: MprotectFlags) {
        let start = with_exposed_provenance_mut(self.at as usize + from);
        // SAFETY: the range consists of whole pages of this value, which only the RNIC and this
        // test access.
        unsafe { mprotect(start, HALF, flags) }.unwrap();
    }

    /// Returns the first unmapped address.
    const fn hole(&self) -> u64 {
        self.at + HALF as u64
    }

    fn word(&self, at: usize) -> *mut u64 {
        with_exposed_provenance_mut::<u64>(self.at as usize).wrapping_add(at)
    }

    fn set(&self, at: usize, value: u64) {
        // SAFETY: the word is in the mapped half. All other accesses are by the RNIC.
        unsafe { self.word(at).write_volatile(value) };
    }

    fn get(&self, at: usize) -> u64 {
        // SAFETY: the word is in the mapped half. All other accesses are by the RNIC.
        unsafe { self.word(at).read_volatile() }
    }

    fn fill(&self, words: usize, seed: u64) {
        (0..words).for_each(|at| self.set(at, seed << 32 | at as u64));
    }

    fn expect(&self, words: usize, seed: u64) {
        for at in 0..words {
            assert_eq!(self.get(at), seed << 32 | at as u64, "word {at}");
        }
    }
}

/// Registers a range of addresses on demand.
fn on_demand(end: &End, (addr, len): (u64, u64), access: Access) -> u32 {
    // SAFETY: the tests create no references to memory that the peer accesses.
    unsafe {
        end.ctx
            .register_on_demand(addr, len, addr, end.pd, access)
            .unwrap()
    }
}

const fn sge(addr: u64, len: usize, lkey: u32) -> Sge {
    Sge {
        addr,
        len: len as u32,
        lkey,
    }
}

/// Returns configurations with and without CRCs, because a large payload is copied if there is a
/// CRC, and received in place if not.
fn configs() -> [Config; 3] {
    let mut marked = config();
    marked.markers = true;
    let mut plain = config();
    plain.crc = false;
    [config(), plain, marked]
}

#[test]
fn whole_address_space_serves_operations() {
    for config in configs() {
        let (client, server) = pair(V4, &config);
        let keys = [&client, &server].map(|end| on_demand(end, (0, WHOLE), ALL));
        let [lkey, rkey] = keys;
        let (ours, theirs) = (Place::new(), Place::new());
        for (round, len) in [8, 1000, 5000, HALF].into_iter().enumerate() {
            let (seed, words) = (round as u64 + 1, len / 8);
            let (remote_addr, all) = (theirs.at, [sge(ours.at, len, lkey)]);
            ours.fill(words, seed);
            client.post(1, SendOp::Write { remote_addr, rkey }, &all);
            client.expect_status(1, WcStatus::Success);
            ours.fill(words, 0);
            client.post(2, SendOp::Read { remote_addr, rkey }, &all);
            client.expect_status(2, WcStatus::Success);
            ours.expect(words, seed);
            theirs.expect(words, seed);
            // One end uses two elements, the other end three.
            let cut = |at, len: usize, lkey| {
                let first = len / 2;
                [
                    sge(at, first, lkey),
                    sge(at + first as u64, len - first, lkey),
                ]
            };
            theirs.fill(words, 0);
            let [first, second] = cut(theirs.at, len, rkey);
            let [third, fourth] = cut(second.addr, second.len as usize, rkey);
            server.post_recv(3, &[first, third, fourth]);
            client.post(4, SendOp::Send, &cut(ours.at, len, lkey));
            assert_eq!(
                server.expect_status(3, WcStatus::Success).byte_len,
                len as u32
            );
            client.expect_status(4, WcStatus::Success);
            theirs.expect(words, seed);
        }
        theirs.set(5, 40);
        let remote_addr = theirs.at + 40;
        let (add, mask) = (2, 0);
        let op = SendOp::FetchAdd {
            remote_addr,
            rkey,
            add,
            mask,
        };
        client.post(5, op, &[sge(ours.at, 8, lkey)]);
        client.expect_status(5, WcStatus::Success);
        assert_eq!((ours.get(0), theirs.get(5)), (40, 42));
    }
}

/// A request that fails, and its expected outcome.
struct Refused {
    name: &'static str,
    /// The request, from the client's place and the server's.
    ask: fn(&Place, &Place) -> (Op, u64, u64),
    code: Code,
    status: WcStatus,
}

#[derive(Clone, Copy)]
enum Op {
    Write,
    Read,
    Add,
}

/// Returns the refused requests: operation, offset in the client's place, offset in the server's
/// place.
const REFUSED: [Refused; 6] = [
    Refused {
        name: "a Write into the hole",
        ask: |ours, theirs| (Op::Write, ours.at, theirs.hole()),
        code: Code::DDP_TAGGED_BASE_BOUNDS,
        // The request succeeds, because TCP accepts the data before the peer refuses it.
        status: WcStatus::Success,
    },
    Refused {
        name: "a Write that begins in front of the hole",
        ask: |ours, theirs| (Op::Write, ours.at, theirs.hole() - 8),
        code: Code::DDP_TAGGED_BASE_BOUNDS,
        status: WcStatus::Success,
    },
    Refused {
        name: "a Write to address 8",
        ask: |ours, _| (Op::Write, ours.at, 8),
        code: Code::DDP_TAGGED_BASE_BOUNDS,
        status: WcStatus::Success,
    },
    Refused {
        name: "a Read from the hole",
        ask: |ours, theirs| (Op::Read, ours.at, theirs.hole()),
        code: Code::RDMAP_BASE_BOUNDS,
        status: WcStatus::RemoteAccess,
    },
    Refused {
        name: "a Read that ends in the hole",
        ask: |ours, theirs| (Op::Read, ours.at, theirs.hole() - 64),
        code: Code::RDMAP_BASE_BOUNDS,
        status: WcStatus::RemoteAccess,
    },
    Refused {
        name: "an atomic in the hole",
        ask: |ours, theirs| (Op::Add, ours.at, theirs.hole()),
        code: Code::RDMAP_BASE_BOUNDS,
        status: WcStatus::RemoteAccess,
    },
];

fn operation(op: Op, remote_addr: u64, rkey: u32) -> (SendOp, usize) {
    let (add, mask) = (1, 0);
    match op {
        Op::Write => (SendOp::Write { remote_addr, rkey }, 4000),
        Op::Read => (SendOp::Read { remote_addr, rkey }, 4000),
        Op::Add => (
            SendOp::FetchAdd {
                remote_addr,
                rkey,
                add,
                mask,
            },
            8,
        ),
    }
}

#[test]
fn peer_is_refused_unmapped_memory() {
    others_are_served(|| {
        for case in &REFUSED {
            let (client, server) = pair(V4, &config());
            let rkey = on_demand(&server, (0, WHOLE), ALL);
            let lkey = on_demand(&client, (0, WHOLE), ALL);
            let (ours, theirs) = (Place::new(), Place::new());
            let (op, from, to) = (case.ask)(&ours, &theirs);
            let (op, len) = operation(op, to, rkey);
            client.post(1, op, &[sge(from, len, lkey)]);
            let cqe = client.poll();
            assert_eq!(cqe.wr_id, 1, "{}", case.name);
            // A Write completes when TCP has accepted it. It fails only if the answer arrives while
            // this thread is still in the system call.
            let overtaken = case.status == WcStatus::Success && cqe.status == WcStatus::Flushed;
            assert!(
                cqe.status == case.status || overtaken,
                "{}: {cqe:?}",
                case.name
            );
            client.expect_disconnected();
            server.expect_disconnected();
            let fault = server.qp.fault().unwrap();
            let seen = (fault.blame, fault.code);
            assert_eq!(seen, (Blame::Peer, case.code), "{}", case.name);
            assert_eq!(client.qp.fault().unwrap().blame, Blame::PeerTerminated);
        }
    });
}

#[test]
fn local_unmapped_memory_fails_request() {
    others_are_served(|| {
        for (op, name) in [
            (Op::Write, "Write"),
            (Op::Read, "Read"),
            (Op::Add, "atomic"),
        ] {
            // The address is in the unmapped range, or before it if the operation is long enough to
            // cross the border.
            for before in [0, 2048] {
                let (client, server) = pair(V4, &config());
                let rkey = on_demand(&server, (0, WHOLE), ALL);
                let lkey = on_demand(&client, (0, WHOLE), ALL);
                let (ours, theirs) = (Place::new(), Place::new());
                let (op, len) = operation(op, theirs.at, rkey);
                let from = ours.hole() - before.min(len as u64 - 8);
                client.post(1, op, &[sge(from, len, lkey)]);
                let cqe = client.poll();
                let seen = (cqe.wr_id, cqe.status);
                assert_eq!(seen, (1, WcStatus::LocalProtection), "{name}, {before}");
                client.expect_disconnected();
            }
        }
        // The elements of a receive are unmapped. The program gets the error; the peer's Send has
        // completed.
        let (client, server) = pair(V4, &config());
        let lkey = on_demand(&server, (0, WHOLE), ALL);
        let (mem, theirs) = (client.mem(64), Place::new());
        server.post_recv(7, &[sge(theirs.hole(), 64, lkey)]);
        client.post(1, SendOp::Send, &[mem.sge(64)]);
        server.expect_status(7, WcStatus::LocalProtection);
        server.expect_disconnected();
        client.expect_disconnected();
    });
}

#[test]
fn whole_address_space_respects_rights() {
    others_are_served(|| {
        let rights = [
            (Op::Write, Access::REMOTE_READ | Access::LOCAL_WRITE),
            (Op::Read, Access::REMOTE_WRITE | Access::LOCAL_WRITE),
            (Op::Add, Access::REMOTE_READ | Access::LOCAL_WRITE),
        ];
        for (op, access) in rights {
            // The access right is missing, or the key belongs to another protection domain.
            for foreign in [false, true] {
                let (client, server) = pair(V4, &config());
                let pd = match foreign {
                    true => server.ctx.allocate_pd(),
                    false => server.pd,
                };
                let access = if foreign { ALL } else { access };
                // SAFETY: as in `on_demand`.
                let rkey =
                    unsafe { server.ctx.register_on_demand(0, WHOLE, 0, pd, access) }.unwrap();
                let (mem, theirs) = (client.mem(4096), Place::new());
                let (op, len) = operation(op, theirs.at, rkey);
                client.post(1, op, &[mem.sge(len as u32)]);
                server.expect_disconnected();
                let code = server.qp.fault().unwrap().code;
                let wanted = match (foreign, op) {
                    (false, _) => Code::RDMAP_ACCESS,
                    (true, SendOp::Write { .. }) => Code::DDP_TAGGED_NOT_ASSOCIATED,
                    (true, _) => Code::RDMAP_STAG_NOT_ASSOCIATED,
                };
                assert_eq!(code, wanted);
                assert_eq!(theirs.get(0), 0);
            }
        }
        // A range that wraps around, and a key that was deregistered.
        let (client, server) = pair(V4, &config());
        // SAFETY: nothing is registered.
        let wraps = unsafe { server.ctx.register_on_demand(16, WHOLE, 16, server.pd, ALL) };
        assert!(wraps.is_err());
        let rkey = on_demand(&server, (0, WHOLE), ALL);
        server.ctx.deregister(rkey).unwrap();
        let (mem, theirs) = (client.mem(64), Place::new());
        let (op, _) = operation(Op::Add, theirs.at, rkey);
        client.post(1, op, &[mem.sge(8)]);
        client.expect_status(1, WcStatus::RemoteAccess);
    });
}

/// Ordinary regions of a device work while an on-demand region exists, with payloads of any length.
#[test]
fn other_regions_are_unaffected() {
    for config in configs() {
        let (client, server) = pair(V4, &config);
        let key = on_demand(&server, (0, WHOLE), Access::empty());
        let _ours = on_demand(&client, (0, WHOLE), Access::empty());
        let (from, to) = (client.mem(HALF), server.mem(HALF));
        for len in [1, 100, 3000, 70_000, HALF as u32] {
            from.set(0, u64::from(len));
            from.set(HALF / 8 - 1, u64::from(len) + 1);
            let (remote_addr, rkey) = (to.addr(), to.stag);
            client.post(1, SendOp::Write { remote_addr, rkey }, &[from.sge(len)]);
            client.expect_status(1, WcStatus::Success);
            server.post_recv(2, &[to.sge(HALF as u32)]);
            client.post(3, SendOp::Send, &[from.sge(len)]);
            assert_eq!(server.expect_status(2, WcStatus::Success).byte_len, len);
            client.expect_status(3, WcStatus::Success);
            assert_eq!(to.word(0) as u8, len as u8);
        }
        assert_eq!(to.word(HALF / 8 - 1), HALF as u64 + 1);
        server.ctx.deregister(key).unwrap();
    }
}

#[test]
fn unmapping_under_traffic_is_survived() {
    let gone = AtomicBool::new(false);
    let mut ended = 0;
    // The mapping changes at a different time in each round.
    for round in 0..8 {
        let (client, server) = pair(V4, &configs()[round % 2]);
        let rkey = on_demand(&server, (0, WHOLE), ALL);
        let (mem, theirs) = (client.mem(HALF), Place::new());
        gone.store(false, Ordering::Relaxed);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(std::time::Duration::from_millis(1 + round as u64));
                theirs.protect(0, MprotectFlags::empty());
                gone.store(true, Ordering::Relaxed);
            });
            let (remote_addr, all) = (theirs.at, [mem.sge(HALF as u32)]);
            loop {
                // This is read before the requests are posted, so that all requests of the last
                // round find unmapped memory.
                let last = gone.load(Ordering::Relaxed);
                client.post(1, SendOp::Write { remote_addr, rkey }, &all);
                let written = client.poll().status;
                if written == WcStatus::Success && client.qp.post_send(&[]).is_ok() {
                    let op = SendOp::Read { remote_addr, rkey };
                    let request = iwarp::runtime::SendWr::new(2, op, &all).signaled();
                    if client.qp.post_send(&[request]).is_ok()
                        && client.poll().status == WcStatus::Success
                    {
                        assert!(!last, "round {round}");
                        continue;
                    }
                }
                ended += 1;
                break;
            }
        });
        client.expect_disconnected();
        let code = server.qp.fault().unwrap().code;
        let codes = [Code::DDP_TAGGED_BASE_BOUNDS, Code::RDMAP_BASE_BOUNDS];
        assert!(codes.contains(&code), "{code:?}");
    }
    assert_eq!(ended, 8);
}
