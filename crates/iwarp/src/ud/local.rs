//! The local addresses of a queue pair. For each there is a socket with the port that the queue
//! pair's number contains.
//!
//! A datagram is sent from the socket with the source address of its address handle. A queue pair
//! does not receive datagrams to addresses of other interfaces.

use super::source::Watch;
use super::{SOCKET_BUFFER, UdInner};
use crate::device::Device;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::sys::datagram::{Bind, DatagramSocket};
use crate::sys::poller::Interest;
use parking_lot::RwLock;
use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::sync::Arc;

pub(super) struct Local {
    pub(super) ip: IpAddr,
    pub(super) socket: DatagramSocket,
    pub(super) token: u64,
}

impl Local {
    fn bind(device: &Device, ip: IpAddr, port: u16, engine: &Engine) -> io::Result<Self> {
        let address = Bind::Address(device.socket_addr(ip, port));
        let socket = DatagramSocket::bind(address, device.interface_index(), SOCKET_BUFFER)?;
        let token = engine.token();
        Ok(Self { ip, socket, token })
    }
}

/// Creates a socket at each address of the device that has a GID. All have the same port, which the
/// system chooses for the first. Returns `None` if the port is in use at another address; the
/// caller then tries again with another port.
pub(super) fn bind_all(device: &Device, engine: &Engine) -> Result<Option<(Vec<Local>, u16)>> {
    let (mut list, mut port) = (Vec::new(), 0);
    for address in device.addresses.iter().filter(|a| a.place.is_some()) {
        match Local::bind(device, address.ip, port, engine) {
            Ok(local) => {
                port = local.socket.local_addr()?.port();
                list.push(local);
            }
            Err(e) if e.kind() == ErrorKind::AddrInUse && port != 0 => return Ok(None),
            // The device has lost the address since it was listed.
            Err(e) if e.kind() == ErrorKind::AddrNotAvailable => {}
            Err(e) => return Err(e.into()),
        }
    }
    match list.is_empty() {
        true => Err(Error::NoDevice),
        false => Ok(Some((list, port))),
    }
}

/// The addresses of a queue pair. Addresses are never removed, because an address that the device
/// has lost may be configured again.
pub(super) struct Locals(RwLock<Arc<[Arc<Local>]>>);

impl Locals {
    pub(super) fn new(list: Vec<Local>) -> Self {
        Self(RwLock::new(list.into_iter().map(Arc::new).collect()))
    }

    pub(super) fn all(&self) -> Arc<[Arc<Local>]> {
        Arc::clone(&self.0.read())
    }

    pub(super) fn find(&self, ip: IpAddr) -> Option<Arc<Local>> {
        self.0.read().iter().find(|local| local.ip == ip).cloned()
    }

    fn push(&self, local: Local) {
        let mut list = self.0.write();
        *list = list.iter().cloned().chain([Arc::new(local)]).collect();
    }
}

impl UdInner {
    /// Adds the sockets of all addresses to the engine.
    pub(super) fn watch(self: &Arc<Self>) -> io::Result<()> {
        for local in self.locals.all().iter() {
            let source = Watch::own(self);
            let engine = &self.engine;
            engine.add(&local.socket, local.token, Interest::READ, source)?;
        }
        Ok(())
    }

