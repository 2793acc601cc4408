//! Attempts that fail locally, the order of events, and port mappers.

use super::super::create_event_channel;
use super::super::id::Phase;
use super::*;
use crate::testing;
use iwarp_rnic::qp::{Blame, Events, Fault, State as QpState};
use std::time::Instant;

/// Returns the attempt of an identifier that has sent its request.
fn asking(id: &CmId) -> Arc<Active> {
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

/// A program on this host ends the socket. That does not mean that the peer supports only revision
/// 1.
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
    let active = asking(&id);
    if let Stage::Reply(starting) = &mut active.state.lock().stage {
        // An unconnected socket has an error that a peer cannot cause.
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
    let event = event.expect("the attempt goes on");
    let lost = (CmEventKind::ConnectError, libc::ENOTCONN);
    assert_eq!((event.kind, event.status), lost);
    listener.set_nonblocking(true).unwrap();
    assert!(listener.accept().is_err(), "it asks again");
    id.destroy();
    qp.destroy();
}

/// Events of the queue pair and of the set-up in this order, and the events that the program gets.
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
        assert!(channel.is_empty(), "{events:?}: too early");
        id.inner.state.lock().depths = Some((3, 4));
        assert!(id.established(Reply {
            private_data: b"data".to_vec(),
            infiniband: None,
        }));
        // Without TimewaitExit, which comes a second after the end.
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

/// Events of a queue pair whose connection waits for the peer's first message, and the events that
/// the program gets.
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
        // Without TimewaitExit, which comes a second after the end.
        let found = std::iter::from_fn(|| channel.try_next())
            .filter(|event| event.kind != CmEventKind::TimewaitExit)
            .map(|event| (event.kind, event.status));
        assert_eq!(found.collect::<Vec<_>>(), wanted, "{events:?}");
        id.destroy();
    }
}

/// If the socket is reported although the port mapper has not replied, the mapper is not asked
/// again before the pause is over.
#[test]
fn silent_mapper_is_asked_again() {
    let ctx = testing::context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = testing::queue_pair(&ctx, &cq, &cq);
    let id = CmId::create(&create_event_channel().unwrap(), Some(&ctx));
    let loopback = |port| SocketAddr::from(([127, 0, 0, 1], port));
    let owned = (qp.clone(), None);
    let parameters = ConnectionParameters::default();
    let active = Active::new(&id, &ctx, owned, loopback(9), None, &parameters).unwrap();
    let mapper = std::net::UdpSocket::bind(loopback(0)).unwrap();
    mapper.set_nonblocking(true).unwrap();
    let port = mapper.local_addr().unwrap().port();
    let asked = || std::iter::from_fn(|| mapper.recv(&mut [0; 100]).ok()).count();
    let bound = Bound::bind(loopback(0), None, Sharing::Exclusive).unwrap();
    let lookup = Lookup::start(loopback(9), bound.local_addr().unwrap(), port, 7).unwrap();
    assert_eq!(asked(), 1);
    let mut s = active.state.lock();
    s.stage = Stage::Mapper(lookup, bound);
    for (silent, times) in [(false, 0), (true, 1), (false, 0)] {
        let Stage::Mapper(lookup, bound) = std::mem::replace(&mut s.stage, Stage::Done) else {
            panic!("it has an answer");
        };
        let next = active.mapper(&mut s, lookup, bound, silent);
        assert!(matches!(next, Next::Wait));
        assert_eq!(asked(), times, "silent: {silent}");
    }
    s.stage = Stage::Done;
    drop(s);
    qp.destroy();
}

/// A visible change has its event in the channel: no later event overtakes it, and `destroy` drops
/// it. Here the channel is locked, so the change has to stay invisible.
#[test]
fn change_is_not_visible_before_its_event() {
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
            // A thread that holds the state's lock for this many checks waits for the channel's.
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

/// If a port mapper has returned the listener's address, attempts are repeated there, and not at
/// the program's port.
#[test]
fn retries_use_the_mapped_port() {
    let ctx = testing::context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = testing::queue_pair(&ctx, &cq, &cq);
    let id = CmId::create(&create_event_channel().unwrap(), Some(&ctx));
    let parameters = ConnectionParameters::default();
    let [named, mapped] = [(); 2].map(|()| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    for listener in [&named, &mapped] {
        listener.set_nonblocking(true).unwrap();
    }
    type Again = fn(&Arc<Active>);
    let ways: [Again; 2] = [
        |active| {
            let next = active.retry_or_end(&mut active.state.lock(), None);
            assert!(matches!(next, Next::Wait));
        },
        |active| {
            active.state.lock().stage = Stage::Refused;
            active.again();
        },
    ];
    for way in ways {
        let at = named.local_addr().unwrap();
        let active = Active::new(&id, &ctx, (qp.clone(), None), at, None, &parameters).unwrap();
        active.state.lock().target = mapped.local_addr().unwrap();
        way(&active);
        testing::until("no attempt", || mapped.accept().is_ok());
        assert!(named.accept().is_err(), "the named port");
        active.cancel();
    }
    qp.destroy();
}
