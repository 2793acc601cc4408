//! Each event in each state of a queue pair's life.
//!
//! `life.txt` contains a line for each state, with the effect of each event; an event that is not
//! listed has no effect. States that differ only in one value of an independent pair share a line;
//! a second test checks that these values are independent.

use super::*;
use crate::qp::fault::TerminateOctets;
use crate::qp::{ReceiverNotReady, Rtr, RxInterest, State, StreamConfig, StreamTimes, StreamWish};
use core::time::Duration;
use iwarp_proto::rdmap::{Terminate, TerminateCode};
use std::collections::{BTreeMap, VecDeque};
use std::format;
use std::string::String;
use std::vec::Vec;

/// A stream that may end at any time, and a stream that must not end yet. Other times do not matter
/// in these tests.
const TIMES: [Option<Time>; 2] = [None, Some(EARLY)];
const EARLY: Time = Time::from_nanos(10);

const STREAM: StreamConfig = StreamConfig {
    initiator: true,
    crc: true,
    markers_tx: false,
    markers_rx: false,
    ird: 0,
    ord: 0,
    rtr: None,
    rtr_send_expected: false,
    emss: 1460,
    times: StreamTimes {
        reminders: [Some(Duration::from_nanos(5)), None, None],
        maturity: Duration::from_nanos(10),
        speak_first: Some(Duration::from_nanos(20)),
        first_fpdu: None,
    },
};

fn start(life: &mut Life, initiator: bool, rtr: Option<Rtr>) {
    let stream = StreamConfig {
        initiator,
        rtr,
        ..STREAM
    };
    life.start(&stream, Time::ZERO);
}

fn clock(life: &mut Life, nanos: u64) {
    let held = ReceiverNotReady::default();
    while life
        .due(Time::from_nanos(nanos), &STREAM.times, held)
        .is_some()
    {}
}

fn hold(life: &mut Life, value: Hold) {
    if let Some(hold) = life.hold() {
        *hold = value;
    }
}

fn message() -> TerminateOctets {
    TerminateOctets::new(&Terminate::new(TerminateCode::MPA_CRC))
}

fn ready_states() -> [Ready; 4] {
    [
        Ready::Receive,
        Ready::Send,
        Ready::Drain { notified: false },
        Ready::Drain { notified: true },
    ]
}

fn idle_states() -> Vec<Idle> {
    let mut all = Vec::from([Idle::Reset, Idle::Init, Idle::Error]);
    for ready in ready_states() {
        for awaits in [false, true] {
            all.push(Idle::Ready { ready, awaits });
        }
    }
    all
}

fn old_streams() -> Vec<Option<Old>> {
    let mut all = Vec::from([None, Some(Old::Abort)]);
    for cut in [false, true] {
        all.extend(TIMES.map(|not_before| Some(Old::Leave { cut, not_before })));
    }
    all
}

fn flows() -> Vec<Flow> {
    let reminder = Reminder {
        at: None,
        before: 0,
    };
    let overdue = None;
    let since = Hold::Since {
        until: Time::from_nanos(u64::MAX),
        until_if_closed: Time::from_nanos(u64::MAX),
        check_at: None,
    };
    let mut peers = Vec::from([Peer::AwaitingFirstFpdu { overdue }]);
    peers.extend([Hold::No, Hold::Begins, since].map(|hold| Peer::Heard { hold }));
    peers.extend(TIMES.map(|not_before| Peer::Unanswered {
        reminder,
        not_before,
    }));
    let mut all = Vec::new();
    for closing in [false, true] {
        all.push(Flow::AwaitsFirstFpdu {
            closing,
            speak: None,
            overdue,
        });
        for &peer in &peers {
            for unwritten in [false, true] {
                all.push(Flow::Sends {
                    peer,
                    closing,
                    unwritten,
                });
            }
        }
    }
    all.extend(peers.iter().map(|&peer| Flow::Drained { peer }));
    all
}

fn ending_states() -> Vec<Life> {
    let message = message();
    let mut all = Vec::new();
    for eof in [false, true] {
        for not_before in TIMES {
            let terminate = |unwritten| Last::Terminate {
                message,
                unwritten,
                not_before,
            };
            let last_states = [
                terminate(false),
                terminate(true),
                Last::Plan { not_before },
                Last::Drained { not_before },
            ];
            all.extend(last_states.map(|last| Life::Ending { eof, last }));
        }
        let last = Last::ShutDown;
        all.push(Life::Ending { eof, last });
    }
    all
}

fn all_values() -> Vec<Life> {
    let mut all = ending_states();
    for state in idle_states() {
        all.extend(
            old_streams()
                .into_iter()
                .map(|old| Life::Apart { state, old }),
        );
    }
    for ready in ready_states() {
        all.extend(flows().iter().map(|&flow| Life::Up { ready, flow }));
    }
    all
}

