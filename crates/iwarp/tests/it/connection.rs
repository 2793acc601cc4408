//! Tests of `iwarp::Connection`: each kind of request, blocking and as a future; lengths and
//! rights; errors.

use crate::common::calls::{LIMIT, pair, pair_with};
use iwarp::connection::{Refusal, RequestKind};
use iwarp::runtime::WcStatus;
use iwarp::{Access, Blame, End, Endpoint, Error, Options, RemoteRegion};
use std::future::{Future, IntoFuture};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Runs a future on one thread, with a time limit that expires only if a wake-up is lost.
fn run<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = { runtime }.enable_time().build().unwrap();
    let bounded = async { tokio::time::timeout(LIMIT, future).await };
    runtime.block_on(bounded).expect("a wake-up was lost")
}

#[test]
fn messages_by_blocking() {
    let (a, b) = pair();
    assert!(a.is_initiator() && !b.is_initiator());
    let server = std::thread::spawn(move || {
        for n in 0..500_u32 {
            let message = b.recv().wait_for(LIMIT).unwrap();
            assert_eq!(*message, n.to_be_bytes());
            b.send(message.to_vec()).wait_for(LIMIT).unwrap();
        }
        b.closed().wait_for(LIMIT).unwrap();
        assert!(matches!(b.recv().wait(), Err(Error::Closed)));
        assert!(matches!(b.send("late").wait(), Err(Error::Closed)));
    });
    for n in 0..500_u32 {
        a.send(&n.to_be_bytes()).wait_for(LIMIT).unwrap();
        assert_eq!(*a.recv().wait_for(LIMIT).unwrap(), n.to_be_bytes());
    }
    drop(a);
    server.join().unwrap();
}

#[test]
fn messages_in_tasks() {
    run(async {
        let listener = iwarp::listen("127.0.0.1:0").bind().unwrap();
        let connect = iwarp::connect(listener.local_addr());
        let (a, b) = tokio::join!(listener.accept().into_future(), connect.into_future());
        let (a, b) = (a.unwrap(), b.unwrap());
        let echo = async {
            while let Ok(message) = a.recv().await {
                a.send(message.to_vec()).await.unwrap();
            }
        };
        let ask = async {
            for n in 0..500_u32 {
                b.send(&n.to_be_bytes()).await.unwrap();
                assert_eq!(*b.recv().await.unwrap(), n.to_be_bytes());
            }
            b.close().unwrap();
        };
        tokio::join!(echo, ask);
        a.closed().await.unwrap();
    });
}

/// `now` itself reads the socket, and takes one message per call.
#[test]
fn now_reads_the_socket() {
    let (a, b) = pair();
    assert!(b.recv().now().unwrap().is_none());
    for n in 0..20_u8 {
        a.send(&[n]).wait_for(LIMIT).unwrap();
    }
    let begin = Instant::now();
    for n in 0..20_u8 {
        let message = loop {
            if let Some(message) = b.recv().now().unwrap() {
                break message;
            }
            assert!(begin.elapsed() < LIMIT, "message {n} does not arrive");
        };
        assert_eq!(*message, [n]);
    }
    assert!(b.recv().now().unwrap().is_none());
}

/// Owned data is sent inline, copied, or from where it is, also if the send queue is full and the
/// operation is dropped.
#[test]
fn owned_payloads_of_each_length() {
    let (a, b) = pair_with(
        &Options::new()
            .send_depth(2)
            .max_inline(16)
            .message_size(100),
    );
    let target = b.share::<u32>(60_000, Access::REMOTE_WRITE).unwrap();
    let there = target.remote();
    for len in [0, 1, 4, 5, 24, 25, 26, 59_999] {
        target.write_at(0, &[7; 60_000]).unwrap();
        let elements: Vec<u32> = (1..=len).collect();
        drop(a.write(elements.clone(), &there).started());
        drop(
            a.write(
                elements.clone().into_boxed_slice(),
                &there.slice(1..).unwrap(),
            )
            .started(),
        );
        drop(
            a.write(bytes(&elements), &there.slice(1..).unwrap().bytes())
                .started(),
        );
        a.write(elements, &there).wait_for(LIMIT).unwrap();
        drop(a.send(String::from("done")).started());
        let done = b.recv().wait_for(LIMIT).unwrap();
        assert_eq!(*done, *b"done");
        let mut expected = vec![7; 60_000];
        expected[1..][..len as usize].copy_from_slice(&(1..=len).collect::<Vec<_>>());
        expected[..len as usize].copy_from_slice(&(1..=len).collect::<Vec<_>>());
        assert!(target.to_vec().unwrap() == expected, "{len} elements");
    }
}