    /// Adds a socket at an address that was added to the device after the queue pair was created.
    /// Has no effect if the queue pair has a socket there.
    pub(super) fn add_address(self: &Arc<Self>, ip: IpAddr) -> Result<()> {
        if self.locals.find(ip).is_some() {
            return Ok(());
        }
        if self.origin.is_foreign() {
            return Err(Error::InvalidState(
                "the parent process created the queue pair",
            ));
        }
        let device = self.ctx.device.current()?.ok_or(Error::NoDevice)?;
        if device.address(ip).is_none() {
            return Err(Error::InvalidArgument("the device does not have this GID"));
        }
        let g = self.state.lock();
        if self.is_destroyed() {
            return Err(Error::InvalidState("the queue pair is destroyed"));
        }
        if self.locals.find(ip).is_some() {
            // Another thread has added the address in the meantime.
            return Ok(());
        }
        let local = Local::bind(&device, ip, self.num as u16, &self.engine)?;
        let source = Watch::own(self);
        self.engine
            .add(&local.socket, local.token, Interest::READ, source)?;
        if g.driven_by_app {
            self.engine.pause(&local.socket);
        }
        self.locals.push(local);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{datagram_queue_pair as queue_pair, device_at};
    use crate::ud::UdAddress;
    use crate::ud::UdSendWr;
    use iwarp_rnic::SendFlags;
    use std::net::Ipv6Addr;
    use std::time::{Duration, Instant};

    impl UdInner {
        /// Removes an address, as if the device had got it after the queue pair was created.
        pub(in crate::ud) fn forget_address(&self, ip: IpAddr) {
            let local = self.locals.find(ip).unwrap();
            self.engine.remove(&local.socket, local.token);
            let mut list = self.locals.0.write();
            *list = list.iter().filter(|l| l.ip != ip).cloned().collect();
        }

        /// Stops the engine from reading the queue pair's sockets.
        pub(in crate::ud) fn pause(&self) {
            for local in self.locals.all().iter() {
                self.engine.pause(&local.socket);
            }
        }
    }

    #[test]
    fn later_address_is_used_on_demand() {
        let (a, b) = (queue_pair(), queue_pair());
        let own = Ipv6Addr::LOCALHOST;
        a.inner.forget_address(own.into());
        let wr = UdSendWr {
            wr_id: 1,
            immediate: None,
            flags: SendFlags::INLINE,
            to: UdAddress::new(own.octets(), own.octets(), 0, 0).unwrap(),
            remote_qp: b.num(),
            remote_qkey: 0,
            sges: &[],
            inline: &[b"late"],
        };
        a.post_send(&[wr]).unwrap();
        let local = a.inner.locals.find(own.into()).unwrap();
        assert_eq!(local.socket.local_addr().unwrap().port(), a.num() as u16);
        // The datagram was valid, so it came from the sender's port. It was dropped because no
        // receive was posted.
        let has_arrived = || {
            b.inner.drive_rx();
            b.drops().no_receive == 1
        };
        let start = Instant::now();
        while !has_arrived() {
            assert!(start.elapsed() < Duration::from_secs(10), "{:?}", b.drops());
        }
    }

    #[test]
    fn sockets_share_one_port() {
        let engine = Engine::current().unwrap();
        let bound = |addresses: &[&str]| bind_all(&device_at(addresses), &engine);
        let (list, port) = bound(&["127.0.0.1", "127.0.0.2"]).unwrap().unwrap();
        assert_eq!(list.len(), 2);
        for local in &list {
            let address = local.socket.local_addr().unwrap();
            assert_eq!(address, (local.ip, port).into());
        }
        // An address that the device has lost is skipped.
        for addresses in [["192.0.2.1", "127.0.0.1"], ["127.0.0.1", "192.0.2.1"]] {
            let (list, _) = bound(&addresses).unwrap().unwrap();
            assert_eq!(list.len(), 1, "{addresses:?}");
            assert_eq!(list[0].ip, IpAddr::from([127, 0, 0, 1]));
        }
        for none in [&[][..], &["192.0.2.1"]] {
            assert!(matches!(bound(none), Err(Error::NoDevice)), "{none:?}");
        }
        // One address twice: the port is in use at the second.
        assert!(bound(&["127.0.0.1", "127.0.0.1"]).unwrap().is_none());
        // Other errors are returned. A bind to a link-local address without a scope fails with
        // EINVAL.
        for addresses in [&["fe80::1"][..], &["127.0.0.1", "fe80::1"]] {
            let Err(error) = bound(addresses) else {
                panic!("{addresses:?}")
            };
            assert_eq!(error.errno(), libc::EINVAL, "{addresses:?}");
        }
    }

    /// The buffers have the largest size that the kernel allows, up to 1 MiB.
    #[test]
    fn socket_buffers_have_maximum_size() {
        let plain = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let plain = socket2::SockRef::from(&plain);
        plain.set_recv_buffer_size(1 << 20).unwrap();
        plain.set_send_buffer_size(1 << 20).unwrap();
        let sizes = |socket: socket2::SockRef<'_>| {
            [
                socket.recv_buffer_size().unwrap(),
                socket.send_buffer_size().unwrap(),
            ]
        };
        let most = sizes(plain);
        for local in queue_pair().inner.locals.all().iter() {
            assert_eq!(sizes(socket2::SockRef::from(&local.socket)), most);
        }
    }
}
