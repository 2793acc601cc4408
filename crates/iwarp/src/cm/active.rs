//! The initiator: TCP connect, MPA request, reply (RFC 5044 section 7.1.2, RFC 6581 section 9).

use super::id::{CmId, CmIdInner, ConnectionParameters, Reply, engine};
use super::startup::{
    Read, Starting, depths, limits, local_params, private_data, record, stream_config,
};
use super::{CmEventKind, xrc};
use crate::cm::portmap::{self, Found, Lookup};
use crate::conn::infiniband::InfinibandParameters;
use crate::conn::qp::{CmSink, Handover, QueuePair, TIMERS_END};
use crate::engine::{Engine, Source};
use crate::error::{Error, Result};
use crate::objects::context::{Context, random_u64};
use crate::sys::clock::now_ns;
use crate::sys::connect::{Bound, Connect, Connecting, Ends, Sharing, connect};
use crate::sys::poller::Interest;
use crate::sys::stream::TcpStream;
use iwarp_proto::mpa::negotiate::Agreed;
use iwarp_proto::rdmap::TerminateCode;
use iwarp_rnic::Time;
use iwarp_rnic::startup::{Ending, Failure, Initiator, Outcome, Reading};
use parking_lot::Mutex;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::{Arc, Weak};
use std::time::Duration;

// The queue pair takes over the attempt's token and its remaining timers, so these differ from its
// own.
const TIMER_SESSION: u32 = TIMERS_END;
const TIMER_AGAIN: u32 = TIMERS_END + 1;
const TIMER_MAPPER: u32 = TIMERS_END + 2;
const _: () = assert!(
    TIMERS_END <= TIMER_SESSION && TIMER_SESSION < TIMER_AGAIN && TIMER_AGAIN < TIMER_MAPPER
);
/// Pauses before a refused TCP connect is tried again. Some programs send their peer a port and
/// listen on it only afterwards. On other networks the resolution of addresses takes longer than
/// that; here it does not.
const REFUSED_PAUSES: [Duration; 4] = [
    Duration::from_millis(2),
    Duration::from_millis(8),
    Duration::from_millis(30),
    Duration::from_millis(60),
];

enum Stage {
    New,
    /// The peer's port mapper was asked. The connection will use this socket.
    Mapper(Lookup, Bound),
    /// TCP was refused; a timer tries again.
    Refused,
    /// TCP is connecting.
    Tcp(Connecting),
    /// The request is sent.
    Reply(Box<Starting>),
    Done,
}

struct State {
    stage: Stage,
    session: Initiator,
    token: u64,
    /// The peer's address: the program's, unless a port mapper has returned another.
    target: SocketAddr,
    refused: usize,
}

pub(super) struct Active {
    id: Weak<CmIdInner>,
    ctx: Context,
    qp: QueuePair,
    /// The epoch of the queue pair that the attempt is for.
    epoch: u64,
    peer: SocketAddr,
    local: Option<SocketAddr>,
    infiniband: Option<InfinibandParameters>,
    engine: Arc<Engine>,
    state: Mutex<State>,
}

enum End {
    /// The event has been given.
    Established,
    Failed {
        kind: CmEventKind,
        status: i32,
        /// The private data of the peer's rejection, if there is one.
        refusal: Option<Vec<u8>>,
    },
}

enum Next {
    Wait,
    End(End),
    /// The peer has accepted.
    Answer(Box<Answer>),
}

/// An accepting reply.
struct Answer {
    starting: Starting,
    /// The engine watches the socket under this token.
    token: u64,
    agreed: Agreed,
    private_data: Vec<u8>,
}

impl End {
    const fn failed(kind: CmEventKind, status: i32) -> Self {
        Self::Failed {
            kind,
            status,
            refusal: None,
        }
    }

