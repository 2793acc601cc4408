//! The table of transitions: each state meets each event.

use super::*;
use crate::cm::{CmEventChannel, create_event_channel};
use std::fmt::Write as _;

const FRIEND: Address = Address {
    gid: [1; 16],
    num: 7,
};
const STRANGER: Address = Address { num: 8, ..FRIEND };
const EPOCH: u64 = 9;
const SECOND: u64 = 1_000_000_000;
const CONNECTOR: Connector = Connector {
    own: IpAddr::V4(std::net::Ipv4Addr::LOCALHOST),
    since: 5 * SECOND,
};

/// The identifiers in one test of a state and an event.
struct Ids {
    /// The identifier of the state.
    id: CmId,
    /// The identifier of the kept request.
    kept: CmId,
    /// The identifier in the event.
    new: CmId,
}

impl Ids {
    fn new(channel: &CmEventChannel) -> Self {
        let [id, kept, new] = [(); 3].map(|()| CmId::create(channel, None));
        Self { id, kept, new }
    }

    fn name(&self, wanted: &CmId) -> &'static str {
        let all = [(&self.id, "id"), (&self.kept, "kept"), (&self.new, "new")];
        let found = all.iter().find(|(id, _)| id.is_same(wanted));
        found.map_or("?", |(_, name)| name)
    }

    fn former(&self) -> CmId {
        CmId::create(&self.id.channel(), None)
    }
}

fn named(epoch: u64, peer: Address) -> Named {
    Named {
        qp: Weak::new(),
        epoch,
        peer,
        requests_since: Some(10 * SECOND),
    }
}

fn request(id: &CmId, from: Address) -> Request {
    Request {
        id: id.clone(),
        from,
        since: 10 * SECOND,
        _counted: Arc::default(),
    }
}

const STATES: [&str; 11] = [
    "None",
    "Early",
    "Early/other",
    "Expected",
    "Accepted",
    "Accepted+",
    "Pausing",
    "Asking",
    "Unreachable",
    "Connected",
    "Connected+",
];

/// Returns a partner in the state `STATES[index]`; `+` means with a kept request. The peer is
/// `FRIEND`, except in `Early/other`.
fn state(index: usize, ids: &Ids) -> Option<Partner> {
    let id = ids.id.clone();
    let kept = STATES[index]
        .ends_with('+')
        .then(|| request(&ids.kept, FRIEND));
    let named = named(EPOCH, FRIEND);
    let connector = CONNECTOR;
    Some(match index {
        0 => return None,
        1 => Partner::Early(request(&ids.kept, FRIEND)),
        2 => Partner::Early(request(&ids.kept, STRANGER)),
        3 => Partner::Expected(named),
        4 | 5 => Partner::Accepted { named, id, kept },
        6 => Partner::Pausing { named, connector },
        7 => Partner::Asking {
            named,
            connector,
            id,
        },
        8 => Partner::Unreachable(named),
        _ => Partner::Connected { id, kept },
    })
}

fn kind(partner: Option<&Partner>) -> &'static str {
    match partner {
        None => "None",
        Some(Partner::Early(_)) => "Early",
        Some(Partner::Expected(_)) => "Expected",
        Some(Partner::Accepted { .. }) => "Accepted",
        Some(Partner::Pausing { .. }) => "Pausing",
        Some(Partner::Asking { .. }) => "Asking",
        Some(Partner::Unreachable(_)) => "Unreachable",
        Some(Partner::Connected { .. }) => "Connected",
    }
}

