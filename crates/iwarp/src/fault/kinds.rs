//! The table of faults, with the name, value, effect and options of each.

use super::names::{self, ERRNOS, EVENTS, Event, STATUSES};
use super::values;
use iwarp_rnic::WcStatus;
use std::fmt;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Refuse,
    Unreachable,
    Reset,
    Close,
    /// The delay in nanoseconds.
    Delay(u64),
    /// The rate in octets per second.
    Slow(u64),
    /// The duration in nanoseconds; `u64::MAX` is forever.
    Stall(u64),
    Crc,
    /// The duration in nanoseconds; `u64::MAX` is forever.
    Rnr(u64),
    Status(WcStatus),
    RemoteAccess,
    CqOverflow,
    Post,
    Create(Object),
    Event(Event),
    /// The duration in nanoseconds; `u64::MAX` is forever.
    PortDown(u64),
}

/// A kind of object whose creation fails, and the error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Object {
    pub(crate) name: &'static str,
    pub(crate) errno: i32,
}

pub(crate) const OBJECTS: [&str; 7] = ["pd", "mr", "mw", "cq", "srq", "qp", "channel"];

/// Where a rule can inject its fault. Each occurrence is an opportunity of the rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Point {
    /// The program connects.
    Connect,
    /// A send work request is posted, or a receive completes.
    Request,
    /// A work request of either queue is posted.
    Post,
    /// A work request completes successfully, with a completion.
    Completion,
    /// A message that consumes a receive arrives.
    Message,
    Creation,
}

pub(super) struct Row {
    pub(super) name: &'static str,
    /// Value after the name: none, optional (in brackets), or required.
    pub(super) value: &'static str,
    pub(super) meaning: &'static str,
    /// Options in addition to [`COMMON`].
    pub(super) keys: &'static [&'static str],
    /// Parses the value, which may be empty.
    pub(super) make: fn(&str) -> Option<Kind>,
}

pub(super) const COMMON: [&str; 5] = ["nth", "every", "p", "times", "time"];

fn no_value(text: &str, kind: Kind) -> Option<Kind> {
    text.is_empty().then_some(kind)
}

/// Parses an optional duration; an empty text means forever.
fn optional_duration(text: &str, kind: fn(u64) -> Kind) -> Option<Kind> {
    match text {
        "" => Some(kind(u64::MAX)),
        text => values::time(text).map(kind),
    }
}

