//! Creation of a queue pair.

use super::{
    CreateError, Events, QpConfig, QueuePair, StreamTimes, XrcEnd, acknowledge, life, response, rx,
    send_queue, tagged, tx, xrc,
};
use crate::Access;
use crate::boxed::try_box;
use crate::counters::Counters;
use crate::limits::{MAX_INLINE, MAX_IRD, MAX_ORD, MAX_QP_WR, MAX_SGE};
use crate::receive_queue::{ReceiveQueue, TakenRecv};
use alloc::boxed::Box;

struct Queues {
    sq: send_queue::SendQueue,
    rq: ReceiveQueue,
    receive: TakenRecv,
    responses: response::ResponseQueue,
    tagged: tagged::Tagged,
}

impl Queues {
    fn new(c: &QpConfig) -> Result<Self, CreateError> {
        if c.max_send_wr > MAX_QP_WR
            || c.max_recv_wr > MAX_QP_WR
            || c.max_send_sge > MAX_SGE
            || c.max_recv_sge > MAX_SGE
            || c.max_inline > MAX_INLINE
            || c.max_ird > MAX_IRD
            || c.max_ord > MAX_ORD
        {
            return Err(CreateError::Invalid);
        }
        // The limits of a shared receive queue are not known here.
        let (rq_depth, receive) = match c.shared_receive {
            true => (0, TakenRecv::new(MAX_SGE)?),
            false => (c.max_recv_wr, TakenRecv::new(c.max_recv_sge)?),
        };
        let mut rq = ReceiveQueue::new(rq_depth, c.max_recv_sge)?;
        rq.hold_slots(c.hold_slots);
        Ok(Self {
            sq: send_queue::SendQueue::new(c)?,
            rq,
            receive,
            responses: response::ResponseQueue::new(c.max_ird)?,
            tagged: tagged::Tagged::new(c.match_tags)?,
        })
    }
}

impl QueuePair {
    /// Creates a queue pair in state RESET.
    pub fn new(config: QpConfig) -> Result<Self, CreateError> {
        Ok(Self::with(config, Queues::new(&config)?))
    }

    /// Creates a queue pair in state RESET, directly in a box, which needs little stack.
    pub fn boxed(config: QpConfig) -> Result<Box<Self>, CreateError> {
        let queues = Queues::new(&config)?;
        Ok(try_box(move || Self::with(config, queues))?)
    }

    #[inline(always)]
    fn with(config: QpConfig, queues: Queues) -> Self {
        Self {
            config,
            receives_out_of_line: config.match_tags,
            life: life::Life::NEW,
            sq: queues.sq,
            rq: queues.rq,
            responses: queues.responses,
            acknowledge: acknowledge::Acknowledge::default(),
            xrc: xrc::Xrc::default(),
            remote: Access::all(),
            tx: tx::Tx::default(),
            rx: rx::Rx::new(queues.receive),
            tagged: queues.tagged,
            events: Events::empty(),
            fault: None,
            counters: Counters::default(),
            times: StreamTimes::NONE,
        }
    }

    /// Sets what a peer may do through this queue pair: REMOTE_READ, REMOTE_WRITE and REMOTE_ATOMIC
    /// of `access`, like `qp_access_flags` of `ibv_modify_qp(3)`. By default everything that a
    /// region allows is allowed. An XRC initiator allows nothing.
    pub const fn set_remote_access(&mut self, access: Access) {
        self.remote = match self.xrc_end() {
            Some(XrcEnd::Initiator) => Access::empty(),
            _ => access,
        };
    }

    /// Allows the program to change memory while it is being sent (`true`), as hypervisors do when
    /// they copy a running guest.
    ///
    /// Payload is then copied before its CRC is computed, and the peer receives a consistent FPDU.
    /// Without the copy the CRC would be wrong, and the peer would end the stream. Hardware reads
    /// memory only once, so programs rely on this. It costs up to a tenth of the bandwidth.
    pub const fn set_snapshot(&mut self, on: bool) {
        self.config.snapshot = on;
    }
}
