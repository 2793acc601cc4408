//! Admission and eviction, with a clock that only the test advances.

use super::*;

const A: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
const B: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));

const STRANGER_MS: u64 = STRANGER_GRACE.as_millis() as u64;
const KNOWN_MS: u64 = KNOWN_GRACE.as_millis() as u64;

/// Creates a gate whose clock only [`pass_time`] advances.
fn gate_with_manual_clock(clients: usize, per_address: usize) -> Arc<Gate> {
    Arc::new(Gate {
        clients,
        per_address,
        guests: Mutex::default(),
        clock: Clock::Manual(AtomicU64::new(0)),
    })
}

fn pass_time(gate: &Gate, ms: u64) {
    let Clock::Manual(now) = &gate.clock else {
        unreachable!("created by gate_with_manual_clock")
    };
    now.fetch_add(ms, Ordering::Relaxed);
}

/// Admits a client that is connected and has sent no request.
fn stranger(gate: &Arc<Gate>, address: IpAddr) -> Result<Guest, Full> {
    let guest = gate.admit(address)?;
    guest.advance();
    Ok(guest)
}

/// Admits a client that has made a valid request.
fn known(gate: &Arc<Gate>, address: IpAddr) -> Guest {
    let guest = stranger(gate, address).unwrap();
    guest.served();
    guest
}

fn address(n: u8) -> IpAddr {
    IpAddr::V4(std::net::Ipv4Addr::new(198, 51, 100, n))
}

#[test]
fn places_are_limited_and_freed() {
    let gate = gate_with_manual_clock(3, 2);
    let first = known(&gate, A);
    let _second = known(&gate, A);
    assert_eq!(gate.admit(A).unwrap_err(), Full::Address(2));
    // An IPv4-mapped IPv6 address names the same host.
    let IpAddr::V4(v4) = A else { unreachable!() };
    let mapped = IpAddr::V6(v4.to_ipv6_mapped());
    assert_eq!(gate.admit(mapped).unwrap_err(), Full::Address(2));
    let _third = known(&gate, B);
    assert_eq!(gate.admit(B).unwrap_err(), Full::All(3));
    drop(first);
    let _fourth = known(&gate, B);
    assert_eq!(gate.admit(A).unwrap_err(), Full::All(3));
}

#[test]
fn ipv6_prefix_counts_as_one_address() {
    let gate = gate_with_manual_clock(9, 2);
    let admit = |ip: &str| gate.admit(ip.parse().unwrap());
    let _one = admit("2001:db8:1:2::1").unwrap();
    let _two = admit("2001:db8:1:2:ffff:ffff:ffff:ffff").unwrap();
    assert_eq!(admit("2001:db8:1:2:8000::").unwrap_err(), Full::Address(2));
    let _three = admit("2001:db8:1:3::1").unwrap();
    let _four = admit("192.0.2.1").unwrap();
}

#[test]
fn idlest_known_client_is_evicted() {
    let gate = gate_with_manual_clock(2, 2);
    let (one, two) = (known(&gate, A), known(&gate, A));
    let evict_called = Arc::new(AtomicBool::new(false));
    let called = Arc::clone(&evict_called);
    two.on_evict(move || called.store(true, Ordering::Release));
    pass_time(&gate, 1000);
    one.touch();
    pass_time(&gate, KNOWN_MS - 1001);
    assert_eq!(gate.admit(B).unwrap_err(), Full::All(2), "1 ms too early");
    pass_time(&gate, 1);
    let three = known(&gate, B);
    assert!(evict_called.load(Ordering::Acquire) && two.is_evicted() && !one.is_evicted());
    // A client at work is never evicted. A data transfer does not end the work.
    one.at_work();
    one.data_moved();
    three.at_work();
    pass_time(&gate, 60_000);
    assert_eq!(one.idle(), Duration::ZERO);
    assert_eq!(gate.admit(B).unwrap_err(), Full::All(2));
    // If a client is evicted before its connection is set up, `on_evict` ends it immediately.
    one.touch();
    pass_time(&gate, KNOWN_MS);
    let _four = gate.admit(B).unwrap();
    let evict_called = Arc::new(AtomicBool::new(false));
    let called = Arc::clone(&evict_called);
    one.on_evict(move || called.store(true, Ordering::Release));
    assert!(evict_called.load(Ordering::Acquire));
}

#[test]
fn full_address_displaces_no_other() {
    let gate = gate_with_manual_clock(3, 1);
    let b = known(&gate, B);
    pass_time(&gate, 60_000);
    let a = known(&gate, A);
    assert_eq!(gate.admit(A).unwrap_err(), Full::Address(1));
    assert!(!b.is_evicted(), "it is of another address");
    pass_time(&gate, KNOWN_MS);
    let _again = gate.admit(A).unwrap();
    assert!(a.is_evicted() && !b.is_evicted());
}

#[test]
fn threads_of_evicted_clients_are_bounded() {
    let gate = gate_with_manual_clock(2, 2);
    let mut stuck = Vec::new();
    for _ in 0..4 {
        stuck.push(stranger(&gate, A).unwrap());
        pass_time(&gate, STRANGER_MS);
    }
    assert!(gate.admit(A).is_err());
    stuck.pop();
    assert!(gate.admit(A).is_ok());
}

