//! The RDMA connection of a copy on loopback: eviction, time-outs, and memory.

use super::*;
use iwarp::Config;
use iwarp::verbs::cm::{ConnectionParameters, Connector};
use iwarp_cli_common::service::{Gate, LOOPBACK};
use std::net::{IpAddr, Ipv4Addr};

/// Long enough for a very busy machine.
const LONG: Duration = Duration::from_secs(60);

/// Creates a client, and the server's end with a guest of a gate with one place.
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

/// The clients of one address leave enough memory for others.
#[test]
fn crowd_leaves_memory_for_others() {
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

/// A stranger that keeps sending gains no time and can be evicted meanwhile.
#[test]
fn stranger_cannot_keep_its_place() {
    let (mut client, mut server) = pair();
    let begin = Instant::now();
    assert!(server.deadline.is_some_and(|end| end <= begin + HANDSHAKE));
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
            // Reposts the receives.
            while let Ok(Some(_)) = server.next_message() {}
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        ended
    });
    assert!(ended.is_some_and(|e| e.to_string().contains("too long")));
    let idle = server.guest.as_ref().unwrap().idle();
    assert!(idle >= Duration::from_millis(900), "{idle:?}");
}

/// A Send never completes, and the peer keeps writing data: closing is bounded nevertheless.
#[test]
fn peer_data_do_not_prevent_closing() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let (mut client, mut server) = pair();
    server.authenticated();
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
            // The connection must not end before the check.
            client
        });
        server.sends = usize::MAX;
        let begin = Instant::now();
        server.close();
        assert!(begin.elapsed() >= CLOSE, "it has that time");
        closed.store(true, Ordering::Release);
    });
    assert!(!hung.load(Ordering::Acquire), "closing waited for the peer");
}

/// The time limit ends with the proof, and not before.
#[test]
fn proof_ends_the_time_limit() {
    let t = part::tests::TempDir::new();
    let root = crate::confine::Root::open(&t.path("")).unwrap();
    for proves in [true, false] {
        let (mut client, mut server) = pair();
        let served = std::thread::scope(|scope| {
            scope.spawn(move || {
                if proves {
                    crate::auth::client_handshake(&mut client, None).unwrap();
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

/// While the server hashes, it only sends. Its client keeps its place, and its end is detected.
#[test]
fn sending_end_detects_closed_peer() {
    let (client, mut server) = pair();
    server.authenticated();
    server.peer_waits(true);
    for _ in 0..RECVS / 2 {
        server.send(&Message::Working).unwrap();
        server.pump(Some(&mut server.patience(LONG))).unwrap();
    }
    std::thread::sleep(Duration::from_millis(20));
    let guest = server.guest.as_ref().unwrap();
    assert_eq!(guest.idle(), Duration::ZERO, "it may not be evicted");
    drop(client);
    // The Sends fit into the queue without being received.
    let noticed = (0..SENDS - 1).any(|_| {
        std::thread::sleep(Duration::from_millis(200));
        server.send(&Message::Working).is_err()
    });
    assert!(noticed);
}

#[test]
fn patience_lasts_while_data_move() {
    let mut patience = Patience::new(SILENCE, 7);
    let mut now = patience.since;
    assert!(!patience.check(7, now + SILENCE / 2).unwrap());
    // Data move slowly, for longer than silence is tolerated.
    for moved in 8..20 {
        now += SILENCE / 2;
        assert!(patience.check(moved, now).unwrap());
    }
    assert!(!patience.check(19, now + SILENCE / 2).unwrap());
    assert!(patience.check(19, now + SILENCE).is_err());
}

/// No byte beyond a slot is touched, and data arrive where they belong.
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
    // A sender writes no more at once than fits the slot and its own buffer.
    for (slot_size, most) in [(100, 100), (SLOT_SIZE, SLOT_SIZE), (16 << 20, SLOT_SIZE)] {
        let to = Grant { slot_size, ..grant };
        assert_eq!(client.chunk(&to).unwrap(), most);
        let mut fill = |_: &mut [u8]| Ok(());
        assert!(client.write_slot(&to, 0, most + 1, &mut fill).is_err());
    }
}

/// A buffer is reused only after its request has completed.
#[test]
fn buffers_are_reused_after_completion() {
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
    // Each message uses a buffer of its own.
    let (mut client, mut server) = pair();
    for slot in 0..3 * SENDS as u16 {
        client.send(&Message::Free { slot }).unwrap();
        assert_eq!(server.recv().unwrap(), Some(Message::Free { slot }));
    }
}

/// If memory is short, rooms are smaller; the client is refused only if the smallest does not fit.
#[test]
fn little_memory_gives_small_rooms() {
    let (ctx, _listener) = service::listen(&LOOPBACK, 0, &Config::default()).unwrap();
    let half = |left: u64| {
        let messages = (RECVS + SENDS) * MAX_MESSAGE + part::CHUNK;
        Half::new(&ctx, &Budget::new(messages as u64 + left)).unwrap()
    };
    // A room that could be smaller may take an eighth of the rest. The buffer is one more part.
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

/// A client's idle time starts when the server's work for it ends.
#[test]
fn idle_time_starts_after_work() {
    let (_client, mut server) = pair();
    server.authenticated();
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

/// A sender polls for messages between its data without waiting.
#[test]
fn try_recv_does_not_wait() {
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

/// The share of a server's `--memory` that each client needs, before its slots.
#[test]
fn client_needs_half_a_mebibyte() {
    let (ctx, _listener) = service::listen(&LOOPBACK, 0, &Config::default()).unwrap();
    let made = |octets| Half::new(&ctx, &Budget::new(octets)).is_ok();
    assert!(made(512 << 10));
    assert!(!made((512 << 10) - 1));
}

/// An end does not close before TCP has accepted everything.
#[test]
fn posted_is_unsent_until_completed() {
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

/// Data in either direction are progress of the guest; checking for them alone is not.
#[test]
fn data_in_both_directions_are_progress() {
    let (mut client, mut server) = pair();
    server.authenticated();
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

/// A broken connection is not mistaken for an orderly close.
#[test]
fn reset_is_no_orderly_close() {
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
