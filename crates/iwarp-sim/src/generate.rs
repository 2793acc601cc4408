//! Creates a [`World`] from a seed: hosts, connections with all their options, programs and fates.

use std::collections::{BTreeSet, BinaryHeap};
use std::time::Duration;

use iwarp_rnic::cq::CompletionQueue;
use iwarp_rnic::memory::MemoryTable;
use iwarp_rnic::qp::{
    Budget, Events, QpConfig, QueuePair, ReceiverNotReady, Rtr, State, StreamConfig, StreamTimes,
};
use iwarp_rnic::receive_queue::SharedReceiveQueue;
use iwarp_rnic::{Access, Time};

use crate::driver::Call;
use crate::forgery::Forgery;
use crate::memory::ALL_RIGHTS;
use crate::net::{Flip, Pipe, PipeConfig};
use crate::plant::{Plant, Planted};
use crate::raw::{self, Arena};
use crate::reach::Reach;
use crate::rng::Rng;
use crate::script::{Side, Target};
use crate::world::{
    ARENA, Conn, Ending, Endpoint, Event, Fate, HOLD_TIME, Node, Pool, Receive, Srq, World, pattern,
};

const PD: u32 = 1;

impl World {
    /// Creates the world of a seed.
    pub fn generate(seed: u64, plant: Option<Plant>, pool: Pool, verbose: bool) -> Self {
        raw::map_all();
        let mut rng = Rng::new(seed);
        let planted = Planted::new(plant, &mut rng);
        let mut w = Self {
            now: 0,
            sequence: 0,
            queue: BinaryHeap::new(),
            rng,
            nodes: Vec::new(),
            eps: Vec::new(),
            conns: Vec::new(),
            pipes: Vec::new(),
            planted,
            pool,
            failure: None,
            verbose,
            steps: 0,
            reach: Reach::default(),
        };
        let nodes = if w.rng.chance(70) {
            2
        } else {
            w.rng.range(3, 6) as usize
        };
        for n in 0..nodes {
            w.add_node(n);
        }
        let conns = w.rng.range(1, if nodes == 2 { 3 } else { 6 });
        for _ in 0..conns {
            w.add_connection(nodes);
        }
        for n in 0..nodes {
            w.finish_node(n);
        }
        w
    }

    fn add_node(&mut self, n: usize) {
        let shared = self.rng.chance(30);
        let cqs = self.rng.range(1, 3) as usize;
        let mut node = Node {
            arena: self.pool.arenas.pop().unwrap_or_else(|| Arena::new(ARENA)),
            used: 0,
            model: Vec::new(),
            shadow: Vec::new(),
            unproven: Vec::new(),
            unpredictable: Vec::new(),
            table: MemoryTable::new(),
            cqs: Vec::new(),
            poll_due: vec![false; cqs],
            srq: shared.then(|| Srq {
                // A placeholder. `finish_node` creates the real queue, because its depth is known
                // only after all programs have been generated.
                queue: SharedReceiveQueue::new(1, 1).expect("memory"),
                receives: Vec::new(),
                posted: 0,
                open: BTreeSet::new(),
                limit_events: 0,
                limits_set: 0,
            }),
            counter: (0, 0, 0),
            counter_olds: Vec::new(),
            counter_posted: 0,
        };
        #[cfg(feature = "planted-bugs")]
        if self.planted.is(Plant::SkipBounds) {
            node.table.plant_skip_bounds();
        }
        let off = node.allocate(n, 8, true, &mut self.rng);
        self.nodes.push(node);
        let access = Access::LOCAL_WRITE | Access::REMOTE_ATOMIC;
        let r = self.register(n, PD, off, 8, access);
        self.nodes[n].counter = (r.off, r.base, r.stag);
    }

    fn pipe_config(&mut self) -> PipeConfig {
        let rng = &mut self.rng;
        PipeConfig {
            capacity: rng.pick(&[700, 4096, 16 << 10, 64 << 10, 256 << 10, 1 << 20]),
            delay: rng.pick(&[500, 5_000, 50_000, 1_000_000]),
            jitter: rng.pick(&[1, 1_000, 100_000]),
            per_octet: rng.pick(&[0, 0, 1, 8]),
            segment_max: rng.pick(&[1448, 1448, 536, 9000, 65536, 64]),
            short_reads: rng.pick(&[0, 0, 20, 60]),
        }
    }

