//! The hostile peer: a TCP socket that speaks as much of the protocol as an attack needs.

use std::fmt;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::net::sockopt;

use super::wire::{self, Op};

/// How long the peer waits for the server's answer. The server closes such connections within 2 s.
pub(super) const PATIENCE: Duration = Duration::from_secs(8);
/// Octets of the largest FPDU without markers.
const FPDU_MAX: usize = 2 + 65535 + 3 + 4;

/// What the peer got for an attack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Seen {
    /// A Terminate with this layer, type and code (RFC 5040 section 4.8), and then the end of the
    /// stream.
    Terminate(u16),
    /// The end of the stream or a reset, without a Terminate.
    Ended,
    /// Nothing: the connection stayed, and the peer left.
    Held,
    /// A whole Terminate that is followed by more octets than the end of the stream.
    Garbage,
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Terminate(code) => write!(f, "Terminate {code:04x}"),
            Self::Ended => f.pad("end"),
            Self::Held => f.pad("held"),
            Self::Garbage => f.pad("octets behind a Terminate"),
        }
    }
}

/// What a server grants. The C server: a region with all rights, one with none for peers, one of
/// another protection domain, and a window of type 2 that lends its peers the right to read a part
/// of the first. `iwarp perf`: a region with all rights.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Grant {
    pub(super) address: u64,
    pub(super) len: u32,
    pub(super) all: u32,
    pub(super) local: u32,
    pub(super) foreign: u32,
    pub(super) window: u32,
    /// The server's device has neither windows nor atomics.
    pub(super) plain: bool,
}