fn bytes(elements: &[u32]) -> bytes::Bytes {
    bytes::Bytes::copy_from_slice(bytemuck::cast_slice(elements))
}

/// The elements of a vector stay where they are, and peers access them there.
#[test]
fn vector_becomes_region() {
    let (a, b) = pair();
    let words: Vec<u64> = (0..1000).collect();
    let at = words.as_ptr();
    let rights = Access::REMOTE_READ | Access::REMOTE_WRITE;
    let mut region = b.endpoint().adopt(words, rights).unwrap();
    let token = region.remote();
    assert_eq!(a.get(&token.at(999).unwrap()).wait().unwrap(), 999);
    a.write(&[7, 8], &token.slice(1..).unwrap()).wait().unwrap();
    assert_eq!(
        a.read(&token.slice(..4).unwrap()).wait().unwrap(),
        [0, 7, 8, 3]
    );
    assert!(region.get_mut().is_none(), "peers may write it");

    let mut own = b
        .endpoint()
        .adopt(vec![[5_u8; 3]; 4], Access::empty())
        .unwrap();
    assert_eq!(own.get_mut().unwrap(), [[5; 3]; 4]);
    assert!(b.endpoint().adopt(vec![1_u8], Access::LOCAL_WRITE).is_err());
    let empty = b.endpoint().adopt(Vec::<u32>::new(), rights).unwrap();
    assert!(empty.is_empty());
    let same = b.endpoint().adopt(Vec::from(Box::from([1_u64, 2])), rights);
    assert_eq!(same.unwrap().to_vec().unwrap(), [1, 2]);
    assert_eq!(region.slice(..1).unwrap().get(0).unwrap(), 0);
    assert_eq!(token.to_bytes()[..8], (at.addr() as u64).to_be_bytes());
}

/// The memory of owned data is freed after its request has completed, not before.
#[test]
fn owned_payload_lives_until_completion() {
    struct Owner(Vec<u8>, Arc<AtomicBool>);
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    impl Drop for Owner {
        fn drop(&mut self) {
            self.1.store(true, Ordering::SeqCst);
        }
    }
    let (a, b) = pair_with(&Options::new().send_depth(1));
    let target = b.share::<u8>(1 << 20, Access::REMOTE_WRITE).unwrap();
    let there = target.remote();
    for waits in [true, false] {
        let freed = [(); 3].map(|()| Arc::new(AtomicBool::new(false)));
        let writes = [0, 1, 2].map(|n| {
            let owner = Owner(vec![n as u8; 1 << 20], Arc::clone(&freed[n]));
            a.write(bytes::Bytes::from_owner(owner), &there).started()
        });
        assert!(freed.iter().all(|freed| !freed.load(Ordering::SeqCst)));
        for write in writes {
            match waits {
                true => write.wait_for(LIMIT).unwrap(),
                false => drop(write),
            }
        }
        let end = Instant::now() + LIMIT;
        while !freed.iter().all(|freed| freed.load(Ordering::SeqCst)) {
            assert!(!waits && Instant::now() < end, "it is never freed");
            std::thread::yield_now();
        }
        a.send("x").wait_for(LIMIT).unwrap();
        drop(b.recv().wait_for(LIMIT).unwrap());
        assert_eq!(target.to_vec().unwrap(), [2; 1 << 20]);
    }
}

