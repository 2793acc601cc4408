//! Two queue pairs whose memory is scattered pages, as in a kernel: Sends, Writes and Reads arrive
//! as in flat memory, and no other byte changes.
#![allow(unsafe_code)]

use super::harness::STREAM;
use crate::memory::pages::tests::Scattered;
use crate::memory::{Crc32c, ListedPages, MemoryTable, Pages};
use crate::qp::{
    Direction, Env, Host, QpConfig, QueuePair, Run, RunKind, RxBuffer, RxPlan, RxStatus,
    StreamConfig, TxFill, TxPlan,
};
use crate::receive_queue::TakenRecv;
use crate::{Access, Cqe, FastRegister, RecvWr, SendOp, SendWr, Sge, WcStatus};
use iwarp_proto::crc32c;
use iwarp_proto::ddp::Stag;
use proptest::prelude::*;
use std::boxed::Box;
use std::cell::Cell;
use std::vec;
use std::vec::Vec;

const ALL: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ);
/// Tagged offset of the first byte of every region.
const BASE: u64 = 0x7000;

#[derive(Default)]
struct PagesHost {
    done: Vec<Cqe>,
}

impl Host for PagesHost {
    type Memory = Pages;

    fn complete(&mut self, _: Direction, cqe: Cqe) {
        self.done.push(cqe);
    }

    fn take_shared_receive(&mut self, _: &mut TakenRecv) -> bool {
        false
    }
}

#[test]
fn default_host_has_no_shared_queue() {
    let mut host = PagesHost::default();
    for number in [0, 1, u32::MAX] {
        assert_eq!(host.select_shared_receive(number), None);
    }
    assert_eq!(host.with_shared_receive(|srq| srq.len()), None);
    assert!(host.receiver_ready());
}

struct End {
    qp: QueuePair,
    host: PagesHost,
    table: MemoryTable<Pages>,
    memory: Scattered,
    stag: u32,
    plan: Box<TxPlan>,
    buffer: Box<RxBuffer>,
}

impl End {
    fn new(stream: StreamConfig, memory: Scattered) -> Self {
        let mut qp = QueuePair::new(QpConfig::default()).unwrap();
        qp.start(stream, crate::Time::ZERO).unwrap();
        let mut table = MemoryTable::new();
        let stag = table.register(memory.pages(), BASE, 1, ALL, 0x1357_9bdf);
        Self {
            qp,
            host: PagesHost::default(),
            stag: stag.unwrap().0,
            table,
            memory,
            plan: TxPlan::new().unwrap(),
            buffer: RxBuffer::new().unwrap(),
        }
    }

    fn sge(&self, at: usize, len: usize) -> Sge {
        Sge {
            addr: BASE + at as u64,
            len: len as u32,
            lkey: self.stag,
        }
    }

    /// Sends everything that is due, as `sendmsg` would with at most `max_runs` fragments per call.
    /// Returns the octets.
    fn send(&mut self, max_runs: usize) -> Vec<u8> {
        let mut out = Vec::new();
        while !self.plan.is_done() || self.qp.wants_tx() {
            if self.plan.is_done() {
                let mut env = Env {
                    memory: &self.table,
                    crc32c: Crc32c::new(crc32c::append),
                    host: &mut self.host,
                };
                assert_eq!(self.qp.tx_fill(&mut self.plan, &mut env), TxFill::Ready);
            }
            let accessor = self.qp.accessor();
            let (from, mut runs) = (out.len(), 0);
            let resolved = self.plan.runs(&self.table, accessor, max_runs, |run| {
                runs += 1;
                for i in 0..run.fragment.len() {
                    // SAFETY: the plan and the table are borrowed.
                    out.push(unsafe { run.fragment.as_ptr().add(i).read() });
                }
            });
            resolved.unwrap();
            assert!((1..=max_runs).contains(&runs));
            let n = out.len() - from;
            self.plan.release(&self.table);
            self.qp.tx_written(&mut self.plan, n, &mut self.host);
        }
        out
    }

    /// Receives octets as `recvmsg` would, `piece` at a time. Returns how many were read directly
    /// to memory.
    fn receive(&mut self, mut octets: &[u8], piece: usize, max_runs: usize) -> usize {
        let mut plan = RxPlan::new(max_runs);
        let mut direct = 0;
        while !octets.is_empty() {
            let mut runs: Vec<Run<'_>> = Vec::new();
            let visit = |run| runs.push(run);
            self.qp
                .rx_plan(&mut self.buffer, &self.table, &mut plan, visit);
            assert!(!runs.is_empty() && runs.len() <= max_runs);
            let named = runs.iter().map(|run| run.fragment.len());
            assert_eq!(named.sum::<usize>(), plan.room());
            let memory = runs.iter().filter(|run| run.kind == RunKind::Memory);
            let memory = memory.map(|run| run.fragment.len());
            assert_eq!(memory.sum::<usize>(), plan.direct());
            let n = plan.room().min(piece).min(octets.len());
            direct += plan.direct().min(n);
            let mut left = n;
            for run in runs {
                let local = run.fragment.len().min(left);
                let (now, later) = octets.split_at(local);
                // SAFETY: the plan is fresh, and its runs are writable.
                unsafe { now.as_ptr().copy_to(run.fragment.as_ptr(), local) };
                (octets, left) = (later, left - local);
            }
            let mut env = Env {
                memory: &self.table,
                crc32c: Crc32c::new(crc32c::append),
                host: &mut self.host,
            };
            let status = self.qp.rx_filled(&mut self.buffer, &mut plan, n, &mut env);
            assert_eq!(status, RxStatus::Ok);
        }
        direct
    }