/// All faults, in the order of the help text.
pub(super) const KINDS: [Row; 16] = [
    Row {
        name: "refuse",
        value: "",
        meaning: "attempts to connect are refused: RDMA_CM_EVENT_REJECTED, ECONNREFUSED",
        keys: &["peer"],
        make: |v| no_value(v, Kind::Refuse),
    },
    Row {
        name: "unreachable",
        value: "",
        meaning: "attempts to connect reach no host: RDMA_CM_EVENT_UNREACHABLE, EHOSTUNREACH",
        keys: &["peer"],
        make: |v| no_value(v, Kind::Unreachable),
    },
    Row {
        name: "reset",
        value: "",
        meaning: "the TCP connection is reset",
        keys: &["qp", "peer", "op", "bytes", "dir"],
        make: |v| no_value(v, Kind::Reset),
    },
    Row {
        name: "close",
        value: "",
        meaning: "the connection is closed gracefully, as if one end had disconnected",
        keys: &["qp", "peer", "op", "bytes", "dir"],
        make: |v| no_value(v, Kind::Close),
    },
    Row {
        name: "delay",
        value: "TIME",
        meaning: "sent octets are delayed by TIME",
        keys: &["qp", "peer", "op", "bytes", "dir"],
        make: |v| values::time(v).map(Kind::Delay),
    },
    Row {
        name: "slow",
        value: "SIZE",
        meaning: "from then on, the connection carries at most SIZE octets per second",
        keys: &["qp", "peer", "op", "bytes", "dir"],
        make: |v| values::size(v).map(Kind::Slow),
    },
    Row {
        name: "stall",
        value: "[TIME]",
        meaning: "nothing is sent or received for TIME, or forever",
        keys: &["qp", "peer", "op", "bytes", "dir"],
        make: |v| optional_duration(v, Kind::Stall),
    },
    Row {
        name: "crc",
        value: "",
        meaning: "a bit flips in the next octets sent (dir=in: received), so the CRC is wrong",
        keys: &["qp", "peer", "op", "bytes", "dir"],
        make: |v| no_value(v, Kind::Crc),
    },
    Row {
        name: "rnr",
        value: "[TIME]",
        meaning: "an arriving message finds no receive for TIME, or forever \
                  (receiver not ready)",
        keys: &["qp", "peer"],
        make: |v| optional_duration(v, Kind::Rnr),
    },
    Row {
        name: "status",
        value: "STATUS",
        meaning: "a request completes with STATUS, and the queue pair enters the error state",
        keys: &["qp", "peer", "op"],
        make: |v| names::find(&STATUSES, "IBV_WC_", v).map(Kind::Status),
    },
    Row {
        name: "remote-access",
        value: "",
        meaning: "a Write, Read or atomic is sent with a wrong key, so the peer refuses it",
        keys: &["qp", "peer", "op"],
        make: |v| no_value(v, Kind::RemoteAccess),
    },
    Row {
        name: "cq-overflow",
        value: "",
        meaning: "a completion finds its completion queue full: IBV_EVENT_CQ_ERR",
        keys: &["qp", "peer", "op"],
        make: |v| no_value(v, Kind::CqOverflow),
    },
    Row {
        name: "post",
        value: "",
        meaning: "a request finds its queue full: ENOMEM",
        keys: &["qp", "peer", "op"],
        make: |v| no_value(v, Kind::Post),
    },
    Row {
        name: "create",
        value: "OBJECT",
        meaning: "the creation of an object fails with ENOMEM, or the error of errno=",
        keys: &["errno"],
        make: |v| {
            let name = *OBJECTS.iter().find(|name| **name == v)?;
            let errno = libc::ENOMEM;
            Some(Kind::Create(Object { name, errno }))
        },
    },
    Row {
        name: "event",
        value: "EVENT",
        meaning: "an asynchronous event, with its effect on the queue pair",
        keys: &["qp", "peer", "op", "bytes", "dir"],
        make: |v| names::find(&EVENTS, "IBV_EVENT_", v).map(Kind::Event),
    },
    Row {
        name: "port-down",
        value: "[TIME]",
        meaning: "the port is down for TIME, or forever: no octets pass, \
                  IBV_EVENT_PORT_ERR, then PORT_ACTIVE",
        keys: &["qp", "peer", "op", "bytes", "dir"],
        make: |v| optional_duration(v, Kind::PortDown),
    },
];

/// Describes the valid values of a fault, for messages.
pub(super) fn expected_value(row: &Row) -> &'static str {
    match row.value {
        "TIME" | "[TIME]" => "a time with its unit, such as 250us, 20ms or 3s",
        "SIZE" => "a number of octets, such as 1500, 64K or 10M",
        "STATUS" => "a status of ibv_poll_cq(3) except SUCCESS, such as REM_ACCESS_ERR",
        "OBJECT" => "pd, mr, mw, cq, srq, qp or channel",
        "EVENT" => "an event of ibv_get_async_event(3), such as QP_FATAL or PORT_ERR",
        _ => "nothing",
    }
}

