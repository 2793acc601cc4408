//! A queue pair with its environment, driven by hand.
#![allow(unsafe_code)]

use crate::memory::{HostRange, MemoryTable};
use crate::qp::*;
use crate::receive_queue::{SharedReceiveQueue, TakenRecv};
use crate::{
    Access, Cqe, PostError, RecvWr, SendFlags, SendOp, SendWr, Sge, Time, WcOpcode, WcStatus,
};
use iwarp_proto::crc32c::{self, Crc32cFn};
use iwarp_proto::ddp::{Header, Stag, TaggedHeader, UntaggedHeader};
use iwarp_proto::mpa::framing::{FpduOptions, MarkerClock, decode_fpdu, encode_fpdu};
use iwarp_proto::rdmap::{Opcode, Terminate, TerminateCode};
use std::boxed::Box;
use std::vec;
use std::vec::Vec;

pub(super) const PD: u32 = 1;
pub(super) const ALL: Access = Access::all().difference(Access::ZERO_BASED);

/// A registered region. Its memory is never freed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mr {
    pub(super) stag: u32,
    pub(super) at: u64,
    pub(super) len: u32,
}

impl Mr {
    pub(super) const fn sge(&self) -> Sge {
        self.part(0, self.len)
    }

    pub(super) const fn part(&self, off: u32, len: u32) -> Sge {
        Sge {
            addr: self.at + off as u64,
            len,
            lkey: self.stag,
        }
    }

    fn put(&self, at: u32, octet: u8) {
        assert!(at < self.len);
        // SAFETY: the address is in memory that this test has leaked.
        unsafe { ((self.at + u64::from(at)) as *mut u8).write_volatile(octet) };
    }
}

#[derive(Debug, Default)]
pub(super) struct TestHost {
    pub(super) sends: Vec<Cqe>,
    pub(super) recvs: Vec<Cqe>,
    pub(super) srq: Option<SharedReceiveQueue>,
    pub(super) limit_events: u32,
    /// The shared receive queues of an XRC domain: number, protection domain, queue.
    pub(super) domain: Vec<(u32, u32, SharedReceiveQueue)>,
    pub(super) selected: Option<u32>,
    /// Region that is overwritten when a receive is returned to the shared queue, as if a message
    /// of another queue pair had used the receive.
    pub(super) overwritten_on_return: Option<Mr>,
    /// Receives are treated as not posted.
    pub(super) not_ready: bool,
}

impl Host for TestHost {
    type Memory = HostRange;

    fn complete(&mut self, direction: Direction, cqe: Cqe) {
        assert_ne!(
            cqe.qp_num, 0,
            "the completion has no queue pair number: {cqe:?}"
        );
        // Programs read the opcode even where the manual leaves it undefined, to distinguish sends
        // and receives.
        use WcOpcode::{Recv, RecvWriteImm, TagNone, TagRecv};
        let is_receive = matches!(cqe.opcode, Recv | RecvWriteImm | TagRecv | TagNone);
        assert_eq!(is_receive, direction == Direction::Recv, "{cqe:?}");
        match direction {
            Direction::Send => self.sends.push(cqe),
            Direction::Recv => self.recvs.push(cqe),
        }
    }

    fn take_shared_receive(&mut self, taken: &mut TakenRecv) -> bool {
        let selected = self.selected;
        let named = self.domain.iter_mut().find(|q| Some(q.0) == selected);
        let Some(srq) = named.map(|q| &mut q.2).or(self.srq.as_mut()) else {
            return false;
        };
        let (found, limit) = srq.take(taken);
        self.limit_events += u32::from(limit);
        found
    }

    fn with_shared_receive<R>(
        &mut self,
        f: impl FnOnce(&mut SharedReceiveQueue) -> R,
    ) -> Option<R> {
        let srq = self.srq.as_mut()?;
        let before = srq.len();
        let result = f(srq);
        if srq.len() > before
            && let Some(mr) = &self.overwritten_on_return
        {
            (0..mr.len).for_each(|at| mr.put(at, 0xee));
        }
        Some(result)
    }

