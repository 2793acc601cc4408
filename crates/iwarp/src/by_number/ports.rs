//! The TCP ports on which a device listens for the peers of its queue pairs, and the queue pair
//! numbers that contain these ports.

use crate::cm::{CmEventChannel, CmId};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::objects::context::{Context, random_u32};
use std::net::IpAddr;

/// Queue pair numbers per port. They differ in the 8 of 24 bits that are not the port.
const PER_PORT: usize = 256;
/// How many ports are tried until one is free at all addresses.
const PORT_ATTEMPTS: usize = 16;

/// A port on which the device listens.
struct Port {
    /// One listener for each address.
    listeners: Vec<(IpAddr, CmId)>,
    port: u16,
    used: [bool; PER_PORT],
}

impl Port {
    /// Opens a port that is free at all addresses of the device that have GIDs.
    fn open(channel: &CmEventChannel, ctx: &Context) -> Result<Self> {
        let device = ctx.device().current()?.ok_or(Error::NoDevice)?;
        until_free(|| Self::open_at_all(channel, ctx, &device))
    }

    fn open_at_all(channel: &CmEventChannel, ctx: &Context, device: &Device) -> Result<Self> {
        let mut port = Self {
            listeners: Vec::new(),
            port: 0,
            used: [false; PER_PORT],
        };
        for address in device.addresses.iter().filter(|a| a.place.is_some()) {
            if let Err(e) = port.listen(channel, ctx, device, address.ip) {
                port.close();
                return Err(e);
            }
        }
        match port.port {
            0 => Err(Error::NoDevice),
            _ => Ok(port),
        }
    }

    /// Listens at one more address. The first one chooses the port.
    fn listen(
        &mut self,
        channel: &CmEventChannel,
        ctx: &Context,
        device: &Device,
        ip: IpAddr,
    ) -> Result<()> {
        let id = CmId::create(channel, Some(ctx));
        let at = device.socket_addr(ip, self.port);
        if let Err(e) = id.bind(at).and_then(|()| id.listen(0)) {
            id.destroy();
            return Err(e);
        }
        self.port = id.addresses().0.map_or(0, |a| a.port());
        self.listeners.push((ip, id));
        Ok(())
    }

    fn close(&self) {
        self.listeners.iter().for_each(|(_, id)| id.destroy());
    }
}

/// A port that no queue pair uses any more. Its listeners are closed when it is dropped, which is
/// done without locks.
pub(super) struct Unused(Port);

impl Drop for Unused {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The ports of a device. Its listeners are closed when it is dropped.
#[derive(Default)]
pub(super) struct Ports(Vec<Port>);

impl Ports {
    /// Reserves a queue pair number that contains one of the ports, and opens another port if
    /// there is none. `taken` returns `true` for numbers in use.
    pub(super) fn reserve(
        &mut self,
        channel: &CmEventChannel,
        ctx: &Context,
        taken: impl Fn(u32) -> bool,
    ) -> Result<u32> {
        let random = random_u32()? as usize;
        for round in 0..2 {
            for port in &mut self.0 {
                for i in 0..PER_PORT {
                    let high = (random + i) % PER_PORT;
                    let num = (high as u32) << 16 | u32::from(port.port);
                    if !port.used[high] && num > 1 && !taken(num) {
                        port.used[high] = true;
                        return Ok(num);
                    }
                }
            }
            if round == 0 {
                self.0.push(Port::open(channel, ctx)?);
            }
        }
        Err(Error::OutOfMemory)
    }

    /// Returns a number. Returns its port if no other queue pair uses that, because peers should
    /// not be able to connect to it any more.
    pub(super) fn release(&mut self, num: u32) -> Option<Unused> {
        let port = num as u16;
        if let Some(p) = self.0.iter_mut().find(|p| p.port == port) {
            p.used[(num >> 16) as usize % PER_PORT] = false;
        }
        let unused = self.0.iter().position(|p| !p.used.contains(&true))?;
        Some(Unused(self.0.swap_remove(unused)))
    }

