//! The work requests of a stream: messages, data with its message, and receives.

use super::{BATCH, RECEIVE, Stream};
use crate::errno::Result;
use crate::wire::{MESSAGE_LEN, Message};
use iwarp::runtime::{RecvWr, SendFlags, SendOp, SendWr, Sge};

impl Stream {
    pub(super) fn post_message(&mut self, message: Message) {
        let octets = message.encode();
        let pieces: [&[u8]; 1] = [&octets];
        self.sq_free -= 1;
        self.post(&[SendWr::inline(1 << 32, &pieces).signaled()]);
    }

    /// Writes a few bytes into the peer's memory, then sends the message that announces them.
    pub(super) fn post_inline_pair(
        &mut self,
        addr: u64,
        rkey: u32,
        octets: &[u8],
        message: Message,
    ) {
        let message = message.encode();
        let (data, text): ([&[u8]; 1], [&[u8]; 1]) = ([octets], [&message]);
        let write = SendWr {
            wr_id: 0,
            op: SendOp::Write {
                remote_addr: addr,
                rkey,
            },
            flags: SendFlags::INLINE,
            sges: &[],
            inline: &data,
        };
        self.sq_free -= 2;
        self.post(&[write, SendWr::inline(2 << 32, &text).signaled()]);
    }

    /// Writes bytes of the send buffer into the peer's memory, then sends a message if there is
    /// one.
    pub(super) fn post_buffered(
        &mut self,
        addr: u64,
        rkey: u32,
        sges: &[Sge],
        len: u32,
        message: Option<Message>,
    ) {
        let write = SendWr::write(0, addr, rkey, sges);
        match message.map(Message::encode) {
            Some(message) => {
                let text: [&[u8]; 1] = [&message];
                self.sq_free -= 2;
                self.post(&[
                    write,
                    SendWr::inline(2 << 32 | u64::from(len), &text).signaled(),
                ]);
            }
            None => {
                self.sq_free -= 1;
                let write = SendWr {
                    wr_id: 1 << 32 | u64::from(len),
                    ..write
                };
                self.post(&[write.signaled()]);
            }
        }
    }

    pub(super) fn post(&mut self, wrs: &[SendWr<'_>]) {
        if let Err(error) = self.qp.post_send(wrs) {
            tracing::debug!(qp = self.qp.num(), %error, "posting a send request failed");
            self.lost();
        }
    }

    pub(super) fn post_receives(&mut self) -> Result<()> {
        let key = self.slots.lkey();
        let base = self.slots.remote().addr;
        for chunk in self.idle_slots.chunks(BATCH) {
            let mut sges = [Sge::default(); BATCH];
            for (sge, slot) in sges.iter_mut().zip(chunk) {
                let addr = base + u64::from(*slot) * MESSAGE_LEN as u64;
                *sge = Sge {
                    addr,
                    len: MESSAGE_LEN as u32,
                    lkey: key,
                };
            }
            let mut wrs = [RecvWr {
                wr_id: 0,
                sges: &[],
            }; BATCH];
            for ((wr, slot), sge) in wrs.iter_mut().zip(chunk).zip(&sges) {
                *wr = RecvWr {
                    wr_id: RECEIVE | u64::from(*slot),
                    sges: std::slice::from_ref(sge),
                };
            }
            self.qp.post_recv(&wrs[..chunk.len()])?;
        }
        self.idle_slots.clear();
        Ok(())
    }
}
