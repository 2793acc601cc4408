//! Settings of a device, from code or from the environment.

use crate::admission::{Admission, Networks};
use crate::complain;
use crate::fault;
use iwarp_rnic::startup::Limits;
use std::cell::RefCell;
use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

/// What a receiver does with a Send if no receive is posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReceiverNotReady {
    /// Stops reading until a receive is posted; ends the stream after this time. TCP's flow control
    /// stops the sender meanwhile, so nothing is lost. This is the default, because programs
    /// written for InfiniBand rely on its receiver-not-ready retry. The default time is short for
    /// the sake of programs that stop posting receives and wait for their peer's disconnect: it
    /// arrives behind the held message, and the peer's next connection often waits for at most 5 s.
    Hold(Duration),
    /// Ends the stream immediately with a Terminate, as RFC 5041 section 7.1 specifies.
    Terminate,
}

/// Whether each TCP segment begins with an FPDU and contains only whole ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alignment {
    /// On networks, but not on loopback, where segments are as large as FPDUs. This is the default.
    Auto,
    /// Always.
    On,
    /// Never. Messages of medium size then need fewer and larger system calls.
    Off,
}

impl Alignment {
    /// Segments on a network are shorter than this. Loopback has 64 KiB unless its MTU was changed.
    const NETWORK_MSS_MAX: u32 = 16 * 1024;

    /// Returns `true` if FPDUs are aligned with segments of `mss` octets.
    pub(crate) const fn applies(self, mss: u32) -> bool {
        match self {
            Self::Auto => mss <= Self::NETWORK_MSS_MAX,
            Self::On => true,
            Self::Off => false,
        }
    }
}

/// The kind of device that programs on the C libraries see. The wire protocol is always iWARP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Face {
    /// An iWARP NIC: node type RNIC, transport iWARP. This is the default.
    #[default]
    Rnic,
    /// A RoCE NIC: node type CA, transport InfiniBand, link layer Ethernet. For programs that
    /// accept nothing else.
    Roce,
}

impl Face {
    /// Returns its name as used in `IWARP_AS`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rnic => "rnic",
            Self::Roce => "roce",
        }
    }

    /// Returns the face with this name in `IWARP_AS` or `iwarp run --as`.
    pub fn named(name: &str) -> Option<Self> {
        [Self::Rnic, Self::Roce]
            .into_iter()
            .find(|face| face.name() == name)
    }
}

