//! Socket options (`rsetsockopt`, `rgetsockopt`).

use crate::errno::{Errno, Result};
use crate::service;
use crate::settings::{MAX_INLINE, Settings, Sizes, bounded_buffer};
use crate::socket::{Phase, Socket, State};
use crate::wire::round_mappings;
use libc::c_int;
use std::sync::Arc;
use std::time::Duration;

/// Level of the options that only rsockets have.
pub const SOL_RDMA: c_int = 0x10000;
/// Work requests of the send queue.
pub const RDMA_SQSIZE: c_int = 0;
/// Messages that the peer may have under way.
pub const RDMA_RQSIZE: c_int = 1;
/// Transfers of up to so many octets skip the send buffer.
pub const RDMA_INLINE: c_int = 2;
/// Buffers that the peer may map for us with `riomap`.
pub const RDMA_IOMAPSIZE: c_int = 3;
/// A path record of InfiniBand. iWARP has none.
pub const RDMA_ROUTE: c_int = 4;

/// The options of a socket.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) nonblocking: bool,
    pub(crate) close_on_exec: bool,
    pub(crate) sizes: Sizes,
    pub(crate) only_v6: Option<bool>,
    /// `None`: closing waits as long as octets move; zero: it resets.
    pub(crate) linger: Option<Duration>,
    pub(crate) receive_timeout: Option<Duration>,
    pub(crate) send_timeout: Option<Duration>,
    keep_alive: bool,
    keep_idle: Option<u32>,
    pub(crate) reuse_address: bool,
    reuse_port: bool,
    oob_inline: bool,
    no_delay: bool,
    tos: c_int,
}

impl Options {
    pub(crate) fn new(nonblocking: bool, close_on_exec: bool) -> Self {
        Self {
            nonblocking,
            close_on_exec,
            sizes: Settings::get().sizes,
            only_v6: None,
            linger: None,
            receive_timeout: None,
            send_timeout: None,
            keep_alive: false,
            keep_idle: None,
            reuse_address: false,
            reuse_port: false,
            oob_inline: false,
            no_delay: false,
            tos: 0,
        }
    }

    /// Returns the options that an accepted socket takes from its listener.
    pub(crate) fn inherited(&self) -> Self {
        // The flags of the descriptor are not inherited, as with accept(2).
        Self {
            nonblocking: false,
            close_on_exec: false,
            keep_alive: false,
            ..self.clone()
        }
    }

    /// Seconds of silence before a message of `SO_KEEPALIVE`.
    fn idle(&self) -> u32 {
        self.keep_idle.unwrap_or_else(|| {
            std::fs::read_to_string("/proc/sys/net/ipv4/tcp_keepalive_time")
                .ok()
                .and_then(|text| text.trim().parse().ok())
                .filter(|s| *s > 0)
                .unwrap_or(7200)
        })
    }
}

fn int(value: &[u8]) -> Result<c_int> {
    let bytes = value.first_chunk::<4>().ok_or(Errno::INVAL)?;
    Ok(c_int::from_ne_bytes(*bytes))
}

/// Reads two numbers of a machine word each, as in `struct timeval`.
fn time(value: &[u8]) -> Result<Option<Duration>> {
    let half = size_of::<libc::timeval>() / 2;
    let part = |at: usize| -> Result<u64> {
        let bytes = value.get(at..at + half).ok_or(Errno::INVAL)?;
        let mut wide = [0; 8];
        match cfg!(target_endian = "big") {
            true => wide[8 - half..].copy_from_slice(bytes),
            false => wide[..half].copy_from_slice(bytes),
        }
        Ok(u64::from_ne_bytes(wide))
    };
    let (seconds, micros) = (part(0)?, part(half)?);
    if micros >= 1_000_000 {
        return Err(Errno(libc::EDOM));
    }
    let time =
        Duration::from_secs(seconds.min(u64::from(u32::MAX))) + Duration::from_micros(micros);
    Ok((!time.is_zero()).then_some(time))
}

