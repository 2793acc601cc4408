//! Tests of the directory with real queue pairs: identifiers, timers, and how partners are removed.

use super::*;
use crate::cm::{accepted, requested};
use crate::conn::retry::Retry;
use crate::sys::fork;
use crate::testing::{connected, context, queue_pair, until};
use iwarp_rnic::{SendOp, SendWr};

const FRIEND: Address = Address {
    gid: [1; 16],
    num: 7,
};

fn rig() -> (Arc<Directory>, QueuePair) {
    let ctx = context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = queue_pair(&ctx, &cq, &cq);
    (ctx.inner.directory().unwrap(), qp)
}

fn identifier() -> CmId {
    CmId::create(&create_event_channel().unwrap(), None)
}

fn is_destroyed(id: &CmId) -> bool {
    id.write_event(CmEventKind::User(0), 0).is_err()
}

fn named(qp: &QueuePair, peer: Address) -> Named {
    Named {
        qp: Arc::downgrade(&qp.inner),
        epoch: qp.epoch(),
        peer,
        requests_since: None,
    }
}

fn insert(directory: &Directory, qp: &QueuePair, partner: Partner) {
    directory.state.lock().partners.insert(qp.num(), partner);
}

/// Adds a partner that has accepted the request `id` of `FRIEND`.
fn accept(directory: &Directory, qp: &QueuePair, id: &CmId) {
    id.set_user_data(qp.num().into());
    let partner = Partner::Accepted {
        named: named(qp, FRIEND),
        id: id.clone(),
        kept: None,
    };
    insert(directory, qp, partner);
}

fn has_partner(directory: &Directory, qp: &QueuePair) -> bool {
    directory.state.lock().partners.contains_key(&qp.num())
}

/// The first attempt of a queue pair may fail because the peer's host does not listen yet.
#[test]
fn timer_starts_another_attempt() {
    let (directory, qp) = rig();
    qp.modify(QpState::Init).unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let own = IpAddr::from([127, 0, 0, 1]);
    let peer = Address {
        gid: gid_of(own),
        num: 5 << 16 | u32::from(listener.local_addr().unwrap().port()),
    };
    let connector = Connector {
        own,
        since: now_ns(),
    };
    let named = named(&qp, peer);
    insert(&directory, &qp, Partner::Pausing { named, connector });
    Arc::clone(&directory).timer(qp.num());
    listener.set_nonblocking(true).unwrap();
    // The peer closes each connection without a reply. Each attempt connects twice, the second time
    // with the older MPA revision, so five connections need three attempts.
    for _ in 0..5 {
        until("no further attempt", || listener.accept().is_ok());
    }
    directory.give_up(qp.num(), None);
    qp.destroy();
}

/// A queue pair that is not awaiting its peer any more does not connect.
#[test]
fn reset_queue_pair_does_not_connect() {
    let (directory, qp) = rig();
    let connector = Connector {
        own: IpAddr::from([127, 0, 0, 1]),
        since: now_ns(),
    };
    let named = named(&qp, FRIEND);
    insert(&directory, &qp, Partner::Pausing { named, connector });
    assert_eq!(qp.state(), QpState::Reset);
    directory.attempt(qp.num());
    assert!(!has_partner(&directory, &qp));
    qp.destroy();
}

#[test]
fn identifier_is_destroyed_with_its_connection() {
    let ctx = context();
    let directory = ctx.inner.directory().unwrap();
    let cq = ctx.create_cq(4, None).unwrap();
    let ids = [(); 2].map(|()| identifier());
    let qps = ids.each_ref().map(|id| {
        let qp = queue_pair(&ctx, &cq, &cq);
        accept(&directory, &qp, id);
        qp
    });
    let is_up = || {
        let state = directory.state.lock();
        qps.each_ref().map(|qp| {
            let partner = state.partners.get(&qp.num());
            matches!(partner, Some(Partner::Connected { .. }))
        })
    };
    directory.event(ids[0].event(CmEventKind::AddrResolved, 0));
    assert_eq!(is_up(), [false, false]);
    for (id, now) in ids.iter().zip([[true, false], [true, true]]) {
        directory.event(id.event(CmEventKind::Established, 0));
        assert_eq!(is_up(), now);
    }
    directory.event(ids[0].event(CmEventKind::Disconnected, 0));
    assert_eq!(is_up(), [false, true]);
    assert_eq!(ids.each_ref().map(is_destroyed), [true, false]);
    qps[1].destroy();
    drop(qps[1].clone());
    directory.give_up(qps[1].num(), None);
    assert_eq!(ids.each_ref().map(is_destroyed), [true, true]);
    qps[0].destroy();
}

