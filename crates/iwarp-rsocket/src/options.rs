//! Socket options (`rsetsockopt`, `rgetsockopt`): their values and encodings. `socket::options`
//! sets and gets them.

use crate::errno::{Errno, Result};
use crate::settings::{MAX_INLINE, Settings, Sizes};
use crate::wire::round_mappings;
use libc::c_int;
use std::time::Duration;

/// Level of the options that only rsockets have.
pub const SOL_RDMA: c_int = 0x10000;
/// Work requests of the send queue.
pub const RDMA_SQSIZE: c_int = 0;
/// Messages that the peer may have in flight.
pub const RDMA_RQSIZE: c_int = 1;
/// Transfers of at most this many bytes bypass the send buffer.
pub const RDMA_INLINE: c_int = 2;
/// Buffers that the peer may map for this end with `riomap`.
pub const RDMA_IOMAPSIZE: c_int = 3;
/// A path record of InfiniBand, which iWARP does not have.
pub const RDMA_ROUTE: c_int = 4;

#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) nonblocking: bool,
    pub(crate) close_on_exec: bool,
    pub(crate) sizes: Sizes,
    pub(crate) only_v6: Option<bool>,
    /// How long `close` waits for the data to be sent. `None`: as long as the peer accepts data.
    /// Zero: `close` resets the connection.
    pub(crate) linger: Option<Duration>,
    pub(crate) receive_timeout: Option<Duration>,
    pub(crate) send_timeout: Option<Duration>,
    pub(crate) keep_alive: bool,
    keep_idle: Option<u32>,
    pub(crate) reuse_address: bool,
    pub(crate) reuse_port: bool,
    pub(crate) oob_inline: bool,
    pub(crate) no_delay: bool,
    pub(crate) tos: c_int,
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

    /// Returns the options that an accepted socket inherits from its listener.
    pub(crate) fn inherited(&self) -> Self {
        // As with accept(2), descriptor flags are not inherited.
        Self {
            nonblocking: false,
            close_on_exec: false,
            keep_alive: false,
            ..self.clone()
        }
    }

    /// Returns the idle time in seconds before a keep-alive message.
    pub(crate) fn keep_alive_idle(&self) -> u32 {
        self.keep_idle.unwrap_or_else(|| {
            std::fs::read_to_string("/proc/sys/net/ipv4/tcp_keepalive_time")
                .ok()
                .and_then(|text| text.trim().parse().ok())
                .filter(|s| *s > 0)
                .unwrap_or(7200)
        })
    }
}

pub(crate) fn parse_int(value: &[u8]) -> Result<c_int> {
    let bytes = value.first_chunk::<4>().ok_or(Errno::INVAL)?;
    Ok(c_int::from_ne_bytes(*bytes))
}

pub(crate) fn parse_time(value: &[u8]) -> Result<Option<Duration>> {
    let half = size_of::<libc::timeval>() / 2;
    let field = |offset: usize| -> Result<u64> {
        let bytes = value.get(offset..offset + half).ok_or(Errno::INVAL)?;
        let mut wide = [0; 8];
        match cfg!(target_endian = "big") {
            true => wide[8 - half..].copy_from_slice(bytes),
            false => wide[..half].copy_from_slice(bytes),
        }
        Ok(u64::from_ne_bytes(wide))
    };
    let (seconds, micros) = (field(0)?, field(half)?);
    if micros >= 1_000_000 {
        return Err(Errno(libc::EDOM));
    }
    let time =
        Duration::from_secs(seconds.min(u64::from(u32::MAX))) + Duration::from_micros(micros);
    Ok((!time.is_zero()).then_some(time))
}

pub(crate) fn encode_time(time: Option<Duration>) -> Vec<u8> {
    let time = time.unwrap_or_default();
    // The widths of both fields differ between C libraries.
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

/// Sets a keep-alive option. Returns `None` if the interval of keep-alive messages does not change,
/// `Some(None)` if they stop, and `Some` with the new interval otherwise.
pub(crate) fn set_keep_alive_option(
    o: &mut Options,
    name: c_int,
    value: &[u8],
) -> Result<Option<Option<Duration>>> {
    if name == libc::SO_KEEPALIVE {
        let on = parse_int(value)? != 0;
        if on == o.keep_alive {
            return Ok(None);
        }
        o.keep_alive = on;
        let interval = Duration::from_secs(u64::from(o.keep_alive_idle()));
        return Ok(Some(on.then_some(interval)));
    }
    let seconds = u32::try_from(parse_int(value)?)
        .ok()
        .filter(|s| *s > 0)
        .ok_or(Errno::INVAL)?;
    o.keep_idle = Some(seconds);
    let interval = Duration::from_secs(u64::from(seconds));
    Ok(o.keep_alive.then_some(Some(interval)))
}

/// Sets an option of level `SOL_RDMA`. Fails with EOPNOTSUPP if the option is unknown, and with
/// EINVAL if the value is too short.
pub(crate) fn set_sizes(sizes: &mut Sizes, name: c_int, value: &[u8]) -> Result<()> {
    let number = || -> Result<u16> {
        Ok(u16::try_from(parse_int(value)?.clamp(0, 0xffff)).unwrap_or(u16::MAX))
    };
    match name {
        RDMA_SQSIZE => sizes.send_queue = number()?,
        RDMA_RQSIZE => sizes.receive_queue = number()?,
        RDMA_INLINE => sizes.inline = number()?.min(MAX_INLINE),
        RDMA_IOMAPSIZE => sizes.mappings = round_mappings(number()?),
        RDMA_ROUTE => {}
        _ => return Err(Errno::NOTSUP),
    }
    Ok(())
}

/// Gets an option of level `SOL_RDMA`. Fails with EOPNOTSUPP if the option is unknown.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// While keep-alive is on, setting either option restarts the messages with the new interval.
    #[test]
    fn keep_alive_follows_both_options() {
        let mut o = Options::new(false, false);
        let mut set =
            |name, value: c_int| set_keep_alive_option(&mut o, name, &value.to_ne_bytes());
        let interval = |seconds| Ok(Some(Some(Duration::from_secs(seconds))));
        let (on, keep_alive_idle) = (libc::SO_KEEPALIVE, libc::TCP_KEEPIDLE);
        assert_eq!(set(keep_alive_idle, 7), Ok(None));
        assert_eq!(set(on, 1), interval(7));
        assert_eq!(set(on, 1), Ok(None));
        assert_eq!(set(keep_alive_idle, 9), interval(9));
        assert_eq!(set(on, 0), Ok(Some(None)));
        assert_eq!(set(keep_alive_idle, 3), Ok(None));
        assert_eq!(set(on, 5), interval(3));
        assert_eq!(set(keep_alive_idle, 0), Err(Errno::INVAL));
    }

    #[test]
    fn timeval_encoding() {
        let full = encode_time(Some(Duration::from_micros(2_000_005)));
        assert_eq!(full.len(), size_of::<libc::timeval>());
        assert_eq!(
            parse_time(&full),
            Ok(Some(Duration::from_micros(2_000_005)))
        );
        assert_eq!(parse_time(&encode_time(None)), Ok(None));
        assert_eq!(parse_time(&full[..4]), Err(Errno::INVAL));
        let bad = [0u64.to_ne_bytes(), 1_000_000u64.to_ne_bytes()].concat();
        assert_eq!(parse_time(&bad), Err(Errno(libc::EDOM)));
        assert_eq!(
            (parse_int(&[1, 0, 0]), parse_int(&7i32.to_ne_bytes())),
            (Err(Errno::INVAL), Ok(7))
        );
    }
}
