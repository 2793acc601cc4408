//! The requester: repeats its request until an answer arrives, and then adds the event.

use super::super::CmEventKind;
use super::super::id::{CmId, CmIdInner, engine};
use super::super::phase::Phase;
use super::DatagramEnd;
use crate::cm::CmEvent;
use crate::crc::crc32c_append;
use crate::engine::{Engine, Source};
use crate::error::Result;
use crate::objects::context::{Context, random_u64};
use crate::sys::address::canonical;
use crate::sys::clock::now_ns;
use crate::sys::poller::Interest;
use crate::sys::service::ServiceSocket;
use iwarp_proto::sidr::{Answer, Due, Heard, MESSAGE_LEN, Message, Patience, Refusal, Requester};
use parking_lot::Mutex;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Pauses before a request is repeated if no socket is bound to the peer's port. Some programs send
/// a port to their peer before they listen on it.
const REFUSED_PAUSES: [Duration; 4] = [
    Duration::from_millis(2),
    Duration::from_millis(8),
    Duration::from_millis(30),
    Duration::from_millis(60),
];
const TIMER_DUE: u32 = 0;
const TIMER_RESEND: u32 = 1;
/// Maximum number of messages read per call, so that other sockets are served in between.
const MESSAGES_PER_CALL: usize = 64;

struct State {
    requester: Requester,
    /// How often an ICMP error has reported that no socket is bound to the port.
    refused: usize,
    is_over: bool,
}

pub(in crate::cm) struct Asking {
    id: Weak<CmIdInner>,
    engine: Arc<Engine>,
    token: u64,
    socket: Arc<ServiceSocket>,
    /// The listener's address, as the socket reports it.
    peer: SocketAddr,
    private_data: Vec<u8>,
    state: Mutex<State>,
}

enum End {
    Answered(Answer, Vec<u8>),
    /// The errno, and the SIDR status if one corresponds to it.
    Unreachable(i32, Option<Refusal>),
}

impl Asking {
    pub(super) fn new(
        id: &CmId,
        ctx: &Context,
        socket: Arc<ServiceSocket>,
        peer: SocketAddr,
        private_data: &[u8],
    ) -> Result<Arc<Self>> {
        let config = ctx.config();
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let patience = Patience {
            silence_ns: ns(config.connect_timeout),
            answer_ns: ns(config.answer_timeout),
        };
        let requester = Requester::new(random_u64()?, patience, now_ns());
        // The size of the private data is checked before anything is sent.
        requester.request(crc32c_append, private_data)?;
        socket.connect(peer)?;
        let peer = socket.peer_addr()?;
        let engine = engine()?;
        let token = engine.token();
        Ok(Arc::new(Self {
            id: Arc::downgrade(&id.inner),
            engine,
            token,
            socket,
            peer,
            private_data: private_data.to_vec(),
            state: Mutex::new(State {
                requester,
                refused: 0,
                is_over: false,
            }),
        }))
    }

    /// Sends the first request. The result is reported by an event.
    pub(super) fn start(self: &Arc<Self>) -> Result<()> {
        let source = Arc::clone(self) as Arc<dyn Source>;
        self.engine
            .add(&*self.socket, self.token, Interest::READ, source)?;
        self.step();
        Ok(())
    }

    /// Ends the attempt without an event.
    pub(in crate::cm) fn cancel(&self) {
        self.state.lock().is_over = true;
        self.engine.remove(&*self.socket, self.token);
    }

    /// Repeats the request, or gives up, if it is time for that.
    fn step(&self) {
        let mut s = self.state.lock();
        if s.is_over {
            return;
        }
        let end = match s.requester.due(now_ns()) {
            Due::TimedOut => Some(End::Unreachable(libc::ETIMEDOUT, None)),
            Due::Wait(next) => {
                self.engine.at(next, self.token, TIMER_DUE);
                None
            }
            Due::Send(next) => {
                self.engine.at(next, self.token, TIMER_DUE);
                self.send(&mut s)
            }
        };
        self.finish(s, end);
    }

    /// Sends the request. Returns how the attempt ends, if no request can be sent.
    fn send(&self, s: &mut State) -> Option<End> {
        // The size of the private data was checked when the attempt began.
        let request = s
            .requester
            .request(crc32c_append, &self.private_data)
            .ok()?;
        match self.socket.send(&request) {
            Ok(()) => None,
            Err(e) => self.failed(s, &e),
        }
    }