/// Each end learns which one closed the connection, and that all messages arrived.
#[test]
fn shutdown_delivers_everything() {
    for depth in [1, 128] {
        for reads in [0, 16] {
            let options = Options::new().send_depth(depth).reads(reads, reads);
            let (a, b) = pair_with(&options);
            for n in 0..40_u8 {
                drop(a.send(vec![n]).started());
            }
            let end = a.shutdown().wait_for(LIMIT).unwrap();
            assert_eq!(end, End::Closed);
            for n in 0..40 {
                assert_eq!(*b.recv().wait_for(LIMIT).unwrap(), [n]);
            }
            assert!(matches!(b.recv().wait_for(LIMIT), Err(Error::Closed)));
            assert_eq!(b.closed().wait_for(LIMIT).unwrap(), End::ClosedByPeer);
            // Once more has no effect.
            assert_eq!(a.shutdown().wait_for(LIMIT).unwrap(), End::Closed);
        }
    }
    let (a, b) = pair();
    let end = run(async move {
        a.send(String::from("x")).await.unwrap();
        a.shutdown().await.unwrap()
    });
    assert_eq!(end, End::Closed);
    assert_eq!(b.closed().wait_for(LIMIT).unwrap(), End::ClosedByPeer);
}

#[test]
fn statistics_count_traffic() {
    let (a, b) = pair();
    let before = a.stats();
    assert_eq!(before.sent.messages, 0);
    a.send(vec![1; 3000]).wait_for(LIMIT).unwrap();
    drop(b.recv().wait_for(LIMIT).unwrap());
    b.send(vec![2; 10]).wait_for(LIMIT).unwrap();
    drop(a.recv().wait_for(LIMIT).unwrap());
    let (ours, theirs) = (a.stats(), b.stats());
    assert_eq!((ours.sent.octets, ours.sent.messages), (3000, 1));
    assert_eq!((ours.received.octets, ours.received.messages), (10, 1));
    assert_eq!(theirs.sent, ours.received);
    // The first message is that of the set-up.
    assert_eq!(
        (theirs.received.octets, theirs.received.messages),
        (3000, 2)
    );
    let transport = ours.transport.unwrap();
    assert!(transport.rtt > Duration::ZERO && transport.rtt < LIMIT);
    assert_eq!(transport.retransmits, 0);
    // TCP acknowledges in time.
    let end = Instant::now() + LIMIT;
    while a.stats().transport.unwrap().octets_in_flight > 0 {
        assert!(Instant::now() < end);
        std::thread::yield_now();
    }
    a.shutdown().wait_for(LIMIT).unwrap();
    assert_eq!(a.stats().sent.octets, 3000);
}

/// Waits for a peer that does not come, or does not answer, are limited.
#[test]
fn setup_has_time_limits() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let brief = Duration::from_millis(50);
    let refused = iwarp::connect(silent.local_addr().unwrap()).wait_for(brief);
    assert!(matches!(refused, Err(Error::TimedOut(_))), "{refused:?}");
    let listener = iwarp::listen("127.0.0.1:0").bind().unwrap();
    let alone = listener.accept().wait_for(brief);
    assert!(matches!(alone, Err(Error::TimedOut(_))), "{alone:?}");
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| listener.accept().wait_for(LIMIT).unwrap());
        let connected = iwarp::connect(listener.local_addr())
            .wait_for(LIMIT)
            .unwrap();
        assert_eq!(accepted.join().unwrap().peer_addr(), connected.local_addr());
    });
}

/// Programs keep errors, and pass them to other threads.
#[test]
fn errors_are_cloned() {
    fn is_value<T: Clone + Send + Sync + std::error::Error + 'static>(_: &T) {}
    let refused = iwarp::connect("127.0.0.1:1").wait().unwrap_err();
    is_value(&refused);
    let clone = refused.clone();
    assert_eq!(clone.to_string(), refused.to_string());
    assert_eq!(clone.errno(), libc::ECONNREFUSED);
    let source = std::error::Error::source(&clone).expect("it has a source");
    assert!(source.downcast_ref::<std::io::Error>().is_some());
    let io = std::io::Error::from(clone);
    assert_eq!(io.kind(), std::io::ErrorKind::ConnectionRefused);
}

