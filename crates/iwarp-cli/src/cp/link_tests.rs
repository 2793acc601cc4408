//! The RDMA connection of a copy on loopback: who keeps a place, for how long, and how much memory each gets.

use super::session::Link as _;
use super::*;
use crate::service::{Gate, LOOPBACK};
use iwarp::Config;
use iwarp::cm::{ConnectionParameters, Connector};
use std::net::{IpAddr, Ipv4Addr};

/// Long enough for a machine that is very busy.
const LONG: Duration = Duration::from_secs(60);

/// A client, and the server's end with a guest in a gate of one place.
fn pair() -> (RdmaLink, RdmaLink) {
    let (ctx, listener) = service::listen(&LOOPBACK, 0, &Config::default()).unwrap();
    let budget = Budget::new(1 << 30);
    let at = listener.local_addr();
    std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            let (half, qp) = Half::new(&ctx, &budget).unwrap();
            half.connected(Connector::new(&ctx).connect(at, qp).unwrap(), None)
        });
        let (half, qp) = Half::new(&ctx, &budget).unwrap();
        let request = listener.accept(Some(LONG)).unwrap();
        let parameters = ConnectionParameters::default();
        let connection = request.accept(qp, &parameters).unwrap();
        let guest = Gate::new(1, 1).admit(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let guest = guest.unwrap();
        guest.advance();
        let server = half.connected(connection, Some(guest));
        (client.join().unwrap(), server)
    })
}

/// The clients that one address may have leave enough memory for others.
#[test]
fn a_crowd_leaves_memory_for_others() {
    let (ctx, _listener) = service::listen(&LOOPBACK, 0, &Config::default()).unwrap();
    for (upload, memory) in [(true, 256 << 20), (false, 112 << 20)] {
        let budget = Budget::new(memory);
        let client = || {
            let half = Half::new(&ctx, &budget)?;
            let (room, slots) = match upload {
                true => half.0.ring()?,
                false => (half.0.stages()?, 0),
            };
            Ok::<_, Error>((half, room, slots))
        };
        let crowd: Vec<_> = (0..32).map(|_| client().unwrap()).collect();
        if upload {
            assert_eq!(crowd[0].2, SLOTS, "memory is not short");
        }
        let others: Vec<_> = (0..8).map(|_| client().unwrap()).collect();
        assert_eq!(others.len(), 8);
    }
}

/// A stranger that goes on sending has no more time than one that is silent, and can be evicted all the while.
#[test]
fn a_stranger_cannot_keep_its_place() {
    let (mut client, mut server) = pair();
    let begin = Instant::now();
    assert!(server.deadline.is_some_and(|end| end <= begin + GREETING));
    server.deadline = Some(begin + Duration::from_secs(1));
    let over = std::sync::atomic::AtomicBool::new(false);
    let ended = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(std::sync::atomic::Ordering::Relaxed)
                && client.send(&Message::Working).is_ok()
            {
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let mut patience = server.patience(SILENCE);
        let mut ended = None;
        while ended.is_none() && begin.elapsed() < LONG {
            ended = server.pump(Some(&mut patience)).err();
            // The receives are posted again.
            while let Ok(Some(_)) = server.next_message() {}
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        ended
    });
    assert!(ended.is_some_and(|e| e.to_string().contains("too long")));
    let idle = server.guest.as_ref().unwrap().idle();
    assert!(idle >= Duration::from_millis(900), "{idle:?}");
}

/// A Send never completes, and the peer goes on writing data into the slots: closing takes an end nevertheless.
#[test]
fn data_of_the_peer_do_not_keep_a_closing_connection_open() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let (mut client, mut server) = pair();
    server.welcomed();
    let grant = server.grant().unwrap();
    let (closed, hung) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let end = Instant::now() + LONG;
            while client.write_slot(&grant, 0, 64, &mut |_| Ok(())).is_ok()
                && !closed.load(Ordering::Acquire)
            {
                if Instant::now() > end {
                    hung.store(true, Ordering::Release);
                    break;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            // The connection must not end before the verdict.
            client
        });
        server.sends = usize::MAX;
        server.close();
        closed.store(true, Ordering::Release);
    });
    assert!(!hung.load(Ordering::Acquire), "only the peer ended it");
}

/// The limit ends with the proof, and not before.
#[test]
fn a_client_is_no_stranger_after_its_proof() {
    let t = part::tests::TempDir::new();
    let root = super::super::confine::Root::open(&t.path("")).unwrap();
    for proves in [true, false] {
        let (mut client, mut server) = pair();
        let served = std::thread::scope(|scope| {
            scope.spawn(move || {
                if proves {
                    super::super::auth::greet(&mut client, None).unwrap();
                } else {
                    client.send(&Message::Working).unwrap();
                }
                client.close();
            });
            session::serve(
                &mut server,
                &root,
                &session::Terms::default(),
                &mut |_, _| {},
            )
        });
        assert_eq!(served.is_ok(), proves);
        assert_eq!(server.deadline.is_none(), proves);
    }
}

/// While the server hashes, it only sends. Its client keeps its place meanwhile, and is missed when it leaves.
#[test]
fn an_end_that_only_sends_notices_that_the_peer_leaves() {
    let (client, mut server) = pair();
    server.welcomed();
    server.peer_waits(true);
    for _ in 0..RECVS / 2 {
        server.send(&Message::Working).unwrap();
        server.pump(Some(&mut server.patience(LONG))).unwrap();
    }
    std::thread::sleep(Duration::from_millis(20));
    let guest = server.guest.as_ref().unwrap();
    assert_eq!(guest.idle(), Duration::ZERO, "it may not be evicted");
    drop(client);
    // The Sends that nobody takes fit into the queue.
    let noticed = (0..SENDS - 1).any(|_| {
        std::thread::sleep(Duration::from_millis(200));
        server.send(&Message::Working).is_err()
    });
    assert!(noticed);
}

#[test]
fn patience_lasts_while_octets_move() {
    let mut patience = Patience::new(SILENCE, 7);
    let mut now = patience.since;
    assert!(!patience.look(7, now + SILENCE / 2).unwrap());
    // Octets move slowly, for longer than silence would be tolerated.
    for moved in 8..20 {
        now += SILENCE / 2;
        assert!(patience.look(moved, now).unwrap());
    }
    assert!(!patience.look(19, now + SILENCE / 2).unwrap());
    assert!(patience.look(19, now + SILENCE).is_err());
}
