//! Tests of channels and streams: order of messages, flow control, the end, and peers that violate
//! the protocol.

use crate::common::calls::{LIMIT, pair_with};
use iwarp::connection::Refusal;
use iwarp::{Access, Channel, Connection, Error, Options, Stream};
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

pub(crate) fn channels(options: &Options) -> (Channel, Channel) {
    let (a, b) = pair_with(options);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| Channel::open(b).wait_for(LIMIT).unwrap());
        let one = Channel::open(a).wait_for(LIMIT).unwrap();
        (one, other.join().unwrap())
    })
}

pub(crate) fn streams() -> (Stream, Stream) {
    let (a, b) = channels(&Options::new());
    (a.into(), b.into())
}

pub(crate) fn message(n: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (n * 31 + i) as u8).collect()
}

/// With few receives, both senders often have to wait for credit.
#[test]
fn messages_keep_order_with_few_receives() {
    for receives in [6, 7, 64] {
        let (a, b) = channels(&Options::new().receives(receives).send_depth(6));
        std::thread::scope(|scope| {
            for channel in [&a, &b] {
                scope.spawn(move || {
                    for n in 0..600 {
                        channel.send(message(n, n)).wait_for(LIMIT).unwrap();
                    }
                    channel.finish().wait_for(LIMIT).unwrap();
                    assert!(channel.send("late").wait().is_err());
                });
                scope.spawn(move || {
                    let mut kept = Vec::new();
                    for n in 0..600 {
                        let one = channel.recv().wait_for(LIMIT).unwrap().unwrap();
                        assert_eq!(*one, message(n, n), "message {n}");
                        // The program keeps some messages for a while, which delays their credits.
                        kept.push(one);
                        if kept.len() == 2 {
                            kept.clear();
                        }
                    }
                    kept.clear();
                    assert!(channel.recv().wait_for(LIMIT).unwrap().is_none());
                    assert!(channel.recv().wait_for(LIMIT).unwrap().is_none());
                });
            }
        });
    }
}

/// A sender waits for a slow receiver without a limit, although a Send without a receive would time
/// out.
#[test]
fn slow_receiver_is_awaited() {
    let mut config = iwarp::Config::default();
    config.receiver_not_ready = iwarp::ReceiverNotReady::Terminate;
    let (a, b) = channels(&Options::new().receives(8).config(config));
    let sender = std::thread::spawn(move || {
        for n in 0..100 {
            a.send(message(n, 100)).wait_for(LIMIT).unwrap();
        }
    });
    std::thread::sleep(Duration::from_millis(50));
    for n in 0..100 {
        assert_eq!(*b.recv().wait_for(LIMIT).unwrap().unwrap(), message(n, 100));
    }
    assert!(b.recv().wait_for(LIMIT).unwrap().is_none());
    sender.join().unwrap();
}

#[test]
fn regions_are_sent_as_they_are() {
    let (a, b) = channels(&Options::new().message_size(5008).receives(20));
    let region = a.connection().allocate::<u8>(6000).unwrap();
    region.write_at(0, &message(3, 6000)).unwrap();
    assert_eq!(a.max_len(), 5000);
    assert!(matches!(a.send(&region).wait(), Err(Error::Refused(_))));
    a.send(region.slice(..5000).unwrap()).wait().unwrap();
    let long = message(4, 5001);
    a.send(&long[..5000]).wait().unwrap();
    assert!(a.send(&long).wait().is_err());
    let one = b.recv().wait_for(LIMIT).unwrap().unwrap();
    assert_eq!(*one, message(3, 5000));
    assert_eq!(
        *b.recv().wait_for(LIMIT).unwrap().unwrap(),
        message(4, 5000)
    );
}

