//! Sets and gets the options of a socket.

use super::{Phase, Socket, State};
use crate::errno::{Errno, Result};
use crate::options::{
    RDMA_INLINE, RDMA_IOMAPSIZE, RDMA_RQSIZE, RDMA_SQSIZE, SOL_RDMA, encode_time, get_sizes,
    parse_int, parse_time, set_keep_alive_option, set_sizes,
};
use crate::service;
use crate::settings::clamp_buffer;
use libc::c_int;
use std::sync::Arc;
use std::time::Duration;

/// Sets an option. Fails with EOPNOTSUPP if it is unknown. Fails with EINVAL if the value is too
/// short or out of range, or if the option cannot change after connecting.
pub(crate) fn set(socket: &Arc<Socket>, level: c_int, name: c_int, value: &[u8]) -> Result<()> {
    let keep_alive = socket.with_state(|s| set_locked(s, level, name, value))?;
    match keep_alive {
        Some(interval) => service::keep_alive(socket, interval),
        None => Ok(()),
    }
}

/// Returns the change of keep-alive messages, as [`set_keep_alive_option`] does.
fn set_locked(
    s: &mut State,
    level: c_int,
    name: c_int,
    value: &[u8],
) -> Result<Option<Option<Duration>>> {
    // The buffers and queues of a connection cannot change.
    let fixed = matches!(s.phase, Phase::Connecting(_) | Phase::Connected(_));
    let o = &mut s.options;
    match (level, name) {
        (SOL_RDMA, RDMA_SQSIZE | RDMA_RQSIZE | RDMA_INLINE | RDMA_IOMAPSIZE) if fixed => {
            return Err(Errno::INVAL);
        }
        (SOL_RDMA, _) => set_sizes(&mut o.sizes, name, value)?,
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE) | (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => {
            return set_keep_alive_option(o, name, value);
        }
        (libc::SOL_SOCKET, libc::SO_RCVBUF | libc::SO_SNDBUF) => {
            let size = u32::try_from(parse_int(value)?.max(0)).unwrap_or_default();
            // As on Linux, the reported size is doubled.
            let size = clamp_buffer(size.saturating_mul(2));
            if !fixed {
                match name {
                    libc::SO_RCVBUF => o.sizes.receive_buffer = size,
                    _ => o.sizes.send_buffer = size,
                }
            }
        }
        (libc::SOL_SOCKET, libc::SO_REUSEADDR) => o.reuse_address = parse_int(value)? != 0,
        (libc::SOL_SOCKET, libc::SO_REUSEPORT) => o.reuse_port = parse_int(value)? != 0,
        (libc::SOL_SOCKET, libc::SO_OOBINLINE) => o.oob_inline = parse_int(value)? != 0,
        (libc::SOL_SOCKET, libc::SO_LINGER) => {
            let (on, seconds) = (
                parse_int(value)?,
                parse_int(value.get(4..).ok_or(Errno::INVAL)?)?,
            );
            let seconds = u64::try_from(seconds).map_err(|_| Errno::INVAL)?;
            o.linger = (on != 0).then(|| Duration::from_secs(seconds));
        }
        (libc::SOL_SOCKET, libc::SO_RCVTIMEO) => o.receive_timeout = parse_time(value)?,
        (libc::SOL_SOCKET, libc::SO_SNDTIMEO) => o.send_timeout = parse_time(value)?,
        (libc::IPPROTO_TCP, libc::TCP_NODELAY) => o.no_delay = parse_int(value)? != 0,
        // Accepted without effect: the connection has its own setting.
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
        (libc::IPPROTO_IP, libc::IP_TOS) => o.tos = parse_int(value)?,
        (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) => o.only_v6 = Some(parse_int(value)? != 0),
        _ => return Err(Errno::NOTSUP),
    }
    Ok(None)
}

/// Gets an option. Fails with EOPNOTSUPP if it is unknown.
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
        (libc::SOL_SOCKET, libc::SO_RCVTIMEO) => return Ok(encode_time(o.receive_timeout)),
        (libc::SOL_SOCKET, libc::SO_SNDTIMEO) => return Ok(encode_time(o.send_timeout)),
        (libc::IPPROTO_TCP, libc::TCP_NODELAY) => c_int::from(o.no_delay),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => o.keep_alive_idle() as c_int,
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

/// Returns a `struct tcp_info` with only the state. `iwarp stat` reports statistics.
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
