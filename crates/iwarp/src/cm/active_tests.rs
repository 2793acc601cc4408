//! Tests of the initiator: attempts that fail locally, the order of events, and port mappers.

use super::super::phase::Phase;
use super::super::{REFUSED_PAUSES, create_event_channel};
use super::*;
use crate::sys::connect::Sharing;
use crate::testing;
use iwarp_rnic::qp::{Blame, Events, Fault, State as QpState};
use std::time::{Duration, Instant};

/// Waits until the identifier has sent its MPA request. Returns its attempt.
fn wait_for_request_sent(id: &CmId) -> Arc<Active> {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        if let Phase::Connecting(active) = &id.inner.state.lock().phase
            && matches!(active.state.lock().stage, Stage::Reply(_))
        {
            return Arc::clone(active);
        }
        assert!(Instant::now() < end, "the request is not sent");
        std::thread::yield_now();
    }
}

/// Returns an attempt to connect to `peer`, which has not started, and what it uses.
fn attempt(peer: SocketAddr) -> (QueuePair, CmId, Arc<Active>) {
    let ctx = testing::context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = testing::queue_pair(&ctx, &cq, &cq);
    let id = CmId::create(&create_event_channel().unwrap(), Some(&ctx));
    let parameters = ConnectionParameters::default();
    let active = Active::new(&id, &ctx, (qp.clone(), None), peer, None, &parameters);
    (qp, id, active.unwrap())
}

/// If the connection breaks locally, the initiator does not connect again with MPA revision 1.
#[test]
fn local_error_ends_the_attempt() {
    let ctx = testing::context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = testing::queue_pair(&ctx, &cq, &cq);
    qp.modify(QpState::Init).unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let channel = create_event_channel().unwrap();
    let id = CmId::create(&channel, Some(&ctx));
    id.resolve_addr(None, listener.local_addr().unwrap())
        .unwrap();
    id.resolve_route().unwrap();
    id.set_queue_pair(Some(&qp));
    id.connect(&ConnectionParameters::default()).unwrap();
    let _peer = listener.accept().unwrap();
    let active = wait_for_request_sent(&id);
    if let Stage::Reply(starting) = &mut active.state.lock().stage {
        // Reading from an unconnected socket fails with an error that a peer cannot cause.
        let lost = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None);
        starting.stream = TcpStream::from_socket(lost.unwrap()).unwrap();
    }
    Arc::clone(&active).ready(true, false, false);
    let mut event = channel.try_next();
    while let Some(e) = &event
        && matches!(
            e.kind,
            CmEventKind::AddrResolved | CmEventKind::RouteResolved
        )
    {
        event = channel.try_next();
    }
    let event = event.expect("no event reports the failure");
    let lost = (CmEventKind::ConnectError, libc::ENOTCONN);
    assert_eq!((event.kind, event.status), lost);
    listener.set_nonblocking(true).unwrap();
    assert!(listener.accept().is_err(), "the initiator connects again");
    id.destroy();
    qp.destroy();
}

/// If the connection ends before the event Established, the program gets Established before
/// Disconnected.
#[test]
fn early_end_follows_established() {
    let lost = Fault {
        blame: Blame::Transport,
        code: TerminateCode::MPA_CONNECTION_LOST,
    };
    let over = |status| {
        vec![
            (CmEventKind::Established, 0),
            (CmEventKind::Disconnected, status),
        ]
    };
    for (events, fault, wanted) in [
        (Events::DISCONNECTED, None, over(0)),
        (Events::FATAL, None, over(0)),
        (Events::DISCONNECTED, Some(lost), over(libc::ECONNRESET)),
        (Events::ESTABLISHED, None, over(0)[..1].to_vec()),
    ] {
        let channel = create_event_channel().unwrap();
        let id = CmId::create(&channel, None);
        id.inner.state.lock().phase = Phase::Accepting;
        id.inner.qp_event(events, fault);
        assert!(channel.is_empty(), "{events:?}: event before Established");
        id.inner.state.lock().depths = Some((3, 4));
        assert!(id.established(Reply {
            private_data: b"data".to_vec(),
            infiniband: None,
        }));
        // TimewaitExit, a second after the end, is ignored.
        let events_given = || -> Vec<_> {
            let events = std::iter::from_fn(|| channel.try_next());
            events
                .filter(|event| event.kind != CmEventKind::TimewaitExit)
                .collect()
        };
        let all = events_given();
        let reads = (all[0].responder_resources, all[0].initiator_depth);
        assert_eq!(
            (&all[0].private_data[..], reads),
            (&b"data"[..], (Some(4), Some(3)))
        );
        let all: Vec<_> = all.iter().map(|event| (event.kind, event.status)).collect();
        assert_eq!(all, wanted, "{events:?}");
        assert!(id.established(Reply::default()));
        assert!(events_given().is_empty(), "{events:?}: twice");
    }
}

