//! Tests of each state of a link with each event.

use super::*;
use crate::testing;
use Gone::{BehindHeld, ReadToEnd, Unwritable};

/// The state of a [`Link`] without its stream. The `bool` tells whether the request timer is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LinkState {
    None,
    Up,
    Gone(Gone, bool),
    Ending(Option<(Gone, bool)>),
}

const STATES: [LinkState; 15] = {
    let (no, yes) = (false, true);
    [
        LinkState::None,
        LinkState::Up,
        LinkState::Gone(Unwritable, no),
        LinkState::Gone(Unwritable, yes),
        LinkState::Gone(BehindHeld, no),
        LinkState::Gone(BehindHeld, yes),
        LinkState::Gone(ReadToEnd, no),
        LinkState::Gone(ReadToEnd, yes),
        LinkState::Ending(None),
        LinkState::Ending(Some((Unwritable, no))),
        LinkState::Ending(Some((Unwritable, yes))),
        LinkState::Ending(Some((BehindHeld, no))),
        LinkState::Ending(Some((BehindHeld, yes))),
        LinkState::Ending(Some((ReadToEnd, no))),
        LinkState::Ending(Some((ReadToEnd, yes))),
    ]
};

fn pair(peer: PeerGone) -> (Gone, bool) {
    (peer.gone, peer.request_timer)
}

fn state_of(link: &Link) -> LinkState {
    match link {
        Link::None(_) => LinkState::None,
        Link::Up(_) => LinkState::Up,
        Link::PeerGone(_, peer) => {
            let (gone, timer) = pair(*peer);
            LinkState::Gone(gone, timer)
        }
        Link::Ending(_, ending) => LinkState::Ending(ending.peer_gone.map(pair)),
    }
}

fn link_in(state: LinkState, open: Open) -> Link {
    let peer = |(gone, request_timer)| PeerGone {
        gone,
        request_timer,
    };
    match state {
        LinkState::None => Link::None(open.report),
        LinkState::Up => Link::Up(open),
        LinkState::Gone(gone, timer) => Link::PeerGone(open, peer((gone, timer))),
        LinkState::Ending(gone) => {
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

/// Returns the state after an event, and the return value of the transition (`true` for a
/// transition that returns nothing).
fn expected(state: LinkState, event: Event) -> (LinkState, bool) {
    match (event, state) {
        (Event::Attach, LinkState::None) => (LinkState::Up, true),
        (Event::Attach, other) => (other, false),

        (Event::CannotWrite, LinkState::Up) => (LinkState::Gone(Unwritable, false), true),
        (Event::CannotWrite, LinkState::Ending(None)) => {
            (LinkState::Ending(Some((Unwritable, false))), true)
        }
        (Event::CannotWrite, other) => (other, true),

        (Event::EndBehindHeld, LinkState::Up) => (LinkState::Gone(BehindHeld, false), true),
        (Event::EndBehindHeld, LinkState::Gone(Unwritable | BehindHeld, timer)) => {
            (LinkState::Gone(BehindHeld, timer), true)
        }
        (Event::EndBehindHeld, other) => (other, true),

        (Event::ReadToEnd, LinkState::Up) => (LinkState::Gone(ReadToEnd, false), true),
        (Event::ReadToEnd, LinkState::Gone(_, timer)) => (LinkState::Gone(ReadToEnd, timer), true),
        (Event::ReadToEnd, other) => (other, true),

        (Event::WatchAgain, LinkState::Gone(BehindHeld, timer)) => {
            (LinkState::Gone(Unwritable, timer), true)
        }
        (Event::WatchAgain, LinkState::Ending(Some((BehindHeld, timer)))) => {
            (LinkState::Ending(Some((Unwritable, timer))), true)
        }
        (Event::WatchAgain, other) => (other, false),

        (Event::AwaitAnswer, LinkState::Gone(gone @ (BehindHeld | ReadToEnd), timer)) => {
            (LinkState::Gone(gone, true), !timer)
        }
        (Event::AwaitAnswer, LinkState::Ending(Some((gone @ (BehindHeld | ReadToEnd), timer)))) => {
            (LinkState::Ending(Some((gone, true))), !timer)
        }
        (Event::AwaitAnswer, other) => (other, false),

        (Event::BeginEnding, LinkState::Up) => (LinkState::Ending(None), true),
        (Event::BeginEnding, LinkState::Gone(gone, timer)) => {
            (LinkState::Ending(Some((gone, timer))), true)
        }
        (Event::BeginEnding, other) => (other, true),

        (Event::Detach, LinkState::None) => (LinkState::None, false),
        (Event::Detach, _) => (LinkState::None, true),
    }
}

/// Creates a stream with a stalled plan, a held Send and a timer.
fn stream(socket: &Arc<Socket>, established: bool) -> Open {
    let mut open = Open::new(Arc::clone(socket), None, Liveness::default());
    open.report.established = established;
    open.stalled = Some(crate::conn::pool::take_tx().unwrap());
    open.held_since = 5;
    open.timer = Some(Time::ZERO);
    open
}

/// Applies an event. `new` is the stream that is attached. Returns the return value of the
/// transition, as [`expected`] does.
fn apply(link: &mut Link, event: Event, new: Open) -> bool {
    match event {
        Event::Attach => return link.attach(new),
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
fn each_event_changes_each_state_as_expected() {
    let ctx = testing::context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = testing::queue_pair(&ctx, &cq, &cq);
    let _peer = testing::connected(&qp);
    let socket = testing::link(&qp);
    for established in [false, true] {
        for state in STATES {
            for event in EVENTS {
                let mut link = link_in(state, stream(&socket, established));
                assert_eq!(state_of(&link), state);
                let result = apply(&mut link, event, stream(&socket, false));
                assert_eq!(
                    (state_of(&link), result),
                    expected(state, event),
                    "{state:?} {event:?}"
                );
                // A pending report outlives the stream, but a new stream starts without a report.
                let is_new = matches!((event, state), (Event::Attach, LinkState::None));
                assert_eq!(link.report().established, established && !is_new);
                // A second `begin_ending` does not change the number of acknowledged bytes.
                let was_ending = matches!(state, LinkState::Ending(_));
                if let Some(ending) = link.ending_mut() {
                    assert_eq!(ending.acknowledged, if was_ending { 5 } else { 7 });
                }
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
fn queries_match_states() {
    let ctx = testing::context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = testing::queue_pair(&ctx, &cq, &cq);
    let _peer = testing::connected(&qp);
    let socket = testing::link(&qp);
    for state in STATES {
        let mut link = link_in(state, stream(&socket, false));
        let gone = match state {
            LinkState::None | LinkState::Up => None,
            LinkState::Gone(gone, _) => Some(gone),
            LinkState::Ending(peer) => peer.map(|(gone, _)| gone),
        };
        assert_eq!(link.is_none(), state == LinkState::None);
        assert_eq!(link.is_open(), state != LinkState::None);
        assert_eq!(link.socket().is_none(), state == LinkState::None);
        assert_eq!(link.own_socket().is_none(), state == LinkState::None);
        assert_eq!(link.open_mut().is_none(), state == LinkState::None);
        assert_eq!(link.peer_gone().map(|peer| peer.gone), gone);
        assert_eq!(link.is_read_to_end(), gone == Some(ReadToEnd));
        assert_eq!(link.is_peer_gone(), gone.is_some());
        let is_ending = matches!(state, LinkState::Ending(_));
        assert_eq!(link.ending_mut().is_some(), is_ending);
        link.report_mut().established = true;
        assert!(link.report().established);
    }
    qp.destroy();
}
