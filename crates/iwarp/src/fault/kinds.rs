//! The table of faults: for each its name, its value, what it does, and which options it has.

use super::names::{self, ERRNOS, EVENTS, Event, STATUSES};
use super::values;
use iwarp_rnic::WcStatus;
use std::fmt;

/// What happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Refuse,
    Unreachable,
    Reset,
    Close,
    /// For so many nanoseconds.
    Delay(u64),
    /// So many octets per second.
    Slow(u64),
    /// For so many nanoseconds; `u64::MAX` is for ever.
    Stall(u64),
    Crc,
    /// For so many nanoseconds; `u64::MAX` is for ever.
    Rnr(u64),
    Status(WcStatus),
    RemoteAccess,
    CqOverflow,
    Post,
    Create(Object),
    Event(Event),
    /// For so many nanoseconds; `u64::MAX` is for ever.
    PortDown(u64),
}

/// An object whose creation can fail, and the error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Object {
    pub(crate) name: &'static str,
    pub(crate) errno: i32,
}

/// Objects whose creation can fail.
pub(crate) const OBJECTS: [&str; 7] = ["pd", "mr", "mw", "cq", "srq", "qp", "channel"];

/// What a rule waits for: its opportunities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Point {
    /// The program asks to connect.
    Connect,
    /// A send work request is posted, or a receive completes.
    Request,
    /// A work request of either queue is posted.
    Post,
    /// A work request completes with success, and tells the program.
    Completion,
    /// A message that takes a receive has come.
    Message,
    /// An object is created.
    Creation,
}

/// A row of the table.
pub(super) struct Row {
    pub(super) name: &'static str,
    /// What stands behind the name: nothing, something that is optional (in brackets), or something that is not.
    pub(super) value: &'static str,
    pub(super) meaning: &'static str,
    /// The options that it has beside those of all faults.
    pub(super) keys: &'static [&'static str],
    /// Makes the kind of the value, which is empty if there is none.
    pub(super) make: fn(&str) -> Option<Kind>,
}

/// Options of all faults.
pub(super) const COMMON: [&str; 5] = ["nth", "every", "p", "times", "time"];

fn plain(text: &str, kind: Kind) -> Option<Kind> {
    text.is_empty().then_some(kind)
}

/// A time, for ever if there is none.
fn lasting(text: &str, kind: fn(u64) -> Kind) -> Option<Kind> {
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
        meaning: "requests to connect are refused: RDMA_CM_EVENT_REJECTED, ECONNREFUSED",
        keys: &["peer"],
        make: |v| plain(v, Kind::Refuse),
    },
    Row {
        name: "unreachable",
        value: "",
        meaning: "requests to connect reach no host: RDMA_CM_EVENT_UNREACHABLE, EHOSTUNREACH",
        keys: &["peer"],
        make: |v| plain(v, Kind::Unreachable),
    },
    Row {
        name: "reset",
        value: "",
        meaning: "the TCP connection is reset",
        keys: &["qp", "peer", "op", "bytes", "dir"],
        make: |v| plain(v, Kind::Reset),
    },
    Row {
        name: "close",
        value: "",
        meaning: "the connection is closed in order, as if one end had disconnected",
        keys: &["qp", "peer", "op", "bytes", "dir"],
        make: |v| plain(v, Kind::Close),
    },
    Row {
        name: "delay",
        value: "TIME",
        meaning: "octets that are to be sent wait so long",
        keys: &["qp", "peer", "op", "bytes", "dir"],
        make: |v| values::time(v).map(Kind::Delay),
    },
    Row {
        name: "slow",
        value: "SIZE",
        meaning: "from then on the connection carries at most so many octets per second",
        keys: &["qp", "peer", "op", "bytes", "dir"],
        make: |v| values::size(v).map(Kind::Slow),
    },
    Row {
        name: "stall",
        value: "[TIME]",
        meaning: "nothing is sent or received for so long, or for ever",
        keys: &["qp", "peer", "op", "bytes", "dir"],
        make: |v| lasting(v, Kind::Stall),
    },
    Row {
        name: "crc",
        value: "",
        meaning: "a bit flips in what is sent (dir=in: received) next, so that its CRC is wrong",
        keys: &["qp", "peer", "op", "bytes", "dir"],
        make: |v| plain(v, Kind::Crc),
    },
    Row {
        name: "rnr",
        value: "[TIME]",
        meaning: "a message that comes finds no receive for so long, or for ever (receiver not ready)",
        keys: &["qp", "peer"],
        make: |v| lasting(v, Kind::Rnr),
    },
    Row {
        name: "status",
        value: "STATUS",
        meaning: "a request completes with this status, and the queue pair goes to the error state",
        keys: &["qp", "peer", "op"],
        make: |v| names::find(&STATUSES, "IBV_WC_", v).map(Kind::Status),
    },
    Row {
        name: "remote-access",
        value: "",
        meaning: "a Write, Read or atomic is sent with a wrong key, so that the peer refuses it",
        keys: &["qp", "peer", "op"],
        make: |v| plain(v, Kind::RemoteAccess),
    },
    Row {
        name: "cq-overflow",
        value: "",
        meaning: "a completion finds its completion queue full: IBV_EVENT_CQ_ERR",
        keys: &["qp", "peer", "op"],
        make: |v| plain(v, Kind::CqOverflow),
    },
    Row {
        name: "post",
        value: "",
        meaning: "a request finds its queue full: ENOMEM",
        keys: &["qp", "peer", "op"],
        make: |v| plain(v, Kind::Post),
    },
    Row {
        name: "create",
        value: "OBJECT",
        meaning: "an object is not created: ENOMEM, or what errno= says",
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
        meaning: "an asynchronous event, with what it means for its queue pair",
        keys: &["qp", "peer", "op", "bytes", "dir"],
        make: |v| names::find(&EVENTS, "IBV_EVENT_", v).map(Kind::Event),
    },
    Row {
        name: "port-down",
        value: "[TIME]",
        meaning: "the port is down for so long, or for ever: nothing passes, IBV_EVENT_PORT_ERR, then PORT_ACTIVE",
        keys: &["qp", "peer", "op", "bytes", "dir"],
        make: |v| lasting(v, Kind::PortDown),
    },
];

