//! Admission: limits the number of clients, in total and per address, and decides which client is
//! evicted when a new one connects and all places are taken.
//!
//! A client that neither sends nor receives must not keep others out. How long it may be idle
//! before it can be evicted depends on what it has done:
//!
//! - A *stranger* has made no valid request yet. It may be idle for [`STRANGER_GRACE`] in each step
//!   of its set-up and of its login, and before its first request.
//! - A *known* client has made a valid request. It may be idle for [`KNOWN_GRACE`].
//! - A client at work is never evicted.
//!
//! Strangers are evicted first. Known clients are evicted only while strangers hold less than half
//! of the places. So strangers cannot displace all idle known clients, and idle known clients
//! cannot keep all newcomers out.
//!
//! If another address has more strangers than the new client's address would have, one of those
//! strangers is evicted before its grace is over. If no client can be evicted, the new client is
//! refused and may retry; strangers lose their grace so soon that a place becomes free shortly.

use clap::Args;
use iwarp::{Config, Networks};
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A stranger that has been idle for this long may be evicted. The time exceeds the round trip on
/// most networks, so that a distant client can make its request. It is short, so that many clients
/// of one address, which cannot be told apart before their first request, get a place each second.
const STRANGER_GRACE: Duration = Duration::from_millis(100);
/// A known client that has been idle for this long may be evicted.
const KNOWN_GRACE: Duration = Duration::from_secs(2);

/// The value of [`Place::last_progress`] while the server works for the client; such a client is
/// not idle.
const AT_WORK: u64 = u64::MAX;

/// Limits of a server.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Limits (with `serve`)")]
pub struct Limits {
    /// Clients served at a time [default: 64]. If all places are taken, a new client replaces one
    /// that has sent no request within 0.1 s or has been idle for 2 s. If there is no such client,
    /// the new one is refused
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    max_clients: Option<u32>,
    /// Clients per address served at a time [default: 32]. IPv6 addresses in one /64 count as one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    max_per_address: Option<u32>,
    /// Serve only clients in these networks, for example 10.0.0.0/8,2001:db8::/32 [default: all].
    /// Other connections are reset
    #[arg(long, value_name = "LIST")]
    allow: Option<Networks>,
}

impl Limits {
    /// Returns the number of clients that are served at a time.
    pub fn clients(&self) -> usize {
        self.max_clients.unwrap_or(64) as usize
    }

    /// Returns the number of clients of one address that are served at a time.
    pub fn per_address(&self) -> usize {
        self.max_per_address.unwrap_or(32) as usize
    }

    /// Returns the settings with the restriction of `--allow`.
    pub fn apply(&self, mut config: Config) -> Config {
        if let Some(allow) = &self.allow {
            config.admission.peers = allow.clone();
        }
        config
    }

    /// Returns `true` if `--allow` permits a client with this address.
    pub fn admits(&self, address: IpAddr) -> bool {
        self.allow
            .as_ref()
            .is_none_or(|allow| allow.contains(address))
    }

    /// Returns the name of the first of these options that was given.
    pub fn given(&self) -> Option<&'static str> {
        match self {
            Self {
                max_clients: Some(_),
                ..
            } => Some("--max-clients"),
            Self {
                max_per_address: Some(_),
                ..
            } => Some("--max-per-address"),
            Self { allow: Some(_), .. } => Some("--allow"),
            _ => None,
        }
    }
}

/// Why a client is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Full {
    /// The server has this many clients, and none of them can be evicted now.
    All(usize),
    /// The client's address has this many clients, and none of them can be evicted now.
    Address(usize),
}

impl std::fmt::Display for Full {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::All(n) => write!(f, "the server has {n} clients already, try again later"),
            Self::Address(n) => write!(
                f,
                "the server has {n} clients of your address already, try again later"
            ),
        }
    }
}

/// The places of a server. The accepting thread and the guests share it.
#[derive(Debug)]
pub struct Gate {
    clients: usize,
    per_address: usize,
    guests: Mutex<Vec<Arc<Place>>>,
    clock: Clock,
}