    fn random_fate(&mut self, crc: bool) -> Fate {
        let side = self.rng.index(2);
        let at = self.rng.below(3_000_000);
        let end = match self.rng.below(8) {
            6 | 7 => Ending::Forge(side, self.rng.pick(Forgery::ALL)),
            0 => Ending::Abort(side),
            1 => Ending::Reset,
            2 => Ending::Close(2),
            _ => Ending::Close(side),
        };
        match self.rng.below(100) {
            0..=49 => Fate::Clean(end),
            50..=54 => Fate::Close(side, at),
            55..=57 => Fate::Close(2, at),
            58..=60 => Fate::Abort(side, at),
            61..=63 => Fate::ToError(side, at),
            64..=67 => Fate::Reset(at),
            68..=74 if crc => Fate::Flip(side),
            75..=77 => Fate::Stall(side, at),
            78..=90 => Fate::Illegal(side),
            91..=93 => Fate::TooLong(side),
            94..=96 => Fate::BadReceive(side),
            97..=99 => Fate::Starve(side),
            _ => Fate::Clean(end),
        }
    }

    fn add_connection(&mut self, nodes: usize) {
        let a = self.rng.index(nodes);
        let mut b = self.rng.index(nodes);
        if a == b && self.rng.chance(90) {
            b = (a + 1) % nodes;
        }
        let conn = self.conns.len();
        let crc = self.rng.chance(65);
        let fate = self.random_fate(crc);
        let emss = self
            .rng
            .pick(&[536, 1220, 1448, 1460, 1460, 8948, 16344, 65483]);
        let markers = [self.rng.chance(25), self.rng.chance(25)];
        let initiator = self.rng.index(2);
        let rtr = match self.rng.below(5) {
            0 => None,
            1 => Some(Rtr::Send),
            2 => Some(Rtr::Write),
            _ => Some(Rtr::Read),
        };
        let ord: [u16; 2] = std::array::from_fn(|_| self.rng.pick(&[0, 1, 1, 2, 3, 8, 16]));
        for side in 0..2 {
            let stream = StreamConfig {
                initiator: side == initiator,
                crc,
                markers_tx: markers[side],
                markers_rx: markers[side ^ 1],
                ird: ord[side ^ 1],
                ord: ord[side],
                rtr: rtr.filter(|_| side == initiator),
                rtr_send_expected: side != initiator && rtr == Some(Rtr::Send),
                emss,
                times: self.random_times(rtr.is_some()),
            };
            let n = [a, b][side];
            self.add_endpoint(2 * conn + side, n, stream, fate);
        }
        for side in 0..2 {
            let config = self.pipe_config();
            let rng = self.rng.fork();
            // Flip a bit of the direction that the victim reads.
            let flip = matches!(fate, Fate::Flip(victim) if victim != side).then(|| Flip {
                position: match self.rng.below(3) {
                    0 => self.rng.below(60),
                    1 => self.rng.below(2_000),
                    _ => self.rng.below(20_000),
                },
                bit: self.rng.below(8) as u8,
            });
            self.pipes.push(Pipe::new(config, rng, flip));
        }
        self.conns.push(Conn {
            fate,
            illegal_op: None,
            fate_happened: false,
        });
        self.generate_programs(conn, initiator, rtr.is_none());
    }

    /// Chooses random timers. Each is off, expires during the run, or expires after it.
    fn random_times(&mut self, rtr: bool) -> StreamTimes {
        let rng = &mut self.rng;
        let time = |rng: &mut Rng| match rng.below(3) {
            0 => None,
            1 => Some(Duration::from_nanos(rng.below(200_000))),
            _ => Some(Duration::from_nanos(rng.below(50_000_000))),
        };
        StreamTimes {
            reminders: [time(rng), time(rng), time(rng)],
            maturity: time(rng).unwrap_or_default(),
            // The RTR message is the initiator's first FPDU, so the responder never has to send
            // without one.
            speak_first: time(rng).filter(|_| !rtr),
            // The RTR message arrives soon, unless the connection is stalled.
            first_fpdu: rtr.then_some(HOLD_TIME),
        }
    }

