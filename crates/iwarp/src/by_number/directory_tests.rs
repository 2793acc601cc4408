//! Partners of real queue pairs: their identifiers, timers and ends.

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

/// A device, its directory, and a queue pair.
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

/// Lets the queue pair have accepted `id` of `FRIEND`.
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

/// The first attempt of a queue pair may come before the peer's host listens.
#[test]
fn timer_begins_another_attempt() {
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
    // The peer closes instead of replying. Each attempt asks twice, the second time with the older
    // MPA revision.
    for _ in 0..5 {
        until("no attempt", || listener.accept().is_ok());
    }
    directory.give_up(qp.num(), None);
    qp.destroy();
}

/// A queue pair that has failed by itself makes no attempt.
#[test]
fn failed_queue_pair_does_not_connect() {
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

/// An identifier is kept until its connection is over, and then destroyed. Others are left alone.
#[test]
fn identifier_lives_as_long_as_its_connection() {
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

/// A request that fails is destroyed, and the queue pair waits for the next one.
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

/// Gives the directory the request `id` of this peer as the listener does.
fn ask_for(directory: &Arc<Directory>, id: &CmId, qp: &QueuePair, from: u32) {
    let mut data = MAGIC.to_vec();
    data.extend_from_slice(&from.to_be_bytes());
    data.extend_from_slice(&qp.num().to_be_bytes());
    directory.event(CmEvent {
        private_data: data,
        ..id.event(CmEventKind::ConnectRequest, 0)
    });
}

/// A peer whose queue pair was reset asks again. Nothing has come on the stream of its earlier
/// request, so the new one takes its place, unless that was given up, too.
#[test]
fn new_request_replaces_a_silent_one() {
    let (directory, qp) = rig();
    qp.modify(QpState::Init).unwrap();
    let peer = Address {
        gid: gid_of(IpAddr::from([127, 0, 0, 1])),
        num: 7,
    };
    for given_up in [false, true] {
        let (before, _silent) = accepted(&qp, qp.epoch());
        let partner = Partner::Accepted {
            named: named(&qp, peer),
            id: before.clone(),
            kept: None,
        };
        insert(&directory, &qp, partner);
        let (id, socket) = requested(&qp);
        let open = match given_up {
            true => {
                drop(socket);
                until("its end is not seen", || id.requester_is_gone());
                None
            }
            false => Some(socket),
        };
        ask_for(&directory, &id, &qp, peer.num);
        assert_eq!(is_destroyed(&before), !given_up);
        let present = {
            let state = directory.state.lock();
            state.partners[&qp.num()].accepted().cloned().unwrap()
        };
        assert!(present.is_same(if given_up { &before } else { &id }));
        drop(open);
        directory.give_up(qp.num(), None);
        assert!(is_destroyed(&before) && is_destroyed(&id));
    }
    qp.destroy();
}

/// A request that its peer has given up is not accepted when the queue pair names that peer.
#[test]
fn request_of_a_gone_peer_is_not_accepted() {
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

/// Requests for queue pairs that have not named their peers are bounded.
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
    for ((id, num), since) in ids
        .iter()
        .zip(1..)
        .zip([now - EARLY_LIMIT.as_nanos() as u64, now])
    {
        let request = Request {
            id: id.clone(),
            from: FRIEND,
            since,
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

/// No listener and no connection outlives the device.
#[test]
fn closed_device_ends_its_connections() {
    let (directory, qp) = rig();
    let num = directory.number(|_| false).unwrap();
    let at = SocketAddr::from(([127, 0, 0, 1], num as u16));
    assert!(std::net::TcpStream::connect(at).is_ok());
    let up = identifier();
    let partner = Partner::Connected {
        id: up.clone(),
        kept: None,
    };
    insert(&directory, &qp, partner);
    directory.stop();
    assert!(is_destroyed(&up) && !has_partner(&directory, &qp));
    until("it still listens", || {
        std::net::TcpStream::connect(at).is_err()
    });
    qp.destroy();
}

/// A queue pair that is reset, in error or destroyed waits for no peer.
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
        until("its peer is not given up", || {
            !directory.state.lock().partners.contains_key(&num)
        });
        assert!(is_destroyed(&id));
    }
}

/// A forked child starts a directory of its own. It does not use the parent's, whose locks other
/// threads may have held at the time of the fork.
#[test]
fn directory_belongs_to_its_process() {
    let (directory, qp) = rig();
    let registered = qp.inner.ctx.registry::<Registered>();
    assert!(directory.is_ours() && registered.ours().is_some());
    let is_right = fork::check_in_child(|| !directory.is_ours() && registered.ours().is_none());
    assert!(is_right);
    qp.destroy();
}

/// A queue pair in RTS without a stream, whose peer connects. `by_number`: it is connected by
/// number.
fn lonely(by_number: bool) -> (Arc<Directory>, QueuePair) {
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

fn since(directory: &Directory, qp: &QueuePair) -> Option<u64> {
    let state = directory.state.lock();
    let partner = state.partners.get(&qp.num());
    partner.and_then(Partner::named)?.requests_since
}

fn set_since(directory: &Directory, qp: &QueuePair, to: u64) {
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

fn time_over(directory: &Arc<Directory>, qp: &QueuePair) {
    Arc::clone(directory).timer(TIMER_REQUESTS | qp.num());
}

/// Until a request is posted no time runs, nor for a connection that the program makes itself.
#[test]
fn time_begins_with_the_first_request() {
    for by_number in [false, true] {
        let (directory, qp) = lonely(by_number);
        directory.requests_wait(qp.num(), false);
        assert_eq!(since(&directory, &qp), None, "nothing is posted");
        post(&qp);
        assert_eq!(since(&directory, &qp).is_some(), by_number);
        qp.destroy();
    }
}

/// Timers are not cancelled, so each may come too early, or too late.
#[test]
fn unanswered_request_fails() {
    let (directory, qp) = lonely(true);
    time_over(&directory, &qp);
    assert_eq!(qp.state(), QpState::Rts, "no request waits");
    let now = now_ns();
    post(&qp);
    time_over(&directory, &qp);
    assert_eq!(qp.state(), QpState::Rts, "there is time");
    let retry = Retry {
        timeout: 0,
        ..Retry::default()
    };
    qp.set_retry(retry).unwrap();
    set_since(&directory, &qp, 1);
    time_over(&directory, &qp);
    assert_eq!(qp.state(), QpState::Rts, "there is no limit");
    qp.set_retry(Retry::default()).unwrap();
    assert!(
        since(&directory, &qp).unwrap() >= now,
        "the time begins anew"
    );
    set_since(&directory, &qp, 1);
    time_over(&directory, &qp);
    assert_eq!(qp.state(), QpState::Error);
    assert!(!has_partner(&directory, &qp));
    qp.destroy();
}

/// The timer of a request may run out before the directory learns that the connection is up.
#[test]
fn connected_peer_is_not_absent() {
    let (directory, qp) = rig();
    let _peer = connected(&qp);
    qp.inner.state.lock().machine.set_by_number();
    set_since(&directory, &qp, 1);
    time_over(&directory, &qp);
    assert_eq!(qp.state(), QpState::Rts);
    assert!(has_partner(&directory, &qp));
    qp.destroy();
}

/// A request that is posted before the peer is registered has its time, too.
#[test]
fn earlier_request_has_a_time_limit() {
    let (directory, qp) = lonely(true);
    directory.give_up(qp.num(), None);
    post(&qp);
    let peer = Address {
        gid: gid_of(IpAddr::from([127, 0, 0, 1])),
        num: qp.num() ^ 1 << 23,
    };
    let own = gid_of(IpAddr::from([127, 0, 0, 1]));
    directory.connect((&qp, qp.epoch()), own, peer).unwrap();
    assert!(since(&directory, &qp).is_some());
    qp.destroy();
}

/// A request to a peer for which this end cannot listen fails as one to an absent peer does.
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
    assert!(since(&directory, &qp).is_some());
    set_since(&directory, &qp, 1);
    time_over(&directory, &qp);
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

/// Both ends have to agree on their roles, also if they are of different versions.
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

/// The ends meet whichever of them names the other first.
#[test]
fn ends_meet_in_either_order() {
    let gid = gid_of(IpAddr::from([127, 0, 0, 1]));
    for is_small_first in [true, false] {
        let (directory, [small, large]) = addressable_pair();
        let (first, second) = match is_small_first {
            true => (&small, &large),
            false => (&large, &small),
        };
        first.connect_peer_from(gid, gid, second.num()).unwrap();
        second.connect_peer_from(gid, gid, first.num()).unwrap();
        until("they do not meet", || {
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

/// A timer or an event of an earlier epoch does not concern requests of the present one.
#[test]
fn earlier_epoch_fails_nothing() {
    let (directory, qp) = lonely(true);
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