/// Describes a state and effects as text: the state's name and identifier, `+` and the kept
/// request, `-` and each destroyed identifier, and the action.
fn describe(ids: &Ids, partner: Option<&Partner>, effects: &Effects) -> String {
    let mut text = kind(partner).to_owned();
    if let Some(
        Partner::Accepted { id, .. } | Partner::Asking { id, .. } | Partner::Connected { id, .. },
    ) = partner
    {
        write!(text, "({})", ids.name(id)).unwrap();
    }
    if let Some(request) = partner.and_then(Partner::kept) {
        write!(text, " +{}", ids.name(&request.id)).unwrap();
    }
    for id in &effects.destroy {
        write!(text, " -{}", ids.name(id)).unwrap();
    }
    match &effects.then {
        Then::Nothing => {}
        Then::Connect => text.push_str(" connect"),
        Then::ConnectAfter(pause) => write!(text, " connect in {}", pause.as_millis()).unwrap(),
        Then::Ask {
            epoch, own, peer, ..
        } => {
            assert_eq!((*epoch, *own, *peer), (EPOCH, CONNECTOR.own, FRIEND));
            text.push_str(" ask");
        }
        Then::Accept { id, epoch, .. } => {
            let named = partner.and_then(Partner::named);
            assert_eq!(named.map(|named| named.epoch), Some(*epoch));
            write!(text, " accept {}", ids.name(id)).unwrap();
        }
        Then::SetTimer => text.push_str(" timer"),
        Then::SetTimerFor(left) => write!(text, " timer {}", left.as_secs()).unwrap(),
        Then::Fail { epoch, .. } => {
            assert_eq!(*epoch, EPOCH);
            text.push_str(" fail");
        }
    }
    text
}

/// Returns, for each state, the description of its successor after this event. A dash means that
/// nothing changes.
fn row(event: impl Fn(&Ids) -> Event) -> [String; STATES.len()] {
    let channel = create_event_channel().unwrap();
    std::array::from_fn(|index| {
        let ids = Ids::new(&channel);
        let before = describe(&ids, state(index, &ids).as_ref(), &Effects::default());
        let (next, effects) = step(state(index, &ids), event(&ids));
        let after = describe(&ids, next.as_ref(), &effects);
        match after == before {
            true => "–".to_owned(),
            false => after,
        }
    })
}

fn assert_row(name: &str, event: impl Fn(&Ids) -> Event, expected: [&str; STATES.len()]) {
    let found = row(event);
    for ((state, found), expected) in STATES.iter().zip(&found).zip(expected) {
        assert_eq!(found, expected, "{name} in state {state}");
    }
}

#[test]
fn peer_connects_after_named() {
    let now = |_: &Ids| Event::Named(named(EPOCH, FRIEND), Role::Peer);
    assert_row(
        "named",
        now,
        [
            "Expected",
            "Accepted(kept) accept kept",
            "Expected -kept",
            "–",
            "–",
            "–",
            "–",
            "–",
            "Expected",
            "Expected -id",
            "Accepted(kept) -id accept kept",
        ],
    );
    let next = |_: &Ids| Event::Named(named(EPOCH + 1, FRIEND), Role::Peer);
    assert_row(
        "named in the next epoch",
        next,
        [
            "Expected",
            "Accepted(kept) accept kept",
            "Expected -kept",
            "–",
            "Expected -id",
            "Accepted(kept) -id accept kept",
            "Expected",
            "Expected -id",
            "Expected",
            "Expected -id",
            "Accepted(kept) -id accept kept",
        ],
    );
    let other = |_: &Ids| Event::Named(named(EPOCH, STRANGER), Role::Peer);
    assert_row(
        "named another peer",
        other,
        [
            "Expected",
            "Expected -kept",
            "Accepted(kept) accept kept",
            "–",
            "Expected -id",
            "Expected -id -kept",
            "Expected",
            "Expected -id",
            "Expected",
            "Expected -id",
            "Expected -id -kept",
        ],
    );
}

#[test]
fn we_connect_after_named() {
    let us = |_: &Ids| Event::Named(named(EPOCH + 1, FRIEND), Role::Us(CONNECTOR));
    assert_row(
        "named, we connect",
        us,
        [
            "Pausing connect",
            "Pausing -kept connect",
            "Pausing -kept connect",
            "Pausing connect",
            "Pausing -id connect",
            "Pausing -id -kept connect",
            "Pausing connect",
            "Pausing -id connect",
            "Pausing connect",
            "Pausing -id connect",
            "Pausing -id -kept connect",
        ],
    );
    let unreachable = |_: &Ids| Event::Named(named(EPOCH + 1, FRIEND), Role::Unreachable);
    assert_row(
        "named, unreachable",
        unreachable,
        [
            "Unreachable",
            "Unreachable -kept",
            "Unreachable -kept",
            "Unreachable",
            "Unreachable -id",
            "Unreachable -id -kept",
            "Unreachable",
            "Unreachable -id",
            "–",
            "Unreachable -id",
            "Unreachable -id -kept",
        ],
    );
}

