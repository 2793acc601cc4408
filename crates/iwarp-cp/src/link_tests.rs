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
            let (prepared, qp) = Prepared::new(&ctx, &budget).unwrap();
            prepared.into_link(Connector::new(&ctx).connect(at, qp).unwrap(), None)
        });
        let (prepared, qp) = Prepared::new(&ctx, &budget).unwrap();
        let request = listener.accept(Some(LONG)).unwrap();
        let parameters = ConnectionParameters::default();
        let connection = request.accept(qp, &parameters).unwrap();
        let guest = Gate::new(1, 1).admit(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let guest = guest.unwrap();
        guest.advance();
        let server = prepared.into_link(connection, Some(guest));
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
            let prepared = Prepared::new(&ctx, &budget)?;
            let (buffers, slots) = match upload {
                true => prepared.0.create_slots()?,
                false => (prepared.0.create_send_buffers()?, 0),
            };
            Ok::<_, Error>((prepared, buffers, slots))
        };
        let crowd: Vec<_> = (0..32).map(|_| client().unwrap()).collect();
        if upload {
            assert_eq!(crowd[0].2, SLOTS, "memory is not short");
        }
        let others: Vec<_> = (0..8).map(|_| client().unwrap()).collect();
        assert_eq!(others.len(), 8);
    }
}

/// A stranger that keeps sending neither extends its time limit nor avoids eviction.
#[test]
fn stranger_cannot_keep_its_place() {
    let (mut client, mut server) = pair();
    let begin = Instant::now();
    assert!(
        server
            .deadline
            .is_some_and(|end| end <= begin + HANDSHAKE_LIMIT)
    );
    server.deadline = Some(begin + Duration::from_secs(1));
    let stop = std::sync::atomic::AtomicBool::new(false);
    let ended = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed)
                && client.send(&Message::Working).is_ok()
            {
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let mut stall_timer = server.stall_timer(SILENCE_LIMIT);
        let mut ended = None;
        while ended.is_none() && begin.elapsed() < LONG {
            ended = server.pump(Some(&mut stall_timer)).err();
            // This reposts the receives.
            while let Ok(Some(_)) = server.next_message() {}
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        ended
    });
    assert!(ended.is_some_and(|e| e.to_string().contains("too long")));
    let idle = server.guest.as_ref().unwrap().idle();
    assert!(idle >= Duration::from_millis(900), "{idle:?}");
}

/// Closing takes a limited time, even if a Send never completes and the peer keeps writing.
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
            // Return the client: dropping it would end the connection before the check.
            client
        });
        server.outstanding_sends = usize::MAX;
        let begin = Instant::now();
        server.close();
        assert!(begin.elapsed() >= CLOSE_LIMIT, "closed too early");
        closed.store(true, Ordering::Release);
    });
    assert!(!hung.load(Ordering::Acquire), "closing waited for the peer");
}

/// The handshake's time limit ends when the handshake is complete, and not before.
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

/// While the server hashes, it only sends. Meanwhile its client keeps its place, and the server
/// detects that the client closes the connection.
#[test]
fn sending_end_detects_closed_peer() {
    let (client, mut server) = pair();
    server.authenticated();
    server.set_peer_waiting(true);
    for _ in 0..RECVS / 2 {
        server.send(&Message::Working).unwrap();
        server.pump(Some(&mut server.stall_timer(LONG))).unwrap();
    }
    std::thread::sleep(Duration::from_millis(20));
    let guest = server.guest.as_ref().unwrap();
    assert_eq!(guest.idle(), Duration::ZERO, "it must not be evicted");
    drop(client);
    // The send queue has room for these Sends, even if none completes.
    let detected = (0..SENDS - 1).any(|_| {
        std::thread::sleep(Duration::from_millis(200));
        server.send(&Message::Working).is_err()
    });
    assert!(detected);
}

#[test]
fn stall_timer_restarts_while_data_move() {
    let mut stall_timer = StallTimer::new(SILENCE_LIMIT, 7);
    let mut now = stall_timer.since;
    assert!(!stall_timer.check(7, now + SILENCE_LIMIT / 2).unwrap());
    // Data move slowly, for longer than the limit of silence.
    for moved in 8..20 {
        now += SILENCE_LIMIT / 2;
        assert!(stall_timer.check(moved, now).unwrap());
    }
    assert!(!stall_timer.check(19, now + SILENCE_LIMIT / 2).unwrap());
    assert!(stall_timer.check(19, now + SILENCE_LIMIT).is_err());
}

