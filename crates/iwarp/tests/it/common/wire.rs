//! A hand-written peer: a blocking socket that encodes and decodes MPA, DDP and RDMAP with the
//! codecs of `iwarp-proto`. It sends exactly what the test specifies, even if that violates the
//! protocol.

use super::{End, LIMIT, Server};
use iwarp::runtime::cm::CmEventKind;
use iwarp_proto::crc32c;
use iwarp_proto::ddp::{Header, Stag, TaggedHeader, UntaggedHeader};
use iwarp_proto::mpa::framing::{
    CRC_LEN, FpduOptions, MarkerClock, decode_fpdu, encode_fpdu, fpdu_len,
};
use iwarp_proto::mpa::startup::{
    EnhancedPrefix, Flags, FrameHeader, FrameKind, FrameReader, Progress,
};
use iwarp_proto::rdmap::{AtomicOp, AtomicRequest, Opcode, ReadRequest, Terminate, TerminateCode};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// The content of an MPA request or reply frame.
#[derive(Clone)]
pub struct Hello {
    pub revision: u8,
    pub flags: Flags,
    pub prefix: Option<EnhancedPrefix>,
    pub private_data: Vec<u8>,
}

impl Hello {
    /// An enhanced frame as hardware sends it: peer-to-peer, with these kinds of RTR message.
    pub fn enhanced(rtr_write: bool, rtr_read: bool) -> Self {
        Self {
            revision: 2,
            flags: Flags::CRC | Flags::ENHANCED,
            prefix: Some(EnhancedPrefix {
                ird: 16,
                ord: 16,
                peer_to_peer: true,
                rtr_send: false,
                rtr_write,
                rtr_read,
            }),
            private_data: Vec::new(),
        }
    }

    /// An enhanced frame for the client-server model: no RTR message.
    pub fn client_server() -> Self {
        let mut hello = Self::enhanced(false, false);
        hello.prefix = Some(EnhancedPrefix {
            peer_to_peer: false,
            ..hello.prefix.unwrap_or_default()
        });
        hello
    }

    /// A frame of revision 1, as RFC 5044 defines it, without the prefix of RFC 6581.
    pub fn plain() -> Self {
        Self {
            revision: 1,
            flags: Flags::CRC,
            prefix: None,
            private_data: Vec::new(),
        }
    }

    /// Returns the octets of the frame.
    pub fn octets(&self, kind: FrameKind) -> Vec<u8> {
        let mut body = Vec::new();
        if let Some(prefix) = &self.prefix {
            let mut octets = [0; EnhancedPrefix::LEN];
            prefix.emit(&mut octets);
            body.extend_from_slice(&octets);
        }
        body.extend_from_slice(&self.private_data);
        let header = FrameHeader {
            kind,
            flags: self.flags,
            revision: self.revision,
            pd_length: body.len() as u16,
        };
        let mut frame = vec![0; 20];
        header.emit(&mut frame);
        frame.extend_from_slice(&body);
        frame
    }
}

/// The hand-written peer. In its methods, "the peer" is the side under test.
pub struct Wire {
    pub socket: TcpStream,
    pub crc: bool,
    /// Skips reminders: an initiator sends zero-length Writes to a responder that has been silent
    /// for 30 ms or longer, which happens on a busy machine.
    pub skips_reminders: bool,
    msn: [u32; 4],
}

impl Wire {
    pub fn new(socket: TcpStream) -> Self {
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        socket.set_write_timeout(Some(LIMIT)).unwrap();
        socket.set_nodelay(true).unwrap();
        Self {
            socket,
            crc: true,
            skips_reminders: false,
            msn: [1; 4],
        }
    }

    pub fn connect(address: SocketAddr) -> Self {
        Self::new(TcpStream::connect(address).unwrap())
    }

    pub fn write(&mut self, octets: &[u8]) {
        self.socket.write_all(octets).unwrap();
    }

    /// Reads the peer's start-up frame.
    pub fn read_hello(&mut self, kind: FrameKind) -> Hello {
        let mut reader = FrameReader::new(kind);
        loop {
            let missing = reader.missing().unwrap();
            if missing == 0 {
                break;
            }
            let mut octets = vec![0; missing];
            self.socket.read_exact(&mut octets).unwrap();
            if let Progress::Frame { .. } = reader.push(&octets).unwrap() {
                break;
            }
        }
        let frame = reader.frame().unwrap();
        Hello {
            revision: frame.header().revision,
            flags: frame.header().flags,
            prefix: frame.prefix().unwrap(),
            private_data: frame.ulp_private_data().to_vec(),
        }
    }

    fn options(&self) -> FpduOptions {
        FpduOptions {
            markers: false,
            crc: self.crc.then_some(crc32c::append as _),
        }
    }

    /// Returns a whole FPDU that carries `ulpdu`.
    pub fn fpdu(&self, ulpdu: &[u8]) -> Vec<u8> {
        let mut out = vec![0; fpdu_len(ulpdu.len())];
        encode_fpdu(ulpdu, &self.options(), &mut MarkerClock::new(), &mut out).unwrap();
        out
    }