    fn receiver_ready(&mut self) -> bool {
        !self.not_ready
    }

    fn select_shared_receive(&mut self, number: u32) -> Option<u32> {
        let found = self.domain.iter().find(|q| q.0 == number);
        self.selected = found.map(|q| q.0);
        found.map(|q| q.1)
    }
}

/// Returns identifiers and statuses in order.
pub(super) fn brief(cqes: &[Cqe]) -> Vec<(u64, WcStatus)> {
    cqes.iter().map(|c| (c.wr_id, c.status)).collect()
}

pub(super) struct Rig {
    pub(super) qp: QueuePair,
    pub(super) host: TestHost,
    pub(super) table: MemoryTable,
    pub(super) buffer: Box<RxBuffer>,
    pub(super) plan: Box<TxPlan>,
    pub(super) options: FpduOptions,
    /// Octets passed to the queue pair and not yet consumed.
    pub(super) offered: Vec<u8>,
    clock_out: MarkerClock,
    clock_in: MarkerClock,
    out: Vec<u8>,
    random: u32,
}

pub(super) const STREAM: StreamConfig = StreamConfig {
    initiator: true,
    crc: true,
    markers_tx: false,
    markers_rx: false,
    ird: 4,
    ord: 4,
    rtr: None,
    rtr_send_expected: false,
    emss: 1460,
    times: StreamTimes::NONE,
};

impl Rig {
    /// Returns a rig that is not started.
    pub(super) fn fresh(config: QpConfig) -> Self {
        Self {
            qp: QueuePair::new(config).unwrap(),
            host: TestHost::default(),
            table: MemoryTable::new(),
            buffer: RxBuffer::new().unwrap(),
            plan: TxPlan::new().unwrap(),
            options: FpduOptions {
                markers: false,
                crc: Some(crc32c::append),
            },
            offered: Vec::new(),
            clock_out: MarkerClock::new(),
            clock_in: MarkerClock::new(),
            out: Vec::new(),
            random: 0x1234_5678,
        }
    }

    /// Returns a rig in RTS as initiator, with CRC.
    pub(super) fn new() -> Self {
        Self::with(QpConfig::default(), STREAM)
    }

    pub(super) fn with(config: QpConfig, stream: StreamConfig) -> Self {
        let mut rig = Self::fresh(config);
        rig.start(stream);
        rig
    }

    pub(super) fn start(&mut self, stream: StreamConfig) {
        self.options.crc = stream.crc.then_some(crc32c::append);
        // The test's codec uses the same options in both directions.
        self.options.markers = stream.markers_tx && stream.markers_rx;
        self.qp.start(stream, Time::ZERO).unwrap();
    }

    /// Registers a region of bytes 0, 1, 2 ….
    pub(super) fn mr(&mut self, len: u32, access: Access) -> Mr {
        self.mr_in(PD, len, access)
    }

    pub(super) fn range(&mut self, len: u32) -> HostRange {
        let words: &'static mut [u64] = Box::leak(vec![0u64; len as usize / 8 + 1].into());
        let at = words.as_mut_ptr().cast::<u8>();
        for i in 0..len {
            // SAFETY: the address is inside the allocation, which is not shared yet.
            unsafe { at.add(i as usize).write(i as u8) };
        }
        // SAFETY: the memory is leaked, so it stays valid; the reference is not used any more.
        unsafe { HostRange::new(at as u64, u64::from(len)) }.unwrap()
    }

    pub(super) fn mr_in(&mut self, pd: u32, len: u32, access: Access) -> Mr {
        let range = self.range(len);
        let (at, random) = (range.addr(), self.random());
        let stag = self.table.register(range, at, pd, access, random);
        Mr {
            stag: stag.unwrap().0,
            at,
            len,
        }
    }

    /// Registers a region whose tagged offsets start at zero, so that they are equal in all runs.
    pub(super) fn zero_based(&mut self, len: u32, access: Access) -> Mr {
        self.mr_in(PD, len, access | Access::ZERO_BASED)
    }

