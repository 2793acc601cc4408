//! A whole queue pair that receives arbitrary bytes from its peer. RFC 5040, 5041, 5044, 7306.
//!
//! No input may cause a panic or change memory that was not granted.

use iwarp_proto::crc32c::{self, Crc32cFn};
use iwarp_proto::mpa::framing::{FpduOptions, MarkerClock, encode_fpdu};
use iwarp_rnic::memory::{Crc32c, HostRange, MemoryTable, Stag, WindowType};
use iwarp_rnic::qp::{
    Budget, Direction, Env, Host, QpConfig, QueuePair, ReceiverNotReady, Rtr, Run, RxInterest,
    RxPlan, RxStatus, State, StreamConfig, StreamTimes, StreamWish, TxFill,
};
use iwarp_rnic::receive_queue::{SharedReceiveQueue, TakenRecv};
use iwarp_rnic::tags::TaggedBuffer;
use iwarp_rnic::{Access, Bind, Cqe, RecvWr, SendFlags, SendOp, SendWr, Sge, Time};
use std::time::Duration;

use super::pool::{self, PooledBuffers};
use super::print;

// Bits of the option byte, the first byte of the input.
const RESPONDER: u8 = 1;
const CRC: u8 = 2;
const MARKERS: u8 = 4;
/// Received bytes are placed directly by a receive plan, not copied from a buffer.
const DIRECT: u8 = 8;
/// A Send that finds no receive ends the stream. Without this bit, the Send is held.
const TERMINATE: u8 = 16;
const RTR: u8 = 32;
/// The input is a list of ULPDUs, each preceded by a length of two bytes. The target frames them as
/// valid FPDUs.
const FRAMED: u8 = 64;
/// Receives come from a shared receive queue.
const SHARED: u8 = 128;

const ARENA: usize = 64 << 10;
const PD: u32 = 1;
/// Memory that may change, as offset and length: the region that the peer may write, the sinks of
/// local requests, and a memory window.
const GRANTED: [(usize, usize); 3] = [(4096, 4096), (20480, 16384), (61440, 64)];

/// All timers are enabled. Time advances only by actions in the input.
const TIMES: StreamTimes = StreamTimes {
    reminders: [
        Some(Duration::from_millis(50)),
        Some(Duration::from_secs(1)),
        None,
    ],
    maturity: Duration::from_millis(50),
    speak_first: Some(Duration::from_millis(200)),
    first_fpdu: Some(Duration::from_secs(5)),
};

struct FuzzHost {
    sends: Vec<u64>,
    completions: usize,
    /// Whether the last call of `take_shared_receive` returned a receive.
    shared: bool,
    /// The shared receive queue, if it matches tags.
    queue: Option<SharedReceiveQueue>,
}

impl Host for FuzzHost {
    type Memory = HostRange;

    fn complete(&mut self, direction: Direction, cqe: Cqe) {
        self.completions += 1;
        if direction == Direction::Send {
            assert!(
                self.sends.last().is_none_or(|last| *last < cqe.wr_id),
                "completions out of order"
            );
            self.sends.push(cqe.wr_id);
        }
    }

    fn take_shared_receive(&mut self, taken: &mut TakenRecv) -> bool {
        if let Some(queue) = &mut self.queue {
            return queue.take(taken).0;
        }
        // Every second call returns a receive (without elements), so that some Sends are held and
        // others proceed.
        self.shared = !self.shared;
        self.shared
    }

    fn with_shared_receive<R>(
        &mut self,
        f: impl FnOnce(&mut SharedReceiveQueue) -> R,
    ) -> Option<R> {
        self.queue.as_mut().map(f)
    }
}

struct Engine {
    qp: QueuePair,
    host: FuzzHost,
    table: MemoryTable,
    crc32c: Crc32cFn,
    memory: Vec<u64>,
    buffers: PooledBuffers,
    /// Received bytes that the queue pair has not consumed.
    unconsumed: Vec<u8>,
    rx: RxPlan,
    direct: bool,
    last_wr_id: u64,
    now: Time,
    sink: Sge,
    /// Handles of tagged buffers.
    handles: Vec<u32>,
}

