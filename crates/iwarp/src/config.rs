//! Settings of a device, from code or from the environment.

use crate::complain;
use std::cell::RefCell;
use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

/// What a Send meets when the receiver has posted no receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReceiverNotReady {
    /// The stream is held until a receive is posted, for at most this long. TCP's flow control makes this lossless.
    /// This is the default, because programs written for InfiniBand rely on its receiver-not-ready retry.
    /// Short enough for programs that post no more receives and wait for their peer's disconnect: that comes behind what is
    /// held, and their peer's next connection often waits for 5 s.
    Hold(Duration),
    /// The stream is terminated, as RFC 5041 section 7.1 has it.
    Terminate,
}

/// Whether TCP segments begin with FPDUs and hold whole ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alignment {
    /// Where segments are those of a network, and not where loopback has them as large as FPDUs. This is the default.
    Auto,
    /// Always.
    On,
    /// Never: fewer and larger system calls for messages of medium size.
    Off,
}

impl Alignment {
    /// A network's segments are shorter; loopback's have 64 KiB unless it was changed.
    const NETWORK_MSS_MAX: u32 = 16 * 1024;

    /// For segments of `mss` octets.
    pub(crate) const fn applies(self, mss: u32) -> bool {
        match self {
            Self::Auto => mss <= Self::NETWORK_MSS_MAX,
            Self::On => true,
            Self::Off => false,
        }
    }
}

/// Settings of an opened device. [`Config::from_env`] reads them from `IWARP_*` variables.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Config {
    /// Ask for CRCs (`IWARP_CRC=on|off`; default on). They are used if either side asks (RFC 5044 section 7.1).
    pub crc: bool,
    /// Ask the peer for markers in what it sends (`IWARP_MARKERS=on|off`; default off).
    pub markers: bool,
    /// MPA revision to initiate with, 1 or 2 (`IWARP_MPA_REV`; default 2, falling back to 1 if the peer closes).
    pub mpa_revision: u8,
    /// Initiate in the peer-to-peer model of RFC 6581 (`IWARP_PEER_TO_PEER=on|off`; default on).
    pub peer_to_peer: bool,
    /// See [`ReceiverNotReady`] (`IWARP_RNR_TIMEOUT_MS`; 0 terminates; default 2000).
    pub receiver_not_ready: ReceiverNotReady,
    /// How long a peer may take to send its MPA request (`IWARP_MPA_TIMEOUT_MS`; default 5000 ms), and twice that for its reply.
    pub handshake_timeout: Duration,
    /// As responder in the client-server model: how long to wait for the initiator's first message before sending without it
    /// (`IWARP_SPEAK_FIRST_MS`; 0: wait for ever, as RFC 5044 section 7.1.2 has it; default 200 ms). Programs whose
    /// server speaks first would wait for ever with initiators that do not ask for peer-to-peer, as siw.
    pub speak_first: Option<Duration>,
    /// How long a closed connection waits for the peer to close, too (`IWARP_LINGER_MS`; default 5000 ms).
    pub linger: Duration,
    /// Write all streams to this pcapng file (`IWARP_CAPTURE`).
    pub capture: Option<PathBuf>,
    /// At most this many octets of it (`IWARP_CAPTURE_BYTES`).
    pub capture_bytes: Option<u64>,
    /// FPDUs are cut for this maximum segment size if it is smaller than TCP's (`IWARP_MSS`).
    pub mss: Option<u32>,
    /// Keep FPDUs aligned with TCP segments (`IWARP_ALIGN=auto|on|off`; default auto). Hardware needs it, and siw with CRC.
    pub align: Alignment,
    /// How long a thread that expects its completion soon polls before it sleeps (`IWARP_BUSY_POLL_US`; 0: never; default
    /// 100 µs, at most 1000). Only blocking waits do so, and only after short waits; see [`CompletionQueue::wait`](crate::raw::CompletionQueue::wait).
    pub busy_poll: Duration,
    /// For programs on the C libraries: copy what is sent before its CRC is computed, because they may change it meanwhile
    /// (`IWARP_SNAPSHOT=on|off`; default on). See [`QueuePair::set_snapshot`](crate::raw::QueuePair::set_snapshot).
    pub snapshot: bool,
    /// Ask the peer's port mapper behind which TCP port a listener is, at this UDP port; hardware may be in need of it
    /// (`IWARP_PORT_MAPPER=on|off|PORT`; default off, `on` is 3935).
    pub port_mapper: Option<u16>,
    /// Sends and Writes complete when the peer has placed them, as on InfiniBand, and not already when TCP has taken them
    /// (`IWARP_PLACED=on|off`; default off). For programs that look at the peer's memory as soon as a Write is complete. It
    /// costs a zero-length RDMA Read for each burst. Queue pairs that are connected by number always do so.
    pub placed: bool,
    /// Print counters to standard error when the process ends (`IWARP_STATS=on|off`; default off).
    pub stats: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            crc: true,
            markers: false,
            mpa_revision: 2,
            peer_to_peer: true,
            receiver_not_ready: ReceiverNotReady::Hold(Duration::from_secs(2)),
            handshake_timeout: Duration::from_secs(5),
            speak_first: Some(Duration::from_millis(200)),
            linger: Duration::from_secs(5),
            capture: None,
            capture_bytes: None,
            mss: None,
            align: Alignment::Auto,
            port_mapper: None,
            busy_poll: Duration::from_micros(100),
            snapshot: true,
            placed: false,
            stats: false,
        }
    }
}

