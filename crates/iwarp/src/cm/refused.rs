//! Connections whose request was rejected. They stay open for a limited time, so that the initiator
//! can close them (RFC 5044 section 7.1.2, rules 4 and 5). A listener keeps a limited number of
//! them.
//!
//! The time limit is the one of the start-up session in its state `Rejected`. The session itself is
//! dropped, because it has a large buffer, and the initiator's octets are ignored now.

use crate::engine::{Engine, Source};
use crate::sys::poller::Interest;
use crate::sys::stream::TcpStream;
use iwarp_rnic::Time;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::sync::{Arc, Weak};

/// The rejected connections of one listener, oldest first. The list may outlive the listener,
/// because the program may reject a request after it has closed the listener.
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
    /// Keeps `stream` open until the initiator closes it, at most until the time `until`. If the
    /// list then has more than `max` connections, closes the oldest, so that initiators which never
    /// close do not exhaust the process's file descriptors.
    ///
    /// Linux siw as the initiator closes the connection itself. If a FIN arrives in the segment of
    /// the rejection, siw loses its private data.
    pub(super) fn keep(&self, engine: &Arc<Engine>, stream: TcpStream, until: Time, max: usize) {
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
            all.len() > max
        };
        if too_many {
            self.close_oldest();
        }
        engine.at(until.as_nanos(), token, 0);
    }

    /// Closes the oldest connection. Returns `false` if there is none.
    pub(super) fn close_oldest(&self) -> bool {
        // The lock is released before the connection is dropped, because the drop takes other
        // locks.
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
    /// Removes the socket from the engine, which closes it when no thread uses it.
    fn close(&self) {
        self.engine.remove(&self.stream, self.token);
    }
}

impl Source for Refused {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        // Closing a socket with unread octets would reset the connection.
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

    /// Adds a connection with a time limit longer than the test. Returns its initiator's socket.
    fn keep(list: &RefusedList, max: usize) -> std::net::TcpStream {
        keep_for(list, LIMIT * 100, max)
    }

    fn keep_for(list: &RefusedList, time: Duration, max: usize) -> std::net::TcpStream {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        peer.set_read_timeout(Some(LIMIT)).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        accepted.set_nonblocking(true).unwrap();
        let stream = TcpStream::from_socket(accepted.into()).unwrap();
        let until = Time::from_nanos(now_ns()).after(time);
        list.keep(&Engine::current().unwrap(), stream, until, max);
        peer
    }

    /// Returns, for each connection in the list, whether it is open.
    fn open(list: &RefusedList) -> Vec<bool> {
        let all = list.0.lock();
        all.iter()
            .map(|refused| refused.strong_count() > 0)
            .collect()
    }

    fn wait_until(failure: &str, is: impl Fn() -> bool) {
        let end = Instant::now() + LIMIT;
        while !is() {
            assert!(Instant::now() < end, "{failure}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn limit_counts_open_connections_only() {
        let list = RefusedList::default();
        drop(keep(&list, 1));
        wait_until("the closed connection is still open", || {
            open(&list) == [false]
        });
        let mut second = keep(&list, 1);
        assert_eq!(
            open(&list),
            [true],
            "the closed connection is still in the list"
        );
        let _third = keep(&list, 1);
        assert_eq!(
            second.read(&mut [0]).unwrap(),
            0,
            "the oldest connection is open"
        );
        assert_eq!(open(&list), [true]);
        assert!(list.close_oldest() && !list.close_oldest());
    }

    /// A connection is closed at its time limit, also if others were closed to make room for it.
    #[test]
    fn overdue_connection_is_closed() {
        for others in 0..3 {
            let list = RefusedList::default();
            let kept: Vec<_> = (0..others).map(|_| keep(&list, 1)).collect();
            let mut last = keep_for(&list, Duration::from_millis(1), 1);
            assert_eq!(last.read(&mut [0]).unwrap(), 0, "beside {others}");
            wait_until("the connection is still open", || open(&list) == [false]);
            drop(kept);
        }
    }

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
        wait_until("the octets are not read", is_read);
        assert_eq!(open(&list), [true]);
        let socket = socket2::SockRef::from(&peer);
        socket.set_linger(Some(Duration::ZERO)).unwrap();
        drop(peer);
        wait_until("the connection is open after a reset", || {
            open(&list) == [false]
        });
    }
}
