//! Tests of keep-alive, as `getsockopt` reports it, and of the count of unanswered checks.

use super::super::qp::QueuePair;
use super::Liveness;
use crate::cm::{CmEventChannel, CmEventKind, CmId, ConnectionParameters, create_event_channel};
use crate::config::Config;
use crate::objects::context::Context;
use crate::testing;
use std::time::{Duration, Instant};

const LONG: Option<Duration> = Some(Duration::from_secs(10));

fn device(peer_timeout: Option<u64>) -> Context {
    testing::context_with(Config {
        peer_timeout: peer_timeout.map(Duration::from_secs),
        ..Config::default()
    })
}

fn queue_pair(ctx: &Context) -> QueuePair {
    let cq = ctx.create_cq(8, None).unwrap();
    testing::queue_pair(ctx, &cq, &cq)
}

/// Returns the seconds before the first probe, the seconds between two probes, and the number of
/// probes; `None` without keep-alive.
fn keep_alive(qp: &QueuePair) -> Option<(u64, u64, u32)> {
    let socket = qp
        .inner
        .state
        .lock()
        .link
        .socket()
        .cloned()
        .expect("a connection");
    let socket = socket.stream.socket();
    socket.keepalive().unwrap().then(|| {
        (
            socket.tcp_keepalive_time().unwrap().as_secs(),
            socket.tcp_keepalive_interval().unwrap().as_secs(),
            socket.tcp_keepalive_retries().unwrap(),
        )
    })
}

/// Waits until keep-alive differs from `before`, and returns the new settings.
fn keep_alive_after(qp: &QueuePair, before: Option<(u64, u64, u32)>) -> Option<(u64, u64, u32)> {
    let start = Instant::now();
    while keep_alive(qp) == before && start.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(5));
    }
    keep_alive(qp)
}

fn event(channel: &CmEventChannel, kind: CmEventKind) -> CmId {
    loop {
        let event = channel.next(LONG).unwrap();
        if event.kind == kind {
            return event.id;
        }
        let resolved = [CmEventKind::AddrResolved, CmEventKind::RouteResolved];
        assert!(resolved.contains(&event.kind), "{:?}", event.kind);
    }
}

/// Connects `initiator` to `responder`. The listener belongs to `listening_device`.
fn connect(initiator: &QueuePair, listening_device: &Context, responder: &QueuePair) -> [CmId; 3] {
    let channel = create_event_channel().unwrap();
    let listener = CmId::create(&channel, Some(listening_device));
    listener.bind(([127, 0, 0, 1], 0).into()).unwrap();
    listener.listen(8).unwrap();
    let to = listener.addresses().0.unwrap();
    let ours = create_event_channel().unwrap();
    let id = CmId::create(&ours, Some(&initiator.context()));
    id.resolve_addr(None, to).unwrap();
    id.resolve_route().unwrap();
    id.set_queue_pair(Some(initiator));
    id.connect(&ConnectionParameters::default()).unwrap();
    let accepted = event(&channel, CmEventKind::ConnectRequest);
    accepted.set_queue_pair(Some(responder));
    accepted.accept(&ConnectionParameters::default()).unwrap();
    event(&ours, CmEventKind::Established);
    [listener, id, accepted]
}

/// The responder inherits keep-alive from its listener. For the initiator, it is set at the first
/// check, after a quarter of the limit.
#[test]
fn both_ends_have_keep_alive() {
    let (a, b) = (device(Some(8)), device(Some(60)));
    let (initiator, responder) = (queue_pair(&a), queue_pair(&b));
    let _ids = connect(&initiator, &b, &responder);
    assert_eq!(keep_alive(&responder), Some((30, 8, 4)));
    assert!(
        !testing::open(&mut responder.inner.state.lock())
            .liveness
            .keep_alive_due
    );
    assert_eq!(keep_alive_after(&initiator, None), Some((4, 1, 4)));
    // All data is acknowledged, so there are no checks until data is sent.
    assert_eq!(
        testing::open(&mut initiator.inner.state.lock()).liveness,
        Liveness::default()
    );
}

/// If the listener's device has another setting, that of the queue pair's device applies.
#[test]
fn keep_alive_follows_queue_pair_device() {
    let listening_device = device(Some(60));
    for (limit, set) in [(None, None), (Some(8), Some((4, 1, 4)))] {
        let (a, b) = (device(None), device(limit));
        let (initiator, responder) = (queue_pair(&a), queue_pair(&b));
        let _ids = connect(&initiator, &listening_device, &responder);
        assert_eq!(keep_alive(&responder), set);
        assert_eq!(keep_alive(&initiator), None);
    }
    let (a, b) = (device(None), device(Some(2)));
    let (initiator, responder) = (queue_pair(&a), queue_pair(&b));
    let _ids = connect(&initiator, &a, &responder);
    assert_eq!(keep_alive_after(&responder, None), Some((1, 1, 1)));
}

/// A check is unanswered if the peer has been silent for a quarter of the limit. Any answer resets
/// the count.
#[test]
fn unanswered_checks_are_counted() {
    let limit = Duration::from_secs(8);
    for (silent, before, after) in [
        (None, 0, 0),
        (None, 3, 0),
        (Some(Duration::ZERO), 3, 0),
        (Some(Duration::from_millis(1999)), 3, 0),
        (Some(Duration::from_secs(2)), 0, 1),
        (Some(Duration::from_secs(2)), 3, 4),
        (Some(Duration::from_secs(7)), 4, 5),
    ] {
        let liveness = Liveness {
            unanswered_checks: before,
            ..Liveness::default()
        };
        assert_eq!(
            liveness.unanswered_after(silent, limit),
            after,
            "{silent:?}"
        );
    }
}
