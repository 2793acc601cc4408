//! Bare framing: sends FPDUs with tagged segments over TCP, and places the payload directly at its
//! destination. This is the upper limit for `iwarp`, because an RNIC must do all of this, and also
//! needs queues, STags, completions and error handling.
//!
//! RFC 5044 section 4 describes the framing, RFC 5041 section 4.2 the tagged segments.

use crate::peer::ReceivingProcess;
use crate::stats::Samples;
use crate::tcp::{self, RECV, finish_flow};
use crate::{OnOff, Time, Wait, cpu};
use anyhow::{Context as _, Result, bail};
use clap::Args;
use crc_fast::{CrcAlgorithm, Digest};
use iwarp_proto::ddp::{Stag, TaggedHeader};
use iwarp_proto::mpa::framing::{MAX_MULPDU, pad_len};
use iwarp_proto::rdmap::Opcode;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, recvmsg, sendmsg,
};
use serde_json::{Value, json};
use std::io::{IoSlice, IoSliceMut};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Length of a tagged header.
const TAGGED: usize = 14;
/// Length of the MPA length field and the tagged header.
const HEAD: usize = 2 + TAGGED;
/// Payload up to this size is copied next to its header.
const LINEAR_MAX: usize = 2048;
/// Number of octets after which `sendmsg` is called.
const SEND: usize = 256 * 1024;
/// Size of the destination. Each message is placed after the previous one.
const TARGET: usize = 1 << 20;
/// Maximum number of FPDUs that one `sendmsg` sends without a copy.
const GATHER: usize = 2 * SEND / LINEAR_MAX;
/// After this many small FPDUs in a row, the receiver no longer expects large FPDUs. The number is
/// above one, because the last FPDU of a long message is often short.
const LARGE_MEMORY: u32 = 8;

#[derive(Debug, Args)]
pub(crate) struct BandwidthArgs {
    /// Octets per message
    #[arg(long)]
    size: usize,
    #[command(flatten)]
    time: Time,
    #[command(flatten)]
    framing: Framing,
    /// Messages per `sendmsg`
    #[arg(long, default_value_t = 1)]
    batch: usize,
}

#[derive(Debug, Args)]
pub(crate) struct LatencyArgs {
    /// Octets per message
    #[arg(long)]
    size: usize,
    /// Round trips; a tenth more are made before, to warm up
    #[arg(long, default_value_t = 10_000)]
    iters: u32,
    /// How both sides wait
    #[arg(long)]
    wait: Wait,
    #[command(flatten)]
    framing: Framing,
}

/// Payload octets of the largest FPDU that RFC 5044 allows. A segment on the loopback interface can
/// contain it.
const FPDU: usize = MAX_MULPDU as usize - TAGGED;

#[derive(Debug, Args)]
pub(crate) struct Framing {
    /// Use CRCs
    #[arg(long)]
    crc: OnOff,
    /// Payload octets per FPDU; the default is the largest that RFC 5044 allows
    #[arg(long, default_value_t = FPDU)]
    fpdu: usize,
}

impl Framing {
    /// Returns options for FPDUs as large as RFC 5044 allows.
    pub(crate) const fn with_crc(crc: OnOff) -> Self {
        Self { crc, fpdu: FPDU }
    }

    fn check(&self, size: usize) -> Result<()> {
        if size == 0 || size > TARGET || self.fpdu == 0 || self.fpdu > FPDU {
            bail!("a message must have 1 to {TARGET} octets, and an FPDU 1 to {FPDU}");
        }
        Ok(())
    }
}

fn crc32c(parts: &[&[u8]]) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    for part in parts {
        digest.update(part);
    }
    digest.finalize() as u32
}

struct Sender<'a> {
    stream: &'a TcpStream,
    crc: bool,
    fpdu: usize,
    source: Vec<u8>,
    /// Copies of complete small FPDUs.
    linear: Vec<u8>,
    /// For each large FPDU: the header, the range of its payload in `source`, and the trailer.
    heads: Vec<[u8; HEAD]>,
    payloads: Vec<(usize, usize)>,
    tails: Vec<([u8; 8], usize)>,
    queued: usize,
    to: u64,
}

impl<'a> Sender<'a> {
    fn new(stream: &'a TcpStream, framing: &Framing, size: usize) -> Self {
        Self {
            stream,
            crc: framing.crc.is_on(),
            fpdu: framing.fpdu,
            source: vec![0x5a; size],
            linear: Vec::with_capacity(SEND + LINEAR_MAX + 64),
            heads: Vec::with_capacity(GATHER),
            payloads: Vec::with_capacity(GATHER),
            tails: Vec::with_capacity(GATHER),
            queued: 0,
            to: 0,
        }
    }