    fn random_config(&mut self, e: usize, n: usize, stream: &StreamConfig, fate: Fate) -> QpConfig {
        let special = match fate {
            Fate::TooLong(s) | Fate::BadReceive(s) | Fate::Starve(s) => s == e % 2,
            _ => false,
        };
        let shared = self.nodes[n].srq.is_some() && !special && self.rng.chance(60);
        let rng = &mut self.rng;
        let policy = if rng.chance(25) && !shared {
            ReceiverNotReady::Terminate
        } else {
            ReceiverNotReady::Hold {
                limit: HOLD_TIME,
                after_close: HOLD_TIME / 4,
            }
        };
        let max_send_wr = rng.range(1, 24) as u32;
        // Derived from `max_send_wr` instead of another random number, so that the runs of existing
        // seeds do not change.
        let completions = [1, 2, 5, 256][max_send_wr as usize % 4];
        let fpdus = [1, 256, 3, 20][max_send_wr as usize / 4 % 4];
        QpConfig {
            qp_num: e as u32 + 1,
            pd: PD,
            max_send_wr,
            max_recv_wr: rng.range(1, 24) as u32,
            max_send_sge: rng.range(1, 6) as u32,
            max_recv_sge: rng.range(1, 6) as u32,
            max_inline: rng.pick(&[0, 16, 64, 256]),
            max_ird: stream.ird + rng.pick(&[0, 0, 3]),
            max_ord: stream.ord + rng.pick(&[0, 0, 3]),
            signal_all: rng.chance(15),
            shared_receive: shared,
            match_tags: false,
            receiver_not_ready: policy,
            snapshot: rng.chance(30),
            hold_slots: false,
            budget: Budget {
                completions,
                local_requests: completions,
                fpdus,
            },
        }
    }

    fn add_endpoint(&mut self, e: usize, n: usize, stream: StreamConfig, fate: Fate) {
        let config = self.random_config(e, n, &stream, fate);
        let cqs = self.nodes[n].poll_due.len();
        let rng = &mut self.rng;
        let ep = Endpoint {
            id: e,
            node: n,
            qp: QueuePair::new(config).expect("sizes within limits"),
            stream,
            send_cq: rng.index(cqs),
            recv_cq: rng.index(cqs),
            rng: rng.fork(),
            plan: None,
            buffer: None,
            unaccepted: Vec::new(),
            tx_due: false,
            tx_blocked: false,
            stalled: false,
            fin_sent: false,
            completing: false,
            gone: false,
            timer: None,
            events: Events::empty(),
            ops: Vec::new(),
            posted: 0,
            app_due: false,
            queue_full: false,
            stopped: false,
            extra_posts: rng.index(4),
            sqd: false,
            wait_next: false,
            inbound: Vec::new(),
            receives: Vec::new(),
            recv_posted: 0,
            recv_due: false,
            next_cqe: 0,
            first_error: None,
            first_unsuccessful: None,
            first_recv_error: None,
            received: 0,
            recv_cqes: 0,
            committed: 0,
            posted_at_close: None,
        };
        self.eps.push(ep);
    }

    fn new_side(&mut self, e: usize, max_message: usize) -> Side {
        let n = self.eps[e].node;
        let mut src = Vec::new();
        for _ in 0..self.rng.range(1, 2) {
            let len = max_message + self.rng.range(64, 2000) as usize;
            // The region can only be read locally.
            src.push(self.region(n, PD, len, Access::empty()));
        }
        let len = max_message.max(64) + self.rng.index(max_message + 1000);
        let exposed = self.region(n, PD, len, ALL_RIGHTS);
        let words = 8 * self.rng.range(1, 6) as usize;
        let rights = Access::LOCAL_WRITE | Access::REMOTE_ATOMIC | Access::REMOTE_READ;
        let words = self.region(n, PD, words, rights);
        Side {
            e,
            n,
            pd: PD,
            src,
            exposed,
            words,
            sinks: Vec::new(),
            reading: Vec::new(),
            written: Vec::new(),
            max_message,
        }
    }

