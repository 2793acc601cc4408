//! Checks every state with every event.

use super::*;
use crate::testing;
use Gone::{BehindHeld, ReadToEnd, Unwritable};

/// A [`Link`] without its stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Is {
    None,
    Up,
    Gone(Gone, bool),
    Ending(Option<(Gone, bool)>),
}

const STATES: [Is; 15] = {
    let (no, yes) = (false, true);
    [
        Is::None,
        Is::Up,
        Is::Gone(Unwritable, no),
        Is::Gone(Unwritable, yes),
        Is::Gone(BehindHeld, no),
        Is::Gone(BehindHeld, yes),
        Is::Gone(ReadToEnd, no),
        Is::Gone(ReadToEnd, yes),
        Is::Ending(None),
        Is::Ending(Some((Unwritable, no))),
        Is::Ending(Some((Unwritable, yes))),
        Is::Ending(Some((BehindHeld, no))),
        Is::Ending(Some((BehindHeld, yes))),
        Is::Ending(Some((ReadToEnd, no))),
        Is::Ending(Some((ReadToEnd, yes))),
    ]
};

fn pair(peer: PeerGone) -> (Gone, bool) {
    (peer.gone, peer.request_timer)
}

fn seen(link: &Link) -> Is {
    match link {
        Link::None(_) => Is::None,
        Link::Up(_) => Is::Up,
        Link::PeerGone(_, peer) => {
            let (gone, timer) = pair(*peer);
            Is::Gone(gone, timer)
        }
        Link::Ending(_, ending) => Is::Ending(ending.peer_gone.map(pair)),
    }
}