    pub fn send_ulpdu(&mut self, ulpdu: &[u8]) {
        let fpdu = self.fpdu(ulpdu);
        self.write(&fpdu);
    }

    pub fn send(&mut self, header: Header, payload: &[u8]) {
        self.send_ulpdu(&segment(&header, payload));
    }

    /// Takes the next message sequence number of queue `qn`.
    pub fn next_msn(&mut self, qn: u32) -> u32 {
        let msn = self.msn[qn as usize];
        self.msn[qn as usize] += 1;
        msn
    }

    /// Sends an untagged message in one segment.
    pub fn untagged(&mut self, opcode: Opcode, payload: &[u8]) {
        let header = self.untagged_header(opcode);
        self.send(Header::Untagged(header), payload);
    }

    pub fn untagged_header(&mut self, opcode: Opcode) -> UntaggedHeader {
        let qn = opcode.queue_number().unwrap();
        UntaggedHeader {
            last: true,
            opcode,
            invalidate_stag: Stag(0),
            qn,
            msn: self.next_msn(qn),
            mo: 0,
        }
    }

    pub fn write_op(&mut self, stag: u32, to: u64, payload: &[u8]) {
        self.send(write_header(stag, to, true), payload);
    }

    pub fn read_op(&mut self, request: ReadRequest) {
        let mut body = [0; ReadRequest::LEN];
        request.emit(&mut body);
        self.untagged(Opcode::READ_REQUEST, &body);
    }

    pub fn atomic_op(&mut self, op: AtomicOp, stag: u32, to: u64) {
        let mut body = [0; AtomicRequest::LEN];
        AtomicRequest {
            op,
            request_id: 77,
            stag: Stag(stag),
            to,
            add_swap: 1,
            ..AtomicRequest::default()
        }
        .emit(&mut body);
        self.untagged(Opcode::ATOMIC_REQUEST, &body);
    }

    /// Sends the RTR message of the Write kind as hardware does: zero octets to STag 1.
    pub fn rtr_write(&mut self) {
        self.write_op(1, 0, &[]);
    }

    /// Sends the RTR message of the Read kind as hardware does: a request for zero octets.
    pub fn rtr_read(&mut self) {
        self.read_op(ReadRequest {
            sink_stag: Stag(1),
            source_stag: Stag(1),
            ..ReadRequest::default()
        });
    }

    /// Reads the next FPDU and returns its header and payload.
    pub fn recv(&mut self) -> (Header, Vec<u8>) {
        loop {
            let (header, payload) = self.recv_any();
            let is_reminder = header == write_header(1, 0, true) && payload.is_empty();
            if !(self.skips_reminders && is_reminder) {
                return (header, payload);
            }
        }
    }

    /// Reads the next FPDU as [`Self::recv`] does, without skipping reminders.
    fn recv_any(&mut self) -> (Header, Vec<u8>) {
        let mut octets = vec![0; 2];
        self.socket.read_exact(&mut octets).unwrap();
        let ulpdu_len = usize::from(u16::from_be_bytes([octets[0], octets[1]]));
        octets.resize(fpdu_len(ulpdu_len), 0);
        assert!(octets.len() >= 2 + CRC_LEN);
        self.socket.read_exact(&mut octets[2..]).unwrap();
        let mut ulpdu = vec![0; ulpdu_len];
        decode_fpdu(
            &octets,
            &self.options(),
            &mut MarkerClock::new(),
            &mut ulpdu,
        )
        .unwrap();
        let header = Header::parse(&ulpdu).unwrap();
        (header, ulpdu[header.len()..].to_vec())
    }

    /// Reads the next octets, at least one unless the stream has ended.
    fn read_some(&mut self, octets: &mut [u8]) -> std::io::Result<usize> {
        let reminder = self.fpdu(&segment(&write_header(1, 0, true), &[]));
        loop {
            let n = self.socket.read(octets)?;
            let is_reminder = |piece: &[u8]| self.skips_reminders && piece == reminder;
            if n == 0 || !octets[..n].chunks(reminder.len()).all(is_reminder) {
                return Ok(n);
            }
        }
    }

    /// Reads the next FPDU, which must have this opcode, and returns its payload.
    pub fn expect(&mut self, opcode: Opcode) -> Vec<u8> {
        let (header, payload) = self.recv();
        assert_eq!(header.opcode(), opcode, "{header:?}");
        payload
    }

    /// Reads the next FPDU, which must be a Terminate with this code. Then the peer must close with
    /// a FIN.
    pub fn expect_terminate(&mut self, code: TerminateCode) -> Terminate {
        let (header, payload) = self.recv();
        let Header::Untagged(h) = header else {
            panic!("{header:?}");
        };
        assert_eq!(
            (h.opcode, h.qn, h.msn, h.mo, h.last),
            (Opcode::TERMINATE, 2, 1, 0, true)
        );
        let terminate = Terminate::parse(&payload).unwrap().0;
        assert_eq!(terminate.code, code);
        assert!(self.ends(), "the peer reset the stream after its Terminate");
        terminate
    }