/// Settings of an opened device. [`Config::from_env`] reads them from `IWARP_*` variables.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Config {
    /// Requests CRCs (`IWARP_CRC=on|off`; default on). They are used if either side requests them
    /// (RFC 5044 section 7.1).
    pub crc: bool,
    /// Requests markers in what the peer sends (`IWARP_MARKERS=on|off`; default off).
    pub markers: bool,
    /// MPA revision to connect with, 1 or 2 (`IWARP_MPA_REV`; default 2). With 2, if the peer
    /// closes the connection instead of replying, revision 1 is tried.
    pub mpa_revision: u8,
    /// Connects in the peer-to-peer model of RFC 6581 (`IWARP_PEER_TO_PEER=on|off`; default on).
    pub peer_to_peer: bool,
    /// See [`ReceiverNotReady`] (`IWARP_RNR_TIMEOUT_MS`; 0 terminates; default 2000).
    pub receiver_not_ready: ReceiverNotReady,
    /// How long TCP may take to connect (`IWARP_CONNECT_TIMEOUT_MS`; default 15,000 ms). The kernel
    /// may give up earlier, for example after `tcp_syn_retries`. The same limit applies to the
    /// peer's TCP acknowledging the MPA request.
    pub connect_timeout: Duration,
    /// How long a peer may take to send its MPA request (`IWARP_MPA_TIMEOUT_MS`; default 5000 ms),
    /// and to close the connection after a reject; then this end closes it.
    pub handshake_timeout: Duration,
    /// How long a peer may take to answer an MPA request (`IWARP_ANSWER_TIMEOUT_MS`; default 60,000
    /// ms). The peer's program decides when to answer. Until it does, it cannot be distinguished
    /// from a program that does not speak MPA.
    pub answer_timeout: Duration,
    /// How long a responder in the client-server model waits for the initiator's first message
    /// before it sends (`IWARP_SPEAK_FIRST_MS`; default 200 ms). `None` (0) waits without limit, as
    /// RFC 5044 section 7.1.2 specifies. A server that speaks first then hangs with initiators that
    /// do not request peer-to-peer mode, such as siw.
    pub speak_first: Option<Duration>,
    /// Limit of the background close (`IWARP_LINGER_MS`; default 5000 ms): how long to wait while
    /// the peer's TCP acknowledges nothing, and then until the peer closes, too. After it this end
    /// closes the descriptor, and the kernel delivers the remaining data.
    ///
    /// If the peer's TCP does not answer at all, [`peer_timeout`](Self::peer_timeout) applies
    /// instead if it is longer and at most a quarter of the process's descriptors belong to closing
    /// connections. A listener without a free descriptor closes the oldest closing connection
    /// immediately. Two kinds of peers are reset: one that answers but does not read the rest of an
    /// FPDU, and one that makes no room for a Terminate within about 12 times this time.
    pub linger: Duration,
    /// How long a peer may stay silent (`IWARP_PEER_TIMEOUT_S`; default 60 s; whole seconds, at
    /// most 32,767). If it acknowledges neither data nor keep-alive probes for about this time, the
    /// connection ends as if it had broken: after one and a half times this time at most, or two
    /// minutes later if the peer's window was closed. A peer that answers may take any time. `None`
    /// (0) disables the limit.
    pub peer_timeout: Option<Duration>,
    /// How many progress threads the process may have (`IWARP_PROGRESS_THREADS`; 1 to 64; default
    /// half of the processors, at most 8). The first one starts with the first socket, another one
    /// when each has 16 connections. If several devices are open, the setting of the device of the
    /// new connection applies.
    pub progress_threads: u16,
    /// Records all connections in this pcapng file (`IWARP_CAPTURE`). `%p` in the name becomes the
    /// process ID.
    pub capture: Option<PathBuf>,
    /// Stops recording before the file exceeds this many bytes (`IWARP_CAPTURE_BYTES`).
    pub capture_bytes: Option<u64>,
    /// Limits FPDUs to this maximum segment size if it is smaller than TCP's (`IWARP_MSS`).
    pub mss: Option<u32>,
    /// Starts each TCP segment with an FPDU (`IWARP_ALIGN=auto|on|off`; default auto). Hardware
    /// requires it, and so does siw with CRCs.
    pub align: Alignment,
    /// How long a blocking wait polls before it sleeps, if its last waits were short
    /// (`IWARP_BUSY_POLL_US`; default 100 µs, at most 1000; 0 never polls). See
    /// [`CompletionQueue::wait`](crate::objects::cq::CompletionQueue::wait).
    pub busy_poll: Duration,
    /// For programs on the C libraries: copies payload before its CRC is computed, because the
    /// program may change it meanwhile (`IWARP_SNAPSHOT=on|off`; default on). See
    /// [`QueuePair::set_snapshot`](crate::conn::qp::QueuePair::set_snapshot).
    pub snapshot: bool,
    /// Asks the peer's port mapper at this UDP port for the TCP port of a listener
    /// (`IWARP_PORT_MAPPER=on|off|PORT`; default off, `on` is 3935). Listeners on hardware may need
    /// it.
    pub port_mapper: Option<u16>,
    /// Turns an access to registered memory that the program has unmapped, protected or truncated
    /// into an error of the request or of the peer (`IWARP_MEMORY_GUARD=on|off`; default on).
    /// Otherwise such an access ends the process. The first device opened with it installs a
    /// handler for SIGSEGV and SIGBUS for the whole process.
    pub memory_guard: bool,
    /// Completes Sends and Writes when the peer has placed them, as on InfiniBand, not when TCP has
    /// accepted them (`IWARP_PLACED=on|off`; default off). For programs that check the peer's
    /// memory as soon as a Write completes. It costs a zero-length RDMA Read per burst. Always on
    /// for queue pairs that are connected by number.
    pub placed: bool,
    /// Prints counters to standard error when the process ends (`IWARP_STATS=on|off`; default off).
    pub stats: bool,
    /// For programs on the C libraries: the kind of device that they see (`IWARP_AS=rnic|roce`;
    /// default rnic). See [`Face`].
    pub face: Face,
    /// Limits of the device's listeners (`IWARP_ALLOW`, `IWARP_HALF_OPEN`,
    /// `IWARP_HALF_OPEN_PER_ADDRESS`, `IWARP_CONNECTIONS`).
    pub admission: Admission,
    /// Faults to inject, to test how a program handles them (`IWARP_FAULT`; default none). See
    /// [`fault`](crate::fault).
    pub fault: Option<fault::Spec>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            crc: true,
            markers: false,
            mpa_revision: 2,
            peer_to_peer: true,
            receiver_not_ready: ReceiverNotReady::Hold(Duration::from_secs(2)),
            connect_timeout: Limits::PROGRAM.connect,
            handshake_timeout: Limits::PROGRAM.request,
            answer_timeout: Limits::PROGRAM.reply,
            speak_first: Limits::PROGRAM.speak_first,
            linger: Duration::from_secs(5),
            peer_timeout: Some(Duration::from_secs(60)),
            progress_threads: Self::progress_threads_by_default(),
            capture: None,
            capture_bytes: None,
            mss: None,
            align: Alignment::Auto,
            port_mapper: None,
            busy_poll: Duration::from_micros(100),
            snapshot: true,
            memory_guard: true,
            placed: false,
            stats: false,
            face: Face::Rnic,
            admission: Admission::default(),
            fault: None,
        }
    }
}

