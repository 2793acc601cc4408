//! Tests of what requests copy, and to where.

use crate::connection::testing::{LIMIT, channels, done, pair, pair_with, until};
use crate::connection::wait::Wait;
use crate::connection::{Channel, Connection, Options};
use crate::error::Error;
use iwarp_rnic::Access;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::task::{Wake, Waker};

fn has_staging(connection: &Connection) -> bool {
    connection
        .inner
        .staging
        .iter()
        .any(|block| block.get().is_some())
}

#[test]
fn answers_have_separate_staging() {
    let (a, b) = pair_with(&Options::new().message_size(64));
    let there = b.share::<u64>(40, Access::REMOTE_READ).unwrap();
    (0..40).for_each(|n| there.set(n, 1000 + n as u64).unwrap());
    let token = there.remote();
    let gets: Vec<_> = (0..8)
        .map(|n| a.get(&token.at(n).unwrap()).started())
        .collect();
    let reads: Vec<_> = (1..5)
        .map(|n| a.read(&token.slice(n * 8..n * 8 + 8).unwrap()).started())
        .collect();
    // When the last one is answered, all are.
    for (n, read) in reads.into_iter().enumerate().rev() {
        let first = 1008 + 8 * n as u64;
        let expected: Vec<_> = (first..first + 8).collect();
        assert_eq!(read.wait_for(LIMIT).unwrap(), expected);
    }
    for (n, get) in gets.into_iter().enumerate().rev() {
        assert_eq!(get.wait_for(LIMIT).unwrap(), 1000 + n as u64);
    }
}

/// Inline data needs no staging memory, which is not even allocated.
#[test]
fn short_data_is_sent_inline() {
    let (a, b) = pair_with(&Options::new().max_inline(16));
    let there = b.share::<u8>(32, Access::REMOTE_WRITE).unwrap();
    let region = a.allocate::<u8>(32).unwrap();
    done(&mut a.send(&[1; 16]), &[&a]);
    done(&mut a.send(&[]), &[&a]);
    done(&mut a.write(&[2; 16], &there.remote()), &[&a]);
    done(&mut a.send(&region), &[&a]);
    let window = done(&mut a.bind(&region, Access::REMOTE_READ), &[&a]);
    done(&mut a.invalidate(window), &[&a]);
    assert!(!has_staging(&a));
    done(&mut a.send(&[3; 17]), &[&a]);
    assert!(has_staging(&a));

    let (c, d) = channels(&Options::new().max_inline(16).receives(6));
    let ends = [c.connection(), d.connection()];
    done(&mut c.send(&[1; 8]), &ends);
    done(&mut c.send(&[2; 8]), &ends);
    for _ in 0..2 {
        drop(done(&mut d.recv(), &ends));
    }
    done(&mut d.finish(), &ends);
    assert!(!ends.map(has_staging).contains(&true));
    done(&mut c.send(&[3; 9]), &ends);
    assert_eq!(ends.map(has_staging), [true, false]);
}

/// Data arrives unchanged at each length that takes a different path, with and without a channel's
/// header.
#[test]
fn octets_of_each_length_arrive() {
    for inline in [0, 16, 64] {
        let options = Options::new().max_inline(inline).message_size(100);
        let (a, b) = pair_with(&options);
        let (c, d) = channels(&options);
        let region = |of: &Connection, octets: &[u8]| {
            // Surrounded by other data.
            let whole = of.allocate::<u8>(300).unwrap();
            whole.write_at(0, &[0xff; 300]).unwrap();
            whole.write_at(50, octets).unwrap();
            whole.slice(50..50 + octets.len()).unwrap()
        };
        for len in [0, 1, 7, 8, 9, 15, 16, 17, 55, 56, 57, 63, 64, 65, 92, 100] {
            let octets: Vec<u8> = (1..=len).collect();
            let what = format!("{len} octets, {inline} inline");
            // Staging slots are used in turn.
            let first = a.send(&octets).started();
            let second = a.send(region(&a, &octets)).started();
            let third = a.send(&octets).started();
            for sent in [first, second, third] {
                sent.wait_for(LIMIT).unwrap();
                assert_eq!(*b.recv().wait_for(LIMIT).unwrap(), *octets, "{what}");
            }
            if len > 92 {
                continue;
            }
            let part = region(c.connection(), &octets);
            let owned = octets.clone();
            for sent in [c.send(&octets), c.send(&part), c.send(owned)] {
                sent.wait_for(LIMIT).unwrap();
                let message = d.recv().wait_for(LIMIT).unwrap().unwrap();
                assert_eq!(*message, *octets, "{what}, on a channel");
            }
        }
        c.finish().wait_for(LIMIT).unwrap();
        assert!(d.recv().wait_for(LIMIT).unwrap().is_none());
    }
}

/// Owned data that is too long to be copied behind a header is sent from where it is.
#[test]
fn long_owned_message_is_not_copied() {
    let size = |octets| Options::new().message_size(octets).max_inline(16);
    let listener = size(2000).listen("127.0.0.1:0").bind().unwrap();
    let to = listener.local_addr();
    std::thread::scope(|scope| {
        let echo = scope.spawn(move || {
            let channel = Channel::open(listener.accept().wait().unwrap());
            let channel = channel.wait_for(LIMIT).unwrap();
            while let Some(message) = channel.recv().wait_for(LIMIT).unwrap() {
                assert!(
                    message
                        .iter()
                        .all(|octet| usize::from(*octet) == message.len() % 256)
                );
            }
        });
        let channel = Channel::open(size(64).connect(to).wait().unwrap());
        let channel = channel.wait_for(LIMIT).unwrap();
        for len in [55, 56, 57, 64, 65, 1992] {
            channel.send(vec![len as u8; len]).wait_for(LIMIT).unwrap();
        }
        channel.finish().wait_for(LIMIT).unwrap();
        echo.join().unwrap();
    });
}