    /// Maps an error to an event as the kernel's iWARP connection manager does.
    fn of_io(e: &io::Error) -> Self {
        match e.raw_os_error() {
            Some(errno @ (libc::ECONNREFUSED | libc::ECONNRESET)) => {
                Self::failed(CmEventKind::Rejected, errno)
            }
            Some(errno @ (libc::ETIMEDOUT | libc::EHOSTUNREACH | libc::ENETUNREACH)) => {
                Self::failed(CmEventKind::Unreachable, errno)
            }
            errno => Self::failed(CmEventKind::ConnectError, errno.unwrap_or(libc::EIO)),
        }
    }
}

impl Active {
    pub(super) fn new(
        id: &CmId,
        ctx: &Context,
        (qp, epoch): (QueuePair, Option<u64>),
        peer: SocketAddr,
        local: Option<SocketAddr>,
        p: &ConnectionParameters,
    ) -> Result<Arc<Self>> {
        let params = local_params(ctx, p, Some(&qp.config()));
        let private_data = private_data(&qp, p);
        let limits = limits(ctx.config());
        let session = Initiator::new(params, &private_data, limits).map_err(|_| {
            Error::InvalidArgument("private data: at most 512 octets, 508 with revision 2")
        })?;
        Ok(Arc::new(Self {
            id: Arc::downgrade(&id.inner),
            ctx: ctx.clone(),
            epoch: epoch.unwrap_or_else(|| qp.epoch()),
            qp,
            peer,
            local,
            infiniband: p.infiniband,
            engine: engine()?,
            state: Mutex::new(State {
                stage: Stage::New,
                session,
                token: 0,
                target: peer,
                refused: 0,
            }),
        }))
    }

    /// Starts the TCP connect. Errors of the peer become events, even if they are known
    /// immediately.
    pub(super) fn start(self: &Arc<Self>, bound: Option<Bound>) -> Result<()> {
        let mut s = self.state.lock();
        let faults = self.ctx.inner.hooks.faults.as_ref();
        let refused = faults.and_then(|plan| plan.connect(self.peer));
        let next = match (refused, self.ctx.config().port_mapper) {
            (Some(errno), _) => Next::End(End::of_io(&io::Error::from_raw_os_error(errno))),
            (None, Some(port)) => self.ask_mapper(&mut s, bound, port)?,
            (None, None) => self.connect(&mut s, bound)?,
        };
        drop(s);
        if let Next::End(end) = next {
            self.finish(end);
        }
        Ok(())
    }

    fn connect(self: &Arc<Self>, s: &mut State, bound: Option<Bound>) -> Result<Next> {
        let attempt = match bound {
            Some(bound) => bound.connect(s.target),
            None => connect(s.target, self.local),
        };
        match attempt {
            Ok(connecting) => self.begin(s, connecting),
            Err(e) => Ok(self.not_connected(s, &e.into())),
        }
    }

    /// Asks the peer's port mapper for the listener. The question contains the local port, so the
    /// socket is bound first.
    fn ask_mapper(
        self: &Arc<Self>,
        s: &mut State,
        bound: Option<Bound>,
        port: u16,
    ) -> Result<Next> {
        let any = match self.peer {
            SocketAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
            SocketAddr::V6(_) => IpAddr::from(Ipv6Addr::UNSPECIFIED),
        };
        let bound = match bound {
            Some(bound) => bound,
            None => Bound::bind(
                self.local.unwrap_or(SocketAddr::new(any, 0)),
                None,
                Sharing::Exclusive,
            )
            .map_err(Error::from)?,
        };
        let local = bound.local_addr()?;
        let lookup = match Lookup::start(self.peer, local, port, random_u64()?) {
            Ok(lookup) => lookup,
            Err(error) => {
                tracing::debug!(peer = %self.peer, %error, "the port mapper cannot be asked");
                return self.connect(s, Some(bound));
            }
        };
        s.token = self.engine.token();
        self.engine.add(
            &lookup,
            s.token,
            Interest::READ,
            Arc::clone(self) as Arc<dyn Source>,
        )?;
        self.engine.after(portmap::PAUSE, s.token, TIMER_MAPPER);
        s.stage = Stage::Mapper(lookup, bound);
        Ok(Next::Wait)
    }

