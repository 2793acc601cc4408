//! What happens to the two ends and to the network between them.

use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::process::{Resource, Rlimit, Signal, prlimit};

use super::end::End;
use super::place::{Place, Side};

/// A kind of disturbance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    StopServer,
    StopClient,
    ShortCut,
    ChangedMtu,
    NoDescriptorsAtServer,
    NoDescriptorsAtClient,
    AddressAway,
    LongCut,
    AddressGone,
    KillServer,
    KillClient,
}

/// A disturbance that is too short for a peer to be given up, in milliseconds.
const SHORT: u64 = 700;
/// On a busy machine it may take longer than it should. What took longer than this may end
/// connections.
const NOT_SHORT: Duration = Duration::from_secs(2);
/// One after which every peer has been given up.
const LONG: Duration = Duration::from_secs(7);
/// How long a process stands still, at most, in milliseconds.
const STOPPED: u64 = 2500;
/// MTUs that are set, in turn with 1500.
const MTUS: [u32; 4] = [576, 1280, 4000, 9000];

impl Kind {
    /// Each kind.
    pub(super) const ALL: &[Self] = &[
        Self::StopServer,
        Self::StopClient,
        Self::ShortCut,
        Self::ChangedMtu,
        Self::NoDescriptorsAtServer,
        Self::NoDescriptorsAtClient,
        Self::AddressAway,
        Self::KillServer,
        Self::KillClient,
        Self::LongCut,
        Self::AddressGone,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::StopServer => "server stopped (SIGSTOP)",
            Self::StopClient => "client stopped (SIGSTOP)",
            Self::ShortCut => "link down, briefly",
            Self::ChangedMtu => "MTU changed",
            Self::NoDescriptorsAtServer => "server without descriptors",
            Self::NoDescriptorsAtClient => "client without descriptors",
            Self::AddressAway => "address removed, briefly",
            Self::LongCut => "link down for long",
            Self::AddressGone => "address removed for long",
            Self::KillServer => "server killed (SIGKILL)",
            Self::KillClient => "client killed (SIGKILL)",
        }
    }

    /// Connections may be lost. By all others none may be.
    pub(super) const fn ends_connections(self) -> bool {
        matches!(
            self,
            Self::LongCut | Self::AddressGone | Self::KillServer | Self::KillClient
        )
    }

    /// Nothing gets from one end to the other meanwhile, and neither is told.
    pub(super) const fn is_cut(self) -> bool {
        matches!(
            self,
            Self::ShortCut | Self::AddressAway | Self::LongCut | Self::AddressGone
        )
    }

    /// Lets it happen. Returns `true` if connections may be lost.
    pub(super) fn happen(
        self,
        place: &Place,
        ends: &mut [End; 2],
        random: &mut Random,
    ) -> Result<bool> {
        let begin = Instant::now();
        self.go(place, ends, random)?;
        let long = self.is_cut() && begin.elapsed() > NOT_SHORT;
        Ok(self.ends_connections() || long)
    }

    fn go(self, place: &Place, ends: &mut [End; 2], random: &mut Random) -> Result<()> {
        let brief = Duration::from_millis(100 + random.below(SHORT));
        let [server, client] = ends;
        match self {
            Self::StopServer => stop(server, random),
            Self::StopClient => stop(client, random),
            Self::ShortCut => cut(place, brief),
            Self::LongCut => cut(place, LONG),
            Self::ChangedMtu => {
                let index = random.below(MTUS.len() as u64) as usize;
                place.mtu(MTUS.get(index).copied().unwrap_or(576))?;
                std::thread::sleep(brief * 2);
                place.mtu(1500)
            }
            Self::NoDescriptorsAtServer | Self::NoDescriptorsAtClient => {
                exhaust(ends, self == Self::NoDescriptorsAtServer)
            }
            Self::AddressAway => without_address(place, random, brief),
            Self::AddressGone => without_address(place, random, LONG),
            Self::KillServer => server.replace(place),
            Self::KillClient => client.replace(place),
        }
    }
}

fn stop(end: &End, random: &mut Random) -> Result<()> {
    end.signal(Signal::STOP)?;
    std::thread::sleep(Duration::from_millis(100 + random.below(STOPPED)));
    end.signal(Signal::CONT)
}

fn cut(place: &Place, time: Duration) -> Result<()> {
    place.cable(false)?;
    std::thread::sleep(time);
    place.cable(true)
}

fn without_address(place: &Place, random: &mut Random, time: Duration) -> Result<()> {
    let side = if random.below(2) == 0 {
        Side::Server
    } else {
        Side::Client
    };
    place.address(side, false)?;
    std::thread::sleep(time);
    place.address(side, true)
}

/// Leaves an end no free descriptor, and has the client open connections anew meanwhile.
fn exhaust(ends: &mut [End; 2], at_server: bool) -> Result<()> {
    let pid = ends[usize::from(!at_server)].pid()?;
    let old = prlimit(
        Some(pid),
        Resource::Nofile,
        Rlimit {
            // Those that are open stay usable; a new one would get a number that is not below this.
            current: Some(8),
            maximum: hard_limit(pid)?,
        },
    )?;
    ends[1].say("churn 6");
    std::thread::sleep(Duration::from_secs(2));
    prlimit(Some(pid), Resource::Nofile, old)?;
    Ok(())
}

fn hard_limit(pid: rustix::process::Pid) -> Result<Option<u64>> {
    let text = std::fs::read_to_string(format!("/proc/{}/limits", pid.as_raw_nonzero()))?;
    let line = text.lines().find(|line| line.starts_with("Max open files"));
    let hard = line.and_then(|line| line.split_whitespace().nth(4));
    Ok(hard.and_then(|word| word.parse().ok()))
}

/// Random numbers that a seed decides (SplitMix64).
pub(super) struct Random(u64);

impl Random {
    pub(super) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number below `bound`.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    /// A kind of disturbance. Those that end connections are rarer, so that processes and
    /// connections also become old.
    pub(super) fn kind(&mut self) -> Kind {
        let gentle = self.below(6) != 0;
        let of: Vec<Kind> = Kind::ALL
            .iter()
            .copied()
            .filter(|kind| kind.ends_connections() != gentle)
            .collect();
        let index = self.below(of.len() as u64) as usize;
        of.get(index).copied().unwrap_or(Kind::StopServer)
    }
}

/// Returns a seed that nobody has chosen.
pub(super) fn fresh_seed() -> Result<u64> {
    let mut octets = [0; 4];
    std::io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut octets)?;
    Ok(u64::from(u32::from_ne_bytes(octets)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_decides_what_happens() {
        let kinds = |seed| {
            let mut random = Random::new(seed);
            (0..200).map(|_| random.kind()).collect::<Vec<_>>()
        };
        assert_eq!(kinds(7), kinds(7));
        assert_ne!(kinds(7), kinds(8));
        for kind in Kind::ALL {
            assert!(kinds(7).contains(kind), "{kind:?} never happens");
        }
    }
}