/// The receive buffer is posted again with the last clone or slice.
#[test]
fn clones_keep_receive_buffer() {
    let (a, b) = pair_with(&Options::new().receives(2));
    let ends = [&a, &b];
    let in_buffers = || {
        let messages = b.inner.buffers.message_counts.iter();
        messages.map(|n| n.load(Ordering::SeqCst)).sum::<u32>()
    };
    done(&mut a.send("what was said"), &ends);
    let message = done(&mut b.recv(), &ends);
    assert_eq!(in_buffers(), 1);
    let clone = message.clone();
    let part = clone.slice(5..8).unwrap();
    assert!(part.slice(2..4).is_err());
    let smaller = part.slice(1..).unwrap();
    assert_eq!(
        (&*part, &*smaller, in_buffers()),
        (&b"was"[..], &b"as"[..], 4)
    );
    drop((message, clone, part));
    assert_eq!(in_buffers(), 1);
    // The other buffer is used in turn, and this one keeps its bytes.
    for _ in 0..5 {
        done(&mut a.send("something else"), &ends);
        drop(done(&mut b.recv(), &ends));
    }
    let bytes = bytes::Bytes::from(smaller);
    assert_eq!((&bytes[..], in_buffers()), (&b"as"[..], 1));
    drop(bytes);
    assert_eq!(in_buffers(), 0);
    for _ in 0..2 {
        done(&mut a.send("x"), &ends);
    }
    let last = [(); 2].map(|()| done(&mut b.recv(), &ends));
    assert_eq!(in_buffers(), 2);
    drop((a, b));
    let clones = last.clone();
    drop(last);
    assert_eq!(*clones[1], *b"x");
}

/// A credit is returned with the last clone or slice of a message.
#[test]
fn clones_keep_credit() {
    let (c, d) = channels(&Options::new().receives(6));
    let ends = [c.connection(), d.connection()];
    done(&mut c.send("hello"), &ends);
    let message = done(&mut d.recv(), &ends).unwrap();
    let part = message.slice(1..3).unwrap();
    let owed = || {
        let state = d.shared.state.lock();
        state.owed + state.allowed
    };
    let before = owed();
    drop(message);
    assert_eq!((&*part, owed()), (&b"el"[..], before));
    drop(part);
    assert_eq!(owed(), before + 1);
}

#[test]
fn request_reports_its_stage() {
    let (a, b) = pair();
    let there = b.share::<u64>(1, Access::REMOTE_READ).unwrap();
    let token = there.remote();
    let stage = |get: &crate::connection::Operation<'_, _>| {
        (get.is_started(), get.has_begun(), get.is_refused())
    };
    let get = a.get(&token);
    assert_eq!(stage(&get), (false, false, false));
    let mut get = get.started();
    assert_eq!(stage(&get), (true, true, false));
    get = get.started();
    assert_eq!(stage(&get), (true, true, false), "it is posted once");
    assert_eq!(done(&mut get, &[&a]), 0);
    assert_eq!(stage(&get), (false, true, false));
    let nothing = token.slice(..0).unwrap();
    let refused = a.get(&nothing).started();
    assert_eq!(stage(&refused), (false, false, true));
    a.close().unwrap();
    let late = a.get(&token).started();
    assert_eq!(stage(&late), (false, false, true));
    assert!(matches!(late.wait(), Err(Error::Closed)));
}

/// A waker that checks for the end of the connection.
struct Looks {
    connection: Connection,
    saw: OnceLock<bool>,
}

impl Wake for Looks {
    fn wake(self: Arc<Self>) {
        let saw = self.connection.closed().poll_now().is_ready();
        let _ = self.saw.set(saw);
    }
}

/// A waiter that is woken at the end sees the end. Otherwise it would wait again, for an event that
/// has already happened.
#[test]
fn woken_waiter_sees_the_end() {
    for ours in [false, true] {
        let (a, b) = pair();
        let looks = Arc::new(Looks {
            connection: a.clone(),
            saw: OnceLock::new(),
        });
        let mut closed = a.closed();
        closed.register(&Waker::from(Arc::clone(&looks)));
        if ours {
            a.inner.cm.disconnect().unwrap();
        } else {
            b.close().unwrap();
        }
        until("the end", &[], || looks.saw.get().is_some());
        assert_eq!(looks.saw.get(), Some(&true), "{ours}");
        drop(closed);
    }
}

#[test]
fn full_connection_does_not_overflow() {
    let options = Options::new().send_depth(64).receives(64);
    let (a, b) = pair_with(&options);
    let octets: Vec<u8> = (0..64).collect();
    let sent: Vec<_> = octets
        .chunks(1)
        .map(|octet| a.send(octet).started())
        .collect();
    let theirs: Vec<_> = octets
        .chunks(1)
        .map(|octet| b.send(octet).started())
        .collect();
    until("the completions", &[], || {
        // The last requests are sent only on demand.
        for end in [&a, &b] {
            end.inner.router.cq.send_deferred_requests();
        }
        [&a, &b].map(|end| end.inner.router.cq.len()) == [128; 2]
    });
    for sent in sent.into_iter().chain(theirs) {
        sent.wait_for(LIMIT).unwrap();
    }
    for end in [&a, &b] {
        for n in 0..64 {
            assert_eq!(*end.recv().wait_for(LIMIT).unwrap(), [n]);
        }
    }
}