#[test]
fn destroyed_identifier_is_not_established() {
    let channel = create_event_channel().unwrap();
    let id = CmId::create(&channel, None);
    id.inner.state.lock().phase = Phase::Accepting;
    id.destroy();
    assert!(!id.established(Reply::default()));
    assert!(channel.is_empty());
}

/// The program's events, for each event of a queue pair that waits for the peer's first message.
#[test]
fn first_message_establishes_the_connection() {
    use CmEventKind::{ConnectError, Disconnected, Established};
    for (events, wanted) in [
        (Events::ESTABLISHED, &[(Established, 0)][..]),
        (Events::SQ_DRAINED, &[]),
        (Events::LAST_WQE, &[]),
        (
            Events::ESTABLISHED | Events::DISCONNECTED,
            &[(Established, 0), (Disconnected, 0)],
        ),
        (Events::DISCONNECTED, &[(ConnectError, libc::ECONNRESET)]),
        (Events::FATAL, &[(ConnectError, libc::ECONNRESET)]),
    ] {
        let channel = create_event_channel().unwrap();
        let id = CmId::create(&channel, None);
        id.inner.state.lock().phase = Phase::Connected(false);
        id.inner.qp_event(events, None);
        // TimewaitExit, a second after the end, is ignored.
        let found = std::iter::from_fn(|| channel.try_next())
            .filter(|event| event.kind != CmEventKind::TimewaitExit)
            .map(|event| (event.kind, event.status));
        assert_eq!(found.collect::<Vec<_>>(), wanted, "{events:?}");
        id.destroy();
    }
}

/// The request to the port mapper is sent again after the timer, and not after each event of the
/// socket.
#[test]
fn mapper_request_is_repeated_after_timer() {
    let loopback = |port| SocketAddr::from(([127, 0, 0, 1], port));
    let (qp, _id, active) = attempt(loopback(9));
    let mapper = std::net::UdpSocket::bind(loopback(0)).unwrap();
    mapper.set_nonblocking(true).unwrap();
    let port = mapper.local_addr().unwrap().port();
    let requests = || std::iter::from_fn(|| mapper.recv(&mut [0; 100]).ok()).count();
    let bound = Bound::bind(loopback(0), None, Sharing::Exclusive).unwrap();
    let lookup = Lookup::start(loopback(9), bound.local_addr().unwrap(), port, 7).unwrap();
    assert_eq!(requests(), 1);
    let mut s = active.state.lock();
    s.stage = Stage::Mapper(lookup, bound);
    for (timed_out, times) in [(false, 0), (true, 1), (false, 0)] {
        let Stage::Mapper(lookup, bound) = std::mem::replace(&mut s.stage, Stage::Done) else {
            panic!("the look-up has ended");
        };
        let next = active.read_mapper(&mut s, lookup, bound, timed_out);
        assert!(matches!(next, Next::Wait));
        assert_eq!(requests(), times, "timed_out: {timed_out}");
    }
    s.stage = Stage::Done;
    drop(s);
    qp.destroy();
}

