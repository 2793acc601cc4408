//! Replays recorded connections of the Linux kernel's siw, with our engine in place of one end (our
//! *place*). The octets of the other end are taken from the recording. The octets that our engine
//! sends are compared with those that siw has sent in our place.
//!
//! For each message that siw has sent in our place, the test posts a work request. STags and
//! addresses in the other end's requests are replaced by those of our memory; everything else is as
//! recorded. Our octets may differ from siw's in two ways: in the STags, and in the layout of
//! Terminate messages (`docs/interop.md`).

use crate::common::wire::{Hello, Wire, initiator};
use crate::common::{End, Mem, Server, V4, Watchdog, config};
use iwarp::runtime::cm::{CmEventKind, ConnectionParameters};
use iwarp::runtime::{SendOp, SendWr, State, WcStatus};
use iwarp::{Config, ReceiverNotReady};
use iwarp_proto::ddp::{Header, Stag};
use iwarp_proto::mpa::framing::fpdu_len;
use iwarp_proto::mpa::startup::{Flags, Frame, FrameKind, FrameReader, Progress};
use iwarp_proto::rdmap::terminate::Layout;
use iwarp_proto::rdmap::{Opcode, ReadRequest, Terminate, TerminateCode};
use std::collections::VecDeque;
use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

/// The octets of a connection in the order in which they were sent; `true` if the initiator has
/// sent the piece.
type Recording = Vec<(bool, Vec<u8>)>;

/// Reads the first connection with data of a recording. TCP sequence numbers are ignored, because
/// loopback does not lose or reorder segments.
fn recording(name: &str) -> Recording {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../iwarp-proto/tests/data/siw")
        .join(name)
        .with_extension("pcap");
    let file = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut out: Recording = Vec::new();
    let mut client: Option<u16> = None;
    let mut rest = &file[24..];
    while rest.len() >= 16 {
        let len = u32::from_le_bytes(rest[8..12].try_into().unwrap()) as usize;
        let packet = &rest[16..16 + len];
        rest = &rest[16 + len..];
        let ip = &packet[14..];
        let ip = &ip[..usize::from(u16::from_be_bytes([ip[2], ip[3]]))];
        let tcp = &ip[usize::from(ip[0] & 0xf) * 4..];
        let (from, to) = (
            u16::from_be_bytes([tcp[0], tcp[1]]),
            u16::from_be_bytes([tcp[2], tcp[3]]),
        );
        let data = &tcp[usize::from(tcp[12] >> 4) * 4..];
        if data.is_empty() {
            continue;
        }
        let client = *client.get_or_insert(from);
        if from == client || to == client {
            out.push((from == client, data.to_vec()));
        }
    }
    assert!(out.len() > 2, "{name} contains no connection");
    out
}

/// A decoded recording: the start-up frames, and the FPDUs in order.
struct Script {
    request: Vec<u8>,
    reply: Vec<u8>,
    /// For each FPDU: `true` if the initiator has sent it, its header, and its payload.
    segments: Vec<(bool, Header, Vec<u8>)>,
}

impl Script {
    fn new(name: &str) -> Self {
        let mut frames: [Option<Vec<u8>>; 2] = [None, None];
        let mut pending: [Vec<u8>; 2] = Default::default();
        let mut segments = Vec::new();
        for (initiator, octets) in recording(name) {
            let side = usize::from(!initiator);
            let pending = &mut pending[side];
            pending.extend(octets);
            if frames[side].is_none() {
                let kind = if initiator {
                    FrameKind::Request
                } else {
                    FrameKind::Reply
                };
                let mut reader = FrameReader::new(kind);
                if let Progress::Frame { consumed } = reader.push(pending).unwrap() {
                    frames[side] = Some(pending.drain(..consumed).collect());
                }
            }
            // FPDUs are ordered by the times at which their last octets were sent.
            while pending.len() >= 2 && frames[side].is_some() {
                let len = usize::from(u16::from_be_bytes([pending[0], pending[1]]));
                if pending.len() < fpdu_len(len) {
                    break;
                }
                let fpdu: Vec<u8> = pending.drain(..fpdu_len(len)).collect();
                let ulpdu = &fpdu[2..2 + len];
                let header = Header::parse(ulpdu).unwrap();
                segments.push((initiator, header, ulpdu[header.len()..].to_vec()));
            }
        }
        let [request, reply] = frames.map(Option::unwrap);
        Self {
            request,
            reply,
            segments,
        }
    }

