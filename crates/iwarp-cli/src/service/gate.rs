//! Admission: limits how many clients are served at a time, in all and for each address, and decides which client has to leave if
//! a new one comes and all places are taken.
//!
//! A client that sends nothing and takes nothing uses a place. Idle clients must not keep others out. So if all places are
//! taken, the client that has been idle for longest is evicted for a new one, if it has been idle for at least [`GRACE`]. Clients
//! at work are never evicted. If they hold all places, the new client is refused and may try again.

use clap::Args;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A client that has made no progress for this long may be evicted for a new one.
pub(crate) const GRACE: Duration = Duration::from_secs(2);

/// The value of a place's `last` while the server works for the client. The client then does not count as idle.
const AT_WORK: u64 = u64::MAX;

/// Limits of a server.
#[derive(Debug, Clone, Copy, Args)]
#[command(next_help_heading = "Limits (with `serve`)")]
pub(crate) struct Limits {
    /// Clients served at a time [default: 64]. If all places are taken, a new client replaces the client that has been
    /// idle for longest (at least 2 s), or is refused
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    max_clients: Option<u32>,
    /// Clients of one address served at a time [default: 32]. With IPv6, addresses with the same first 64 bits count as one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    max_per_address: Option<u32>,
}

impl Limits {
    /// Returns how many clients are served at a time.
    pub(crate) fn clients(&self) -> usize {
        self.max_clients.unwrap_or(64) as usize
    }

    /// Returns how many clients of one address are served at a time.
    pub(crate) fn per_address(&self) -> usize {
        self.max_per_address.unwrap_or(32) as usize
    }

    /// Returns the first of these options that was given, for the error message if they are not allowed.
    pub(crate) fn given(&self) -> Option<&'static str> {
        match self {
            Self {
                max_clients: Some(_),
                ..
            } => Some("--max-clients"),
            Self {
                max_per_address: Some(_),
                ..
            } => Some("--max-per-address"),
            _ => None,
        }
    }
}

/// Why a client is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Full {
    /// Clients at work hold all of this many places.
    All(usize),
    /// Clients at work hold all of this many places of the client's address.
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
pub(crate) struct Gate {
    clients: usize,
    per_address: usize,
    guests: Mutex<Vec<Arc<Place>>>,
    epoch: Instant,
}

/// One place that is taken.
struct Place {
    /// The address as it is [`counted`].
    address: IpAddr,
    /// The time of the client's last progress, in milliseconds since the gate was made, or [`AT_WORK`].
    last: AtomicU64,
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
    /// Makes a gate with all places free.
    pub(crate) fn new(clients: usize, per_address: usize) -> Arc<Self> {
        Arc::new(Self {
            clients,
            per_address,
            guests: Mutex::default(),
            epoch: Instant::now(),
        })
    }

    fn guests(&self) -> MutexGuard<'_, Vec<Arc<Place>>> {
        // The list is consistent between any two statements, so a panic of another thread while it had the lock does no harm.
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_ms(&self) -> u64 {
        self.epoch.elapsed().as_millis() as u64
    }

    /// Gives a new client a place. If none is free, it evicts the client that has been idle for longest.
    ///
    /// # Errors
    /// If no place is free and no client has been idle for [`GRACE`].
    pub(crate) fn admit(self: &Arc<Self>, address: IpAddr) -> Result<Guest, Full> {
        let address = counted(address);
        let now = self.now_ms();
        let mut guests = self.guests();
        let here = guests.iter().filter(|g| g.holds(Some(address))).count();
        let full = if here >= self.per_address {
            Some((Full::Address(here), Some(address)))
        } else {
            let all = guests.iter().filter(|g| g.holds(None)).count();
            (all >= self.clients).then_some((Full::All(all), None))
        };
        let mut victim = None;
        if let Some((full, whose)) = full {
            // An evicted client holds no place, but its thread ends a little later. Limit the number of these threads, too.
            if guests.len() >= 2 * self.clients {
                return Err(full);
            }
            victim = guests
                .iter()
                .filter(|g| {
                    g.holds(whose) && now.saturating_sub(g.last()) >= GRACE.as_millis() as u64
                })
                .min_by_key(|g| g.last())
                .cloned();
            if victim.is_none() {
                return Err(full);
            }
        }
        let place = Arc::new(Place {
            address,
            last: AtomicU64::new(now),
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

    /// Returns `true` while any thread still serves a client.
    pub(crate) fn is_empty(&self) -> bool {
        self.guests().is_empty()
    }
}

/// Returns the address by which clients are counted. Whoever has one IPv6 address usually has all of its /64, so these count as
/// one.
fn counted(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & (u128::MAX << 64))),
        v4 => v4,
    }
}

impl Place {
    fn last(&self) -> u64 {
        self.last.load(Ordering::Relaxed)
    }

