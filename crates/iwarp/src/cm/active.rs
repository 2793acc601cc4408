//! The initiator's start-up: TCP connect, MPA request, MPA reply (RFC 5044 section 7.1.2, RFC 6581
//! section 9). `dial` makes the TCP connection.

mod dial;

use super::id::{CmId, CmIdInner, ConnectionParameters, engine};
use super::notify::Reply;
use super::startup::{
    Read, Starting, depths, limits, local_params, private_data, record, stream_config,
};
use super::{CmEventKind, xrc};
use crate::cm::portmap::Lookup;
use crate::conn::attach::Handover;
use crate::conn::infiniband::InfinibandParameters;
use crate::conn::qp::{CmSink, QueuePair, TIMERS_END};
use crate::engine::{Engine, Source};
use crate::error::{Error, Result};
use crate::objects::context::Context;
use crate::sys::clock::now_ns;
use crate::sys::connect::{Bound, Connecting, Ends, connect};
use crate::sys::poller::Interest;
use crate::sys::stream::TcpStream;
use iwarp_proto::mpa::negotiate::Agreed;
use iwarp_proto::rdmap::TerminateCode;
use iwarp_rnic::Time;
use iwarp_rnic::startup::{Ending, Failure, Initiator, Outcome, Reading};
use parking_lot::Mutex;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::{Arc, Weak};

// The queue pair takes over the attempt's token with all pending timers, so these numbers differ
// from the queue pair's timers.
const TIMER_STARTUP: u32 = TIMERS_END;
const TIMER_RECONNECT: u32 = TIMERS_END + 1;
const TIMER_MAPPER: u32 = TIMERS_END + 2;
const _: () = assert!(
    TIMERS_END <= TIMER_STARTUP
        && TIMER_STARTUP < TIMER_RECONNECT
        && TIMER_RECONNECT < TIMER_MAPPER
);

enum Stage {
    New,
    /// Waiting for the peer's port mapper. The connection will use the bound socket.
    Mapper(Lookup, Bound),
    /// The TCP connect was refused. A timer starts the next one.
    Refused,
    /// Waiting for the TCP connect.
    Tcp(Connecting),
    /// The MPA request is sent. Waiting for the reply.
    Reply(Box<Starting>),
    Done,
}

struct State {
    stage: Stage,
    session: Initiator,
    token: u64,
    /// The address to connect to: `peer`, unless a port mapper has returned another one.
    target: SocketAddr,
    /// Number of TCP connects that were refused.
    refused: usize,
}

pub(super) struct Active {
    id: Weak<CmIdInner>,
    ctx: Context,
    qp: QueuePair,
    /// Epoch of the queue pair when the attempt started. The queue pair rejects the stream after a
    /// reset.
    epoch: u64,
    peer: SocketAddr,
    local: Option<SocketAddr>,
    infiniband: Option<InfinibandParameters>,
    engine: Arc<Engine>,
    state: Mutex<State>,
}

enum End {
    /// The event Established has been added to the channel.
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
    Accepted(Box<AcceptingReply>),
}

struct AcceptingReply {
    starting: Starting,
    /// The engine's token of the socket.
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