impl Grant {
    /// Octets of the C server's private data.
    const LEN: usize = 28;
    /// Octets of those of `iwarp perf`, whose length has 64 bits.
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

/// The private data of every request: `iwarp perf` takes them for the peer's memory, which it uses
/// only if it is told to measure.
const MEMORY: [u8; Grant::PERF_LEN] = [0; Grant::PERF_LEN];

/// Connects, and nothing else.
pub(super) fn connect(to: SocketAddr) -> Result<TcpStream> {
    let stream = TcpStream::connect(to).context("connecting to the server")?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Closes a connection by a reset.
pub(super) fn reset(stream: TcpStream) -> Result<()> {
    sockopt::set_socket_linger(&stream, Some(Duration::ZERO))?;
    drop(stream);
    Ok(())
}

/// Waits for the end of a stream that should bring nothing.
pub(super) fn end_of(stream: &mut TcpStream) -> Result<Seen> {
    let mut sink = [0; 4096];
    loop {
        match stream.read(&mut sink) {
            Ok(0) => return Ok(Seen::Ended),
            Ok(_) => {}
            Err(e) => return kind_of_end(&e),
        }
    }
}

fn kind_of_end(e: &io::Error) -> Result<Seen> {
    match e.kind() {
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::UnexpectedEof => {
            Ok(Seen::Ended)
        }
        ErrorKind::WouldBlock | ErrorKind::TimedOut => Ok(Seen::Held),
        _ => bail!("the stream: {e}"),
    }
}

/// A peer whose connection is set up.
pub(super) struct Peer {
    pub(super) stream: TcpStream,
    pub(super) grant: Option<Grant>,
    /// `true` if the server wants markers.
    pub(super) markers: bool,
    /// The number of the next message for each queue.
    msn: [u32; 4],
    /// Octets sent since the set-up, markers included.
    sent: usize,
}

impl Peer {
    /// Connects by TCP and by MPA of revision 1 with CRCs.
    pub(super) fn set_up(to: SocketAddr) -> Result<Self> {
        let start = Instant::now();
        // A server that is full rejects. It frees places within a moment.
        loop {
            if let Some(peer) = Self::try_set_up(to)? {
                return Ok(peer);
            }
            if start.elapsed() > PATIENCE {
                bail!("the server rejects every connection");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn try_set_up(to: SocketAddr) -> Result<Option<Self>> {
        let mut request = wire::frame(wire::REQUEST, wire::CRC, 1, MEMORY.len() as u16);
        request.extend(MEMORY);
        Self::ask(connect(to)?, &request)
    }

    /// Sends a request of the caller's, and reads the reply. Returns `None` if the server refuses
    /// it.
    pub(super) fn ask(mut stream: TcpStream, request: &[u8]) -> Result<Option<Self>> {
        stream.write_all(request)?;
        let mut head = [0; wire::FRAME];
        match stream.read_exact(&mut head) {
            Ok(()) => {}
            Err(e) if matches!(kind_of_end(&e), Ok(Seen::Ended)) => return Ok(None),
            Err(e) => return Err(e).context("the server's MPA reply"),
        }
        if !head.starts_with(wire::REPLY) {
            bail!("no MPA reply: {head:02x?}");
        }
        let len = usize::from(u16::from_be_bytes([head[18], head[19]]));
        let mut data = vec![0; len];
        stream.read_exact(&mut data)?;
        if head[16] & wire::REJECTED != 0 {
            return Ok(None);
        }
        if head[16] & wire::CRC == 0 {
            bail!("the server wants no CRC");
        }
        // An enhanced reply has the depths first (RFC 6581 section 9).
        let enhanced = head[17] == 2 && head[16] & wire::ENHANCED != 0;
        let own = if enhanced { 4 } else { 0 };
        Ok(Some(Self {
            stream,
            grant: data.get(own..).and_then(Grant::parse),
            markers: head[16] & wire::MARKERS != 0,
            msn: [1; 4],
            sent: 0,
        }))
    }

    /// Returns the number of the next message of an operation, which is then used up.
    pub(super) fn next(&mut self, op: Op) -> u32 {
        let queue = match op {
            Op::Read | Op::Atomic => 1,
            Op::Terminate => 2,
            Op::AtomicResponse => 3,
            _ => 0,
        };
        let next = self.msn[queue];
        self.msn[queue] = next.wrapping_add(1);
        next
    }

    /// Sends octets. The server may have ended the connection meanwhile, which the answer will
    /// show.
    pub(super) fn put(&mut self, octets: &[u8]) -> Result<()> {
        match self.stream.write_all(octets) {
            Ok(()) => {
                self.sent += octets.len();
                Ok(())
            }
            Err(e) => kind_of_end(&e).map(drop),
        }
    }

    /// Sends an FPDU, with right markers if the server wants them.
    pub(super) fn send(&mut self, ulpdu: &[u8]) -> Result<()> {
        let fpdu = wire::fpdu(ulpdu);
        match self.markers {
            false => self.put(&fpdu),
            true => self.send_marked(&fpdu, 0),
        }
    }

    /// Sends an FPDU without markers whose padding has this octet.
    pub(super) fn send_padded(&mut self, ulpdu: &[u8], octet: u8) -> Result<()> {
        let mut fpdu = wire::fpdu(ulpdu);
        let body = fpdu.len() - 4;
        fpdu[2 + ulpdu.len()..body].fill(octet);
        let sum = wire::crc32c(&fpdu[..body]);
        fpdu[body..].copy_from_slice(&sum.to_le_bytes());
        self.put(&fpdu)
    }

    /// Sends an FPDU with markers, whose pointers are wrong by `error` except that of the first one
    /// (RFC 5044 section 4.3).
    pub(super) fn send_marked(&mut self, fpdu: &[u8], error: u16) -> Result<()> {
        let body = fpdu.len() - 4;
        let mut out: Vec<u8> = Vec::new();
        // The CRC covers the markers, so they come first. A marker before the FPDU belongs to it,
        // but pointers count from its length field.
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

    /// Puts legal requests on their way, so that the attack finds the server at work: Writes, Reads
    /// and, unless the server is plain, atomics where it grants memory; else an empty Write,
    /// because a server may not send a Terminate before it has got an FPDU (RFC 5044 section
    /// 7.1.2).
    pub(super) fn busy(&mut self) -> Result<()> {
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

    /// Sends a message without a tag.
    pub(super) fn request(&mut self, op: Op, body: &[u8]) -> Result<()> {
        let segment = self.message(op, body);
        self.send(&segment)
    }

    /// Makes a message without a tag, which is sent next.
    pub(super) fn message(&mut self, op: Op, body: &[u8]) -> Vec<u8> {
        let msn = self.next(op);
        wire::untagged(op, 0, msn, body)
    }

    /// Reads what the server sends until a Terminate, and the end of the stream behind it. Each
    /// FPDU must have a right CRC.
    pub(super) fn answer(&mut self) -> Result<Seen> {
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
                return self.end_behind(code);
            }
        }
    }

    /// Makes the buffer small, so that the server's socket is soon full. What is under way is
    /// dropped, and comes again after a time-out.
    pub(super) fn narrow(&self) -> Result<()> {
        Ok(sockopt::set_socket_recv_buffer_size(&self.stream, 4096)?)
    }

    /// Reads an FPDU, or how the stream has ended.
    pub(super) fn receive(&mut self) -> Result<Result<Vec<u8>, Seen>> {
        let mut buffer = vec![0; FPDU_MAX];
        if let Err(e) = self.stream.read_exact(&mut buffer[..2]) {
            return kind_of_end(&e).map(Err);
        }
        let len = usize::from(u16::from_be_bytes([buffer[0], buffer[1]]));
        let body = wire::padded(len);
        if let Err(e) = self.stream.read_exact(&mut buffer[2..body + 4]) {
            return kind_of_end(&e).map(Err);
        }
        let sum = wire::crc32c(&buffer[..body]);
        if buffer[body..body + 4] != sum.to_le_bytes() {
            bail!("the server's CRC is wrong");
        }
        buffer.truncate(2 + len);
        buffer.drain(..2);
        Ok(Ok(buffer))
    }

    fn end_behind(&mut self, code: u16) -> Result<Seen> {
        match self.stream.read(&mut [0; 16]) {
            Ok(0) => Ok(Seen::Terminate(code)),
            Ok(_) => Ok(Seen::Garbage),
            Err(e) => match kind_of_end(&e)? {
                Seen::Ended => Ok(Seen::Terminate(code)),
                other => Ok(other),
            },
        }
    }

    /// Ends the sending direction.
    pub(super) fn half_close(&mut self) -> Result<()> {
        match self.stream.shutdown(Shutdown::Write) {
            Err(e) if e.kind() != ErrorKind::NotConnected => Err(e).context("half-close"),
            _ => Ok(()),
        }
    }
}