/// Counts milliseconds since the gate was created.
#[derive(Debug)]
enum Clock {
    Real(Instant),
    /// Advanced by the test.
    #[cfg(test)]
    Manual(AtomicU64),
}

impl Clock {
    fn now_ms(&self) -> u64 {
        match self {
            Self::Real(epoch) => epoch.elapsed().as_millis() as u64,
            #[cfg(test)]
            Self::Manual(ms) => ms.load(Ordering::Relaxed),
        }
    }
}

struct Place {
    /// The client's [`limited_address`].
    address: IpAddr,
    /// Time of the client's last progress, in milliseconds since the gate was created, or
    /// [`AT_WORK`].
    last_progress: AtomicU64,
    /// Set once the client has made a valid request; before, it is a stranger.
    known: AtomicBool,
    evicted: AtomicBool,
    evict: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl std::fmt::Debug for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Place")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

impl Gate {
    /// Creates a gate with all places free.
    pub fn new(clients: usize, per_address: usize) -> Arc<Self> {
        Arc::new(Self {
            clients,
            per_address,
            guests: Mutex::default(),
            clock: Clock::Real(Instant::now()),
        })
    }

    fn guests(&self) -> MutexGuard<'_, Vec<Arc<Place>>> {
        // Every statement leaves the list consistent, so a poisoned lock is harmless.
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a new client a place, and evicts another client if necessary. The new client counts as
    /// at work until [`advance`](Guest::advance).
    ///
    /// # Errors
    /// Fails if no place is free and no client can be evicted.
    pub fn admit(self: &Arc<Self>, address: IpAddr) -> Result<Guest, Full> {
        let address = limited_address(address);
        let mut guests = self.guests();
        let same_address = guests.iter().filter(|g| g.counts(Some(address))).count();
        let full = if same_address >= self.per_address {
            Some((Full::Address(same_address), Some(address)))
        } else {
            let all = guests.iter().filter(|g| g.counts(None)).count();
            (all >= self.clients).then_some((Full::All(all), None))
        };
        let mut victim = None;
        if let Some((full, only_from)) = full {
            // The thread of an evicted client ends a little later. Limit these threads as well.
            if guests.len() >= 2 * self.clients {
                return Err(full);
            }
            victim = self.victim(&guests, only_from, address).cloned();
            if victim.is_none() {
                return Err(full);
            }
        }
        let place = Arc::new(Place {
            address,
            last_progress: AtomicU64::new(AT_WORK),
            known: AtomicBool::new(false),
            evicted: AtomicBool::new(false),
            evict: Mutex::new(None),
        });
        guests.push(Arc::clone(&place));
        if let Some(victim) = &victim {
            victim.evicted.store(true, Ordering::Release);
        }
        drop(guests);
        if let Some(victim) = victim {
            tracing::info!(address = %victim.address, "an idle client is evicted for a new one");
            victim.run_evict();
        }
        Ok(Guest {
            gate: Arc::clone(self),
            place,
        })
    }

    /// Returns the client to evict for a new one from `address`. If `only_from` is given, only
    /// clients of that address are considered.
    fn victim<'a>(
        &self,
        guests: &'a [Arc<Place>],
        only_from: Option<IpAddr>,
        address: IpAddr,
    ) -> Option<&'a Arc<Place>> {
        let now = self.clock.now_ms();
        let (strangers, known): (Vec<_>, Vec<_>) = guests
            .iter()
            .filter(|g| g.counts(only_from))
            .partition(|g| !g.is_known());
        let mut strangers_by_address = HashMap::<IpAddr, usize>::new();
        for g in &strangers {
            *strangers_by_address.entry(g.address).or_default() += 1;
        }
        let strangers_of = |address| strangers_by_address.get(&address).copied().unwrap_or(0);
        let with_new_client = strangers_of(address) + 1;
        let places = only_from.map_or(self.clients, |_| self.per_address);
        let may_evict_known = strangers.len() < places.div_ceil(2);
        let stranger = strangers
            .into_iter()
            .filter(|g| g.idle(now) >= STRANGER_GRACE || strangers_of(g.address) > with_new_client)
            .max_by_key(|g| (strangers_of(g.address), g.idle(now)));
        stranger.or_else(|| {
            let idle = known.into_iter().filter(|g| g.idle(now) >= KNOWN_GRACE);
            idle.filter(|_| may_evict_known).max_by_key(|g| g.idle(now))
        })
    }

    /// Returns `true` if no thread is serving a client.
    pub fn is_empty(&self) -> bool {
        self.guests().is_empty()
    }
}