/// If a connection request fails, it is destroyed, and the queue pair waits for the next request.
#[test]
fn failed_request_is_destroyed() {
    let (directory, qp) = rig();
    let id = identifier();
    accept(&directory, &qp, &id);
    directory.event(id.event(CmEventKind::ConnectError, libc::ECONNRESET));
    assert!(is_destroyed(&id));
    let state = directory.state.lock();
    let partner = state.partners.get(&qp.num());
    assert!(matches!(partner, Some(Partner::Expected(_))));
    drop(state);
    directory.give_up(qp.num(), None);
    qp.destroy();
}

/// Passes a connection request `id` of the queue pair number `from` to the directory, as the
/// listener does.
fn ask_for(directory: &Arc<Directory>, id: &CmId, qp: &QueuePair, from: u32) {
    let mut data = MAGIC.to_vec();
    data.extend_from_slice(&from.to_be_bytes());
    data.extend_from_slice(&qp.num().to_be_bytes());
    directory.event(CmEvent {
        private_data: data,
        ..id.event(CmEventKind::ConnectRequest, 0)
    });
}

/// A peer whose queue pair was reset sends another connection request. No FPDU has arrived on the
/// stream of the first request, so the new request replaces it. A new request whose peer has closed
/// the stream is kept, but replaces nothing.
#[test]
fn new_request_replaces_a_silent_one() {
    let (directory, qp) = rig();
    qp.modify(QpState::Init).unwrap();
    let peer = Address {
        gid: gid_of(IpAddr::from([127, 0, 0, 1])),
        num: 7,
    };
    for given_up in [false, true] {
        let (first, _silent) = accepted(&qp, qp.epoch());
        let partner = Partner::Accepted {
            named: named(&qp, peer),
            id: first.clone(),
            kept: None,
        };
        insert(&directory, &qp, partner);
        let (id, socket) = requested(&qp);
        let open = match given_up {
            true => {
                drop(socket);
                until("the request is still open", || id.requester_is_gone());
                None
            }
            false => Some(socket),
        };
        ask_for(&directory, &id, &qp, peer.num);
        assert_eq!(is_destroyed(&first), !given_up);
        let present = {
            let state = directory.state.lock();
            state.partners[&qp.num()].accepted().cloned().unwrap()
        };
        assert!(present.is_same(if given_up { &first } else { &id }));
        drop(open);
        directory.give_up(qp.num(), None);
        assert!(is_destroyed(&first) && is_destroyed(&id));
    }
    qp.destroy();
}

/// The peer closed its connection request before the queue pair named that peer.
#[test]
fn closed_request_is_not_accepted() {
    let (directory, qp) = rig();
    qp.modify(QpState::Init).unwrap();
    let (id, socket) = requested(&qp);
    drop(socket);
    until("its end is not seen", || id.requester_is_gone());
    ask_for(&directory, &id, &qp, 7);
    assert!(!is_destroyed(&id));
    let peer = Address {
        gid: gid_of(IpAddr::from([127, 0, 0, 1])),
        num: 7,
    };
    directory.pass(qp.num(), Event::Named(named(&qp, peer), Role::Peer));
    assert!(is_destroyed(&id));
    let state = directory.state.lock();
    let partner = state.partners.get(&qp.num());
    assert!(matches!(partner, Some(Partner::Expected(_))));
    drop(state);
    qp.destroy();
}