fn made(is: Is, open: Open) -> Link {
    let peer = |(gone, request_timer)| PeerGone {
        gone,
        request_timer,
    };
    match is {
        Is::None => Link::None(open.report),
        Is::Up => Link::Up(open),
        Is::Gone(gone, timer) => Link::PeerGone(open, peer((gone, timer))),
        Is::Ending(gone) => {
            let ending = Ending {
                acknowledged: 5,
                peer_gone: gone.map(peer),
            };
            Link::Ending(open, ending)
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Event {
    Attach,
    CannotWrite,
    EndBehindHeld,
    ReadToEnd,
    WatchAgain,
    AwaitAnswer,
    BeginEnding,
    Detach,
}

const EVENTS: [Event; 8] = [
    Event::Attach,
    Event::CannotWrite,
    Event::EndBehindHeld,
    Event::ReadToEnd,
    Event::WatchAgain,
    Event::AwaitAnswer,
    Event::BeginEnding,
    Event::Detach,
];

/// Returns the state after an event, and the result of the transition: `true` if it returns
/// nothing.
fn expected(is: Is, event: Event) -> (Is, bool) {
    match (event, is) {
        (Event::Attach, Is::None) => (Is::Up, true),
        (Event::Attach, other) => (other, false),

        (Event::CannotWrite, Is::Up) => (Is::Gone(Unwritable, false), true),
        (Event::CannotWrite, Is::Ending(None)) => (Is::Ending(Some((Unwritable, false))), true),
        (Event::CannotWrite, other) => (other, true),

        (Event::EndBehindHeld, Is::Up) => (Is::Gone(BehindHeld, false), true),
        (Event::EndBehindHeld, Is::Gone(Unwritable | BehindHeld, timer)) => {
            (Is::Gone(BehindHeld, timer), true)
        }
        (Event::EndBehindHeld, other) => (other, true),

        (Event::ReadToEnd, Is::Up) => (Is::Gone(ReadToEnd, false), true),
        (Event::ReadToEnd, Is::Gone(_, timer)) => (Is::Gone(ReadToEnd, timer), true),
        (Event::ReadToEnd, other) => (other, true),

        (Event::WatchAgain, Is::Gone(BehindHeld, timer)) => (Is::Gone(Unwritable, timer), true),
        (Event::WatchAgain, Is::Ending(Some((BehindHeld, timer)))) => {
            (Is::Ending(Some((Unwritable, timer))), true)
        }
        (Event::WatchAgain, other) => (other, false),

        (Event::AwaitAnswer, Is::Gone(gone @ (BehindHeld | ReadToEnd), timer)) => {
            (Is::Gone(gone, true), !timer)
        }
        (Event::AwaitAnswer, Is::Ending(Some((gone @ (BehindHeld | ReadToEnd), timer)))) => {
            (Is::Ending(Some((gone, true))), !timer)
        }
        (Event::AwaitAnswer, other) => (other, false),

        (Event::BeginEnding, Is::Up) => (Is::Ending(None), true),
        (Event::BeginEnding, Is::Gone(gone, timer)) => (Is::Ending(Some((gone, timer))), true),
        (Event::BeginEnding, other) => (other, true),

        (Event::Detach, Is::None) => (Is::None, false),
        (Event::Detach, _) => (Is::None, true),
    }
}

/// Creates a stream with what a stream in operation may hold.
fn stream(socket: &Arc<Socket>, established: bool) -> Open {
    let mut open = Open::new(Arc::clone(socket), None, Liveness::default());
    open.report.established = established;
    open.stalled = Some(crate::conn::pool::take_tx().unwrap());
    open.held_since = 5;
    open.timer = Some(Time::ZERO);
    open
}

fn step(link: &mut Link, event: Event, other: Open) -> bool {
    match event {
        Event::Attach => return link.attach(other),
        Event::CannotWrite => link.cannot_write(),
        Event::EndBehindHeld => link.end_behind_held(),
        Event::ReadToEnd => link.read_to_end(),
        Event::WatchAgain => return link.watch_again(),
        Event::AwaitAnswer => return link.await_answer(),
        Event::BeginEnding => link.begin_ending(7),
        Event::Detach => return link.detach().is_some(),
    }
    true
}

#[test]
fn every_state_takes_every_event() {
    let ctx = testing::context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = testing::queue_pair(&ctx, &cq, &cq);
    let _peer = testing::connected(&qp);
    let socket = testing::link(&qp);
    for established in [false, true] {
        for is in STATES {
            for event in EVENTS {
                let mut link = made(is, stream(&socket, established));
                assert_eq!(seen(&link), is);
                let result = step(&mut link, event, stream(&socket, false));
                assert_eq!(
                    (seen(&link), result),
                    expected(is, event),
                    "{is:?} {event:?}"
                );
                // A pending report outlives the stream, but a new stream starts without one.
                let is_new = matches!((event, is), (Event::Attach, Is::None));
                assert_eq!(link.report().established, established && !is_new);
                // A later call does not reset what the peer had acknowledged.
                let before = matches!(is, Is::Ending(_));
                if let Some(ending) = link.ending_mut() {
                    assert_eq!(ending.acknowledged, if before { 5 } else { 7 });
                }
                // A stalled plan is dropped when the stream was read to its end.
                if let (Event::ReadToEnd, Link::PeerGone(open, _)) = (event, &link) {
                    assert!(open.stalled.is_none());
                } else if let Some(open) = link.open() {
                    assert!(open.stalled.is_some() && open.held_since == 5);
                }
            }
        }
    }
    qp.destroy();
}

#[test]
fn queries_agree_with_states() {
    let ctx = testing::context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = testing::queue_pair(&ctx, &cq, &cq);
    let _peer = testing::connected(&qp);
    let socket = testing::link(&qp);
    for is in STATES {
        let mut link = made(is, stream(&socket, false));
        let gone = match is {
            Is::None | Is::Up => None,
            Is::Gone(gone, _) => Some(gone),
            Is::Ending(peer) => peer.map(|(gone, _)| gone),
        };
        assert_eq!(link.is_none(), is == Is::None);
        assert_eq!(link.is_open(), is != Is::None);
        assert_eq!(link.socket().is_none(), is == Is::None);
        assert_eq!(link.own_socket().is_none(), is == Is::None);
        assert_eq!(link.open_mut().is_none(), is == Is::None);
        assert_eq!(link.peer_gone().map(|peer| peer.gone), gone);
        assert_eq!(link.is_read_to_end(), gone == Some(ReadToEnd));
        assert_eq!(link.takes_nothing(), gone.is_some());
        assert_eq!(link.ending_mut().is_some(), matches!(is, Is::Ending(_)));
        link.report_mut().established = true;
        assert!(link.report().established);
    }
    qp.destroy();
}
