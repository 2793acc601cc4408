//! Disturbances of the two processes and of the network between them.

use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::process::{Resource, Rlimit, Signal, prlimit};

use super::end::End;
use super::network::{Network, Side};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    SuspendServer,
    SuspendClient,
    ShortCut,
    ChangedMtu,
    NoDescriptorsAtServer,
    NoDescriptorsAtClient,
    AddressRemovedBriefly,
    LongCut,
    AddressRemovedLong,
    KillServer,
    KillClient,
}

/// Longest duration of a brief disturbance, in milliseconds. It is below the peers' time-out.
const BRIEF_MS: u64 = 700;
/// On a busy machine, a brief disturbance may take longer than intended. If it takes longer than
/// this, it may end connections.
const BRIEF_LIMIT: Duration = Duration::from_secs(2);
/// Duration of a long disturbance, above the peers' time-out.
const LONG: Duration = Duration::from_secs(7);
/// Longest suspension of a process, in milliseconds.
const SUSPENDED_MS: u64 = 2500;
/// MTUs that replace 1500 for a while.
const MTUS: [u32; 4] = [576, 1280, 4000, 9000];

impl Kind {
    pub(super) const ALL: &[Self] = &[
        Self::SuspendServer,
        Self::SuspendClient,
        Self::ShortCut,
        Self::ChangedMtu,
        Self::NoDescriptorsAtServer,
        Self::NoDescriptorsAtClient,
        Self::AddressRemovedBriefly,
        Self::KillServer,
        Self::KillClient,
        Self::LongCut,
        Self::AddressRemovedLong,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::SuspendServer => "server suspended (SIGSTOP)",
            Self::SuspendClient => "client suspended (SIGSTOP)",
            Self::ShortCut => "link down, briefly",
            Self::ChangedMtu => "MTU changed",
            Self::NoDescriptorsAtServer => "server without descriptors",
            Self::NoDescriptorsAtClient => "client without descriptors",
            Self::AddressRemovedBriefly => "address removed, briefly",
            Self::LongCut => "link down for long",
            Self::AddressRemovedLong => "address removed for long",
            Self::KillServer => "server killed (SIGKILL)",
            Self::KillClient => "client killed (SIGKILL)",
        }
    }

    /// Returns `true` if disturbances of this kind may end connections.
    pub(super) const fn ends_connections(self) -> bool {
        matches!(
            self,
            Self::LongCut | Self::AddressRemovedLong | Self::KillServer | Self::KillClient
        )
    }

    /// Returns `true` if no packets pass during the disturbance, and neither process is notified.
    pub(super) const fn is_cut(self) -> bool {
        matches!(
            self,
            Self::ShortCut | Self::AddressRemovedBriefly | Self::LongCut | Self::AddressRemovedLong
        )
    }

    /// Causes the disturbance. Returns `true` if it may have ended connections.
    pub(super) fn run(
        self,
        network: &Network,
        ends: &mut [End; 2],
        random: &mut Random,
    ) -> Result<bool> {
        let begin = Instant::now();
        self.disturb(network, ends, random)?;
        let long = self.is_cut() && begin.elapsed() > BRIEF_LIMIT;
        Ok(self.ends_connections() || long)
    }

    fn disturb(self, network: &Network, ends: &mut [End; 2], random: &mut Random) -> Result<()> {
        let brief = Duration::from_millis(100 + random.below(BRIEF_MS));
        let [server, client] = ends;
        match self {
            Self::SuspendServer => suspend(server, random),
            Self::SuspendClient => suspend(client, random),
            Self::ShortCut => cut(network, brief),
            Self::LongCut => cut(network, LONG),
            Self::ChangedMtu => {
                let index = random.below(MTUS.len() as u64) as usize;
                network.set_mtu(MTUS.get(index).copied().unwrap_or(576))?;
                std::thread::sleep(brief * 2);
                network.set_mtu(1500)
            }
            Self::NoDescriptorsAtServer | Self::NoDescriptorsAtClient => {
                exhaust_descriptors(ends, self == Self::NoDescriptorsAtServer)
            }
            Self::AddressRemovedBriefly => without_address(network, random, brief),
            Self::AddressRemovedLong => without_address(network, random, LONG),
            Self::KillServer => server.replace(network),
            Self::KillClient => client.replace(network),
        }
    }
}

fn suspend(end: &End, random: &mut Random) -> Result<()> {
    end.signal(Signal::STOP)?;
    std::thread::sleep(Duration::from_millis(100 + random.below(SUSPENDED_MS)));
    end.signal(Signal::CONT)
}

fn cut(network: &Network, time: Duration) -> Result<()> {
    network.set_link(false)?;
    std::thread::sleep(time);
    network.set_link(true)
}

fn without_address(network: &Network, random: &mut Random, time: Duration) -> Result<()> {
    let side = if random.below(2) == 0 {
        Side::Server
    } else {
        Side::Client
    };
    network.set_address(side, false)?;
    std::thread::sleep(time);
    network.set_address(side, true)
}

/// Lets a process run out of file descriptors while the client closes and opens connections.
fn exhaust_descriptors(ends: &mut [End; 2], at_server: bool) -> Result<()> {
    let pid = ends[usize::from(!at_server)].pid()?;
    let old = prlimit(
        Some(pid),
        Resource::Nofile,
        Rlimit {
            // Open descriptors stay usable, but the process has more than 8, so it cannot open
            // another.
            current: Some(8),
            maximum: hard_limit(pid)?,
        },
    )?;
    ends[1].send_command("churn 6");
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

/// A random number generator (SplitMix64).
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

    /// Returns a number below `bound`.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    /// Returns a random kind. Kinds that end connections are rarer, so that some processes and
    /// connections live long.
    pub(super) fn kind(&mut self) -> Kind {
        let keeps_connections = self.below(6) != 0;
        let kinds: Vec<Kind> = Kind::ALL
            .iter()
            .copied()
            .filter(|kind| kind.ends_connections() != keeps_connections)
            .collect();
        let index = self.below(kinds.len() as u64) as usize;
        kinds.get(index).copied().unwrap_or(Kind::SuspendServer)
    }
}

pub(super) fn fresh_seed() -> Result<u64> {
    let mut octets = [0; 4];
    std::io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut octets)?;
    Ok(u64::from(u32::from_ne_bytes(octets)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_determines_disturbances() {
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