    /// Frames one message. Sends all queued FPDUs once they have [`SEND`] octets.
    fn message(&mut self) -> Result<()> {
        let size = self.source.len();
        if self.to as usize + size > TARGET {
            self.to = 0;
        }
        let mut at = 0;
        while at < size {
            let len = (size - at).min(self.fpdu);
            self.segment(at, len, at + len == size);
            at += len;
            if self.queued >= SEND || self.heads.len() >= GATHER {
                self.flush()?;
            }
        }
        self.to += size as u64;
        Ok(())
    }

    fn segment(&mut self, at: usize, len: usize, last: bool) {
        let mut head = [0; HEAD];
        head[..2].copy_from_slice(&((len + 14) as u16).to_be_bytes());
        TaggedHeader {
            last,
            opcode: Opcode::WRITE,
            stag: Stag(0x1234),
            to: self.to + at as u64,
        }
        .emit(&mut head[2..]);
        let pad = pad_len(14 + len);
        let zeros = [0u8; 3];
        if len <= LINEAR_MAX && self.heads.is_empty() {
            let start = self.linear.len();
            self.linear.extend_from_slice(&head);
            self.linear.extend_from_slice(&self.source[at..at + len]);
            self.linear.extend_from_slice(&zeros[..pad]);
            let crc = if self.crc {
                crc32c(&[&self.linear[start..]])
            } else {
                0
            };
            self.linear.extend_from_slice(&crc.to_le_bytes());
            self.queued += HEAD + len + pad + 4;
            return;
        }
        let crc = if self.crc {
            crc32c(&[&head, &self.source[at..at + len], &zeros[..pad]])
        } else {
            0
        };
        let mut tail = [0; 8];
        tail[pad..pad + 4].copy_from_slice(&crc.to_le_bytes());
        self.heads.push(head);
        self.payloads.push((at, len));
        self.tails.push((tail, pad + 4));
        self.queued += HEAD + len + pad + 4;
    }

    fn flush(&mut self) -> Result<()> {
        if self.heads.is_empty() {
            send_all(self.stream, &mut [IoSlice::new(&self.linear)])?;
        } else {
            let mut list = [IoSlice::new(&[]); 1 + 3 * GATHER];
            list[0] = IoSlice::new(&self.linear);
            let parts = self.heads.iter().zip(&self.payloads).zip(&self.tails);
            for (slot, ((head, &(at, len)), (tail, tail_len))) in
                list[1..].chunks_exact_mut(3).zip(parts)
            {
                slot[0] = IoSlice::new(head);
                slot[1] = IoSlice::new(&self.source[at..at + len]);
                slot[2] = IoSlice::new(&tail[..*tail_len]);
            }
            let n = 1 + 3 * self.heads.len();
            send_all(self.stream, &mut list[..n])?;
        }
        self.linear.clear();
        self.heads.clear();
        self.payloads.clear();
        self.tails.clear();
        self.queued = 0;
        Ok(())
    }
}

fn send_all(stream: &TcpStream, mut list: &mut [IoSlice<'_>]) -> Result<()> {
    IoSlice::advance_slices(&mut list, 0);
    while !list.is_empty() {
        let mut none = SendAncillaryBuffer::default();
        match sendmsg(stream, list, &mut none, SendFlags::NOSIGNAL) {
            Ok(n) => IoSlice::advance_slices(&mut list, n),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e).context("sendmsg"),
        }
    }
    Ok(())
}

struct Receiver<'a> {
    stream: &'a TcpStream,
    crc: bool,
    spin: bool,
    staging: Vec<u8>,
    start: usize,
    end: usize,
    target: Vec<u8>,
    /// Above 0 if one of the last few FPDUs was large. The receiver then expects another large
    /// FPDU, and reads only its header first.
    large: u32,
    first: Option<Instant>,
}

impl<'a> Receiver<'a> {
    fn new(stream: &'a TcpStream, crc: bool, spin: bool) -> Self {
        Self {
            stream,
            crc,
            spin,
            staging: vec![1; RECV],
            start: 0,
            end: 0,
            target: vec![1; TARGET],
            large: 0,
            first: None,
        }
    }

