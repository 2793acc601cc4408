//! Tests of `rdma_resolve_addr(3)` for peers with and without a responding next hop.

use crate::common::net::{FAR, NEAR, inside, ip};
use crate::common::*;
use iwarp::runtime::cm::{CmEventChannel, CmEventKind, CmId};
use iwarp::runtime::create_event_channel;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// A time limit shorter than the kernel's neighbour probes.
const SHORT: Duration = Duration::from_millis(600);

fn identifier() -> (CmId, CmEventChannel) {
    let channel = create_event_channel().unwrap();
    (CmId::create(&channel, None), channel)
}

/// Resolves an address with a new identifier. Returns the event and its status.
fn resolve(peer: &str, limit: Duration) -> (CmEventKind, i32) {
    let (id, channel) = identifier();
    let start = Instant::now();
    id.resolve_addr_within(None, format!("{peer}:9").parse().unwrap(), limit)
        .unwrap();
    let event = channel.next(Some(LIMIT)).unwrap();
    assert!(event.id.is_same(&id));
    if event.kind == CmEventKind::AddrError {
        assert!(start.elapsed() >= limit, "{peer}: too early");
    }
    id.destroy();
    (event.kind, event.status)
}

const RESOLVED: (CmEventKind, i32) = (CmEventKind::AddrResolved, 0);
const DEAD: (CmEventKind, i32) = (CmEventKind::AddrError, libc::ETIMEDOUT);

#[test]
fn dead_neighbour_fails_address_resolution() {
    inside("dead_neighbour_fails_address_resolution", |net| {
        let far = FAR.to_string();
        // Resolve twice: the first time the kernel has to probe.
        assert_eq!(resolve(&far, LIMIT), RESOLVED);
        assert_eq!(resolve(&far, Duration::ZERO), RESOLVED);
        assert_eq!(resolve(&NEAR.to_string(), Duration::ZERO), RESOLVED);
        assert_eq!(resolve("10.9.7.9", SHORT), DEAD);
        // This limit is longer than the kernel's probes. The kernel probes again.
        assert_eq!(resolve("10.9.7.9", Duration::from_secs(4)), DEAD);
        let late = std::thread::spawn(|| resolve("10.9.7.8", LIMIT));
        std::thread::sleep(SHORT);
        net.at_far(|| ip("addr add 10.9.7.8/24 dev far"));
        assert_eq!(late.join().unwrap(), RESOLVED);
    });
}

#[test]
fn gateway_answers_for_remote_hosts() {
    inside("gateway_answers_for_remote_hosts", |_| {
        ip(&format!("route add 10.8.1.0/24 via {FAR}"));
        ip("route add 10.8.2.0/24 via 10.9.7.9");
        assert_eq!(resolve("10.8.1.5", LIMIT), RESOLVED);
        assert_eq!(resolve("10.8.2.5", SHORT), DEAD);
        // An interface without link addresses needs no probe.
        ip("link set near arp off");
        assert_eq!(resolve("10.9.7.10", Duration::ZERO), RESOLVED);
    });
}

#[test]
fn neighbours_with_ipv6() {
    inside("neighbours_with_ipv6", |net| {
        ip("addr add fd09::1/64 dev near nodad");
        net.at_far(|| ip("addr add fd09::2/64 dev far nodad"));
        assert_eq!(resolve("[fd09::2]", LIMIT), RESOLVED);
        assert_eq!(resolve("[fd09::9]", SHORT), DEAD);
    });
}

#[test]
fn identifier_resolves_again_or_is_destroyed() {
    inside("identifier_resolves_again_or_is_destroyed", |net| {
        let dead: SocketAddr = "10.9.7.9:9".parse().unwrap();
        let (id, channel) = identifier();
        id.resolve_addr_within(None, dead, SHORT).unwrap();
        for early in [
            id.resolve_addr_within(None, dead, SHORT),
            id.resolve_route(),
            id.listen(1),
        ] {
            assert!(early.is_err(), "before the event");
        }
        let event = channel.next(Some(LIMIT)).unwrap();
        assert_eq!((event.kind, event.status), DEAD);
        id.resolve_route().unwrap_err();
        // The next address belongs to another host.
        let server = net.at_far(|| Server::new(FAR, &config()));
        id.resolve_addr_within(None, server.address, LIMIT).unwrap();
        assert_eq!(
            channel.next(Some(LIMIT)).unwrap().kind,
            CmEventKind::AddrResolved
        );
        id.resolve_route().unwrap();
        assert_eq!(
            channel.next(Some(LIMIT)).unwrap().kind,
            CmEventKind::RouteResolved
        );
        id.destroy();

        // A descriptor of the last attempt may still be open, because the thread that reported its
        // end closes it later.
        let before = open_sockets();
        let (id, channel) = identifier();
        id.resolve_addr_within(None, dead, LIMIT * 10).unwrap();
        let own: Vec<_> = open_sockets().difference(&before).cloned().collect();
        assert!(!own.is_empty());
        id.destroy();
        until("its sockets are closed", || {
            let open = open_sockets();
            !own.iter().any(|socket| open.contains(socket))
        });
        std::thread::sleep(SHORT * 2);
        assert!(channel.is_empty(), "an event of a destroyed identifier");
    });
}

/// Programs can bind to loopback even if `IWARP_BIND` excludes it. Some do so to find devices.
#[test]
fn address_without_device_binds_on_loopback() {
    const NAME: &str = "address_without_device_binds_on_loopback";
    let channel = create_event_channel().unwrap();
    let both = || {
        let ids = [
            CmId::create(&channel, None),
            CmId::create_for_datagrams(&channel, None),
        ];
        ids.into_iter()
    };
    alone_with(NAME, &[("IWARP_BIND", "lo")], || {
        inside(NAME, |_| {
            for id in both() {
                // A failed bind releases the port.
                for _ in 0..2 {
                    let bound = id.bind(SocketAddr::new(NEAR, 0));
                    assert!(matches!(bound, Err(iwarp::Error::NoDevice)), "{bound:?}");
                }
                id.bind(SocketAddr::new(V4, 0)).unwrap();
                assert!(id.context().is_some());
            }
        });
    });
}

#[test]
fn host_without_devices_binds_loopback() {
    let name = "host_without_devices_binds_loopback";
    alone_with(name, &[("IWARP_BIND", "192.0.2.77")], || {
        let (id, _) = identifier();
        id.bind(SocketAddr::new(V4, 0)).unwrap();
        assert!(id.context().is_none());
        assert_ne!(id.addresses().0.unwrap().port(), 0);
    });
}
