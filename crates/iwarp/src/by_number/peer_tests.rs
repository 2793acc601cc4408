//! The ports of a device's queue pairs, and requests that come before their queue pair is ready.

use super::*;
use crate::cm::{accepted, requested};
use crate::testing::{context, device_at, queue_pair, until};

fn peers() -> (Context, Arc<Peers>) {
    let ctx = context();
    let peers = ctx.inner.peers().unwrap();
    (ctx, peers)
}

#[test]
fn a_port_is_the_same_at_all_addresses() {
    let (ctx, peers) = peers();
    let opened = |addresses: &[&str]| peers.listen_on_all(&ctx, &device_at(addresses));
    let port = opened(&["127.0.0.1", "127.0.0.2"]).unwrap();
    for (at, (ip, id)) in port.listeners.iter().enumerate() {
        assert_eq!(*ip, IpAddr::from([127, 0, 0, 1 + at as u8]));
        assert_eq!(id.addresses().0, Some((*ip, port.port).into()));
    }
    assert_eq!(port.listeners.len(), 2);
    port.close();
    assert!(port.listeners.iter().all(|(_, id)| is_destroyed(id)));
    let error = |addresses: &[&str]| opened(addresses).err().unwrap();
    assert!(matches!(error(&[]), Error::NoDevice));
    let twice = error(&["127.0.0.1", "127.0.0.1"]);
    assert_eq!(twice.errno(), libc::EADDRINUSE);
}

const NUM: u32 = 0x12_3456;
const FRIEND: Address = Address {
    gid: [1; 16],
    num: 7,
};

/// A request of `FRIEND` for the queue pair `num`, which has come so long ago.
fn early(peers: &Peers, num: u32, ago: Duration) -> CmId {
    let id = CmId::create(&create_event_channel().unwrap(), None);
    let since = now_ns() - ago.as_nanos() as u64;
    let entry = (id.clone(), FRIEND, since);
    peers.state.lock().early.insert(num, entry);
    id
}

fn is_destroyed(id: &CmId) -> bool {
    id.write_event(CmEventKind::User(0), 0).is_err()
}

#[test]
fn a_queue_pair_keeps_the_early_request_of_its_peer_alone() {
    let (_ctx, peers) = peers();
    let entry = |epoch, peer| Waiting {
        qp: Weak::new(),
        epoch,
        peer,
        role: Role::Accepts,
        id: None,
    };
    let other_gid = Address {
        gid: [2; 16],
        ..FRIEND
    };
    let other_num = Address { num: 8, ..FRIEND };
    for (peer, stays) in [(FRIEND, true), (other_gid, false), (other_num, false)] {
        let id = early(&peers, NUM, Duration::ZERO);
        assert!(peers.wait(NUM, entry(1, peer)));
        assert_eq!(peers.state.lock().early.contains_key(&NUM), stays);
        assert_eq!(is_destroyed(&id), !stays, "{peer:?}");
        // It waits already; in its next epoch it waits anew.
        assert!(!peers.wait(NUM, entry(1, peer)));
        assert!(peers.wait(NUM, entry(2, peer)));
        peers.abandon(NUM);
        assert!(is_destroyed(&id));
    }
}

#[test]
fn an_early_request_is_refused_after_a_while() {
    let (_ctx, peers) = peers();
    let late = early(&peers, NUM, PATIENCE);
    let new = early(&peers, NUM + 1, PATIENCE / 2);
    peers.expire();
    assert!(is_destroyed(&late) && !is_destroyed(&new));
    let left: Vec<_> = peers.state.lock().early.keys().copied().collect();
    assert_eq!(left, [NUM + 1]);
    peers.abandon(NUM + 1);
}

#[test]
fn a_port_that_is_taken_is_tried_elsewhere_for_a_while() {
    let error = |errno| Error::Io(std::io::Error::from_raw_os_error(errno));
    for (result, attempts, wanted) in [
        (libc::EADDRINUSE, PORT_ATTEMPTS, libc::EADDRINUSE),
        (libc::EMFILE, 1, libc::EMFILE),
    ] {
        let mut made = 0;
        let failed = until_free(|| {
            made += 1;
            Err::<(), _>(error(result))
        });
        assert_eq!((made, failed.unwrap_err().errno()), (attempts, wanted));
    }
    let mut made = 0;
    let third = until_free(|| {
        made += 1;
        if made == 3 {
            Ok("free")
        } else {
            Err(error(libc::EADDRINUSE))
        }
    });
    assert_eq!((made, third.unwrap()), (3, "free"));
}