    pub(super) fn random(&mut self) -> u32 {
        self.random = self.random.wrapping_mul(0x9e37_79b1).wrapping_add(0x701);
        self.random
    }

    /// Writes to memory as the program.
    pub(super) fn write(&self, mr: &Mr, at: u32, octet: u8) {
        mr.put(at, octet);
    }

    pub(super) fn read(&self, mr: &Mr) -> Vec<u8> {
        let mut out = vec![0; mr.len as usize];
        for (i, octet) in out.iter_mut().enumerate() {
            // SAFETY: the address is in memory that this test has leaked.
            *octet = unsafe { ((mr.at + i as u64) as *const u8).read_volatile() };
        }
        out
    }

    pub(super) fn recv(&mut self, wr_id: u64, sges: &[Sge]) {
        let wr = RecvWr { wr_id, sges };
        self.qp.post_recv(&wr, &mut self.host).unwrap();
    }

    pub(super) fn post(&mut self, wr_id: u64, op: SendOp, sges: &[Sge]) {
        self.post_flags(wr_id, op, SendFlags::SIGNALED, sges);
    }

    pub(super) fn post_flags(&mut self, wr_id: u64, op: SendOp, flags: SendFlags, sges: &[Sge]) {
        self.try_post(wr_id, op, flags, sges).unwrap();
    }

    pub(super) fn try_post(
        &mut self,
        wr_id: u64,
        op: SendOp,
        flags: SendFlags,
        sges: &[Sge],
    ) -> Result<(), PostError> {
        let wr = SendWr {
            wr_id,
            op,
            flags,
            sges,
            inline: &[],
        };
        self.qp.post_send(&wr, &mut self.host)
    }

    pub(super) fn fill(&mut self) -> TxFill {
        let mut env = Env {
            memory: &self.table,
            crc32c: Crc32c::new(crc32c::append),
            host: &mut self.host,
        };
        self.qp.tx_fill(&mut self.plan, &mut env)
    }

    pub(super) fn write_some(&mut self, most: usize) -> Vec<u8> {
        let mut out = vec![0; most];
        let accessor = self.qp.accessor();
        let n = self.plan.copy_to(&self.table, accessor, &mut out).unwrap();
        out.truncate(n);
        self.compare_runs(&out);
        self.qp.tx_written(&mut self.plan, n, &mut self.host);
        out
    }