impl Config {
    pub(crate) const PORT_MAPPER_PORT: u16 = 3935;
    /// Linux's maximum of the keep-alive time.
    const PEER_TIMEOUT_MAX_S: u64 = 32_767;
    /// No program benefits from more progress threads.
    const PROGRESS_THREADS_MAX: u64 = 64;
    /// Longer polling only costs CPU time.
    const BUSY_POLL_MAX_US: u64 = 1000;

    fn progress_threads_by_default() -> u16 {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        (processors / 2).clamp(1, 8) as u16
    }

    /// Returns the defaults, overridden by `IWARP_*` environment variables. An invalid value is
    /// ignored and reported once: as a `tracing` warning, or on standard error if the program has
    /// no subscriber.
    pub fn from_env() -> Self {
        Self::default().with_env()
    }

    /// Returns these settings, overridden by environment variables as in
    /// [`from_env`](Self::from_env).
    #[must_use]
    pub fn with_env(self) -> Self {
        let (config, complaints) = self.with_lookup(|name| std::env::var_os(name));
        complaints.into_iter().for_each(complain::once);
        config
    }

    /// Returns the settings, and a complaint per invalid value.
    fn with_lookup(self, get: impl Fn(&str) -> Option<OsString>) -> (Self, Vec<String>) {
        let mut c = self;
        let vars = Variables {
            get: &get,
            complaints: RefCell::default(),
        };
        c.crc = vars.switch("IWARP_CRC", c.crc);
        c.markers = vars.switch("IWARP_MARKERS", c.markers);
        c.snapshot = vars.switch("IWARP_SNAPSHOT", c.snapshot);
        c.memory_guard = vars.switch("IWARP_MEMORY_GUARD", c.memory_guard);
        c.placed = vars.switch("IWARP_PLACED", c.placed);
        c.stats = vars.switch("IWARP_STATS", c.stats);
        c.peer_to_peer = vars.switch("IWARP_PEER_TO_PEER", c.peer_to_peer);
        match vars.number("IWARP_MPA_REV") {
            Some(rev @ (1 | 2)) => c.mpa_revision = rev as u8,
            Some(other) => vars.complain(format!(
                "IWARP_MPA_REV={other}: neither 1 nor 2; it is {}",
                c.mpa_revision
            )),
            None => {}
        }
        match vars.number("IWARP_RNR_TIMEOUT_MS") {
            Some(0) => c.receiver_not_ready = ReceiverNotReady::Terminate,
            Some(ms) => c.receiver_not_ready = ReceiverNotReady::Hold(Duration::from_millis(ms)),
            None => {}
        }
        for (name, limit) in [
            ("IWARP_CONNECT_TIMEOUT_MS", &mut c.connect_timeout),
            ("IWARP_MPA_TIMEOUT_MS", &mut c.handshake_timeout),
            ("IWARP_ANSWER_TIMEOUT_MS", &mut c.answer_timeout),
            ("IWARP_LINGER_MS", &mut c.linger),
        ] {
            let ms = vars.number(name);
            *limit = ms.map_or(*limit, |ms| Duration::from_millis(ms.max(1)));
        }
        if let Some(ms) = vars.number("IWARP_SPEAK_FIRST_MS") {
            c.speak_first = (ms > 0).then(|| Duration::from_millis(ms));
        }
        if let Some(s) = vars.within("IWARP_PEER_TIMEOUT_S", 0..=Self::PEER_TIMEOUT_MAX_S) {
            c.peer_timeout = (s > 0).then(|| Duration::from_secs(s));
        }
        if let Some(us) = vars.within("IWARP_BUSY_POLL_US", 0..=Self::BUSY_POLL_MAX_US) {
            c.busy_poll = Duration::from_micros(us);
        }
        if let Some(n) = vars.within("IWARP_PROGRESS_THREADS", 1..=Self::PROGRESS_THREADS_MAX) {
            c.progress_threads = n as u16;
        }
        vars.admission(&mut c.admission);
        c.capture = vars.path("IWARP_CAPTURE").map(PathBuf::from).or(c.capture);
        c.capture_bytes = vars.number("IWARP_CAPTURE_BYTES").or(c.capture_bytes);
        c.face = vars.face("IWARP_AS", c.face);
        c.fault = vars.fault("IWARP_FAULT", c.fault);
        c.align = vars.alignment("IWARP_ALIGN", c.align);
        c.port_mapper = vars.port_mapper("IWARP_PORT_MAPPER", c.port_mapper);
        let mss = vars.within("IWARP_MSS", 128..=u64::from(u32::MAX));
        c.mss = mss.map(|n| n as u32).or(c.mss);
        (c, vars.complaints.into_inner())
    }
}

