//! The initiator: TCP connect, MPA request, reply (RFC 5044 section 7.1.2, RFC 6581 section 9).

use super::super::context::Context;
use super::super::qp::{CmSink, Handover, QueuePair};
use super::CmEventKind;
use super::id::{CmId, CmIdInner, ConnectionParameters, engine};
use super::startup::{Read, Starting, local_params, record, stream_config};
use crate::engine::{Engine, Source};
use crate::error::{Error, Result};
use crate::sys::connect::{Bound, Connect, Connecting, connect};
use crate::sys::poller::Interest;
use iwarp_proto::mpa::negotiate::{Initiator, Outcome};
use iwarp_proto::mpa::startup::{FrameKind, FrameReader, StartupError};
use iwarp_proto::rdmap::TerminateCode;
use parking_lot::Mutex;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How long TCP may take to connect. The kernel would try for two minutes.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
const TIMER_CONNECT: u32 = 1;
const TIMER_REPLY: u32 = 2;

enum Stage {
    New,
    /// TCP is connecting.
    Tcp(Connecting),
    /// The request is sent.
    Reply(Box<Starting>),
    Done,
}

struct State {
    stage: Stage,
    initiator: Initiator,
    token: u64,
}

/// One attempt to connect.
pub(super) struct Active {
    id: Weak<CmIdInner>,
    ctx: Context,
    qp: QueuePair,
    peer: SocketAddr,
    local: Option<SocketAddr>,
    private_data: Vec<u8>,
    engine: Arc<Engine>,
    state: Mutex<State>,
}

/// How an attempt ends.
enum End {
    /// The event has been given.
    Established,
    Failed {
        kind: CmEventKind,
        status: i32,
        private_data: Vec<u8>,
    },
}

impl End {
    const fn failed(kind: CmEventKind, status: i32) -> Self {
        Self::Failed {
            kind,
            status,
            private_data: Vec::new(),
        }
    }