    /// Returns the configuration with which our engine behaves like siw in our place.
    fn config(&self, initiator: bool) -> Config {
        let own = if initiator {
            &self.request
        } else {
            &self.reply
        };
        let frame = Frame::parse(own).unwrap().unwrap();
        let mut c = config();
        c.crc = frame.header().flags.has(Flags::CRC);
        c.mpa_revision = frame.header().revision;
        c.peer_to_peer = frame.prefix().unwrap().is_some_and(|p| p.peer_to_peer);
        c.receiver_not_ready = ReceiverNotReady::Terminate;
        // siw assumed TCP segments of 1448 octets.
        c.mss = Some(1448);
        c
    }

    /// Returns the private data and depths that siw's program passed in our place.
    fn parameters(&self, initiator: bool) -> ConnectionParameters {
        let own = if initiator {
            &self.request
        } else {
            &self.reply
        };
        let frame = Frame::parse(own).unwrap().unwrap();
        let prefix = frame.prefix().unwrap();
        ConnectionParameters {
            private_data: frame.ulp_private_data().to_vec(),
            responder_resources: prefix.map(|p| p.ird),
            initiator_depth: prefix.map(|p| p.ord),
            ..ConnectionParameters::default()
        }
    }
}

/// The state of a replay: our end, its memory, and the hand-written peer that replays the other
/// end.
struct Stage {
    end: End,
    memory: Mem,
    wire: Wire,
    /// Number of requests that our end has posted.
    posted: u64,
    /// Octets of payload that the other end has sent.
    played: u64,
}

/// Size of our memory in octets.
const MEMORY: usize = 1 << 17;
/// Offset in our memory from which the other end's Reads are answered. It contains the octets of
/// siw's responses.
const SERVED: usize = 1 << 15;

impl Stage {
    /// Sends the other end's next segment, with STag and address changed to our memory.
    fn play(&mut self, header: Header, mut payload: Vec<u8>, sink: Option<(Stag, u64)>) {
        let header = match (header, header.opcode()) {
            // An empty Write is the RTR message, which keeps its STag.
            (Header::Tagged(mut h), Opcode::WRITE) if !payload.is_empty() => {
                h.stag = Stag(self.memory.stag);
                h.to = self.memory.addr() + (h.to & 0xffff);
                Header::Tagged(h)
            }
            (Header::Tagged(mut h), Opcode::READ_RESPONSE) => {
                let (stag, to) = sink.expect("no request of ours waits for this response");
                (h.stag, h.to) = (stag, to);
                Header::Tagged(h)
            }
            (h, Opcode::READ_REQUEST) => {
                let mut request = ReadRequest::parse(&payload).unwrap();
                request.source_stag = Stag(self.memory.stag);
                request.source_to = self.memory.addr() + SERVED as u64;
                let mut body = [0; ReadRequest::LEN];
                request.emit(&mut body);
                payload = body.to_vec();
                h
            }
            (h, _) => h,
        };
        if header.opcode() != Opcode::READ_REQUEST {
            self.played += payload.len() as u64;
        }
        self.wire.send(header, &payload);
    }

    /// Waits until our end has received all payload of the other end. As a real program waits for
    /// completions before it reuses memory, the replay has to wait, too. Waits at most one second,
    /// because refused payload is not counted.
    fn wait_until_taken(&self) {
        let begin = Instant::now();
        while self.end.qp.counters().rx_payload < self.played
            && begin.elapsed() < Duration::from_secs(1)
        {
            std::thread::yield_now();
        }
    }

    /// Reads the next segment from our end. Skips reminders: empty Writes that our end sends to a
    /// silent peer (`docs/interop.md`, lost wake-up), as may happen on a slow machine.
    fn recv(&mut self, recorded: &Header) -> (Header, Vec<u8>) {
        loop {
            let (header, payload) = self.wire.recv();
            let reminder = matches!(
                header,
                Header::Tagged(h) if h.opcode == Opcode::WRITE && h.stag == Stag(1)
            );
            if !(reminder && header != *recorded) {
                return (header, payload);
            }
        }
    }