/// The input: a byte of options, a byte that selects the size of the pieces in which the stream
/// arrives, eight bytes that select the program's actions after each piece, and the peer's stream.
pub fn engine(data: &[u8]) {
    run(data, false);
}

/// Like [`engine`], but with a shared receive queue that matches tags.
pub fn matching(data: &[u8]) {
    run(data, true);
}

fn run(data: &[u8], matches: bool) {
    let Some((&[options, piece, ref actions @ ..], stream)) = data.split_first_chunk::<10>() else {
        return;
    };
    let mut engine = Engine::new(options, matches);
    let framed;
    let stream = if options & FRAMED != 0 {
        framed = frame(stream, options);
        &framed
    } else {
        stream
    };
    let pieces = stream.chunks(usize::from(piece).max(1) * 4);
    for (octets, perform) in pieces.zip(actions.iter().cycle()) {
        engine.receive(octets);
        engine.perform(*perform);
        engine.transmit(usize::from(*perform));
    }
    engine.finish();
}

/// Frames the ULPDUs of the input as FPDUs.
fn frame(mut stream: &[u8], options: u8) -> Vec<u8> {
    let fpdu = FpduOptions {
        markers: options & MARKERS != 0,
        crc: (options & CRC != 0).then_some(crc32c::append as Crc32cFn),
    };
    let mut clock = MarkerClock::new();
    let mut all = Vec::new();
    while let Some((len, rest)) = stream.split_first_chunk::<2>() {
        let len = usize::from(u16::from_be_bytes(*len)).min(rest.len());
        let (ulpdu, following) = rest.split_at(len);
        stream = following;
        let start = all.len();
        all.resize(start + len + 16 + len / 100, 0);
        match encode_fpdu(ulpdu, &fpdu, &mut clock, &mut all[start..]) {
            Ok(n) => all.truncate(start + n),
            Err(_) => all.truncate(start),
        }
    }
    all
}

/// Returns the configuration of the queue pair.
fn configuration(options: u8, matches: bool) -> QpConfig {
    let is = |bit| options & bit != 0;
    QpConfig {
        max_send_wr: 8,
        max_recv_wr: 4,
        max_ird: 3,
        max_ord: 3,
        shared_receive: is(SHARED) || matches,
        match_tags: matches,
        // The two bits together select a third policy.
        receiver_not_ready: match (is(TERMINATE), is(SHARED) && !matches) {
            (true, true) => ReceiverNotReady::Drop,
            (true, false) => ReceiverNotReady::Terminate,
            (false, _) => ReceiverNotReady::default(),
        },
        budget: Budget {
            completions: 2,
            local_requests: 1,
            fpdus: 3,
        },
        ..QpConfig::default()
    }
}

/// Returns the parameters of the stream.
fn stream(options: u8) -> StreamConfig {
    let is = |bit| options & bit != 0;
    StreamConfig {
        initiator: !is(RESPONDER),
        crc: is(CRC),
        markers_tx: is(MARKERS),
        markers_rx: is(MARKERS),
        ird: 2,
        ord: 3,
        rtr: (is(RTR) && !is(RESPONDER)).then_some(Rtr::Read),
        rtr_send_expected: is(RTR) && is(RESPONDER),
        emss: 1460,
        times: TIMES,
    }
}

impl Engine {
    fn new(options: u8, matches: bool) -> Self {
        let is = |bit| options & bit != 0;
        let memory = vec![0x5a5a_5a5a_5a5a_5a5a; ARENA / 8];
        // If the input contains whole FPDUs, use a CRC function that always returns 0, so that the
        // fuzzer finds valid CRCs. FPDUs that this target frames have real CRCs.
        let zero_crc: Crc32cFn = |_, _| 0;
        let mut engine = Self {
            qp: QueuePair::new(configuration(options, matches)).expect("sizes within limits"),
            host: FuzzHost {
                sends: Vec::new(),
                completions: 0,
                shared: false,
                queue: matches.then(|| {
                    let mut queue = SharedReceiveQueue::new(8, 2).expect("memory");
                    queue.match_tags(6).expect("memory");
                    queue
                }),
            },
            table: MemoryTable::new(),
            crc32c: if is(FRAMED) { crc32c::append } else { zero_crc },
            memory,
            buffers: pool::acquire(),
            unconsumed: Vec::new(),
            rx: RxPlan::new(6),
            direct: is(DIRECT),
            last_wr_id: 1,
            now: Time::ZERO,
            sink: Sge::default(),
            handles: Vec::new(),
        };
        engine.register();
        engine
            .qp
            .start(stream(options), engine.now)
            .expect("a fresh queue pair");
        for _ in 0..2 {
            engine.perform(0);
        }
        engine.perform(1);
        engine.perform(2);
        engine
    }

