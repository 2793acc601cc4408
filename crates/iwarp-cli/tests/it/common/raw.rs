//! A client of `iwarp cp` on a plain TCP socket, under the control of the test.

use iwarp_proto::crc32c;
use iwarp_proto::ddp::{Header, Stag, UntaggedHeader};
use iwarp_proto::mpa::framing::{FpduOptions, MarkerClock, encode_fpdu};
use iwarp_proto::rdmap::Opcode;
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};

/// The payload of an FPDU from the server.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Received {
    /// A message of the copy protocol, without its DDP header.
    Message(Vec<u8>),
    /// This many bytes of an RDMA Write.
    Data(usize),
}

/// A connection on which MPA start-up is complete.
pub(crate) struct Raw {
    pub(crate) stream: TcpStream,
    msn: u32,
}

impl Raw {
    /// Connects and performs the MPA start-up of RFC 5044 (revision 1), with CRCs.
    pub(crate) fn connect(at: SocketAddr) -> io::Result<Self> {
        let mut stream = TcpStream::connect(at)?;
        stream.set_read_timeout(Some(super::LIMIT))?;
        stream.write_all(b"MPA ID Req Frame\x40\x01\x00\x00")?;
        let mut reply = [0; 20];
        stream.read_exact(&mut reply)?;
        let mut private_data = vec![0; usize::from(u16::from_be_bytes([reply[18], reply[19]]))];
        stream.read_exact(&mut private_data)?;
        if reply[16] & 0x20 != 0 {
            let why = String::from_utf8_lossy(&private_data).into_owned();
            return Err(io::Error::other(why));
        }
        Ok(Self { stream, msn: 1 })
    }

    pub(crate) fn send(&mut self, message: &[u8]) -> io::Result<()> {
        let mut ulpdu = vec![0; 18];
        let header = Header::Untagged(UntaggedHeader {
            last: true,
            opcode: Opcode::SEND,
            invalidate_stag: Stag(0),
            qn: 0,
            msn: self.msn,
            mo: 0,
        });
        assert_eq!(header.emit(&mut ulpdu), 18);
        self.msn += 1;
        ulpdu.extend_from_slice(message);
        let mut fpdu = vec![0; ulpdu.len() + 16];
        let options = FpduOptions {
            markers: false,
            crc: Some(crc32c::append as _),
        };
        let n = encode_fpdu(&ulpdu, &options, &mut MarkerClock::new(), &mut fpdu)
            .map_err(|e| io::Error::other(format!("{e:?}")))?;
        self.stream.write_all(&fpdu[..n])
    }

    pub(crate) fn receive(&mut self) -> io::Result<Received> {
        let mut head = [0; 2];
        self.stream.read_exact(&mut head)?;
        let len = usize::from(u16::from_be_bytes(head));
        let mut rest = vec![0; (2 + len).next_multiple_of(4) - 2 + 4];
        self.stream.read_exact(&mut rest)?;
        let tagged = rest[0] & 0x80 != 0;
        Ok(if tagged {
            Received::Data(len - 14)
        } else {
            Received::Message(rest[18..len].to_vec())
        })
    }

    /// Reads until a message arrives.
    pub(crate) fn message(&mut self) -> io::Result<Vec<u8>> {
        loop {
            if let Received::Message(m) = self.receive()? {
                return Ok(m);
            }
        }
    }

    /// Exchanges hellos of the copy protocol with the server.
    pub(crate) fn exchange_hellos(&mut self) -> io::Result<()> {
        let hello = [&b"\x01\0IWCP\0\x02\0"[..], &[7; 32]].concat();
        self.send(&hello)?;
        let answer = self.message()?;
        assert_eq!(answer[..8], hello[..8], "the same version");
        Ok(())
    }

    /// Requests a file and grants slots that do not exist.
    pub(crate) fn request_file(
        &mut self,
        path: &str,
        slot_size: u32,
        slots: u16,
    ) -> io::Result<()> {
        let mut m = vec![4, 0];
        m.extend(0u64.to_be_bytes());
        m.extend([0; 32]);
        m.extend(0x1234_5678u32.to_be_bytes());
        m.extend(0u64.to_be_bytes());
        m.extend(slot_size.to_be_bytes());
        m.extend(slots.to_be_bytes());
        m.extend((path.len() as u16).to_be_bytes());
        m.extend(path.as_bytes());
        self.send(&m)
    }
}

/// Returns the resident memory of a process.
pub(crate) fn resident_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    let kib = line.and_then(|l| l.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}