impl Config {
    /// Where port mappers listen.
    pub(crate) const PORT_MAPPER_PORT: u16 = 3935;
    /// Longer windows than this are CPU time for nothing.
    const BUSY_POLL_MAX_US: u64 = 1000;

    /// The defaults, changed by the `IWARP_*` environment variables. A value that cannot be understood is ignored, and
    /// reported once: by a `tracing` warning, or on standard error in a program without a subscriber.
    pub fn from_env() -> Self {
        let (config, complaints) = Self::from_lookup(|name| std::env::var_os(name));
        complaints.into_iter().for_each(complain::once);
        config
    }

    /// The settings, and what is wrong with the values.
    fn from_lookup(get: impl Fn(&str) -> Option<OsString>) -> (Self, Vec<String>) {
        let mut c = Self::default();
        let complaints = RefCell::new(Vec::new());
        let complain = |text: String| complaints.borrow_mut().push(text);
        // What is set to nothing is not set.
        let path = |name: &str| get(name).filter(|value| !value.is_empty());
        let get = |name: &str| path(name).map(|value| value.to_string_lossy().into_owned());
        let switch = |name: &str, default: bool| match get(name).as_deref() {
            None => default,
            Some("on" | "1" | "yes" | "true") => true,
            Some("off" | "0" | "no" | "false") => false,
            Some(other) => {
                let used = if default { "on" } else { "off" };
                complain(format!("{name}={other}: neither on nor off; it is {used}"));
                default
            }
        };
        let number = |name: &str| {
            let text = get(name)?;
            let parsed = text.parse::<u64>().ok();
            if parsed.is_none() {
                complain(format!("{name}={text}: not a whole number; ignored"));
            }
            parsed
        };
        let within = |name: &str, range: RangeInclusive<u64>| {
            let value = number(name)?;
            let used = value.clamp(*range.start(), *range.end());
            if used != value {
                complain(format!(
                    "{name}={value}: from {} to {}; it is {used}",
                    range.start(),
                    range.end()
                ));
            }
            Some(used)
        };
        c.crc = switch("IWARP_CRC", c.crc);
        c.markers = switch("IWARP_MARKERS", c.markers);
        c.snapshot = switch("IWARP_SNAPSHOT", c.snapshot);
        c.placed = switch("IWARP_PLACED", c.placed);
        c.stats = switch("IWARP_STATS", c.stats);
        c.peer_to_peer = switch("IWARP_PEER_TO_PEER", c.peer_to_peer);
        match number("IWARP_MPA_REV") {
            Some(rev @ (1 | 2)) => c.mpa_revision = rev as u8,
            Some(other) => complain(format!("IWARP_MPA_REV={other}: neither 1 nor 2; it is 2")),
            None => {}
        }
        match number("IWARP_RNR_TIMEOUT_MS") {
            Some(0) => c.receiver_not_ready = ReceiverNotReady::Terminate,
            Some(ms) => c.receiver_not_ready = ReceiverNotReady::Hold(Duration::from_millis(ms)),
            None => {}
        }
        if let Some(ms) = number("IWARP_MPA_TIMEOUT_MS") {
            c.handshake_timeout = Duration::from_millis(ms.max(1));
        }
        if let Some(ms) = number("IWARP_SPEAK_FIRST_MS") {
            c.speak_first = (ms > 0).then(|| Duration::from_millis(ms));
        }
        if let Some(ms) = number("IWARP_LINGER_MS") {
            c.linger = Duration::from_millis(ms.max(1));
        }
        if let Some(us) = within("IWARP_BUSY_POLL_US", 0..=Self::BUSY_POLL_MAX_US) {
            c.busy_poll = Duration::from_micros(us);
        }
        c.capture = path("IWARP_CAPTURE").map(PathBuf::from);
        c.capture_bytes = number("IWARP_CAPTURE_BYTES");
        c.align = match get("IWARP_ALIGN").as_deref() {
            None | Some("auto") => c.align,
            Some("on") => Alignment::On,
            Some("off") => Alignment::Off,
            Some(other) => {
                complain(format!(
                    "IWARP_ALIGN={other}: not auto, on or off; it is auto"
                ));
                c.align
            }
        };
        c.port_mapper = match get("IWARP_PORT_MAPPER").as_deref() {
            None | Some("off" | "0") => None,
            Some("on" | "1") => Some(Self::PORT_MAPPER_PORT),
            Some(other) => {
                let port = other.parse().ok();
                if port.is_none() {
                    complain(format!(
                        "IWARP_PORT_MAPPER={other}: not on, off or a port; it is off"
                    ));
                }
                port
            }
        };
        c.mss = within("IWARP_MSS", 128..=u64::from(u32::MAX)).map(|n| n as u32);
        (c, complaints.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lookup(vars: &[(&str, &str)]) -> (Config, Vec<String>) {
        Config::from_lookup(|name| {
            let var = vars.iter().find(|v| v.0 == name)?;
            Some(var.1.into())
        })
    }

    #[test]
    fn environment_changes_defaults() {
        let (c, complaints) = lookup(&[
            ("IWARP_CRC", "off"),
            ("IWARP_MPA_REV", "1"),
            ("IWARP_RNR_TIMEOUT_MS", "0"),
            ("IWARP_SPEAK_FIRST_MS", "0"),
            ("IWARP_CAPTURE", ""),
            ("IWARP_MARKERS", ""),
            ("IWARP_MSS", "1400"),
            ("IWARP_ALIGN", "off"),
            ("IWARP_PORT_MAPPER", "on"),
            ("IWARP_BUSY_POLL_US", "70"),
        ]);
        let want = Config {
            crc: false,
            mpa_revision: 1,
            receiver_not_ready: ReceiverNotReady::Terminate,
            speak_first: None,
            mss: Some(1400),
            align: Alignment::Off,
            port_mapper: Some(3935),
            busy_poll: Duration::from_micros(70),
            ..Config::default()
        };
        assert_eq!((c, complaints), (want, vec![]));
    }

    #[test]
    fn nonsense_changes_nothing_and_is_named() {
        for (name, value) in [
            ("IWARP_CRC", "maybe"),
            ("IWARP_MARKERS", "ON"),
            ("IWARP_SNAPSHOT", "2"),
            ("IWARP_PLACED", "x"),
            ("IWARP_STATS", "x"),
            ("IWARP_PEER_TO_PEER", "x"),
            ("IWARP_MPA_REV", "3"),
            ("IWARP_MPA_REV", "0"),
            ("IWARP_RNR_TIMEOUT_MS", "-1"),
            ("IWARP_MPA_TIMEOUT_MS", "5s"),
            ("IWARP_SPEAK_FIRST_MS", "x"),
            ("IWARP_LINGER_MS", "1.5"),
            ("IWARP_BUSY_POLL_US", "x"),
            ("IWARP_CAPTURE_BYTES", "4M"),
            ("IWARP_ALIGN", "yes"),
            ("IWARP_PORT_MAPPER", "99999"),
            ("IWARP_MSS", "x"),
        ] {
            let (c, complaints) = lookup(&[(name, value)]);
            assert_eq!(c, Config::default(), "{name}={value}");
            let [complaint] = &complaints[..] else {
                panic!("{name}={value}: {complaints:?}")
            };
            assert!(complaint.starts_with(&format!("{name}={value}: ")));
        }
    }

    #[test]
    fn what_is_out_of_range_is_cut_and_named() {
        let (c, complaints) = lookup(&[("IWARP_BUSY_POLL_US", "7000"), ("IWARP_MSS", "1")]);
        assert_eq!(c.busy_poll, Duration::from_millis(1));
        assert_eq!(c.mss, Some(128));
        assert_eq!(complaints.len(), 2, "{complaints:?}");
        assert!(
            complaints.contains(&"IWARP_BUSY_POLL_US=7000: from 0 to 1000; it is 1000".to_owned())
        );
    }
}