    /// Writes octets to our memory at offset `index`.
    fn fill(&mut self, index: usize, octets: &[u8]) {
        for (i, word) in octets.chunks(8).enumerate() {
            let mut bytes = [0; 8];
            bytes[..word.len()].copy_from_slice(word);
            self.memory.set(index / 8 + i, u64::from_ne_bytes(bytes));
        }
    }

    /// Posts a request whose only element is the first `len` octets of our memory.
    fn post(&mut self, op: SendOp, len: u32) {
        self.posted += 1;
        let sges = [self.memory.sge(len)];
        let sges = if len == 0 { &sges[..0] } else { &sges[..] };
        self.end
            .qp
            .post_send(&[SendWr::new(self.posted, op, sges).signaled()])
            .unwrap();
    }
}

fn message(segments: &[(bool, Header, Vec<u8>)], index: usize) -> Vec<(Header, Vec<u8>)> {
    let (side, first, _) = &segments[index];
    let mut out = Vec::new();
    for (by, header, payload) in &segments[index..] {
        if by == side && header.opcode() == first.opcode() {
            out.push((*header, payload.clone()));
            if is_last(header) {
                return out;
            }
        }
    }
    panic!("the recording ends inside a message");
}

fn is_last(header: &Header) -> bool {
    match header {
        Header::Tagged(h) => h.last,
        Header::Untagged(h) => h.last,
    }
}

/// A recording that is being replayed.
struct Replay<'a> {
    script: &'a Script,
    /// Our place: `true` for the initiator.
    we: bool,
    stage: &'a mut Stage,
    /// Sinks of our Read Requests that wait for a response, oldest first.
    sinks: VecDeque<(Stag, u64)>,
    /// Octets of the oldest response that were sent.
    sink_at: u64,
    /// Which segments of our place were compared.
    compared: Vec<bool>,
}

/// Replays all segments. If the recording contains a Terminate from our place, returns the
/// Terminate that our end sends there, and ends the replay.
fn perform(script: &Script, we: bool, stage: &mut Stage) -> Option<Terminate> {
    let mut replay = Replay {
        script,
        we,
        stage,
        sinks: VecDeque::new(),
        sink_at: 0,
        compared: vec![false; script.segments.len()],
    };
    for (index, (by, header, payload)) in script.segments.iter().enumerate() {
        if *by != we {
            replay.play(index, *header, payload.clone());
        } else if header.opcode() == Opcode::TERMINATE {
            let (_, octets) = replay.stage.wire.recv();
            return Some(Terminate::parse(&octets).unwrap().0);
        } else if !replay.compared[index] {
            replay.stage.wait_until_taken();
            let parts = replay.take_message(index);
            replay.post(*header, &parts);
            replay.compare(index, parts);
        }
    }
    None
}