    /// Errors map to events as the kernel's iWARP connection manager does.
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
        qp: QueuePair,
        peer: SocketAddr,
        local: Option<SocketAddr>,
        p: &ConnectionParameters,
    ) -> Result<Arc<Self>> {
        let params = local_params(ctx, p, Some(&qp.config()));
        let initiator = Initiator::new(params, &p.private_data).map_err(|_| {
            Error::InvalidArgument("private data: at most 512 octets, 508 with revision 2")
        })?;
        Ok(Arc::new(Self {
            id: Arc::downgrade(&id.inner),
            ctx: ctx.clone(),
            qp,
            peer,
            local,
            private_data: p.private_data.clone(),
            engine: engine()?,
            state: Mutex::new(State {
                stage: Stage::New,
                initiator,
                token: 0,
            }),
        }))
    }

    /// Starts the TCP connect. Errors of the peer come as events, even those that are known at once.
    pub(super) fn start(self: &Arc<Self>, bound: Option<Bound>) -> Result<()> {
        let attempt = match bound {
            Some(bound) => bound.connect(self.peer),
            None => connect(self.peer, self.local),
        };
        match attempt {
            Ok(connecting) => self.watch(connecting),
            Err(e) => {
                let e = io::Error::from(e);
                self.finish(End::of_io(&e));
                Ok(())
            }
        }
    }

    fn watch(self: &Arc<Self>, connecting: Connecting) -> Result<()> {
        let token = self.engine.token();
        let mut s = self.state.lock();
        s.token = token;
        self.engine.add(
            &connecting,
            token,
            Interest::WRITE,
            Arc::clone(self) as Arc<dyn Source>,
        )?;
        self.engine.after(CONNECT_TIMEOUT, token, TIMER_CONNECT);
        s.stage = Stage::Tcp(connecting);
        Ok(())
    }

    /// Gives the attempt up without an event.
    pub(super) fn cancel(&self) {
        let mut s = self.state.lock();
        let token = s.token;
        match std::mem::replace(&mut s.stage, Stage::Done) {
            Stage::Tcp(c) => self.engine.remove(&c, token),
            Stage::Reply(starting) => {
                self.engine.remove(&starting.stream, token);
                starting.stream.abort();
            }
            Stage::New | Stage::Done => {}
        }
    }

    /// TCP is there, or has failed.
    fn connected(self: &Arc<Self>, connecting: Connecting) -> Option<End> {
        let token = self.state.lock().token;
        let stream = match connecting.try_finish() {
            Ok(Connect::Done(stream)) => stream,
            Ok(Connect::Pending(connecting)) => {
                self.state.lock().stage = Stage::Tcp(connecting);
                return None;
            }
            Err(e) => {
                self.engine.forget(token);
                return Some(End::of_io(&e));
            }
        };
        let flow = record(&self.ctx, &stream, true);
        let starting = Box::new(Starting {
            stream,
            flow,
            reader: FrameReader::new(FrameKind::Reply),
        });
        let mut s = self.state.lock();
        if let Err(e) = starting.write(s.initiator.request_octets()) {
            self.engine.remove(&starting.stream, token);
            return Some(End::of_io(&e));
        }
        let _ = self.engine.modify(&starting.stream, token, Interest::READ);
        self.engine
            .after(self.ctx.config().handshake_timeout * 2, token, TIMER_REPLY);
        s.stage = Stage::Reply(starting);
        None
    }

    /// Something came while waiting for the reply.
    fn reply(self: &Arc<Self>, mut starting: Box<Starting>) -> Option<End> {
        let token = self.state.lock().token;
        let read = starting.read();
        if let Read::NeedMore = read {
            self.state.lock().stage = Stage::Reply(starting);
            return None;
        }
        self.engine.remove(&starting.stream, token);
        match read {
            Read::Frame => Some(self.judge(*starting)),
            Read::NeedMore => None,
            Read::Bad(e) => Some(self.refuse(&starting, &e)),
            Read::Closed | Read::Broken(_) => self.retry_or_end(),
        }
    }

    /// The peer closed instead of answering. Peers of revision 1 do so when they meet revision 2: try once more with 1.
    fn retry_or_end(self: &Arc<Self>) -> Option<End> {
        let again = {
            let mut s = self.state.lock();
            let params = s.initiator.retry_with_revision_1();
            params
                .and_then(|p| Initiator::new(p, &self.private_data).ok())
                .inspect(|i| s.initiator = i.clone())
        };
        if again.is_none() {
            return Some(End::failed(CmEventKind::Rejected, libc::ECONNRESET));
        }
        tracing::debug!(peer = %self.peer, "the peer closed; trying MPA revision 1");
        let local = self.local.map(|l| SocketAddr::new(l.ip(), 0));
        match connect(self.peer, local)
            .map_err(Error::from)
            .and_then(|c| self.watch(c))
        {
            Ok(()) => None,
            Err(e) => Some(End::failed(CmEventKind::ConnectError, e.errno())),
        }
    }

    fn judge(self: &Arc<Self>, starting: Starting) -> End {
        let (outcome, private_data) = {
            let s = self.state.lock();
            let Some(frame) = starting.reader.frame() else {
                return End::failed(CmEventKind::ConnectError, libc::EPROTO);
            };
            (
                s.initiator.on_reply(&frame),
                frame.ulp_private_data().to_vec(),
            )
        };
        match outcome {
            Ok(Outcome::Accepted(agreed)) => {
                let Some(id) = self.id.upgrade() else {
                    return End::failed(CmEventKind::ConnectError, libc::ECANCELED);
                };
                let config = stream_config(&agreed, true, &self.ctx);
                let told = |v: u16| (v != iwarp_proto::mpa::startup::NO_NEGOTIATION).then_some(v);
                let (peer_ird, peer_ord) = (told(agreed.peer_ird), told(agreed.peer_ord));
                let cm: Weak<dyn CmSink> = Arc::downgrade(&id) as Weak<dyn CmSink>;
                // Established first: what the peer sends at once must not overtake it.
                CmId { inner: id }.established(private_data, peer_ird, peer_ord);
                let handover = Handover {
                    stream: starting.stream,
                    config,
                    flow: starting.flow,
                    cm: Some(cm),
                };
                if let Err(e) = self.qp.inner.attach(handover) {
                    tracing::debug!(error = %e, "queue pair does not take the connection");
                    self.qp.inner.fail_connection();
                }
                End::Established
            }
            Ok(Outcome::Rejected { .. }) => End::Failed {
                kind: CmEventKind::Rejected,
                status: libc::ECONNREFUSED,
                private_data,
            },
            Err(e) => self.refuse(&starting, &e),
        }
    }

    /// The reply is not one we can live with.
    fn refuse(&self, starting: &Starting, e: &StartupError) -> End {
        tracing::debug!(peer = %self.peer, error = %e, "MPA reply refused");
        match e.terminate() {
            Some(code) => starting.terminate(code, self.ctx.config().crc),
            None => starting.stream.abort(),
        }
        let errno = match e.code() {
            Some(TerminateCode::MPA_INSUFFICIENT_IRD) => libc::ENOSPC,
            _ => libc::EPROTO,
        };
        End::failed(CmEventKind::ConnectError, errno)
    }

    fn finish(&self, end: End) {
        let Some(inner) = self.id.upgrade() else {
            return;
        };
        if let End::Failed {
            kind,
            status,
            private_data,
        } = end
        {
            CmId { inner }.failed(kind, status, private_data);
        }
    }
}

impl Source for Active {
    fn ready(self: Arc<Self>, _: bool, _: bool) {
        let stage = std::mem::replace(&mut self.state.lock().stage, Stage::Done);
        let end = match stage {
            Stage::Tcp(connecting) => self.connected(connecting),
            Stage::Reply(starting) => self.reply(starting),
            Stage::New | Stage::Done => None,
        };
        if let Some(end) = end {
            self.finish(end);
        }
    }

    fn timer(self: Arc<Self>, kind: u32) {
        let due = matches!(
            (&self.state.lock().stage, kind),
            (Stage::Tcp(_), TIMER_CONNECT) | (Stage::Reply(_), TIMER_REPLY)
        );
        if due {
            self.cancel();
            self.finish(End::failed(CmEventKind::Unreachable, libc::ETIMEDOUT));
        }
    }
}
