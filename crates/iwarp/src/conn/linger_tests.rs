//! How given-up streams end: what the peer gets, in which order, and when they are abandoned.

use super::*;
use crate::config::Config;
use crate::testing::{connected, context_with, queue_pair, until};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};

/// Serializes tests that read or change counts of the whole process.
static ALONE: Mutex<()> = Mutex::new(());

const LONG: Duration = Duration::from_secs(3600);

#[test]
fn checks_become_rare_without_patience() {
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

    fn full(patience: Duration) -> Self {
        let mut full = Self::new(patience);
        let mut refused = 0;
        while refused < 50 {
            match full.socket.stream.send(&[1; 4096]) {
                Ok(n) => (full.sent, refused) = (full.sent + n, 0),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock);
                    refused += 1;
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
        full
    }

    fn end_in_background(
        &self,
        cut: bool,
        delay: Option<Duration>,
        tail: usize,
    ) -> Option<Arc<Linger>> {
        let not_before = delay.map(|delay| Time::from_nanos(now_ns() + delay.as_nanos() as u64));
        let closing = Closing {
            socket: Arc::clone(&self.socket),
            end: StreamEnd::new(cut, not_before, UnsentTail::of(vec![7; tail])),
        };
        closing.run(&self.qp);
        self.lingering()
    }

    /// Returns the stream's entry among the lingering ones.
    fn lingering(&self) -> Option<Arc<Linger>> {
        let all = LINGERING.lock();
        let mut lives = all.iter().filter_map(Weak::upgrade);
        lives.find(|one| Arc::ptr_eq(&one.socket, &self.socket))
    }

    fn is_watched(&self, linger: &Linger) -> bool {
        let result = self
            .socket
            .engine
            .modify(&self.socket.stream, linger.token, Interest::READ);
        result.is_ok()
    }

    /// Reads everything to the end, which is a reset or a FIN.
    fn read_to_end(&mut self, tail: usize, reset: bool) {
        let mut octets = Vec::new();
        let end = self.peer.read_to_end(&mut octets);
        assert_eq!(octets.len(), self.sent + tail);
        assert!(octets[self.sent..].iter().all(|octet| *octet == 7));
        let end = end.err().map(|error| error.kind());
        assert_eq!(end, reset.then_some(ErrorKind::ConnectionReset));
    }

    fn is_quiet(&mut self) -> bool {
        self.peer.set_nonblocking(true).unwrap();
        let read = self.peer.read(&mut [0]);
        self.peer.set_nonblocking(false).unwrap();
        read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    }
}

/// The FIN is sent at once, and the descriptor is kept until the peer closes, too.
#[test]
fn stream_lingers_until_peer_closes() {
    let mut stream = Stream::new(LONG);
    let lingering = stream
        .end_in_background(false, None, 0)
        .expect("the peer is open");
    assert!(!lingering.fin_pending.load(Ordering::Relaxed) && !lingering.is_cut());
    assert_eq!(lingering.patience, PATIENCE_MAX);
    // Data that still comes is discarded.
    stream.peer.write_all(&[0; 100]).unwrap();
    until("the data does not arrive", || {
        Arc::clone(&lingering).ready(true, false, false);
        !stream.socket.stream.has_octets().unwrap()
    });
    assert!(stream.is_watched(&lingering));
    drop(lingering);
    stream.read_to_end(0, false);
    assert!(stream.lingering().is_some());
    stream.peer.shutdown(Shutdown::Write).unwrap();
    until("the descriptor is kept", || stream.lingering().is_none());
    // If the peer has closed already, the descriptor is not kept.
    let stream = Stream::new(LONG);
    stream.peer.shutdown(Shutdown::Write).unwrap();
    until("the stream is not closed", || {
        stream.socket.stream.peer_closed()
    });
    assert!(stream.end_in_background(false, None, 0).is_none());
}

/// The peer gets what was sent of a cut message, but must not take it for a complete one.
#[test]
fn cut_stream_is_reset_when_acknowledged() {
    let mut stream = Stream::new(LONG);
    // A reset is not delayed.
    assert!(stream.end_in_background(true, Some(LONG), 0).is_none());
    stream.read_to_end(0, true);
    let mut stream = Stream::full(LONG);
    let lingering = stream
        .end_in_background(true, Some(LONG), 0)
        .expect("octets wait");
    assert!(lingering.is_cut() && !lingering.fin_pending.load(Ordering::Relaxed));
    assert_eq!(lingering.patience, LONG);
    let in_socket = stream.socket.stream.unacknowledged_bytes().unwrap();
    assert!(lingering.progress.lock().unacknowledged >= in_socket);
    lingering.check_progress();
    assert!(stream.is_watched(&lingering));
    stream.read_to_end(0, true);
    until("the descriptor is kept", || !stream.is_watched(&lingering));
}

/// The tail is sent as the peer reads, even if the peer has closed its direction.
#[test]
fn tail_is_sent_before_fin() {
    for ends in [false, true] {
        let mut stream = Stream::full(LONG);
        let lingering = stream
            .end_in_background(false, None, 1000)
            .expect("a tail is pending");
        assert!(lingering.fin_pending.load(Ordering::Relaxed) && lingering.is_cut());
        assert_eq!(lingering.tail.lock().len(), 1000);
        assert_eq!(lingering.patience, LONG);
        if ends {
            stream.peer.shutdown(Shutdown::Write).unwrap();
            until("the stream is not closed", || {
                stream.socket.stream.peer_closed()
            });
            Arc::clone(&lingering).ready(true, false, false);
        }
        lingering.check_progress();
        assert_eq!(lingering.tail.lock().len(), 1000);
        // The socket's data and the tail count as not acknowledged.
        let before = lingering.progress.lock().unacknowledged;
        assert!(before >= stream.socket.stream.unacknowledged_bytes().unwrap() + 1000);
        stream.read_to_end(1000, false);
        until("the FIN is still pending", || {
            !lingering.fin_pending.load(Ordering::Relaxed)
        });
        assert!(!lingering.is_cut());
        lingering.check_progress();
        assert!(lingering.progress.lock().unacknowledged < before);
        if ends {
            until("the descriptor is kept", || !stream.is_watched(&lingering));
        }
    }
}

/// siw must not see the end too early.
#[test]
fn delayed_fin_waits() {
    for tail in [0, 1000] {
        let mut stream = match tail {
            0 => Stream::new(LONG),
            _ => Stream::full(LONG),
        };
        let lingering = stream
            .end_in_background(false, Some(LONG), tail)
            .expect("the FIN is pending");
        assert!(lingering.fin_pending.load(Ordering::Relaxed));
        // The limit begins with the FIN.
        assert!(lingering.progress.lock().since > Instant::now());
        let mut octets = vec![0; stream.sent + tail];
        stream.peer.read_exact(&mut octets).unwrap();
        until("the tail is not sent", || lingering.tail.lock().is_empty());
        Arc::clone(&lingering).ready(false, true, false);
        assert!(stream.is_quiet() && lingering.fin_pending.load(Ordering::Relaxed));
        Arc::clone(&lingering).timer(TIMER_SHUTDOWN);
        assert!(!lingering.fin_pending.load(Ordering::Relaxed));
        (stream.sent, octets) = (0, Vec::new());
        drop(octets);
        stream.read_to_end(0, false);
    }
    // The time of the FIN may come before the tail is sent.
    let mut stream = Stream::full(LONG);
    let lingering = stream
        .end_in_background(false, Some(LONG), 1000)
        .expect("the FIN is pending");
    Arc::clone(&lingering).timer(TIMER_SHUTDOWN);
    assert!(
        lingering.fin_pending.load(Ordering::Relaxed),
        "the tail is not sent"
    );
    stream.read_to_end(1000, false);
    until("the FIN is not sent", || {
        !lingering.fin_pending.load(Ordering::Relaxed)
    });
}

/// A tail is not kept forever, and the peer must see that something is missing.
#[test]
fn refused_tail_is_given_up() {
    let mut stream = Stream::full(Duration::ZERO);
    let lingering = stream.end_in_background(false, None, 1000);
    until("the tail is kept", || {
        lingering
            .as_ref()
            .is_none_or(|lingering| !stream.is_watched(lingering))
    });
    let mut octets = Vec::new();
    let end = stream.peer.read_to_end(&mut octets).unwrap_err();
    assert_eq!(end.kind(), ErrorKind::ConnectionReset);
    assert!(octets.len() <= stream.sent);
}

/// A stream whose peer may be out of reach lingers longer, unless descriptors become scarce.
#[test]
fn crowd_gives_silent_peer_no_time() {
    let _alone = ALONE.lock();
    let stream = Stream::new(Duration::ZERO);
    let lingering = stream
        .end_in_background(false, None, 0)
        .expect("the peer is open");
    let crowd = limits::descriptors() / 4 + 1;
    COUNT.fetch_add(crowd, Ordering::Relaxed);
    lingering.check_progress();
    COUNT.fetch_sub(crowd, Ordering::Relaxed);
    assert!(!stream.is_watched(&lingering));
}

/// Creates another entry for the stream of `lingering`.
fn another(lingering: &Linger) -> Arc<Linger> {
    Arc::new(Linger {
        socket: Arc::clone(&lingering.socket),
        token: lingering.engine.token(),
        engine: Arc::clone(&lingering.engine),
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
        fin_delayed: AtomicBool::new(false),
        fin_pending: AtomicBool::new(false),
    })
}

#[test]
fn dead_entries_are_removed() {
    let _alone = ALONE.lock();
    let stream = Stream::new(LONG);
    let lingering = stream
        .end_in_background(false, None, 0)
        .expect("the peer is open");
    let many: Vec<_> = (0..200).map(|_| another(&lingering)).collect();
    many.iter().for_each(register);
    let known = |one: &Arc<Linger>| {
        let weak = Arc::downgrade(one);
        LINGERING.lock().iter().any(|other| other.ptr_eq(&weak))
    };
    assert!(many.iter().all(known));
    assert!(COUNT.load(Ordering::Relaxed) >= 200);
    drop(many);
    // Other tests register few.
    assert!(COUNT.load(Ordering::Relaxed) < 100);
    let last = another(&lingering);
    register(&last);
    assert!(LINGERING.lock().len() < 100);
    assert!(known(&lingering) && known(&last));
    for _ in 0..200 {
        register(&another(&lingering));
    }
    assert!(LINGERING.lock().len() < 100);
    assert!(known(&lingering) && known(&last));
}

/// A peer that has closed needs no FIN, so the descriptor is closed although the FIN was delayed.
#[test]
fn closed_peer_ends_delayed_fin() {
    let stream = Stream::new(LONG);
    let lingering = stream
        .end_in_background(false, Some(LONG), 0)
        .expect("the FIN is pending");
    stream.peer.shutdown(Shutdown::Write).unwrap();
    until("the descriptor is kept", || !stream.is_watched(&lingering));
}

#[test]
fn oldest_live_stream_is_taken() {
    let stream = Stream::new(LONG);
    let lingering = stream
        .end_in_background(false, None, 0)
        .expect("the peer is open");
    let one = || {
        COUNT.fetch_add(1, Ordering::Relaxed);
        another(&lingering)
    };
    let lives = [one(), one()];
    let over = [one(), one(), one()].map(|one| Arc::downgrade(&one));
    let [first, second] = lives.each_ref().map(Arc::downgrade);
    let [a, b, c] = over;
    let mut all = VecDeque::from([a, b, first, c, second]);
    for expected in &lives {
        let oldest = take_oldest(&mut all).expect("a live stream");
        assert!(Arc::ptr_eq(&oldest, expected));
    }
    assert!(take_oldest(&mut all).is_none());
}

/// A peer that always takes a little makes progress, but the tail must not be kept forever.
#[test]
fn slow_reader_has_deadline() {
    let patience = Duration::from_millis(100);
    let mut stream = Stream::full(patience);
    let begin = Instant::now();
    let lingering = stream
        .end_in_background(false, None, 4 << 20)
        .expect("the tail is pending");
    let until = lingering.tail_until.expect("a deadline");
    assert!(until >= begin + patience * 12);
    assert!(until <= Instant::now() + patience * 12);
    let end = loop {
        assert!(
            Instant::now() < until + Duration::from_secs(20),
            "the tail is kept"
        );
        match stream.peer.read(&mut [0; 4096]) {
            Ok(0) => panic!("a cut Terminate looks complete"),
            Ok(_) => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => break error.kind(),
        }
    };
    assert_eq!(end, ErrorKind::ConnectionReset);
    // The deadline counts from the time of the FIN.
    let stream = Stream::full(patience);
    let lingering = stream
        .end_in_background(false, Some(LONG), 1000)
        .expect("the FIN is pending");
    let until = lingering.tail_until.expect("a deadline");
    assert!(until >= begin + LONG + patience * 12);
}
