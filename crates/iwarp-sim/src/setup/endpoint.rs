//! One endpoint of a connection: MPA start-up as in the runtime, then a queue pair and a short
//! program.

use std::collections::VecDeque;
use std::time::Duration;

use iwarp_proto::mpa::negotiate::{Agreed, Initiator, LocalParams, Outcome, Responder};
use iwarp_proto::mpa::startup::{FrameKind, FrameReader, MAX_FRAME_LEN, Progress};
use iwarp_rnic::memory::MemoryTable;
use iwarp_rnic::qp::{
    Direction, Env, Events, Host, QpConfig, QueuePair, RxBuffer, RxInterest, State, StreamConfig,
    StreamTimes, StreamWish, TxFill,
};
use iwarp_rnic::receive_queue::TakenRecv;
use iwarp_rnic::{Access, Cqe, RecvWr, SendFlags, SendOp, SendWr, Sge, Time, WcStatus};

use super::{Mode, SetupPlant};
use crate::raw::{Arena, SimRange};
use crate::world::{CRC32C, Pool};

/// How long the responder waits for the request, and the initiator for the reply. The values are
/// those of the runtime.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);
const REPLY_LIMIT: Duration = Duration::from_secs(60);

/// Size of the memory. Octets outside the following ranges must not change.
const ARENA: usize = 1024;
/// Offset and length of the range that Sends, Writes, and the peer's Read read.
const SOURCE: (usize, usize) = (64, 64);
/// The sink of the Read.
const SINK: (usize, usize) = (256, 64);
/// The receive.
const RECEIVE: (usize, usize) = (448, 64);
/// The range that the peer's Write changes.
const EXPOSED: (usize, usize) = (640, 64);
/// Length of each Send, Write and Read.
const LEN: usize = 16;
const PD: u32 = 1;

/// Work request identifiers.
const RECV: u64 = 1;
const SEND: u64 = 2;
const WRITE: u64 = 3;
const READ: u64 = 4;

/// Returns the initial octet at an offset of an endpoint's memory.
const fn pattern(side: usize, off: usize) -> u8 {
    (off as u8).wrapping_mul(7).wrapping_add(side as u8 * 101)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// The endpoint waits for the peer's frame, until this time if there is a limit.
    Startup(Option<Time>),
    /// The queue pair owns the stream.
    Up,
    /// Start-up has failed, and the connection is closed.
    Failed,
    /// The queue pair's stream has ended.
    Gone,
}

/// The effect of a call on the endpoint's stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StreamChange {
    None,
    /// The sending direction was shut down.
    Shutdown,
    Reset,
}

#[derive(Debug, Default)]
struct Completions(Vec<(Direction, Cqe)>);

impl Host for Completions {
    type Memory = SimRange;

    fn complete(&mut self, direction: Direction, cqe: Cqe) {
        self.0.push((direction, cqe));
    }

    fn take_shared_receive(&mut self, _: &mut TakenRecv) -> bool {
        false
    }
}

#[derive(Debug)]
pub(super) struct Endpoint {
    side: usize,
    mode: Mode,
    plant: Option<SetupPlant>,
    pub(super) phase: Phase,
    reader: FrameReader,
    initiator: Option<Box<Initiator>>,
    /// The negotiated parameters, after start-up.
    pub(super) agreed: Option<Agreed>,
    /// Length of the MPA frame that was sent.
    pub(super) frame_len: u64,
    /// Sent octets that have not arrived yet.
    pub(super) out: VecDeque<u8>,
    pub(super) qp: QueuePair,
    table: MemoryTable<SimRange>,
    arena: Arena,
    host: Completions,
    /// STags of the four ranges.
    stags: [u32; 4],
    peer_stags: [u32; 4],
    /// Identifiers of the posted requests.
    posted: Vec<u64>,
    /// Octets that were read, but that the queue pair has not accepted.
    unaccepted: Vec<u8>,
    /// An incomplete FPDU.
    partial: Option<Box<RxBuffer>>,
    /// The sending direction was shut down.
    shut_down: bool,
    /// The peer's FIN arrived inside an FPDU that the queue pair was reading.
    fin_inside_fpdu: bool,
    pub(super) events: Events,
}