impl Replay<'_> {
    /// Sends a segment of the other end.
    fn play(&mut self, index: usize, header: Header, payload: Vec<u8>) {
        let sink = match header.opcode() {
            Opcode::READ_RESPONSE if payload.is_empty() => self.sinks.pop_front(),
            Opcode::READ_RESPONSE => Some(self.sink_of(&header, payload.len())),
            Opcode::READ_REQUEST => {
                self.fill_response(index);
                None
            }
            _ => None,
        };
        self.stage.play(header, payload, sink);
    }

    /// Returns where our end expects the next `len` octets of a response.
    fn sink_of(&mut self, header: &Header, len: usize) -> (Stag, u64) {
        let oldest = self.sinks.front();
        let (stag, to) = *oldest.expect("no request of ours waits for this response");
        let sink = (stag, to + self.sink_at);
        self.sink_at += len as u64;
        if is_last(header) {
            self.sinks.pop_front();
            self.sink_at = 0;
        }
        sink
    }

    /// Writes the octets of our next recorded response to the memory that our end answers from.
    fn fill_response(&mut self, index: usize) {
        let found = self.script.segments[index..]
            .iter()
            .position(|(by, h, _)| *by == self.we && h.opcode() == Opcode::READ_RESPONSE);
        // There is no response if siw refused the request.
        if let Some(next) = found {
            let parts = message(&self.script.segments, index + next);
            let octets: Vec<u8> = parts.into_iter().flat_map(|(_, p)| p).collect();
            self.stage.fill(SERVED, &octets);
        }
    }

    /// Returns the segments of our message that begins at `index`, and marks them as compared.
    fn take_message(&mut self, index: usize) -> Vec<(Header, Vec<u8>)> {
        let parts = message(&self.script.segments, index);
        let opcode = parts[0].0.opcode();
        let rest = self.script.segments.iter().enumerate().skip(index);
        rest.filter(|(_, (by, h, _))| *by == self.we && h.opcode() == opcode)
            .take(parts.len())
            .for_each(|(i, _)| self.compared[i] = true);
        parts
    }

    /// Posts the request that sends the message, unless our end sends it without a request.
    fn post(&mut self, header: Header, parts: &[(Header, Vec<u8>)]) {
        let stage = &mut *self.stage;
        let octets: Vec<u8> = parts.iter().flat_map(|(_, p)| p.clone()).collect();
        match header.opcode() {
            Opcode::SEND => {
                stage.fill(0, &octets);
                stage.post(SendOp::Send, octets.len() as u32);
            }
            // An empty first Write is the RTR message, which the engine sends itself.
            Opcode::WRITE if octets.is_empty() && stage.posted == 0 => {}
            Opcode::WRITE => {
                let Header::Tagged(h) = header else {
                    unreachable!()
                };
                stage.fill(0, &octets);
                let (remote_addr, rkey) = (h.to, h.stag.0);
                stage.post(SendOp::Write { remote_addr, rkey }, octets.len() as u32);
            }
            Opcode::READ_REQUEST => {
                let r = ReadRequest::parse(&octets).unwrap();
                if r.size > 0 || stage.posted > 0 {
                    let (remote_addr, rkey) = (r.source_to, r.source_stag.0);
                    stage.post(SendOp::Read { remote_addr, rkey }, r.size);
                }
            }
            // The engine answers Reads itself, from the memory at `SERVED`.
            Opcode::READ_RESPONSE => {}
            other => panic!("{other:?} in a recording"),
        }
    }

    /// Compares what our end sends with the recorded message.
    fn compare(&mut self, index: usize, parts: Vec<(Header, Vec<u8>)>) {
        for (recorded, theirs) in parts {
            let (sent, ours) = self.stage.recv(&recorded);
            assert_eq!(sent, recorded, "segment {index}: {ours:02x?}");
            if recorded.opcode() != Opcode::READ_REQUEST {
                assert_eq!(ours, theirs, "segment {index}");
                continue;
            }
            let mine = ReadRequest::parse(&ours).unwrap();
            let siw = ReadRequest::parse(&theirs).unwrap();
            self.sinks.push_back((mine.sink_stag, mine.sink_to));
            assert_eq!(mine.size, siw.size, "segment {index}");
            if mine.size > 0 {
                assert_eq!(
                    (mine.source_stag, mine.source_to),
                    (siw.source_stag, siw.source_to)
                );
            }
        }
    }
}

/// Posts `count` receives, all into the same part of our memory, with numbers from 1000.
fn receives(end: &End, memory: &Mem, count: u64) {
    end.qp.modify(State::Init).unwrap();
    for i in 0..count {
        let mut sge = memory.sge(4096);
        sge.addr += 1 << 16;
        end.post_recv(1000 + i, &[sge]);
    }
}

