//! The client of a peer's port mapper (`iwpmd(8)`), which knows the real TCP port of a listener.
//!
//! iWARP cards share the address of their host but not its TCP. Therefore Linux lets a card listen
//! on a port of its own, and a daemon on UDP port 3935 maps the program's port to it. The
//! connecting peer sends a request with the program's port. The reply is an accept with the real
//! port, or a reject if the port is not mapped. The connecting peer then sends an acknowledgement,
//! so that the daemon stops repeating the reply. No RFC describes this; the messages here are those
//! of rdma-core's daemon. Our own ports need no mapping: they are TCP ports of the host.
//!
//! A message has 48 octets, a request 64, in network order: version (2 bits, 0), type (2 bits), IP
//! version (4 bits); a time, 0; the connecting peer's mapped port (requests only); the accepting
//! peer's port; the connecting peer's port; an association handle of 64 bits; addresses of 16
//! octets each, IPv4 in the first four: connecting, accepting, and in requests the connecting
//! peer's mapped one.

mod message;

use message::{Kind, Message, REQUEST_LEN};
use rustix::io::Errno;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// The pause before a request is repeated. The daemon repeats its messages each second, but a host
/// without a daemon should not cost much time.
pub(crate) const PAUSE: Duration = Duration::from_millis(500);
/// Requests that are sent before the port counts as not mapped.
const REQUESTS: u32 = 4;

/// The result of a look-up so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    /// No reply yet: wait for the socket, and call [`Lookup::again`] after [`PAUSE`].
    Wait,
    /// The address to connect to.
    At(SocketAddr),
}

/// A look-up of one port. It never blocks.
#[derive(Debug)]
pub(crate) struct Lookup {
    socket: UdpSocket,
    request: Message,
    sent: u32,
}

impl Lookup {
    /// Asks the mapper at `port` of the peer's host. The connection will come from `local`.
    ///
    /// # Errors
    /// No socket, or no route to the peer.
    pub(crate) fn start(
        peer: SocketAddr,
        local: SocketAddr,
        port: u16,
        handle: u64,
    ) -> io::Result<Self> {
        let socket = UdpSocket::bind(SocketAddr::new(local.ip(), 0))?;
        socket.set_nonblocking(true)?;
        // Only the peer's messages are received, and an unreachable port is an error.
        socket.connect(SocketAddr::new(peer.ip(), port))?;
        let connecting = SocketAddr::new(socket.local_addr()?.ip(), local.port());
        let mut lookup = Self {
            socket,
            request: Message {
                kind: Kind::Request,
                handle,
                connecting,
                accepting: peer,
            },
            sent: 0,
        };
        lookup.again();
        Ok(lookup)
    }

    /// Repeats the request after a [`PAUSE`] without a reply, or gives up.
    pub(crate) fn again(&mut self) -> Found {
        if self.sent == REQUESTS {
            return Found::At(self.request.accepting);
        }
        self.sent += 1;
        // A request that cannot be sent now is sent next time. The next `look` returns a refusal.
        let _ = self.socket.send(&self.request.octets());
        Found::Wait
    }

    /// Reads the messages that have come.
    pub(crate) fn look(&mut self) -> Found {
        let unmapped = Found::At(self.request.accepting);
        let mut octets = [0; REQUEST_LEN];
        loop {
            let n = match self.socket.recv(&mut octets) {
                Ok(n) => n,
                // There is no daemon, so nothing is mapped.
                Err(e) if e.raw_os_error() == Some(Errno::CONNREFUSED.raw_os_error()) => {
                    return unmapped;
                }
                // There is no message yet, or the error is not about the daemon.
                Err(_) => return Found::Wait,
            };
            let Some(message) = Message::parse(octets.get(..n).unwrap_or_default()) else {
                continue;
            };
            let ours = message.handle == self.request.handle
                && message.connecting == self.request.connecting;
            match message.kind {
                Kind::Accept if ours && message.accepting.port() != 0 => {
                    let ack = Message {
                        kind: Kind::Ack,
                        ..message
                    };
                    let _ = self.socket.send(&ack.octets());
                    return Found::At(message.accepting);
                }
                Kind::Reject if ours => return unmapped,
                _ => {}
            }
        }
    }
}

