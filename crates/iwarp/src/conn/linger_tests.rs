//! How connections end that their queue pairs have left: what the peer gets, in which order, and when they are given up.

use super::*;
use crate::config::Config;
use crate::testing::{connected, context_with, queue_pair, until};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};

/// For tests that look at, or change, what counts for the whole process.
static ALONE: Mutex<()> = Mutex::new(());

const LONG: Duration = Duration::from_secs(3600);

#[test]
fn looks_become_rare_also_without_patience() {
    for cut in [false, true] {
        for patience in [Duration::ZERO, Duration::from_millis(1), PATIENCE_MAX] {
            let mut pause = first_pause(cut, patience);
            assert!(pause >= CUT_PAUSE_MIN, "{cut} {patience:?}");
            for _ in 0..10 {
                pause = next_pause(pause, cut, patience);
            }
            let longest = if cut {
                CUT_PAUSE_MAX
            } else {
                patience.max(CUT_PAUSE_MAX)
            };
            assert_eq!(pause, longest, "{cut} {patience:?}");
        }
    }
}

/// A connection that a queue pair has had.
struct Stream {
    qp: Arc<QpInner>,
    socket: Arc<Socket>,
    peer: TcpStream,
    /// Octets that the peer has not read.
    sent: usize,
}

impl Stream {
    fn new(patience: Duration) -> Self {
        let ctx = context_with(Config {
            linger: patience,
            ..Config::default()
        });
        let cq = ctx.create_cq(4, None).unwrap();
        let qp = queue_pair(&ctx, &cq, &cq);
        let peer = connected(&qp);
        let limit = Some(Duration::from_secs(20));
        peer.set_read_timeout(limit).unwrap();
        let socket = qp.inner.state.lock().detach().unwrap();
        Self {
            qp: Arc::clone(&qp.inner),
            socket,
            peer,
            sent: 0,
        }
    }