/// Replays a recording with our engine as the responder. Returns our MPA reply, the recording, and
/// our Terminate, if any.
fn as_responder(name: &str, receives_posted: u64) -> (Vec<u8>, Script, Option<Terminate>) {
    let _guard = Watchdog::new();
    let script = Script::new(name);
    let server = Server::new(V4, &script.config(false));
    let mut wire = Wire::connect(server.address);
    wire.write(&script.request);
    let request = server.request();
    let frame = Frame::parse(&script.request).unwrap().unwrap();
    assert_eq!(request.private_data, frame.ulp_private_data());
    let end = server.end(request);
    let memory = end.mem(MEMORY);
    receives(&end, &memory, receives_posted);
    end.id.accept(&script.parameters(false)).unwrap();
    let hello = wire.read_hello(FrameKind::Reply);
    wire.crc = hello.flags.has(Flags::CRC);
    let reply = hello.octets(FrameKind::Reply);
    let mut stage = Stage {
        end,
        memory,
        wire,
        posted: 0,
        played: 0,
    };
    let terminate = perform(&script, false, &mut stage);
    stage.end.expect(CmEventKind::Established);
    finish(stage, terminate.is_some());
    (reply, script, terminate)
}

/// Replays a recording with our engine as the initiator. Returns our MPA request, the recording,
/// and our Terminate, if any.
fn as_initiator(name: &str, receives_posted: u64) -> (Vec<u8>, Script, Option<Terminate>) {
    let _guard = Watchdog::new();
    let script = Script::new(name);
    let listener = TcpListener::bind((V4, 0)).unwrap();
    let end = End::new(V4, &script.config(true));
    let memory = end.mem(MEMORY);
    receives(&end, &memory, receives_posted);
    end.resolve(listener.local_addr().unwrap());
    end.id.connect(&script.parameters(true)).unwrap();
    let mut wire = Wire::new(listener.accept().unwrap().0);
    let request = wire
        .read_hello(FrameKind::Request)
        .octets(FrameKind::Request);
    wire.write(&script.reply);
    let reply = Frame::parse(&script.reply).unwrap().unwrap();
    wire.crc = reply.header().flags.has(Flags::CRC);
    let event = end.expect(CmEventKind::Established);
    assert_eq!(event.private_data, reply.ulp_private_data());
    let mut stage = Stage {
        end,
        memory,
        wire,
        posted: 0,
        played: 0,
    };
    let terminate = perform(&script, true, &mut stage);
    finish(stage, terminate.is_some());
    (request, script, terminate)
}

/// Closes the other end. All requests must have completed, with success unless our end has refused
/// a request (`refused`).
fn finish(mut stage: Stage, refused: bool) {
    if refused {
        assert!(stage.wire.ends(), "a Terminate is followed by a FIN");
    }
    stage.wire.fin();
    stage.end.expect_disconnected();
    let mut good = 0;
    let mut left = stage.posted;
    while left > 0 {
        let cqe = stage.end.poll();
        if cqe.wr_id < 1000 {
            good += u64::from(cqe.status == WcStatus::Success);
            left -= 1;
        }
    }
    assert!(
        refused || good == stage.posted,
        "{good} of {} succeeded",
        stage.posted
    );
}

#[test]
fn rping_in_both_places() {
    let (reply, script, _) = as_responder("rping_s64", 16);
    assert_eq!(reply, script.reply, "MPA reply");
    let (request, script, _) = as_initiator("rping_s64", 16);
    assert_eq!(request, script.request, "MPA request");
}

#[test]
fn with_crc_in_both_places() {
    for name in ["mpa_crc_on", "mpa_crc_on_rping"] {
        let (reply, script, _) = as_responder(name, 8);
        assert_eq!(reply, script.reply, "{name}");
        let (request, script, _) = as_initiator(name, 8);
        assert_eq!(request, script.request, "{name}");
    }
}

#[test]
fn revision_1_in_both_places() {
    let (reply, script, _) = as_responder("mpa_rev1", 8);
    assert_eq!(reply, script.reply);
    let (request, script, _) = as_initiator("mpa_rev1", 8);
    assert_eq!(request, script.request);
}

#[test]
fn siw_maximum_of_private_data() {
    let (reply, script, _) = as_responder("priv_251_251", 8);
    assert_eq!((reply.len(), &reply), (20 + 4 + 251, &script.reply));
    let (request, script, _) = as_initiator("priv_251_251", 8);
    assert_eq!((request.len(), &request), (20 + 4 + 251, &script.request));
}

#[test]
fn responder_may_send_first() {
    as_initiator("srv_send_first", 8);
}

