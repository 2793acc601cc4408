//! The last step of the responder's MPA start-up: the program accepts, the reply is sent, and the
//! queue pair takes over the stream.

use super::id::{CmId, ConnectionParameters};
use super::notify::Reply;
use super::passive::Requested;
use super::phase::Phase;
use super::{startup, xrc};
use crate::conn::attach::Handover;
use crate::conn::qp::{CmSink, QueuePair};
use crate::error::{Error, Result};
use crate::objects::context::Context;
use crate::sys::clock::now_ns;
use iwarp_rnic::Time;
use std::sync::{Arc, Weak};

/// A connection whose reply is sent.
pub(super) struct Replied {
    pub(super) handover: Handover,
    /// When the initiator's first FPDU is due; `None` in the client-server model, in which the
    /// initiator need not send one.
    pub(super) first_fpdu_until: Option<Time>,
}

impl CmId {
    /// Accepts a connection request (`rdma_accept(3)`). The event Established follows immediately.
    /// In the peer-to-peer model, it follows when the peer's first message has arrived.
    ///
    /// # Errors
    /// - [`Error::InvalidState`]: there is no request, or the identifier has no queue pair. The
    ///   request can still be accepted.
    /// - [`Error::ConnectionLost`]: the peer has closed the connection.
    pub fn accept(&self, parameters: &ConnectionParameters) -> Result<()> {
        self.check_process()?;
        if self.is_for_datagrams() {
            return self.accept_with_queue_pair(parameters);
        }
        let (replied, qp) = self.send_reply(parameters)?;
        self.attach_stream(replied, &qp)
    }

    pub(super) fn send_reply(
        &self,
        parameters: &ConnectionParameters,
    ) -> Result<(Replied, QueuePair)> {
        let (mut requested, qp, ctx, epoch) = self.take_request()?;
        let params = startup::local_params(&ctx, parameters, Some(&qp.config()));
        let private_data = startup::private_data(&qp, parameters);
        let agreed = match requested.session.accept(&params, &private_data) {
            Ok(Some(agreed)) => agreed,
            Ok(None) | Err(_) => {
                self.inner.state.lock().phase = Phase::Requested(requested);
                return Err(Error::InvalidArgument(
                    "private data: at most 512 octets, 508 with revision 2",
                ));
            }
        };
        let Requested {
            starting,
            mut session,
            watch,
            ..
        } = *requested;
        if let Some(watch) = watch {
            watch.end(&starting.stream);
        }
        if let Err(e) = starting.write(session.reply()) {
            return Err(self.lost(e.to_string()));
        }
        session.reply_sent(Time::from_nanos(now_ns()));
        {
            let mut s = self.inner.state.lock();
            s.depths = Some(startup::depths(&agreed));
            if !agreed.peer_to_peer {
                s.phase = Phase::Accepting;
            }
        }
        let cm: Weak<dyn CmSink> = Arc::downgrade(&self.inner) as Weak<dyn CmSink>;
        let handover = Handover {
            stream: starting.stream,
            ends: starting.ends,
            watched: None,
            config: startup::stream_config(&agreed, false, &ctx),
            flow: starting.flow,
            cm: Some(cm),
            epoch,
            infiniband: parameters.infiniband,
        };
        let replied = Replied {
            handover,
            first_fpdu_until: session.poll_at(),
        };
        Ok((replied, qp))
    }

    /// Takes the connection request out of the identifier, and sets the phase to
    /// `Connected(false)`.
    fn take_request(&self) -> Result<(Box<Requested>, QueuePair, Context, Option<u64>)> {
        let mut s = self.inner.state.lock();
        let qp =
            s.qp.clone()
                .ok_or(Error::InvalidState("create a queue pair first"))?;
        let ctx = s.ctx.clone().ok_or(Error::NoDevice)?;
        if let Phase::Requested(requested) = &s.phase {
            xrc::check(qp.xrc_end(), requested.peer_end)?;
        }
        match std::mem::replace(&mut s.phase, Phase::Connected(false)) {
            Phase::Requested(requested) => Ok((requested, qp, ctx, s.epoch)),
            other => {
                s.phase = other;
                Err(Error::InvalidState("there is no request to accept"))
            }
        }
    }

    pub(super) fn attach_stream(&self, replied: Replied, qp: &QueuePair) -> Result<()> {
        //= rfc5044 section 7.1.2
        //# If the MPA Request Frame is properly formatted and the Private Data is
        //# acceptable, the implementation SHOULD return an MPA Reply Frame with the
        //# Rejected Connection bit set to '0'; the MPA Reply Frame MAY include
        //# ULP-supplied Private Data; and the Responder SHOULD prepare to interpret any
        //# data received as FPDUs and pass any received ULPDUs to DDP.
        if let Err(e) = qp.inner.attach(replied.handover) {
            return Err(self.lost(e.to_string()));
        }
        // In the client-server model the initiator may wait for our first message, so the event
        // must not wait for the initiator.
        if replied.first_fpdu_until.is_none() {
            self.established(Reply::default());
        }
        Ok(())
    }

    /// Records that the stream was lost before the connection was up. Returns the error for the
    /// program.
    fn lost(&self, why: String) -> Error {
        let mut s = self.inner.state.lock();
        s.disconnected();
        Error::ConnectionLost(why)
    }
}
