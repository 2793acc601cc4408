//! Multicast: the groups that a queue pair is attached to (`ibv_attach_mcast(3)`), by IP multicast.
//!
//! Each attachment has a socket of its own at the group's address. All of them share a port, so the
//! kernel delivers a copy to each. A datagram to a group also reaches the attached queue pairs of
//! this host, including its sender, as on InfiniBand.

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

/// The UDP port of datagrams to groups. No service is registered for it, and the system does not
/// choose it for other sockets.
pub(super) const GROUP_PORT: u16 = 62_811;
/// The largest number of groups of a queue pair. Each needs a socket with its buffer.
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
    /// Whether there may be groups, so that queue pairs without groups take no lock.
    any: AtomicBool,
}

impl Groups {
    pub(super) fn read(&self, f: impl FnMut(&Group)) {
        if !self.any.load(Ordering::Acquire) {
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
    /// Attaches it to a multicast group: it also receives the group's datagrams that have its
    /// Q_Key. Does nothing if it is attached already. At most 32 groups.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: not a group, or of a family of which the device has no address;
    /// [`Error::OutOfMemory`]: too many groups; the operating system's: no descriptors, or too many
    /// memberships (`net.ipv4.igmp_max_memberships`).
    pub fn attach_group(&self, gid: [u8; 16]) -> Result<()> {
        self.inner.attach_group(ip_of(gid))
    }

    /// Detaches it from a group.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: it is not attached to the group.
    pub fn detach_group(&self, gid: [u8; 16]) -> Result<()> {
        self.inner.detach_group(ip_of(gid))
    }

    /// Returns `true` if it is attached to a multicast group.
    pub fn is_attached(&self) -> bool {
        self.inner.groups.any.load(Ordering::Acquire)
    }
}

impl UdInner {
    fn attach_group(self: &Arc<Self>, ip: IpAddr) -> Result<()> {
        let own = self.locals.all();
        if !ip.is_multicast() || !own.iter().any(|l| l.ip.is_ipv6() == ip.is_ipv6()) {
            return Err(Error::InvalidArgument(
                "a multicast group of an IP version of the device is needed",
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
        self.groups.any.store(true, Ordering::Release);
        Ok(())
    }

    fn detach_group(&self, ip: IpAddr) -> Result<()> {
        let mut list = self.groups.list.lock();
        let at = list.iter().position(|group| group.ip == ip);
        let at = at.ok_or(Error::InvalidArgument(
            "the queue pair is not attached to this group",
        ))?;
        let group = list.swap_remove(at);
        self.groups.any.store(!list.is_empty(), Ordering::Release);
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

    /// A program may keep the handle of a destroyed queue pair, but its groups are left
    /// immediately.
    #[test]
    fn destroy_leaves_groups() {
        let qp = datagram_queue_pair();
        let groups = || {
            let mut list = Vec::new();
            qp.inner.groups.read(|group| list.push(group.ip()));
            list
        };
        let ips = [2, 3].map(|last| IpAddr::from([239, 255, 76, last]));
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