/// Operations own what they need, so tasks can be spawned with them.
#[test]
fn operations_are_spawned() {
    let (a, b) = pair_with(&Options::new().send_depth(3));
    let all = Access::REMOTE_READ | Access::REMOTE_WRITE;
    let target = b.share::<u64>(64, all).unwrap();
    let there = target.remote();
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).build().unwrap();
    runtime.block_on(async {
        let writes: Vec<_> = (0..64)
            .map(|n| tokio::spawn(a.write(vec![n as u64 + 1], &there.at(n).unwrap())))
            .collect();
        for write in writes {
            write.await.unwrap().unwrap();
        }
        let gets: Vec<_> = (0..64)
            .map(|n| tokio::spawn(a.get(&there.at(n).unwrap())))
            .collect();
        for (n, get) in gets.into_iter().enumerate() {
            assert_eq!(get.await.unwrap().unwrap(), n as u64 + 1);
        }
        let message = tokio::spawn(b.recv().into_future());
        let closed = tokio::spawn(b.closed().into_future());
        let channel = tokio::spawn(a.send(String::from("hello")).into_future());
        channel.await.unwrap().unwrap();
        assert_eq!(*message.await.unwrap().unwrap(), *b"hello");
        drop(a);
        closed.await.unwrap().unwrap();
    });
}

/// Short data is sent inline, longer data by the staging memory, regions in place.
#[test]
fn payloads_of_each_kind() {
    let (a, b) = pair_with(&Options::new().message_size(10_000));
    let long: Vec<u8> = (0..10_000_u32).map(|n| n as u8).collect();
    let region = a.allocate::<u8>(10_000).unwrap();
    region.write_at(0, &long).unwrap();
    a.send("text").wait().unwrap();
    a.send(&long).wait().unwrap();
    a.send(&region).wait().unwrap();
    a.send(region.slice(5..7).unwrap()).wait().unwrap();
    a.send(&[]).wait().unwrap();
    a.send_with_immediate("x", 0xdead_beef).wait().unwrap();
    let next = || b.recv().wait_for(LIMIT).unwrap();
    assert_eq!(*next(), *b"text");
    assert_eq!(*next(), *long);
    assert_eq!(*next(), *long);
    assert_eq!(*next(), [5, 6]);
    assert!(next().is_empty());
    let last = next();
    assert!(!last.is_write_immediate());
    assert_eq!(AsRef::<[u8]>::as_ref(&last), b"x");
    assert_eq!((&*last, last.immediate()), (&b"x"[..], Some(0xdead_beef)));
    assert!(b.recv().now().unwrap().is_none());
    let too_long = vec![0; 10_001];
    let refused = a.send(&too_long).wait();
    assert!(matches!(
        refused,
        Err(Error::Refused(Refusal::TooLongToCopy { most: 10_000, .. }))
    ));
}

#[test]
fn references_are_payloads() {
    let (a, b) = pair_with(&Options::new());
    a.send(&[1, 2, 3]).wait().unwrap();
    let message = b.recv().wait_for(LIMIT).unwrap();
    b.send(&message).wait().unwrap();
    assert_eq!(*a.recv().wait_for(LIMIT).unwrap(), [1, 2, 3]);
    let bytes = bytes::Bytes::from_static(b"bytes");
    a.send(&bytes).wait().unwrap();
    assert_eq!(*b.recv().wait_for(LIMIT).unwrap(), *b"bytes");
    let boxed = Box::<[u8]>::from([4]);
    a.send(&boxed).wait().unwrap();
    assert_eq!(*b.recv().wait_for(LIMIT).unwrap(), [4]);
    let numbers = b.share::<u32>(3, Access::REMOTE_WRITE).unwrap();
    a.write(&[7, 8, 9], &numbers.remote()).wait().unwrap();
    b.recv().now().unwrap();
    a.send(&[]).wait().unwrap();
    assert!(b.recv().wait_for(LIMIT).unwrap().is_empty());
    assert_eq!(numbers.to_vec().unwrap(), [7, 8, 9]);
}

