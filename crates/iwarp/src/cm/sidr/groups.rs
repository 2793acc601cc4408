//! Multicast groups of an identifier (`rdma_join_multicast(3)`).
//!
//! With the kernel, the connection manager joins groups on the network, and the library attaches
//! the queue pair. Here attaching does both, so an identifier without a queue pair joins when it
//! gets one.

use super::super::id::{CmId, Phase};
use super::super::{CmEvent, CmEventKind};
use super::DatagramEnd;
use crate::device::gid_of;
use crate::error::{Error, Result};
use crate::sys::address::canonical;
use crate::ud::UdQueuePair;
use iwarp_proto::datagram::MULTICAST_QP;
use iwarp_proto::sidr::DEFAULT_QKEY;
use std::net::{IpAddr, SocketAddr};

/// A group that an identifier has joined.
#[derive(Debug, Clone, Copy)]
pub(super) struct Membership {
    /// The program's address of the group.
    group: SocketAddr,
    /// The program's value for its events.
    user: u64,
    /// The identifier sends to the group and receives nothing from it.
    send_only: bool,
}

impl Membership {
    fn ip(&self) -> IpAddr {
        canonical(self.group).ip()
    }

    /// Attaches a queue pair to the group.
    pub(super) fn attach(&self, qp: &UdQueuePair) -> Result<()> {
        match self.send_only {
            true => Ok(()),
            false => qp.attach_group(gid_of(self.ip())),
        }
    }
}

impl CmId {
    /// Joins a multicast group (`rdma_join_multicast(3)`). Its queue pair receives the group's
    /// datagrams, unless `send_only`. The event [`CmEventKind::MulticastJoin`] or
    /// [`CmEventKind::MulticastError`] follows, with `user` and the destination of datagrams.
    ///
    /// # Errors
    /// [`Error::InvalidState`]: the identifier is for connections, is not bound to a device and not
    /// resolved, or listens. [`Error::InvalidArgument`]: the address is no group of the device's IP
    /// version.
    pub fn join_multicast(&self, group: SocketAddr, send_only: bool, user: u64) -> Result<()> {
        let member = Membership {
            group,
            user,
            send_only,
        };
        let ip = member.ip();
        let qp = {
            let mut s = self.inner.state.lock();
            let local = s.local.filter(|_| s.ctx.is_some());
            let is_ready = matches!(
                s.phase,
                Phase::Idle | Phase::Resolved | Phase::Routed | Phase::Connected(_)
            );
            let datagrams = s.for_datagrams()?;
            let Some(local) = local.filter(|_| is_ready) else {
                return Err(Error::InvalidState(
                    "bind it to an address of a device, or resolve an address first",
                ));
            };
            if !ip.is_multicast() || canonical(local).is_ipv4() != ip.is_ipv4() {
                return Err(Error::InvalidArgument(
                    "a multicast group of the IP version of the identifier's address is needed",
                ));
            }
            datagrams.groups.push(member);
            datagrams.qp.clone()
        };
        let attached = qp.map_or(Ok(()), |qp| member.attach(&qp));
        let (kind, status) = match &attached {
            Ok(()) => (CmEventKind::MulticastJoin(user), 0),
            Err(e) => (CmEventKind::MulticastError(user), e.errno()),
        };
        let end = DatagramEnd {
            ip,
            num: MULTICAST_QP,
            qkey: DEFAULT_QKEY,
        };
        self.push(CmEvent {
            datagrams: Some(end),
            ..self.event(kind, status)
        });
        Ok(())
    }

    /// Leaves the group that it has joined last by this address (`rdma_leave_multicast(3)`).
    /// Pending events of that membership are dropped. Returns the value that it was joined with.
    ///
    /// # Errors
    /// [`Error::InvalidState`]: the identifier is for connections. The operating system's
    /// `EADDRNOTAVAIL`: it has not joined the group.
    pub fn leave_multicast(&self, group: SocketAddr) -> Result<u64> {
        let (left, qp) = {
            let mut s = self.inner.state.lock();
            let datagrams = s.for_datagrams()?;
            let at = datagrams.groups.iter().rposition(|m| m.group == group);
            let at = at.ok_or_else(|| std::io::Error::from_raw_os_error(libc::EADDRNOTAVAIL))?;
            let left = datagrams.groups.remove(at);
            let stays = |m: &Membership| m.ip() == left.ip() && !m.send_only;
            let is_last = !left.send_only && !datagrams.groups.iter().any(stays);
            (left, datagrams.qp.clone().filter(|_| is_last))
        };
        if let Some(qp) = qp {
            // The program may have detached it, or destroyed it.
            let _ = qp.detach_group(gid_of(left.ip()));
        }
        self.channel().retain(|event| {
            use CmEventKind::{MulticastError, MulticastJoin};
            let user = match event.kind {
                MulticastJoin(user) | MulticastError(user) => Some(user),
                _ => None,
            };
            !(user == Some(left.user) && event.id.is_same(self))
        });
        Ok(left.user)
    }
}
