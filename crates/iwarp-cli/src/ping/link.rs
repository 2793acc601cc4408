//! One connection of `ping`: a queue pair, its 16-byte messages, and waits with time-outs.

use super::wire::Info;
use iwarp::Access;
use iwarp::verbs::cm::ConnectedId;
use iwarp::verbs::{
    CompletionQueue, Context, Cqe, MemoryRegion, ProtectionDomain, QpInitAttr, QueuePair, RecvWr,
    SendWr, Sge, WcOpcode, WcStatus,
};
use iwarp_cli_common::error::{Context as _, Error, Result};
use iwarp_cli_common::rdma::{self, failed_completion};
use iwarp_cli_common::service::{self, Guest};
use std::time::{Duration, Instant};

/// Posted receives. The peer has one message in flight; spare receives cost nothing.
const RECVS: usize = 4;
/// How long the peer may take for a step. It bounds how long a stopped client occupies its server,
/// and exceeds [`MAX_INTERVAL`](super::MAX_INTERVAL).
pub(super) const STEP_TIMEOUT: Duration = Duration::from_secs(15);
/// How long closing may take, whatever the peer sends meanwhile.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// The resources that are created before the connection.
pub(super) struct Prepared {
    pub(super) pd: ProtectionDomain,
    cq: CompletionQueue,
    messages: MemoryRegion,
}

impl Prepared {
    /// Creates everything and posts the receives.
    pub(super) fn new(ctx: &Context) -> Result<(Self, QueuePair)> {
        let pd = ProtectionDomain::new(ctx);
        let cq = ctx.create_cq(64, None).context("completion queue")?;
        let messages = pd
            .reg_mr(RECVS * Info::LEN, Access::LOCAL_WRITE)
            .context("memory")?;
        // Like rping: one RDMA Read in flight.
        let qp = pd
            .create_qp(
                &QpInitAttr::new(&cq, &cq)
                    .cap(16, RECVS as u32)
                    .rd_atomic(1, 1),
            )
            .context("queue pair")?;
        let prepared = Self { pd, cq, messages };
        for slot in 0..RECVS {
            prepared.receive(&qp, slot)?;
        }
        Ok((prepared, qp))
    }

    /// Completes the link with its connection and, at a server, the client's place.
    pub(super) fn into_link(self, connection: ConnectedId, guest: Option<Guest>) -> Link {
        Link {
            prepared: self,
            connection,
            guest,
            outstanding_sends: 0,
        }
    }

    fn receive(&self, qp: &iwarp::runtime::QueuePair, slot: usize) -> Result<()> {
        let offset = slot * Info::LEN;
        let range = offset..offset + Info::LEN;
        let sge = self.messages.sge(range).context("memory")?;
        let wr = RecvWr {
            wr_id: slot as u64,
            sges: &[sge],
        };
        qp.post_recv(&[wr])
            .map_err(iwarp::Error::from)
            .context("receive")
    }
}

pub(super) struct Link {
    prepared: Prepared,
    connection: ConnectedId,
    guest: Option<Guest>,
    /// Sends that have not completed.
    outstanding_sends: u32,
}

enum Completion {
    Send,
    Message(Info),
    RdmaReadOrWrite,
}

impl Link {
    /// Registers memory for data.
    pub(super) fn allocate(&self, len: usize, access: Access) -> Result<MemoryRegion> {
        self.prepared.pd.reg_mr(len, access).context("memory")
    }

    /// Sends the description of a buffer, or "go ahead".
    pub(super) fn send(&mut self, info: Info) -> Result<()> {
        self.outstanding_sends += 1;
        self.connection
            .post_send(&[SendWr::inline(0, &[&info.encode()]).signaled()])
            .map_err(iwarp::Error::from)
            .context("send")
    }

    /// Waits for a message; returns `None` if the peer closed the connection.
    pub(super) fn recv(&mut self) -> Result<Option<Info>> {
        let end = Instant::now() + STEP_TIMEOUT;
        loop {
            match self.next_completion(end)? {
                Some(Completion::Message(info)) => return Ok(Some(info)),
                Some(Completion::Send) => {}
                Some(Completion::RdmaReadOrWrite) => return Err(protocol_violation()),
                None => return Ok(None),
            }
        }
    }

    /// Server: records that the client completed a step of its first ping.
    pub(super) fn advance(&self) {
        if let Some(guest) = &self.guest {
            guest.advance();
        }
    }

    /// Server: records that a ping of the client was answered.
    pub(super) fn served(&self) {
        if let Some(guest) = &self.guest {
            guest.served();
        }
    }

    /// Client: converts the error `e` of an unanswered first ping to [`Error::Busy`] if the server
    /// reset the connection because it needed the place.
    pub(super) fn refusal_to_busy(&self, e: Error) -> Error {
        rdma::busy_if_reset(e, &self.connection)
    }

    /// Reads the peer's buffer.
    pub(super) fn read(&mut self, from: Info, to: Sge) -> Result<()> {
        self.post_and_wait(SendWr::read(1, from.addr, from.rkey, &[to]))
    }