    fn range(&mut self, (off, len): (usize, usize)) -> HostRange {
        assert!(off + len <= ARENA);
        let addr = self.memory.as_mut_ptr() as u64 + off as u64;
        // SAFETY: the range is inside `memory`, which outlives the table and is not accessed
        // through references during calls of the RNIC.
        unsafe { HostRange::new(addr, len as u64) }.expect("an allocation does not wrap")
    }

    /// Registers memory. The STags are the same in every run, so that seeds can contain them.
    fn register(&mut self) {
        let [writable, local, window] = GRANTED;
        let all = Access::LOCAL_WRITE
            | Access::REMOTE_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_ATOMIC;
        let range = self.range(writable);
        let stag = self.table.register(range, 0x1000, PD, all, 0x1000_0101);
        assert_eq!(stag, Ok(Stag(0x1000_0101)));
        let range = self.range((12288, 4096));
        let stag = self
            .table
            .register(range, 0x2000, PD, Access::REMOTE_READ, 0x1000_0202);
        assert_eq!(stag, Ok(Stag(0x1000_0202)));
        let range = self.range(local);
        let lkey = self
            .table
            .register(range, 0, PD, Access::LOCAL_WRITE, 0x1000_0303);
        self.sink = Sge {
            addr: 0,
            len: 9000,
            lkey: lkey.expect("room").0,
        };
        // A memory window of type 2 on a part of a region.
        let range = self.range((window.0 - 64, 192));
        let rights = Access::LOCAL_WRITE | Access::MW_BIND;
        let region = self.table.register(range, 0x4000, PD, rights, 0x1000_0404);
        let mw = self
            .table
            .allocate_window(WindowType::Type2, PD, 0x1000_0505);
        let (region, mw) = (region.expect("room"), mw.expect("room"));
        let bind = Bind {
            mw_stag: mw,
            new_stag: mw,
            mr_stag: region,
            addr: 0x4040,
            len: 64,
            access: Access::REMOTE_WRITE | Access::REMOTE_READ,
        };
        let bound = self.table.bind(&bind, self.qp.accessor());
        assert_eq!(bound, Ok(()));
    }

    /// Performs an action of the program. The queue pair may refuse it.
    fn perform(&mut self, what: u8) {
        self.last_wr_id += 1;
        let wr_id = self.last_wr_id;
        let sges = [self.sink];
        let host = &mut self.host;
        let mut post = |op, sges: &[Sge]| {
            let wr = SendWr {
                wr_id,
                op,
                flags: SendFlags::SIGNALED,
                sges,
                inline: &[],
            };
            let _ = self.qp.post_send(&wr, host);
        };
        let (remote_addr, rkey) = (0, 7);
        match what % 32 {
            0 | 3 | 4 => {
                let wr = RecvWr { wr_id, sges: &sges };
                if self.qp.post_recv(&wr, &mut self.host).is_ok()
                    && self.qp.rx_interest() == RxInterest::Held
                {
                    self.process_held();
                }
            }
            1 => post(SendOp::Read { remote_addr, rkey }, &sges),
            2 => post(
                SendOp::FetchAdd {
                    remote_addr,
                    rkey,
                    add: 1,
                    mask: 0,
                },
                &[Sge {
                    len: 8,
                    ..self.sink
                }],
            ),
            5 => post(SendOp::SendImm(1), &sges),
            6 => post(
                SendOp::LocalInvalidate {
                    stag: Stag(0x1000_0505),
                },
                &[],
            ),
            7 => post(SendOp::Read { remote_addr, rkey }, &[]),
            16 => post(SendOp::ReadInv { remote_addr, rkey }, &sges),
            8 => self.qp.close(&mut self.host),
            9 => self.time_passes(),
            10 => drop(self.qp.modify(State::Sqd, &mut self.host)),
            11 => drop(self.qp.modify(State::Rts, &mut self.host)),
            12 => self.qp.set_emss(536),
            13 => drop(self.table.deregister(Stag(0x1000_0202))),
            15 => self.qp.sender_closed(),
            17..=23 => self.tags(what >> 5, what % 32 - 17),
            14 => self.qp.rx_eof(self.buffers.both().0, &mut self.host),
            _ => {}
        }
    }

