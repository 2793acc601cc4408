//! The parser of specifications.

use super::error::{Mistake, SpecError};
use super::kinds::{COMMON, KINDS, Kind, Row, expected_value};
use super::names::{self, ERRNOS};
use super::values::{self, Chance, Directions, Ops, PeerFilter, QpFilter, Span};
use super::{Rule, Select, Spec, When};
use std::ops::Range;
use std::path::PathBuf;

/// A part of the specification, and its position.
#[derive(Clone, Copy)]
struct Piece<'a> {
    text: &'a str,
    offset: usize,
}

impl<'a> Piece<'a> {
    fn range(self) -> Range<usize> {
        self.offset..self.offset + self.text.len()
    }

    /// Splits the piece at each `separator`, and trims the parts.
    fn split(self, separator: char) -> impl Iterator<Item = Self> {
        let mut offset = self.offset;
        self.text.split(separator).map(move |text| {
            let piece = Piece { text, offset };
            offset += text.len() + separator.len_utf8();
            piece.trim()
        })
    }

    /// Splits the piece at the first `=`.
    fn pair(self) -> (Self, Option<Self>) {
        let Some((name, value)) = self.text.split_once('=') else {
            return (self, None);
        };
        let value = Piece {
            text: value,
            offset: self.offset + name.len() + 1,
        };
        let name = Piece {
            text: name,
            offset: self.offset,
        };
        (name.trim(), Some(value.trim()))
    }

    fn trim(self) -> Self {
        let start = self.text.len() - self.text.trim_start().len();
        Self {
            text: self.text.trim(),
            offset: self.offset + start,
        }
    }
}

type Result<T> = std::result::Result<T, (Range<usize>, Mistake)>;

pub(super) fn spec(text: &str) -> std::result::Result<Spec, SpecError> {
    read(text).map_err(|(at, mistake)| SpecError {
        spec: text.to_owned(),
        at,
        mistake,
    })
}

fn read(text: &str) -> Result<Spec> {
    let all = Piece { text, offset: 0 };
    let mut spec = Spec {
        text: text.trim().to_owned(),
        seed: None,
        log: None,
        rules: Vec::new(),
    };
    for item in all.split(';').filter(|item| !item.text.is_empty()) {
        let (name, value) = item.pair();
        match name.text {
            "seed" => {
                let seed = parse_value(name, value, "a whole number", values::number)?;
                set_once(&mut spec.seed, seed, name)?;
            }
            "log" => {
                let file = parse_value(name, value, "the name of a file", |v| {
                    Some(PathBuf::from(v))
                })?;
                set_once(&mut spec.log, file, name)?;
            }
            _ => spec.rules.push(rule(item)?),
        }
    }
    match spec.rules.is_empty() {
        true => Err((0..text.len(), Mistake::NoRule)),
        false => Ok(spec),
    }
}

/// Sets an option. Fails if it was set before.
fn set_once<T>(place: &mut Option<T>, value: T, name: Piece<'_>) -> Result<()> {
    match place.replace(value) {
        Some(_) => Err((name.range(), Mistake::Twice)),
        None => Ok(()),
    }
}

/// Parses the value of an option. Fails if it is missing or invalid.
fn parse_value<T>(
    name: Piece<'_>,
    value: Option<Piece<'_>>,
    wanted: &'static str,
    read: impl Fn(&str) -> Option<T>,
) -> Result<T> {
    match value {
        Some(value) if !value.text.is_empty() => {
            read(value.text).ok_or_else(|| (value.range(), Mistake::Value(wanted)))
        }
        _ => Err((name.range(), Mistake::NoValue(wanted))),
    }
}

