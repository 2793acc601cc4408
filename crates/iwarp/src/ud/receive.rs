//! Receiving: checks datagrams, and copies them into posted receives.
//!
//! This code runs in the thread that holds the receive baton. No datagram is answered. A datagram
//! changes only the receive that it fills, the counters, and the window of its sender. Memory is
//! allocated only for a new sender (`seen`).

use super::address::{GRH_LEN, write_grh};
use super::life::completion;
use super::{UdEffects, UdInner, UdState, with_batch};
use crate::crc::crc32c_append;
use crate::sys::datagram::{BATCH, Batch, DatagramSocket};
use crate::sys::guarded::MemoryTable;
use iwarp_proto::datagram::{HEADER_LEN, Header, MULTICAST_QP, Malformed};
use iwarp_rnic::qp::State;
use iwarp_rnic::receive_queue::Taken;
use iwarp_rnic::{Access, Cqe, WcFlags, WcOpcode, WcStatus};
use parking_lot::MutexGuard;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Maximum number of system calls per socket before other sockets are served.
const CALLS_MAX: usize = 16;

// The routing header takes the place of the datagram's header.
const _: () = assert!(Batch::FRONT + HEADER_LEN == GRH_LEN);

impl UdInner {
    /// Reads the sockets. If another thread is reading them, that thread reads once more instead.
    pub(super) fn drive_rx(self: &Arc<Self>) -> bool {
        if self.origin.is_foreign() {
            return false;
        }
        self.rx.drive(|| {
            for local in self.locals.all().iter() {
                self.read(&local.socket, local.ip, self.num);
            }
            self.groups.for_each(|group| {
                self.read(group.socket(), group.ip(), MULTICAST_QP);
            });
        })
    }

    /// Reads the pending datagrams of a socket at the address `to`. Their destination number must
    /// be `destination`.
    fn read(self: &Arc<Self>, socket: &DatagramSocket, to: IpAddr, destination: u32) {
        let mut effects = UdEffects::default();
        with_batch(|batch| {
            for _ in 0..CALLS_MAX {
                let Ok(count) = socket.receive(batch, BATCH) else {
                    // The error concerns a datagram that was sent before. Continue with the next
                    // datagram.
                    continue;
                };
                if count == 0 {
                    break;
                }
                let mut g = self.state.lock();
                let memory = self.ctx.memory.read();
                for index in 0..count {
                    self.arrived(
                        &mut g,
                        &memory,
                        (batch, index),
                        (to, destination),
                        &mut effects,
                    );
                }
                drop(memory);
                drop(g);
                if count < BATCH {
                    break;
                }
            }
        });
        self.apply_effects(effects);
    }

    fn arrived(
        &self,
        g: &mut MutexGuard<'_, UdState>,
        memory: &MemoryTable,
        (batch, index): (&mut Batch, usize),
        (to, destination): (IpAddr, u32),
        effects: &mut UdEffects,
    ) {
        let Some((octets, from, route)) = batch.received(index) else {
            g.drops.foreign += 1;
            return;
        };
        let Some(header) = self.check(g, &octets[Batch::FRONT..], from, destination) else {
            return;
        };
        if !self.take_receive(g, octets.len(), effects) {
            return;
        }
        g.seen.record(from, header.source, header.sequence);
        let payload = octets.len() - GRH_LEN;
        let mut flags = flags_of(&header);
        if let Some(grh) = octets.first_chunk_mut() {
            flags |= write_grh(grh, from.ip(), to, route, payload);
        }
        let cqe = Cqe {
            byte_len: octets.len() as u32,
            flags,
            imm_or_stag: header.immediate.unwrap_or(0),
            vendor_err: header.source,
            ..completion(g.taken.wr_id, WcStatus::Success, WcOpcode::Recv)
        };
        g.counters.rx_messages += 1;
        g.counters.rx_fpdus += 1;
        g.counters.rx_payload += payload as u64;
        if self.copy_to_receive(g, memory, octets) {
            self.complete_receive(g, cqe, effects);
        } else {
            // The program's receive refers to memory that is not registered for it.
            let cqe = completion(cqe.wr_id, WcStatus::LocalProtection, WcOpcode::Recv);
            self.complete_receive(g, cqe, effects);
            self.change_state(g, State::Error, effects);
        }
    }

