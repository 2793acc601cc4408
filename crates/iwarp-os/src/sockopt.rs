//! Socket options that no safe crate reads: the process at the other end of a Unix socket, and
//! TCP's statistics of a connection.
//!
//! Invariant of the `unsafe`: `getsockopt` writes at most the given length of the array. The values
//! are structures of numbers, whose layout is stable (`struct ucred` in `socket.h`, `struct
//! tcp_info` in `linux/tcp.h`).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Length of `struct tcp_info` up to and including `tcpi_total_retrans`. Every kernel since 2.6
/// fills in these fields.
const TCP_INFO_LEN: usize = 104;

/// The process at the other end of a Unix socket, at the time when it connected or started to
/// listen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Process ID in the pid namespace of this process; `None` if the process has none there.
    pub pid: Option<u32>,
    /// Effective user ID.
    pub uid: u32,
}

/// TCP's statistics of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpInfo {
    /// Retransmissions of the oldest segment since the peer's last new acknowledgement.
    pub retransmits_in_a_row: u8,
    /// Unanswered window probes and keep-alive probes.
    pub unanswered_probes: u8,
    /// Retransmission timeout in microseconds.
    pub retransmission_timeout_us: u32,
    /// Time since data were last sent, in milliseconds.
    pub last_data_sent_ms: u32,
    /// Time since the peer's last acknowledgement of any kind, in milliseconds.
    pub last_ack_received_ms: u32,
    /// Maximum segment size for sending, in bytes.
    pub segment_octets: u32,
    /// Segments sent and not acknowledged. For a listening socket: connections that wait to be
    /// accepted.
    pub unacknowledged_segments: u32,
    /// Segments that TCP counts as lost.
    pub lost_segments: u32,
    /// Smoothed round-trip time in microseconds.
    pub rtt_us: u32,
    /// Mean deviation of the round-trip time, in microseconds.
    pub rtt_variation_us: u32,
    /// Congestion window in segments.
    pub congestion_window_segments: u32,
    /// Segments retransmitted since the connection began.
    pub retransmits: u32,
}

/// Reads an option. Fields that an older kernel does not fill in are zero.
fn read<const N: usize>(fd: BorrowedFd<'_>, level: i32, name: i32) -> io::Result<[u8; N]> {
    let mut value = [0u8; N];
    let mut len = N as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `value`, which has that length, and stores
    // the number of bytes in `len`.
    let status = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            level,
            name,
            value.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    if status < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(value)
}

/// Returns the 32-bit number at a byte offset.
fn number(value: &[u8], offset: usize) -> u32 {
    let octets = value.get(offset..).and_then(|rest| rest.first_chunk());
    octets.map_or(0, |octets| u32::from_ne_bytes(*octets))
}

/// Returns the process at the other end of a Unix stream socket.
///
/// # Errors
/// The kernel's error, if it is not a Unix stream socket.
pub fn peer_credentials(fd: impl AsFd) -> io::Result<PeerCredentials> {
    let value: [u8; 12] = read(fd.as_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED)?;
    let pid = number(&value, 0);
    Ok(PeerCredentials {
        // The kernel returns 0 for a process of another pid namespace.
        pid: (pid != 0).then_some(pid),
        uid: number(&value, 4),
    })
}

/// Returns TCP's statistics of a connection.
///
/// # Errors
/// The kernel's error, if it is not a TCP socket.
pub fn tcp_info(fd: impl AsFd) -> io::Result<TcpInfo> {
    let value: [u8; TCP_INFO_LEN] = match cfg!(miri) {
        true => [0; TCP_INFO_LEN],
        false => read(fd.as_fd(), libc::IPPROTO_TCP, libc::TCP_INFO)?,
    };
    Ok(TcpInfo {
        retransmits_in_a_row: value[2],
        unanswered_probes: value[3],
        retransmission_timeout_us: number(&value, 8),
        last_data_sent_ms: number(&value, 44),
        last_ack_received_ms: number(&value, 56),
        segment_octets: number(&value, 16),
        unacknowledged_segments: number(&value, 24),
        lost_segments: number(&value, 32),
        rtt_us: number(&value, 68),
        rtt_variation_us: number(&value, 72),
        congestion_window_segments: number(&value, 80),
        retransmits: number(&value, 100),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    #[test]
    fn peer_is_this_process() {
        let (a, _b) = UnixStream::pair().unwrap();
        let got = peer_credentials(&a).unwrap();
        assert_eq!(got.pid, Some(std::process::id()));
        assert_eq!(got.uid, rustix::process::geteuid().as_raw());
    }

    /// The offsets in `tcp_info` must be those of the kernel. Checks the values that a new
    /// connection has, and compares the other offsets with the C structure.
    #[test]
    fn tcp_info_fields_match_kernel() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        client.write_all(b"x").unwrap();
        server.read_exact(&mut [0]).unwrap();
        let info = tcp_info(&client).unwrap();
        let mss = socket2::SockRef::from(&client).tcp_mss().unwrap();
        assert_eq!(info.segment_octets, mss);
        assert!(
            (1..10_000_000).contains(&info.rtt_us) && info.rtt_variation_us < 10_000_000,
            "{info:?}"
        );
        assert!(
            (1..1000).contains(&info.congestion_window_segments),
            "{info:?}"
        );
        assert!(info.unacknowledged_segments <= 1, "{info:?}");
        // The minimum is 200 ms, unless a route sets another one.
        assert!(
            (1000..120_000_000).contains(&info.retransmission_timeout_us),
            "{info:?}"
        );
        for (offset, field) in [
            (2, std::mem::offset_of!(libc::tcp_info, tcpi_retransmits)),
            (3, std::mem::offset_of!(libc::tcp_info, tcpi_probes)),
            (8, std::mem::offset_of!(libc::tcp_info, tcpi_rto)),
            (
                44,
                std::mem::offset_of!(libc::tcp_info, tcpi_last_data_sent),
            ),
            (56, std::mem::offset_of!(libc::tcp_info, tcpi_last_ack_recv)),
        ] {
            assert_eq!(offset, field);
        }
        assert!(tcp_info(UnixStream::pair().unwrap().0).is_err());
    }
}
