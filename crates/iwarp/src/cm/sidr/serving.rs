//! The listener: reads requests, passes them to the program, and sends its answers.

use super::super::id::{CmId, CmIdInner, engine, shared_context};
use super::super::phase::Phase;
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

/// Limits of the backlog, the number of requests that wait for the program's answer. Each such
/// request costs an identifier and an event.
const BACKLOG_MIN: u32 = 128;
const BACKLOG_MAX: u32 = 65_536;
/// Maximum number of messages read per call, so that other sockets are served in between.
const MESSAGES_PER_CALL: usize = 64;

/// A listener for datagram requests.
pub(in crate::cm) struct Serving {
    token: u64,
    replier: Arc<Replier>,
}

/// The part of a listener that answers requests. Unanswered requests hold it, because their answers
/// have to be sent from the listener's port.
struct Replier {
    id: Weak<CmIdInner>,
    engine: Arc<Engine>,
    socket: Arc<ServiceSocket>,
    /// The only device for which the listener answers, if the program has chosen one.
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
        for _ in 0..MESSAGES_PER_CALL {
            match self.replier.socket.receive(&mut octets) {
                Ok(None) => break,
                Ok(Some(arrival)) => self.replier.arrived(&octets, &arrival),
                // The error concerns an earlier answer. Continue with the next message.
                Err(_) => {}
            }
        }
        true
    }

    fn timer(self: Arc<Self>, _: u32) {}
}

impl Replier {
    fn arrived(self: &Arc<Self>, octets: &[u8; MESSAGE_LEN], arrival: &Arrival) {
        let (MESSAGE_LEN, Some(to)) = (arrival.len, arrival.to) else {
            return;
        };
        if !self.peers.contains(arrival.peer.ip()) {
            return;
        }
        let request = match Message::open(crc32c_append, octets) {
            Ok(request) if request.kind == Kind::Request => request,
            _ => return,
        };
        let advice = self
            .requests
            .lock()
            .handle(arrival.peer, &request, now_ns());
        match advice {
            Advice::Ignore => {}
            Advice::Resend(reply) => self.send(&reply, to, arrival.peer),
            Advice::Challenge(cookie) => {
                let challenge = Message {
                    kind: Kind::Challenge,
                    cookie,
                    private_data: &[],
                    ..request
                };
                if let Ok(challenge) = challenge.seal(crc32c_append) {
                    self.send(&challenge, to, arrival.peer);
                }
            }
            Advice::New => self.deliver(&request, to, arrival.peer),
        }
    }

    /// Sends a message. If that fails, the message is lost, and the requester repeats its request.
    fn send(&self, octets: &[u8; MESSAGE_LEN], from: IpAddr, to: SocketAddr) {
        if let Err(error) = self.socket.send_from(octets, from, to) {
            tracing::debug!(%to, %error, "cannot send an answer");
        }
    }

    /// Returns the device that has a GID for this address. At other addresses of this host no queue
    /// pair receives datagrams.
    fn context_of(&self, ip: IpAddr) -> Result<Context> {
        let ctx = match &self.ctx {
            Some(ctx) => ctx.clone(),
            None => shared_context(&Device::by_address(ip)?)?,
        };
        let has_gid = |device: &Device| device.address(ip).is_some_and(|a| a.place.is_some());
        // The device may have got the address after it was opened.
        if has_gid(ctx.device()) || ctx.inner.device.current()?.is_some_and(|d| has_gid(&d)) {
            return Ok(ctx);
        }
        Err(Error::NoDevice)
    }

    /// Adds the event of a new request to the listener's channel.
    fn deliver(self: &Arc<Self>, request: &Message<'_>, to: IpAddr, peer: SocketAddr) {
        let mut asked = Asked {
            replier: Arc::clone(self),
            key: (peer, request.id),
            cookie: request.cookie,
            to,
            is_answered: false,
            origin: Origin::current_process(),
        };
        let listener = self.id.upgrade().map(|inner| CmId { inner });
        let (Some(listener), Ok(ctx)) = (listener, self.context_of(to)) else {
            tracing::debug!(%to, "a request arrived at an address without a device");
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

/// An unanswered request. Dropping it rejects it, except in a forked child.
pub(in crate::cm) struct Asked {
    replier: Arc<Replier>,
    key: Key,
    cookie: u64,
    to: IpAddr,
    is_answered: bool,
    origin: Origin,
}

impl Asked {
    /// Sends the answer, and stores it for repetitions of the request.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: the answer cannot be encoded. The request can still be answered.
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
        // In a forked child: the parent process will answer the request.
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

    /// The addresses of a device may change after it was opened. A listener answers at the
    /// addresses from the time of opening, and at the current ones.
    #[test]
    fn earlier_and_current_addresses_are_served() {
        let opened = testing::device_at(&["192.0.2.7"]);
        let ctx = Context::open(&opened, Config::default()).unwrap();
        let id = CmId::create_for_datagrams(&create_event_channel().unwrap(), Some(&ctx));
        id.bind(([127, 0, 0, 1], 0).into()).unwrap();
        id.listen(0).unwrap();
        let replier = match &id.inner.state.lock().phase {
            Phase::Serving(serving) => Arc::clone(&serving.replier),
            _ => unreachable!("the identifier listens"),
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

    /// If the program does not answer, or its answer cannot be encoded, the request is rejected, so
    /// that the peer stops repeating it.
    #[test]
    fn unanswered_request_is_rejected() {
        const DESTINATION: [u8; 4] = [127, 0, 0, 1];
        let too_long = [0; MESSAGE_LEN];
        let attempts: [Option<(u32, &[u8])>; 3] =
            [None, Some((1, &too_long)), Some((u32::MAX, &[]))];
        let ctx = testing::context();
        let id = CmId::create_for_datagrams(&create_event_channel().unwrap(), Some(&ctx));
        id.bind((DESTINATION, 0).into()).unwrap();
        id.listen(0).unwrap();
        let replier = match &id.inner.state.lock().phase {
            Phase::Serving(serving) => Arc::clone(&serving.replier),
            _ => unreachable!("the identifier listens"),
        };
        let peer = SocketAddr::from((DESTINATION, 9));
        for (number, attempt) in (1..).zip(attempts) {
            let handle = |cookie| {
                let request = Message {
                    kind: Kind::Request,
                    id: number,
                    cookie,
                    private_data: &[],
                };
                replier.requests.lock().handle(peer, &request, now_ns())
            };
            let Advice::Challenge(cookie) = handle(0) else {
                panic!("a request without a cookie is not challenged");
            };
            assert_eq!(handle(cookie), Advice::New);
            let mut asked = Asked {
                replier: Arc::clone(&replier),
                key: (peer, number),
                cookie,
                to: DESTINATION.into(),
                is_answered: false,
                origin: Origin::current_process(),
            };
            if let Some((num, private_data)) = attempt {
                let answer = Answer::QueuePair { num, qkey: 0 };
                assert!(asked.answer(answer, private_data).is_err());
            }
            assert_eq!(handle(cookie), Advice::Ignore, "the request still waits");
            drop(asked);
            let Advice::Resend(reply) = handle(cookie) else {
                panic!("no reply is stored: {number}");
            };
            let reply = Message::open(crc32c_append, &*reply).unwrap();
            let refused = Kind::Reply(Answer::Refused(Refusal::REJECTED));
            assert_eq!((reply.kind, reply.id), (refused, number));
        }
        id.destroy();
    }
}