    /// Performs an action on the tag-matching queue, and then processes held bytes.
    fn tags(&mut self, number: u8, what: u8) {
        let wr_id = self.last_wr_id;
        let sge = self.sink;
        let sges = [
            Sge { len: 100, ..sge },
            Sge {
                addr: sge.addr + 300,
                len: 64 * u32::from(number),
                ..sge
            },
        ];
        let Some(queue) = &mut self.host.queue else {
            return;
        };
        if what < 2 {
            let _ = queue.post(&RecvWr { wr_id, sges: &sges });
        } else if let Some(list) = queue.tags() {
            let buffer = TaggedBuffer {
                wr_id,
                tag: u64::from(number),
                mask: if what == 2 { 1 } else { u64::MAX },
                sges: &sges,
            };
            match what {
                2..=4 => self.handles.extend(list.add(&buffer)),
                5 => drop(self.handles.pop().map(|handle| list.remove(handle))),
                _ => list.synchronize(u32::from(number)),
            }
        }
        if self.qp.rx_interest() == RxInterest::Held {
            self.process_held();
        }
    }

    /// Advances the time until a timer expires.
    fn time_passes(&mut self) {
        if let Some(at) = self.qp.poll_at() {
            self.now = self.now.max(at);
            self.qp.on_time(self.now, &mut self.host);
            assert!(
                self.qp
                    .poll_at()
                    .is_none_or(|last_wr_id| last_wr_id > self.now)
            );
        }
    }

    /// Processes held bytes after a receive was posted.
    fn process_held(&mut self) {
        while !self.direct && self.process_unconsumed() == RxStatus::More {}
        while self.direct && self.process_filled(0) == RxStatus::More {}
    }

    /// Processes `n` bytes that were placed according to the plan.
    fn process_filled(&mut self, n: usize) -> RxStatus {
        let mut env = Env {
            memory: &self.table,
            crc32c: Crc32c::new(self.crc32c),
            host: &mut self.host,
        };
        self.qp
            .rx_filled(self.buffers.both().0, &mut self.rx, n, &mut env)
    }

    /// Passes the unconsumed bytes to the queue pair.
    fn process_unconsumed(&mut self) -> RxStatus {
        let mut env = Env {
            memory: &self.table,
            crc32c: Crc32c::new(self.crc32c),
            host: &mut self.host,
        };
        let (n, status) = self
            .qp
            .rx_input(&self.unconsumed, self.buffers.both().0, &mut env);
        self.unconsumed.drain(..n);
        let all = matches!(status, RxStatus::Ok | RxStatus::Failed);
        assert!(
            !all || self.unconsumed.is_empty(),
            "{status:?}, but not all octets were consumed"
        );
        status
    }

    fn receive(&mut self, mut octets: &[u8]) {
        if !self.direct && self.qp.rx_interest() == RxInterest::Read {
            self.unconsumed.extend_from_slice(octets);
            self.process_held();
            return;
        }
        while !octets.is_empty() && self.qp.rx_interest() == RxInterest::Read {
            let mut runs = Vec::new();
            let visit = |run| runs.push(run);
            self.qp
                .rx_plan(self.buffers.both().0, &self.table, &mut self.rx, visit);
            let n = self.rx.room().min(octets.len());
            read_into(&runs, &octets[..n]);
            assert!(n > 0, "the receive plan has no room");
            octets = &octets[n..];
            if self.process_filled(n) == RxStatus::More {
                self.process_held();
            }
        }
    }