/// Reads environment variables; one method per type of value.
struct Variables<'a> {
    get: &'a dyn Fn(&str) -> Option<OsString>,
    complaints: RefCell<Vec<String>>,
}

impl Variables<'_> {
    /// Exceeds the number of ports that a process can have in start-up.
    const HALF_OPEN_MAX: u64 = 65_536;

    fn complain(&self, text: String) {
        self.complaints.borrow_mut().push(text);
    }

    /// Treats an empty variable as unset.
    fn path(&self, name: &str) -> Option<OsString> {
        (self.get)(name).filter(|value| !value.is_empty())
    }

    fn text(&self, name: &str) -> Option<String> {
        let value = self.path(name)?;
        Some(value.to_string_lossy().into_owned())
    }

    fn switch(&self, name: &str, default: bool) -> bool {
        match self.text(name).as_deref() {
            None => default,
            Some("on" | "1" | "yes" | "true") => true,
            Some("off" | "0" | "no" | "false") => false,
            Some(other) => {
                let used = if default { "on" } else { "off" };
                self.complain(format!("{name}={other}: neither on nor off; it is {used}"));
                default
            }
        }
    }

    fn number(&self, name: &str) -> Option<u64> {
        let text = self.text(name)?;
        let parsed = text.parse::<u64>().ok();
        if parsed.is_none() {
            self.complain(format!("{name}={text}: not a whole number; ignored"));
        }
        parsed
    }

    /// Returns a number, clamped to the range.
    fn within(&self, name: &str, range: RangeInclusive<u64>) -> Option<u64> {
        let value = self.number(name)?;
        let (least, most) = range.into_inner();
        let used = value.clamp(least, most);
        if used != value {
            self.complain(format!(
                "{name}={value}: from {least} to {most}; it is {used}"
            ));
        }
        Some(used)
    }

    fn admission(&self, admission: &mut Admission) {
        if let Some(list) = self.text("IWARP_ALLOW") {
            // A typing error in a list that keeps peers out must not admit them all.
            admission.peers = list.parse().unwrap_or_else(|e| {
                self.complain(format!("IWARP_ALLOW={list}: no peer is let in: {e}"));
                Networks::NONE
            });
        }
        let most = Self::HALF_OPEN_MAX;
        for (name, limit, most) in [
            ("IWARP_HALF_OPEN", &mut admission.half_open, most),
            (
                "IWARP_HALF_OPEN_PER_ADDRESS",
                &mut admission.half_open_per_address,
                most,
            ),
            (
                "IWARP_CONNECTIONS",
                &mut admission.connections,
                u64::from(u32::MAX),
            ),
        ] {
            *limit = self.within(name, 1..=most).map_or(*limit, |n| n as u32);
        }
    }

    fn alignment(&self, name: &str, default: Alignment) -> Alignment {
        match self.text(name).as_deref() {
            None => default,
            Some("auto") => Alignment::Auto,
            Some("on") => Alignment::On,
            Some("off") => Alignment::Off,
            Some(other) => {
                let used = match default {
                    Alignment::Auto => "auto",
                    Alignment::On => "on",
                    Alignment::Off => "off",
                };
                self.complain(format!("{name}={other}: not auto, on or off; it is {used}"));
                default
            }
        }
    }

    fn face(&self, name: &str, default: Face) -> Face {
        let Some(text) = self.text(name) else {
            return default;
        };
        Face::named(&text).unwrap_or_else(|| {
            let used = default.name();
            self.complain(format!(
                "{name}={text}: neither rnic nor roce; it is {used}"
            ));
            default
        })
    }

    /// An invalid specification also disables faults set by code: otherwise a test would run with
    /// other faults than it asks for.
    fn fault(&self, name: &str, default: Option<fault::Spec>) -> Option<fault::Spec> {
        let Some(text) = self.text(name) else {
            return default;
        };
        text.parse()
            .map_err(|e| self.complain(format!("{name}: no faults are injected: {e}")))
            .ok()
    }

    fn port_mapper(&self, name: &str, default: Option<u16>) -> Option<u16> {
        match self.text(name).as_deref() {
            None => default,
            Some("off" | "0") => None,
            Some("on" | "1") => Some(Config::PORT_MAPPER_PORT),
            Some(other) => other.parse().map(Some).unwrap_or_else(|_| {
                let used = default.map_or_else(|| "off".to_owned(), |port| port.to_string());
                self.complain(format!(
                    "{name}={other}: not on, off or a port; it is {used}"
                ));
                default
            }),
        }
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