/// The number of connection requests for queue pairs that have not named their peer is limited.
#[test]
fn early_requests_are_limited() {
    let (directory, qp) = rig();
    let (id, _socket) = requested(&qp);
    let others: Vec<_> = (1..EARLY_MAX)
        .map(|_| Arc::clone(&directory.kept))
        .collect();
    ask_for(&directory, &id, &qp, 7);
    assert!(has_partner(&directory, &qp) && !is_destroyed(&id));
    directory.give_up(qp.num(), None);
    let (id, _socket) = requested(&qp);
    let one_more = Arc::clone(&directory.kept);
    ask_for(&directory, &id, &qp, 7);
    assert!(!has_partner(&directory, &qp) && is_destroyed(&id));
    drop((others, one_more));
    qp.destroy();
}

#[test]
fn expired_request_is_destroyed() {
    let (directory, qp) = rig();
    let ids = [(); 2].map(|()| identifier());
    let now = now_ns();
    for ((id, num), limit_start) in ids
        .iter()
        .zip(1..)
        .zip([now - EARLY_LIMIT.as_nanos() as u64, now])
    {
        let request = Request {
            id: id.clone(),
            from: FRIEND,
            since: limit_start,
            _counted: Arc::clone(&directory.kept),
        };
        let mut state = directory.state.lock();
        state.partners.insert(num, Partner::Early(request));
    }
    Arc::clone(&directory).timer(TIMER_EXPIRE);
    assert_eq!(ids.each_ref().map(is_destroyed), [true, false]);
    let left: Vec<u32> = directory.state.lock().partners.keys().copied().collect();
    assert_eq!(left, [2]);
    directory.give_up(2, None);
    qp.destroy();
}

#[test]
fn closed_device_ends_its_connections() {
    let (directory, qp) = rig();
    let num = directory.reserve_number(|_| false).unwrap();
    let address = SocketAddr::from(([127, 0, 0, 1], num as u16));
    assert!(std::net::TcpStream::connect(address).is_ok());
    let up = identifier();
    let partner = Partner::Connected {
        id: up.clone(),
        kept: None,
    };
    insert(&directory, &qp, partner);
    directory.stop();
    assert!(is_destroyed(&up) && !has_partner(&directory, &qp));
    until("the device still listens", || {
        std::net::TcpStream::connect(address).is_err()
    });
    qp.destroy();
}

/// A queue pair that is reset, failed or destroyed no longer waits for its peer.
#[test]
fn ended_queue_pair_gives_up_its_peer() {
    type End = fn(&QueuePair);
    let ends: [End; 3] = [
        |qp| qp.modify(QpState::Error).unwrap(),
        |qp| qp.modify(QpState::Reset).unwrap(),
        QueuePair::destroy,
    ];
    for end in ends {
        let (directory, qp) = rig();
        qp.modify(QpState::Init).unwrap();
        let id = identifier();
        accept(&directory, &qp, &id);
        end(&qp);
        let num = qp.num();
        qp.destroy();
        drop(qp);
        until("the partner still exists", || {
            !directory.state.lock().partners.contains_key(&num)
        });
        assert!(is_destroyed(&id));
    }
}

/// A forked child does not use its parent's directory, because threads of the parent may have held
/// its locks at the time of the fork.
#[test]
fn directory_belongs_to_its_process() {
    let (directory, qp) = rig();
    let registered = qp.inner.ctx.registry::<Registered>();
    assert!(directory.is_ours() && registered.ours().is_some());
    let is_right = fork::check_in_child(|| !directory.is_ours() && registered.ours().is_none());
    assert!(is_right);
    qp.destroy();
}