    /// Reads the mapper's answer. If it is `silent`, asks it again or gives up.
    fn mapper(
        self: &Arc<Self>,
        s: &mut State,
        mut lookup: Lookup,
        bound: Bound,
        silent: bool,
    ) -> Next {
        let mut found = lookup.look();
        if silent && found == Found::Wait {
            found = lookup.again();
            self.engine.after(portmap::PAUSE, s.token, TIMER_MAPPER);
        }
        match found {
            Found::Wait => {
                s.stage = Stage::Mapper(lookup, bound);
                Next::Wait
            }
            Found::At(target) => {
                self.engine.remove(&lookup, s.token);
                tracing::debug!(peer = %self.peer, %target, "the port mapper knows the listener");
                s.target = target;
                self.connect(s, Some(bound)).unwrap_or_else(|e| {
                    Next::End(End::failed(CmEventKind::ConnectError, e.errno()))
                })
            }
        }
    }

    /// Handles a connect that failed. A refused one is tried again a few times.
    fn not_connected(self: &Arc<Self>, s: &mut State, e: &io::Error) -> Next {
        let pause = REFUSED_PAUSES.get(s.refused).copied();
        let (Some(libc::ECONNREFUSED), Some(pause)) = (e.raw_os_error(), pause) else {
            return Next::End(End::of_io(e));
        };
        s.refused += 1;
        s.stage = Stage::Refused;
        s.token = self.engine.token();
        self.engine
            .add_timed(s.token, Arc::clone(self) as Arc<dyn Source>);
        self.engine.after(pause, s.token, TIMER_AGAIN);
        Next::Wait
    }

    fn again(self: &Arc<Self>) {
        let next = {
            let mut s = self.state.lock();
            if !matches!(s.stage, Stage::Refused) {
                return;
            }
            self.engine.forget(s.token);
            s.stage = Stage::Done;
            match connect(s.target, self.local) {
                Ok(connecting) => self.begin(&mut s, connecting).unwrap_or_else(|e| {
                    Next::End(End::failed(CmEventKind::ConnectError, e.errno()))
                }),
                Err(e) => self.not_connected(&mut s, &e.into()),
            }
        };
        if let Next::End(end) = next {
            self.finish(end);
        }
    }

    /// Continues with a TCP connect. To a peer on this host it has succeeded already, and the
    /// request is sent immediately, so that no other thread has to wake.
    fn begin(self: &Arc<Self>, s: &mut State, connecting: Connecting) -> Result<Next> {
        let octets = s.session.request();
        let (connecting, sent) = match connecting.send_now(octets) {
            Ok(now) => now,
            Err(e) => return Ok(self.not_connected(s, &e)),
        };
        s.token = self.engine.token();
        match connecting {
            Connect::Pending(connecting) => {
                self.watch(s, &connecting, Interest::WRITE)?;
                s.session.connecting(Time::from_nanos(now_ns()));
                self.set_timer(s);
                s.stage = Stage::Tcp(connecting);
            }
            Connect::Done(stream, ends) => {
                let starting = self.starting(stream, ends);
                if let Err(e) = starting.written(octets, sent) {
                    return Ok(Next::End(End::of_io(&e)));
                }
                self.watch(s, &starting.stream, Interest::READ)?;
                self.await_reply(s, starting);
            }
        }
        Ok(Next::Wait)
    }

    fn watch(self: &Arc<Self>, s: &State, fd: impl AsFd, interest: Interest) -> Result<()> {
        let source = Arc::clone(self) as Arc<dyn Source>;
        Ok(self.engine.add(fd, s.token, interest, source)?)
    }