#[test]
fn early_requests_are_kept_up_to_a_number() {
    let (_ctx, peers) = peers();
    let id = CmId::create(&create_event_channel().unwrap(), None);
    for num in 0..EARLY_MAX as u32 {
        assert!(peers.keep(&id, FRIEND, num).is_empty(), "{num}");
    }
    let gone = peers.keep(&id, FRIEND, EARLY_MAX as u32);
    assert!(gone.len() == 1 && gone[0].is_same(&id));
    assert_eq!(peers.state.lock().early.len(), EARLY_MAX);
    peers.state.lock().early.clear();
}

/// The first attempt of a queue pair may come before the peer's host listens.
#[test]
fn a_timer_lets_a_queue_pair_try_again() {
    let (ctx, peers) = peers();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = queue_pair(&ctx, &cq, &cq);
    qp.modify(QpState::Init).unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let own = IpAddr::from([127, 0, 0, 1]);
    let peer = Address {
        gid: gid_of(own),
        num: 5 << 16 | u32::from(listener.local_addr().unwrap().port()),
    };
    let entry = Waiting {
        qp: Arc::downgrade(&qp.inner),
        epoch: qp.epoch(),
        peer,
        role: Role::Connects {
            own,
            since: now_ns(),
        },
        id: None,
    };
    assert!(peers.wait(qp.num(), entry));
    Arc::clone(&peers).timer(qp.num());
    listener.set_nonblocking(true).unwrap();
    // Nobody answers there. With the older revision it asks once more at once, and after a pause again.
    for _ in 0..5 {
        until("no attempt", || listener.accept().is_ok());
    }
    peers.abandon(qp.num());
    qp.destroy();
}

fn identifier() -> CmId {
    CmId::create(&create_event_channel().unwrap(), None)
}

/// An entry that waits for `FRIEND` in this role.
fn waiting(qp: &QueuePair, connects: bool, id: Option<CmId>) -> Waiting {
    let role = match connects {
        true => Role::Connects {
            own: IpAddr::from([127, 0, 0, 1]),
            since: 5,
        },
        false => Role::Accepts,
    };
    Waiting {
        qp: Arc::downgrade(&qp.inner),
        epoch: 9,
        peer: FRIEND,
        role,
        id,
    }
}

/// An early request is taken if its queue pair waits for the peer's request and has accepted no other, and only that of the peer.
#[test]
fn the_early_request_of_the_peer_is_taken_once() {
    let (ctx, peers) = peers();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = queue_pair(&ctx, &cq, &cq);
    let num = qp.num();
    let stranger = Address { num: 8, ..FRIEND };
    for (connects, busy, from, taken) in [
        (false, false, FRIEND, true),
        (false, false, stranger, false),
        (false, true, FRIEND, false),
        (true, false, FRIEND, false),
        (true, true, FRIEND, false),
    ] {
        let id = early(&peers, num, Duration::ZERO);
        peers.state.lock().early.get_mut(&num).unwrap().1 = from;
        let entry = waiting(&qp, connects, busy.then(identifier));
        peers.state.lock().waiting.insert(num, entry);
        let got = peers.take_early(num);
        let what = (connects, busy, from);
        assert_eq!(got.is_some(), taken, "{what:?}");
        if let Some((got, of, epoch)) = got {
            assert!(got.is_same(&id) && of.is_same(&qp) && epoch == 9);
            assert_eq!(peers.waits_with(&id), Some(num));
        }
        assert_eq!(peers.state.lock().early.contains_key(&num), !taken);
        assert!(taken || peers.waits_with(&id).is_none());
        peers.abandon(num);
    }
    // Nobody waits.
    early(&peers, num, Duration::ZERO);
    assert!(peers.take_early(num).is_none());
    peers.abandon(num);
    qp.destroy();
}