    /// Places the next FPDUs. Returns the number of payload octets placed, which is 0 if more
    /// octets must be read, or `None` at the end of the stream.
    fn place_next(&mut self) -> Result<Option<usize>> {
        let mut placed = 0;
        while self.end - self.start >= HEAD {
            let have = &self.staging[self.start..self.end];
            let len = usize::from(u16::from_be_bytes([have[0], have[1]]))
                .checked_sub(14)
                .context("received an FPDU without a DDP header")?;
            let header = TaggedHeader::decode(&have[2..]).context("not a tagged segment")?;
            let to = header.to as usize;
            if to + len > TARGET {
                bail!("received a segment outside of the destination");
            }
            let body = HEAD + len + pad_len(14 + len);
            if have.len() >= body + 4 {
                if self.crc {
                    check(&have[body..body + 4], &[&have[..body]])?;
                }
                self.target[to..to + len].copy_from_slice(&have[HEAD..HEAD + len]);
                self.start += body + 4;
                placed += len;
                self.large = match len {
                    0..=LINEAR_MAX => self.large.saturating_sub(1),
                    _ => LARGE_MEMORY,
                };
            } else if len > LINEAR_MAX {
                let Some(n) = self.read_directly(to, len)? else {
                    return Ok(None);
                };
                placed += n;
            } else {
                break;
            }
        }
        if placed > 0 {
            return Ok(Some(placed));
        }
        self.staging.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        let room = match (self.large > 0, self.end) {
            (true, have @ 0..HEAD) => HEAD - have,
            (true, _) => 4096,
            (false, have) => RECV - have,
        };
        let range = self.end..self.end + room;
        let n = tcp::recv_some(self.stream, &mut self.staging[range], self.spin)?;
        if n == 0 {
            return Ok(None);
        }
        self.first.get_or_insert_with(Instant::now);
        self.end += n;
        Ok(Some(0))
    }

    /// Reads the rest of the FPDU that begins at `start` in `staging`, with its payload directly to
    /// offset `to` of `target`. Returns the payload's length, or `None` at the end of the stream.
    fn read_directly(&mut self, to: usize, len: usize) -> Result<Option<usize>> {
        let mut head = [0; HEAD];
        head.copy_from_slice(&self.staging[self.start..self.start + HEAD]);
        let from = self.start + HEAD;
        let mut got = (self.end - from).min(len);
        self.target[to..to + got].copy_from_slice(&self.staging[from..from + got]);
        self.staging.copy_within(from + got..self.end, 0);
        self.end -= from + got;
        self.start = 0;
        let tail = pad_len(14 + len) + 4;
        while got < len || self.end < tail {
            // Read the trailer together with the next header, which saves a system call.
            let after_payload = &mut self.staging[self.end..tail + HEAD];
            let mut list = [
                IoSliceMut::new(&mut self.target[to + got..to + len]),
                IoSliceMut::new(after_payload),
            ];
            let flags = if self.spin {
                RecvFlags::DONTWAIT
            } else {
                RecvFlags::empty()
            };
            let mut none = RecvAncillaryBuffer::default();
            match recvmsg(self.stream, &mut list, &mut none, flags) {
                Ok(m) if m.bytes == 0 => return Ok(None),
                Ok(m) => {
                    let direct = m.bytes.min(len - got);
                    got += direct;
                    self.end += m.bytes - direct;
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(e) => return Err(e).context("recvmsg"),
            }
        }
        if self.crc {
            let (pad, crc) = self.staging[..tail].split_at(tail - 4);
            check(crc, &[&head, &self.target[to..to + len], pad])?;
        }
        self.start = tail;
        self.large = LARGE_MEMORY;
        Ok(Some(len))
    }

    /// Receives and places `size` octets. Returns `false` at the end of the stream.
    fn message(&mut self, size: usize) -> Result<bool> {
        let mut got = 0;
        while got < size {
            match self.place_next()? {
                Some(n) => got += n,
                None => return Ok(false),
            }
        }
        Ok(true)
    }
}

fn check(field: &[u8], parts: &[&[u8]]) -> Result<()> {
    if crc32c(parts).to_le_bytes() != field {
        bail!("received a wrong CRC");
    }
    Ok(())
}

pub(crate) fn bandwidth(a: &BandwidthArgs) -> Result<Value> {
    a.framing.check(a.size)?;
    let mut peer = ReceivingProcess::start()?;
    let stream = tcp::connect(peer.address()?, true)?;
    let mut sender = Sender::new(&stream, &a.framing, a.size);
    let cpu0 = cpu::process_us();
    let end = Instant::now() + Duration::from_millis(a.time.ms);
    let mut since_clock = 0;
    loop {
        for _ in 0..a.batch {
            sender.message()?;
        }
        sender.flush()?;
        since_clock += a.batch * (a.size + 2048);
        if since_clock >= 64 * 1024 {
            since_clock = 0;
            if Instant::now() >= end {
                break;
            }
        }
    }
    let tx_cpu_us = cpu::process_us() - cpu0;
    rustix::net::shutdown(&stream, Shutdown::Write)?;
    finish_flow(&mut peer, a.size, tx_cpu_us)
}

pub(crate) fn bandwidth_peer(a: &BandwidthArgs) -> Result<Value> {
    let stream = tcp::accept(true)?;
    let cpu0 = cpu::process_us();
    let mut receiver = Receiver::new(&stream, a.framing.crc.is_on(), false);
    let mut bytes = 0;
    while let Some(n) = receiver.place_next()? {
        bytes += n;
    }
    let ns = receiver.first.map_or(0, |t| t.elapsed().as_nanos() as u64);
    Ok(json!({ "bytes": bytes, "ns": ns, "cpu_us": cpu::process_us() - cpu0 }))
}

pub(crate) struct PingPong<'a> {
    sender: Sender<'a>,
    receiver: Receiver<'a>,
    size: usize,
}