/// A phase changes only together with its event. The test locks the channel, so that no event can
/// be added, and checks that the phase does not change.
#[test]
fn phase_changes_with_its_event() {
    type Before = fn() -> Phase;
    type Change = fn(&CmId);
    let first: Change = |id| id.inner.qp_event(Events::ESTABLISHED, None);
    let end: Change = |id| id.inner.qp_event(Events::DISCONNECTED, None);
    let changes: [(&str, Before, Change); 5] = [
        ("first message", || Phase::Connected(false), first),
        ("end before it", || Phase::Connected(false), end),
        (
            "no first message",
            || Phase::Connected(false),
            |id| id.inner.first_message_overdue(),
        ),
        (
            "set-up",
            || Phase::Accepting,
            |id| {
                assert!(id.established(Reply::default()));
            },
        ),
        (
            "end of the set-up",
            || Phase::Accepting,
            |id| {
                id.inner.state.lock().ended_early = Some(0);
                assert!(id.established(Reply::default()));
            },
        ),
    ];
    for (name, phase, change) in changes {
        let channel = create_event_channel().unwrap();
        let id = CmId::create(&channel, None);
        id.inner.state.lock().phase = phase();
        let before = std::mem::discriminant(&phase());
        let held = id.inner.channel.lock();
        std::thread::scope(|scope| {
            let changing = scope.spawn(|| change(&id));
            let mut hidden = 0;
            // If the state is locked for 20 checks in a row, the thread waits for the channel's
            // lock.
            while hidden < 20 {
                match id.inner.state.try_lock() {
                    Some(s) => {
                        hidden = 0;
                        let same = std::mem::discriminant(&s.phase) == before;
                        let is_changed = matches!(s.phase, Phase::Connected(true));
                        assert!(same && !is_changed, "{name}: changed without its event");
                    }
                    None => hidden += 1,
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            drop(held);
            changing.join().unwrap();
        });
        assert!(!channel.is_empty(), "{name}");
        id.destroy();
    }
}

/// If a port mapper has returned the listener's address, later attempts connect to that address,
/// and not to the program's port.
#[test]
fn retries_use_the_mapped_port() {
    let [named, mapped] = [(); 2].map(|()| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    for listener in [&named, &mapped] {
        listener.set_nonblocking(true).unwrap();
    }
    type Retry = fn(&Arc<Active>);
    let retries: [Retry; 2] = [
        |active| {
            let next = active.retry_or_end(&mut active.state.lock(), None);
            assert!(matches!(next, Next::Wait));
        },
        |active| {
            active.state.lock().stage = Stage::Refused;
            active.reconnect();
        },
    ];
    for retry in retries {
        let (qp, _id, active) = attempt(named.local_addr().unwrap());
        active.state.lock().target = mapped.local_addr().unwrap();
        retry(&active);
        testing::until("no attempt", || mapped.accept().is_ok());
        assert!(named.accept().is_err(), "the named port");
        active.cancel();
        qp.destroy();
    }
}

/// A refused attempt is repeated after each pause, and then ends.
#[test]
fn refused_attempts_end() {
    let (qp, _id, active) = attempt(([127, 0, 0, 1], 9).into());
    let mut s = active.state.lock();
    let mut refuse = |errno| {
        let next = active.connect_failed(&mut s, &io::Error::from_raw_os_error(errno));
        match next {
            Next::Wait => None,
            Next::End(End::Failed { kind, status, .. }) => Some((kind, status)),
            Next::End(End::Established) | Next::Accepted(_) => panic!("there is no connection"),
        }
    };
    let unreachable = libc::ENETUNREACH;
    let ended = Some((CmEventKind::Unreachable, unreachable));
    assert_eq!(refuse(unreachable), ended, "only refusals are repeated");
    let refused = libc::ECONNREFUSED;
    for _ in REFUSED_PAUSES {
        assert_eq!(refuse(refused), None);
    }
    assert_eq!(refuse(refused), Some((CmEventKind::Rejected, refused)));
    s.stage = Stage::Done;
    drop(s);
    qp.destroy();
}

/// The program keeps its peer's name, although a port mapper has returned another address. A
/// wildcard address is replaced.
#[test]
fn connection_keeps_named_peer() {
    let ctx = testing::context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = testing::queue_pair(&ctx, &cq, &cq);
    let peer = testing::connected(&qp);
    let (theirs, ours) = (peer.local_addr().unwrap(), peer.peer_addr().unwrap());
    let named = SocketAddr::from(([192, 0, 2, 1], 9));
    let any = SocketAddr::from(([0; 4], 9));
    for (before, after) in [(Some(named), named), (Some(any), theirs), (None, theirs)] {
        let id = CmId::create(&create_event_channel().unwrap(), Some(&ctx));
        id.set_queue_pair(Some(&qp));
        {
            let mut s = id.inner.state.lock();
            (s.phase, s.peer) = (Phase::Accepting, before);
        }
        assert!(id.established(Reply::default()));
        assert_eq!(id.addresses(), (Some(ours), Some(after)));
        id.destroy();
    }
    qp.destroy();
}

/// A failed attempt has used the port that was chosen for it. The next one does not depend on it.
#[test]
fn next_attempt_forgets_chosen_port() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let used = listener.local_addr().unwrap();
    let after_failure = |phase| {
        let (qp, id, _) = attempt(used);
        id.set_queue_pair(Some(&qp));
        let mut s = id.inner.state.lock();
        (s.phase, s.port_chosen) = (phase, true);
        (s.local, s.peer) = (Some(used), Some(used));
        drop(s);
        (qp, id)
    };
    let (qp, id) = after_failure(Phase::Failed);
    id.connect(&ConnectionParameters::default()).unwrap();
    match &id.inner.state.lock().phase {
        Phase::Connecting(active) => assert_eq!(active.local.map(|local| local.port()), Some(0)),
        _ => panic!("the identifier does not connect"),
    }
    id.destroy();
    qp.destroy();
    let (qp, id) = after_failure(Phase::Failed);
    id.resolve_addr(None, used).unwrap();
    assert_eq!(id.addresses().0.map(|local| local.port()), Some(0));
    assert!(!id.inner.state.lock().port_chosen);
    id.destroy();
    qp.destroy();
}
