//! The hostile peer: a TCP socket that implements as much of the protocol as attacks need.

use std::fmt;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::net::sockopt;

use super::wire::{self, Op};

/// Time limit for the server's response. The server closes the connection of an attacker within 2
/// s.
pub(super) const RESPONSE_LIMIT: Duration = Duration::from_secs(8);
/// Length of the largest FPDU without markers.
const MAX_FPDU: usize = 2 + 65535 + 3 + 4;

/// The server's response to an attack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Response {
    /// A Terminate with this layer, type and code (RFC 5040 section 4.8), and then a FIN or reset.
    Terminate(u16),
    /// A FIN or reset without a Terminate.
    Closed,
    /// None: the connection stayed open until the peer closed it.
    Silence,
    /// A Terminate followed by more octets.
    Garbage,
}

impl fmt::Display for Response {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Terminate(code) => write!(f, "Terminate {code:04x}"),
            Self::Closed => f.pad("end"),
            Self::Silence => f.pad("none"),
            Self::Garbage => f.pad("octets after a Terminate"),
        }
    }
}

/// The memory that a server grants. The C server has a region with all rights, one without remote
/// access, one in another protection domain, and a type 2 window for Reads of a part of the first
/// region. `iwarp perf` has only a region with all rights.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Grant {
    pub(super) address: u64,
    pub(super) len: u32,
    pub(super) all: u32,
    pub(super) local: u32,
    pub(super) foreign: u32,
    pub(super) window: u32,
    /// The server's device supports neither windows nor atomics.
    pub(super) plain: bool,
}

impl Grant {
    /// Length of the C server's private data.
    const LEN: usize = 28;
    /// Length of the private data of `iwarp perf`, whose length field has 64 bits.
    const PERF_LEN: usize = 20;

    fn parse(data: &[u8]) -> Option<Self> {
        let word = |at: usize| {
            let octets = data.iter().skip(at).take(4);
            octets.fold(0, |n, octet| n << 8 | u32::from(*octet))
        };
        let address = u64::from(word(0)) << 32 | u64::from(word(4));
        match data.len() {
            Self::LEN => Some(Self {
                address,
                len: word(8),
                all: word(12),
                local: word(16),
                foreign: word(20),
                window: word(24),
                plain: word(24) == 0,
            }),
            Self::PERF_LEN => Some(Self {
                address,
                len: word(12),
                all: word(16),
                ..Self::default()
            }),
            _ => None,
        }
    }
}

/// The private data of each request. `iwarp perf` interprets them as a description of the client's
/// memory, which it uses only for a measurement.
const MEMORY: [u8; Grant::PERF_LEN] = [0; Grant::PERF_LEN];

