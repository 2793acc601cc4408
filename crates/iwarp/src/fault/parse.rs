//! The parser of specifications.

use super::error::{Mistake, SpecError};
use super::kinds::{COMMON, KINDS, Kind, Row, wanted};
use super::names::{self, ERRNOS};
use super::values::{self, Chance, Directions, Ops, PeerFilter, QpFilter, Span};
use super::{Rule, Select, Spec, When};
use std::ops::Range;
use std::path::PathBuf;

/// A piece of the text, and its position.
#[derive(Clone, Copy)]
struct Piece<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Piece<'a> {
    fn range(self) -> Range<usize> {
        self.at..self.at + self.text.len()
    }

    /// Splits the piece at each `separator`, and trims the parts.
    fn split(self, separator: char) -> impl Iterator<Item = Self> {
        let mut at = self.at;
        self.text.split(separator).map(move |text| {
            let piece = Piece { text, at };
            at += text.len() + separator.len_utf8();
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
            at: self.at + name.len() + 1,
        };
        let name = Piece {
            text: name,
            at: self.at,
        };
        (name.trim(), Some(value.trim()))
    }

    fn trim(self) -> Self {
        let start = self.text.len() - self.text.trim_start().len();
        Self {
            text: self.text.trim(),
            at: self.at + start,
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
    let all = Piece { text, at: 0 };
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
                let seed = valued(name, value, "a whole number", values::number)?;
                once(&mut spec.seed, seed, name)?;
            }
            "log" => {
                let file = valued(name, value, "the name of a file", |v| {
                    Some(PathBuf::from(v))
                })?;
                once(&mut spec.log, file, name)?;
            }
            _ => spec.rules.push(rule(item)?),
        }
    }
    match spec.rules.is_empty() {
        true => Err((0..text.len(), Mistake::NoRule)),
        false => Ok(spec),
    }
}

/// Sets an option that may occur once.
fn once<T>(place: &mut Option<T>, value: T, name: Piece<'_>) -> Result<()> {
    match place.replace(value) {
        Some(_) => Err((name.range(), Mistake::Twice)),
        None => Ok(()),
    }
}

fn valued<T>(
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
    /// With the name of the option.
    when: Option<(When, &'static str)>,
    not_before: Option<Span>,
    times: Option<u64>,
    directions: Option<Directions>,
    errno: Option<i32>,
    /// Position of the option `op`.
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
    if let (Kind::RemoteAccess, Some(ops), Some(at)) = (kind, options.select.ops, options.ops_at) {
        // A rule that can never act is an error, too.
        if ![Ops::WRITE, Ops::READ, Ops::ATOMIC]
            .iter()
            .any(|op| ops.has(*op))
        {
            return Err((
                at,
                Mistake::Value("write, read or atomic: others have no key of the peer"),
            ));
        }
    }
    let timed = options.not_before.is_some();
    let when = match (options.when.map(|when| when.0), kind) {
        (Some(when), _) => when,
        // A slow connection stays slow.
        (None, Kind::Slow(_)) if !timed => When::Nth(Span { least: 1, most: 1 }),
        (None, _) => When::Any,
    };
    let often = match options.when {
        Some((When::Every(_) | When::Chance(_), _)) => true,
        Some(_) => false,
        None => kind.lasts(),
    };
    let usual = match kind {
        Kind::Stall(_) | Kind::Slow(_) | Kind::PortDown(_) => Directions::BOTH,
        _ => Directions::OUT,
    };
    Ok(Rule {
        kind,
        select: options.select,
        when,
        not_before: options.not_before,
        times: options.times.or((!often).then_some(1)),
        directions: options.directions.unwrap_or(usual),
    })
}

fn kind(row: &Row, name: Piece<'_>, value: Option<Piece<'_>>) -> Result<Kind> {
    let text = value.map_or("", |value| value.text);
    if let Some(kind) = (row.make)(text) {
        return Ok(kind);
    }
    match value {
        Some(value) if row.value.is_empty() => Err((value.range(), Mistake::NeedlessValue)),
        Some(value) if !text.is_empty() => Err((value.range(), Mistake::Value(wanted(row)))),
        _ => Err((name.range(), Mistake::NoValue(wanted(row)))),
    }
}

fn option(row: &Row, part: Piece<'_>, o: &mut Options) -> Result<()> {
    const TIME: &str = "a time with its unit, as 250us, 20ms or 3s";
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
            let time = valued(name, value, TIME, |v| Span::read(v, values::time))?;
            once(&mut o.not_before, time, name)
        }
        "times" => {
            let times = valued(name, value, "a number from 1", values::count)?;
            once(&mut o.times, times, name)
        }
        "dir" => {
            let dir = valued(name, value, "out, in or both", Directions::read)?;
            once(&mut o.directions, dir, name)
        }
        _ => {
            let errno = |v: &str| names::find(&ERRNOS, "", v);
            let wanted = "the name of an error, as ENOMEM or EAGAIN";
            once(&mut o.errno, valued(name, value, wanted, errno)?, name)
        }
    }
}

/// Parses an option of [`Select`](super::Select).
fn target(name: Piece<'_>, value: Option<Piece<'_>>, o: &mut Options) -> Result<()> {
    match name.text {
        "qp" => {
            let wanted =
                "a place in the order of creation, from 1, or a queue pair's number as 0x1a2b";
            once(
                &mut o.select.qp,
                valued(name, value, wanted, QpFilter::read)?,
                name,
            )
        }
        "peer" => {
            let wanted =
                "an address, as 192.0.2.7, 192.0.2.0/24, 192.0.2.7:7471 or [2001:db8::1]:7471";
            let peer = valued(name, value, wanted, PeerFilter::read)?;
            once(&mut o.select.peer, peer, name)
        }
        _ => {
            let wanted = "send, write, read, atomic, local or recv, or several with + between them";
            o.ops_at = value.map(Piece::range);
            once(
                &mut o.select.ops,
                valued(name, value, wanted, Ops::read)?,
                name,
            )
        }
    }
}

/// Parses an option of [`When`].
fn frequency(name: Piece<'_>, value: Option<Piece<'_>>, o: &mut Options) -> Result<()> {
    match name.text {
        "nth" => {
            let nth = |v: &str| Span::read(v, values::count).map(When::Nth);
            let nth = valued(name, value, "a number from 1, or a range as 5..50", nth)?;
            choose(o, nth, "nth", name)
        }
        "every" => {
            let every = |v: &str| values::count(v).map(When::Every);
            let every = valued(name, value, "a number from 1", every)?;
            choose(o, every, "every", name)
        }
        "p" => {
            let chance = |v: &str| Chance::read(v).map(When::Chance);
            let chance = valued(name, value, "a probability, as 0.01 or 1%", chance)?;
            choose(o, chance, "p", name)
        }
        _ => {
            let bytes = |v: &str| Span::read(v, values::size).map(When::Bytes);
            let wanted = "a number of octets, as 1500 or 64K, or a range as 1K..1M";
            let bytes = valued(name, value, wanted, bytes)?;
            choose(o, bytes, "bytes", name)
        }
    }
}

/// Sets which opportunities are taken.
fn choose(o: &mut Options, when: When, key: &'static str, name: Piece<'_>) -> Result<()> {
    match o.when.replace((when, key)) {
        Some((_, before)) if before == key => Err((name.range(), Mistake::Twice)),
        Some((_, before)) => Err((name.range(), Mistake::Excludes(before, key))),
        None => Ok(()),
    }
}