/// A crowd of 200 clients has the same address as a well-behaved client, and reconnects immediately
/// after each eviction. The good client retries every 20 ms and is admitted within a second.
#[test]
fn crowd_does_not_starve_its_address() {
    let gate = gate_with_manual_clock(64, 32);
    let mut crowd: Vec<_> = (0..200).filter_map(|_| stranger(&gate, A).ok()).collect();
    assert_eq!(crowd.len(), 32);
    for round in 0..20 {
        let mut waited = 0;
        let good = loop {
            if let Ok(good) = stranger(&gate, A) {
                break good;
            }
            pass_time(&gate, 20);
            waited += 20;
            assert!(waited < 1000, "round {round}: never admitted");
        };
        // The crowd reconnects within the good client's grace, which protects it.
        crowd.retain(|g| !g.is_evicted());
        for _ in 0..10 {
            crowd.extend(stranger(&gate, A).ok());
            pass_time(&gate, (STRANGER_MS - 1) / 10);
        }
        assert!(!good.is_evicted(), "round {round}");
        good.served();
        good.at_work();
        pass_time(&gate, 60_000);
        for _ in 0..40 {
            crowd.extend(stranger(&gate, A).ok());
        }
        assert!(!good.is_evicted(), "round {round}: it was at work");
        crowd.retain(|g| !g.is_evicted());
    }
}

/// Crowds from two addresses hold all places. A client from a third address is admitted without a
/// wait and is not evicted for a client of a crowd.
#[test]
fn crowd_yields_to_other_addresses() {
    let gate = gate_with_manual_clock(64, 32);
    let crowd = |address| -> Vec<_> {
        let all = (0..100).filter_map(|_| stranger(&gate, address).ok());
        all.collect()
    };
    let crowds = [crowd(A), crowd(B)];
    assert_eq!(crowds.each_ref().map(Vec::len), [32, 32]);
    let good = stranger(&gate, address(1)).unwrap();
    let evicted = crowds.iter().flatten().filter(|g| g.is_evicted());
    assert_eq!(evicted.count(), 1);
    pass_time(&gate, STRANGER_MS);
    let more = [crowd(A), crowd(B)];
    assert!(more.iter().flatten().count() > 0);
    assert!(
        !good.is_evicted(),
        "clients of the larger crowds are evicted first"
    );
}

/// If each address has one client, no crowd is larger than another: the grace decides.
#[test]
fn lone_strangers_are_evicted_after_grace() {
    let gate = gate_with_manual_clock(4, 2);
    let first = stranger(&gate, address(0)).unwrap();
    pass_time(&gate, 1);
    let _others: Vec<_> = (1..4)
        .map(|n| stranger(&gate, address(n)).unwrap())
        .collect();
    pass_time(&gate, STRANGER_MS - 2);
    assert_eq!(gate.admit(A).unwrap_err(), Full::All(4));
    pass_time(&gate, 1);
    let _new = gate.admit(A).unwrap();
    assert!(first.is_evicted(), "the oldest is evicted");
}

#[test]
fn strangers_gain_no_time_by_sending() {
    let gate = gate_with_manual_clock(1, 1);
    let one = gate.admit(A).unwrap();
    // The grace does not start before the first `advance`.
    pass_time(&gate, 60_000);
    assert_eq!(gate.admit(A).unwrap_err(), Full::Address(1));
    one.advance();
    pass_time(&gate, STRANGER_MS - 1);
    one.touch();
    one.data_moved();
    assert_eq!(gate.admit(A).unwrap_err(), Full::Address(1));
    // The next step of the set-up has a grace of its own.
    one.advance();
    pass_time(&gate, STRANGER_MS - 1);
    assert_eq!(gate.admit(A).unwrap_err(), Full::Address(1));
    pass_time(&gate, 1);
    let _two = gate.admit(A).unwrap();
    assert!(one.is_evicted());
}

/// Strangers get at most half of the places of idle known clients: once they hold half, the next
/// client replaces a stranger.
#[test]
fn strangers_displace_half_of_known_clients() {
    let gate = gate_with_manual_clock(8, 8);
    let pausing: Vec<_> = (0..8).map(|_| known(&gate, A)).collect();
    pass_time(&gate, 60_000);
    let mut crowd = Vec::new();
    for _ in 0..50 {
        // Each is still within its grace when the next one connects.
        crowd.extend(stranger(&gate, A).ok());
    }
    let remaining = |all: &[Guest]| all.iter().filter(|g| !g.is_evicted()).count();
    assert_eq!((crowd.len(), remaining(&pausing)), (4, 4));
    for _ in 0..50 {
        pass_time(&gate, STRANGER_MS);
        crowd.retain(|g| !g.is_evicted());
        crowd.push(stranger(&gate, A).unwrap());
    }
    assert_eq!((remaining(&crowd), remaining(&pausing)), (4, 4));
}