    fn starting(&self, stream: TcpStream, ends: Ends) -> Box<Starting> {
        Box::new(Starting {
            flow: record(&self.ctx, &ends, true),
            stream,
            ends,
        })
    }

    /// Sets the timer for the session's next time limit.
    fn set_timer(&self, s: &State) {
        if let Some(at) = s.session.poll_at() {
            self.engine.at(at.as_nanos(), s.token, TIMER_SESSION);
        }
    }

    /// Waits for the reply to the request that was sent.
    fn await_reply(&self, s: &mut State, starting: Box<Starting>) {
        s.session.request_sent(Time::from_nanos(now_ns()));
        self.set_timer(s);
        s.stage = Stage::Reply(starting);
    }

    /// Ends the attempt without an event.
    pub(super) fn cancel(&self) {
        self.cancel_locked(&mut self.state.lock());
    }

    fn cancel_locked(&self, s: &mut State) {
        let token = s.token;
        match std::mem::replace(&mut s.stage, Stage::Done) {
            Stage::Tcp(c) => self.engine.remove(&c, token),
            Stage::Reply(starting) => {
                self.engine.remove(&starting.stream, token);
                starting.stream.abort();
            }
            Stage::Mapper(lookup, _) => self.engine.remove(&lookup, token),
            Stage::Refused => self.engine.forget(token),
            Stage::New | Stage::Done => {}
        }
    }

    fn connected(self: &Arc<Self>, s: &mut State, connecting: Connecting) -> Next {
        let token = s.token;
        let (stream, ends) = match connecting.try_finish() {
            Ok(Connect::Done(stream, ends)) => (stream, ends),
            Ok(Connect::Pending(connecting)) => {
                s.stage = Stage::Tcp(connecting);
                return Next::Wait;
            }
            Err(e) => {
                self.engine.forget(token);
                return self.not_connected(s, &e);
            }
        };
        let starting = self.starting(stream, ends);
        if let Err(e) = starting.write(s.session.request()) {
            self.engine.remove(&starting.stream, token);
            return Next::End(End::of_io(&e));
        }
        let _ = self.engine.modify(&starting.stream, token, Interest::READ);
        self.await_reply(s, starting);
        Next::Wait
    }

    fn reply(self: &Arc<Self>, s: &mut State, starting: Box<Starting>) -> Next {
        let token = s.token;
        let read = starting.read(&mut s.session);
        if let Read::NeedMore = read {
            s.stage = Stage::Reply(starting);
            return Next::Wait;
        }
        let private_data = s.session.private_data();
        if let Read::Frame(Outcome::Accepted(agreed)) = read
            && xrc::check(self.qp.xrc_end(), xrc::unwrap(private_data).0).is_ok()
        {
            // The socket stays watched: the queue pair takes the attempt's place.
            return Next::Answer(Box::new(Answer {
                starting: *starting,
                token,
                agreed,
                private_data: private_data.to_vec(),
            }));
        }
        self.engine.remove(&starting.stream, token);
        match read {
            // The ends do not fit together: one of them is not of an extended reliable connection.
            Read::Frame(Outcome::Accepted(_)) => {
                Next::End(End::failed(CmEventKind::ConnectError, libc::EPROTO))
            }
            //= rfc5044 section 7.1.2
            //= type=exception
            //= reason=neither rdma_cm(3) nor our interface can hand the TCP connection of a rejected attempt to the program, so the connection manager closes it in place of the program, which the RFC allows
            //# If the MPA Reply Frame is properly formatted but is the Private Data is not
            //# acceptable, or if the Rejected Connection bit is set to '1', the
            //# implementation MUST exit MPA, leaving the TCP connection open.
            Read::Frame(Outcome::Rejected { .. }) => Next::End(End::Failed {
                kind: CmEventKind::Rejected,
                status: libc::ECONNREFUSED,
                refusal: Some(private_data.to_vec()),
            }),
            Read::NeedMore => Next::Wait,
            Read::Bad(failure) => Next::End(self.refuse(&starting, &failure)),
            Read::Closed => self.retry_or_end(s, None),
            Read::Broken(e) => self.retry_or_end(s, Some(&e)),
        }
    }