impl Endpoint {
    pub(super) fn new(side: usize, mode: Mode, plant: Option<SetupPlant>) -> Self {
        let limit = if side == 0 {
            REPLY_LIMIT
        } else {
            REQUEST_LIMIT
        };
        let deadline = (plant != Some(SetupPlant::LoseDeadline)).then(|| Time::ZERO.after(limit));
        let config = QpConfig {
            qp_num: side as u32 + 1,
            pd: PD,
            max_send_wr: 4,
            max_recv_wr: 2,
            max_ird: 4,
            max_ord: 4,
            ..QpConfig::default()
        };
        let kind = if side == 0 {
            FrameKind::Reply
        } else {
            FrameKind::Request
        };
        let mut endpoint = Self {
            side,
            mode,
            plant,
            phase: Phase::Startup(deadline),
            reader: FrameReader::new(kind),
            initiator: None,
            agreed: None,
            frame_len: 0,
            out: VecDeque::new(),
            qp: QueuePair::new(config).expect("sizes within limits"),
            table: MemoryTable::new(),
            arena: Arena::new(ARENA),
            host: Completions::default(),
            stags: [0; 4],
            peer_stags: [0; 4],
            posted: Vec::new(),
            unaccepted: Vec::new(),
            partial: None,
            shut_down: false,
            fin_inside_fpdu: false,
            events: Events::empty(),
        };
        endpoint.register_memory();
        endpoint.post_receive();
        if side == 0 {
            let initiator = Initiator::new(mode.params(side), b"set-up").expect("sound parameters");
            endpoint.frame_len = initiator.request_octets().len() as u64;
            endpoint.out.extend(initiator.request_octets());
            endpoint.initiator = Some(Box::new(initiator));
        }
        endpoint
    }

    fn register_memory(&mut self) {
        let octets: Vec<u8> = (0..ARENA).map(|at| pattern(self.side, at)).collect();
        self.arena.write(0, &octets);
        let remote = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let rights = [
            Access::REMOTE_READ,
            Access::LOCAL_WRITE,
            Access::LOCAL_WRITE,
            remote,
        ];
        for (i, ((at, len), access)) in [SOURCE, SINK, RECEIVE, EXPOSED]
            .into_iter()
            .zip(rights)
            .enumerate()
        {
            let range = self.arena.range(at, len);
            // Both endpoints use the same numbers, so that each knows the peer's STags.
            let random = 0x1000_0000 + 0x10100 * (i as u32 + 1);
            let stag = self.table.register(range, at as u64, PD, access, random);
            self.stags[i] = stag.expect("room in the table").0;
        }
        self.peer_stags = self.stags;
    }

    fn sge(&self, region: usize, (at, _): (usize, usize)) -> Sge {
        Sge {
            addr: at as u64,
            len: LEN as u32,
            lkey: self.stags[region],
        }
    }

    fn post_receive(&mut self) {
        let ready = self.qp.modify(State::Init, &mut self.host);
        ready.expect("a new queue pair can move to INIT");
        let sges = [self.sge(2, RECEIVE)];
        let wr = RecvWr {
            wr_id: RECV,
            sges: &sges,
        };
        self.qp
            .post_recv(&wr, &mut self.host)
            .expect("room for a receive");
        self.posted.push(RECV);
    }

    /// Processes an octet that arrives during start-up.
    pub(super) fn receive_startup(&mut self, octet: u8, now: Time) -> StreamChange {
        match self.reader.push(&[octet]) {
            Ok(Progress::NeedMore) => return StreamChange::None,
            Ok(Progress::Frame { .. }) => {}
            Err(error) => panic!("a valid frame was refused: {error}"),
        }
        let frame = self.reader.frame().expect("a complete frame");
        let params: LocalParams = self.mode.params(self.side);
        let agreed = match &self.initiator {
            Some(initiator) => match initiator.on_reply(&frame) {
                Ok(Outcome::Accepted(agreed)) => agreed,
                Ok(Outcome::Rejected { .. }) => {
                    assert!(self.mode.rejects(), "rejected by a responder that accepts");
                    self.phase = Phase::Failed;
                    return StreamChange::Shutdown;
                }
                Err(error) => panic!("a valid reply was refused: {error}"),
            },
            None => {
                let pending = Responder::on_request(&frame, &params).expect("a valid request");
                let mut out = [0; MAX_FRAME_LEN];
                if self.mode.rejects() {
                    let len = pending.reject(b"no", &mut out);
                    self.out.extend(&out[..len]);
                    self.frame_len = len as u64;
                    self.phase = Phase::Failed;
                    return StreamChange::None;
                }
                let accepted = pending.accept(&params, b"yes", &mut out);
                let (len, agreed) = accepted.expect("the reply fits");
                self.out.extend(&out[..len]);
                self.frame_len = len as u64;
                agreed
            }
        };
        self.start(agreed, now);
        StreamChange::None
    }