    fn done(&mut self) -> Vec<u64> {
        let done = core::mem::take(&mut self.host.done);
        assert!(done.iter().all(|c| c.status == WcStatus::Success));
        done.iter().map(|c| c.wr_id).collect()
    }
}

#[derive(Debug, Clone, Copy)]
enum Op {
    Send,
    Write,
    Read,
}

/// Runs one operation of `len` octets between two ends; returns how many were read directly to
/// memory.
fn run(
    op: Op,
    crc: bool,
    emss: u32,
    order: u64,
    len: usize,
    piece: usize,
    max_runs: usize,
) -> usize {
    let size = len + 300;
    let stream = StreamConfig {
        crc,
        emss,
        ..STREAM
    };
    let responder = StreamConfig {
        initiator: false,
        ..stream
    };
    let memory = |order: u64| Scattered::new(order as usize % 64, size, order);
    let mut a = End::new(stream, memory(order));
    let mut b = End::new(responder, memory(order.rotate_left(17)));
    let ours: Vec<u8> = (0..size).map(|i| (i * 5 + i / 256) as u8).collect();
    let theirs: Vec<u8> = (0..size).map(|i| (i * 3 + i / 128) as u8).collect();
    a.memory.fill(&ours);
    b.memory.fill(&theirs);
    let (local, remote) = (a.sge(100, len), b.sge(200, len));
    let wr = match op {
        Op::Send => SendWr::send(1, core::slice::from_ref(&local)),
        Op::Write => SendWr::write(1, remote.addr, remote.lkey, core::slice::from_ref(&local)),
        Op::Read => SendWr::read(1, remote.addr, remote.lkey, core::slice::from_ref(&local)),
    };
    a.qp.post_send(&wr.signaled(), &mut a.host).unwrap();
    if matches!(op, Op::Send) {
        let sges = [b.sge(200, 70), b.sge(270, len - 70)];
        let wr = RecvWr {
            wr_id: 2,
            sges: &sges,
        };
        b.qp.post_recv(&wr, &mut b.host).unwrap();
    }
    let mut direct = 0;
    loop {
        let remote = a.send(max_runs);
        direct += b.receive(&remote, piece, max_runs);
        let back = b.send(max_runs);
        direct += a.receive(&back, piece, max_runs);
        if remote.is_empty() && back.is_empty() {
            break;
        }
    }
    assert_eq!(a.done(), [1]);
    assert_eq!(
        b.done(),
        if matches!(op, Op::Send) {
            vec![2]
        } else {
            vec![]
        }
    );
    let (mut left, mut right) = (ours.clone(), theirs.clone());
    match op {
        Op::Send | Op::Write => right[200..200 + len].copy_from_slice(&ours[100..100 + len]),
        Op::Read => left[100..100 + len].copy_from_slice(&theirs[200..200 + len]),
    }
    assert!(a.memory.contents() == (left, 0), "the requester's memory");
    assert!(b.memory.contents() == (right, 0), "the responder's memory");
    direct
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn messages_arrive_in_pages(
        op in prop_oneof![Just(Op::Send), Just(Op::Write), Just(Op::Read)],
        crc: bool,
        emss in prop_oneof![Just(1460u32), Just(9000), Just(65483)],
        order: u64,
        len in prop_oneof![71usize..3000, 3000usize..40_000],
        piece in 1usize..30_000,
        max_runs in 1usize..60,
    ) {
        run(op, crc, emss, order, len, piece, max_runs);
    }
}

#[test]
fn large_payload_is_read_to_pages() {
    for op in [Op::Send, Op::Write, Op::Read] {
        let direct = run(op, false, 65483, 77, 40_000, 2_000, 900);
        assert!(direct > 30_000, "{op:?}: {direct}");
    }
}

#[test]
fn zero_runs_visit_nothing() {
    let mut end = End::new(STREAM, Scattered::new(3, 1000, 1));
    let sges = [end.sge(0, 1000)];
    let wr = SendWr::write(1, 0, 0, &sges);
    end.qp.post_send(&wr, &mut end.host).unwrap();
    let mut env = Env {
        memory: &end.table,
        crc32c: Crc32c::new(crc32c::append),
        host: &mut end.host,
    };
    assert_eq!(end.qp.tx_fill(&mut end.plan, &mut env), TxFill::Ready);
    let accessor = end.qp.accessor();
    let none = |_: Run<'_>| panic!("no run was requested");
    assert_eq!(end.plan.runs(&end.table, accessor, 0, none), Ok(()));
}