#[test]
fn one_sided_requests() {
    let endpoint = Endpoint::local("127.0.0.1".parse().unwrap()).unwrap();
    let all = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    let table = endpoint.share::<u64>(100, all).unwrap();
    let listener = endpoint.listen("127.0.0.1:0");
    let listener = listener.private_data(table.remote().to_bytes());
    let listener = listener.bind().unwrap();
    let to = listener.local_addr();
    let server = std::thread::spawn(move || listener.accept().wait().unwrap());
    let a = iwarp::connect(to).wait().unwrap();
    let b = server.join().unwrap();
    let remote = RemoteRegion::<u64>::from_bytes(a.private_data()).unwrap();
    assert_eq!((remote.len(), remote.rights()), (100, all));

    a.write(&[1_u64, 2, 3], &remote).wait().unwrap();
    // A Read after a Write sees the written data.
    assert_eq!(
        a.read(&remote.slice(..4).unwrap()).wait().unwrap(),
        [1, 2, 3, 0]
    );
    assert_eq!(a.get(&remote.at(1).unwrap()).wait().unwrap(), 2);
    let mine = a.allocate::<u64>(10).unwrap();
    a.read_into(mine.slice(5..).unwrap(), &remote.slice(..3).unwrap())
        .wait()
        .unwrap();
    assert_eq!(mine.to_vec().unwrap(), [0, 0, 0, 0, 0, 1, 2, 3, 0, 0]);
    let word = remote.at(99).unwrap();
    assert_eq!(a.fetch_add(&word, 5).wait().unwrap(), 0);
    assert_eq!(a.fetch_add(&word, 5).wait().unwrap(), 5);
    assert_eq!(a.compare_swap(&word, 9, 1).wait().unwrap(), 10);
    assert_eq!(a.compare_swap(&word, 10, 7).wait().unwrap(), 10);
    assert_eq!(table.load(99).unwrap(), 7);
    a.write_with_immediate(&[9_u64], &remote, 77)
        .wait()
        .unwrap();
    let news = b.recv().wait_for(LIMIT).unwrap();
    assert!(news.is_write_immediate() && news.is_empty());
    assert_eq!((news.immediate(), table.load(0).unwrap()), (Some(77), 9));
}

/// Invalid requests are refused before they are posted, and the connection survives.
#[test]
fn refused_requests_keep_connection() {
    let (a, b) = pair();
    let readable = b.share::<u64>(4, Access::REMOTE_READ).unwrap();
    let token = readable.remote();
    let refused = |result: iwarp::Result<()>| match result {
        Err(Error::Refused(why)) => why,
        other => panic!("{other:?}"),
    };
    let why = refused(a.write(&[1_u64], &token).wait());
    assert!(matches!(why, Refusal::NotGranted { .. }));
    let small = a.allocate::<u64>(3).unwrap();
    let why = refused(a.read_into(&small, &token).wait());
    let (octets, room) = (32, 24);
    assert_eq!(why, Refusal::TooLong { octets, room });
    let foreign = b.allocate::<u64>(4).unwrap();
    let why = refused(a.read_into(&foreign, &token).wait());
    assert_eq!(why, Refusal::ForeignRegion);
    let word = a.fetch_add(&token.at(0).unwrap(), 1).wait().map(drop);
    assert!(matches!(refused(word), Refusal::NotGranted { .. }));
    let atomic = b.share::<u64>(4, Access::REMOTE_ATOMIC).unwrap().remote();
    let word = a.fetch_add(&atomic, 1).wait().map(drop);
    assert_eq!(refused(word), Refusal::NotOneWord);
    assert!(a.share::<u8>(1, Access::LOCAL_WRITE).is_err());
    assert!(a.allocate::<[u64; 0]>(1).is_err());
    assert_eq!(a.get(&token).wait().unwrap(), 0);
}