#[test]
fn peer_to_peer_in_both_places() {
    for name in ["mpa_p2p_rtr_write", "mpa_p2p_rtr_read"] {
        let (reply, script, _) = as_responder(name, 8);
        assert_eq!(
            reply, script.reply,
            "{name}: the reply selects one of the offered RTR kinds"
        );
        let (request, _, _) = as_initiator(name, 8);
        let frame = Frame::parse(&request).unwrap().unwrap();
        let prefix = frame.prefix().unwrap().unwrap();
        // The recorded siw offers one kind of RTR message. Our engine always offers both, because
        // hardware needs that.
        assert!(prefix.peer_to_peer && prefix.rtr_write && prefix.rtr_read && !prefix.rtr_send);
    }
}

#[test]
fn requests_refused_by_siw_are_refused() {
    for (name, receives) in [
        ("err_write_badstag", 4),
        ("err_read_oob", 4),
        ("err_send_toolong", 4),
        ("mpa_crc_err_badstag", 4),
    ] {
        let script = Script::new(name);
        let by_siw = script
            .segments
            .iter()
            .find(|(_, h, _)| h.opcode() == Opcode::TERMINATE)
            .map(|(_, _, octets)| Terminate::parse(octets).unwrap())
            .unwrap();
        assert_eq!(by_siw.1, Layout::Siw, "{name}");
        let (ours, layout) = refuse(&script, receives);
        assert_eq!(layout, Layout::Rfc, "{name}");
        match name {
            // siw has no code for a message that is too long.
            "err_send_toolong" => assert_eq!(ours.code, TerminateCode::DDP_UNTAGGED_TOO_LONG),
            _ => assert_eq!(ours.code, by_siw.0.code, "{name}"),
        }
    }
}

/// Sends the recorded initiator's first request to a responder of ours, whose memory has the same
/// bounds as siw's. Returns our Terminate and its layout.
fn refuse(script: &Script, receives_posted: u64) -> (Terminate, Layout) {
    let server = Server::new(V4, &script.config(false));
    let mut wire = Wire::connect(server.address);
    wire.write(&script.request);
    let end = server.end(server.request());
    let memory = end.mem(1 << 16);
    end.qp.modify(State::Init).unwrap();
    for i in 0..receives_posted {
        end.post_recv(i, &[memory.sge(64)]);
    }
    end.id.accept(&script.parameters(false)).unwrap();
    wire.crc = wire.read_hello(FrameKind::Reply).flags.has(Flags::CRC);
    let (_, header, payload) = script.segments.iter().find(|(by, ..)| *by).unwrap().clone();
    let payload = if header.opcode() == Opcode::READ_REQUEST {
        let mut request = ReadRequest::parse(&payload).unwrap();
        // Half of the range is after the end of the memory, as in the recording.
        request.source_stag = Stag(memory.stag);
        request.source_to = memory.addr() + memory.len() - u64::from(request.size / 2);
        let mut body = [0; ReadRequest::LEN];
        request.emit(&mut body);
        body.to_vec()
    } else {
        payload
    };
    wire.send(header, &payload);
    let (_, octets) = wire.recv();
    let parsed = Terminate::parse(&octets).unwrap();
    assert!(wire.ends(), "a Terminate is followed by a FIN");
    parsed
}

#[test]
fn responder_sends_after_speak_first_time() {
    let _guard = Watchdog::new();
    for (patience, spoken) in [(Some(Duration::from_millis(50)), true), (None, false)] {
        let mut config = config();
        config.speak_first = patience;
        let server = Server::new(V4, &config);
        let (mut wire, end) = initiator(&server, &Hello::client_server());
        let memory = end.mem(8);
        memory.set(0, 7);
        end.post(1, SendOp::Send, &[memory.sge(8)]);
        if spoken {
            assert_eq!(wire.expect(Opcode::SEND), 7u64.to_ne_bytes());
            end.expect_status(1, WcStatus::Success);
            // Afterwards the initiator's messages are received as usual.
            end.post_recv(2, &[memory.sge(8)]);
            wire.untagged(Opcode::SEND, &[1; 8]);
            end.expect_status(2, WcStatus::Success);
        } else {
            wire.is_silent(Duration::from_millis(200));
        }
    }
}