    /// Handles a peer that has closed the stream instead of replying, as peers of revision 1 do on
    /// revision 2, or a stream that broke. Asks again on another connection if that may help.
    fn retry_or_end(self: &Arc<Self>, s: &mut State, broken: Option<&io::Error>) -> Next {
        let reset = [Some(libc::ECONNRESET), Some(libc::EPIPE)];
        match (s.session.peer_closed(), broken) {
            (Err(Failure::Closed { begun: true }), _) => {
                return Next::End(End::failed(CmEventKind::ConnectError, libc::ECONNRESET));
            }
            // A lost route or a program on this host has ended it, which says nothing about the
            // peer.
            (_, Some(e)) if !reset.contains(&e.raw_os_error()) => {
                return Next::End(End::of_io(e));
            }
            (Err(_), _) => {
                return Next::End(End::failed(CmEventKind::Rejected, libc::ECONNRESET));
            }
            (Ok(()), _) => {}
        }
        tracing::debug!(peer = %self.peer, "the peer closed instead of replying; asking again");
        let local = self.local.map(|l| SocketAddr::new(l.ip(), 0));
        match connect(s.target, local)
            .map_err(Error::from)
            .and_then(|c| self.begin(s, c))
        {
            Ok(next) => next,
            Err(e) => Next::End(End::failed(CmEventKind::ConnectError, e.errno())),
        }
    }

    /// Hands the stream of an accepting reply to the queue pair. The caller holds no locks, because
    /// the queue pair starts to work immediately.
    fn answered(self: &Arc<Self>, answer: Answer) -> End {
        let Answer {
            starting,
            token,
            agreed,
            private_data: received,
        } = answer;
        let (infiniband, private_data) = InfinibandParameters::split_from(xrc::unwrap(&received).1);
        let reply = Reply {
            private_data: private_data.to_vec(),
            infiniband,
        };
        let Some(id) = self.id.upgrade() else {
            self.engine.remove(&starting.stream, token);
            return End::failed(CmEventKind::ConnectError, libc::ECANCELED);
        };
        let id = CmId { inner: id };
        id.inner.state.lock().depths = Some(depths(&agreed));
        let mut handover = Handover {
            stream: starting.stream,
            ends: starting.ends,
            watched: Some(token),
            config: stream_config(&agreed, true, &self.ctx),
            flow: starting.flow,
            cm: Some(Arc::downgrade(&id.inner) as Weak<dyn CmSink>),
            epoch: Some(self.epoch),
            infiniband: self.infiniband,
        };
        // The first message would notify the peer that the connection is up.
        if agreed.peer_to_peer && id.has_stand_in() {
            self.engine.remove(&handover.stream, token);
            handover.watched = None;
            id.answered(handover, reply);
            return End::Established;
        }
        //= rfc5044 section 7.1
        //# A DDP endpoint MUST be "bound" to the MPA connection at entry to this phase.
        //= rfc5044 section 7.1.2
        //# If the MPA Reply Frame is properly formatted and the Private Data is
        //# acceptable, and the Reject Connection bit is set to '0', the implementation
        //# SHOULD enter Full MPA/DDP Operation Phase; interpreting any received data as
        //# FPDUs and sending DDP ULPDUs as FPDUs.
        // Before the event, because a program that gets it may post. If the connection ends before
        // the event, the identifier records that.
        if let Err(e) = self.qp.inner.attach(handover) {
            tracing::debug!(error = %e, "the queue pair does not take the connection");
            return End::failed(CmEventKind::ConnectError, e.errno());
        }
        if !id.established(reply) {
            // The identifier was destroyed meanwhile, perhaps because the queue pair was reset.
            self.qp.inner.fail_connection(self.epoch);
        }
        End::Established
    }