/// The error names the request, the side at fault, and what to do.
#[test]
fn peer_refusal_ends_connection_with_cause() {
    let (a, b) = pair();
    let region = b.share::<u8>(64, Access::REMOTE_WRITE).unwrap();
    let token = region.remote();
    drop(region);
    // The Write may complete when TCP has accepted it.
    let _ = a.write(&[1_u8; 64], &token).wait_for(LIMIT);
    let error = loop {
        match a.write(&[1_u8; 64], &token).wait_for(LIMIT) {
            Ok(()) => {}
            Err(Error::Operation(error)) => break error,
            Err(other) => panic!("{other}"),
        }
    };
    assert_eq!(error.request(), RequestKind::Write);
    assert_eq!(error.peer_addr(), a.peer_addr());
    assert!(error.fault().is_some());
    assert_eq!(a.fault(), error.fault());
    let text = Error::Operation(error).to_string();
    assert!(text.contains("RDMA Write of 64 octets"), "{text}");
    let Ok(End::TerminatedByPeer(fault)) = a.closed().wait_for(LIMIT) else {
        panic!("{:?}", a.closed().wait_for(LIMIT));
    };
    assert_eq!(Some(fault), a.fault());
    let Ok(End::Terminated(fault)) = b.closed().wait_for(LIMIT) else {
        panic!("{:?}", b.closed().wait_for(LIMIT));
    };
    assert_eq!(fault.blame, Blame::Peer);
    let late = a.send("x").wait();
    assert!(matches!(late, Err(Error::Operation(e)) if e.status() == WcStatus::Flushed));
    assert!(
        matches!(a.recv().wait(), Err(Error::Operation(e)) if e.request() == RequestKind::Receive)
    );
}

#[test]
fn dropped_window_ends_rights() {
    let (a, b) = pair();
    let region = b.allocate::<u32>(16).unwrap();
    let part = region.slice(4..8).unwrap();
    let window = b.bind(&part, Access::REMOTE_WRITE).wait().unwrap();
    a.write(&[1_u32, 2, 3, 4], &window.remote()).wait().unwrap();
    // The peer's message invalidates the window.
    let token = window.remote();
    a.send_with_invalidate("done", &token).wait().unwrap();
    let message = b.recv().wait_for(LIMIT).unwrap();
    assert!(window.is_invalidated_by(&message) && *message == *b"done");
    let another = b.bind(&part, Access::REMOTE_READ).wait().unwrap();
    assert!(!another.is_invalidated_by(&message));
    a.send("nothing").wait().unwrap();
    let plain = b.recv().wait_for(LIMIT).unwrap();
    assert!(!window.is_invalidated_by(&plain));
    drop((another, plain));
    assert_eq!(part.to_vec().unwrap(), [1, 2, 3, 4]);
    drop((message, window));
    // A request invalidates the window, in order with other requests.
    let window = b.bind(&part, Access::REMOTE_READ).wait().unwrap();
    assert_eq!(a.get(&window.remote()).wait().unwrap(), 1);
    b.invalidate(window).wait().unwrap();
    // Dropping the window also ends the rights. Afterwards the region is exclusive again.
    let window = b.bind(&part, Access::REMOTE_READ).wait().unwrap();
    let token = window.remote();
    drop((window, part));
    let mut region = region;
    assert_eq!(region.get_mut().unwrap()[4..8], [1, 2, 3, 4]);
    for rights in [Access::empty(), Access::LOCAL_WRITE, Access::all()] {
        let refused = b.bind(&region, rights).wait();
        assert!(matches!(refused, Err(Error::InvalidArgument(_))));
    }
    assert!(a.get(&token).wait_for(LIMIT).is_err());
    // After the failed request the connection has ended for every caller.
    assert!(a.recv().now().is_err() && a.send("late").wait().is_err());
}

#[test]
fn get_mut_needs_unused_region() {
    let (a, b) = pair();
    let mut shared = a.share::<u8>(8, Access::REMOTE_READ).unwrap();
    assert!(shared.get_mut().is_none());
    let mut region = a.allocate::<u8>(8).unwrap();
    region.get_mut().unwrap().copy_from_slice(b"in place");
    let clone = region.clone();
    assert!(region.get_mut().is_none());
    drop(clone);
    let sent = a.send(&region).started();
    // The request holds the region until its completion is known.
    assert!(region.get_mut().is_none());
    sent.wait().unwrap();
    assert!(region.get_mut().is_some());
    assert_eq!(*b.recv().wait_for(LIMIT).unwrap(), *b"in place");
    // This also holds if the operation is dropped and nobody waits for its completion.
    let (c, d) = pair();
    let mut region = c.allocate::<u8>(8).unwrap();
    drop(c.send(&region).started());
    // Another thread frees it, although the connection is no longer used.
    let begin = Instant::now();
    while region.get_mut().is_none() {
        assert!(begin.elapsed() < LIMIT, "the region is kept");
        std::thread::yield_now();
    }
    drop(d);
}