    /// Handles a socket error. Most errors concern a single message, which is then treated as lost.
    fn failed(&self, s: &mut State, e: &io::Error) -> Option<End> {
        match (e.kind(), e.raw_os_error()) {
            (ErrorKind::ConnectionRefused, Some(errno)) => {
                let Some(pause) = REFUSED_PAUSES.get(s.refused) else {
                    return Some(End::Unreachable(errno, Some(Refusal::UNSUPPORTED)));
                };
                s.refused += 1;
                self.engine.after(*pause, self.token, TIMER_RESEND);
                None
            }
            (_, Some(errno @ (libc::ENETUNREACH | libc::EHOSTUNREACH))) => {
                Some(End::Unreachable(errno, None))
            }
            _ => {
                tracing::debug!(peer = %self.peer, error = %e, "cannot send the request");
                None
            }
        }
    }

    /// Reads the messages that have arrived. Returns how the attempt ends, if it has ended.
    fn read(&self, s: &mut State) -> Option<End> {
        let mut octets = [0; MESSAGE_LEN];
        for _ in 0..MESSAGES_PER_CALL {
            let arrival = match self.socket.receive(&mut octets) {
                Ok(Some(arrival)) => arrival,
                Ok(None) => return None,
                Err(e) => match self.failed(s, &e) {
                    None => continue,
                    end => return end,
                },
            };
            // Before the socket was connected, it may have received messages from other senders.
            let is_peer =
                (arrival.peer.ip(), arrival.peer.port()) == (self.peer.ip(), self.peer.port());
            if arrival.len != MESSAGE_LEN || !is_peer {
                continue;
            }
            let Ok(message) = Message::open(crc32c_append, &octets) else {
                continue;
            };
            match s.requester.hear(&message) {
                Heard::Nothing => {}
                Heard::Challenge => {
                    if let Some(end) = self.send(s) {
                        return Some(end);
                    }
                }
                Heard::Answer(answer) => {
                    return Some(End::Answered(answer, message.private_data.to_vec()));
                }
            }
        }
        None
    }

    /// If the attempt has ended, releases the lock and adds the event.
    fn finish(&self, mut s: parking_lot::MutexGuard<'_, State>, end: Option<End>) {
        let Some(end) = end else { return };
        s.is_over = true;
        drop(s);
        self.engine.remove(&*self.socket, self.token);
        if let Some(inner) = self.id.upgrade() {
            CmId { inner }.attempt_ended(self, end);
        }
    }
}

impl CmId {
    fn attempt_ended(&self, asking: &Asking, end: End) {
        let (phase, event) = match end {
            End::Answered(Answer::QueuePair { num, qkey }, private_data) => {
                let event = CmEvent {
                    private_data,
                    datagrams: Some(DatagramEnd {
                        ip: canonical(asking.peer).ip(),
                        num,
                        qkey,
                    }),
                    ..self.event(CmEventKind::Established, 0)
                };
                (Phase::Connected(true), event)
            }
            End::Answered(Answer::Refused(refusal), private_data) => {
                let event = CmEvent {
                    private_data,
                    replied: true,
                    service_status: refusal.code(),
                    ..self.event(CmEventKind::Unreachable, libc::ECONNREFUSED)
                };
                (Phase::Failed, event)
            }
            End::Unreachable(errno, refusal) => {
                let event = CmEvent {
                    service_status: refusal.map_or(0, Refusal::code),
                    ..self.event(CmEventKind::Unreachable, errno)
                };
                (Phase::Failed, event)
            }
        };
        let mut s = self.inner.state.lock();
        // The phase is this attempt's, because no other attempt starts before this one has ended.
        if !matches!(s.phase, Phase::Asking(_)) {
            return;
        }
        // The caller has another handle to the attempt, so it is not dropped under the lock.
        s.phase = phase;
        self.give(s, event);
    }
}