/// Copied data is limited by both ends' message sizes, a region only by the peer's.
#[test]
fn ends_have_own_message_sizes() {
    use std::io::{Read, Write};
    // With so few receives, there are no large messages.
    let options = Options::new().receives(29);
    let listener = options.clone().message_size(208).listen("127.0.0.1:0");
    let listener = listener.bind().unwrap();
    let connect = options.message_size(64);
    let connect = connect.connect(listener.local_addr());
    let (a, b) = std::thread::scope(|scope| {
        let open = || Channel::open(listener.accept().wait().unwrap()).wait_for(LIMIT);
        let accepted = scope.spawn(open);
        let connected = Channel::open(connect.wait().unwrap()).wait_for(LIMIT);
        (connected.unwrap(), accepted.join().unwrap().unwrap())
    });
    assert_eq!((a.max_len(), b.max_len()), (200, 56));
    let refused = |sent: iwarp::Result<()>| match sent {
        Err(Error::Refused(why)) => why,
        other => panic!("{other:?}"),
    };
    let copied = refused(a.send(&[1; 57]).wait());
    let (octets, most) = (57, 56);
    assert_eq!(copied, Refusal::TooLongToCopy { octets, most });
    let (octets, room) = (57, 56);
    let long = refused(b.send(&[1; 57]).wait());
    assert_eq!(long, Refusal::TooLong { octets, room });
    let region = a.connection().allocate::<u8>(200).unwrap();
    a.send(&[1; 56]).wait_for(LIMIT).unwrap();
    a.send(&region).wait_for(LIMIT).unwrap();
    b.send(&[2; 56]).wait_for(LIMIT).unwrap();
    for (from, octets) in [(&b, vec![1; 56]), (&b, vec![0; 200]), (&a, vec![2; 56])] {
        let message = from.recv().wait_for(LIMIT).unwrap().unwrap();
        assert_eq!(AsRef::<[u8]>::as_ref(&message), octets);
    }
    // A stream splits data into messages that fit both sizes.
    let data = message(5, 1000);
    let mut streams = [Stream::from(a), Stream::from(b)];
    for (from, to) in [(0, 1), (1, 0)] {
        streams[from].write_all(&data).unwrap();
        let mut back = vec![0; data.len()];
        streams[to].read_exact(&mut back).unwrap();
        assert_eq!(back, data);
    }
}

/// A channel sends the hello message first, and the finish message once.
#[test]
fn channel_finishes_once() {
    let (a, b) = pair_with(&Options::new());
    drop(Channel::open(b));
    assert!(matches!(a.recv().wait_for(LIMIT), Err(Error::Closed)));

    let hello = [1, 1, 0, 0, 0, 0, 0, 4, 0, 0, 0, 100];
    let finish = [4, 0, 0, 0, 0, 0, 0, 0];
    let end: [fn(Channel); 3] = [
        drop,
        |channel| channel.finish().wait_for(LIMIT).unwrap(),
        |channel| {
            let mut stream = Stream::from(channel);
            let runtime = tokio::runtime::Builder::new_current_thread().build();
            runtime.unwrap().block_on(async {
                tokio::io::AsyncWriteExt::shutdown(&mut stream)
                    .await
                    .unwrap();
                tokio::io::AsyncWriteExt::shutdown(&mut stream)
                    .await
                    .unwrap();
            });
        },
    ];
    for end in end {
        let (a, b) = pair_with(&Options::new());
        a.send(&hello).wait().unwrap();
        end(Channel::open(b).wait_for(LIMIT).unwrap());
        let answer = a.recv().wait_for(LIMIT).unwrap();
        assert_eq!(answer[..2], hello[..2]);
        assert_eq!(*a.recv().wait_for(LIMIT).unwrap(), finish);
        assert!(matches!(a.recv().wait_for(LIMIT), Err(Error::Closed)));
    }
}

/// If the peer disconnects without finishing the channel, receiving fails.
#[test]
fn end_without_finish_is_error() {
    let (a, b) = channels(&Options::new());
    a.send("first").wait().unwrap();
    a.connection().close().unwrap();
    assert_eq!(*b.recv().wait_for(LIMIT).unwrap().unwrap(), *b"first");
    assert!(b.recv().wait_for(LIMIT).is_err());
    assert!(b.send("x").wait_for(LIMIT).is_err());
    assert!(a.recv().wait_for(LIMIT).is_err());
}

/// Returns a hello message with a window of messages and the size of the longest one.
fn hello(window: u32, size: u32) -> Vec<u8> {
    let mut octets = vec![1, 1, 0, 0];
    octets.extend(window.to_be_bytes());
    octets.extend(size.to_be_bytes());
    octets
}

/// Opens a channel whose peer sends raw messages after its hello message.
fn channel_with_raw_peer(options: &Options) -> (Connection, Channel) {
    let (a, b) = pair_with(options);
    a.send(hello(4, 100)).wait().unwrap();
    let b = Channel::open(b).wait_for(LIMIT).unwrap();
    (a, b)
}