/// Returns the address for the limit per address. A host usually has a whole IPv6 /64, so a /64
/// counts as one address.
fn limited_address(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & (u128::MAX << 64))),
        v4 => v4,
    }
}

impl Place {
    fn last_progress(&self) -> u64 {
        self.last_progress.load(Ordering::Relaxed)
    }

    /// Returns how long the client has made no progress at time `now_ms`.
    fn idle(&self, now_ms: u64) -> Duration {
        Duration::from_millis(now_ms.saturating_sub(self.last_progress()))
    }

    fn is_known(&self) -> bool {
        self.known.load(Ordering::Relaxed)
    }

    /// Returns `true` if the client has not been evicted and is from `address` (if given).
    fn counts(&self, address: Option<IpAddr>) -> bool {
        !self.evicted.load(Ordering::Acquire) && address.is_none_or(|a| a == self.address)
    }

    fn run_evict(&self) {
        let evict = self
            .evict
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(evict) = evict {
            evict();
        }
    }
}

/// A client that holds a place. Dropping it frees the place.
#[derive(Debug)]
pub struct Guest {
    gate: Arc<Gate>,
    place: Arc<Place>,
}

impl Guest {
    /// Sets the function that ends the client's connection when the client is evicted. It is called
    /// from any thread, or immediately if the client has already been evicted.
    pub fn on_evict(&self, evict: impl FnOnce() + Send + 'static) {
        *self
            .place
            .evict
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(Box::new(evict));
        if self.is_evicted() {
            self.place.run_evict();
        }
    }

    /// Returns `true` if the client has been evicted.
    pub fn is_evicted(&self) -> bool {
        self.place.evicted.load(Ordering::Acquire)
    }

    /// Restarts a stranger's grace for the next step of the protocol. Call this at most once per
    /// step before the first request, or a stranger could keep its place forever.
    pub fn advance(&self) {
        self.set_last_progress(self.now_ms());
    }

    /// Records a valid request and progress; the client is known from now on.
    pub fn served(&self) {
        self.place.known.store(true, Ordering::Relaxed);
        self.set_last_progress(self.now_ms());
    }

    /// Records progress. Has no effect for a stranger.
    pub fn touch(&self) {
        if self.place.is_known() {
            self.set_last_progress(self.now_ms());
        }
    }

    /// Records a data transfer from or to the client. Unlike [`touch`](Self::touch), this does not
    /// end [`at_work`](Self::at_work).
    pub fn data_moved(&self) {
        if self.place.last_progress() != AT_WORK {
            self.touch();
        }
    }

    /// Records a valid request on which the server starts to work. Until the next call of
    /// [`touch`](Self::touch), the client is not idle.
    pub fn at_work(&self) {
        self.place.known.store(true, Ordering::Relaxed);
        self.set_last_progress(AT_WORK);
    }

    fn set_last_progress(&self, last: u64) {
        self.place.last_progress.store(last, Ordering::Relaxed);
    }

    fn now_ms(&self) -> u64 {
        self.gate.clock.now_ms()
    }

    /// Evicts the client: ends its connection and frees its place.
    pub fn evict(&self) {
        self.place.evicted.store(true, Ordering::Release);
        self.place.run_evict();
    }

    /// Returns how long the client has made no progress.
    pub fn idle(&self) -> Duration {
        self.place.idle(self.now_ms())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.gate.guests().retain(|g| !Arc::ptr_eq(g, &self.place));
    }
}

#[cfg(test)]
#[path = "gate_tests.rs"]
mod tests;