/// Slots outside of the grant and lengths beyond a slot are refused, and data arrive in their slot.
#[test]
fn slots_have_bounds() {
    let (mut client, mut server) = pair();
    let mut see = |_: &[u8]| Ok(());
    assert!(server.read_slot(0, 1, &mut see).is_err(), "before a grant");
    let grant = server.grant().unwrap();
    assert_eq!((grant.slots, grant.slot_size), (SLOTS, SLOT_SIZE));
    assert_eq!(server.grant().unwrap(), grant, "the same slots");
    for (slot, len) in [(SLOTS, 1), (u16::MAX, 1), (0, SLOT_SIZE + 1)] {
        assert!(server.read_slot(slot, len, &mut see).is_err());
        let mut fill = |_: &mut [u8]| Ok(());
        assert!(client.write_slot(&grant, slot, len, &mut fill).is_err());
    }
    // The receiver has more slots than the sender has buffers.
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
    // The last data are still in the sender's buffers.
    let buffers = client.send_buffers.as_ref().unwrap();
    for (n, slot) in (SLOTS - SEND_BUFFERS as u16..SLOTS).enumerate() {
        let offset = n * buffers.size as usize;
        let kept = buffers.mr.to_vec(offset..offset + 1000).unwrap();
        assert!(kept.iter().all(|b| *b == slot as u8 + 1), "slot {slot}");
    }
    let before = server.bytes_moved();
    client.send(&Message::Done).unwrap();
    assert_eq!(server.recv().unwrap(), Some(Message::Done));
    assert_eq!(server.recv().unwrap(), Some(Message::Done));
    assert!(server.bytes_moved() > before);
    for slot in 0..SLOTS {
        let mut right = false;
        let mut see = |data: &[u8]| {
            right = data.len() == len(slot) as usize && data.iter().all(|b| *b == slot as u8 + 1);
            Ok(())
        };
        server.read_slot(slot, len(slot), &mut see).unwrap();
        assert!(right, "slot {slot}");
    }
    // A sender writes at most as much at once as fits both the slot and its own buffer.
    for (slot_size, most) in [(100, 100), (SLOT_SIZE, SLOT_SIZE), (16 << 20, SLOT_SIZE)] {
        let to = Grant { slot_size, ..grant };
        assert_eq!(client.max_write_len(&to).unwrap(), most);
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
    let timed_out =
        |outcome: Result<()>| outcome.is_err_and(|e| e.to_string().contains("too long"));
    let mut fill = |_: &mut [u8]| Ok(());
    client.outstanding_writes = SEND_BUFFERS - 1;
    client.write_slot(&grant, 0, 1, &mut fill).unwrap();
    client.outstanding_writes = SEND_BUFFERS;
    assert!(timed_out(client.write_slot(&grant, 0, 1, &mut fill)));
    let (mut client, _server) = pair();
    client.deadline = Some(Instant::now());
    client.outstanding_sends = SENDS;
    assert!(timed_out(client.send(&Message::Done)));
    client.outstanding_sends = SENDS - 1;
    client.send(&Message::Done).unwrap();
    // Each message uses a buffer of its own.
    let (mut client, mut server) = pair();
    for slot in 0..3 * SENDS as u16 {
        client.send(&Message::Free { slot }).unwrap();
        assert_eq!(server.recv().unwrap(), Some(Message::Free { slot }));
    }
}

/// If memory is short, a client gets fewer slots or smaller buffers. It is refused only if the
/// minimum does not fit.
#[test]
fn buffers_shrink_if_memory_is_short() {
    let (ctx, _listener) = service::listen(&LOOPBACK, 0, &Config::default()).unwrap();
    let prepared_with = |available: u64| {
        let messages = (RECVS + SENDS) * MAX_MESSAGE + part::HASH_CHUNK;
        Prepared::new(&ctx, &Budget::new(messages as u64 + available)).unwrap()
    };
    // Buffers above the minimum may take an eighth of the available memory. The file buffer counts
    // as one more slot.
    let slot = u64::from(SLOT_SIZE);
    for (available, slots) in [
        (8 * 17 * slot, Some(16)),
        (8 * 17 * slot - 1, Some(8)),
        (8 * 3 * slot, Some(2)),
        (8 * 3 * slot - 1, Some(1)),
        (2 * slot, Some(1)),
        (2 * slot - 1, None),
    ] {
        let (prepared, _qp) = prepared_with(available);
        let created = prepared.create_slots().ok();
        let created_slots = created.as_ref().map(|(_, slots)| *slots);
        assert_eq!(created_slots, slots, "{available}");
        if let Some((buffers, slots)) = created {
            assert_eq!(buffers.mr.len(), usize::from(slots) * SLOT_SIZE as usize);
        }
    }
    let count = SEND_BUFFERS as u64 + 1;
    let minimum = u64::from(MIN_SEND_BUFFER);
    for (available, size) in [
        (8 * count * slot, Some(SLOT_SIZE)),
        (8 * count * slot - 1, Some(SLOT_SIZE / 2)),
        (8 * count * 2 * minimum - 1, Some(MIN_SEND_BUFFER)),
        (count * minimum, Some(MIN_SEND_BUFFER)),
        (count * minimum - 1, None),
    ] {
        let (prepared, _qp) = prepared_with(available);
        let buffers = prepared.create_send_buffers().ok();
        assert_eq!(buffers.map(|buffers| buffers.size), size, "{available}");
    }
}

/// A client's idle time starts when the server's work for it ends.
#[test]
fn idle_time_starts_after_work() {
    let (_client, mut server) = pair();
    server.authenticated();
    server.set_peer_waiting(true);
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(server.guest.as_ref().unwrap().idle(), Duration::ZERO);
    let begin = Instant::now();
    server.set_peer_waiting(false);
    std::thread::sleep(Duration::from_millis(10));
    let idle = server.guest.as_ref().unwrap().idle();
    assert!(
        idle >= Duration::from_millis(8) && idle <= begin.elapsed() + Duration::from_millis(1),
        "{idle:?}"
    );
}

/// A sender polls for messages between its Writes without waiting.
#[test]
fn try_recv_does_not_wait() {
    let (mut client, mut server) = pair();
    assert_eq!(server.try_recv().unwrap(), None);
    client.send(&Message::Done).unwrap();
    let end = Instant::now() + LONG;
    let mut received = None;
    while received.is_none() && Instant::now() < end {
        received = server.try_recv().unwrap();
    }
    assert_eq!(received, Some(Message::Done));
}

/// The share of a server's `--memory` that each client needs, before its slots.
#[test]
fn client_needs_half_a_mebibyte() {
    let (ctx, _listener) = service::listen(&LOOPBACK, 0, &Config::default()).unwrap();
    let suffices = |octets| Prepared::new(&ctx, &Budget::new(octets)).is_ok();
    assert!(suffices(512 << 10));
    assert!(!suffices((512 << 10) - 1));
}

/// An end closes only after TCP has accepted everything, so requests are unsent until they
/// complete.
#[test]
fn requests_are_unsent_until_completed() {
    let (mut client, mut server) = pair();
    assert!(client.has_sent_all());
    client.send(&Message::Done).unwrap();
    assert!(!client.has_sent_all(), "a message");
    client.wait_until(LONG, RdmaLink::has_sent_all).unwrap();
    let grant = server.grant().unwrap();
    client.write_slot(&grant, 0, 1, &mut |_| Ok(())).unwrap();
    assert!(!client.has_sent_all(), "data");
    client.wait_until(LONG, RdmaLink::has_sent_all).unwrap();
}

/// Data in either direction are progress of the guest. Polling without data is not.
#[test]
fn data_in_both_directions_are_progress() {
    let (mut client, mut server) = pair();
    server.authenticated();
    server.guest.as_ref().unwrap().served();
    let idle = |server: &RdmaLink| server.guest.as_ref().unwrap().idle();
    std::thread::sleep(Duration::from_millis(30));
    let before = idle(&server);
    assert_eq!(server.try_recv().unwrap(), None);
    assert!(idle(&server) >= before, "no data");
    let (mut moved, begin) = (server.bytes_moved(), Instant::now());
    client.send(&Message::Done).unwrap();
    assert_eq!(server.recv().unwrap(), Some(Message::Done));
    assert!(idle(&server) <= begin.elapsed() + Duration::from_millis(1));
    assert!(server.bytes_moved() > moved, "received");
    moved = server.bytes_moved();
    server.send(&Message::Done).unwrap();
    server.wait_until(LONG, RdmaLink::has_sent_all).unwrap();
    assert!(server.bytes_moved() > moved, "sent");
}

/// A reset is an error; a graceful close is not.
#[test]
fn reset_is_no_graceful_close() {
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