#[test]
fn invalid_hello_is_refused() {
    let first: [&[u8]; 8] = [
        &[],
        b"GET / HTTP/1.1",
        &hello(0, 100),
        &hello(1 << 20, 100),
        &hello(4, 8),
        &hello(4, 100)[..8],
        &[2, 0, 0, 0, 0, 0, 0, 0],
        &[1, 2, 0, 0, 0, 0, 0, 4, 0, 0, 0, 100],
    ];
    for octets in first {
        let (a, b) = pair_with(&Options::new());
        a.send(octets).wait().unwrap();
        let refused = Channel::open(b).wait_for(LIMIT);
        assert!(matches!(refused, Err(Error::Handshake(_))), "{octets:?}");
    }
}

#[test]
fn protocol_violations_end_the_channel() {
    let second: [&[u8]; 5] = [
        &hello(4, 100),
        &[3, 0, 0, 0, 0, 0, 0, 1],
        &[3, 0, 0, 0, 255, 255, 255, 255],
        &[2, 0, 1, 0, 0, 0, 0, 0],
        &[9, 0, 0, 0, 0, 0, 0, 0],
    ];
    for octets in second {
        let (a, b) = channel_with_raw_peer(&Options::new());
        a.send(&[2, 0, 0, 0, 0, 0, 0, 0, 7]).wait().unwrap();
        a.send(octets).wait().unwrap();
        // Messages before the violation are still received.
        assert_eq!(*b.recv().wait_for(LIMIT).unwrap().unwrap(), [7]);
        let broken = b.recv().wait_for(LIMIT);
        assert!(matches!(broken, Err(Error::Handshake(_))), "{octets:?}");
        assert!(b.send("x").wait_for(LIMIT).is_err());
    }
}

#[test]
fn data_after_finish_ends_the_channel() {
    let (a, b) = channel_with_raw_peer(&Options::new());
    a.send(&[4, 0, 0, 0, 0, 0, 0, 0]).wait().unwrap();
    a.send(&[2, 0, 0, 0, 0, 0, 0, 0]).wait().unwrap();
    let error = loop {
        match b.send("x").wait_for(LIMIT) {
            // Sending succeeds until the violation has arrived. There are credits for four
            // messages.
            Ok(()) => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Handshake(_)), "{error}");
}

/// The peer sends more messages than the window of two allows.
#[test]
fn exceeded_window_ends_the_channel() {
    let (a, b) = channel_with_raw_peer(&Options::new().receives(6));
    for _ in 0..6 {
        let _ = a.send(&[2, 0, 0, 0, 0, 0, 0, 0]).wait_for(LIMIT);
    }
    let mut kept = Vec::new();
    let error = loop {
        match b.recv().wait_for(LIMIT) {
            Ok(message) => kept.push(message),
            Err(error) => break error,
        }
        assert!(kept.len() < 3, "a third message was received");
    };
    assert!(matches!(error, Error::Handshake(_)), "{error}");
}

fn look<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

#[test]
fn cancelled_message_costs_no_credit() {
    let (a, b) = channels(&Options::new().receives(8).send_depth(4));
    for _ in 0..20 {
        // The message uses the only slot for data until its result is taken. The other slots are
        // for control messages.
        let mut first = a.send("first");
        let _ = look(&mut first);
        let mut second = a.send("given up");
        let _ = look(&mut second);
        drop(second);
        drop(first);
        a.send("mark").wait_for(LIMIT).unwrap();
        while *b.recv().wait_for(LIMIT).unwrap().unwrap() != *b"mark" {}
    }
}

#[test]
fn credits_are_sent_when_queue_has_room() {
    let options = Options::new().receives(8).send_depth(4);
    let (a, b) = channels(&options);
    let there = a
        .connection()
        .share::<u64>(1, Access::REMOTE_WRITE)
        .unwrap();
    let token = there.remote();
    for round in 0..6_u64 {
        let value = [round];
        let taken: Vec<_> = (0..4)
            .map(|_| b.connection().write(&value, &token).started())
            .collect();
        for n in 0..4 {
            a.send(message(n, n)).wait_for(LIMIT).unwrap();
        }
        for n in 0..4 {
            // Dropping a message frees a receive, for which the peer has to get a credit.
            assert_eq!(*b.recv().wait_for(LIMIT).unwrap().unwrap(), message(n, n));
        }
        for one in taken {
            one.wait_for(LIMIT).unwrap();
        }
        // This poll finds no message. It sends the credits, because the send queue has room again.
        assert!(look(&mut b.recv().into_future()).is_pending());
    }
}

