//! Multicast groups of a queue pair (`ibv_attach_mcast(3)`), over IP multicast.
//!
//! Each attachment has its own socket, which is bound to the group's address. All these sockets use
//! the same port, and the kernel delivers a copy of a datagram to each of them. As on InfiniBand, a
//! datagram to a group also reaches the attached queue pairs of the sender's host, including the
//! sender.

use super::address::ip_of;
use super::source::Watch;
use super::{SOCKET_BUFFER, UdInner, UdQueuePair};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::sys::datagram::{Bind, DatagramSocket};
use crate::sys::poller::Interest;
use parking_lot::Mutex;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The UDP port of datagrams to groups. No service is registered for it, and it is outside the
/// system's range of ephemeral ports.
pub(super) const GROUP_PORT: u16 = 62_811;
/// Maximum number of groups of a queue pair. Each needs a socket with a buffer.
const GROUPS_MAX: usize = 32;

pub(super) struct Group {
    ip: IpAddr,
    socket: DatagramSocket,
    token: u64,
}

impl Group {
    pub(super) const fn ip(&self) -> IpAddr {
        self.ip
    }

    pub(super) const fn socket(&self) -> &DatagramSocket {
        &self.socket
    }
}

#[derive(Default)]
pub(super) struct Groups {
    list: Mutex<Vec<Arc<Group>>>,
    /// `false` if the list is empty, so that queue pairs without groups need not lock it.
    has_groups: AtomicBool,
}

impl Groups {
    pub(super) fn for_each(&self, f: impl FnMut(&Group)) {
        if !self.has_groups.load(Ordering::Acquire) {
            return;
        }
        let list: Vec<_> = self.list.lock().clone();
        list.iter().map(|group| &**group).for_each(f);
    }

    pub(super) fn leave_all(&self, engine: &Engine) {
        for group in std::mem::take(&mut *self.list.lock()) {
            engine.remove(&group.socket, group.token);
        }
    }
}

impl UdQueuePair {
    /// Attaches the queue pair to a multicast group. It then also receives the group's datagrams
    /// that contain its Q_Key. If it is attached already, the call has no effect. A queue pair can
    /// be attached to 32 groups.
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`]: the GID is not a multicast group, or the device has no address
    ///   of its IP version.
    /// - [`Error::OutOfMemory`]: the queue pair is attached to 32 groups.
    /// - [`Error::Io`]: no file descriptor is left, or the host has too many memberships
    ///   (`net.ipv4.igmp_max_memberships`).
    pub fn attach_group(&self, gid: [u8; 16]) -> Result<()> {
        self.inner.attach_group(ip_of(gid))
    }

    /// Detaches the queue pair from a group.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: the queue pair is not attached to the group.
    pub fn detach_group(&self, gid: [u8; 16]) -> Result<()> {
        self.inner.detach_group(ip_of(gid))
    }

    /// Returns `true` if the queue pair is attached to any multicast group.
    pub fn is_attached(&self) -> bool {
        self.inner.groups.has_groups.load(Ordering::Acquire)
    }
}

impl UdInner {
    fn attach_group(self: &Arc<Self>, ip: IpAddr) -> Result<()> {
        let own = self.locals.all();
        if !ip.is_multicast() || !own.iter().any(|l| l.ip.is_ipv6() == ip.is_ipv6()) {
            return Err(Error::InvalidArgument(
                "the GID must be a multicast group of an IP version that the device has",
            ));
        }
        let mut list = self.groups.list.lock();
        if self.is_destroyed() || self.origin.is_foreign() {
            return Err(Error::InvalidState("the queue pair is destroyed"));
        }
        if list.iter().any(|group| group.ip == ip) {
            return Ok(());
        }
        if list.len() == GROUPS_MAX {
            return Err(Error::OutOfMemory);
        }
        let interface = self.interface;
        let address = match ip {
            IpAddr::V4(ip) => SocketAddr::from((ip, GROUP_PORT)),
            IpAddr::V6(ip) => SocketAddrV6::new(ip, GROUP_PORT, 0, interface).into(),
        };
        let socket =
            DatagramSocket::bind(Bind::Group(address, interface), interface, SOCKET_BUFFER)?;
        let token = self.engine.token();
        let group = Arc::new(Group { ip, socket, token });
        let source = Watch::group(self);
        self.engine
            .add(&group.socket, token, Interest::READ, source)?;
        list.push(group);
        self.groups.has_groups.store(true, Ordering::Release);
        Ok(())
    }

    fn detach_group(&self, ip: IpAddr) -> Result<()> {
        let mut list = self.groups.list.lock();
        let index = list.iter().position(|group| group.ip == ip);
        let index = index.ok_or(Error::InvalidArgument(
            "the queue pair is not attached to this group",
        ))?;
        let group = list.swap_remove(index);
        self.groups
            .has_groups
            .store(!list.is_empty(), Ordering::Release);
        drop(list);
        self.engine.remove(&group.socket, group.token);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::datagram_queue_pair;
    use std::net::Ipv6Addr;

    fn groups_of(qp: &UdQueuePair) -> Vec<IpAddr> {
        let mut list = Vec::new();
        qp.inner.groups.for_each(|group| list.push(group.ip()));
        list
    }

    fn group(last: u8) -> IpAddr {
        [239, 255, 76, last].into()
    }

    #[test]
    fn each_group_is_attached_once() {
        let qp = datagram_queue_pair();
        for ip in [8, 9, 8].map(group) {
            qp.inner.attach_group(ip).unwrap();
        }
        assert_eq!(groups_of(&qp), [8, 9].map(group));
        qp.inner.detach_group(group(8)).unwrap();
        assert!(qp.inner.detach_group(group(8)).is_err());
        assert_eq!((groups_of(&qp), qp.is_attached()), (vec![group(9)], true));
        qp.inner.detach_group(group(9)).unwrap();
        assert!(!qp.is_attached());
    }

    #[test]
    fn number_of_groups_is_limited() {
        let qp = datagram_queue_pair();
        for last in 100..100 + GROUPS_MAX as u8 {
            qp.inner.attach_group(group(last)).unwrap();
        }
        let refused = qp.inner.attach_group(group(99));
        assert!(matches!(refused, Err(Error::OutOfMemory)), "{refused:?}");
        qp.inner.attach_group(group(100)).unwrap();
    }

    /// A destroyed queue pair leaves its groups immediately, even if the program keeps a handle of
    /// it.
    #[test]
    fn destroy_leaves_groups() {
        let qp = datagram_queue_pair();
        let groups = || groups_of(&qp);
        let ips = [2, 3].map(group);
        for ip in ips {
            qp.inner.attach_group(ip).unwrap();
        }
        assert_eq!(groups(), ips);
        qp.destroy();
        assert!(groups().is_empty());
        assert!(qp.inner.attach_group(ips[0]).is_err());
    }

    #[test]
    fn group_needs_the_device_family() {
        let qp = datagram_queue_pair();
        qp.inner.forget_address(Ipv6Addr::LOCALHOST.into());
        for ip in ["ff0e::77", "::1", "127.0.0.1"] {
            let refused = qp.inner.attach_group(ip.parse().unwrap());
            assert!(
                matches!(refused, Err(Error::InvalidArgument(_))),
                "{ip}: {refused:?}"
            );
        }
        qp.inner
            .attach_group("239.255.76.1".parse().unwrap())
            .unwrap();
    }
}