    /// Ends the stream of a reply that cannot be used.
    fn refuse(&self, starting: &Starting, failure: &Failure) -> End {
        tracing::debug!(peer = %self.peer, error = %failure, "unusable MPA reply");
        let ending = failure.ending();
        starting.end(ending, self.ctx.config().crc);
        let errno = match ending {
            Ending::Terminate(TerminateCode::MPA_INSUFFICIENT_IRD) => libc::ENOSPC,
            _ => libc::EPROTO,
        };
        End::failed(CmEventKind::ConnectError, errno)
    }

    /// Returns `true` if a step of the start-up has taken too long.
    fn is_late(&self, s: &mut State) -> bool {
        let now = Time::from_nanos(now_ns());
        let State { stage, session, .. } = s;
        let is_acknowledged = match stage {
            Stage::Tcp(_) => true,
            Stage::Reply(starting) => {
                let waiting = starting.stream.unacknowledged_bytes();
                !waiting.is_ok_and(|octets| octets > 0)
            }
            _ => return false,
        };
        // This is a timer of an earlier step. Another is set for this one.
        if session.poll_at().is_none_or(|at| at > now) {
            return false;
        }
        if session.on_time(now, || is_acknowledged).is_err() {
            return true;
        }
        self.set_timer(s);
        false
    }

    fn finish(&self, end: End) {
        let Some(inner) = self.id.upgrade() else {
            return;
        };
        if let End::Failed {
            kind,
            status,
            refusal,
        } = end
        {
            CmId { inner }.failed(kind, status, refusal);
        }
    }
}

impl Source for Active {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        // The lock is kept, so that neither `cancel` nor a timer finds the attempt between two
        // states.
        let next = {
            let mut s = self.state.lock();
            match std::mem::replace(&mut s.stage, Stage::Done) {
                Stage::Mapper(lookup, bound) => self.mapper(&mut s, lookup, bound, false),
                Stage::Tcp(connecting) => self.connected(&mut s, connecting),
                Stage::Reply(starting) => self.reply(&mut s, starting),
                // The token has only a timer, and no descriptor.
                Stage::Refused => {
                    s.stage = Stage::Refused;
                    Next::Wait
                }
                Stage::New | Stage::Done => Next::Wait,
            }
        };
        match next {
            Next::Wait => {}
            Next::End(end) => self.finish(end),
            Next::Answer(answer) => {
                let end = self.answered(*answer);
                self.finish(end);
            }
        }
        true
    }

    fn awaits(&self, kind: u32) -> bool {
        matches!(
            (&self.state.lock().stage, kind),
            (Stage::Tcp(_) | Stage::Reply(_), TIMER_SESSION)
                | (Stage::Refused, TIMER_AGAIN)
                | (Stage::Mapper(..), TIMER_MAPPER)
        )
    }

    fn timer(self: Arc<Self>, kind: u32) {
        if kind == TIMER_SESSION && self.awaits(kind) {
            // The process may have been stopped meanwhile, so the socket is read before the clock
            // counts.
            Arc::clone(&self).ready(true, true, false);
        }
        if kind == TIMER_AGAIN {
            self.again();
            return;
        }
        if kind == TIMER_MAPPER {
            let next = {
                let mut s = self.state.lock();
                match std::mem::replace(&mut s.stage, Stage::Done) {
                    Stage::Mapper(lookup, bound) => self.mapper(&mut s, lookup, bound, true),
                    other => {
                        s.stage = other;
                        Next::Wait
                    }
                }
            };
            if let Next::End(end) = next {
                self.finish(end);
            }
            return;
        }
        {
            let mut s = self.state.lock();
            if !self.is_late(&mut s) {
                return;
            }
            self.cancel_locked(&mut s);
        }
        self.finish(End::failed(CmEventKind::Unreachable, libc::ETIMEDOUT));
    }
}

#[cfg(test)]
#[path = "active_tests.rs"]
mod tests;
