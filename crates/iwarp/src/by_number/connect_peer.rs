//! The calls that create a queue pair for a connection by number, and that connect it.

use super::partner::Address;
use crate::conn::attributes::QpAttributes;
use crate::conn::attributes::is_unreliable;
use crate::conn::qp::QueuePair;
use crate::conn::retry::Retry;
use crate::device::gid_of;
use crate::error::{Error, Result};
use crate::objects::context::Context;
use crate::sys::guarded;
use std::net::{Ipv6Addr, SocketAddr};

impl Context {
    /// Creates a queue pair that can be connected by its number ([`QueuePair::connect_peer`]), for
    /// programs that exchange GIDs and numbers themselves. While the device has such queue pairs,
    /// it listens on a TCP port at each of its addresses. The queue pair numbers contain this port.
    ///
    /// # Errors
    /// The errors of [`create_qp`](Self::create_qp), and [`Error::Io`] if no file descriptor or
    /// port is left.
    pub fn create_addressable_qp(&self, attributes: &QpAttributes) -> Result<QueuePair> {
        guarded::keep_installed();
        let directory = self.inner.directory()?;
        QueuePair::create_with(&self.inner, attributes, |taken| {
            directory.reserve_number(taken)
        })
    }

    /// Creates a queue pair. It can be connected by its number if the device can listen on a TCP
    /// port; if the device cannot listen, the queue pair is created nevertheless.
    ///
    /// # Errors
    /// As [`create_qp`](Self::create_qp).
    pub fn create_reachable_qp(&self, attributes: &QpAttributes) -> Result<QueuePair> {
        let directory = self.inner.directory().ok();
        QueuePair::create_with(&self.inner, attributes, |taken| {
            let number = directory.and_then(|directory| directory.reserve_number(taken).ok());
            Ok(number.unwrap_or_else(|| self.inner.next_free_number(taken)))
        })
    }
}

/// Queue pairs that are connected by GID and number.
impl QueuePair {
    /// Connects the queue pair to a peer known by GID and queue pair number, as `ibv_modify_qp(3)`
    /// to RTR with an address does. A queue pair in INIT becomes RTR immediately, without waiting
    /// for the peer. Requests that are posted in RTS are sent when the connection is up. The peer
    /// has to call this function, too, at any time; [`set_retry`](Self::set_retry) sets how long a
    /// request waits for the peer. If the queue pair is connected already, the call has no effect.
    ///
    /// The peer may be another queue pair of this process, or the queue pair itself. A queue pair
    /// that is its own peer receives its own Sends.
    ///
    /// The peer has to know this end by the GID of the address that
    /// [`Device::source_for`](crate::Device::source_for) chooses.
    /// [`connect_peer_from`](Self::connect_peer_from) chooses another.
    ///
    /// Sends and Writes complete when the peer has placed them, as programs for InfiniBand expect.
    /// On an unreliable queue pair they complete when they are sent.
    ///
    /// # Errors
    /// As [`connect_peer_from`](Self::connect_peer_from); also [`Error::InvalidArgument`] if the
    /// device has no address of the peer's kind.
    pub fn connect_peer(&self, gid: [u8; 16], num: u32) -> Result<()> {
        let peer = Ipv6Addr::from(gid).to_canonical();
        let device = &self.inner.ctx.device;
        let own = device.source_for(SocketAddr::new(peer, num as u16));
        let own = own.ok_or(Error::InvalidArgument(
            "the device has no address of the peer's kind",
        ))?;
        self.connect_peer_from(gid_of(own), gid, num)
    }