/// Returns the names of what a value may be.
pub(super) fn wanted(row: &Row) -> &'static str {
    match row.value {
        "TIME" | "[TIME]" => "a time with its unit, as 250us, 20ms or 3s",
        "SIZE" => "a number of octets, as 1500, 64K or 10M",
        "STATUS" => "a status of ibv_poll_cq(3) other than SUCCESS, as REM_ACCESS_ERR",
        "OBJECT" => "pd, mr, mw, cq, srq, qp or channel",
        "EVENT" => "an event of ibv_get_async_event(3), as QP_FATAL or PORT_ERR",
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

    /// Returns what its rules wait for.
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

    /// Returns `true` if a rule without an option that says how often acts again and again.
    pub(super) const fn lasts(&self) -> bool {
        matches!(
            self,
            Self::Refuse | Self::Unreachable | Self::Delay(_) | Self::Slow(_)
        )
    }
}

/// As in a specification.
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

/// The rest of the help text.
const GRAMMAR: &str = "\
A specification is a list of rules with ';' between them. A rule is a fault with its value and options:

  reset,bytes=64K                     the first connection over which 64 KiB are sent is reset then
  status=REM_ACCESS_ERR,op=write,nth=3
  seed=7;delay=20ms,p=0.1;create=mr,nth=2;log=/tmp/faults

WHOM (everything that is not given)
  qp=N             the Nth queue pair that the process creates; qp=0x1a2b: the one with this number
  peer=ADDR        the peer's address: 192.0.2.7, 192.0.2.0/24, 192.0.2.7:7471, [2001:db8::1]:7471
  op=OP            send, write, read, atomic, local, recv; op=read+write: either

WHEN (each queue pair counts its own opportunities, from 1)
  nth=N            the Nth; nth=5..50: one of these, chosen by the seed
  every=N          each Nth
  p=P              each with this probability: 0.01 or 1%
  bytes=SIZE       when so many octets have passed on the connection: 1500, 64K; bytes=1K..1M: chosen by the seed
  time=TIME        not before this time after the first device was opened: 250us, 20ms, 3s. Without another option of WHEN,
                   the faults of connections, events and ports then come by themselves
  times=N          at most N times in the process. Default: 1, but without limit with p or every, and for refuse, unreachable,
                   delay and slow without nth

HOW
  dir=out|in|both  the direction of octets that is counted or affected
  errno=NAME       the error of create

IN GENERAL
  seed=N           what random choices depend on; without it each process chooses one, and says which
  log=FILE         where each injected fault gets a line; without it, standard error
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