/// An identifier waits with its queue pair until its connection is up, and is destroyed when that has ended. Others are left alone.
#[test]
fn an_identifier_is_kept_as_long_as_its_connection() {
    let (ctx, peers) = peers();
    let cq = ctx.create_cq(4, None).unwrap();
    let ids = [0; 2].map(|_| identifier());
    let qps = ids.each_ref().map(|id| {
        let qp = queue_pair(&ctx, &cq, &cq);
        let entry = waiting(&qp, false, Some(id.clone()));
        peers.state.lock().waiting.insert(qp.num(), entry);
        qp
    });
    let up = || {
        let state = peers.state.lock();
        let is_up = |id: &CmId| state.up.iter().any(|up| up.is_same(id));
        ids.each_ref().map(is_up)
    };
    peers.event(ids[0].event(CmEventKind::AddrResolved, 0));
    assert_eq!(up(), [false, false]);
    for (id, now) in ids.iter().zip([[true, false], [true, true]]) {
        peers.event(id.event(CmEventKind::Established, 0));
        assert_eq!(up(), now);
        assert_eq!(peers.waits_with(id), None);
    }
    peers.event(ids[0].event(CmEventKind::Disconnected, 0));
    assert_eq!(up(), [false, true]);
    assert_eq!(ids.each_ref().map(is_destroyed), [true, false]);
    peers.event(ids[1].event(CmEventKind::Disconnected, 0));
    assert_eq!(up(), [false, false]);
    assert_eq!(ids.each_ref().map(is_destroyed), [true, true]);
    // One that is up is abandoned with its queue pair.
    let ids = [0; 2].map(|_| identifier());
    for (id, qp) in ids.iter().zip(&qps) {
        id.set_queue_pair(Some(qp));
        peers.state.lock().up.push(id.clone());
    }
    peers.abandon(qps[1].num());
    assert_eq!(ids.each_ref().map(is_destroyed), [false, true]);
    qps.iter().for_each(QueuePair::destroy);
}

/// A request that has come to nothing is lost for the queue pair that waits with it, and for no other.
#[test]
fn a_lost_request_is_that_of_the_present_attempt() {
    let (ctx, peers) = peers();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = queue_pair(&ctx, &cq, &cq);
    let num = qp.num();
    for connects in [false, true] {
        let (id, former) = (identifier(), identifier());
        let entry = waiting(&qp, connects, Some(id.clone()));
        peers.state.lock().waiting.insert(num, entry);
        assert!(peers.lose(num, &former).is_none());
        assert!(peers.lose(num + 1, &id).is_none());
        assert_eq!(peers.waits_with(&id), Some(num));
        match peers.lose(num, &id) {
            Some(Lost::Ours { since: 5 }) => assert!(connects),
            Some(Lost::Peers) => assert!(!connects),
            _ => panic!("it is that of the present attempt"),
        }
        assert_eq!(peers.waits_with(&id), None);
        assert!(peers.lose(num, &id).is_none());
        peers.abandon(num);
    }
    qp.destroy();
}

/// A request of the peer is kept unless its queue pair waits for another one, or connects itself. It replaces the one before.
#[test]
fn a_request_is_kept_for_the_queue_pair_that_waits_for_it() {
    let (ctx, peers) = peers();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = queue_pair(&ctx, &cq, &cq);
    let num = qp.num();
    let stranger = Address { num: 8, ..FRIEND };
    for (connects, from, kept) in [
        (false, FRIEND, true),
        (false, stranger, false),
        (true, FRIEND, false),
        (true, stranger, false),
    ] {
        // What was accepted before is no stream whose peer has said nothing.
        let accepted = identifier();
        let entry = waiting(&qp, connects, Some(accepted.clone()));
        peers.state.lock().waiting.insert(num, entry);
        let [first, second] = [0; 2].map(|_| identifier());
        let gone = peers.keep(&first, from, num);
        assert!(kept == gone.is_empty() && gone.iter().all(|id| id.is_same(&first)));
        let gone = peers.keep(&second, from, num);
        let refused = if kept { &first } else { &second };
        assert!(gone.len() == 1 && gone[0].is_same(refused));
        let state = peers.state.lock();
        let early = state.early.get(&num).map(|early| (&early.0, early.1));
        assert_eq!(early.is_some(), kept);
        assert!(early.is_none_or(|(id, peer)| id.is_same(&second) && peer == from));
        assert!(state.waiting[&num].has(&accepted));
        drop(state);
        peers.abandon(num);
    }
    qp.destroy();
}

