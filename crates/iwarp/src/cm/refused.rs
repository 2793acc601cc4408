//! Connections whose request the program has rejected. They stay open until the initiator closes
//! them (RFC 5044 section 7.1.2, rules 4 and 5), for a limited time. A listener keeps a limited
//! number of them.
//!
//! The time limit is that of the start-up session in its state `Rejected`. The session itself is
//! not kept: what the initiator sends now does not matter, and a session holds a buffer for a
//! frame.

use crate::engine::{Engine, Source};
use crate::sys::poller::Interest;
use crate::sys::stream::TcpStream;
use iwarp_rnic::Time;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::sync::{Arc, Weak};

/// The rejected connections of one listener, the oldest first. It may outlive the listener, because
/// a request can be rejected later.
#[derive(Debug, Default)]
pub(super) struct RefusedList(Mutex<VecDeque<Weak<Refused>>>);

impl RefusedList {
    //= rfc5044 section 7.1.2
    //# If the
    //# MPA Request Frame is properly formatted but the Private Data is
    //# not acceptable, the implementation SHOULD return an MPA Reply
    //# Frame with the Rejected Connection bit set to '1'; the MPA
    //# Reply Frame MAY include ULP-supplied Private Data; the
    //# implementation MUST exit MPA, leaving the TCP connection open.
    /// Keeps `stream` open until the initiator closes it or the time `until` has come. If the
    /// listener then has more than `most` such streams, the oldest is closed: initiators that never
    /// close must not use up the descriptors of the process.
    ///
    /// siw as initiator closes by itself. It loses the private data of a rejection if the FIN comes
    /// in the same segment.
    pub(super) fn keep(&self, engine: &Arc<Engine>, stream: TcpStream, until: Time, most: usize) {
        let token = engine.token();
        let refused = Arc::new(Refused {
            engine: Arc::clone(engine),
            token,
            stream,
        });
        let source = Arc::clone(&refused) as Arc<dyn Source>;
        if engine
            .add(&refused.stream, token, Interest::READ, source)
            .is_err()
        {
            return;
        }
        let too_many = {
            let mut all = self.0.lock();
            all.retain(|refused| refused.strong_count() > 0);
            all.push_back(Arc::downgrade(&refused));
            all.len() > most
        };
        if too_many {
            self.close_oldest();
        }
        engine.at(until.as_nanos(), token, 0);
    }

    /// Closes the oldest connection. Returns `false` if there is none.
    pub(super) fn close_oldest(&self) -> bool {
        // The lock is dropped before the connection, which takes others.
        let oldest = loop {
            let Some(oldest) = self.0.lock().pop_front() else {
                return false;
            };
            if let Some(oldest) = oldest.upgrade() {
                break oldest;
            }
        };
        oldest.close();
        true
    }
}

#[derive(Debug)]
struct Refused {
    engine: Arc<Engine>,
    token: u64,
    stream: TcpStream,
}

impl Refused {
    /// Closes the descriptor as soon as it is not in use.
    fn close(&self) {
        self.engine.remove(&self.stream, self.token);
    }
}

impl Source for Refused {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        // Octets that stayed unread would turn the close into a reset.
        let mut sink = [0u8; 1024];
        match self.stream.recv(&mut sink) {
            Ok(1..) => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Ok(0) | Err(_) => self.close(),
        }
        true
    }

    fn timer(self: Arc<Self>, _: u32) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::clock::now_ns;
    use std::io::{Read, Write};
    use std::time::{Duration, Instant};

    const LIMIT: Duration = Duration::from_secs(20);

    /// Lets the list keep a connection for longer than any test takes. Returns its initiator.
    fn keep(list: &RefusedList, most: usize) -> std::net::TcpStream {
        keep_for(list, LIMIT * 100, most)
    }

    fn keep_for(list: &RefusedList, time: Duration, most: usize) -> std::net::TcpStream {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        peer.set_read_timeout(Some(LIMIT)).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        accepted.set_nonblocking(true).unwrap();
        let stream = TcpStream::from_socket(accepted.into()).unwrap();
        let until = Time::from_nanos(now_ns()).after(time);
        list.keep(&Engine::current().unwrap(), stream, until, most);
        peer
    }

    /// Returns which connections of the list are open.
    fn open(list: &RefusedList) -> Vec<bool> {
        let all = list.0.lock();
        all.iter().map(|one| one.strong_count() > 0).collect()
    }

    fn soon(what: &str, is: impl Fn() -> bool) {
        let end = Instant::now() + LIMIT;
        while !is() {
            assert!(Instant::now() < end, "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn only_open_connections_count() {
        let list = RefusedList::default();
        drop(keep(&list, 1));
        soon("it is closed with its initiator", || open(&list) == [false]);
        let mut second = keep(&list, 1);
        assert_eq!(open(&list), [true], "the other one is forgotten");
        let _third = keep(&list, 1);
        assert_eq!(second.read(&mut [0]).unwrap(), 0, "there are too many");
        assert_eq!(open(&list), [true]);
        assert!(list.close_oldest() && !list.close_oldest());
    }

    /// The time limit also holds for a connection for which another had to make room.
    #[test]
    fn overdue_connection_is_closed() {
        for others in 0..3 {
            let list = RefusedList::default();
            let kept: Vec<_> = (0..others).map(|_| keep(&list, 1)).collect();
            let mut last = keep_for(&list, Duration::from_millis(1), 1);
            assert_eq!(last.read(&mut [0]).unwrap(), 0, "beside {others}");
            soon("it is forgotten", || open(&list) == [false]);
            drop(kept);
        }
    }

    /// Whatever the initiator sends, the connection stays open until it closes or resets.
    #[test]
    fn initiator_ends_the_connection() {
        let list = RefusedList::default();
        let mut peer = keep(&list, 9);
        let refused = || list.0.lock()[0].upgrade();
        // There is nothing to read.
        refused().unwrap().ready(true, false, false);
        assert_eq!(open(&list), [true]);
        peer.write_all(&[7; 3000]).unwrap();
        let is_read =
            || refused().is_some_and(|refused| refused.stream.has_octets().is_ok_and(|has| !has));
        soon("it is read", is_read);
        assert_eq!(open(&list), [true]);
        let socket = socket2::SockRef::from(&peer);
        socket.set_linger(Some(Duration::ZERO)).unwrap();
        drop(peer);
        soon("a reset ends it", || open(&list) == [false]);
    }
}