/// Creates a queue pair in RTS that waits for its peer to connect, by number if `by_number` is
/// `true`.
fn without_peer(by_number: bool) -> (Arc<Directory>, QueuePair) {
    let (directory, qp) = rig();
    qp.modify(QpState::Init).unwrap();
    qp.inner.state.lock().machine.await_stream().unwrap();
    qp.modify(QpState::Rts).unwrap();
    if by_number {
        qp.inner.state.lock().machine.set_by_number();
    }
    insert(&directory, &qp, Partner::Expected(named(&qp, FRIEND)));
    (directory, qp)
}

fn limit_start(directory: &Directory, qp: &QueuePair) -> Option<u64> {
    let state = directory.state.lock();
    let partner = state.partners.get(&qp.num());
    partner.and_then(Partner::named)?.requests_since
}

fn set_limit_start(directory: &Directory, qp: &QueuePair, to: u64) {
    let named = Named {
        requests_since: Some(to),
        ..named(qp, FRIEND)
    };
    insert(directory, qp, Partner::Expected(named));
}

fn post(qp: &QueuePair) {
    let wr = SendWr::new(1, SendOp::Send, &[]);
    qp.post_send(&[wr]).unwrap();
}

fn limit_timer_expires(directory: &Arc<Directory>, qp: &QueuePair) {
    Arc::clone(directory).timer(TIMER_REQUESTS | qp.num());
}

/// The time limit starts with the first posted request. A connection that the program makes itself
/// has no limit.
#[test]
fn first_request_starts_time_limit() {
    for by_number in [false, true] {
        let (directory, qp) = without_peer(by_number);
        directory.requests_wait(qp.num(), false);
        assert_eq!(limit_start(&directory, &qp), None, "nothing is posted");
        post(&qp);
        assert_eq!(limit_start(&directory, &qp).is_some(), by_number);
        qp.destroy();
    }
}

/// Timers are not cancelled, so a timer may expire although its limit has changed.
#[test]
fn unanswered_request_fails() {
    let (directory, qp) = without_peer(true);
    limit_timer_expires(&directory, &qp);
    assert_eq!(qp.state(), QpState::Rts, "no request waits");
    let now = now_ns();
    post(&qp);
    limit_timer_expires(&directory, &qp);
    assert_eq!(qp.state(), QpState::Rts, "the limit is not reached");
    let retry = Retry {
        timeout: 0,
        ..Retry::default()
    };
    qp.set_retry(retry).unwrap();
    set_limit_start(&directory, &qp, 1);
    limit_timer_expires(&directory, &qp);
    assert_eq!(qp.state(), QpState::Rts, "there is no limit");
    qp.set_retry(Retry::default()).unwrap();
    assert!(
        limit_start(&directory, &qp).unwrap() >= now,
        "the limit starts again"
    );
    set_limit_start(&directory, &qp, 1);
    limit_timer_expires(&directory, &qp);
    assert_eq!(qp.state(), QpState::Error);
    assert!(!has_partner(&directory, &qp));
    qp.destroy();
}

/// The timer of a request may expire before the directory learns that the connection is up.
#[test]
fn connected_peer_is_not_absent() {
    let (directory, qp) = rig();
    let _peer = connected(&qp);
    qp.inner.state.lock().machine.set_by_number();
    set_limit_start(&directory, &qp, 1);
    limit_timer_expires(&directory, &qp);
    assert_eq!(qp.state(), QpState::Rts);
    assert!(has_partner(&directory, &qp));
    qp.destroy();
}

/// A request that was posted before the peer was registered also has a time limit.
#[test]
fn earlier_request_has_a_time_limit() {
    let (directory, qp) = without_peer(true);
    directory.give_up(qp.num(), None);
    post(&qp);
    let peer = Address {
        gid: gid_of(IpAddr::from([127, 0, 0, 1])),
        num: qp.num() ^ 1 << 23,
    };
    let own = gid_of(IpAddr::from([127, 0, 0, 1]));
    directory.connect((&qp, qp.epoch()), own, peer).unwrap();
    assert!(limit_start(&directory, &qp).is_some());
    qp.destroy();
}