impl Source for Asking {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        let mut s = self.state.lock();
        if !s.is_over {
            let end = self.read(&mut s);
            self.finish(s, end);
        }
        true
    }

    fn timer(self: Arc<Self>, kind: u32) {
        if kind == TIMER_DUE {
            return self.step();
        }
        let mut s = self.state.lock();
        if !s.is_over {
            let end = self.send(&mut s);
            self.finish(s, end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cm::create_event_channel;
    use crate::sys::connect::Sharing;
    use iwarp_proto::sidr::Kind;
    use std::net::UdpSocket;

    /// Returns an attempt to a socket that does not answer. It has sent nothing yet.
    fn asking(peer: &UdpSocket) -> (CmId, Arc<Asking>) {
        let ctx = crate::testing::context();
        let id = CmId::create_for_datagrams(&create_event_channel().unwrap(), Some(&ctx));
        let own = ServiceSocket::bind(([127, 0, 0, 1], 0).into(), None, Sharing::Exclusive);
        let own = Arc::new(own.unwrap());
        let asking = Asking::new(&id, &ctx, own, peer.local_addr().unwrap(), b"").unwrap();
        (id, asking)
    }

    /// If no socket is bound to the port, a timer repeats the request until the attempt ends.
    #[test]
    fn refused_request_is_repeated() {
        let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
        let (_id, asking) = asking(&peer);
        peer.set_nonblocking(true).unwrap();
        let received = || peer.recv(&mut [0; MESSAGE_LEN]).is_ok();
        assert!(!received());
        Arc::clone(&asking).timer(TIMER_RESEND);
        assert!(received());
        asking.cancel();
        Arc::clone(&asking).timer(TIMER_RESEND);
        Arc::clone(&asking).timer(TIMER_DUE);
        assert!(!received());
    }

    /// Receives the request at the peer's socket. Returns the address of its sender, too.
    fn request(peer: &UdpSocket) -> ([u8; MESSAGE_LEN], SocketAddr) {
        let mut octets = [0; MESSAGE_LEN];
        peer.set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let (_, from) = peer.recv_from(&mut octets).unwrap();
        (octets, from)
    }

    #[test]
    fn messages_of_wrong_length_are_ignored() {
        let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
        let (_id, asking) = asking(&peer);
        let mut s = asking.state.lock();
        assert!(asking.send(&mut s).is_none());
        let (octets, from) = request(&peer);
        let request = Message::open(crc32c_append, &octets).unwrap();
        let sealed = |kind| {
            let message = Message {
                kind,
                cookie: 77,
                private_data: if kind == Kind::Challenge { b"" } else { b"yes" },
                ..request
            };
            message.seal(crc32c_append).unwrap()
        };
        let mut receive = |octets: &[u8]| {
            peer.send_to(octets, from).unwrap();
            asking.read(&mut s)
        };
        assert!(receive(&sealed(Kind::Challenge)).is_none());
        let (num, qkey) = (5, 6);
        let answer = sealed(Kind::Reply(Answer::QueuePair { num, qkey }));
        assert!(receive(&[&answer[..], &[0]].concat()).is_none(), "too long");
        assert!(receive(&answer[..MESSAGE_LEN - 1]).is_none(), "too short");
        let end = receive(&answer);
        let Some(End::Answered(Answer::QueuePair { num: 5, qkey: 6 }, data)) = end else {
            panic!("the answer is ignored");
        };
        assert_eq!(data, b"yes");
    }

    #[test]
    fn unreachable_peer_ends_the_attempt() {
        let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
        let (_id, asking) = asking(&peer);
        let mut s = asking.state.lock();
        let mut end = |errno| match asking.failed(&mut s, &io::Error::from_raw_os_error(errno)) {
            None => None,
            Some(End::Unreachable(errno, refusal)) => Some((errno, refusal)),
            Some(End::Answered(..)) => panic!("there was no answer"),
        };
        for unreachable in [libc::ENETUNREACH, libc::EHOSTUNREACH] {
            assert_eq!(end(unreachable), Some((unreachable, None)));
        }
        assert_eq!(end(libc::ENOBUFS), None);
        // Only the refusal after all pauses ends the attempt.
        let refused = libc::ECONNREFUSED;
        for _ in REFUSED_PAUSES {
            assert_eq!(end(refused), None);
        }
        assert_eq!(end(refused), Some((refused, Some(Refusal::UNSUPPORTED))));
    }
}
