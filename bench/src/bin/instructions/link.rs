//! Two connected queue pairs. Their streams are vectors of octets instead of sockets.

use crate::arena::{Arena, read_into};
use crate::measured;
use iwarp_proto::crc32c;
use iwarp_rnic::cq::{CompletionQueue, Pushed};
use iwarp_rnic::memory::{Crc32c, HostRange, MemoryTable};
use iwarp_rnic::qp::{
    Direction, Env, Host, QpConfig, QueuePair, Run, RxBuffer, RxPlan, RxStatus, StreamConfig,
    StreamTimes, TxFill, TxPlan,
};
use iwarp_rnic::receive_queue::TakenRecv;
use iwarp_rnic::{Access, Cqe, RecvWr, SendWr, Sge, Time, WcStatus};

/// Maximum number of outstanding requests.
const DEPTH: u32 = 256;
/// Maximum number of runs per write.
const RUNS: usize = 1024;
/// All access rights.
pub(crate) const ALL_ACCESS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC);

/// Puts completions into a completion queue.
pub(crate) struct Completions(pub(crate) CompletionQueue);

impl Host for Completions {
    type Memory = HostRange;

    fn complete(&mut self, _: Direction, cqe: Cqe) {
        assert_ne!(
            self.0.push(cqe),
            Pushed::Overflow { first: true },
            "the completion queue overflowed"
        );
    }

    fn take_shared_receive(&mut self, _: &mut TakenRecv) -> bool {
        false
    }
}

/// One end of the link: a queue pair with its memory and its buffers.
pub(crate) struct End {
    pub(crate) qp: QueuePair,
    pub(crate) memory: MemoryTable,
    pub(crate) host: Completions,
    pub(crate) arena: Arena,
    pub(crate) stag: u32,
    tx: Box<TxPlan>,
    rx: RxPlan,
    buffer: Box<RxBuffer>,
    /// Address and length of each run of the plan.
    runs: Vec<(usize, usize)>,
}

impl End {
    fn new(initiator: bool, crc: bool, emss: u32, len: usize) -> Self {
        let mut qp = QueuePair::new(QpConfig {
            max_send_wr: DEPTH,
            max_recv_wr: DEPTH,
            ..QpConfig::default()
        })
        .expect("a queue pair");
        let stream = StreamConfig {
            initiator,
            crc,
            markers_tx: false,
            markers_rx: false,
            ird: 16,
            ord: 16,
            rtr: None,
            rtr_send_expected: false,
            emss,
            times: StreamTimes::NONE,
        };
        qp.start(stream, Time::ZERO)
            .expect("a stream can be started on a new queue pair");
        let arena = Arena::new(len);
        let mut memory = MemoryTable::new();
        let stag = memory
            .register(arena.range(), arena.addr(), 1, ALL_ACCESS, 0x1234_5678)
            .expect("an empty table has a free slot");
        Self {
            qp,
            memory,
            host: Completions(CompletionQueue::new(4 * DEPTH).expect("a queue")),
            arena,
            stag: stag.0,
            tx: TxPlan::new().expect("a plan"),
            rx: RxPlan::new(64),
            runs: Vec::with_capacity(RUNS),
            buffer: RxBuffer::new().expect("a buffer"),
        }
    }

    /// Returns a scatter/gather element in the arena.
    pub(crate) fn sge(&self, at: usize, len: usize) -> Sge {
        Sge {
            addr: self.arena.addr() + at as u64,
            len: len as u32,
            lkey: self.stag,
        }
    }

    pub(crate) fn post(&mut self, wr: &SendWr<'_>) {
        self.qp
            .post_send(wr, &mut self.host)
            .expect("the send queue is not full");
    }

    pub(crate) fn post_recv(&mut self, wr: &RecvWr<'_>) {
        self.qp
            .post_recv(wr, &mut self.host)
            .expect("the receive queue is not full");
    }

    /// Fills the plan for sending. Returns `false` if there is nothing to send.
    pub(crate) fn fill(&mut self) -> bool {
        let mut env = Env {
            memory: &self.memory,
            crc32c: Crc32c::new(crc32c::append),
            host: &mut self.host,
        };
        self.qp.tx_fill(&mut self.tx, &mut env) == TxFill::Ready
    }

    /// Determines the addresses of the plan's octets. Returns the number of runs.
    pub(crate) fn find_runs(&mut self) -> usize {
        let Self {
            qp,
            tx,
            memory,
            runs,
            ..
        } = self;
        runs.clear();
        let visit = |run: Run<'_>| runs.push((run.fragment.as_ptr().addr(), run.fragment.len()));
        tx.runs(memory, qp.accessor(), RUNS, visit)
            .expect("registered memory");
        tx.release(memory);
        assert_eq!(runs.iter().map(|run| run.1).sum::<usize>(), tx.remaining());
        runs.len()
    }

    /// Notifies the queue pair that the stream has taken the whole plan.
    pub(crate) fn written(&mut self) {
        let n = self.tx.remaining();
        self.qp.tx_written(&mut self.tx, n, &mut self.host);
    }

    /// Appends the octets of the plan to `out`. Not counted: the kernel does this in a real
    /// program.
    pub(crate) fn copy_out(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.resize(start + self.tx.remaining(), 0);
        self.tx
            .copy_to(&self.memory, self.qp.accessor(), &mut out[start..])
            .expect("registered memory");
    }

    /// Receives all octets, at most `at_once` at a time. The copy is not counted: the kernel does
    /// it in a real program.
    pub(crate) fn receive(&mut self, mut octets: &[u8], at_once: usize) {
        while !octets.is_empty() {
            let mut runs = Vec::with_capacity(64);
            measured(|| {
                let visit = |run| runs.push(run);
                self.qp
                    .rx_plan(&mut self.buffer, &self.memory, &mut self.rx, visit)
            });
            let n = read_into(&runs, &octets[..octets.len().min(at_once)]);
            octets = &octets[n..];
            let status = measured(|| {
                let mut env = Env {
                    memory: &self.memory,
                    crc32c: Crc32c::new(crc32c::append),
                    host: &mut self.host,
                };
                self.qp
                    .rx_filled(&mut self.buffer, &mut self.rx, n, &mut env)
            });
            assert_eq!(status, RxStatus::Ok);
        }
        assert!(self.buffer.is_empty(), "part of an FPDU remains");
    }

    /// Polls all completions, and checks that they are successful. Returns their number.
    pub(crate) fn poll(&mut self) -> usize {
        let mut done = [Cqe::default(); 64];
        let mut total = 0;
        loop {
            let n = self.host.0.poll(&mut done);
            if n == 0 {
                return total;
            }
            assert!(done[..n].iter().all(|c| c.status == WcStatus::Success));
            total += n;
        }
    }
}

/// Returns two connected queue pairs, the initiator first. The initiator has already sent a
/// message, because the responder must not send before that.
pub(crate) fn link(crc: bool, emss: u32, len: usize) -> (End, End) {
    let mut a = End::new(true, crc, emss, len);
    let mut b = End::new(false, crc, emss, len);
    a.arena.fill(0x5a);
    a.post(&SendWr::write(0, 0, 0, &[]).signaled());
    let mut octets = Vec::new();
    assert!(a.fill());
    a.copy_out(&mut octets);
    a.written();
    b.receive(&octets, usize::MAX);
    assert_eq!(a.poll(), 1);
    (a, b)
}