#[test]
fn connection_request_by_state() {
    let asks = |from, is_live, is_silent| {
        move |ids: &Ids| Event::Asked {
            request: request(&ids.new, from),
            is_live,
            is_silent,
        }
    };
    let replaced = [
        "Early +new",
        "Early +new -kept",
        "Early +new -kept",
        "Accepted(new) accept new",
        "Accepted(new) -id accept new",
        "Accepted(new) -kept -id accept new",
        "Pausing -new",
        "Asking(id) -new",
        "Unreachable -new",
        "Connected(id) +new",
        "Connected(id) +new -kept",
    ];
    assert_row("request", asks(FRIEND, true, true), replaced);
    let mut kept = replaced;
    kept[4] = "Accepted(id) +new";
    kept[5] = "Accepted(id) +new -kept";
    for (is_live, is_silent) in [(true, false), (false, true), (false, false)] {
        assert_row("second request", asks(FRIEND, is_live, is_silent), kept);
    }
    let mut refused = replaced;
    refused[3] = "Expected -new";
    refused[4] = "Accepted(id) -new";
    refused[5] = "Accepted(id) +kept -new";
    assert_row("request of a stranger", asks(STRANGER, true, true), refused);
}

#[test]
fn attempt_by_state() {
    let begin = |ids: &Ids| Event::Begin {
        id: ids.new.clone(),
    };
    assert_row(
        "begin",
        begin,
        [
            "None -new",
            "Early +kept -new",
            "Early +kept -new",
            "Expected -new",
            "Accepted(id) -new",
            "Accepted(id) +kept -new",
            "Asking(new) ask",
            "Asking(id) -new",
            "Unreachable -new",
            "Connected(id) -new",
            "Connected(id) +kept -new",
        ],
    );
    let now = CONNECTOR.since + SECOND;
    let lost = |ids: &Ids| Event::Lost {
        id: ids.id.clone(),
        now,
    };
    let mut expected = ["–"; STATES.len()];
    expected[4] = "Expected";
    expected[5] = "Accepted(kept) accept kept";
    expected[7] = "Pausing connect in 125";
    assert_row("lost", lost, expected);
    let up = |ids: &Ids| Event::Established { id: ids.id.clone() };
    let mut expected = ["–"; STATES.len()];
    expected[4] = "Connected(id)";
    expected[5] = "Connected(id) +kept";
    expected[7] = "Connected(id)";
    assert_row("established", up, expected);
    let over = |ids: &Ids| Event::Disconnected { id: ids.id.clone() };
    let mut expected = ["–"; STATES.len()];
    expected[9] = "None";
    expected[10] = "Early +kept";
    assert_row("disconnected", over, expected);
}

/// An event may arrive after its identifier was given up.
#[test]
fn former_attempts_change_nothing() {
    let nothing = ["–"; STATES.len()];
    let lost = |ids: &Ids| Event::Lost {
        id: ids.former(),
        now: 0,
    };
    assert_row("lost", lost, nothing);
    let up = |ids: &Ids| Event::Established { id: ids.former() };
    assert_row("established", up, nothing);
    let over = |ids: &Ids| Event::Disconnected { id: ids.former() };
    assert_row("disconnected", over, nothing);
}

const HAS_NAMED: std::ops::RangeInclusive<usize> = 3..=8;

/// Returns a row in which every partner that has named its peer has the action `does`, and no other
/// state changes.
fn waiting(does: &str) -> [String; STATES.len()] {
    let channel = create_event_channel().unwrap();
    std::array::from_fn(|index| {
        let ids = Ids::new(&channel);
        let before = describe(&ids, state(index, &ids).as_ref(), &Effects::default());
        match HAS_NAMED.contains(&index) {
            true => format!("{before} {does}"),
            false => "–".to_owned(),
        }
    })
}