    fn start(&mut self, mut agreed: Agreed, now: Time) {
        self.agreed = Some(agreed);
        if self.plant == Some(SetupPlant::WrongCrc) && self.side == 1 {
            agreed.crc = !agreed.crc;
        }
        let has_limit = agreed.peer_to_peer && self.plant != Some(SetupPlant::ForgetFirstFpdu);
        let times = StreamTimes {
            reminders: StreamTimes::REMINDERS,
            maturity: Duration::from_millis(100),
            speak_first: (!agreed.peer_to_peer).then_some(Duration::from_millis(200)),
            first_fpdu: has_limit.then_some(REQUEST_LIMIT),
        };
        let stream = StreamConfig::agreed(&agreed, self.side == 0, 536, times);
        self.qp.start(stream, now).expect("INIT becomes RTS");
        self.phase = Phase::Up;
        self.post(SEND, SendOp::Send, (0, SOURCE));
        if self.side == 0 {
            let (remote_addr, rkey) = (EXPOSED.0 as u64, self.peer_stags[3]);
            self.post(WRITE, SendOp::Write { remote_addr, rkey }, (0, SOURCE));
            if stream.ord > 0 {
                let (remote_addr, rkey) = (SOURCE.0 as u64, self.peer_stags[0]);
                self.post(READ, SendOp::Read { remote_addr, rkey }, (1, SINK));
            }
        }
    }

    fn post(&mut self, wr_id: u64, op: SendOp, (region, range): (usize, (usize, usize))) {
        let sges = [self.sge(region, range)];
        let wr = SendWr {
            wr_id,
            op,
            flags: SendFlags::SIGNALED,
            sges: &sges,
            inline: &[],
        };
        self.qp
            .post_send(&wr, &mut self.host)
            .expect("room in the send queue");
        self.posted.push(wr_id);
    }

    /// Sends everything that the queue pair can send now.
    pub(super) fn transmit(&mut self, pool: &mut Pool) -> StreamChange {
        if self.phase != Phase::Up {
            return StreamChange::None;
        }
        let mut plan = pool.plan();
        for _ in 0..64 {
            if !self.qp.wants_tx() {
                break;
            }
            let mut env = Env {
                memory: &self.table,
                crc32c: CRC32C,
                host: &mut self.host,
            };
            let fill = self.qp.tx_fill(&mut plan, &mut env);
            if fill == TxFill::Memory {
                self.qp.tx_memory(&mut self.table, &mut self.host);
            }
            while !plan.is_done() {
                let mut octets = [0; 512];
                let accessor = self.qp.accessor();
                let n = plan
                    .copy_to(&self.table, accessor, &mut octets)
                    .expect("registered memory");
                self.out.extend(&octets[..n]);
                self.qp.tx_written(&mut plan, n, &mut self.host);
            }
        }
        plan.clear();
        pool.plans.push(plan);
        self.serve_requests()
    }

    fn serve_requests(&mut self) -> StreamChange {
        while self.qp.completions_due() {
            let _ = self.qp.complete_due(&mut self.host);
        }
        self.events |= self.qp.take_events();
        let change = match self.qp.stream_wish() {
            StreamWish::Keep => StreamChange::None,
            StreamWish::ShutdownWrite => {
                self.shut_down = true;
                self.qp.shutdown_done(&mut self.host);
                StreamChange::Shutdown
            }
            StreamWish::Leave { cut: false, .. } => {
                self.close_stream();
                StreamChange::Shutdown
            }
            StreamWish::Leave { .. } | StreamWish::Abort => {
                self.close_stream();
                StreamChange::Reset
            }
        };
        if self.phase == Phase::Up && self.shut_down && self.qp.rx_interest() == RxInterest::None {
            self.close_stream();
        }
        change
    }

    fn close_stream(&mut self) {
        self.phase = Phase::Gone;
        self.qp.stream_gone(&mut self.host);
        while self.qp.completions_due() {
            let _ = self.qp.complete_due(&mut self.host);
        }
        self.events |= self.qp.take_events();
        if self.plant == Some(SetupPlant::StrayOctet) {
            self.arena.write(1000, &[!pattern(self.side, 1000)]);
        }
    }

    /// Processes a reset of the connection by the network.
    pub(super) fn reset(&mut self) {
        match self.phase {
            Phase::Startup(_) => self.phase = Phase::Failed,
            Phase::Up => {
                self.qp.stream_failed(&mut self.host);
                self.close_stream();
            }
            Phase::Failed | Phase::Gone => {}
        }
    }

    pub(super) fn receive_fin(&mut self, pool: &mut Pool) -> StreamChange {
        match self.phase {
            Phase::Startup(_) => {
                self.phase = Phase::Failed;
                StreamChange::Shutdown
            }
            Phase::Up => {
                let mut buffer = self.partial.take().unwrap_or_else(|| pool.buffer());
                let reads = self.qp.rx_interest() == RxInterest::Read;
                self.fin_inside_fpdu |= reads && !buffer.is_empty();
                self.qp.rx_eof(&mut buffer, &mut self.host);
                buffer.clear();
                pool.buffers.push(buffer);
                self.serve_requests()
            }
            Phase::Failed | Phase::Gone => StreamChange::None,
        }
    }