    /// The same, whose socket takes no more.
    fn full(patience: Duration) -> Self {
        let mut full = Self::new(patience);
        let mut in_vain = 0;
        while in_vain < 50 {
            match full.socket.stream.send(&[1; 4096]) {
                Ok(n) => (full.sent, in_vain) = (full.sent + n, 0),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock);
                    in_vain += 1;
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
        full
    }

    fn end_in_background(
        &self,
        cut: bool,
        early: Option<Duration>,
        tail: usize,
    ) -> Option<Arc<Linger>> {
        let not_before = early.map(|early| Time::from_nanos(now_ns() + early.as_nanos() as u64));
        let closing = Closing {
            socket: Arc::clone(&self.socket),
            end: StreamEnd::new(cut, not_before, UnsentTail::of(vec![7; tail])),
        };
        closing.run(&self.qp);
        self.left()
    }

    /// What is left of it.
    fn left(&self) -> Option<Arc<Linger>> {
        let left = LINGERING.lock();
        let mut lives = left.iter().filter_map(Weak::upgrade);
        lives.find(|one| Arc::ptr_eq(&one.socket, &self.socket))
    }

    fn is_watched(&self, linger: &Linger) -> bool {
        let result = self
            .socket
            .engine
            .modify(&self.socket.stream, linger.token, Interest::READ);
        result.is_ok()
    }

    /// Reads all octets and the end, which is a reset or is none.
    fn read_to_end(&mut self, tail: usize, reset: bool) {
        let mut octets = Vec::new();
        let end = self.peer.read_to_end(&mut octets);
        assert_eq!(octets.len(), self.sent + tail);
        assert!(octets[self.sent..].iter().all(|octet| *octet == 7));
        let end = end.err().map(|error| error.kind());
        assert_eq!(end, reset.then_some(ErrorKind::ConnectionReset));
    }

    /// Returns `true` if there is neither an octet nor the end.
    fn is_quiet(&mut self) -> bool {
        self.peer.set_nonblocking(true).unwrap();
        let read = self.peer.read(&mut [0]);
        self.peer.set_nonblocking(false).unwrap();
        read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    }
}

/// Nothing waits: the end is sent at once, and the descriptor stays until the peer ends its direction, too.
#[test]
fn a_stream_is_left_when_the_peer_ends_it() {
    let mut stream = Stream::new(LONG);
    let left = stream
        .end_in_background(false, None, 0)
        .expect("the peer is open");
    assert!(!left.waits.load(Ordering::Relaxed) && !left.is_cut());
    assert_eq!(left.patience, PATIENCE_MAX);
    // What it still says is thrown away.
    stream.peer.write_all(&[0; 100]).unwrap();
    until("it does not come", || {
        Arc::clone(&left).ready(true, false, false);
        !stream.socket.stream.has_octets().unwrap()
    });
    assert!(stream.is_watched(&left));
    drop(left);
    stream.read_to_end(0, false);
    assert!(stream.left().is_some());
    stream.peer.shutdown(Shutdown::Write).unwrap();
    until("it stays", || stream.left().is_none());
    // One whose peer has ended already is not kept.
    let stream = Stream::new(LONG);
    stream.peer.shutdown(Shutdown::Write).unwrap();
    until("it is open", || stream.socket.stream.peer_closed());
    assert!(stream.end_in_background(false, None, 0).is_none());
}

/// The peer must not take a message that was cut for the last one, and it gets what was sent of it.
#[test]
fn a_cut_stream_is_reset_when_the_peer_has_everything() {
    let mut stream = Stream::new(LONG);
    // There is no time before which a reset must not come.
    assert!(stream.end_in_background(true, Some(LONG), 0).is_none());
    stream.read_to_end(0, true);
    let mut stream = Stream::full(LONG);
    let left = stream
        .end_in_background(true, Some(LONG), 0)
        .expect("octets wait");
    assert!(left.is_cut() && !left.waits.load(Ordering::Relaxed));
    assert_eq!(left.patience, LONG);
    let waits = stream.socket.stream.unacknowledged_bytes().unwrap();
    assert!(left.progress.lock().unacknowledged >= waits);
    left.look();
    assert!(stream.is_watched(&left));
    stream.read_to_end(0, true);
    until("it stays", || !stream.is_watched(&left));
}

/// The rest goes out as the peer reads, and then the end, also if the peer has ended its own direction.
#[test]
fn the_rest_is_sent_before_the_end() {
    for ends in [false, true] {
        let mut stream = Stream::full(LONG);
        let left = stream
            .end_in_background(false, None, 1000)
            .expect("a rest waits");
        assert!(left.waits.load(Ordering::Relaxed) && left.is_cut());
        assert_eq!(left.tail.lock().len(), 1000);
        assert_eq!(left.patience, LONG);
        if ends {
            stream.peer.shutdown(Shutdown::Write).unwrap();
            until("it is open", || stream.socket.stream.peer_closed());
            Arc::clone(&left).ready(true, false, false);
        }
        left.look();
        assert_eq!(left.tail.lock().len(), 1000);
        // What is not acknowledged: octets in the socket, and the rest.
        let waits = left.progress.lock().unacknowledged;
        assert!(waits >= stream.socket.stream.unacknowledged_bytes().unwrap() + 1000);
        stream.read_to_end(1000, false);
        until("the end still waits", || {
            !left.waits.load(Ordering::Relaxed)
        });
        assert!(!left.is_cut());
        left.look();
        assert!(left.progress.lock().unacknowledged < waits);
        if ends {
            until("it stays", || !stream.is_watched(&left));
        }
    }
}

/// siw must not see the end too early.
#[test]
fn an_end_that_would_be_early_waits() {
    for tail in [0, 1000] {
        let mut stream = match tail {
            0 => Stream::new(LONG),
            _ => Stream::full(LONG),
        };
        let left = stream
            .end_in_background(false, Some(LONG), tail)
            .expect("it waits");
        assert!(left.waits.load(Ordering::Relaxed));
        // Its patience begins with the end.
        assert!(left.progress.lock().since > Instant::now());
        let mut octets = vec![0; stream.sent + tail];
        stream.peer.read_exact(&mut octets).unwrap();
        until("the rest waits", || left.tail.lock().is_empty());
        Arc::clone(&left).ready(false, true, false);
        assert!(stream.is_quiet() && left.waits.load(Ordering::Relaxed));
        Arc::clone(&left).timer(TIMER_SHUTDOWN);
        assert!(!left.waits.load(Ordering::Relaxed));
        (stream.sent, octets) = (0, Vec::new());
        drop(octets);
        stream.read_to_end(0, false);
    }
    // The time of the end may come before the rest is sent.
    let mut stream = Stream::full(LONG);
    let left = stream
        .end_in_background(false, Some(LONG), 1000)
        .expect("it waits");
    Arc::clone(&left).timer(TIMER_SHUTDOWN);
    assert!(left.waits.load(Ordering::Relaxed), "the rest is not sent");
    stream.read_to_end(1000, false);
    until("the end waits", || !left.waits.load(Ordering::Relaxed));
}

/// Octets that nobody takes are not kept for ever, and the peer must see that something is missing.
#[test]
fn a_rest_that_the_peer_does_not_take_is_given_up() {
    let mut stream = Stream::full(Duration::ZERO);
    let left = stream.end_in_background(false, None, 1000);
    until("it is kept", || {
        left.as_ref().is_none_or(|left| !stream.is_watched(left))
    });
    let mut octets = Vec::new();
    let end = stream.peer.read_to_end(&mut octets).unwrap_err();
    assert_eq!(end.kind(), ErrorKind::ConnectionReset);
    assert!(octets.len() <= stream.sent);
}

/// A connection whose peer may be out of reach waits for it, unless they are so many that descriptors become scarce.
#[test]
fn one_of_a_crowd_does_not_wait_for_a_peer_out_of_reach() {
    let _alone = ALONE.lock();
    let stream = Stream::new(Duration::ZERO);
    let left = stream
        .end_in_background(false, None, 0)
        .expect("the peer is open");
    let crowd = limits::descriptors() / 4 + 1;
    COUNT.fetch_add(crowd, Ordering::Relaxed);
    left.look();
    COUNT.fetch_sub(crowd, Ordering::Relaxed);
    assert!(!stream.is_watched(&left));
}

/// As the one that is left of this stream.
fn another(left: &Linger) -> Arc<Linger> {
    Arc::new(Linger {
        socket: Arc::clone(&left.socket),
        token: left.engine.token(),
        engine: Arc::clone(&left.engine),
        cut: false,
        patience: LONG,
        outage: LONG,
        progress: Mutex::new(Progress {
            unacknowledged: 0,
            since: Instant::now(),
            pause: LONG,
        }),
        tail: Mutex::default(),
        tail_until: None,
        early: AtomicBool::new(false),
        waits: AtomicBool::new(false),
    })
}

/// The list of those that were left does not grow with those that are over, and keeps the others.
#[test]
fn those_that_are_over_are_forgotten() {
    let _alone = ALONE.lock();
    let stream = Stream::new(LONG);
    let left = stream
        .end_in_background(false, None, 0)
        .expect("the peer is open");
    let many: Vec<_> = (0..200).map(|_| another(&left)).collect();
    many.iter().for_each(remember);
    let known = |one: &Arc<Linger>| {
        let weak = Arc::downgrade(one);
        LINGERING.lock().iter().any(|other| other.ptr_eq(&weak))
    };
    assert!(many.iter().all(known));
    assert!(COUNT.load(Ordering::Relaxed) >= 200);
    drop(many);
    // Other tests leave few.
    assert!(COUNT.load(Ordering::Relaxed) < 100);
    let last = another(&left);
    remember(&last);
    assert!(LINGERING.lock().len() < 100);
    assert!(known(&left) && known(&last));
    for _ in 0..200 {
        remember(&another(&left));
    }
    assert!(LINGERING.lock().len() < 100);
    assert!(known(&left) && known(&last));
}

/// A peer that has ended its direction waits for nothing more: the descriptor is given up although the end was put off.
#[test]
fn an_end_that_waits_is_given_up_with_the_peers() {
    let stream = Stream::new(LONG);
    let left = stream
        .end_in_background(false, Some(LONG), 0)
        .expect("it waits");
    stream.peer.shutdown(Shutdown::Write).unwrap();
    until("it stays", || !stream.is_watched(&left));
}

/// Where a descriptor is needed, the connections that are over have none to give.
#[test]
fn the_oldest_is_one_that_is_not_over() {
    let stream = Stream::new(LONG);
    let left = stream
        .end_in_background(false, None, 0)
        .expect("the peer is open");
    let one = || {
        COUNT.fetch_add(1, Ordering::Relaxed);
        another(&left)
    };
    let lives = [one(), one()];
    let over = [one(), one(), one()].map(|one| Arc::downgrade(&one));
    let [first, second] = lives.each_ref().map(Arc::downgrade);
    let [a, b, c] = over;
    let mut all = VecDeque::from([a, b, first, c, second]);
    for expected in &lives {
        let oldest = take_oldest(&mut all).expect("one is left");
        assert!(Arc::ptr_eq(&oldest, expected));
    }
    assert!(take_oldest(&mut all).is_none());
}

/// A peer that takes a little all the time makes progress, and yet the octets before a Terminate are not kept for ever.
#[test]
fn slow_reader_has_deadline() {
    let patience = Duration::from_millis(100);
    let mut stream = Stream::full(patience);
    let begin = Instant::now();
    let left = stream
        .end_in_background(false, None, 4 << 20)
        .expect("it waits");
    let until = left.tail_until.expect("a deadline");
    assert!(until >= begin + patience * 12);
    assert!(until <= Instant::now() + patience * 12);
    let end = loop {
        assert!(
            Instant::now() < until + Duration::from_secs(20),
            "it is kept"
        );
        match stream.peer.read(&mut [0; 4096]) {
            Ok(0) => panic!("a Terminate that was cut looks whole"),
            Ok(_) => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => break error.kind(),
        }
    };
    assert_eq!(end, ErrorKind::ConnectionReset);
    // The time does not begin before the end may be sent.
    let stream = Stream::full(patience);
    let left = stream
        .end_in_background(false, Some(LONG), 1000)
        .expect("it waits");
    let until = left.tail_until.expect("a deadline");
    assert!(until >= begin + LONG + patience * 12);
}