type Event = (&'static str, fn(&mut Life));

/// All events.
const EVENTS: [Event; 26] = [
    ("RESET", |life| modify(life, State::Reset)),
    ("INIT", |life| modify(life, State::Init)),
    ("RTR", |life| modify(life, State::Rtr)),
    ("RTS", |life| modify(life, State::Rts)),
    ("SQD", |life| modify(life, State::Sqd)),
    ("ERR", |life| modify(life, State::Error)),
    ("await", |life| _ = life.await_stream()),
    ("initiate", |life| start(life, true, None)),
    ("initiate with RTR", |life| {
        start(life, true, Some(Rtr::Write))
    }),
    ("respond", |life| start(life, false, None)),
    ("close", Life::close),
    ("leave", Life::abandon),
    ("abort", Life::abort),
    ("fpdu", |life| _ = life.fpdu_arrived()),
    ("hold", |life| hold(life, Hold::Begins)),
    ("resume", |life| hold(life, Hold::No)),
    ("fail", |life| life.fail(message())),
    ("terminated", Life::terminated),
    ("eof", |life| _ = life.eof()),
    ("clock", |life| clock(life, 0)),
    ("time", |life| clock(life, 30)),
    ("emit", |life| _ = life.take_terminate()),
    ("fill", |life| life.written(true)),
    ("written", |life| life.written(false)),
    ("idle", |life| _ = life.idle()),
    ("drained", Life::drained),
];
const ENDS: [Event; 2] = [("shut", Life::shutdown_done), ("gone", Life::gone)];

fn events() -> impl Iterator<Item = Event> {
    EVENTS.into_iter().chain(ENDS)
}

fn modify(life: &mut Life, to: State) {
    if life.state().may_become(to) {
        life.modify(to);
    }
}

fn after(mut life: Life, event: Event) -> Life {
    event.1(&mut life);
    life
}

/// The words of a state in `life.txt`.
struct Words(String);

impl Words {
    fn add(&mut self, word: &str, on: bool) {
        if on {
            self.0 += " ";
            self.0 += word;
        }
    }

    fn add_old(&mut self, old: Option<Old>) {
        match old {
            None => self.add("apart", true),
            Some(Old::Leave { cut, not_before }) => {
                self.add(if cut { "leaves-cut" } else { "leaves" }, true);
                self.add("early", not_before.is_some());
            }
            Some(Old::Abort) => self.add("aborts", true),
        }
    }

    fn add_flow(&mut self, flow: Flow) {
        let (phase, peer, closing, unwritten) = match flow {
            Flow::AwaitsFirstFpdu { closing, .. } => ("waits", None, closing, false),
            Flow::Sends {
                peer,
                closing,
                unwritten,
            } => ("sends", Some(peer), closing, unwritten),
            Flow::Drained { peer } => ("drained", Some(peer), false, false),
        };
        self.add(phase, true);
        match peer {
            None => {}
            Some(Peer::Unanswered { not_before, .. }) => {
                self.add("unanswered", true);
                self.add("early", not_before.is_some());
            }
            Some(Peer::AwaitingFirstFpdu { .. }) => self.add("unheard", true),
            Some(Peer::Heard { hold }) => {
                self.add("held", matches!(hold, Hold::Since { .. }));
                self.add("held-anew", hold == Hold::Begins);
            }
        }
        self.add("closing", closing);
        self.add("plan", unwritten);
    }

    fn add_last(&mut self, last: Last) {
        let (unwritten, not_before) = match last {
            Last::Terminate {
                unwritten,
                not_before,
                ..
            } => {
                self.add("terminate", true);
                (unwritten, not_before)
            }
            Last::Plan { not_before } => (true, not_before),
            Last::Drained { not_before } => {
                self.add("drained", true);
                (false, not_before)
            }
            Last::ShutDown => {
                self.add("shut-down", true);
                (false, None)
            }
        };
        self.add("plan", unwritten);
        self.add("early", not_before.is_some());
    }
}

fn label(life: &Life) -> String {
    let mut words = Words(format!("{:?}", life.state()).to_uppercase());
    let ready = match *life {
        Life::Up { ready, .. } => Some((ready, false)),
        Life::Apart {
            state: Idle::Ready { ready, awaits },
            ..
        } => Some((ready, awaits)),
        _ => None,
    };
    if let Some((ready, awaits)) = ready {
        words.add("notified", ready == Ready::Drain { notified: true });
        words.add("awaits", awaits);
    }
    match *life {
        Life::Apart { old, .. } => words.add_old(old),
        Life::Up { flow, .. } => words.add_flow(flow),
        Life::Ending { eof, last } => {
            words.add_last(last);
            words.add("eof", eof);
        }
    }
    words.0
}

#[test]
fn events_follow_recorded_table() {
    let notified = Ready::Drain { notified: true };
    let shown = all_values().into_iter().filter(|life| match *life {
        Life::Apart { old: None, .. } => true,
        Life::Apart { state, .. } => matches!(state, Idle::Reset | Idle::Init | Idle::Error),
        Life::Up { ready, flow } => {
            let plain = Flow::Sends {
                peer: Peer::Heard { hold: Hold::No },
                closing: false,
                unwritten: false,
            };
            ready == Ready::Send || (flow == plain && ready != notified)
        }
        Life::Ending { .. } => true,
    });
    let mut table = String::new();
    for life in shown {
        table += &label(&life);
        table += ":";
        for event in events() {
            let next = after(life, event);
            if label(&next) != label(&life) {
                table += &format!(" {} → {};", event.0, label(&next));
            }
        }
        table += "\n";
    }
    let expected = include_str!("life.txt");
    for (line, expected) in table.lines().zip(expected.lines()) {
        assert_eq!(line, expected);
    }
    assert_eq!(table.lines().count(), expected.lines().count());
}

/// Neither value of an independent pair affects the other.
#[test]
fn independent_values_stay_independent() {
    for event in events() {
        let mut of_flow = BTreeMap::new();
        let mut of_old = BTreeMap::new();
        for life in all_values() {
            let next = after(life, event);
            match (life, next) {
                (Life::Up { ready, flow }, Life::Up { ready: r, flow: f }) => {
                    let before = of_flow.insert(format!("{flow:?}"), f);
                    assert!(before.is_none_or(|b| b == f), "{life:?} {}", event.0);
                    let moves = ["RTR", "RTS", "SQD", "idle"].contains(&event.0);
                    assert!(moves || r == ready, "{life:?} {}", event.0);
                    assert!(moves <= (f == flow), "{life:?} {}", event.0);
                }
                (Life::Apart { state, old }, Life::Apart { state: s, old: o }) => {
                    let before = of_old.insert(format!("{old:?}"), o);
                    assert!(before.is_none_or(|b| b == o), "{life:?} {}", event.0);
                    // The stream that was given up has no more effect.
                    let ends = ["gone", "written", "fill", "shut", "eof", "fpdu", "emit"];
                    assert!(
                        !ends.contains(&event.0) || s == state,
                        "{life:?} {}",
                        event.0
                    );
                }
                (Life::Ending { eof, .. }, Life::Ending { eof: e, .. }) => {
                    assert!(event.0 == "eof" || e == eof, "{life:?} {}", event.0);
                }
                _ => {}
            }
        }
    }
}

/// Each value of the type can be reached.
#[test]
fn every_value_is_reachable() {
    let mut seen = BTreeMap::new();
    let mut next = VecDeque::from([Life::NEW]);
    while let Some(life) = next.pop_front() {
        if seen.insert(label(&life), life).is_none() {
            next.extend(events().map(|event| after(life, event)));
        }
    }
    let all = all_values();
    for life in &all {
        assert!(seen.contains_key(&label(life)), "{life:?} cannot happen");
    }
    assert_eq!(seen.len(), all.len(), "`everything` lacks a value");
}

#[test]
fn invariants_of_each_state() {
    for life in all_values() {
        let state = life.state();
        let interest = life.rx_interest();
        assert_eq!(
            life.is_up(),
            matches!(interest, RxInterest::Read | RxInterest::Held)
        );
        assert!(life.is_up() <= life.has_stream());
        assert!(life.may_send() <= (life.is_up() && state != State::Error));
        assert!(life.starts_requests() <= (state == State::Rts && life.is_up()));
        assert!(life.has_unwritten() <= life.has_stream());
        let takes = matches!(state, State::Rts | State::Sqd | State::Error);
        assert_eq!(life.accepts_sends(), takes);
        // Nothing is written after the end of the stream, and no stream is given up that is still
        // to be written to.
        if life.wish() != StreamWish::Keep {
            assert!(!life.may_send() || life.has_unwritten(), "{life:?}");
            assert!(!life.has_octets_due(), "{life:?}");
            assert!(life.is_ending());
        }
        // A queue pair in RESET does not need its old stream.
        assert!((state == State::Reset && life.has_stream()) <= (life.wish() != StreamWish::Keep));
    }
}

/// A program that changes the state itself calls `await_stream` before it drains the queue.
#[test]
fn await_stream_is_allowed_before_drain() {
    for life in all_values() {
        let allowed = match life {
            Life::Apart {
                state: Idle::Init | Idle::Ready { .. },
                ..
            }
            | Life::Up { .. } => life.state() != State::Sqd,
            Life::Apart { .. } | Life::Ending { .. } => false,
        };
        assert_eq!({ life }.await_stream(), allowed, "{life:?}");
    }
}

/// The program is notified once that its queue is drained, and not before the plan is written.
#[test]
fn drain_is_reported_once() {
    for life in all_values() {
        let notified = match life {
            Life::Up { ready, .. }
            | Life::Apart {
                state: Idle::Ready { ready, .. },
                ..
            } => {
                ready == Ready::Drain { notified: false } && !(life.is_up() && life.has_unwritten())
            }
            _ => false,
        };
        assert_eq!({ life }.idle(), notified, "{life:?}");
    }
}
