//! Tests of messages that are longer than a receive buffer, and of streams that send them.

use crate::channel::{channels, message, streams};
use crate::common::alone::path_of;
use crate::common::calls::{LIMIT, pair_with};
use iwarp::connection::Refusal;
use iwarp::{Access, Channel, Error, Options, RemoteRegion, Stream};
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

/// Both ends send messages of all lengths. The receiver keeps some of them for a while, and with
/// them their memory.
#[test]
fn short_and_long_messages_keep_order() {
    let lengths = [0, 70_000, 4088, 4089, MIB, 1, 65_536, 5000];
    let (a, b) = channels(&Options::new().send_depth(4));
    assert_eq!(a.max_len(), MIB);
    std::thread::scope(|scope| {
        for channel in [&a, &b] {
            scope.spawn(move || {
                for n in 0..80 {
                    let octets = message(n, lengths[n % 8]);
                    match n % 3 {
                        0 => channel.send(&octets).wait_for(LIMIT).unwrap(),
                        1 => channel.send(octets).wait_for(LIMIT).unwrap(),
                        _ => {
                            let region = channel.connection().allocate(octets.len()).unwrap();
                            region.write_at(0, &octets).unwrap();
                            channel.send(&region).wait_for(LIMIT).unwrap();
                        }
                    }
                }
                channel.finish().wait_for(LIMIT).unwrap();
            });
            scope.spawn(move || {
                let mut kept = Vec::new();
                for n in 0..80 {
                    let one = channel.recv().wait_for(LIMIT).unwrap().unwrap();
                    kept.push((n, one));
                    if kept.len() == 3 {
                        for (n, one) in kept.drain(..) {
                            assert!(*one == message(n, lengths[n % 8]), "message {n}");
                        }
                    }
                }
                drop(kept);
                assert!(channel.recv().wait_for(LIMIT).unwrap().is_none());
            });
        }
    });
}

#[test]
fn too_long_message_is_refused() {
    let (a, b) = channels(&Options::new());
    let refused = a.send(vec![1; MIB + 1]).wait().unwrap_err();
    let (octets, room) = (MIB as u64 + 1, MIB as u64);
    let expected = Refusal::TooLong { octets, room };
    assert!(
        matches!(&refused, Error::Refused(why) if *why == expected),
        "{refused}"
    );
    // A peer with few receives lends no memory, and gets none.
    let (few, many) = {
        let listener = Options::new().listen("127.0.0.1:0").bind().unwrap();
        let to = listener.local_addr();
        std::thread::scope(|scope| {
            let open = || Channel::open(listener.accept().wait().unwrap()).wait_for(LIMIT);
            let accepted = scope.spawn(open);
            let options = Options::new().receives(29);
            let connected = Channel::open(options.connect(to).wait().unwrap()).wait_for(LIMIT);
            (connected.unwrap(), accepted.join().unwrap().unwrap())
        })
    };
    for channel in [few, many] {
        assert_eq!(channel.max_len(), 4088);
        assert!(channel.send(vec![1; 4089]).wait().is_err());
    }
    drop(b);
}

/// While the program keeps all slots, the sender waits, and short messages behind it, too.
#[test]
fn kept_message_keeps_its_bytes() {
    let (a, b) = channels(&Options::new());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..40 {
                a.send(message(n, 50_000)).wait_for(LIMIT).unwrap();
            }
            a.send("last").wait_for(LIMIT).unwrap();
        });
        let first = b.recv().wait_for(LIMIT).unwrap().unwrap();
        let part = first.slice(100..200).unwrap();
        assert!(part.slice(..101).is_err());
        drop(first);
        for n in 1..40 {
            let one = b.recv().wait_for(LIMIT).unwrap().unwrap();
            assert!(*one == message(n, 50_000), "message {n}");
            let copy = one.clone();
            drop(one);
            assert!(*copy == message(n, 50_000));
        }
        assert_eq!(*b.recv().wait_for(LIMIT).unwrap().unwrap(), *b"last");
        assert!(*part == message(0, 50_000)[100..200]);
    });
}

/// The writer does nothing after its last write: nobody calls `flush`, and the reader is slow.
#[test]
fn gathered_writes_arrive_without_flush() {
    for len in [100, 65_536, MIB] {
        let (mut a, mut b) = streams();
        let data = message(len, 6 * MIB);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                data.chunks(len)
                    .for_each(|piece| a.write_all(piece).unwrap())
            });
            std::thread::sleep(Duration::from_millis(20));
            let mut back = vec![0; data.len()];
            for piece in back.chunks_mut(100_000) {
                b.read_exact(piece).unwrap();
            }
            assert!(back == data, "writes of {len}");
        });
        // A short write follows what was gathered.
        a.write_all(b"end").unwrap();
        let mut end = [0; 3];
        b.read_exact(&mut end).unwrap();
        assert_eq!(end, *b"end");
    }
}