    /// Writes to the peer's buffer.
    pub(super) fn write(&mut self, to: Info, from: Sge) -> Result<()> {
        self.post_and_wait(SendWr::write(2, to.addr, to.rkey, &[from]))
    }

    fn post_and_wait(&mut self, wr: SendWr<'_>) -> Result<()> {
        self.connection
            .post_send(&[wr.signaled()])
            .map_err(iwarp::Error::from)
            .context("RDMA")?;
        let end = Instant::now() + STEP_TIMEOUT;
        loop {
            match self.next_completion(end)? {
                Some(Completion::RdmaReadOrWrite) => return Ok(()),
                Some(Completion::Send) => {}
                // The peer must wait for "go ahead". If its messages were queued, a peer that never
                // answers the RDMA Read could exhaust the memory.
                Some(Completion::Message(_)) => return Err(protocol_violation()),
                None => return Err(failed_completion(WcStatus::Flushed, &self.connection)),
            }
        }
    }

    /// Waits for a completion until `end`. Returns `None` if the peer closed the connection
    /// gracefully.
    fn next_completion(&mut self, end: Instant) -> Result<Option<Completion>> {
        let mut done = [Cqe::default()];
        let remaining = end.saturating_duration_since(Instant::now());
        match self.prepared.cq.wait(&mut done, Some(remaining)) {
            Ok(_) => {}
            Err(iwarp::Error::TimedOut(_)) => {
                return Err(Error::failed(format!(
                    "the peer sent nothing for {} s",
                    STEP_TIMEOUT.as_secs()
                )));
            }
            Err(e) => return Err(e).context("completion queue"),
        }
        let [cqe] = done;
        if let Some(guest) = &self.guest {
            guest.touch();
            service::check_not_evicted(guest)?;
        }
        match cqe.status {
            WcStatus::Success => {}
            WcStatus::Flushed if self.connection.fault().is_none() => return Ok(None),
            status => return Err(failed_completion(status, &self.connection)),
        }
        match cqe.opcode {
            WcOpcode::Recv => {
                let slot = cqe.wr_id as usize;
                let mut octets = [0; Info::LEN];
                if cqe.byte_len as usize != octets.len() {
                    return Err(Error::failed(format!(
                        "the peer sent a message of {} bytes instead of rping's {}",
                        cqe.byte_len,
                        octets.len()
                    )));
                }
                self.prepared
                    .messages
                    .read_at(slot * Info::LEN, &mut octets)
                    .context("memory")?;
                self.prepared.receive(&self.connection, slot)?;
                Ok(Some(Completion::Message(Info::decode(octets))))
            }
            WcOpcode::Send => {
                self.outstanding_sends = self.outstanding_sends.saturating_sub(1);
                Ok(Some(Completion::Send))
            }
            _ => Ok(Some(Completion::RdmaReadOrWrite)),
        }
    }

    /// Closes gracefully: waits until queued messages are sent, then closes both directions.
    pub(super) fn close(mut self) {
        let end = Instant::now() + CLOSE_TIMEOUT;
        // `next_completion` returns available completions even after `end`, so check the time.
        while self.outstanding_sends > 0
            && Instant::now() < end
            && matches!(self.next_completion(end), Ok(Some(_)))
        {}
        if self.connection.disconnect().is_ok() {
            // The data are sent, so a peer that does not close its direction loses nothing.
            let _ = self
                .connection
                .wait_disconnected(Some(Duration::from_secs(2)));
        }
    }
}

/// Returns the error for a peer that violates the order of the messages.
pub(super) fn protocol_violation() -> Error {
    Error::failed("the peer violates rping's protocol")
}

#[cfg(test)]
mod tests {
    use super::*;
    use iwarp::Config;
    use iwarp::verbs::cm::{ConnectionParameters, Connector};
    use iwarp_cli_common::service::LOOPBACK;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Closing takes a limited time, even if a Send never completes and the peer keeps sending.
    #[test]
    fn peer_messages_do_not_prevent_closing() {
        let (ctx, listener) = service::listen(&LOOPBACK, 0, &Config::default()).unwrap();
        let (mine, qp) = Prepared::new(&ctx).unwrap();
        let (theirs, their_qp) = Prepared::new(&ctx).unwrap();
        let at = listener.local_addr();
        let (closed, hung) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let connection = Connector::new(&ctx).connect(at, their_qp).unwrap();
                let mut link = theirs.into_link(connection, None);
                let end = Instant::now() + Duration::from_secs(60);
                while link.send(Info::default()).is_ok() && !closed.load(Ordering::Acquire) {
                    let soon = Instant::now() + Duration::from_millis(20);
                    if !matches!(link.next_completion(soon), Ok(Some(_))) {
                        break;
                    }
                    if Instant::now() > end {
                        hung.store(true, Ordering::Release);
                        break;
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
            });
            let request = listener.accept(Some(Duration::from_secs(60))).unwrap();
            let connection = request
                .accept(qp, &ConnectionParameters::default())
                .unwrap();
            let mut link = mine.into_link(connection, None);
            link.outstanding_sends = u32::MAX;
            link.close();
            closed.store(true, Ordering::Release);
        });
        assert!(!hung.load(Ordering::Acquire), "closing waited for the peer");
    }
}