impl Kind {
    fn row(&self) -> &'static Row {
        let index = match self {
            Self::Refuse => 0,
            Self::Unreachable => 1,
            Self::Reset => 2,
            Self::Close => 3,
            Self::Delay(_) => 4,
            Self::Slow(_) => 5,
            Self::Stall(_) => 6,
            Self::Crc => 7,
            Self::Rnr(_) => 8,
            Self::Status(_) => 9,
            Self::RemoteAccess => 10,
            Self::CqOverflow => 11,
            Self::Post => 12,
            Self::Create(_) => 13,
            Self::Event(_) => 14,
            Self::PortDown(_) => 15,
        };
        &KINDS[index]
    }

    /// Returns where rules of this kind can inject the fault.
    pub(crate) const fn point(&self) -> Point {
        match self {
            Self::Refuse | Self::Unreachable => Point::Connect,
            Self::Rnr(_) => Point::Message,
            Self::Status(_) | Self::CqOverflow => Point::Completion,
            Self::Post | Self::RemoteAccess => Point::Post,
            Self::Create(_) => Point::Creation,
            _ => Point::Request,
        }
    }

    /// Returns `true` if a rule without a frequency option injects the fault more than once.
    pub(super) const fn is_repeated(&self) -> bool {
        matches!(
            self,
            Self::Refuse | Self::Unreachable | Self::Delay(_) | Self::Slow(_)
        )
    }
}

/// Formats the fault as in a specification.
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.row().name;
        match self {
            Self::Delay(ns) | Self::Stall(ns) | Self::Rnr(ns) | Self::PortDown(ns)
                if *ns != u64::MAX =>
            {
                write!(f, "{name}={}us", ns / 1000)
            }
            Self::Slow(rate) => write!(f, "{name}={rate}"),
            Self::Status(status) => write!(f, "{name}={}", names::status(*status)),
            Self::Event(event) => write!(f, "{name}={}", names::event(*event)),
            Self::Create(object) => write!(
                f,
                "{name}={},errno={}",
                object.name,
                names::errno(object.errno)
            ),
            _ => f.write_str(name),
        }
    }
}

const GRAMMAR: &str = "\
A specification is a list of rules separated by ';'. A rule is a fault with its value and options:

  reset,bytes=64K                     resets the first connection that sends 64 KiB
  status=REM_ACCESS_ERR,op=write,nth=3
  seed=7;delay=20ms,p=0.1;create=mr,nth=2;log=/tmp/faults

TARGET (default: everything)
  qp=N             the Nth queue pair that the process creates; qp=0x1a2b: the one with this number
  peer=ADDR        the peer's address: 192.0.2.7, 192.0.2.0/24, 192.0.2.7:7471, [2001:db8::1]:7471
  op=OP            send, write, read, atomic, local, recv; op=read+write: both of these

WHEN (opportunities are counted per queue pair, from 1)
  nth=N            the Nth opportunity; nth=5..50: one of these, chosen by the seed
  every=N          every Nth opportunity
  p=P              each opportunity with this probability: 0.01 or 1%
  bytes=SIZE       when this many octets have passed on the connection: 1500, 64K;
                   bytes=1K..1M: chosen by the seed
  time=TIME        no earlier than this time after the first device was opened: 250us, 20ms, 3s.
                   Without another option of WHEN, faults of connections, events and ports
                   then occur without an opportunity
  times=N          at most N times in the process. Default: 1; but unlimited with p or every,
                   and for refuse, unreachable, delay and slow without nth

HOW
  dir=out|in|both  the direction of octets that is counted or affected
  errno=NAME       the error that create returns

IN GENERAL
  seed=N           seed of random choices; by default each process chooses one and logs it
  log=FILE         file to log injected faults to; by default standard error
";

pub(super) fn help() -> String {
    let mut text = String::from("FAULTS\n");
    for row in &KINDS {
        let name = match row.value {
            "" => row.name.to_owned(),
            "[TIME]" => format!("{}[=TIME]", row.name),
            value => format!("{}={value}", row.name),
        };
        text.push_str(&format!("  {name:<17}{}\n", row.meaning));
    }
    let list = |names: Vec<&str>| names.join(" ");
    text.push_str(&format!(
        "\nSTATUS: {}\n\nEVENT: {}\n\nOBJECT: {}\n\nERRNO: {}\n\n{GRAMMAR}",
        list(STATUSES.iter().map(|row| row.0).collect()),
        list(EVENTS.iter().map(|row| row.0).collect()),
        list(OBJECTS.to_vec()),
        list(ERRNOS.iter().map(|row| row.0).collect()),
    ));
    text
}
