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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
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
    read(fd.as_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED).map(|value| credentials(&value))
}

fn credentials(value: &[u8; 12]) -> PeerCredentials {
    let pid = number(value, 0);
    PeerCredentials {
        // The kernel returns 0 for a process of another pid namespace.
        pid: (pid != 0).then_some(pid),
        uid: number(value, 4),
    }
}

/// Returns TCP's statistics of a connection.
///
/// # Errors
/// The kernel's error, if it is not a TCP socket.
pub fn tcp_info(fd: impl AsFd) -> io::Result<TcpInfo> {
    if cfg!(miri) {
        return Ok(TcpInfo::default());
    }
    read(fd.as_fd(), libc::IPPROTO_TCP, libc::TCP_INFO).map(|value| statistics(&value))
}

fn statistics(value: &[u8; TCP_INFO_LEN]) -> TcpInfo {
    TcpInfo {
        retransmits_in_a_row: value[2],
        unanswered_probes: value[3],
        retransmission_timeout_us: number(value, 8),
        last_data_sent_ms: number(value, 44),
        last_ack_received_ms: number(value, 56),
        segment_octets: number(value, 16),
        unacknowledged_segments: number(value, 24),
        lost_segments: number(value, 32),
        rtt_us: number(value, 68),
        rtt_variation_us: number(value, 72),
        congestion_window_segments: number(value, 80),
        retransmits: number(value, 100),
    }
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

    #[test]
    fn process_of_another_namespace_has_no_id() {
        let value = [0, 7, 8].map(u32::to_ne_bytes).concat();
        let expected = PeerCredentials { pid: None, uid: 7 };
        assert_eq!(credentials(value[..].try_into().unwrap()), expected);
    }

    /// The offsets in `tcp_info` are those of the C structure.
    #[test]
    fn tcp_info_has_the_c_layout() {
        macro_rules! offsets {
            ($($field:ident)*) => { [$(std::mem::offset_of!(libc::tcp_info, $field)),*] };
        }
        let mut value = [0; TCP_INFO_LEN];
        let octets = offsets!(tcpi_retransmits tcpi_probes);
        for (n, at) in (1..).zip(octets) {
            value[at] = n;
        }
        let numbers = offsets!(
            tcpi_rto tcpi_last_data_sent tcpi_last_ack_recv tcpi_snd_mss tcpi_unacked tcpi_lost
            tcpi_rtt tcpi_rttvar tcpi_snd_cwnd tcpi_total_retrans
        );
        for (n, at) in (3u32..).zip(numbers) {
            value[at..at + 4].copy_from_slice(&n.to_ne_bytes());
        }
        let expected = TcpInfo {
            retransmits_in_a_row: 1,
            unanswered_probes: 2,
            retransmission_timeout_us: 3,
            last_data_sent_ms: 4,
            last_ack_received_ms: 5,
            segment_octets: 6,
            unacknowledged_segments: 7,
            lost_segments: 8,
            rtt_us: 9,
            rtt_variation_us: 10,
            congestion_window_segments: 11,
            retransmits: 12,
        };
        assert_eq!(statistics(&value), expected);
    }

    /// Checks the values that a new connection has.
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
        assert!(tcp_info(UnixStream::pair().unwrap().0).is_err());
    }
}
