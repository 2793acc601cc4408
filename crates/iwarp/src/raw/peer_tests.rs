//! The ports of a device's queue pairs, and requests that come before their queue pair is ready.

use super::super::testing::{context, device_at, queue_pair};
use super::*;

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
    let entry = |life, peer| Waiting {
        qp: Weak::new(),
        life,
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
        // It waits already; in its next life it waits anew.
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
        life: qp.life(),
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
    let start = std::time::Instant::now();
    while listener.accept().is_err() {
        assert!(start.elapsed() < Duration::from_secs(20), "no attempt");
        std::thread::yield_now();
    }
    peers.abandon(qp.num());
    qp.destroy();
}
