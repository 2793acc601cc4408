//! The end of the responder's side of MPA start-up: the program accepts, the reply is sent, and a queue pair takes the stream.

use super::super::qp::{CmSink, Handover};
use super::id::{CmId, ConnectionParameters, Phase};
use super::passive::Requested;
use super::{startup, xrc};
use crate::error::{Error, Result};
use iwarp_proto::mpa::startup::MAX_FRAME_LEN;
use std::sync::{Arc, Weak};

impl CmId {
    /// Accepts a peer's request (`rdma_accept(3)`). The event Established follows: at once, or in the peer-to-peer
    /// model when the peer's first message has come.
    ///
    /// # Errors
    /// [`Error::InvalidState`]: no request, no queue pair; the request stays. [`Error::ConnectionLost`]: the peer has gone.
    pub fn accept(&self, parameters: &ConnectionParameters) -> Result<()> {
        if self.is_for_datagrams() {
            return self.accept_with_own(parameters);
        }
        let (requested, qp, ctx) = {
            let mut s = self.inner.state.lock();
            let qp =
                s.qp.clone()
                    .ok_or(Error::InvalidState("create a queue pair first"))?;
            let ctx = s.ctx.clone().ok_or(Error::NoDevice)?;
            if let Phase::Requested(requested) = &s.phase {
                xrc::check(qp.xrc_end(), requested.peer_end)?;
            }
            match std::mem::replace(&mut s.phase, Phase::Connected(false)) {
                Phase::Requested(requested) => (requested, qp, ctx),
                other => {
                    s.phase = other;
                    return Err(Error::InvalidState("there is no request to accept"));
                }
            }
        };
        let params = startup::local_params(&ctx, parameters, Some(&qp.config()));
        let mut frame = [0u8; MAX_FRAME_LEN];
        let private_data = xrc::wrap(qp.xrc_end(), &parameters.private_data);
        let (n, agreed) = match requested.pending.accept(&params, &private_data, &mut frame) {
            Ok(accepted) => accepted,
            Err(_) => {
                self.inner.state.lock().phase = Phase::Requested(requested);
                return Err(Error::InvalidArgument(
                    "private data: at most 512 octets, 508 with revision 2",
                ));
            }
        };
        let gone = |e: String| {
            let mut s = self.inner.state.lock();
            s.phase = Phase::Disconnected;
            s.seat = None;
            Err(Error::ConnectionLost(e))
        };
        let Requested { starting, .. } = *requested;
        if let Err(e) = starting.write(&frame[..n]) {
            return gone(e.to_string());
        }
        if !agreed.peer_to_peer {
            self.inner.state.lock().phase = Phase::Accepting;
        }
        let config = startup::stream_config(&agreed, false, &ctx);
        let cm: Weak<dyn CmSink> = Arc::downgrade(&self.inner) as Weak<dyn CmSink>;
        let handover = Handover {
            stream: starting.stream,
            ends: starting.ends,
            watched: None,
            config,
            flow: starting.flow,
            cm: Some(cm),
            life: None,
        };
        //= rfc5044 section 7.1.2
        //# If the MPA Request Frame is properly formatted and the Private Data is
        //# acceptable, the implementation SHOULD return an MPA Reply Frame with the
        //# Rejected Connection bit set to '0'; the MPA Reply Frame MAY include
        //# ULP-supplied Private Data; and the Responder SHOULD prepare to interpret any
        //# data received as FPDUs and pass any received ULPDUs to DDP.
        if let Err(e) = qp.inner.attach(handover) {
            return gone(e.to_string());
        }
        // In the client-server model the program may not wait for the peer: the peer waits for it.
        if !agreed.peer_to_peer {
            self.established(Vec::new(), None, None);
        }
        Ok(())
    }
}