impl<'a> PingPong<'a> {
    pub(crate) fn new(stream: &'a TcpStream, framing: &Framing, size: usize, wait: Wait) -> Self {
        Self {
            sender: Sender::new(stream, framing, size),
            receiver: Receiver::new(stream, framing.crc.is_on(), wait == Wait::Spin),
            size,
        }
    }

    /// Sends a message and waits for the answer.
    pub(crate) fn ask(&mut self) -> Result<()> {
        self.sender.message()?;
        self.sender.flush()?;
        if !self.receiver.message(self.size)? {
            bail!("the receiver closed the connection");
        }
        Ok(())
    }

    /// Waits for a message and answers it. Returns `false` at the end of the stream.
    pub(crate) fn answer(&mut self) -> Result<bool> {
        if !self.receiver.message(self.size)? {
            return Ok(false);
        }
        self.sender.message()?;
        self.sender.flush()?;
        Ok(true)
    }
}

/// Runs the process that measures the time.
pub(crate) fn latency(a: &LatencyArgs) -> Result<Value> {
    a.framing.check(a.size)?;
    let mut peer = ReceivingProcess::start()?;
    let stream = tcp::connect(peer.address()?, true)?;
    let mut end = PingPong::new(&stream, &a.framing, a.size, a.wait);
    Ok(Samples::of(a.iters.into(), || end.ask())?.report())
}

pub(crate) fn latency_peer(a: &LatencyArgs) -> Result<Value> {
    let stream = tcp::accept(true)?;
    let mut end = PingPong::new(&stream, &a.framing, a.size, a.wait);
    while end.answer()? {}
    Ok(json!({}))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpListener};

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (a, listener.accept().unwrap().0)
    }

    #[test]
    fn messages_of_all_sizes_arrive_complete() {
        for crc in [OnOff::On, OnOff::Off] {
            for (size, fpdu, count) in [
                (1, FPDU, 300),
                (64, FPDU, 1000),
                (3000, 1408, 100),
                (65536, FPDU, 20),
                (1 << 20, FPDU, 5),
                (100_003, 16_384, 9),
            ] {
                let (a, b) = pair();
                let framing = Framing { crc, fpdu };
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        let mut sender = Sender::new(&a, &framing, size);
                        for (i, octet) in sender.source.iter_mut().enumerate() {
                            *octet = (i * 7) as u8;
                        }
                        for _ in 0..count {
                            sender.message().unwrap();
                        }
                        sender.flush().unwrap();
                    });
                    let mut receiver = Receiver::new(&b, crc.is_on(), false);
                    assert!(receiver.message(size * count).unwrap());
                    let first: Vec<u8> = (0..size).map(|i| (i * 7) as u8).collect();
                    assert_eq!(receiver.target[..size], first[..]);
                    assert_eq!(receiver.start, receiver.end);
                });
            }
        }
    }

    #[test]
    fn changed_byte_is_detected() {
        let (a, b) = pair();
        let framing = Framing {
            crc: OnOff::On,
            fpdu: FPDU,
        };
        let mut sender = Sender::new(&a, &framing, 64);
        sender.message().unwrap();
        sender.linear[20] ^= 1;
        sender.flush().unwrap();
        let mut receiver = Receiver::new(&b, true, false);
        assert!(
            receiver
                .message(64)
                .unwrap_err()
                .to_string()
                .contains("CRC")
        );
    }
}
