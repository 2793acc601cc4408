//! The listener: reads requests, passes them to the program, and sends its answers.

use super::super::id::{CmId, CmIdInner, Phase, engine, shared_context};
use super::super::{CmEvent, CmEventKind};
use super::request_table::{Advice, Key, RequestTable};
use crate::admission::Networks;
use crate::crc::crc32c_append;
use crate::device::Device;
use crate::engine::{Engine, Source};
use crate::error::{Error, Result};
use crate::objects::context::Context;
use crate::sys::clock::now_ns;
use crate::sys::fork::Origin;
use crate::sys::poller::Interest;
use crate::sys::service::{Arrival, ServiceSocket};
use iwarp_proto::sidr::{Answer, Kind, MESSAGE_LEN, Message, Refusal};
use parking_lot::Mutex;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};

/// Limits of the number of requests that wait for an answer, whatever the program asks for. Each
/// request is an identifier and an event.
const BACKLOG_MIN: u32 = 128;
const BACKLOG_MAX: u32 = 65_536;
/// Messages that are read in a row before other sockets are served.
const TURN: usize = 64;

/// A listener's socket.
pub(in crate::cm) struct Serving {
    token: u64,
    replier: Arc<Replier>,
}

/// The part of a listener that answers requests. Requests keep it, and with it the socket and the
/// port, because answers have to come from there.
struct Replier {
    id: Weak<CmIdInner>,
    engine: Arc<Engine>,
    socket: Arc<ServiceSocket>,
    /// The device that the listener is confined to, if the program has chosen one.
    ctx: Option<Context>,
    peers: Networks,
    requests: Mutex<RequestTable>,
}

impl Serving {
    pub(super) fn start(
        id: &CmId,
        socket: Arc<ServiceSocket>,
        backlog: u32,
        ctx: Option<Context>,
        peers: Networks,
    ) -> Result<Arc<Self>> {
        let engine = engine()?;
        let token = engine.token();
        let waiting_max = backlog.clamp(BACKLOG_MIN, BACKLOG_MAX) as usize;
        let this = Arc::new(Self {
            token,
            replier: Arc::new(Replier {
                id: Arc::downgrade(&id.inner),
                engine: Arc::clone(&engine),
                socket,
                ctx,
                peers,
                requests: Mutex::new(RequestTable::new(waiting_max)),
            }),
        });
        let source = Arc::clone(&this) as Arc<dyn Source>;
        engine.add(&*this.replier.socket, token, Interest::READ, source)?;
        Ok(this)
    }

    pub(in crate::cm) fn stop(&self) {
        self.replier
            .engine
            .remove(&*self.replier.socket, self.token);
    }
}

impl Source for Serving {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        let mut octets = [0; MESSAGE_LEN];
        for _ in 0..TURN {
            match self.replier.socket.receive(&mut octets) {
                Ok(None) => break,
                Ok(Some(came)) => self.replier.arrived(&octets, &came),
                // The error is about an earlier answer. Messages that have come are still there.
                Err(_) => {}
            }
        }
        true
    }

    fn timer(self: Arc<Self>, _: u32) {}
}

impl Replier {
    fn arrived(self: &Arc<Self>, octets: &[u8; MESSAGE_LEN], came: &Arrival) {
        let (MESSAGE_LEN, Some(to)) = (came.len, came.to) else {
            return;
        };
        if !self.peers.contains(came.peer.ip()) {
            return;
        }
        let request = match Message::open(crc32c_append, octets) {
            Ok(request) if request.kind == Kind::Request => request,
            _ => return,
        };
        let advice = self.requests.lock().take(came.peer, &request, now_ns());
        match advice {
            Advice::Ignore => {}
            Advice::Again(reply) => self.send(&reply, to, came.peer),
            Advice::Challenge(cookie) => {
                let challenge = Message {
                    kind: Kind::Challenge,
                    cookie,
                    private_data: &[],
                    ..request
                };
                if let Ok(challenge) = challenge.seal(crc32c_append) {
                    self.send(&challenge, to, came.peer);
                }
            }
            Advice::New => self.deliver(&request, to, came.peer),
        }
    }

    /// Sends a message. If that fails, the message is lost, and the requester asks again.
    fn send(&self, octets: &[u8; MESSAGE_LEN], from: IpAddr, to: SocketAddr) {
        if let Err(error) = self.socket.send_from(octets, from, to) {
            tracing::debug!(%to, %error, "an answer is not sent");
        }
    }

    /// Returns the device that has this address among its GIDs. Datagrams to other addresses of
    /// this host would reach no queue pair.
    fn context_of(&self, ip: IpAddr) -> Result<Context> {
        let ctx = match &self.ctx {
            Some(ctx) => ctx.clone(),
            None => shared_context(&Device::by_address(ip)?)?,
        };
        let has_gid = |device: &Device| device.address(ip).is_some_and(|a| a.place.is_some());
        // The address may be newer than the context.
        if has_gid(ctx.device()) || ctx.inner.device.current()?.is_some_and(|d| has_gid(&d)) {
            return Ok(ctx);
        }
        Err(Error::NoDevice)
    }