    fn generate_programs(&mut self, conn: usize, initiator: usize, initiator_first: bool) {
        let emss = self.eps[2 * conn].stream.emss as usize;
        let (max_message, steps) = match self.rng.below(100) {
            0..=49 => (300, self.rng.range(1, 30)),
            50..=84 => ((4 * emss).min(20_000), self.rng.range(1, 20)),
            85..=96 => ((4 * emss).min(90_000), self.rng.range(1, 10)),
            _ => (300_000, self.rng.range(1, 5)),
        };
        let a = self.new_side(2 * conn, max_message);
        let b = self.new_side(2 * conn + 1, max_message);
        let mut sides = [a, b];
        let fate = self.conns[conn].fate;
        let illegal_step = match fate {
            Fate::Illegal(s) => Some((s, self.rng.below(steps))),
            _ => None,
        };
        if initiator_first {
            let [a, b] = &mut sides;
            let (us, them) = if initiator == 0 { (a, b) } else { (b, a) };
            us.write(self, them, Target::Exposed, false);
        }
        for step in 0..steps {
            let s = self.rng.index(2);
            let [a, b] = &mut sides;
            let (us, them) = if s == 0 { (a, b) } else { (b, a) };
            self.add_step(us, them);
            if let Some((s, at)) = illegal_step
                && at == step
            {
                let [a, b] = &mut sides;
                let (us, them) = if s == 0 { (a, b) } else { (b, a) };
                let reads = self.eps[us.e].stream.ord > 0;
                let index = us.illegal_request(self, them, reads);
                self.conns[conn].illegal_op = Some(index);
            }
        }
        // If the fate concerns a receive, add a Send that uses this receive.
        if let Fate::TooLong(s) | Fate::BadReceive(s) | Fate::Starve(s) = fate {
            let [a, b] = &mut sides;
            let (us, _) = if s == 0 { (b, a) } else { (a, b) };
            us.send_with_len(self, max_message.min(100), None);
        }
    }

    fn add_step(&mut self, us: &mut Side, them: &mut Side) {
        let reads = self.eps[us.e].stream.ord > 0;
        let their_reads = self.eps[them.e].stream.ord > 0;
        match self.rng.below(100) {
            0..=37 => drop(us.send(self, None)),
            38..=57 => drop(us.write(self, them, Target::Exposed, false)),
            58..=65 => drop(us.write(self, them, Target::Exposed, true)),
            66..=80 if reads => drop(us.read(self, them, Target::Exposed)),
            81..=85 if reads => drop(us.atomic(self, them, Target::Exposed)),
            86..=88 if reads => drop(us.atomic_write(self, them)),
            89..=92 if reads => us.increment_counter(self, them),
            93..=96 => drop(us.grant_and_revoke(self, them, their_reads)),
            97..=99 => us.register_send_invalidate(self),
            _ => drop(us.send(self, None)),
        }
    }

    /// Creates the receives, the completion queues and the first events of a node, once all
    /// programs have been generated.
    fn finish_node(&mut self, n: usize) {
        let ours: Vec<usize> = (0..self.eps.len())
            .filter(|&e| self.eps[e].node == n)
            .collect();
        let (mut total, mut shared_count, mut shared_max_len) = (16, 0, 0);
        for &e in &ours {
            let ep = &self.eps[e];
            total += ep.ops.len() + 8;
            let longest = ep.inbound.iter().map(|m| m.data.len()).max().unwrap_or(0);
            if ep.qp.config().shared_receive {
                shared_count += ep.inbound.len();
                shared_max_len = shared_max_len.max(longest);
            } else {
                self.own_receives(e);
                total += self.eps[e].receives.len();
            }
        }
        if self.nodes[n].srq.is_some() {
            let extra = self.rng.index(4) + 1;
            let max_sge = self.rng.range(1, 6) as u32;
            let mut receives = Vec::new();
            for _ in 0..shared_count + extra {
                let (sges, parts) = self.scatter(n, PD, shared_max_len, max_sge, false);
                receives.push(Receive { sges, parts });
            }
            let depth = receives.len() as u32;
            total += receives.len();
            if let Some(srq) = &mut self.nodes[n].srq {
                srq.queue = SharedReceiveQueue::new(depth, max_sge).expect("memory");
                srq.receives = receives;
            }
            self.at(0, Event::PostShared(n));
        }
        let node = &mut self.nodes[n];
        for _ in 0..node.poll_due.len() {
            let mut cq = CompletionQueue::new(total as u32).expect("memory");
            cq.arm(false);
            node.cqs.push(cq);
        }
        // The number of used octets is known only now.
        let initial: Vec<u8> = (0..node.used).map(|off| pattern(n, off)).collect();
        node.arena.write(0, &initial);
        node.shadow = initial;
        for e in ours {
            self.start(e);
        }
    }

