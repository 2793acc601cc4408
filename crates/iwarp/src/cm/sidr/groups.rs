//! Multicast groups of an identifier (`rdma_join_multicast(3)`).
//!
//! With hardware, the kernel's connection manager joins the group on the network, and librdmacm
//! attaches the queue pair. Here attaching the queue pair does both. Therefore an identifier
//! without a queue pair joins the group when it gets one.

use super::super::id::CmId;
use super::super::phase::Phase;
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
    /// The group's address, as the program has passed it.
    group: SocketAddr,
    /// The program's value for events of the group.
    user: u64,
    send_only: bool,
}

impl Membership {
    fn ip(&self) -> IpAddr {
        canonical(self.group).ip()
    }

    pub(super) fn attach(&self, qp: &UdQueuePair) -> Result<()> {
        match self.send_only {
            true => Ok(()),
            false => qp.attach_group(gid_of(self.ip())),
        }
    }
}

impl CmId {
    /// Joins a multicast group (`rdma_join_multicast(3)`). The identifier's queue pair receives the
    /// group's datagrams, unless `send_only` is `true`. The event [`CmEventKind::MulticastJoin`] or
    /// [`CmEventKind::MulticastError`] follows, with `user` and the destination of datagrams.
    ///
    /// # Errors
    /// - [`Error::InvalidState`]: the identifier is for connections, listens, or has no device
    ///   because it is neither bound nor resolved.
    /// - [`Error::InvalidArgument`]: the address is not a multicast group, or its IP version
    ///   differs from the identifier's.
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
                    "bind the identifier to an address of a device, or resolve an address first",
                ));
            };
            if !ip.is_multicast() || canonical(local).is_ipv4() != ip.is_ipv4() {
                return Err(Error::InvalidArgument(
                    "the group must be a multicast address of the identifier's IP version",
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

    /// Leaves a multicast group (`rdma_leave_multicast(3)`). If the group was joined several times,
    /// leaves the last membership. Drops pending events of this membership, and returns its `user`
    /// value.
    ///
    /// # Errors
    /// - [`Error::InvalidState`]: the identifier is for connections.
    /// - [`Error::Io`] with `EADDRNOTAVAIL`: the identifier has not joined the group.
    pub fn leave_multicast(&self, group: SocketAddr) -> Result<u64> {
        let (membership, qp) = {
            let mut s = self.inner.state.lock();
            let datagrams = s.for_datagrams()?;
            let index = datagrams.groups.iter().rposition(|m| m.group == group);
            let index =
                index.ok_or_else(|| std::io::Error::from_raw_os_error(libc::EADDRNOTAVAIL))?;
            let membership = datagrams.groups.remove(index);
            let still_receives = |m: &Membership| m.ip() == membership.ip() && !m.send_only;
            let is_last = !membership.send_only && !datagrams.groups.iter().any(still_receives);
            (membership, datagrams.qp.clone().filter(|_| is_last))
        };
        if let Some(qp) = qp {
            // The program may have detached or destroyed the queue pair, so an error is ignored.
            let _ = qp.detach_group(gid_of(membership.ip()));
        }
        self.channel().retain(|event| {
            use CmEventKind::{MulticastError, MulticastJoin};
            let user = match event.kind {
                MulticastJoin(user) | MulticastError(user) => Some(user),
                _ => None,
            };
            !(user == Some(membership.user) && event.id.is_same(self))
        });
        Ok(membership.user)
    }
}