    /// Notifies the program of a new request.
    fn deliver(self: &Arc<Self>, request: &Message<'_>, to: IpAddr, peer: SocketAddr) {
        let mut asked = Asked {
            replier: Arc::clone(self),
            key: (peer, request.id),
            cookie: request.cookie,
            to,
            is_answered: false,
            origin: Origin::here(),
        };
        let listener = self.id.upgrade().map(|inner| CmId { inner });
        let (Some(listener), Ok(ctx)) = (listener, self.context_of(to)) else {
            tracing::debug!(%to, "a request came to an address without a device");
            let answer = Answer::Refused(Refusal::UNSUPPORTED);
            // An answer without private data always fits.
            let _ = asked.answer(answer, &[]);
            return;
        };
        let mut local = SocketAddr::new(to, 0);
        if let (SocketAddr::V6(local), SocketAddr::V6(peer)) = (&mut local, peer) {
            local.set_scope_id(peer.scope_id());
        }
        let s = listener.inner.state.lock();
        if !matches!(s.phase, Phase::Serving(_)) {
            drop(s);
            return;
        }
        local.set_port(s.local.map_or(0, |a| a.port()));
        let channel = listener.channel();
        let id = CmId::of_datagram_request(&channel, ctx, self.ctx.is_some(), (local, peer), asked);
        let event = CmEvent {
            listener: Some(listener.clone()),
            private_data: request.private_data.to_vec(),
            ..id.event(CmEventKind::ConnectRequest, 0)
        };
        listener.give(s, event);
    }
}

/// A peer's request. Dropping it rejects it, but not in a forked child.
pub(in crate::cm) struct Asked {
    replier: Arc<Replier>,
    key: Key,
    cookie: u64,
    to: IpAddr,
    is_answered: bool,
    origin: Origin,
}

impl Asked {
    /// Sends the answer, and keeps it in case the request comes again.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: the answer cannot be sent; the request stays.
    pub(super) fn answer(&mut self, answer: Answer, private_data: &[u8]) -> Result<()> {
        let (peer, id) = self.key;
        let reply = Message {
            kind: Kind::Reply(answer),
            id,
            cookie: self.cookie,
            private_data,
        };
        let reply = reply.seal(crc32c_append)?;
        self.is_answered = true;
        let now = now_ns();
        self.replier
            .requests
            .lock()
            .answer(self.key, Box::new(reply), now);
        self.replier.send(&reply, self.to, peer);
        Ok(())
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        // In a forked child the request is the parent's, which will answer it.
        if !self.is_answered && !self.origin.is_foreign() {
            let _ = self.answer(Answer::Refused(Refusal::REJECTED), &[]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cm::create_event_channel;
    use crate::config::Config;
    use crate::testing;

    /// The device may have lost or got an address since it was opened. Queue pairs are reached at
    /// its earlier and at its present addresses.
    #[test]
    fn earlier_and_present_addresses_are_served() {
        let opened = testing::device_at(&["192.0.2.7"]);
        let ctx = Context::open(&opened, Config::default()).unwrap();
        let id = CmId::create_for_datagrams(&create_event_channel().unwrap(), Some(&ctx));
        id.bind(([127, 0, 0, 1], 0).into()).unwrap();
        id.listen(0).unwrap();
        let replier = match &id.inner.state.lock().phase {
            Phase::Serving(serving) => Arc::clone(&serving.replier),
            _ => unreachable!("it listens"),
        };
        for (ip, serves) in [
            ("192.0.2.7", true),
            ("127.0.0.1", true),
            ("192.0.2.8", false),
        ] {
            let found = replier.context_of(ip.parse().unwrap());
            match serves {
                true => assert!(found.is_ok(), "{ip}"),
                false => assert!(matches!(found, Err(Error::NoDevice)), "{ip}"),
            }
        }
        id.destroy();
    }

    /// If the program does not answer, or its answer cannot be sent, the request is rejected, so
    /// that the peer does not repeat it.
    #[test]
    fn unanswered_request_is_rejected() {
        const CAME_TO: [u8; 4] = [127, 0, 0, 1];
        let too_long = [0; MESSAGE_LEN];
        let attempts: [Option<(u32, &[u8])>; 3] =
            [None, Some((1, &too_long)), Some((u32::MAX, &[]))];
        let ctx = testing::context();
        let id = CmId::create_for_datagrams(&create_event_channel().unwrap(), Some(&ctx));
        id.bind((CAME_TO, 0).into()).unwrap();
        id.listen(0).unwrap();
        let replier = match &id.inner.state.lock().phase {
            Phase::Serving(serving) => Arc::clone(&serving.replier),
            _ => unreachable!("it listens"),
        };
        let peer = SocketAddr::from((CAME_TO, 9));
        for (number, attempt) in (1..).zip(attempts) {
            let take = |cookie| {
                let request = Message {
                    kind: Kind::Request,
                    id: number,
                    cookie,
                    private_data: &[],
                };
                replier.requests.lock().take(peer, &request, now_ns())
            };
            let Advice::Challenge(cookie) = take(0) else {
                panic!("it has no cookie yet");
            };
            assert_eq!(take(cookie), Advice::New);
            let mut asked = Asked {
                replier: Arc::clone(&replier),
                key: (peer, number),
                cookie,
                to: CAME_TO.into(),
                is_answered: false,
                origin: Origin::here(),
            };
            if let Some((num, private_data)) = attempt {
                let answer = Answer::QueuePair { num, qkey: 0 };
                assert!(asked.answer(answer, private_data).is_err());
            }
            assert_eq!(take(cookie), Advice::Ignore, "it still waits");
            drop(asked);
            let Advice::Again(reply) = take(cookie) else {
                panic!("it is not answered: {number}");
            };
            let reply = Message::open(crc32c_append, &*reply).unwrap();
            let refused = Kind::Reply(Answer::Refused(Refusal::REJECTED));
            assert_eq!((reply.kind, reply.id), (refused, number));
        }
        id.destroy();
    }
}
