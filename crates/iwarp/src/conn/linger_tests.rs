//! Tests of lingering streams: what the peer receives, and when the descriptor is closed.

use super::*;
use crate::config::Config;
use crate::testing::{connected, context_with, queue_pair, until};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};

/// Serializes tests that read or change counts of the whole process.
static SERIAL: Mutex<()> = Mutex::new(());

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
    /// Number of octets that were sent and that the peer has not read.
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

    fn with_full_socket(patience: Duration) -> Self {
        let mut stream = Self::new(patience);
        let mut refused = 0;
        while refused < 50 {
            match stream.socket.stream.send(&[1; 4096]) {
                Ok(n) => (stream.sent, refused) = (stream.sent + n, 0),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock);
                    refused += 1;
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
        stream
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
            end: StreamEnd::new(cut, not_before, UnsentTail::new(vec![7; tail])),
        };
        closing.run(&self.qp);
        self.lingering()
    }

    fn lingering(&self) -> Option<Arc<Linger>> {
        let all = LINGERING.lock();
        let mut live = all.iter().filter_map(Weak::upgrade);
        live.find(|linger| Arc::ptr_eq(&linger.socket, &self.socket))
    }

    fn is_watched(&self, linger: &Linger) -> bool {
        let result = self
            .socket
            .engine
            .modify(&self.socket.stream, linger.token, Interest::READ);
        result.is_ok()
    }

    fn read_to_end(&mut self, tail: usize, reset: bool) {
        let mut octets = Vec::new();
        let end = self.peer.read_to_end(&mut octets);
        assert_eq!(octets.len(), self.sent + tail);
        assert!(octets[self.sent..].iter().all(|octet| *octet == 7));
        let end = end.err().map(|error| error.kind());
        assert_eq!(end, reset.then_some(ErrorKind::ConnectionReset));
    }

    /// Returns `true` if the peer has neither data nor an end to read.
    fn is_quiet(&mut self) -> bool {
        self.peer.set_nonblocking(true).unwrap();
        let read = self.peer.read(&mut [0]);
        self.peer.set_nonblocking(false).unwrap();
        read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    }
}

/// The FIN is sent at once, and the descriptor stays open until the peer closes, too.
#[test]
fn stream_lingers_until_peer_closes() {
    let mut stream = Stream::new(LONG);
    let lingering = stream
        .end_in_background(false, None, 0)
        .expect("the peer is open");
    assert!(!lingering.fin_pending.load(Ordering::Relaxed) && !lingering.is_cut());
    assert_eq!(lingering.patience, PATIENCE_MAX);
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
    until("the descriptor stays open", || stream.lingering().is_none());
    // If the peer has closed already, the stream does not linger.
    let stream = Stream::new(LONG);
    stream.peer.shutdown(Shutdown::Write).unwrap();
    until("the stream is not closed", || {
        stream.socket.stream.peer_closed()
    });
    assert!(stream.end_in_background(false, None, 0).is_none());
}

/// The peer receives the data of a cut message. The reset shows that the message is incomplete.
#[test]
fn cut_stream_is_reset_when_acknowledged() {
    let mut stream = Stream::new(LONG);
    // A reset is not delayed.
    assert!(stream.end_in_background(true, Some(LONG), 0).is_none());
    stream.read_to_end(0, true);
    let mut stream = Stream::with_full_socket(LONG);
    let lingering = stream
        .end_in_background(true, Some(LONG), 0)
        .expect("data is unacknowledged");
    assert!(lingering.is_cut() && !lingering.fin_pending.load(Ordering::Relaxed));
    assert_eq!(lingering.patience, LONG);
    let in_socket = stream.socket.stream.unacknowledged_bytes().unwrap();
    assert!(lingering.progress.lock().unacknowledged >= in_socket);
    lingering.check_progress();
    assert!(stream.is_watched(&lingering));
    stream.read_to_end(0, true);
    until("the descriptor stays open", || {
        !stream.is_watched(&lingering)
    });
}

/// The tail is sent as the peer reads, even if the peer has closed its direction.
#[test]
fn tail_is_sent_before_fin() {
    for peer_closes in [false, true] {
        let mut stream = Stream::with_full_socket(LONG);
        let lingering = stream
            .end_in_background(false, None, 1000)
            .expect("a tail is pending");
        assert!(lingering.fin_pending.load(Ordering::Relaxed) && lingering.is_cut());
        assert_eq!(lingering.tail.lock().len(), 1000);
        assert_eq!(lingering.patience, LONG);
        if peer_closes {
            stream.peer.shutdown(Shutdown::Write).unwrap();
            until("the stream is not closed", || {
                stream.socket.stream.peer_closed()
            });
            Arc::clone(&lingering).ready(true, false, false);
        }
        lingering.check_progress();
        assert_eq!(lingering.tail.lock().len(), 1000);
        // Both the socket's data and the tail are unacknowledged.
        let before = lingering.progress.lock().unacknowledged;
        assert!(before >= stream.socket.stream.unacknowledged_bytes().unwrap() + 1000);
        stream.read_to_end(1000, false);
        until("the FIN is still pending", || {
            !lingering.fin_pending.load(Ordering::Relaxed)
        });
        assert!(!lingering.is_cut());
        lingering.check_progress();
        assert!(lingering.progress.lock().unacknowledged < before);
        if peer_closes {
            until("the descriptor stays open", || {
                !stream.is_watched(&lingering)
            });
        }
    }
}