/// Options of a rule that have been parsed.
#[derive(Default)]
struct Options {
    select: Select,
    /// When, and the name of the option that sets it.
    when: Option<(When, &'static str)>,
    not_before: Option<Span>,
    times: Option<u64>,
    directions: Option<Directions>,
    errno: Option<i32>,
    ops_at: Option<Range<usize>>,
}

fn rule(item: Piece<'_>) -> Result<Rule> {
    let mut parts = item.split(',');
    let (name, value) = parts.next().unwrap_or(item).pair();
    let row = KINDS.iter().find(|row| row.name == name.text);
    let row = row.ok_or_else(|| (name.range(), Mistake::UnknownKind(name.text.to_owned())))?;
    let mut kind = kind(row, name, value)?;
    let mut options = Options::default();
    for part in parts {
        option(row, part, &mut options)?;
    }
    if let (Kind::Create(object), Some(errno)) = (&mut kind, options.errno) {
        object.errno = errno;
    }
    if let (Kind::RemoteAccess, Some(ops), Some(range)) = (kind, options.select.ops, options.ops_at)
    {
        // A rule that never injects its fault is an error.
        if ![Ops::WRITE, Ops::READ, Ops::ATOMIC]
            .iter()
            .any(|op| ops.has(*op))
        {
            return Err((
                range,
                Mistake::Value("write, read or atomic, because other operations have no rkey"),
            ));
        }
    }
    let timed = options.not_before.is_some();
    let when = match (options.when.map(|when| when.0), kind) {
        (Some(when), _) => when,
        // One opportunity is enough, because the connection stays slow.
        (None, Kind::Slow(_)) if !timed => When::Nth(Span { least: 1, most: 1 }),
        (None, _) => When::Any,
    };
    let is_repeated = match options.when {
        Some((When::Every(_) | When::Chance(_), _)) => true,
        Some(_) => false,
        None => kind.is_repeated(),
    };
    let default_directions = match kind {
        Kind::Stall(_) | Kind::Slow(_) | Kind::PortDown(_) => Directions::BOTH,
        _ => Directions::OUT,
    };
    Ok(Rule {
        kind,
        select: options.select,
        when,
        not_before: options.not_before,
        times: options.times.or((!is_repeated).then_some(1)),
        directions: options.directions.unwrap_or(default_directions),
    })
}

fn kind(row: &Row, name: Piece<'_>, value: Option<Piece<'_>>) -> Result<Kind> {
    let text = value.map_or("", |value| value.text);
    if let Some(kind) = (row.make)(text) {
        return Ok(kind);
    }
    match value {
        Some(value) if row.value.is_empty() => Err((value.range(), Mistake::NeedlessValue)),
        Some(value) if !text.is_empty() => {
            Err((value.range(), Mistake::Value(expected_value(row))))
        }
        _ => Err((name.range(), Mistake::NoValue(expected_value(row)))),
    }
}

fn option(row: &Row, part: Piece<'_>, o: &mut Options) -> Result<()> {
    const TIME: &str = "a time with its unit, such as 250us, 20ms or 3s";
    let (name, value) = part.pair();
    let known = row.keys.iter().chain(&COMMON);
    if !known.clone().any(|key| *key == name.text) {
        let key = name.text.to_owned();
        let known = known.copied().collect();
        return Err((name.range(), Mistake::UnknownKey { key, known }));
    }
    match name.text {
        "qp" | "peer" | "op" => target(name, value, o),
        "nth" | "every" | "p" | "bytes" => frequency(name, value, o),
        "time" => {
            let time = parse_value(name, value, TIME, |v| Span::read(v, values::time))?;
            set_once(&mut o.not_before, time, name)
        }
        "times" => {
            let times = parse_value(name, value, "a number from 1", values::count)?;
            set_once(&mut o.times, times, name)
        }
        "dir" => {
            let dir = parse_value(name, value, "out, in or both", Directions::read)?;
            set_once(&mut o.directions, dir, name)
        }
        _ => {
            let errno = |v: &str| names::find(&ERRNOS, "", v);
            let wanted = "the name of an error such as ENOMEM or EAGAIN";
            set_once(&mut o.errno, parse_value(name, value, wanted, errno)?, name)
        }
    }
}

/// Parses an option of [`Select`](super::Select).
fn target(name: Piece<'_>, value: Option<Piece<'_>>, o: &mut Options) -> Result<()> {
    match name.text {
        "qp" => {
            let wanted =
                "a position in the order of creation, or a queue pair number such as 0x1a2b";
            set_once(
                &mut o.select.qp,
                parse_value(name, value, wanted, QpFilter::read)?,
                name,
            )
        }
        "peer" => {
            let wanted =
                "an address: 192.0.2.7, 192.0.2.0/24, 192.0.2.7:7471 or [2001:db8::1]:7471";
            let peer = parse_value(name, value, wanted, PeerFilter::read)?;
            set_once(&mut o.select.peer, peer, name)
        }
        _ => {
            let wanted = "send, write, read, atomic, local or recv, or several joined by +";
            o.ops_at = value.map(Piece::range);
            set_once(
                &mut o.select.ops,
                parse_value(name, value, wanted, Ops::read)?,
                name,
            )
        }
    }
}

fn frequency(name: Piece<'_>, value: Option<Piece<'_>>, o: &mut Options) -> Result<()> {
    match name.text {
        "nth" => {
            let nth = |v: &str| Span::read(v, values::count).map(When::Nth);
            let nth = parse_value(
                name,
                value,
                "a number from 1, or a range such as 5..50",
                nth,
            )?;
            set_when(o, nth, "nth", name)
        }
        "every" => {
            let every = |v: &str| values::count(v).map(When::Every);
            let every = parse_value(name, value, "a number from 1", every)?;
            set_when(o, every, "every", name)
        }
        "p" => {
            let chance = |v: &str| Chance::read(v).map(When::Chance);
            let chance = parse_value(name, value, "a probability such as 0.01 or 1%", chance)?;
            set_when(o, chance, "p", name)
        }
        _ => {
            let bytes = |v: &str| Span::read(v, values::size).map(When::Bytes);
            let wanted = "a number of octets such as 1500 or 64K, or a range such as 1K..1M";
            let bytes = parse_value(name, value, wanted, bytes)?;
            set_when(o, bytes, "bytes", name)
        }
    }
}

/// Sets at which opportunities the rule injects its fault.
fn set_when(o: &mut Options, when: When, key: &'static str, name: Piece<'_>) -> Result<()> {
    match o.when.replace((when, key)) {
        Some((_, before)) if before == key => Err((name.range(), Mistake::Twice)),
        Some((_, before)) => Err((name.range(), Mistake::Excludes(before, key))),
        None => Ok(()),
    }
}
