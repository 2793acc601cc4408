//! The listening side.
//!
//! As in TCP, connections are established before `accept`: any thread that checks the listener, or
//! the service thread, answers requests as they arrive.

use super::{Listening, Phase, Socket, State};
use crate::errno::{Errno, Result};
use crate::stream::Stream;
use crate::wire::Hello;
use iwarp::runtime::cm::{CmEvent, ConnectionParameters};
use iwarp::runtime::create_event_channel;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Socket {
    /// Listens. A second call changes the backlog. Fails with EINVAL if the socket is connected,
    /// and with EADDRINUSE.
    pub(crate) fn listen(self: &Arc<Self>, backlog: i32) -> Result<()> {
        let backlog = usize::try_from(backlog).unwrap_or(4096).clamp(1, 4096);
        {
            let mut s = self.lock();
            match &mut s.phase {
                Phase::Idle | Phase::Failed => {}
                Phase::Listening(l) => {
                    l.backlog = backlog;
                    return Ok(());
                }
                _ => return Err(Errno::INVAL),
            }
            s.id.listen(backlog as u32)?;
            s.bound = s.id.addresses().0;
            s.phase = Phase::Listening(Listening {
                ready: VecDeque::new(),
                backlog,
            });
            self.event.is_listening.store(true, Ordering::Release);
            self.arm(&s);
        }
        crate::service::watch_listener(self)
    }

    /// Returns an established connection, which is not in the table of sockets yet. Fails with
    /// EINVAL if this socket does not listen, and with EAGAIN and EINTR.
    pub(crate) fn accept(&self) -> Result<Arc<Self>> {
        let wait = !self.with_state(|s| s.options.nonblocking);
        let timeout = self.with_state(|s| s.options.receive_timeout);
        self.wait_until(wait, timeout, |s| match &mut s.phase {
            Phase::Listening(l) => l.ready.pop_front().map(Ok),
            Phase::Closed => Some(Err(Errno::BADF)),
            _ => Some(Err(Errno::INVAL)),
        })
    }

    pub(super) fn answer_request(&self, s: &mut State, request: CmEvent) {
        let Phase::Listening(listening) = &mut s.phase else {
            return;
        };
        if listening.ready.len() >= listening.backlog {
            tracing::debug!("refused a connection request: the backlog is full");
            let _ = request.id.reject(&[]);
            return;
        }
        let id = request.id.clone();
        match self.try_answer(&s.options, request) {
            Ok(socket) => listening.ready.push_back(socket),
            Err(error) => {
                tracing::debug!(%error, "refused a connection request");
                let _ = id.reject(&[]);
            }
        }
    }

    fn try_answer(&self, options: &crate::options::Options, request: CmEvent) -> Result<Arc<Self>> {
        let hello = Hello::decode(&request.private_data).map_err(|reason| {
            tracing::debug!(?reason, "the peer is not a compatible rsocket");
            Errno::PROTO
        })?;
        let ctx = request.id.context().ok_or(Errno(libc::ENODEV))?;
        let channel = create_event_channel()?;
        request.id.migrate(&channel);
        let mut stream = Stream::new(&ctx, options.sizes)?;
        request.id.set_queue_pair(Some(&stream.qp));
        stream.set_peer(&hello);
        request.id.accept(&ConnectionParameters {
            private_data: stream.hello().encode().to_vec(),
            ..Default::default()
        })?;
        // This offers the second half of the receive buffer.
        stream.process(false);
        let phase = Phase::Connected(Box::new(stream));
        let socket = Self::from_parts(self.domain, options.inherited(), channel, request.id, phase);
        Ok(socket)
    }
}