    /// Processes an octet that arrives after start-up.
    pub(super) fn receive(&mut self, octet: u8, pool: &mut Pool) -> StreamChange {
        if self.phase != Phase::Up {
            return StreamChange::None;
        }
        if self.qp.rx_interest() == RxInterest::Read {
            self.unaccepted.push(octet);
            let mut buffer = self.partial.take().unwrap_or_else(|| pool.buffer());
            let mut env = Env {
                memory: &self.table,
                crc32c: CRC32C,
                host: &mut self.host,
            };
            let (n, _) = self.qp.rx_input(&self.unaccepted, &mut buffer, &mut env);
            self.unaccepted.drain(..n);
            if buffer.is_empty() {
                pool.buffers.push(buffer);
            } else {
                self.partial = Some(buffer);
            }
        }
        self.serve_requests()
    }

    /// Returns when the next timer expires.
    pub(super) fn next_timer(&self) -> Option<Time> {
        match self.phase {
            Phase::Startup(deadline) => deadline,
            Phase::Up => self.qp.poll_at(),
            Phase::Failed | Phase::Gone => None,
        }
    }

    /// Processes the timers that have expired by `now`.
    pub(super) fn on_time(&mut self, now: Time) -> StreamChange {
        match self.phase {
            Phase::Startup(Some(at)) if at <= now => {
                self.phase = Phase::Failed;
                StreamChange::Reset
            }
            Phase::Up => {
                self.qp.on_time(now, &mut self.host);
                self.serve_requests()
            }
            _ => StreamChange::None,
        }
    }

    /// Returns `true` if every request of the program has succeeded and the peer's message has
    /// arrived.
    pub(super) fn is_done(&self) -> bool {
        self.phase == Phase::Up
            && self.posted.len() == self.host.0.len()
            && self
                .host
                .0
                .iter()
                .all(|(_, cqe)| cqe.status == WcStatus::Success)
    }

    pub(super) fn close(&mut self) -> StreamChange {
        self.qp.close(&mut self.host);
        self.serve_requests()
    }

    /// Checks the final state of the endpoint: completions, queue pair and memory.
    pub(super) fn check(&mut self, peer: &Self) -> Result<(), String> {
        if self.phase == Phase::Failed {
            // The program reclaims its queue pair.
            let _ = self.qp.modify(State::Error, &mut self.host);
            while self.qp.completions_due() {
                let _ = self.qp.complete_due(&mut self.host);
            }
        }
        if self.plant == Some(SetupPlant::LoseCompletion) {
            self.host.0.pop();
        }
        let mut ids: Vec<u64> = self.host.0.iter().map(|(_, cqe)| cqe.wr_id).collect();
        ids.sort_unstable();
        let mut posted = self.posted.clone();
        posted.sort_unstable();
        if ids != posted {
            return Err(format!("posted {posted:?}, completed {ids:?}"));
        }
        if self.qp.state() != State::Error || self.qp.sends_outstanding() > 0 {
            return Err(format!(
                "ends in {:?} with {} sends outstanding",
                self.qp.state(),
                self.qp.sends_outstanding()
            ));
        }
        if let Some(fault) = self.qp.fault()
            && fault.blame != iwarp_rnic::qp::Blame::Transport
        {
            return Err(format!("reports {fault:?}, but both endpoints are correct"));
        }
        if self.fin_inside_fpdu && self.qp.fault().is_none() {
            return Err("reports no error, but the stream ended inside an FPDU".into());
        }
        self.check_memory(peer.side)
    }

    /// Compares the memory with the contents that the completions prove.
    fn check_memory(&self, peer: usize) -> Result<(), String> {
        let now = self.arena.copy(0, ARENA);
        let theirs: Vec<u8> = (0..LEN).map(|i| pattern(peer, SOURCE.0 + i)).collect();
        let mut expected: Vec<u8> = (0..ARENA).map(|i| pattern(self.side, i)).collect();
        for ((off, _), id) in [(SINK, READ), (RECEIVE, RECV), (EXPOSED, 0)] {
            let part = &now[off..off + LEN];
            let success = self
                .host
                .0
                .iter()
                .any(|(_, cqe)| cqe.wr_id == id && cqe.status == WcStatus::Success);
            // An operation without a completion was executed completely or not at all, because it
            // is a single segment.
            if success || part == theirs {
                expected[off..off + LEN].copy_from_slice(&theirs);
            }
        }
        match (0..ARENA).find(|&i| now[i] != expected[i]) {
            Some(i) => Err(format!(
                "octet {i} is {:#x}, not {:#x}",
                now[i], expected[i]
            )),
            None => Ok(()),
        }
    }
}