/// Opens a TCP connection, without MPA.
pub(super) fn connect(to: SocketAddr) -> Result<TcpStream> {
    let stream = TcpStream::connect(to).context("connecting to the server")?;
    stream.set_read_timeout(Some(RESPONSE_LIMIT))?;
    stream.set_write_timeout(Some(RESPONSE_LIMIT))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

pub(super) fn reset(stream: TcpStream) -> Result<()> {
    sockopt::set_socket_linger(&stream, Some(Duration::ZERO))?;
    drop(stream);
    Ok(())
}

/// Discards data until the server closes the connection.
pub(super) fn wait_for_close(stream: &mut TcpStream) -> Result<Response> {
    let mut sink = [0; 4096];
    loop {
        match stream.read(&mut sink) {
            Ok(0) => return Ok(Response::Closed),
            Ok(_) => {}
            Err(e) => return classify_error(&e),
        }
    }
}

fn classify_error(e: &io::Error) -> Result<Response> {
    match e.kind() {
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::UnexpectedEof => {
            Ok(Response::Closed)
        }
        ErrorKind::WouldBlock | ErrorKind::TimedOut => Ok(Response::Silence),
        _ => bail!("error of the TCP stream: {e}"),
    }
}

pub(super) struct Peer {
    pub(super) stream: TcpStream,
    pub(super) grant: Option<Grant>,
    /// `true` if the server requests markers.
    pub(super) markers: bool,
    /// The next message number of each queue.
    msn: [u32; 4],
    /// Octets sent since the set-up, including markers.
    sent: usize,
}

impl Peer {
    /// Connects with MPA revision 1 and CRCs.
    pub(super) fn set_up(to: SocketAddr) -> Result<Self> {
        let start = Instant::now();
        // A server whose backlog is full rejects connections for a moment.
        loop {
            if let Some(peer) = Self::try_set_up(to)? {
                return Ok(peer);
            }
            if start.elapsed() > RESPONSE_LIMIT {
                bail!("the server rejected all connections");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn try_set_up(to: SocketAddr) -> Result<Option<Self>> {
        let mut request = wire::frame(wire::REQUEST, wire::CRC, 1, MEMORY.len() as u16);
        request.extend(MEMORY);
        Self::request_connection(connect(to)?, &request)
    }

    /// Sends a request, and reads the reply. Returns `None` if the server rejects it.
    pub(super) fn request_connection(
        mut stream: TcpStream,
        request: &[u8],
    ) -> Result<Option<Self>> {
        stream.write_all(request)?;
        let mut head = [0; wire::FRAME_LEN];
        match stream.read_exact(&mut head) {
            Ok(()) => {}
            Err(e) if matches!(classify_error(&e), Ok(Response::Closed)) => return Ok(None),
            Err(e) => return Err(e).context("the server's MPA reply"),
        }
        if !head.starts_with(wire::REPLY) {
            bail!("no MPA reply: {head:02x?}");
        }
        let len = usize::from(u16::from_be_bytes([head[18], head[19]]));
        let mut data = vec![0; len];
        stream.read_exact(&mut data)?;
        if head[16] & wire::REJECT != 0 {
            return Ok(None);
        }
        if head[16] & wire::CRC == 0 {
            bail!("the server's reply does not enable the CRC");
        }
        // The private data of an enhanced reply start with IRD and ORD (RFC 6581 section 9).
        let enhanced = head[17] == 2 && head[16] & wire::ENHANCED != 0;
        let start = if enhanced { 4 } else { 0 };
        Ok(Some(Self {
            stream,
            grant: data.get(start..).and_then(Grant::parse),
            markers: head[16] & wire::MARKERS != 0,
            msn: [1; 4],
            sent: 0,
        }))
    }

    /// Returns and consumes the next message number for an operation.
    pub(super) fn next_msn(&mut self, op: Op) -> u32 {
        let queue = match op {
            Op::Read | Op::Atomic => 1,
            Op::Terminate => 2,
            Op::AtomicResponse => 3,
            _ => 0,
        };
        let next_msn = self.msn[queue];
        self.msn[queue] = next_msn.wrapping_add(1);
        next_msn
    }

    /// Sends octets. Ignores a closed connection, because the response will show it.
    pub(super) fn put(&mut self, octets: &[u8]) -> Result<()> {
        match self.stream.write_all(octets) {
            Ok(()) => {
                self.sent += octets.len();
                Ok(())
            }
            Err(e) => classify_error(&e).map(drop),
        }
    }

    /// Sends an FPDU, with correct markers if the server requests them.
    pub(super) fn send(&mut self, ulpdu: &[u8]) -> Result<()> {
        let fpdu = wire::fpdu(ulpdu);
        match self.markers {
            false => self.put(&fpdu),
            true => self.send_marked(&fpdu, 0),
        }
    }

    /// Sends an FPDU without markers, with `octet` as padding.
    pub(super) fn send_padded(&mut self, ulpdu: &[u8], octet: u8) -> Result<()> {
        let mut fpdu = wire::fpdu(ulpdu);
        let body = fpdu.len() - 4;
        fpdu[2 + ulpdu.len()..body].fill(octet);
        let sum = wire::crc32c(&fpdu[..body]);
        fpdu[body..].copy_from_slice(&sum.to_le_bytes());
        self.put(&fpdu)
    }

    /// Sends an FPDU with markers (RFC 5044 section 4.3). Adds `error` to the pointers of all
    /// markers inside the FPDU.
    pub(super) fn send_marked(&mut self, fpdu: &[u8], error: u16) -> Result<()> {
        let body = fpdu.len() - 4;
        let mut out: Vec<u8> = Vec::new();
        // The CRC covers the markers, including one before the FPDU. Marker pointers are relative
        // to the length field.
        let before = if self.sent.is_multiple_of(512) { 4 } else { 0 };
        let mut rest = fpdu.iter().take(body);
        loop {
            if (self.sent + out.len()).is_multiple_of(512) {
                let pointer = (out.len() as u16).saturating_sub(before);
                let wrong = if pointer == 0 { 0 } else { error };
                out.extend([0, 0]);
                out.extend((pointer + wrong).to_be_bytes());
            }
            let Some(octet) = rest.next() else { break };
            out.push(*octet);
        }
        let sum = wire::crc32c(&out);
        out.extend(sum.to_le_bytes());
        self.put(&out)
    }

    /// Sends valid requests, so that requests are outstanding when the attack arrives: Writes,
    /// Reads and, if supported, atomics. If no memory is granted, sends an empty Write, because a
    /// server must not send a Terminate before it has received an FPDU (RFC 5044 section 7.1.2).
    pub(super) fn send_valid_requests(&mut self) -> Result<()> {
        let Some(grant) = self.grant else {
            return self.send(&wire::tagged(Op::Write, 0, 0, &[]));
        };
        for n in 0..4 {
            let offset = grant.address + 4096 + n * 1024;
            self.send(&wire::tagged(
                Op::Write,
                grant.all,
                offset,
                &[n as u8; 1000],
            ))?;
            let read = wire::read_request(grant.all, grant.address, 8192);
            self.request(Op::Read, &read)?;
            if !grant.plain {
                self.request(Op::Atomic, &wire::fetch_add(grant.all, grant.address))?;
            }
        }
        Ok(())
    }

    pub(super) fn request(&mut self, op: Op, body: &[u8]) -> Result<()> {
        let segment = self.message(op, body);
        self.send(&segment)
    }

    /// Builds the next untagged message.
    pub(super) fn message(&mut self, op: Op, body: &[u8]) -> Vec<u8> {
        let msn = self.next_msn(op);
        wire::untagged(op, 0, msn, body)
    }

    /// Reads until the server closes the connection or a Terminate arrives. Fails if a CRC is
    /// wrong.
    pub(super) fn read_response(&mut self) -> Result<Response> {
        loop {
            let ulpdu = match self.receive()? {
                Ok(ulpdu) => ulpdu,
                Err(end) => return Ok(end),
            };
            if ulpdu.get(1).is_some_and(|c| c & 0xf == Op::Terminate as u8) {
                let Some(code) = ulpdu.get(18..20) else {
                    bail!("a Terminate without a code: {ulpdu:02x?}");
                };
                let code = u16::from_be_bytes([code[0], code[1]]);
                return self.read_close_after_terminate(code);
            }
        }
    }

    /// Shrinks the receive buffer, so that the server's send buffer soon fills. The kernel drops
    /// data in flight, and the server retransmits it.
    pub(super) fn shrink_receive_buffer(&self) -> Result<()> {
        Ok(sockopt::set_socket_recv_buffer_size(&self.stream, 4096)?)
    }

    /// Reads an FPDU. The inner error says how the server closed the connection.
    pub(super) fn receive(&mut self) -> Result<Result<Vec<u8>, Response>> {
        let mut buffer = vec![0; MAX_FPDU];
        if let Err(e) = self.stream.read_exact(&mut buffer[..2]) {
            return classify_error(&e).map(Err);
        }
        let len = usize::from(u16::from_be_bytes([buffer[0], buffer[1]]));
        let body = wire::padded(len);
        if let Err(e) = self.stream.read_exact(&mut buffer[2..body + 4]) {
            return classify_error(&e).map(Err);
        }
        let sum = wire::crc32c(&buffer[..body]);
        if buffer[body..body + 4] != sum.to_le_bytes() {
            bail!("the server's CRC is wrong");
        }
        buffer.truncate(2 + len);
        buffer.drain(..2);
        Ok(Ok(buffer))
    }

    fn read_close_after_terminate(&mut self, code: u16) -> Result<Response> {
        match self.stream.read(&mut [0; 16]) {
            Ok(0) => Ok(Response::Terminate(code)),
            Ok(_) => Ok(Response::Garbage),
            Err(e) => match classify_error(&e)? {
                Response::Closed => Ok(Response::Terminate(code)),
                other => Ok(other),
            },
        }
    }

    /// Shuts down the sending direction.
    pub(super) fn half_close(&mut self) -> Result<()> {
        match self.stream.shutdown(Shutdown::Write) {
            Err(e) if e.kind() != ErrorKind::NotConnected => Err(e).context("half-close"),
            _ => Ok(()),
        }
    }
}