fn put_time(time: Option<Duration>) -> Vec<u8> {
    let time = time.unwrap_or_default();
    // The widths of both differ between C libraries.
    let value = libc::timeval {
        tv_sec: time.as_secs() as _,
        tv_usec: time.subsec_micros() as _,
    };
    [
        value.tv_sec.to_ne_bytes().as_slice(),
        &value.tv_usec.to_ne_bytes(),
    ]
    .concat()
}

/// Sets an option.
///
/// # Errors
/// EOPNOTSUPP: not known; EINVAL: too short, out of range, or too late.
pub(crate) fn set(socket: &Arc<Socket>, level: c_int, name: c_int, value: &[u8]) -> Result<()> {
    let alive = socket.with_state(|s| set_locked(s, level, name, value))?;
    match alive {
        Some(every) => service::keep_alive(socket, every),
        None => Ok(()),
    }
}

/// Returns `Some` if the keep-alive messages change.
fn set_locked(
    s: &mut State,
    level: c_int,
    name: c_int,
    value: &[u8],
) -> Result<Option<Option<Duration>>> {
    // Buffers and queues cannot change once they are made.
    let fixed = matches!(s.phase, Phase::Connecting(_) | Phase::Connected(_));
    let o = &mut s.options;
    match (level, name) {
        (SOL_RDMA, RDMA_SQSIZE | RDMA_RQSIZE | RDMA_INLINE | RDMA_IOMAPSIZE) if fixed => {
            return Err(Errno::INVAL);
        }
        (SOL_RDMA, _) => set_sizes(&mut o.sizes, name, value)?,
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE) | (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => {
            return set_keep_alive(o, name, value);
        }
        (libc::SOL_SOCKET, libc::SO_RCVBUF | libc::SO_SNDBUF) => {
            let size = u32::try_from(int(value)?.max(0)).unwrap_or_default();
            // Twice as much is reported, as on Linux.
            let size = bounded_buffer(size.saturating_mul(2));
            if !fixed {
                match name {
                    libc::SO_RCVBUF => o.sizes.receive_buffer = size,
                    _ => o.sizes.send_buffer = size,
                }
            }
        }
        (libc::SOL_SOCKET, libc::SO_REUSEADDR) => o.reuse_address = int(value)? != 0,
        (libc::SOL_SOCKET, libc::SO_REUSEPORT) => o.reuse_port = int(value)? != 0,
        (libc::SOL_SOCKET, libc::SO_OOBINLINE) => o.oob_inline = int(value)? != 0,
        (libc::SOL_SOCKET, libc::SO_LINGER) => {
            let (on, seconds) = (int(value)?, int(value.get(4..).ok_or(Errno::INVAL)?)?);
            let seconds = u64::try_from(seconds).map_err(|_| Errno::INVAL)?;
            o.linger = (on != 0).then(|| Duration::from_secs(seconds));
        }
        (libc::SOL_SOCKET, libc::SO_RCVTIMEO) => o.receive_timeout = time(value)?,
        (libc::SOL_SOCKET, libc::SO_SNDTIMEO) => o.send_timeout = time(value)?,
        (libc::IPPROTO_TCP, libc::TCP_NODELAY) => o.no_delay = int(value)? != 0,
        // Accepted without effect: the connection below has its own.
        (
            libc::IPPROTO_TCP,
            libc::TCP_MAXSEG
            | libc::TCP_CONGESTION
            | libc::TCP_KEEPCNT
            | libc::TCP_KEEPINTVL
            | libc::TCP_CORK
            | libc::TCP_QUICKACK
            | libc::TCP_USER_TIMEOUT,
        )
        | (libc::SOL_SOCKET, libc::SO_PRIORITY | libc::SO_BROADCAST)
        | (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {}
        (libc::IPPROTO_IP, libc::IP_TOS) => o.tos = int(value)?,
        (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) => o.only_v6 = Some(int(value)? != 0),
        _ => return Err(Errno::NOTSUP),
    }
    Ok(None)
}

/// Sets what keeps an idle connection alive. Returns as [`set_locked`] does.
fn set_keep_alive(o: &mut Options, name: c_int, value: &[u8]) -> Result<Option<Option<Duration>>> {
    if name == libc::SO_KEEPALIVE {
        let on = int(value)? != 0;
        if on == o.keep_alive {
            return Ok(None);
        }
        o.keep_alive = on;
        let every = Duration::from_secs(u64::from(o.idle()));
        return Ok(Some(on.then_some(every)));
    }
    let seconds = u32::try_from(int(value)?)
        .ok()
        .filter(|s| *s > 0)
        .ok_or(Errno::INVAL)?;
    o.keep_idle = Some(seconds);
    let every = Duration::from_secs(u64::from(seconds));
    Ok(o.keep_alive.then_some(Some(every)))
}

/// Sets an option of level `SOL_RDMA`.
///
/// # Errors
/// EOPNOTSUPP: not known; EINVAL: too short.
pub(crate) fn set_sizes(sizes: &mut Sizes, name: c_int, value: &[u8]) -> Result<()> {
    let number =
        || -> Result<u16> { Ok(u16::try_from(int(value)?.clamp(0, 0xffff)).unwrap_or(u16::MAX)) };
    match name {
        RDMA_SQSIZE => sizes.send_queue = number()?,
        RDMA_RQSIZE => sizes.receive_queue = number()?,
        RDMA_INLINE => sizes.inline = number()?.min(MAX_INLINE),
        RDMA_IOMAPSIZE => sizes.mappings = round_mappings(number()?),
        // The route is that of the kernel's routing table.
        RDMA_ROUTE => {}
        _ => return Err(Errno::NOTSUP),
    }
    Ok(())
}

/// Gets an option of level `SOL_RDMA`.
///
/// # Errors
/// EOPNOTSUPP: not known.
pub(crate) fn get_sizes(sizes: &Sizes, name: c_int) -> Result<Vec<u8>> {
    let number = match name {
        RDMA_SQSIZE => sizes.send_queue,
        RDMA_RQSIZE => sizes.receive_queue,
        RDMA_INLINE => sizes.inline,
        RDMA_IOMAPSIZE => sizes.mappings,
        RDMA_ROUTE => return Ok(Vec::new()),
        _ => return Err(Errno::NOTSUP),
    };
    Ok(c_int::from(number).to_ne_bytes().to_vec())
}

/// Gets an option.
///
/// # Errors
/// EOPNOTSUPP: not known.
pub(crate) fn get(socket: &Socket, level: c_int, name: c_int) -> Result<Vec<u8>> {
    socket.with_state(|s| {
        socket.pump(s, true);
        get_locked(socket, s, level, name)
    })
}

fn get_locked(socket: &Socket, s: &mut State, level: c_int, name: c_int) -> Result<Vec<u8>> {
    let o = &s.options;
    let sizes = match &s.phase {
        Phase::Connecting(stream) | Phase::Connected(stream) => *stream.sizes(),
        _ => o.sizes,
    };
    let number = match (level, name) {
        (libc::SOL_SOCKET, libc::SO_ERROR) => s.take_error().map_or(0, |e| e.0),
        (libc::SOL_SOCKET, libc::SO_RCVBUF) => sizes.receive_buffer as c_int,
        (libc::SOL_SOCKET, libc::SO_SNDBUF) => sizes.send_buffer as c_int,
        (libc::SOL_SOCKET, libc::SO_REUSEADDR) => c_int::from(o.reuse_address),
        (libc::SOL_SOCKET, libc::SO_REUSEPORT) => c_int::from(o.reuse_port),
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => c_int::from(o.keep_alive),
        (libc::SOL_SOCKET, libc::SO_OOBINLINE) => c_int::from(o.oob_inline),
        (libc::SOL_SOCKET, libc::SO_TYPE) => libc::SOCK_STREAM,
        (libc::SOL_SOCKET, libc::SO_DOMAIN) => socket.domain,
        (libc::SOL_SOCKET, libc::SO_PROTOCOL) => libc::IPPROTO_TCP,
        (libc::SOL_SOCKET, libc::SO_ACCEPTCONN) => {
            c_int::from(matches!(s.phase, Phase::Listening(_)))
        }
        (libc::SOL_SOCKET, libc::SO_BROADCAST | libc::SO_PRIORITY) => 0,
        (libc::SOL_SOCKET, libc::SO_LINGER) => {
            let seconds = o.linger.map_or(0, |l| l.as_secs() as c_int);
            let on = c_int::from(o.linger.is_some());
            return Ok([on.to_ne_bytes(), seconds.to_ne_bytes()].concat());
        }
        (libc::SOL_SOCKET, libc::SO_RCVTIMEO) => return Ok(put_time(o.receive_timeout)),
        (libc::SOL_SOCKET, libc::SO_SNDTIMEO) => return Ok(put_time(o.send_timeout)),
        (libc::IPPROTO_TCP, libc::TCP_NODELAY) => c_int::from(o.no_delay),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => o.idle() as c_int,
        (libc::IPPROTO_TCP, libc::TCP_KEEPCNT | libc::TCP_KEEPINTVL) => 1,
        (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => match &s.phase {
            Phase::Connected(stream) => {
                let mtu = stream.qp.context().device().mtu;
                c_int::try_from(mtu.saturating_sub(60)).unwrap_or(c_int::MAX)
            }
            _ => 536,
        },
        (libc::IPPROTO_TCP, libc::TCP_CONGESTION) => return Ok(b"iwarp\0".to_vec()),
        (libc::IPPROTO_TCP, libc::TCP_INFO) => return Ok(tcp_info(s)),
        (libc::IPPROTO_IP, libc::IP_TOS) => o.tos,
        (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) => c_int::from(o.only_v6.unwrap_or(false)),
        (SOL_RDMA, _) => return get_sizes(&sizes, name),
        _ => return Err(Errno::NOTSUP),
    };
    Ok(number.to_ne_bytes().to_vec())
}

/// Reports the state and nothing else. Programs read it for statistics, which this library offers elsewhere.
fn tcp_info(s: &State) -> Vec<u8> {
    const ESTABLISHED: u8 = 1;
    const CLOSED: u8 = 7;
    const LISTENING: u8 = 10;
    let mut info = vec![0; 104];
    info[0] = match &s.phase {
        Phase::Connected(stream) if !stream.is_over() => ESTABLISHED,
        Phase::Listening(_) => LISTENING,
        _ => CLOSED,
    };
    info
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whichever of both options is set first, and at each later change, the messages begin anew with the time that holds then.
    #[test]
    fn keep_alive_follows_both_options() {
        let mut o = Options::new(false, false);
        let mut set = |name, value: c_int| set_keep_alive(&mut o, name, &value.to_ne_bytes());
        let every = |seconds| Ok(Some(Some(Duration::from_secs(seconds))));
        let (on, idle) = (libc::SO_KEEPALIVE, libc::TCP_KEEPIDLE);
        assert_eq!(set(idle, 7), Ok(None));
        assert_eq!(set(on, 1), every(7));
        assert_eq!(set(on, 1), Ok(None));
        assert_eq!(set(idle, 9), every(9));
        assert_eq!(set(on, 0), Ok(Some(None)));
        assert_eq!(set(idle, 3), Ok(None));
        assert_eq!(set(on, 5), every(3));
        assert_eq!(set(idle, 0), Err(Errno::INVAL));
    }

    #[test]
    fn times() {
        let full = put_time(Some(Duration::from_micros(2_000_005)));
        assert_eq!(full.len(), size_of::<libc::timeval>());
        assert_eq!(time(&full), Ok(Some(Duration::from_micros(2_000_005))));
        assert_eq!(time(&put_time(None)), Ok(None));
        assert_eq!(time(&full[..4]), Err(Errno::INVAL));
        let bad = [0u64.to_ne_bytes(), 1_000_000u64.to_ne_bytes()].concat();
        assert_eq!(time(&bad), Err(Errno(libc::EDOM)));
        assert_eq!(
            (int(&[1, 0, 0]), int(&7i32.to_ne_bytes())),
            (Err(Errno::INVAL), Ok(7))
        );
    }
}