/// A peer whose queue pair was reset asks again, and what was accepted before is of no use if it has said nothing on it. Unless that request has been
/// given up, too.
#[test]
fn a_new_request_replaces_what_was_accepted_and_not_heard() {
    let (ctx, peers) = peers();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = queue_pair(&ctx, &cq, &cq);
    qp.modify(QpState::Init).unwrap();
    for given_up in [false, true] {
        let (before, _silent) = accepted(&qp, qp.epoch());
        let entry = waiting(&qp, false, Some(before.clone()));
        peers.state.lock().waiting.insert(qp.num(), entry);
        let (id, peer) = requested(&qp);
        if given_up {
            drop(peer);
            until("its end is not seen", || id.requester_is_gone());
            assert!(peers.keep(&id, FRIEND, qp.num()).is_empty());
        } else {
            assert!(!id.requester_is_gone());
            let gone = peers.keep(&id, FRIEND, qp.num());
            assert!(gone.len() == 1 && gone[0].is_same(&before));
            before.destroy();
        }
        assert!(peers.waits_with(&before).is_some() == given_up);
        peers.abandon(qp.num());
        assert!(is_destroyed(&before) && is_destroyed(&id));
    }
    qp.destroy();
}

/// Numbers of a port are given once, and another port is opened when all are. Those that are taken are left out.
#[test]
fn numbers_are_given_once() {
    let (_ctx, peers) = peers();
    let mut given = Vec::new();
    for _ in 0..PER_PORT {
        let num = peers.number(|num| given.contains(&num)).unwrap();
        assert!(!given.contains(&num) && num >> 24 == 0);
        given.push(num);
    }
    let port = |num: &u32| *num as u16;
    assert!(given.iter().all(|num| port(num) == port(&given[0])));
    let other = peers.number(|_| false).unwrap();
    assert_ne!(port(&other), port(&given[0]));
    assert_eq!(peers.state.lock().ports.len(), 2);
    // One is free again, but somebody else has it.
    peers.forget(given[7]);
    let taken = peers.number(|num| num == given[7]).unwrap();
    assert!(port(&taken) == port(&other) && taken != other);
    assert_eq!(peers.number(|_| false).unwrap(), given[7]);
    // The last one of a port closes it.
    let id = peers.state.lock().ports[1].listeners[0].1.clone();
    peers.forget(other);
    assert!(!is_destroyed(&id));
    peers.forget(taken);
    assert!(is_destroyed(&id));
    assert_eq!(peers.state.lock().ports.len(), 1);
    peers.stop();
}

/// Nothing is left of it: no port, and no connection.
#[test]
fn the_end_of_a_device_ends_what_was_connected_by_number() {
    let (_ctx, peers) = peers();
    peers.number(|_| false).unwrap();
    let up = identifier();
    let listener = {
        let mut state = peers.state.lock();
        state.up.push(up.clone());
        state.ports[0].listeners[0].1.clone()
    };
    peers.stop();
    assert!(is_destroyed(&listener) && is_destroyed(&up));
    assert!(peers.state.lock().ports.is_empty());
}

/// A queue pair in error, or reset, waits for no peer.
#[test]
fn a_queue_pair_that_ends_abandons_its_peer() {
    let (ctx, peers) = peers();
    let cq = ctx.create_cq(4, None).unwrap();
    for to in [QpState::Error, QpState::Reset] {
        let qp = queue_pair(&ctx, &cq, &cq);
        qp.modify(QpState::Init).unwrap();
        let id = identifier();
        let entry = waiting(&qp, false, Some(id.clone()));
        peers.state.lock().waiting.insert(qp.num(), entry);
        qp.modify(to).unwrap();
        assert!(is_destroyed(&id) && peers.waits_with(&id).is_none());
        qp.destroy();
    }
}

#[test]
fn attempts_become_rare() {
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
