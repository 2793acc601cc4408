//! Two queue pairs whose memory lies in scattered pages, as in a kernel: Sends, Writes and Reads arrive as over flat memory, and
//! no octet beside them changes.
#![allow(unsafe_code)]

use super::harness::STREAM;
use crate::memory::pages::tests::Scattered;
use crate::memory::{MemoryTable, Pages};
use crate::qp::{
    Direction, Env, Host, QpConfig, QueuePair, Run, RunKind, RxBuffer, RxPlan, RxStatus,
    StreamConfig, TxFill, TxPlan,
};
use crate::receive_queue::TakenRecv;
use crate::{Access, Cqe, RecvWr, SendWr, Sge, WcStatus};
use iwarp_proto::crc32c;
use proptest::prelude::*;
use std::boxed::Box;
use std::vec;
use std::vec::Vec;

const ALL: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ);
/// Tagged offset of the first octet of every region.
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
            stag: stag.unwrap(),
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

    /// What it sends now, as `sendmsg` would take it from at most `most` fragments at a time.
    fn send(&mut self, most: usize) -> Vec<u8> {
        let mut out = Vec::new();
        while !self.plan.is_done() || self.qp.wants_tx() {
            if self.plan.is_done() {
                let mut env = Env {
                    memory: &self.table,
                    crc32c: crc32c::append,
                    host: &mut self.host,
                };
                assert_eq!(self.qp.tx_fill(&mut self.plan, &mut env), TxFill::Ready);
            }
            let who = self.qp.accessor();
            let (from, mut runs) = (out.len(), 0);
            let resolved = self.plan.runs(&self.table, who, most, |run| {
                runs += 1;
                for i in 0..run.fragment.len() {
                    // SAFETY: the plan and the table are borrowed.
                    out.push(unsafe { run.fragment.as_ptr().add(i).read() });
                }
            });
            resolved.unwrap();
            assert!((1..=most).contains(&runs));
            let n = out.len() - from;
            self.plan.release(&self.table);
            self.qp.tx_written(&mut self.plan, n, &mut self.host);
        }
        out
    }

    /// Takes octets as `recvmsg` would put them, `piece` at a time. Returns how many it read straight to its memory.
    fn receive(&mut self, mut octets: &[u8], piece: usize, most: usize) -> usize {
        let mut plan = RxPlan::new(most);
        let mut direct = 0;
        while !octets.is_empty() {
            let mut runs: Vec<Run<'_>> = Vec::new();
            let visit = |run| runs.push(run);
            self.qp
                .rx_plan(&mut self.buffer, &self.table, &mut plan, visit);
            assert!(!runs.is_empty() && runs.len() <= most);
            let named = runs.iter().map(|run| run.fragment.len());
            assert_eq!(named.sum::<usize>(), plan.room());
            let memory = runs.iter().filter(|run| run.kind == RunKind::Memory);
            let memory = memory.map(|run| run.fragment.len());
            assert_eq!(memory.sum::<usize>(), plan.direct());
            let n = plan.room().min(piece).min(octets.len());
            direct += plan.direct().min(n);
            let mut left = n;
            for run in runs {
                let here = run.fragment.len().min(left);
                let (now, later) = octets.split_at(here);
                // SAFETY: the plan is fresh, and its runs are writable.
                unsafe { now.as_ptr().copy_to(run.fragment.as_ptr(), here) };
                (octets, left) = (later, left - here);
            }
            let mut env = Env {
                memory: &self.table,
                crc32c: crc32c::append,
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

/// One operation of `len` octets between two ends; returns how many octets were read straight to memory.
fn run(op: Op, crc: bool, emss: u32, order: u64, len: usize, piece: usize, most: usize) -> usize {
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
    let (here, there) = (a.sge(100, len), b.sge(200, len));
    let wr = match op {
        Op::Send => SendWr::send(1, core::slice::from_ref(&here)),
        Op::Write => SendWr::write(1, there.addr, there.lkey, core::slice::from_ref(&here)),
        Op::Read => SendWr::read(1, there.addr, there.lkey, core::slice::from_ref(&here)),
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
        let there = a.send(most);
        direct += b.receive(&there, piece, most);
        let back = b.send(most);
        direct += a.receive(&back, piece, most);
        if there.is_empty() && back.is_empty() {
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
    assert!(a.memory.look() == (left, 0), "the requester's memory");
    assert!(b.memory.look() == (right, 0), "the responder's memory");
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
        most in 1usize..60,
    ) {
        run(op, crc, emss, order, len, piece, most);
    }
}

#[test]
fn large_payload_is_read_straight_to_pages() {
    for op in [Op::Send, Op::Write, Op::Read] {
        let direct = run(op, false, 65483, 77, 40_000, 2_000, 900);
        assert!(direct > 30_000, "{op:?}: {direct}");
    }
}
