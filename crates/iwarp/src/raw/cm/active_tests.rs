//! Attempts that end for a reason of this host's.

use super::super::super::testing;
use super::super::create_event_channel;
use super::super::id::Phase;
use super::*;
use iwarp_rnic::qp::{Blame, Events, Fault, State as QpState};
use std::time::Instant;

/// The attempt of an identifier, which has sent its request.
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

/// Somebody on this host takes the socket away. That is no sign of a peer that knows revision 1 only.
#[test]
fn a_local_error_of_the_socket_ends_the_attempt() {
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
        // A socket without a connection fails in a way in which no peer can make it fail.
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

/// What a queue pair and the set-up say of a connection that is accepted, in this order, and the events that the program gets.
#[test]
fn a_connection_that_ends_before_its_event_is_established_and_over() {
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
        assert!(id.established(b"data".to_vec(), Some(3), Some(4)));
        // Without the event that comes a second after the end.
        let told = || -> Vec<_> {
            let events = std::iter::from_fn(|| channel.try_next());
            events
                .filter(|event| event.kind != CmEventKind::TimewaitExit)
                .collect()
        };
        let all = told();
        let reads = (all[0].responder_resources, all[0].initiator_depth);
        assert_eq!(
            (&all[0].private_data[..], reads),
            (&b"data"[..], (Some(4), Some(3)))
        );
        let all: Vec<_> = all.iter().map(|event| (event.kind, event.status)).collect();
        assert_eq!(all, wanted, "{events:?}");
        assert!(id.established(Vec::new(), None, None));
        assert!(told().is_empty(), "{events:?}: told twice");
    }
}

#[test]
fn a_destroyed_identifier_is_not_established() {
    let channel = create_event_channel().unwrap();
    let id = CmId::create(&channel, None);
    id.inner.state.lock().phase = Phase::Accepting;
    id.destroy();
    assert!(!id.established(Vec::new(), None, None));
    assert!(channel.is_empty());
}