/// If this end cannot listen for the peer, requests fail as if the peer were absent.
#[test]
fn unreachable_peer_has_a_time_limit() {
    let ctx = context();
    let directory = ctx.inner.directory().unwrap();
    let cq = ctx.create_cq(4, None).unwrap();
    let attributes = crate::testing::attributes(&ctx, &cq, &cq);
    let qp = ctx.create_addressable_qp(&attributes).unwrap();
    qp.modify(QpState::Init).unwrap();
    let foreign = gid_of(IpAddr::from([192, 0, 2, 1]));
    let gid = gid_of(IpAddr::from([127, 0, 0, 1]));
    assert!(qp.connect_peer_from(foreign, gid, 7).is_err());
    qp.modify(QpState::Rts).unwrap();
    post(&qp);
    assert!(limit_start(&directory, &qp).is_some());
    set_limit_start(&directory, &qp, 1);
    limit_timer_expires(&directory, &qp);
    assert_eq!(qp.state(), QpState::Error);
    qp.destroy();
}

/// Creates two queue pairs of one device that can be connected by number, in the order of their
/// numbers.
fn addressable_pair() -> (Arc<Directory>, [QueuePair; 2]) {
    let ctx = context();
    let cq = ctx.create_cq(4, None).unwrap();
    let mut qps = [(); 2].map(|()| {
        let attributes = crate::testing::attributes(&ctx, &cq, &cq);
        let qp = ctx.create_addressable_qp(&attributes).unwrap();
        qp.modify(QpState::Init).unwrap();
        qp
    });
    qps.sort_by_key(QueuePair::num);
    (ctx.inner.directory().unwrap(), qps)
}

/// Both ends have to agree on their roles, even if they run different versions.
#[test]
fn smaller_number_connects() {
    let (directory, [small, large]) = addressable_pair();
    let gid = gid_of(IpAddr::from([127, 0, 0, 1]));
    let is = |qp: &QueuePair, role: fn(&Partner) -> bool| {
        let state = directory.state.lock();
        state.partners.get(&qp.num()).is_some_and(role)
    };
    large.connect_peer_from(gid, gid, small.num()).unwrap();
    assert!(is(&large, |partner| matches!(
        partner,
        Partner::Expected(_)
    )));
    directory.give_up(large.num(), None);
    small.connect_peer_from(gid, gid, large.num()).unwrap();
    assert!(is(&small, |partner| matches!(
        partner,
        Partner::Pausing { .. } | Partner::Asking { .. }
    )));
    small.destroy();
    large.destroy();
}

/// The ends connect, whichever end names its peer first.
#[test]
fn ends_connect_in_either_order() {
    let gid = gid_of(IpAddr::from([127, 0, 0, 1]));
    for is_small_first in [true, false] {
        let (directory, [small, large]) = addressable_pair();
        let (first, second) = match is_small_first {
            true => (&small, &large),
            false => (&large, &small),
        };
        first.connect_peer_from(gid, gid, second.num()).unwrap();
        second.connect_peer_from(gid, gid, first.num()).unwrap();
        until("the ends are not connected", || {
            let state = directory.state.lock();
            [&small, &large].iter().all(|qp| {
                let partner = state.partners.get(&qp.num());
                qp.addresses().is_some() && matches!(partner, Some(Partner::Connected { .. }))
            })
        });
        small.destroy();
        large.destroy();
    }
}

#[test]
fn earlier_epoch_fails_nothing() {
    let (directory, qp) = without_peer(true);
    post(&qp);
    let epoch = qp.epoch();
    let earlier = epoch.wrapping_sub(1);
    assert!(qp.inner.awaits_peer(epoch) && !qp.inner.awaits_peer(earlier));
    assert!(!qp.inner.fail_absent_peer(earlier));
    directory.give_up(qp.num(), Some(earlier));
    assert!(has_partner(&directory, &qp));
    assert_eq!(qp.state(), QpState::Rts);
    assert!(qp.inner.fail_absent_peer(epoch));
    assert_eq!(qp.state(), QpState::Error);
    qp.destroy();
}