    /// Listens for the peers of the queue pair `num` at one more address, if the device has got it
    /// since the port was opened.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the device does not have the address; else the operating
    /// system's.
    pub(super) fn listen_at(
        &mut self,
        channel: &CmEventChannel,
        ctx: &Context,
        num: u32,
        ip: IpAddr,
    ) -> Result<()> {
        let port = self.0.iter_mut().find(|p| p.port == num as u16);
        let Some(port) = port.filter(|p| !p.listeners.iter().any(|l| l.0 == ip)) else {
            return Ok(());
        };
        let device = ctx.device().current()?.ok_or(Error::NoDevice)?;
        if device.address(ip).is_none() {
            return Err(Error::InvalidArgument("the GID is none of this device"));
        }
        port.listen(channel, ctx, &device, ip)
    }
}

impl Drop for Ports {
    fn drop(&mut self) {
        self.0.iter().for_each(Port::close);
    }
}

/// Calls `attempt`, and again as long as it fails because a port is taken. Each call gets another
/// port.
fn until_free<T>(mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
    let mut result = attempt();
    for _ in 1..PORT_ATTEMPTS {
        match result {
            Err(ref e) if e.errno() == libc::EADDRINUSE => {}
            _ => break,
        }
        result = attempt();
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cm::{CmEventKind, create_event_channel};
    use crate::testing::{context, device_at};

    fn is_destroyed(id: &CmId) -> bool {
        id.write_event(CmEventKind::User(0), 0).is_err()
    }

    #[test]
    fn one_port_for_all_addresses() {
        let (ctx, channel) = (context(), create_event_channel().unwrap());
        let opened = |addresses: &[&str]| Port::open_at_all(&channel, &ctx, &device_at(addresses));
        let port = opened(&["127.0.0.1", "127.0.0.2"]).unwrap();
        for (at, (ip, id)) in port.listeners.iter().enumerate() {
            assert_eq!(*ip, IpAddr::from([127, 0, 0, 1 + at as u8]));
            assert_eq!(id.addresses().0, Some((*ip, port.port).into()));
        }
        assert_eq!(port.listeners.len(), 2);
        port.close();
        assert!(port.listeners.iter().all(|(_, id)| is_destroyed(id)));
        let error = |addresses: &[&str]| opened(addresses).err().unwrap();
        assert!(matches!(error(&[]), Error::NoDevice));
        let twice = error(&["127.0.0.1", "127.0.0.1"]);
        assert_eq!(twice.errno(), libc::EADDRINUSE);
    }

    #[test]
    fn taken_port_is_retried() {
        let error = |errno| Error::from(std::io::Error::from_raw_os_error(errno));
        for (result, attempts, wanted) in [
            (libc::EADDRINUSE, PORT_ATTEMPTS, libc::EADDRINUSE),
            (libc::EMFILE, 1, libc::EMFILE),
        ] {
            let mut made = 0;
            let failed = until_free(|| {
                made += 1;
                Err::<(), _>(error(result))
            });
            assert_eq!((made, failed.unwrap_err().errno()), (attempts, wanted));
        }
        let mut made = 0;
        let third = until_free(|| {
            made += 1;
            match made {
                3 => Ok("free"),
                _ => Err(error(libc::EADDRINUSE)),
            }
        });
        assert_eq!((made, third.unwrap()), (3, "free"));
    }

    /// A number is given once. When all numbers of a port are given, another port is opened.
    #[test]
    fn numbers_are_given_once() {
        let (ctx, channel) = (context(), create_event_channel().unwrap());
        let mut ports = Ports::default();
        let mut given = Vec::new();
        for _ in 0..PER_PORT {
            let taken = |num| given.contains(&num);
            let num = ports.reserve(&channel, &ctx, taken).unwrap();
            assert!(!given.contains(&num) && num >> 24 == 0);
            given.push(num);
        }
        let port = |num: &u32| *num as u16;
        assert!(given.iter().all(|num| port(num) == port(&given[0])));
        let reserve = |ports: &mut Ports, taken: Option<u32>| {
            let is_taken = |num| Some(num) == taken;
            ports.reserve(&channel, &ctx, is_taken).unwrap()
        };
        let other = reserve(&mut ports, None);
        assert_ne!(port(&other), port(&given[0]));
        assert_eq!(ports.0.len(), 2);
        // A number that is free here may belong to another kind of queue pair.
        assert!(ports.release(given[7]).is_none());
        let second = reserve(&mut ports, Some(given[7]));
        assert!(port(&second) == port(&other) && second != other);
        assert_eq!(reserve(&mut ports, None), given[7]);
        // The listeners of a port are closed with its last number.
        let id = ports.0[1].listeners[0].1.clone();
        assert!(ports.release(other).is_none());
        assert!(!is_destroyed(&id));
        drop(ports.release(second).unwrap());
        assert!(is_destroyed(&id));
        let id = ports.0[0].listeners[0].1.clone();
        drop(ports);
        assert!(is_destroyed(&id));
    }

    /// An address that the device has got since the port was opened gets a listener, once.
    #[test]
    fn listens_at_addresses_of_the_device() {
        let (ctx, channel) = (context(), create_event_channel().unwrap());
        let mut ports = Ports::default();
        let num = ports.reserve(&channel, &ctx, |_| false).unwrap();
        let own = IpAddr::from([127, 0, 0, 1]);
        for _ in 0..2 {
            ports.listen_at(&channel, &ctx, num, own).unwrap();
            let at_own = ports.0[0].listeners.iter().filter(|l| l.0 == own);
            assert_eq!(at_own.count(), 1);
        }
        ports.0[0].listeners.retain(|(ip, id)| {
            let stays = *ip != own;
            if !stays {
                id.destroy();
            }
            stays
        });
        ports.listen_at(&channel, &ctx, num, own).unwrap();
        assert!(ports.0[0].listeners.iter().any(|l| l.0 == own));
        let foreign = IpAddr::from([192, 0, 2, 1]);
        let refused = ports.listen_at(&channel, &ctx, num, foreign);
        assert!(matches!(refused, Err(Error::InvalidArgument(_))));
        // A number that contains none of the ports cannot be reached anyway.
        let unrelated = num ^ 1;
        ports.listen_at(&channel, &ctx, unrelated, foreign).unwrap();
    }
}