    fn own_receives(&mut self, e: usize) {
        let fate = self.conns[e / 2].fate;
        let side = e % 2;
        let ep = &self.eps[e];
        let n = ep.node;
        let max_sge = ep.qp.config().max_recv_sge;
        let lens: Vec<usize> = ep.inbound.iter().map(|m| m.data.len()).collect();
        let mut receives = Vec::new();
        for &len in &lens {
            let slack = if self.rng.chance(50) {
                self.rng.index(40)
            } else {
                0
            };
            let (sges, parts) = self.scatter(n, PD, len + slack, max_sge, false);
            receives.push(Receive { sges, parts });
        }
        let last = lens.len().saturating_sub(1);
        match fate {
            Fate::TooLong(s) if s == side => {
                let (sges, parts) = self.scatter(n, PD, lens[last] - 1, max_sge, false);
                receives[last] = Receive { sges, parts };
            }
            Fate::BadReceive(s) if s == side && self.rng.chance(50) => {
                for &(off, len) in &receives[last].parts {
                    self.nodes[n].arena.unmap(off, len);
                }
            }
            Fate::BadReceive(s) if s == side => {
                // Make the key invalid, even for another region with the same index.
                for sge in &mut receives[last].sges {
                    sge.lkey ^= 0x80;
                }
            }
            Fate::Starve(s) if s == side => receives.truncate(last),
            _ => {
                for _ in 0..self.rng.index(4) {
                    let (sges, parts) = self.scatter(n, PD, 10, max_sge, false);
                    receives.push(Receive { sges, parts });
                }
            }
        }
        self.eps[e].receives = receives;
    }

    /// Attaches the stream. Some programs also modify the state of the queue pair themselves,
    /// before or after that.
    fn attach(&mut self, e: usize, stream: StreamConfig, now: Time) {
        let variant = self.rng.below(10);
        if variant < 3 {
            self.call(e, |c| c.ep.qp.await_stream().expect("INIT awaits a stream"));
        }
        let rts = |c: &mut Call<'_>| c.ep.qp.modify(State::Rts, &mut c.host).expect("RTR, RTS");
        if variant == 0 {
            self.call(e, rts);
        }
        self.call(e, |c| c.ep.qp.start(stream, now).expect("INIT becomes RTS"));
        if matches!(variant, 1 | 2) {
            self.call(e, rts);
        }
    }

    fn start(&mut self, e: usize) {
        let stream = self.eps[e].stream;
        let holds_sends = self.eps[e].qp.config().receiver_not_ready != ReceiverNotReady::Terminate;
        if !holds_sends {
            // If Sends are not held, every receive must be posted before the first octet arrives.
            let depth = self.eps[e].receives.len() as u32;
            let config = QpConfig {
                max_recv_wr: depth.max(1),
                ..*self.eps[e].qp.config()
            };
            self.eps[e].qp = QueuePair::new(config).expect("sizes within limits");
        }
        let now = Time::from_nanos(self.now);
        let initialized = self.call(e, |c| {
            // Programs move the queue pair to INIT, post receives, and then connect.
            let init = c.ep.qp.modify(State::Init, &mut c.host);
            init.is_ok()
        });
        assert!(initialized, "a new queue pair cannot move to INIT");
        if !holds_sends {
            let all = self.eps[e].receives.len() as u64;
            self.post_receives(e, all);
        } else if self.rng.chance(50) {
            let some = self.rng.range(1, 8);
            self.post_receives(e, some);
        }
        self.attach(e, stream, now);
        self.schedule_app(e);
        self.schedule_receives(e);
        let conn = e / 2;
        if e.is_multiple_of(2) {
            match self.conns[conn].fate {
                Fate::Close(_, at)
                | Fate::Abort(_, at)
                | Fate::ToError(_, at)
                | Fate::Reset(at)
                | Fate::Stall(_, at) => self.at(at, Event::Fate(conn)),
                _ => {}
            }
        }
        if self.rng.chance(12) {
            let at = self.rng.below(500_000);
            self.at(at, Event::Pause(e));
        }
        if self.rng.chance(15) && !self.eps[e].stalled {
            // The endpoint does not read until `Unstall`.
            self.eps[e].stalled = true;
            let at = self.rng.below(2_000_000);
            self.at(at, Event::Unstall(e));
        }
    }
}