    /// Checks that the plan's runs contain the octets that `copy_to` has copied, as far as one
    /// write may include them.
    fn compare_runs(&mut self, copied: &[u8]) {
        // If octets are written one by one, checking all runs each time would take too long.
        let max_runs = if copied.len() < 256 { 3 } else { usize::MAX };
        let (accessor, together) = (self.qp.accessor(), self.plan.together());
        let (mut runs, mut total, mut rest) = (0, 0, copied);
        let visit = |run: Run<'_>| {
            assert!(!run.fragment.is_empty(), "an empty run");
            (runs, total) = (runs + 1, total + run.fragment.len());
            let (now, later) = rest.split_at(rest.len().min(run.fragment.len()));
            // SAFETY: the octets are readable until the plan changes.
            let octets = unsafe { core::slice::from_raw_parts(run.fragment.as_ptr(), now.len()) };
            assert_eq!(octets, now);
            rest = later;
        };
        self.plan
            .runs(&self.table, accessor, max_runs, visit)
            .unwrap();
        self.plan.release(&self.table);
        assert!(runs <= max_runs && total <= together);
        assert!(
            runs == max_runs || total == together,
            "{total} of {together}"
        );
    }

    /// Returns the octets of all runs of the plan without writing them.
    pub(super) fn all_unwritten(&mut self) -> Vec<u8> {
        let (accessor, mut all) = (self.qp.accessor(), Vec::new());
        let visit = |run: Run<'_>| {
            // SAFETY: the octets are readable until the plan changes.
            let octets =
                unsafe { core::slice::from_raw_parts(run.fragment.as_ptr(), run.fragment.len()) };
            all.extend_from_slice(octets);
        };
        self.plan.all_runs(&self.table, accessor, visit).unwrap();
        self.plan.release(&self.table);
        all
    }

    /// Returns everything that is sent now, as octets.
    pub(super) fn octets_out(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        for _ in 0..10_000 {
            if self.plan.is_done() {
                if !self.qp.wants_tx() {
                    return all;
                }
                match self.fill() {
                    TxFill::Idle => {
                        assert!(!self.qp.wants_tx(), "`wants_tx` without anything to send");
                        return all;
                    }
                    TxFill::Memory => {
                        self.qp.tx_memory(&mut self.table, &mut self.host);
                        continue;
                    }
                    TxFill::More => continue,
                    TxFill::Ready => {}
                }
            }
            all.extend(self.write_some(60_000));
        }
        panic!("sending does not end");
    }

    /// Returns everything that is sent now, as segments.
    pub(super) fn sent(&mut self) -> Vec<(Header, Vec<u8>)> {
        let octets = self.octets_out();
        self.segments(&octets)
    }

    pub(super) fn write_plan(&mut self) -> Vec<(Header, Vec<u8>)> {
        let octets = self.write_some(self.plan.remaining());
        assert!(self.plan.is_done());
        self.segments(&octets)
    }

    /// Returns the segments of the plan without writing them.
    pub(super) fn plan_segments(&mut self) -> Vec<(Header, Vec<u8>)> {
        let octets = self.all_unwritten();
        self.segments(&octets)
    }

    fn segments(&mut self, octets: &[u8]) -> Vec<(Header, Vec<u8>)> {
        self.out.extend(octets);
        let mut segments = Vec::new();
        let mut ulpdu = vec![0; 65536];
        while !self.out.is_empty() {
            let d = decode_fpdu(&self.out, &self.options, &mut self.clock_out, &mut ulpdu).unwrap();
            let header = Header::parse(&ulpdu[..d.ulpdu_len]).unwrap();
            segments.push((header, ulpdu[header.len()..d.ulpdu_len].to_vec()));
            self.out.drain(..d.consumed);
        }
        segments
    }

    /// Returns the Terminate, which must be the last message sent.
    pub(super) fn terminate(&mut self) -> Terminate {
        let sent = self.sent();
        let (header, payload) = sent.last().expect("nothing was sent");
        assert_eq!(header.opcode(), Opcode::TERMINATE);
        Terminate::parse(payload).unwrap().0
    }

    /// Returns an FPDU as the peer would send it.
    pub(super) fn fpdu(&mut self, ulpdu: &[u8]) -> Vec<u8> {
        let mut out = vec![0; ulpdu.len() + 16 + ulpdu.len() / 100];
        let n = encode_fpdu(ulpdu, &self.options, &mut self.clock_in, &mut out).unwrap();
        out.truncate(n);
        out
    }

    pub(super) fn rx_ulpdu(&mut self, ulpdu: &[u8]) -> RxStatus {
        let fpdu = self.fpdu(ulpdu);
        self.rx(&fpdu)
    }

    pub(super) fn rx(&mut self, octets: &[u8]) -> RxStatus {
        self.offered.extend_from_slice(octets);
        self.offer_again()
    }

    /// Passes the unconsumed octets again, until the result is not `More`.
    pub(super) fn offer_again(&mut self) -> RxStatus {
        loop {
            let status = self.input(crc32c::append);
            if status != RxStatus::More {
                return status;
            }
        }
    }

    /// Passes the unconsumed octets once.
    pub(super) fn input(&mut self, crc32c: Crc32cFn) -> RxStatus {
        let mut env = Env {
            memory: &self.table,
            crc32c: Crc32c::new(crc32c),
            host: &mut self.host,
        };
        let (n, status) = self.qp.rx_input(&self.offered, &mut self.buffer, &mut env);
        self.offered.drain(..n);
        let consumes_all = matches!(status, RxStatus::Ok | RxStatus::Failed);
        assert!(!consumes_all || self.offered.is_empty(), "{status:?}");
        status
    }

    /// Processes the contents of the buffer after `n` octets were read.
    pub(super) fn filled(&mut self, n: usize) -> RxStatus {
        let mut env = Env {
            memory: &self.table,
            crc32c: Crc32c::new(crc32c::append),
            host: &mut self.host,
        };
        self.qp
            .rx_filled(&mut self.buffer, &mut RxPlan::new(1), n, &mut env)
    }

    /// Lets the time of a held Send expire.
    pub(super) fn expire_held_send(&mut self) {
        let start = Time::from_nanos(1);
        self.qp.on_time(start, &mut self.host);
        let long = Duration::from_secs(3600);
        self.qp.on_time(start.after(long), &mut self.host);
    }

    pub(super) fn eof(&mut self) {
        self.qp.rx_eof(&mut self.buffer, &mut self.host);
    }

    /// Checks that the stream has ended because of `blame`, with this code, and that everything is
    /// flushed.
    #[track_caller]
    pub(super) fn assert_ended(&self, blame: Blame, code: TerminateCode) {
        assert_eq!(self.qp.fault(), Some(Fault { blame, code }));
        assert_eq!(self.qp.state(), State::Error);
        assert_eq!(self.qp.sends_outstanding(), 0);
        assert_eq!(self.qp.receives_posted(), 0);
    }
}