    /// Takes bytes that the queue pair sends, and then shuts down or closes the stream if the queue
    /// pair requests it.
    fn transmit(&mut self, most: usize) {
        let mut out = vec![0; 1 + most * 64];
        let (_, tx) = self.buffers.both();
        for _ in 0..64 {
            if tx.is_done() {
                if !self.qp.wants_tx() {
                    break;
                }
                let mut env = Env {
                    memory: &self.table,
                    crc32c: Crc32c::new(self.crc32c),
                    host: &mut self.host,
                };
                match self.qp.tx_fill(tx, &mut env) {
                    TxFill::Idle => {
                        assert!(
                            !self.qp.wants_tx(),
                            "wants_tx() is set, but there is nothing to send"
                        );
                        break;
                    }
                    TxFill::Memory => {
                        self.qp.tx_memory(&mut self.table, &mut self.host);
                        continue;
                    }
                    TxFill::More => continue,
                    TxFill::Ready => {}
                }
            }
            let who = self.qp.accessor();
            match tx.copy_to(&self.table, who, &mut out) {
                Ok(n) => self.qp.tx_written(tx, n, &mut self.host),
                Err(_) => {
                    self.qp.abort(&mut self.host);
                    tx.clear();
                    break;
                }
            }
        }
        match self.qp.stream_wish() {
            StreamWish::Keep => {}
            StreamWish::ShutdownWrite => self.qp.shutdown_done(&mut self.host),
            StreamWish::Leave { .. } | StreamWish::Abort => self.qp.stream_gone(&mut self.host),
        }
    }

    /// Ends the stream, and checks the queue pair and all memory.
    fn finish(mut self) {
        self.transmit(255);
        self.qp.stream_failed(&mut self.host);
        while self.qp.completions_due() {
            let _ = self.qp.complete_due(&mut self.host);
        }
        print(&self.qp.fault());
        if let Some(fault) = self.qp.fault() {
            let _ = fault.to_string();
        }
        assert_eq!(self.qp.state(), State::Error);
        assert_eq!(
            (self.qp.sends_outstanding(), self.qp.receives_posted()),
            (0, 0)
        );
        let counters = self.qp.counters();
        assert_eq!(counters.completions as usize, self.host.completions);
        assert!(counters.terminates_sent <= 1);
        // Drop the table first, so that no registered range overlaps the references to `memory`
        // below.
        drop(self.table);
        for (i, word) in self.memory.iter().enumerate() {
            let granted = GRANTED
                .iter()
                .any(|(off, len)| (*off..off + len).contains(&(i * 8)));
            assert!(
                granted || *word == 0x5a5a_5a5a_5a5a_5a5a,
                "octet {:#x} changed",
                i * 8
            );
        }
    }
}

/// Copies bytes into the runs of a receive plan, as the kernel does in `recvmsg`.
fn read_into(runs: &[Run<'_>], mut octets: &[u8]) {
    for fragment in runs.iter().map(|run| run.fragment) {
        let n = fragment.len().min(octets.len());
        // SAFETY: the caller has just created the plan, so each run is writable over its whole
        // length.
        unsafe { std::ptr::copy_nonoverlapping(octets.as_ptr(), fragment.as_ptr(), n) };
        octets = &octets[n..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that a Write like those in the seeds is accepted. If it were refused, the seeds would
    /// cover little.
    #[test]
    fn framed_writes_change_memory() {
        for options in [
            FRAMED,
            FRAMED | CRC,
            FRAMED | MARKERS | CRC,
            FRAMED | RESPONDER,
        ] {
            let mut engine = Engine::new(options, false);
            let mut ulpdu = vec![0xc1, 0x40, 0x10, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0x10, 0];
            ulpdu.extend_from_slice(b"octets");
            let mut input = (ulpdu.len() as u16).to_be_bytes().to_vec();
            input.extend_from_slice(&ulpdu);
            let stream = frame(&input, options);
            engine.receive(&stream);
            assert_eq!(engine.qp.fault(), None, "{options:#x}");
            assert_eq!(engine.memory[4096 / 8].to_ne_bytes()[..6], *b"octets");
            engine.finish();
        }
    }
}