fn assert_waiting(name: &str, event: impl Fn(&Ids) -> Event, does: &str) {
    let expected = waiting(does);
    assert_row(name, event, expected.each_ref().map(String::as_str));
}

#[test]
fn requests_have_a_time_limit() {
    let limit = Some(Duration::from_secs(3));
    let over = |now, limit| move |_: &Ids| Event::TimeOver { now, limit };
    assert_waiting("in time", over(11 * SECOND, limit), "timer 2");
    assert_waiting("overdue", over(13 * SECOND, limit), "fail");
    let nothing = ["–"; STATES.len()];
    assert_row("no limit", over(1 << 60, None), nothing);
    let restart = |_: &Ids| Event::RequestsWait {
        now: 12 * SECOND,
        restart: true,
    };
    assert_waiting("restart", restart, "timer");
    let again = |_: &Ids| Event::RequestsWait {
        now: 12 * SECOND,
        restart: false,
    };
    assert_row("the limit runs already", again, nothing);
    // The limit starts with the first request. Without a request there is no limit.
    let channel = create_event_channel().unwrap();
    for index in HAS_NAMED {
        let ids = Ids::new(&channel);
        let mut partner = state(index, &ids);
        partner
            .as_mut()
            .unwrap()
            .named_mut()
            .unwrap()
            .requests_since = None;
        let now = 99 * SECOND;
        let (partner, effects) = step(partner, Event::TimeOver { now, limit });
        assert!(matches!(effects.then, Then::Nothing));
        let (partner, effects) = step(
            partner,
            Event::RequestsWait {
                now,
                restart: false,
            },
        );
        assert!(matches!(effects.then, Then::SetTimer));
        assert_eq!(partner.unwrap().named().unwrap().requests_since, Some(now));
    }
}

#[test]
fn kept_requests_expire() {
    let index = |seconds| {
        move |_: &Ids| Event::Expire {
            now: seconds * SECOND,
        }
    };
    assert_row("in time", index(39), ["–"; STATES.len()]);
    let mut expected = ["–"; STATES.len()];
    expected[1] = "None -kept";
    expected[2] = "None -kept";
    expected[5] = "Accepted(id) -kept";
    expected[10] = "Connected(id) -kept";
    assert_row("overdue", index(40), expected);
}

#[test]
fn give_up_by_state() {
    let gone = [
        "–",
        "None -kept",
        "None -kept",
        "None",
        "None -id",
        "None -id -kept",
        "None",
        "None -id",
        "None",
        "None -id",
        "None -id -kept",
    ];
    assert_row("given up", |_| Event::GivenUp { epoch: None }, gone);
    let mut in_epoch = gone;
    for index in [1, 2, 9, 10] {
        in_epoch[index] = "–";
    }
    let epoch = Some(EPOCH);
    assert_row("in its epoch", |_| Event::GivenUp { epoch }, in_epoch);
    let epoch = Some(EPOCH - 1);
    let nothing = ["–"; STATES.len()];
    assert_row("in an earlier epoch", |_| Event::GivenUp { epoch }, nothing);
}

#[test]
fn pause_between_attempts_grows() {
    for (waited, pause) in [
        (0, 50),
        (399, 50),
        (400, 50),
        (800, 100),
        (1600, 200),
        (2000, 250),
        (2001, 250),
        (3_600_000, 250),
    ] {
        let after = pause_after(Duration::from_millis(waited));
        assert_eq!(after, Duration::from_millis(pause), "{waited}");
    }
}

#[test]
fn requests_wait_two_seconds_at_least() {
    let seconds = Duration::from_secs;
    assert_eq!(absent_after(None), None);
    assert_eq!(absent_after(Some(seconds(1))), Some(seconds(2)));
    assert_eq!(absent_after(Some(seconds(3))), Some(seconds(3)));
}