/// The FIN may be delayed ([`MATURITY`]).
#[test]
fn delayed_fin_waits_for_its_timer() {
    for tail in [0, 1000] {
        let mut stream = match tail {
            0 => Stream::new(LONG),
            _ => Stream::with_full_socket(LONG),
        };
        let lingering = stream
            .end_in_background(false, Some(LONG), tail)
            .expect("the FIN is pending");
        assert!(lingering.fin_pending.load(Ordering::Relaxed));
        // The time limit for progress begins when the FIN is due.
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
    // If the FIN is due before the tail is sent, it waits for the tail.
    let mut stream = Stream::with_full_socket(LONG);
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

/// If the peer takes no data, the tail is dropped after a time. A reset shows the peer that data is
/// missing.
#[test]
fn unread_tail_is_dropped() {
    let mut stream = Stream::with_full_socket(Duration::ZERO);
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

/// A stream whose peer may be unreachable lingers longer, unless many streams linger.
#[test]
fn many_lingering_streams_end_extra_time() {
    let _serial = SERIAL.lock();
    let stream = Stream::new(Duration::ZERO);
    let lingering = stream
        .end_in_background(false, None, 0)
        .expect("the peer is open");
    let many = limits::descriptors() / 4 + 1;
    COUNT.fetch_add(many, Ordering::Relaxed);
    lingering.check_progress();
    COUNT.fetch_sub(many, Ordering::Relaxed);
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
    let _serial = SERIAL.lock();
    let stream = Stream::new(LONG);
    let lingering = stream
        .end_in_background(false, None, 0)
        .expect("the peer is open");
    let many: Vec<_> = (0..200).map(|_| another(&lingering)).collect();
    many.iter().for_each(register);
    let is_listed = |linger: &Arc<Linger>| {
        let weak = Arc::downgrade(linger);
        LINGERING.lock().iter().any(|entry| entry.ptr_eq(&weak))
    };
    assert!(many.iter().all(is_listed));
    assert!(COUNT.load(Ordering::Relaxed) >= 200);
    drop(many);
    assert!(COUNT.load(Ordering::Relaxed) < 100);
    let last = another(&lingering);
    register(&last);
    assert!(LINGERING.lock().len() < 100);
    assert!(is_listed(&lingering) && is_listed(&last));
    for _ in 0..200 {
        register(&another(&lingering));
    }
    assert!(LINGERING.lock().len() < 100);
    assert!(is_listed(&lingering) && is_listed(&last));
}

/// If the peer has closed, the descriptor is closed at once, although the FIN is delayed.
#[test]
fn closed_peer_ends_delayed_fin() {
    let stream = Stream::new(LONG);
    let lingering = stream
        .end_in_background(false, Some(LONG), 0)
        .expect("the FIN is pending");
    stream.peer.shutdown(Shutdown::Write).unwrap();
    until("the descriptor stays open", || {
        !stream.is_watched(&lingering)
    });
}

#[test]
fn oldest_live_stream_is_taken() {
    let stream = Stream::new(LONG);
    let lingering = stream
        .end_in_background(false, None, 0)
        .expect("the peer is open");
    let create = || {
        COUNT.fetch_add(1, Ordering::Relaxed);
        another(&lingering)
    };
    let live = [create(), create()];
    let [first, second] = live.each_ref().map(Arc::downgrade);
    let [a, b, c] = [create(), create(), create()].map(|dead| Arc::downgrade(&dead));
    let mut all = VecDeque::from([a, b, first, c, second]);
    for expected in &live {
        let oldest = take_oldest(&mut all).expect("a live stream");
        assert!(Arc::ptr_eq(&oldest, expected));
    }
    assert!(take_oldest(&mut all).is_none());
}

/// A peer that reads slowly makes progress, but the tail is dropped at its deadline.
#[test]
fn slow_reader_has_deadline() {
    let patience = Duration::from_millis(100);
    let mut stream = Stream::with_full_socket(patience);
    let start = Instant::now();
    let lingering = stream
        .end_in_background(false, None, 4 << 20)
        .expect("the tail is pending");
    let deadline = lingering.tail_until.expect("a deadline");
    assert!(deadline >= start + patience * 12);
    assert!(deadline <= Instant::now() + patience * 12);
    let end = loop {
        assert!(
            Instant::now() < deadline + Duration::from_secs(20),
            "the tail is kept"
        );
        match stream.peer.read(&mut [0; 4096]) {
            Ok(0) => panic!("a cut Terminate looks complete"),
            Ok(_) => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => break error.kind(),
        }
    };
    assert_eq!(end, ErrorKind::ConnectionReset);
    // The deadline is relative to the time when the FIN is due.
    let stream = Stream::with_full_socket(patience);
    let lingering = stream
        .end_in_background(false, Some(LONG), 1000)
        .expect("the FIN is pending");
    let deadline = lingering.tail_until.expect("a deadline");
    assert!(deadline >= start + LONG + patience * 12);
}