    /// Returns `true` if the place belongs to a client of `address` (of any address for `None`) that is not evicted.
    fn holds(&self, address: Option<IpAddr>) -> bool {
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

/// A client that has a place. Dropping it frees the place.
#[derive(Debug)]
pub(crate) struct Guest {
    gate: Arc<Gate>,
    place: Arc<Place>,
}

impl Guest {
    /// Sets the function that ends the client's connection if the client is evicted. Another thread may call it. If the client is
    /// evicted already, it is called at once.
    pub(crate) fn on_evict(&self, evict: impl FnOnce() + Send + 'static) {
        *self
            .place
            .evict
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(Box::new(evict));
        if self.is_evicted() {
            self.place.run_evict();
        }
    }

    /// Returns `true` if the client has lost its place to another one.
    pub(crate) fn is_evicted(&self) -> bool {
        self.place.evicted.load(Ordering::Acquire)
    }

    /// Notes that the client has made progress.
    pub(crate) fn touch(&self) {
        self.place.last.store(self.gate.now_ms(), Ordering::Relaxed);
    }

    /// Notes that octets of the client have moved. If the server works for the client, it goes on doing so: unlike
    /// [`touch`](Self::touch), this does not end [`at_work`](Self::at_work).
    pub(crate) fn moves(&self) {
        if self.place.last() != AT_WORK {
            self.touch();
        }
    }

    /// Notes that the server works for the client from now until [`touch`](Self::touch). The client is not idle meanwhile.
    pub(crate) fn at_work(&self) {
        self.place.last.store(AT_WORK, Ordering::Relaxed);
    }

    /// Takes the place away and ends the client's connection.
    pub(crate) fn evict(&self) {
        self.place.evicted.store(true, Ordering::Release);
        self.place.run_evict();
    }

    /// Returns for how long the client has made no progress.
    pub(crate) fn idle(&self) -> Duration {
        Duration::from_millis(self.gate.now_ms().saturating_sub(self.place.last()))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.gate.guests().retain(|g| !Arc::ptr_eq(g, &self.place));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
    const B: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));

    /// Makes the gate believe that the guest has made no progress for `ms` milliseconds.
    fn age(guest: &Guest, ms: u64) {
        let last = guest.gate.now_ms() - ms;
        guest.place.last.store(last, Ordering::Relaxed);
    }

    /// Makes a gate whose clock has run for an hour.
    fn old_gate(clients: usize, per_address: usize) -> Arc<Gate> {
        Arc::new(Gate {
            clients,
            per_address,
            guests: Mutex::default(),
            epoch: Instant::now() - Duration::from_secs(3600),
        })
    }

    #[test]
    fn places_are_limited_and_come_back() {
        let gate = old_gate(3, 2);
        let first = gate.admit(A).unwrap();
        let _second = gate.admit(A).unwrap();
        assert_eq!(gate.admit(A).unwrap_err(), Full::Address(2));
        // The same host, as an IPv4-mapped IPv6 address.
        let IpAddr::V4(v4) = A else { unreachable!() };
        let mapped = IpAddr::V6(v4.to_ipv6_mapped());
        assert_eq!(gate.admit(mapped).unwrap_err(), Full::Address(2));
        let _third = gate.admit(B).unwrap();
        assert_eq!(gate.admit(B).unwrap_err(), Full::All(3));
        drop(first);
        let _fourth = gate.admit(B).unwrap();
        assert_eq!(gate.admit(A).unwrap_err(), Full::All(3));
    }

    #[test]
    fn all_addresses_of_an_ipv6_network_count_as_one() {
        let gate = old_gate(9, 2);
        let admit = |ip: &str| gate.admit(ip.parse().unwrap());
        let _one = admit("2001:db8:1:2::1").unwrap();
        let _two = admit("2001:db8:1:2:ffff:ffff:ffff:ffff").unwrap();
        assert_eq!(admit("2001:db8:1:2:8000::").unwrap_err(), Full::Address(2));
        let _three = admit("2001:db8:1:3::1").unwrap();
        let _four = admit("192.0.2.1").unwrap();
    }

    #[test]
    fn the_idlest_leaves_for_a_new_one() {
        let gate = old_gate(2, 2);
        let (one, two) = (gate.admit(A).unwrap(), gate.admit(A).unwrap());
        let told = Arc::new(AtomicBool::new(false));
        let tell = Arc::clone(&told);
        two.on_evict(move || tell.store(true, Ordering::Release));
        age(&one, GRACE.as_millis() as u64 + 1000);
        age(&two, GRACE.as_millis() as u64 + 2000);
        let _three = gate.admit(B).unwrap();
        assert!(told.load(Ordering::Acquire) && two.is_evicted() && !one.is_evicted());
        // A client that has just made progress keeps its place, and so does one for which the server works.
        one.touch();
        assert_eq!(gate.admit(B).unwrap_err(), Full::All(2));
        one.at_work();
        assert_eq!(one.idle(), Duration::ZERO);
        assert_eq!(gate.admit(B).unwrap_err(), Full::All(2));
        // Messages that go to the client meanwhile do not end the work.
        one.moves();
        assert_eq!(one.place.last(), AT_WORK);
        // If the eviction comes before the connection is set up, the connection ends as soon as it is.
        age(&one, GRACE.as_millis() as u64);
        let _four = gate.admit(B).unwrap();
        let late = Arc::new(AtomicBool::new(false));
        let tell = Arc::clone(&late);
        one.on_evict(move || tell.store(true, Ordering::Release));
        assert!(late.load(Ordering::Acquire));
    }

    #[test]
    fn an_address_that_is_full_costs_nobody_else_a_place() {
        let gate = old_gate(3, 1);
        let (a, b) = (gate.admit(A).unwrap(), gate.admit(B).unwrap());
        age(&b, 60_000);
        age(&a, 1000);
        assert_eq!(gate.admit(A).unwrap_err(), Full::Address(1));
        assert!(!b.is_evicted(), "it is of another address");
        age(&a, 60_000);
        let _again = gate.admit(A).unwrap();
        assert!(a.is_evicted() && !b.is_evicted());
    }

    #[test]
    fn threads_that_do_not_end_are_bounded_too() {
        let gate = old_gate(2, 2);
        let mut stuck = Vec::new();
        for _ in 0..4 {
            let guest = gate.admit(A).unwrap();
            age(&guest, 60_000);
            stuck.push(guest);
        }
        assert!(gate.admit(A).is_err());
        stuck.pop();
        assert!(gate.admit(A).is_ok());
    }
}