    /// Waits until the peer closes, and panics if it sends anything before. Returns `true` if it
    /// closes with a FIN, `false` if with a reset.
    pub fn ends(&mut self) -> bool {
        let mut octets = [0; 64];
        match self.read_some(&mut octets) {
            Ok(0) => true,
            Ok(n) => panic!("unexpected octets: {:02x?}", &octets[..n]),
            Err(e) if e.kind() == ErrorKind::ConnectionReset => false,
            Err(e) => panic!("the peer did not close in time: {e}"),
        }
    }

    pub fn ends_with_reset(&mut self) {
        assert!(!self.ends(), "a FIN instead of a reset");
    }

    /// Waits for octets or the end of the stream, at most for `time`. Returns `true` unless the
    /// peer has closed with a FIN.
    pub fn stays_open(&mut self, time: Duration) -> bool {
        self.socket.set_read_timeout(Some(time)).unwrap();
        let end = self.socket.peek(&mut [0]);
        self.socket.set_read_timeout(Some(LIMIT)).unwrap();
        !matches!(end, Ok(0))
    }

    /// Checks that the peer sends nothing for `time`.
    pub fn is_silent(&mut self, time: Duration) {
        self.socket.set_read_timeout(Some(time)).unwrap();
        let mut octets = [0; 64];
        match self.read_some(&mut octets) {
            Ok(n) => panic!("unexpected: {:02x?}", &octets[..n]),
            Err(e) => assert!(
                matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
                "{e}"
            ),
        }
        self.socket.set_read_timeout(Some(LIMIT)).unwrap();
    }

    pub fn fin(&mut self) {
        self.socket.shutdown(Shutdown::Write).unwrap();
    }

    /// Closes the stream with a reset.
    pub fn reset(self) {
        socket2::SockRef::from(&self.socket)
            .set_linger(Some(Duration::ZERO))
            .unwrap();
    }
}

/// Returns a ULPDU: the header and the payload.
pub fn segment(header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut octets = vec![0; header.len()];
    header.emit(&mut octets);
    octets.extend_from_slice(payload);
    octets
}

pub fn write_header(stag: u32, to: u64, last: bool) -> Header {
    Header::Tagged(TaggedHeader {
        last,
        opcode: Opcode::WRITE,
        stag: Stag(stag),
        to,
    })
}

/// Returns the payload of a Read Request for `size` octets.
pub fn read(stag: u32, to: u64, size: u32) -> ReadRequest {
    ReadRequest {
        sink_stag: Stag(9),
        sink_to: 0,
        size,
        source_stag: Stag(stag),
        source_to: to,
    }
}

/// Connects a hand-written initiator to `server`, including the RTR message, and returns it with
/// the accepted end.
pub fn initiator(server: &Server, hello: &Hello) -> (Wire, End) {
    let mut wire = Wire::connect(server.address);
    wire.write(&hello.octets(FrameKind::Request));
    let end = server.accept();
    let reply = wire.read_hello(FrameKind::Reply);
    assert_eq!(reply.revision, hello.revision);
    wire.crc = reply.flags.has(Flags::CRC);
    if let Some(prefix) = reply.prefix.filter(|p| p.peer_to_peer) {
        match (prefix.rtr_write, prefix.rtr_read) {
            (true, false) => wire.rtr_write(),
            (false, true) => {
                wire.rtr_read();
                assert_eq!(wire.expect(Opcode::READ_RESPONSE), b"");
            }
            other => panic!("the reply does not choose exactly one kind of RTR message: {other:?}"),
        }
    }
    end.expect(CmEventKind::Established);
    (wire, end)
}

/// Connects `end` to a hand-written responder, which answers with `hello` and reads the RTR
/// message.
pub fn responder(end: &End, hello: &Hello) -> Wire {
    let listener = TcpListener::bind(SocketAddr::new(super::V4, 0)).unwrap();
    responder_at(&listener, end, hello)
}

/// Connects `end` as [`responder`] does, to this listener, whose socket options the connection
/// inherits.
pub fn responder_at(listener: &TcpListener, end: &End, hello: &Hello) -> Wire {
    end.connect(listener.local_addr().unwrap(), b"");
    let mut wire = Wire::new(listener.accept().unwrap().0);
    wire.read_hello(FrameKind::Request);
    wire.write(&hello.octets(FrameKind::Reply));
    end.expect(CmEventKind::Established);
    let p = hello.prefix.unwrap_or_default();
    if p.peer_to_peer && p.rtr_write {
        wire.expect(Opcode::WRITE);
    } else if p.peer_to_peer && p.rtr_read {
        wire.expect(Opcode::READ_REQUEST);
        let header = TaggedHeader {
            last: true,
            opcode: Opcode::READ_RESPONSE,
            stag: Stag(1),
            to: 0,
        };
        wire.send(Header::Tagged(header), &[]);
    }
    wire.skips_reminders = true;
    wire
}
