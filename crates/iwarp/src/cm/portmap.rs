//! The client of a port mapper on the peer's host (`iwpmd(8)`), which maps a listener's port to the
//! TCP port of an iWARP card.
//!
//! An iWARP card shares its host's IP address, but has a TCP stack of its own. Therefore the card
//! listens on a port that the host does not use, and a daemon on UDP port 3935 maps the program's
//! port to the card's. The connecting end sends a request with the program's port. The reply is an
//! accept with the card's port, or a reject if the port is not mapped. The connecting end then
//! sends an acknowledgement, so that the daemon stops repeating the reply. No RFC describes this
//! protocol; the messages are those of rdma-core's daemon. Our own ports need no mapping, because
//! they are TCP ports of the host.
//!
//! A request has 64 octets; other messages have 48. The fields, in network byte order, are: version
//! (2 bits, 0), type (2 bits), IP version (4 bits); a time (8 bits, 0); the connecting end's mapped
//! port (0 except in requests); the accepting end's port; the connecting end's port; an association
//! handle of 64 bits; and addresses of 16 octets each, IPv4 in the first four octets: the
//! connecting end's, the accepting end's, and in requests the connecting end's mapped address.

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
/// Number of requests without a reply after which the port is considered not mapped.
const REQUESTS: u32 = 4;

/// The result of a look-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    /// No reply yet. The caller waits for the socket, and calls [`Lookup::retry`] after [`PAUSE`].
    Wait,
    /// The address to connect to.
    At(SocketAddr),
}

/// A look-up of one port. No call blocks.
#[derive(Debug)]
pub(crate) struct Lookup {
    socket: UdpSocket,
    request: Message,
    sent: u32,
}

impl Lookup {
    /// Sends a request to the mapper at UDP port `port` of the peer's host. The connection will be
    /// made from `local`.
    ///
    /// # Errors
    /// A socket cannot be created, or there is no route to the peer.
    pub(crate) fn start(
        peer: SocketAddr,
        local: SocketAddr,
        port: u16,
        handle: u64,
    ) -> io::Result<Self> {
        let socket = UdpSocket::bind(SocketAddr::new(local.ip(), 0))?;
        socket.set_nonblocking(true)?;
        // A connected socket receives only the mapper's messages, and an ICMP error if there is no
        // mapper.
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
        lookup.retry();
        Ok(lookup)
    }

    /// Repeats the request after a [`PAUSE`] without a reply. After [`REQUESTS`] requests, returns
    /// the program's port.
    pub(crate) fn retry(&mut self) -> Found {
        if self.sent == REQUESTS {
            return Found::At(self.request.accepting);
        }
        self.sent += 1;
        // If the request cannot be sent, the next retry sends it. `read_replies` reports an ICMP
        // error.
        let _ = self.socket.send(&self.request.octets());
        Found::Wait
    }

    /// Reads the messages that have arrived.
    pub(crate) fn read_replies(&mut self) -> Found {
        let unmapped = Found::At(self.request.accepting);
        let mut octets = [0; REQUEST_LEN];
        loop {
            let n = match self.socket.recv(&mut octets) {
                Ok(n) => n,
                // There is no daemon, so the port is not mapped.
                Err(e) if e.raw_os_error() == Some(Errno::CONNREFUSED.raw_os_error()) => {
                    return unmapped;
                }
                // There is no message yet, or the error does not concern the daemon.
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
    fn request_has_documented_layout() {
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

    /// Starts a look-up and a mapper that replies to its request with the messages that `answer`
    /// returns. Returns the mapper, the look-up and the request.
    fn look_up(answer: impl Fn(Message) -> Vec<Message>) -> (UdpSocket, Lookup, Message) {
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
        let (mapper, mut lookup, request) = look_up(|request| {
            let accept = Message {
                kind: Kind::Accept,
                accepting: "127.0.0.1:555".parse().unwrap(),
                ..request
            };
            // Only the last of these messages is valid. Accepts without a port, messages of other
            // look-ups and peers, and requests are ignored.
            let without_port = Message {
                accepting: "127.0.0.1:0".parse().unwrap(),
                ..accept
            };
            vec![
                without_port,
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
        assert_eq!(
            lookup.read_replies(),
            Found::At("127.0.0.1:555".parse().unwrap())
        );
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
    fn unmapped_port_is_used_unchanged() {
        let peer = Found::At("127.0.0.1:18515".parse().unwrap());
        let (_mapper, mut lookup, _) = look_up(|request| {
            vec![Message {
                kind: Kind::Reject,
                ..request
            }]
        });
        assert_eq!(lookup.read_replies(), peer);
        // Without a reply the request is repeated, and then the program's port is used.
        let (mapper, mut lookup, request) = look_up(|_| Vec::new());
        for _ in 1..REQUESTS {
            assert_eq!(lookup.read_replies(), Found::Wait);
            assert_eq!(lookup.retry(), Found::Wait);
            let mut octets = [0; 100];
            let n = mapper.recv(&mut octets).unwrap();
            assert_eq!(Message::parse(&octets[..n]), Some(request));
        }
        assert_eq!(lookup.retry(), peer);
        // There is no mapper.
        let (mapper, mut lookup, _) = look_up(|_| Vec::new());
        drop(mapper);
        assert_eq!(lookup.retry(), Found::Wait);
        let end = std::time::Instant::now() + Duration::from_secs(10);
        while lookup.read_replies() == Found::Wait {
            assert!(std::time::Instant::now() < end);
        }
        assert_eq!(
            lookup.retry(),
            Found::Wait,
            "all requests were sent already"
        );
    }
}