#[test]
fn batches() {
    let (a, b) = pair();
    let there = b
        .share::<u64>(1000, Access::REMOTE_WRITE | Access::REMOTE_READ)
        .unwrap();
    let token = there.remote();
    let source = a.allocate::<u64>(1000).unwrap();
    let mut batch = a.batch();
    for round in 0..50_u64 {
        for i in 0..100 {
            source.set(i, round * 1000 + i as u64).unwrap();
            let (from, to) = (source.slice(i..=i).unwrap(), token.at(i).unwrap());
            batch.write(&from, &to).unwrap();
        }
        batch.write(&[round], &token.at(999).unwrap()).unwrap();
        let back = a.allocate::<u64>(100).unwrap();
        batch
            .read_into(&back, &token.slice(..100).unwrap())
            .unwrap();
        assert_eq!(batch.len(), 102);
        batch.submit().wait().unwrap();
        assert!(batch.is_empty());
        let expected: Vec<u64> = (0..100).map(|i| round * 1000 + i).collect();
        assert_eq!(back.to_vec().unwrap(), expected);
        assert_eq!(there.load(999).unwrap(), round);
    }
    batch.submit().wait().unwrap();
    for _ in 0..128 {
        batch.send("x").unwrap();
    }
    let full = batch.send("x");
    assert!(matches!(
        full,
        Err(Error::Refused(Refusal::BatchTooLong {
            requests: 129,
            room: 128
        }))
    ));
    let reader = std::thread::spawn(move || {
        for _ in 0..128 {
            assert_eq!(*b.recv().wait_for(LIMIT).unwrap(), *b"x");
        }
    });
    run(batch.submit().into_future()).unwrap();
    reader.join().unwrap();
}

/// Data of the program in a batch is copied into its requests.
#[test]
fn batch_copies_inline_data() {
    let (a, b) = pair_with(&Options::new().max_inline(16));
    let mut batch = a.batch();
    batch.send(&[1; 16]).unwrap();
    let refused = batch.send(&[2; 17]);
    let (octets, most) = (17, 16);
    let why = Refusal::TooLongToCopy { octets, most };
    assert!(matches!(refused, Err(Error::Refused(refused)) if refused == why));
    let region = a.allocate::<u8>(17).unwrap();
    batch.send(&region).unwrap();
    // A Read may fill its region partly or completely.
    let there = b.share::<u8>(18, Access::REMOTE_READ).unwrap().remote();
    let refused = batch.read_into(&region, &there);
    let (octets, room) = (18, 17);
    let why = Refusal::TooLong { octets, room };
    assert!(matches!(refused, Err(Error::Refused(refused)) if refused == why));
    let there = b.share::<u8>(17, Access::REMOTE_READ).unwrap();
    there.write_at(0, &[3; 17]).unwrap();
    let (whole, less) = (a.allocate(17).unwrap(), a.allocate(17).unwrap());
    batch.read_into(&whole, &there.remote()).unwrap();
    let part = there.remote().slice(..16).unwrap();
    batch.read_into(&less, &part).unwrap();
    batch.submit().wait_for(LIMIT).unwrap();
    assert_eq!(whole.to_vec().unwrap(), [3; 17]);
    assert_eq!(less.to_vec().unwrap()[15..], [3, 0]);
    assert_eq!(*b.recv().wait_for(LIMIT).unwrap(), [1; 16]);
    assert_eq!(*b.recv().wait_for(LIMIT).unwrap(), [0; 17]);
}

