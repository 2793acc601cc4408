//! The disturbances of the two ends and of the network between them.

use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::process::{Resource, Rlimit, Signal, prlimit};

use super::end::End;
use super::network::{Network, Side};

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

/// Duration of a short disturbance, in milliseconds: below the peers' time-out.
const SHORT: u64 = 700;
/// A short disturbance may take longer on a busy machine. Above this limit it may end connections.
const NOT_SHORT: Duration = Duration::from_secs(2);
/// Duration of a long disturbance, above the peers' time-out.
const LONG: Duration = Duration::from_secs(7);
/// Longest stop of a process, in milliseconds.
const STOPPED: u64 = 2500;
/// MTUs that replace 1500 for a while.
const MTUS: [u32; 4] = [576, 1280, 4000, 9000];

impl Kind {
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

    /// Returns `true` if connections may be lost.
    pub(super) const fn ends_connections(self) -> bool {
        matches!(
            self,
            Self::LongCut | Self::AddressGone | Self::KillServer | Self::KillClient
        )
    }

    /// Returns `true` if no packet passes meanwhile and neither end is notified.
    pub(super) const fn is_cut(self) -> bool {
        matches!(
            self,
            Self::ShortCut | Self::AddressAway | Self::LongCut | Self::AddressGone
        )
    }

    /// Runs the disturbance. Returns `true` if connections may be lost.
    pub(super) fn run(
        self,
        network: &Network,
        ends: &mut [End; 2],
        random: &mut Random,
    ) -> Result<bool> {
        let begin = Instant::now();
        self.go(network, ends, random)?;
        let long = self.is_cut() && begin.elapsed() > NOT_SHORT;
        Ok(self.ends_connections() || long)
    }

    fn go(self, network: &Network, ends: &mut [End; 2], random: &mut Random) -> Result<()> {
        let brief = Duration::from_millis(100 + random.below(SHORT));
        let [server, client] = ends;
        match self {
            Self::StopServer => stop(server, random),
            Self::StopClient => stop(client, random),
            Self::ShortCut => cut(network, brief),
            Self::LongCut => cut(network, LONG),
            Self::ChangedMtu => {
                let index = random.below(MTUS.len() as u64) as usize;
                network.mtu(MTUS.get(index).copied().unwrap_or(576))?;
                std::thread::sleep(brief * 2);
                network.mtu(1500)
            }
            Self::NoDescriptorsAtServer | Self::NoDescriptorsAtClient => {
                exhaust(ends, self == Self::NoDescriptorsAtServer)
            }
            Self::AddressAway => without_address(network, random, brief),
            Self::AddressGone => without_address(network, random, LONG),
            Self::KillServer => server.replace(network),
            Self::KillClient => client.replace(network),
        }
    }
}

fn stop(end: &End, random: &mut Random) -> Result<()> {
    end.signal(Signal::STOP)?;
    std::thread::sleep(Duration::from_millis(100 + random.below(STOPPED)));
    end.signal(Signal::CONT)
}

fn cut(network: &Network, time: Duration) -> Result<()> {
    network.cable(false)?;
    std::thread::sleep(time);
    network.cable(true)
}

fn without_address(network: &Network, random: &mut Random, time: Duration) -> Result<()> {
    let side = if random.below(2) == 0 {
        Side::Server
    } else {
        Side::Client
    };
    network.address(side, false)?;
    std::thread::sleep(time);
    network.address(side, true)
}

/// Deprives an end of free descriptors while the client reopens connections.
fn exhaust(ends: &mut [End; 2], at_server: bool) -> Result<()> {
    let pid = ends[usize::from(!at_server)].pid()?;
    let old = prlimit(
        Some(pid),
        Resource::Nofile,
        Rlimit {
            // Open descriptors stay usable, but a new one would exceed this number.
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

/// Random numbers from a seed (SplitMix64).
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

    /// Returns a kind. Kinds that end connections are rarer, so that processes and connections also
    /// grow old.
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