    /// Maps an I/O error to an event, as the kernel's iWARP connection manager does.
    fn from_io_error(e: &io::Error) -> Self {
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

    /// Starts the TCP connect. Errors that the peer causes are reported by events, even if they are
    /// known immediately.
    pub(super) fn start(self: &Arc<Self>, bound: Option<Bound>) -> Result<()> {
        let mut s = self.state.lock();
        let faults = self.ctx.inner.hooks.faults.as_ref();
        let refused = faults.and_then(|plan| plan.connect(self.peer));
        let next = match (refused, self.ctx.config().port_mapper) {
            (Some(errno), _) => Next::End(End::from_io_error(&io::Error::from_raw_os_error(errno))),
            (None, Some(port)) => self.ask_mapper(&mut s, bound, port)?,
            (None, None) => self.connect(&mut s, bound)?,
        };
        drop(s);
        if let Next::End(end) = next {
            self.finish(end);
        }
        Ok(())
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

    /// Sets a timer for the next time limit of the MPA session.
    fn set_timer(&self, s: &State) {
        if let Some(at) = s.session.poll_at() {
            self.engine.at(at.as_nanos(), s.token, TIMER_STARTUP);
        }
    }

    /// Records that the request was sent, and waits for the reply.
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

    fn read_reply(self: &Arc<Self>, s: &mut State, starting: Box<Starting>) -> Next {
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
            // The engine keeps watching the socket; the queue pair replaces the attempt as its
            // source.
            return Next::Accepted(Box::new(AcceptingReply {
                starting: *starting,
                token,
                agreed,
                private_data: private_data.to_vec(),
            }));
        }
        self.engine.remove(&starting.stream, token);
        match read {
            // Only one of the two ends is an end of an extended reliable connection, or both are
            // the same end.
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

    /// Handles a stream that the peer has closed before it replied, or that broke. Peers that
    /// support only MPA revision 1 close it after a request of revision 2. Connects again with
    /// revision 1 if the peer may accept that.
    fn retry_or_end(self: &Arc<Self>, s: &mut State, broken: Option<&io::Error>) -> Next {
        let reset = [Some(libc::ECONNRESET), Some(libc::EPIPE)];
        match (s.session.peer_closed(), broken) {
            (Err(Failure::Closed { begun: true }), _) => {
                return Next::End(End::failed(CmEventKind::ConnectError, libc::ECONNRESET));
            }
            // A lost route, or a program on this host, has ended the stream. The peer may support
            // revision 2.
            (_, Some(e)) if !reset.contains(&e.raw_os_error()) => {
                return Next::End(End::from_io_error(e));
            }
            (Err(_), _) => {
                return Next::End(End::failed(CmEventKind::Rejected, libc::ECONNRESET));
            }
            (Ok(()), _) => {}
        }
        tracing::debug!(peer = %self.peer, "no MPA reply before the peer closed; retrying");
        let local = self.local.map(|l| SocketAddr::new(l.ip(), 0));
        match connect(s.target, local)
            .map_err(Error::from)
            .and_then(|c| self.begin(s, c))
        {
            Ok(next) => next,
            Err(e) => Next::End(End::failed(CmEventKind::ConnectError, e.errno())),
        }
    }

    /// Passes the stream of an accepting reply to the queue pair. The caller holds no locks,
    /// because the queue pair starts to use the stream immediately.
    fn accepted(self: &Arc<Self>, reply: AcceptingReply) -> End {
        let AcceptingReply {
            starting,
            token,
            agreed,
            private_data: received,
        } = reply;
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
        // Without a queue pair of the program, the first message waits for `establish`, because it
        // would notify the peer that the connection is up.
        if agreed.peer_to_peer && id.has_placeholder_qp() {
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
        // The stream is attached before the event is added, because a program may post when it gets
        // the event. If the connection ends before the event, the identifier records that.
        if let Err(e) = self.qp.inner.attach(handover) {
            tracing::debug!(error = %e, "cannot attach the stream to the queue pair");
            return End::failed(CmEventKind::ConnectError, e.errno());
        }
        if !id.established(reply) {
            // The identifier was destroyed in the meantime, perhaps because the queue pair was
            // reset.
            self.qp.inner.fail_connection(self.epoch);
        }
        End::Established
    }

    /// Ends the stream after an MPA reply that cannot be used.
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

    /// Returns `true` if a step of the start-up has exceeded its time limit. If not, sets the next
    /// timer.
    fn is_timed_out(&self, s: &mut State) -> bool {
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
        // The timer was set for an earlier step. The current step has another one.
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
        // The lock is held for the whole step, because `stage` is `Done` in between. `cancel` and
        // timers must not see that.
        let next = {
            let mut s = self.state.lock();
            match std::mem::replace(&mut s.stage, Stage::Done) {
                Stage::Mapper(lookup, bound) => self.read_mapper(&mut s, lookup, bound, false),
                Stage::Tcp(connecting) => self.continue_connect(&mut s, connecting),
                Stage::Reply(starting) => self.read_reply(&mut s, starting),
                // In this stage the token has a timer and no descriptor, so there is nothing to
                // read.
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
            Next::Accepted(reply) => {
                let end = self.accepted(*reply);
                self.finish(end);
            }
        }
        true
    }

    fn awaits(&self, kind: u32) -> bool {
        matches!(
            (&self.state.lock().stage, kind),
            (Stage::Tcp(_) | Stage::Reply(_), TIMER_STARTUP)
                | (Stage::Refused, TIMER_RECONNECT)
                | (Stage::Mapper(..), TIMER_MAPPER)
        )
    }

    fn timer(self: Arc<Self>, kind: u32) {
        if kind == TIMER_STARTUP && self.awaits(kind) {
            // The process may have been stopped (SIGSTOP), so the socket is read before the time
            // limit is checked.
            Arc::clone(&self).ready(true, true, false);
        }
        if kind == TIMER_RECONNECT {
            self.reconnect();
            return;
        }
        if kind == TIMER_MAPPER {
            let next = {
                let mut s = self.state.lock();
                match std::mem::replace(&mut s.stage, Stage::Done) {
                    Stage::Mapper(lookup, bound) => self.read_mapper(&mut s, lookup, bound, true),
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
            if !self.is_timed_out(&mut s) {
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