impl AsFd for Lookup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::message::MESSAGE_LEN;
    use super::*;

    const V4: &str = "192.0.2.7:18515";
    const OURS: &str = "192.0.2.1:40000";

    fn message(kind: Kind) -> Message {
        Message {
            kind,
            handle: 0x0102_0304_0506_0708,
            connecting: OURS.parse().unwrap(),
            accepting: V4.parse().unwrap(),
        }
    }

    #[test]
    fn octets_of_a_request() {
        let octets = message(Kind::Request).octets();
        let mut wanted = vec![
            0x04, 0, 0x9c, 0x40, 0x48, 0x53, 0x9c, 0x40, 1, 2, 3, 4, 5, 6, 7, 8,
        ];
        for ip in [[192, 0, 2, 1], [192, 0, 2, 7], [192, 0, 2, 1]] {
            wanted.extend(ip);
            wanted.extend([0; 12]);
        }
        assert_eq!(octets, wanted);
        assert_eq!(Message::parse(&octets), Some(message(Kind::Request)));
    }

    #[test]
    fn all_kinds_round_trip() {
        for (kind, first) in [
            (Kind::Accept, 0x14),
            (Kind::Ack, 0x24),
            (Kind::Reject, 0x34),
        ] {
            let octets = message(kind).octets();
            assert_eq!((octets.len(), octets[0]), (48, first));
            assert_eq!(octets[2..4], [0, 0]);
            assert_eq!(Message::parse(&octets), Some(message(kind)));
        }
        let v6 = Message {
            connecting: "[2001:db8::1]:1".parse().unwrap(),
            accepting: "[2001:db8::2]:2".parse().unwrap(),
            ..message(Kind::Accept)
        };
        assert_eq!(v6.octets()[0], 0x16);
        assert_eq!(Message::parse(&v6.octets()), Some(v6));
    }

    #[test]
    fn malformed_messages_are_ignored() {
        let good = message(Kind::Accept).octets();
        for len in 0..good.len() {
            assert_eq!(Message::parse(&good[..len]), None);
        }
        for first in [0x54, 0x94, 0x15, 0x10] {
            let mut bad = good.clone();
            bad[0] = first;
            assert_eq!(Message::parse(&bad), None, "{first:02x}");
        }
    }

    /// Starts a mapper that replies to the first request with the result of `answer`. Returns it,
    /// the look-up and the request.
    fn asked(answer: impl Fn(Message) -> Vec<Message>) -> (UdpSocket, Lookup, Message) {
        let mapper = UdpSocket::bind("127.0.0.1:0").unwrap();
        mapper
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        let port = mapper.local_addr().unwrap().port();
        let peer = "127.0.0.1:18515".parse().unwrap();
        let lookup = Lookup::start(peer, "127.0.0.1:40000".parse().unwrap(), port, 77).unwrap();
        let mut octets = [0; 100];
        let (n, from) = mapper.recv_from(&mut octets).unwrap();
        assert_eq!(n, REQUEST_LEN);
        let request = Message::parse(&octets[..n]).unwrap();
        assert_eq!(request.accepting, peer);
        for message in answer(request) {
            mapper.send_to(&message.octets(), from).unwrap();
        }
        (mapper, lookup, request)
    }

    #[test]
    fn accept_is_acknowledged() {
        let (mapper, mut lookup, request) = asked(|request| {
            let accept = Message {
                kind: Kind::Accept,
                accepting: "127.0.0.1:555".parse().unwrap(),
                ..request
            };
            // Messages without a port, of other look-ups and of other peers, and requests are
            // ignored.
            let nowhere = Message {
                accepting: "127.0.0.1:0".parse().unwrap(),
                ..accept
            };
            vec![
                nowhere,
                Message {
                    handle: 1,
                    ..accept
                },
                Message {
                    connecting: OURS.parse().unwrap(),
                    ..accept
                },
                Message {
                    kind: Kind::Reject,
                    handle: 1,
                    ..request
                },
                request,
                accept,
            ]
        });
        assert_eq!(lookup.look(), Found::At("127.0.0.1:555".parse().unwrap()));
        let mut octets = [0; 100];
        let n = mapper.recv(&mut octets).unwrap();
        let ack = Message::parse(&octets[..n]).unwrap();
        assert_eq!(
            (n, ack.kind, ack.handle),
            (MESSAGE_LEN, Kind::Ack, request.handle)
        );
        assert_eq!(ack.accepting.port(), 555);
    }

    #[test]
    fn unmapped_port_is_the_programs() {
        let peer = Found::At("127.0.0.1:18515".parse().unwrap());
        let (_mapper, mut lookup, _) = asked(|request| {
            vec![Message {
                kind: Kind::Reject,
                ..request
            }]
        });
        assert_eq!(lookup.look(), peer);
        // A silent mapper is asked again, and then given up.
        let (mapper, mut lookup, request) = asked(|_| Vec::new());
        for _ in 1..REQUESTS {
            assert_eq!(lookup.look(), Found::Wait);
            assert_eq!(lookup.again(), Found::Wait);
            let mut octets = [0; 100];
            let n = mapper.recv(&mut octets).unwrap();
            assert_eq!(Message::parse(&octets[..n]), Some(request));
        }
        assert_eq!(lookup.again(), peer);
        // There is no mapper.
        let (mapper, mut lookup, _) = asked(|_| Vec::new());
        drop(mapper);
        assert_eq!(lookup.again(), Found::Wait);
        let end = std::time::Instant::now() + Duration::from_secs(10);
        while lookup.look() == Found::Wait {
            assert!(std::time::Instant::now() < end);
        }
        assert_eq!(lookup.again(), Found::Wait, "the requests were not used up");
    }
}
