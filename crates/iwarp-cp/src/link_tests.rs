//! The RDMA connection of a copy on loopback: who keeps a place, for how long, and how much memory each gets.

use super::*;
use iwarp::Config;
use iwarp::verbs::cm::{ConnectionParameters, Connector};
use iwarp_cli_common::service::{Gate, LOOPBACK};
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
        let begin = Instant::now();
        server.close();
        assert!(begin.elapsed() >= CLOSE, "it has that time");
        closed.store(true, Ordering::Release);
    });
    assert!(!hung.load(Ordering::Acquire), "only the peer ended it");
}

/// The limit ends with the proof, and not before.
#[test]
fn a_client_is_no_stranger_after_its_proof() {
    let t = part::tests::TempDir::new();
    let root = crate::confine::Root::open(&t.path("")).unwrap();
    for proves in [true, false] {
        let (mut client, mut server) = pair();
        let served = std::thread::scope(|scope| {
            scope.spawn(move || {
                if proves {
                    crate::auth::greet(&mut client, None).unwrap();
                } else {
                    client.send(&Message::Working).unwrap();
                }
                client.close();
            });
            crate::session::serve(
                &mut server,
                &root,
                &crate::session::Terms::default(),
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

/// Whatever the session asks for, no octet beyond a slot is touched, and data land where they belong.
#[test]
fn slots_have_bounds() {
    let (mut client, mut server) = pair();
    let mut see = |_: &[u8]| Ok(());
    assert!(server.read_slot(0, 1, &mut see).is_err(), "none is granted");
    let grant = server.grant().unwrap();
    assert_eq!((grant.slots, grant.slot_size), (SLOTS, SLOT_SIZE));
    assert_eq!(server.grant().unwrap(), grant, "the same ones");
    for (slot, len) in [(SLOTS, 1), (u16::MAX, 1), (0, SLOT_SIZE + 1)] {
        assert!(server.read_slot(slot, len, &mut see).is_err());
        let mut fill = |_: &mut [u8]| Ok(());
        assert!(client.write_slot(&grant, slot, len, &mut fill).is_err());
    }
    // There are more slots than buffers of the sender.
    let len = |slot| if slot == SLOTS - 1 { SLOT_SIZE } else { 1000 };
    for slot in 0..SLOTS {
        let mut fill = |buf: &mut [u8]| {
            buf.fill(slot as u8 + 1);
            Ok(())
        };
        client
            .write_slot(&grant, slot, len(slot), &mut fill)
            .unwrap();
    }
    client.send(&Message::Done).unwrap();
    // The last ones are still in the sender's buffers, each in its own.
    let stage = client.stage.as_ref().unwrap();
    for (n, slot) in (SLOTS - STAGES as u16..SLOTS).enumerate() {
        let at = n * stage.part as usize;
        let kept = stage.mr.to_vec(at..at + 1000).unwrap();
        assert!(kept.iter().all(|b| *b == slot as u8 + 1), "slot {slot}");
    }
    let before = server.moved();
    client.send(&Message::Done).unwrap();
    assert_eq!(server.recv().unwrap(), Some(Message::Done));
    assert_eq!(server.recv().unwrap(), Some(Message::Done));
    assert!(server.moved() > before, "octets move");
    for slot in 0..SLOTS {
        let mut right = false;
        let mut see = |data: &[u8]| {
            right = data.len() == len(slot) as usize && data.iter().all(|b| *b == slot as u8 + 1);
            Ok(())
        };
        server.read_slot(slot, len(slot), &mut see).unwrap();
        assert!(right, "slot {slot}");
    }
    // A sender writes no more at once than the slot has, nor than its own buffer.
    for (slot_size, most) in [(100, 100), (SLOT_SIZE, SLOT_SIZE), (16 << 20, SLOT_SIZE)] {
        let to = Grant { slot_size, ..grant };
        assert_eq!(client.chunk(&to).unwrap(), most);
        let mut fill = |_: &mut [u8]| Ok(());
        assert!(client.write_slot(&to, 0, most + 1, &mut fill).is_err());
    }
}

/// A buffer is filled again only when its request is complete.
#[test]
fn buffers_are_not_used_twice() {
    let (mut client, mut server) = pair();
    let grant = server.grant().unwrap();
    client.deadline = Some(Instant::now());
    let late = |outcome: Result<()>| outcome.is_err_and(|e| e.to_string().contains("too long"));
    let mut fill = |_: &mut [u8]| Ok(());
    client.writes = STAGES - 1;
    client.write_slot(&grant, 0, 1, &mut fill).unwrap();
    client.writes = STAGES;
    assert!(late(client.write_slot(&grant, 0, 1, &mut fill)));
    let (mut client, _server) = pair();
    client.deadline = Some(Instant::now());
    client.sends = SENDS;
    assert!(late(client.send(&Message::Done)));
    client.sends = SENDS - 1;
    client.send(&Message::Done).unwrap();
    // As many as there are buffers go through one after the other, and each is its own.
    let (mut client, mut server) = pair();
    for slot in 0..3 * SENDS as u16 {
        client.send(&Message::Free { slot }).unwrap();
        assert_eq!(server.recv().unwrap(), Some(Message::Free { slot }));
    }
}

/// If memory is short the rooms are smaller, and only if even the smallest has no place the client is refused.
#[test]
fn little_memory_gives_small_rooms() {
    let (ctx, _listener) = service::listen(&LOOPBACK, 0, &Config::default()).unwrap();
    let half = |left: u64| {
        let messages = (RECVS + SENDS) * MAX_MESSAGE + part::CHUNK;
        Half::new(&ctx, &Budget::new(messages as u64 + left)).unwrap()
    };
    // A room that could be smaller may take an eighth of what is left. One part more is the buffer.
    let slot = u64::from(SLOT_SIZE);
    for (left, slots) in [
        (8 * 17 * slot, Some(16)),
        (8 * 17 * slot - 1, Some(8)),
        (8 * 3 * slot, Some(2)),
        (8 * 3 * slot - 1, Some(1)),
        (2 * slot, Some(1)),
        (2 * slot - 1, None),
    ] {
        let (half, _qp) = half(left);
        let room = half.ring().ok();
        assert_eq!(room.as_ref().map(|(_, slots)| *slots), slots, "{left}");
        if let Some((room, slots)) = room {
            assert_eq!(room.mr.len(), usize::from(slots) * SLOT_SIZE as usize);
        }
    }
    let parts = STAGES as u64 + 1;
    let least = u64::from(MIN_CHUNK);
    for (left, chunk) in [
        (8 * parts * slot, Some(SLOT_SIZE)),
        (8 * parts * slot - 1, Some(SLOT_SIZE / 2)),
        (8 * parts * 2 * least - 1, Some(MIN_CHUNK)),
        (parts * least, Some(MIN_CHUNK)),
        (parts * least - 1, None),
    ] {
        let (half, _qp) = half(left);
        let room = half.stages().ok();
        assert_eq!(room.as_ref().map(|room| room.part), chunk, "{left}");
    }
}

/// A client is idle from the end of the server's work on, and not before.
#[test]
fn a_client_is_idle_after_the_work_for_it() {
    let (_client, mut server) = pair();
    server.welcomed();
    server.peer_waits(true);
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(server.guest.as_ref().unwrap().idle(), Duration::ZERO);
    let begin = Instant::now();
    server.peer_waits(false);
    std::thread::sleep(Duration::from_millis(10));
    let idle = server.guest.as_ref().unwrap().idle();
    assert!(
        idle >= Duration::from_millis(8) && idle <= begin.elapsed() + Duration::from_millis(1),
        "{idle:?}"
    );
}

/// A sender looks for messages between its data, and goes on if there are none.
#[test]
fn messages_are_taken_without_waiting() {
    let (mut client, mut server) = pair();
    assert_eq!(server.try_recv().unwrap(), None);
    client.send(&Message::Done).unwrap();
    let end = Instant::now() + LONG;
    let mut came = None;
    while came.is_none() && Instant::now() < end {
        came = server.try_recv().unwrap();
    }
    assert_eq!(came, Some(Message::Done));
}

/// What a server's `--memory` has to have for each client, before the slots.
#[test]
fn a_client_costs_half_a_mebibyte_before_its_slots() {
    let (ctx, _listener) = service::listen(&LOOPBACK, 0, &Config::default()).unwrap();
    let made = |octets| Half::new(&ctx, &Budget::new(octets)).is_ok();
    assert!(made(512 << 10));
    assert!(!made((512 << 10) - 1));
}

/// An end does not close while TCP has not taken everything.
#[test]
fn what_was_posted_is_not_sent_until_it_completes() {
    let (mut client, mut server) = pair();
    assert!(client.has_sent_all());
    client.send(&Message::Done).unwrap();
    assert!(!client.has_sent_all(), "a message");
    client.until(LONG, RdmaLink::has_sent_all).unwrap();
    let grant = server.grant().unwrap();
    client.write_slot(&grant, 0, 1, &mut |_| Ok(())).unwrap();
    assert!(!client.has_sent_all(), "data");
    client.until(LONG, RdmaLink::has_sent_all).unwrap();
}

/// Octets of either direction show that the peer is not silent, and that a guest is not idle. Looking for them alone does not.
#[test]
fn octets_in_both_directions_are_progress() {
    let (mut client, mut server) = pair();
    server.welcomed();
    server.guest.as_ref().unwrap().served();
    let idle = |server: &RdmaLink| server.guest.as_ref().unwrap().idle();
    std::thread::sleep(Duration::from_millis(30));
    let before = idle(&server);
    assert_eq!(server.try_recv().unwrap(), None);
    assert!(idle(&server) >= before, "nothing has come");
    let (mut moved, begin) = (server.moved(), Instant::now());
    client.send(&Message::Done).unwrap();
    assert_eq!(server.recv().unwrap(), Some(Message::Done));
    assert!(idle(&server) <= begin.elapsed() + Duration::from_millis(1));
    assert!(server.moved() > moved, "received");
    moved = server.moved();
    server.send(&Message::Done).unwrap();
    server.until(LONG, RdmaLink::has_sent_all).unwrap();
    assert!(server.moved() > moved, "sent");
}

/// A connection that breaks is not taken for one that its peer has closed.
#[test]
fn a_reset_is_no_orderly_end() {
    let (client, mut server) = pair();
    client.connection.abort();
    assert!(server.recv().is_err());
    let (client, mut server) = pair();
    std::thread::scope(|scope| {
        scope.spawn(|| client.close());
        assert_eq!(server.recv().unwrap(), None);
        drop(server);
    });
}