/// A slow reader gets messages of all lengths in order: those that are gathered, and those that are
/// not.
#[test]
fn gathered_messages_keep_their_order() {
    let lens = [0, 1, 7, 8, 65_536, 4089, 131_072, 131_073, 300_000];
    let len = |n: usize| lens[n * 7 % lens.len()];
    let (a, b) = channels(&Options::new());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let region = a.connection().allocate::<u8>(MIB).unwrap();
            for n in 0..400 {
                let octets = message(n, len(n));
                match n % 5 {
                    0 => a.send(octets).wait_for(LIMIT).unwrap(),
                    1 => {
                        region.write_at(0, &octets).unwrap();
                        let part = region.slice(..octets.len()).unwrap();
                        a.send(part).wait_for(LIMIT).unwrap();
                    }
                    _ => a.send(&octets).wait_for(LIMIT).unwrap(),
                }
            }
            a.finish().wait_for(LIMIT).unwrap();
        });
        for n in 0..400 {
            if n % 60 == 0 {
                std::thread::sleep(Duration::from_millis(20));
            }
            let one = b.recv().wait_for(LIMIT).unwrap().unwrap();
            assert!(*one == message(n, len(n)), "message {n}");
        }
        assert!(b.recv().wait_for(LIMIT).unwrap().is_none());
    });
}

#[test]
fn small_messages_share_slots() {
    let (a, b) = channels(&Options::new());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..20_000u32 {
                a.send(&n.to_le_bytes()).wait_for(LIMIT).unwrap();
            }
        });
        for n in 0..20_000u32 {
            if n % 1000 == 0 {
                std::thread::sleep(Duration::from_millis(5));
            }
            let one = b.recv().wait_for(LIMIT).unwrap().unwrap();
            assert_eq!(*one, n.to_le_bytes());
        }
    });
    let stats = a.connection().stats();
    assert!(stats.sent.messages < 5000, "{stats:?}");
}

#[test]
fn dropped_stream_is_read_to_its_end() {
    let (mut a, mut b) = streams();
    let data = message(9, 5 * MIB + 77);
    let copy = data.clone();
    let writer = std::thread::spawn(move || {
        copy.chunks(65_536)
            .for_each(|piece| a.write_all(piece).unwrap());
    });
    std::thread::sleep(Duration::from_millis(20));
    let mut back = Vec::new();
    b.read_to_end(&mut back).unwrap();
    assert!(back == data, "{} octets", back.len());
    writer.join().unwrap();
}