/// Returns two ends. The second has a region for fast registrations that uses this list.
fn with_fast_region(list: &[Cell<u64>]) -> (End, End, Stag) {
    let responder = StreamConfig {
        initiator: false,
        ..STREAM
    };
    let a = End::new(STREAM, Scattered::new(3, 1000, 1));
    let mut b = End::new(responder, Scattered::new(5, 1000, 2));
    let (at, max_runs) = (list.as_ptr().cast(), list.len() as u32);
    // SAFETY: the list outlives the ends, and is changed only while no registration is valid.
    let pages = unsafe { Pages::listed(at, max_runs) }.unwrap();
    let fast = b.table.allocate_fast(pages, 1, 0x2468_ac00);
    (a, b, fast.unwrap())
}

/// Puts pages into a region's list. Returns their [`ListedPages`], and the offset of the first
/// byte.
fn put_pages(list: &[Cell<u64>], memory: &Scattered) -> (ListedPages, u64) {
    let (addresses, pages, offset) = memory.list();
    for (entry, address) in list.iter().zip(addresses) {
        entry.set(*address);
    }
    (pages, offset)
}

impl End {
    /// Posts a request without data. Returns its status.
    fn execute(&mut self, op: SendOp) -> WcStatus {
        let wr = SendWr::new(9, op, &[]).signaled();
        self.qp.post_send(&wr, &mut self.host).unwrap();
        assert!(self.execute_local_requests().is_empty());
        self.host.done.pop().unwrap().status
    }

    /// Executes local requests. Returns what is sent.
    fn execute_local_requests(&mut self) -> Vec<u8> {
        let mut env = Env {
            memory: &self.table,
            crc32c: Crc32c::new(crc32c::append),
            host: &mut self.host,
        };
        match self.qp.tx_fill(&mut self.plan, &mut env) {
            TxFill::Ready => self.send(99),
            _ => Vec::new(),
        }
    }
}

#[test]
fn fast_registrations_have_own_pages() {
    let list = vec![Cell::new(0); 20];
    let (mut a, mut b, fast) = with_fast_region(&list);
    for key in 1..4u32 {
        let len = 300 + 100 * key as usize;
        let registered = Scattered::new(7 * key as usize, len, u64::from(key));
        let old = vec![0x11; len];
        registered.fill(&old);
        let (pages, offset) = put_pages(&list, &registered);
        let register = FastRegister {
            new_stag: fast.with_key(key as u8),
            offset,
            len: len as u64,
            // A tagged offset unrelated to the pages.
            iova: 0x9000_0000 + u64::from(key),
            access: ALL,
            pages: Some(pages),
        };
        assert_eq!(b.execute(SendOp::FastRegister(register)), WcStatus::Success);
        // The first 200 octets of the region do not change.
        let new = [key as u8; 1000];
        a.memory.fill(&new);
        let local = [a.sge(0, len - 200)];
        let write = SendWr::write(1, register.iova + 200, register.new_stag.0, &local);
        a.qp.post_send(&write.signaled(), &mut a.host).unwrap();
        let octets = a.send(99);
        b.receive(&octets, 1000, 99);
        assert_eq!(a.done(), [1]);
        let stag = register.new_stag;
        assert_eq!(
            b.execute(SendOp::LocalInvalidate { stag }),
            WcStatus::Success
        );
        let expected = [&old[..200], &new[200..len]].concat();
        assert!(registered.contents() == (expected, 0), "registration {key}");
    }
}

#[test]
fn fast_registration_is_limited_to_pages() {
    let list = vec![Cell::new(0); 6];
    let register = |pages: Option<&Scattered>, len, stag| {
        let (pages, offset) = pages.map(|pages| put_pages(&list, pages)).unzip();
        SendOp::FastRegister(FastRegister {
            new_stag: stag,
            offset: offset.unwrap_or(0),
            len,
            iova: 0,
            access: ALL,
            pages,
        })
    };
    // Six pages of 64 bytes; the first four bytes are not used.
    let fits = Scattered::new(4, 6 * 64 - 4, 3);
    let long = Scattered::new(0, 7 * 64, 3);
    let refused = [
        ("an octet after the last page", Some(&fits), 381),
        ("more pages than the list has entries", Some(&long), 64),
        ("no pages", None, 1),
    ];
    for (what, pages, len) in refused {
        let (_, mut b, fast) = with_fast_region(&list);
        // The pages of an earlier registration are not used.
        let before = b.execute(register(Some(&fits), 380, fast));
        let ended = b.execute(SendOp::LocalInvalidate { stag: fast });
        assert_eq!([before, ended], [WcStatus::Success; 2]);
        let status = b.execute(register(pages, len, fast));
        assert_eq!(status, WcStatus::MwBind, "{what}");
        assert!(!b.table.info(fast).unwrap().valid);
    }
    // Memory without a page list accepts no pages.
    let (_, mut b, _) = with_fast_region(&list);
    let other = b.table.allocate_fast(fits.pages(), 1, 0x3579_bd00).unwrap();
    let status = b.execute(register(Some(&fits), 64, other));
    assert_eq!(status, WcStatus::MwBind);
}