pub(super) fn untagged(
    opcode: Opcode,
    qn: u32,
    msn: u32,
    mo: u32,
    last: bool,
    payload: &[u8],
) -> Vec<u8> {
    with_payload(
        &Header::Untagged(UntaggedHeader {
            last,
            opcode,
            invalidate_stag: Stag(0),
            qn,
            msn,
            mo,
        }),
        payload,
    )
}

pub(super) fn send(msn: u32, payload: &[u8]) -> Vec<u8> {
    untagged(Opcode::SEND, 0, msn, 0, true, payload)
}

pub(super) fn tagged(opcode: Opcode, stag: u32, to: u64, last: bool, payload: &[u8]) -> Vec<u8> {
    with_payload(
        &Header::Tagged(TaggedHeader {
            last,
            opcode,
            stag: Stag(stag),
            to,
        }),
        payload,
    )
}

pub(super) fn with_payload(header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut out = vec![0; header.len()];
    header.emit(&mut out);
    out.extend_from_slice(payload);
    out
}

/// Returns the first Send of a stream, with Invalidate.
pub(super) fn send_inv(stag: u32, payload: &[u8]) -> Vec<u8> {
    let header = Header::Untagged(UntaggedHeader {
        last: true,
        opcode: Opcode::SEND_INV,
        invalidate_stag: Stag(stag),
        qn: 0,
        msn: 1,
        mo: 0,
    });
    with_payload(&header, payload)
}

pub(super) fn read_request(sink: u32, size: u32, stag: u32, to: u64) -> Vec<u8> {
    let mut body = vec![0; 28];
    iwarp_proto::rdmap::ReadRequest {
        sink_stag: Stag(sink),
        sink_to: 0,
        size,
        source_stag: Stag(stag),
        source_to: to,
    }
    .emit(&mut body);
    body
}

/// Moves octets between two rigs until both send nothing, in pieces of at most `piece` octets.
pub(super) fn shuttle(a: &mut Rig, b: &mut Rig, piece: usize) {
    for _ in 0..100 {
        let (x, y) = (a.octets_out(), b.octets_out());
        if x.is_empty() && y.is_empty() {
            return;
        }
        for part in x.chunks(piece) {
            let _ = b.rx(part);
        }
        for part in y.chunks(piece) {
            let _ = a.rx(part);
        }
    }
    panic!("the exchange does not end");
}

pub(super) fn pair(stream: StreamConfig) -> (Rig, Rig) {
    let config = QpConfig {
        max_inline: 256,
        ..QpConfig::default()
    };
    let other = StreamConfig {
        initiator: !stream.initiator,
        markers_tx: stream.markers_rx,
        markers_rx: stream.markers_tx,
        ird: stream.ord,
        ord: stream.ird,
        rtr: None,
        rtr_send_expected: stream.rtr == Some(Rtr::Send),
        ..stream
    };
    (Rig::with(config, stream), Rig::with(config, other))
}