    /// Returns the header of a datagram that was sent to the number `destination`. If the queue
    /// pair does not accept the datagram, counts it as dropped, and returns `None`.
    fn check(
        &self,
        g: &mut UdState,
        datagram: &[u8],
        from: SocketAddr,
        destination: u32,
    ) -> Option<Header> {
        g.counters.rx_bytes += datagram.len() as u64;
        let header = match Header::open(crc32c_append, datagram) {
            Ok((header, _)) => header,
            Err(Malformed::Crc) => {
                g.drops.crc += 1;
                g.counters.crc_errors += 1;
                return None;
            }
            Err(_) => {
                g.drops.foreign += 1;
                return None;
            }
        };
        let is_own = || header.source == self.num && self.locals.find(from.ip()).is_some();
        let ignores_own = || self.deaf_to_itself.load(Ordering::Relaxed);
        // The sender's port must match its number, so that it can receive an answer.
        let dropped = if header.destination != destination || header.source as u16 != from.port() {
            &mut g.drops.foreign
        } else if destination == MULTICAST_QP && ignores_own() && is_own() {
            &mut g.drops.own
        } else if !matches!(g.state, State::Rtr | State::Rts | State::Sqd | State::Sqe) {
            &mut g.drops.state
        } else if header.qkey != g.qkey {
            &mut g.drops.qkey
        } else if g.seen.is_copy(from, header.source, header.sequence) {
            &mut g.drops.copies
        } else {
            return Some(header);
        };
        *dropped += 1;
        None
    }

    /// Takes a receive that can hold `len` octets. If there is none, counts the datagram as dropped
    /// and returns `false`.
    fn take_receive(&self, g: &mut UdState, len: usize, effects: &mut UdEffects) -> bool {
        let len = len as u64;
        let taken = match &self.srq {
            None => g.rq.take_if_fits(&mut g.taken, len),
            Some(srq) => {
                let (taken, limit_reached) = srq.inner.take_if_fits(&mut g.taken, len);
                effects.recv.srq_limit |= limit_reached;
                taken
            }
        };
        match taken {
            Taken::Yes => return true,
            Taken::None => {
                g.drops.no_receive += 1;
                g.counters.receiver_not_ready += 1;
            }
            // The receive is kept for the next datagram, as on RoCE, so that a large datagram of a
            // stranger does not consume it.
            Taken::TooSmall => g.drops.too_long += 1,
        }
        false
    }

    /// Copies a message into the elements of the taken receive. Returns `false` if the program may
    /// not write to an element; then nothing is written. Also returns `false` if a page is
    /// unmapped.
    fn copy_to_receive(&self, g: &UdState, memory: &MemoryTable, octets: &[u8]) -> bool {
        let accessor = self.accessor();
        let parts = || {
            let mut rest = octets;
            g.taken.sges().iter().map(move |sge| {
                let (now, later) = rest.split_at(rest.len().min(sge.len as usize));
                rest = later;
                ((sge.stag(), sge.addr, now.len() as u32), now)
            })
        };
        let need = Access::LOCAL_WRITE;
        parts().all(|(range, _)| memory.permits(range, need, accessor).is_ok())
            && parts().all(|(range, now)| {
                memory
                    .write((range.0, range.1), need, accessor, now)
                    .is_ok()
            })
    }
}

fn flags_of(header: &Header) -> WcFlags {
    let mut flags = WcFlags::empty();
    flags.set(WcFlags::WITH_IMM, header.immediate.is_some());
    flags.set(WcFlags::SOLICITED, header.solicited);
    flags
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{datagram_queue_pair, post_to_itself, until};
    use iwarp_rnic::SendFlags;
    use std::time::{Duration, Instant};

    /// A drive reads all datagrams, also if it takes several system calls.
    #[test]
    fn drive_reads_all_datagrams() {
        let qp = datagram_queue_pair();
        // No other thread reads the socket.
        qp.inner.pause();
        let ip = qp.inner.locals.all()[0].ip;
        let start = Instant::now();
        let taken = || qp.drops().no_receive;
        for count in [1, BATCH, BATCH + 1, 3 * BATCH] {
            loop {
                let before = taken();
                for _ in 0..count {
                    post_to_itself(&qp, ip, SendFlags::SIGNALED, 1);
                    let mut sent = [Cqe::default()];
                    until("the datagram is not sent", || {
                        qp.inner.send_cq.take_ready(&mut sent) == Ok(1)
                    });
                }
                qp.inner.drive_rx();
                if taken() - before == count as u64 {
                    break;
                }
                // On a busy machine the kernel may deliver some datagrams later. Then the test is
                // repeated.
                while taken() - before < count as u64 {
                    assert!(start.elapsed() < Duration::from_secs(20), "{count}");
                    qp.inner.drive_rx();
                }
                assert!(start.elapsed() < Duration::from_secs(20), "{count}");
            }
        }
    }
}