/// Starts this test in another process, with the address of a listener in a variable, and accepts
/// its channel.
fn peer_process(test: &str, variable: &str) -> (Child, Channel) {
    let listener = iwarp::listen("127.0.0.1:0").bind().unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .arg(path_of(test))
        .args(["--exact", "--nocapture"])
        .env(variable, listener.local_addr().to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let connection = listener.accept().wait_for(LIMIT).unwrap();
    (child, Channel::open(connection).wait_for(LIMIT).unwrap())
}

/// The process exits without dropping the channel, whose last messages are gathered.
#[test]
fn exit_sends_gathered_messages() {
    const ADDRESS: &str = "TEST_RECEIVER";
    const COUNT: usize = 11;
    if let Ok(to) = std::env::var(ADDRESS) {
        let connection = iwarp::connect(to).wait().unwrap();
        let channel = Channel::open(connection).wait().unwrap();
        for n in 0..COUNT {
            channel.send(message(n, 60_000)).wait().unwrap();
        }
        std::process::exit(0);
    }
    let (mut child, channel) = peer_process("exit_sends_gathered_messages", ADDRESS);
    let mut kept = Vec::new();
    for n in 0..COUNT {
        if n == 2 {
            // The receiver keeps its memory until the sender has ended.
            let end = Instant::now() + LIMIT;
            while child.try_wait().unwrap().is_none() {
                if Instant::now() > end {
                    child.kill().unwrap();
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            assert!(child.wait().unwrap().success());
            kept.clear();
        }
        let one = channel.recv().wait_for(LIMIT).unwrap().unwrap();
        assert!(*one == message(n, 60_000), "message {n}");
        kept.push(one);
    }
    // The channel was not finished.
    assert!(channel.recv().wait_for(LIMIT).is_err());
}

/// The writing process exits while the reader has most of the data to read.
#[test]
fn process_exits_after_data_was_taken() {
    const ADDRESS: &str = "TEST_READER";
    let data = message(7, 7 * MIB);
    if let Ok(to) = std::env::var(ADDRESS) {
        let connection = iwarp::connect(to).wait().unwrap();
        let mut stream = Stream::from(Channel::open(connection).wait().unwrap());
        stream.write_all(&data).unwrap();
        return;
    }
    let (mut child, channel) = peer_process("process_exits_after_data_was_taken", ADDRESS);
    let mut stream = Stream::from(channel);
    let mut back = vec![0; data.len()];
    for piece in back.chunks_mut(MIB / 2) {
        std::thread::sleep(Duration::from_millis(5));
        stream.read_exact(piece).unwrap();
    }
    assert!(back == data);
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    assert!(child.wait().unwrap().success());
}

/// Returns a hello with which an end offers slots of one MiB.
fn hello() -> Vec<u8> {
    let mut octets = vec![1, 1, 0, 0, 0, 0, 0, 40];
    octets.extend(4096u32.to_be_bytes());
    octets.extend((1u32 << 20).to_be_bytes());
    octets
}

/// Returns the slots of a credit message: numbers and STags.
fn lent(credit: &[u8]) -> Vec<(u8, u32)> {
    assert_eq!(credit[0], 3, "{credit:?}");
    let slot = |slot: &[u8]| (slot[3], u32::from_be_bytes(slot[4..].try_into().unwrap()));
    credit[8..].chunks(8).map(slot).collect()
}

/// Returns a token for a MiB at tagged offset 0.
fn region_with(connection: &iwarp::Connection, stag: u32) -> RemoteRegion<u8> {
    let region = connection.share::<u8>(MIB, Access::REMOTE_WRITE).unwrap();
    let mut token = region.remote().to_bytes();
    token[..8].fill(0);
    token[16..20].copy_from_slice(&stag.to_be_bytes());
    RemoteRegion::from_bytes(&token).unwrap()
}

/// Returns the immediate data that announces `len` octets in a slot.
const fn announce(slot: u32, len: u32) -> u32 {
    slot << 24 | (len - 1)
}

/// A channel whose peer is a connection that sends raw messages, and has four slots.
struct Victim {
    peer: iwarp::Connection,
    channel: Channel,
    slots: Vec<RemoteRegion<u8>>,
}

impl Victim {
    fn new() -> Self {
        let (peer, end) = pair_with(&Options::new());
        peer.send(hello()).wait().unwrap();
        let channel = Channel::open(end).wait_for(LIMIT).unwrap();
        drop(peer.recv().wait_for(LIMIT).unwrap());
        peer.send(&[5, 0, 0, 0, 0, 0, 0, 0]).wait().unwrap();
        let credit = {
            let mut waiting = channel.recv();
            loop {
                if let Some(credit) = peer.recv().now().unwrap() {
                    break credit;
                }
                let nothing = std::pin::Pin::new(&mut waiting);
                let context = &mut std::task::Context::from_waker(std::task::Waker::noop());
                assert!(Future::poll(nothing, context).is_pending());
            }
        };
        let slots = lent(&credit);
        assert_eq!(slots.len(), 4);
        let slots = slots.iter().map(|(_, stag)| region_with(&peer, *stag));
        let slots = slots.collect();
        Self {
            peer,
            channel,
            slots,
        }
    }

    /// Writes an octet to the second slot, with this immediate data.
    fn write_announced(&self, immediate: u32) {
        let slot = self.slots[1].slice(..1).unwrap();
        drop(
            self.peer
                .write_with_immediate(&[2], &slot, immediate)
                .wait(),
        );
    }
}

/// A peer that breaks the rules of slots loses the connection, and changes no message.
#[test]
fn slot_violations_end_the_channel() {
    assert_eq!(announce(1, 1), 1 << 24);
    // What the peer does after it has written the slot with number 3.
    let misdeeds: [fn(&Victim); 6] = [
        // It announces a slot that it has announced already,
        |victim| victim.write_announced(3 << 24),
        // a slot that does not exist,
        |victim| victim.write_announced(9 << 24),
        // more than fits into a slot.
        |victim| victim.write_announced(1 << 24 | (1 << 20)),
        // It writes a slot after it has announced it, or beyond its end.
        |victim| {
            let slot = victim.slots[3].slice(..1).unwrap();
            drop(victim.peer.write(&[2], &slot).wait());
        },
        |victim| {
            let message = [3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0];
            drop(victim.peer.send(&message).wait());
        },
        // It announces several messages, of which the first exceeds what it has written.
        |victim| {
            let octets = [0, 0, 0, 9, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
            let slot = victim.slots[1].slice(..16).unwrap();
            let announced = 1 << 30 | announce(1, 16);
            let peer = &victim.peer;
            drop(peer.write_with_immediate(&octets, &slot, announced).wait());
        },
    ];
    for (i, misdeed) in misdeeds.iter().enumerate() {
        let victim = Victim::new();
        let first = victim.slots[3].slice(..3).unwrap();
        let (peer, channel) = (&victim.peer, &victim.channel);
        peer.write_with_immediate(b"abc", &first, announce(3, 3))
            .wait()
            .unwrap();
        let kept = channel.recv().wait_for(LIMIT).unwrap().unwrap();
        assert_eq!(*kept, *b"abc");
        misdeed(&victim);
        let error = channel.recv().wait_for(LIMIT).unwrap_err();
        let expected = match i {
            3 => matches!(error, Error::Operation(_)),
            _ => matches!(error, Error::Handshake(_)),
        };
        assert!(expected, "misdeed {i}: {error}");
        assert_eq!(*kept, *b"abc");
    }
}