    /// As [`connect_peer`](Self::connect_peer), for a peer that knows this end by the GID `own` of
    /// the device.
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`]: the peer's GID is not the address of a host, the device does
    ///   not have the GID `own`, or an end of an extended reliable connection is its own peer.
    /// - [`Error::InvalidState`]: the queue pair is not INIT, RTR or RTS.
    /// - [`Error::Io`]: the peer is the queue pair itself, and no file descriptor or port is left.
    pub fn connect_peer_from(&self, own: [u8; 16], gid: [u8; 16], num: u32) -> Result<()> {
        let ip = Ipv6Addr::from(gid).to_canonical();
        if ip.is_unspecified() || ip.is_multicast() {
            return Err(Error::InvalidArgument(
                "the peer's GID is not the address of a host",
            ));
        }
        let directory = self.inner.ctx.directory()?;
        let epoch = {
            let mut g = self.inner.state.lock();
            if g.link.is_open() {
                return Ok(());
            }
            let own_peer = self.is_known_as(gid, num);
            if own_peer && g.machine.xrc_end().is_some() {
                return Err(Error::InvalidArgument(
                    "an end of an extended reliable connection cannot be its own peer",
                ));
            }
            g.machine.await_stream().map_err(|_| {
                Error::InvalidState("a peer can only be set at the change from INIT to RTR")
            })?;
            if !is_unreliable(&g.machine) {
                g.machine.complete_when_placed();
            }
            g.machine.set_by_number();
            g.machine.set_own_peer(own_peer);
            g.epoch()
        };
        directory.connect((self, epoch), own, Address { gid, num })
    }

    /// Returns `true` if `num` is the number of this queue pair and `gid` is any GID of its device.
    pub(super) fn is_known_as(&self, gid: [u8; 16], num: u32) -> bool {
        let ip = Ipv6Addr::from(gid).to_canonical();
        num == self.num() && self.inner.ctx.device.address(ip).is_some()
    }

    /// Returns `true` if the queue pair is connected by GID and number.
    pub fn is_by_number(&self) -> bool {
        self.inner.state.lock().machine.is_by_number()
    }

    /// Returns how long requests wait for a peer that is known by number.
    pub fn retry(&self) -> Retry {
        self.inner.state.lock().retry
    }

    /// Sets how long requests wait for a peer that is known by number
    /// ([`connect_peer`](Self::connect_peer)). For requests that wait already, the time starts
    /// again. A request that is never answered completes with
    /// [`WcStatus::TransportRetryExceeded`](iwarp_rnic::WcStatus::TransportRetryExceeded), a Send
    /// for which the peer posts no receive with
    /// [`WcStatus::ReceiverNotReady`](iwarp_rnic::WcStatus::ReceiverNotReady), and the queue pair
    /// is then in the error state. The values have no effect on connections of the connection
    /// manager.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: a value is out of range.
    pub fn set_retry(&self, retry: Retry) -> Result<()> {
        if !retry.is_valid() {
            return Err(Error::InvalidArgument(
                "timeout and min_rnr_timer: at most 31; retry_cnt and rnr_retry: at most 7",
            ));
        }
        {
            let mut g = self.inner.state.lock();
            g.retry = retry;
            g.machine.set_rnr_retry(retry.rnr_retry);
            g.machine.set_min_rnr_timer(retry.rnr_timer());
        }
        self.inner.ctx.restart_requests(self.num());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::testing;
    use iwarp_rnic::qp::State;

    fn gid(ip: &str) -> [u8; 16] {
        gid_of(ip.parse().unwrap())
    }

    #[test]
    fn unusable_gid_is_refused() {
        let ctx = testing::context();
        let cq = ctx.create_cq(4, None).unwrap();
        let qp = ctx
            .create_addressable_qp(&testing::attributes(&ctx, &cq, &cq))
            .unwrap();
        qp.modify(State::Init).unwrap();
        for ip in ["0.0.0.0", "::", "224.0.0.1", "ff02::1"] {
            let refused = qp.connect_peer_from(gid("127.0.0.1"), gid(ip), 5);
            assert!(
                matches!(refused, Err(Error::InvalidArgument(_))),
                "{ip}: {refused:?}"
            );
            assert_eq!(qp.state(), State::Init, "{ip}");
        }
        qp.destroy();
    }

    /// A queue pair may be its own peer, under each GID of its device.
    #[test]
    fn queue_pair_knows_itself() {
        let device = testing::device_at(&["127.0.0.1", "127.0.0.2"]);
        let ctx = Context::open(&device, Config::default()).unwrap();
        let cq = ctx.create_cq(4, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        for (ip, num, own) in [
            ("127.0.0.1", qp.num(), true),
            ("127.0.0.2", qp.num(), true),
            ("127.0.0.3", qp.num(), false),
            ("127.0.0.1", qp.num() ^ 1, false),
            ("127.0.0.3", qp.num() ^ 1, false),
        ] {
            assert_eq!(qp.is_known_as(gid(ip), num), own, "{ip} {num}");
        }
        qp.destroy();
    }
}