#[test]
fn end_wakes_all_receivers() {
    let (a, b) = channels(&Options::new());
    std::thread::scope(|scope| {
        let waiting: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| b.recv().wait_for(LIMIT)))
            .collect();
        std::thread::sleep(Duration::from_millis(50));
        a.finish().wait_for(LIMIT).unwrap();
        for one in waiting {
            assert!(one.join().unwrap().unwrap().is_none());
        }
    });
}

#[test]
fn channel_needs_six_receives() {
    let (a, _b) = pair_with(&Options::new().receives(5));
    let refused = Channel::open(a).wait_for(LIMIT);
    assert!(matches!(refused, Err(Error::InvalidArgument(_))));
}

#[test]
fn a_stream_in_threads() {
    use std::io::{Read, Write};
    let (a, b) = streams();
    let data = message(1, 3_000_000);
    let ((mut from_a, mut to_b), (mut from_b, mut to_a)) = (a.into_split(), b.into_split());
    std::thread::scope(|scope| {
        for to in [&mut to_b, &mut to_a] {
            let data = &data;
            scope.spawn(move || {
                for piece in data.chunks(10_007) {
                    to.write_all(piece).unwrap();
                }
                to.flush().unwrap();
                assert_eq!(to.write(&[]).unwrap(), 0);
                to.finish().unwrap();
            });
        }
        for from in [&mut from_a, &mut from_b] {
            let data = &data;
            scope.spawn(move || {
                let mut back = Vec::new();
                from.read_to_end(&mut back).unwrap();
                assert!(back == *data, "{} octets", back.len());
            });
        }
    });
}

#[test]
fn finished_stream_can_still_read() {
    use std::io::{Read, Write};
    let (mut a, mut b) = streams();
    assert_eq!(b.read(&mut []).unwrap(), 0);
    a.write_all(b"all of it").unwrap();
    a.finish().unwrap();
    let mut text = String::new();
    b.read_to_string(&mut text).unwrap();
    assert_eq!(text, "all of it");
    assert!(a.write_all(b"more").is_err());
    b.write_all(b"thanks").unwrap();
    drop(b);
    text.clear();
    a.read_to_string(&mut text).unwrap();
    assert_eq!(text, "thanks");
}

#[test]
fn a_stream_in_tasks() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = { runtime }.worker_threads(2).enable_time().build().unwrap();
    runtime.block_on(async {
        let (a, mut b) = streams();
        // Reads without data, and into an empty buffer.
        let nothing = tokio::time::timeout(LIMIT, b.read(&mut []));
        assert_eq!(nothing.await.unwrap().unwrap(), 0);
        let (mut from, mut to) = tokio::io::split(a);
        let data = message(2, 1_000_000);
        let copy = data.clone();
        let writer = tokio::spawn(async move {
            to.write_all(&copy).await.unwrap();
            to.shutdown().await.unwrap();
            to.shutdown().await.unwrap();
        });
        let echo = tokio::spawn(async move {
            let mut all = Vec::new();
            b.read_to_end(&mut all).await.unwrap();
            b.write_all(&all).await.unwrap();
            b.flush().await.unwrap();
        });
        let mut back = Vec::new();
        let read = from.read_to_end(&mut back);
        tokio::time::timeout(LIMIT, read).await.unwrap().unwrap();
        assert!(back == data);
        writer.await.unwrap();
        echo.await.unwrap();
    });
}

#[test]
fn truncated_stream_is_error() {
    use std::io::{Read, Write};
    let (a, mut b) = streams();
    a.channel().connection().close().unwrap();
    let error = b.read_to_end(&mut Vec::new()).unwrap_err();
    let source = error.get_ref().unwrap().downcast_ref::<Error>().unwrap();
    assert!(
        matches!(source, Error::Closed | Error::Operation(_)),
        "{source}"
    );
    assert!(b.write_all(b"x").is_err());
}