/// The depths limit the number of Reads in flight, and not the number of posted Reads.
#[test]
fn reads_of_each_depth() {
    for (inbound, outbound) in [(1, 1), (4096, 4096)] {
        let options = Options::new().message_size(100).reads(inbound, outbound);
        let (a, b) = pair_with(&options);
        assert_eq!(a.message_size(), 100);
        let table = b.share::<u64>(50, Access::REMOTE_READ).unwrap();
        (0..50).for_each(|i| table.set(i, i as u64).unwrap());
        let token = table.remote();
        let reads: Vec<_> = (0..50)
            .map(|i| a.get(&token.at(i).unwrap()).started())
            .collect();
        for (i, read) in (0..).zip(reads) {
            assert_eq!(read.wait().unwrap(), i);
        }
    }
    let none = Options::new().reads(0, 0);
    let (a, b) = pair_with(&none);
    let table = b.share::<u64>(1, Access::REMOTE_READ).unwrap();
    let refused = a.get(&table.remote()).wait_for(LIMIT);
    assert!(
        matches!(refused, Err(Error::Refused(Refusal::Post(_)))),
        "{refused:?}"
    );
    a.send("still here").wait_for(LIMIT).unwrap();
    assert_eq!(*b.recv().wait_for(LIMIT).unwrap(), *b"still here");
}

/// A batch holds its regions until it completes, and an error has the length of the whole batch.
#[test]
fn batch_keeps_regions_and_counts_bytes() {
    let (a, b) = pair();
    let rights = Access::REMOTE_WRITE | Access::REMOTE_READ;
    let there = b.share::<u64>(8, rights).unwrap();
    let token = there.remote();
    let mut batch = a.batch();
    for i in 0..8 {
        let source = a.allocate::<u64>(1).unwrap();
        source.set(0, i as u64 + 1).unwrap();
        batch.write(&source, &token.at(i).unwrap()).unwrap();
    }
    batch.submit().wait().unwrap();
    batch.write(&[0, 0], &token.slice(..2).unwrap()).unwrap();
    batch.clear();
    drop(there);
    let back = a.allocate::<u64>(1).unwrap();
    batch.read_into(&back, &token.at(0).unwrap()).unwrap();
    let failed = batch.submit().wait();
    let Err(Error::Operation(e)) = failed else {
        panic!("{failed:?}");
    };
    assert_eq!((e.request(), e.octets()), (RequestKind::Batch, 8));
}

/// If there is no listener, the error is a refused connection, and not a rejection by a program.
#[test]
fn closed_port_is_not_a_rejection() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let to = free.local_addr().unwrap();
    drop(free);
    let refused = Options::new().connect(to).wait();
    let Err(Error::Io(e)) = &refused else {
        panic!("{refused:?}");
    };
    assert_eq!(e.kind(), std::io::ErrorKind::ConnectionRefused);
}

#[test]
fn options_out_of_range_are_refused() {
    for options in [
        Options::new().send_depth(0),
        Options::new().message_size(63),
        Options::new().send_depth(1 << 20),
        Options::new().max_inline(1 << 20),
    ] {
        let listener = iwarp::listen("127.0.0.1:0").bind().unwrap();
        let result = options.connect(listener.local_addr()).wait();
        assert!(
            matches!(result, Err(Error::InvalidArgument(_))),
            "{result:?}"
        );
    }
    assert!(iwarp::connect("no colon").wait().is_err());
    assert!(matches!(
        iwarp::listen("192.0.2.1:0").bind(),
        Err(Error::NoDevice)
    ));
}

/// Private data is sent both ways, and a peer can be rejected.
#[test]
fn private_data_both_ways_and_reject() {
    let listener = iwarp::listen("127.0.0.1:0").private_data("welcome");
    let listener = listener.bind().unwrap();
    let to = listener.local_addr();
    let server = std::thread::spawn(move || {
        let first = listener.wait_incoming(Some(LIMIT)).unwrap();
        assert_eq!(first.private_data(), b"a stranger");
        first.reject("not you").unwrap();
        let second = listener.wait_incoming(Some(LIMIT)).unwrap();
        assert_eq!(second.private_data(), b"a friend");
        second.wait().unwrap()
    });
    let refused = iwarp::connect(to).private_data("a stranger").wait();
    assert!(matches!(refused, Err(Error::Rejected(why)) if why == b"not you"));
    let connection = iwarp::connect(to).private_data("a friend").wait().unwrap();
    assert_eq!(connection.private_data(), b"welcome");
    drop(server.join().unwrap());
    connection.closed().wait_for(LIMIT).unwrap();
}
