//! The TCP ports on which a device listens for the peers of its queue pairs, and the queue pair
//! numbers that contain these ports.

use crate::cm::{CmEventChannel, CmId};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::objects::context::{Context, random_u32};
use std::net::IpAddr;

/// Queue pair numbers per port. They differ in the upper 8 of 24 bits; the lower 16 are the port.
const PER_PORT: usize = 256;
/// How many ports are tried until one is free at all addresses.
const PORT_ATTEMPTS: usize = 16;

/// A port on which the device listens.
struct Port {
    listeners: Vec<(IpAddr, CmId)>,
    port: u16,
    used: [bool; PER_PORT],
}

impl Port {
    /// Opens a port that is free at each address of the device that has a GID.
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

    /// Listens at one more address. The operating system chooses the port at the first call.
    fn listen(
        &mut self,
        channel: &CmEventChannel,
        ctx: &Context,
        device: &Device,
        ip: IpAddr,
    ) -> Result<()> {
        let id = CmId::create(channel, Some(ctx));
        let address = device.socket_addr(ip, self.port);
        if let Err(e) = id.bind(address).and_then(|()| id.listen(0)) {
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

/// A port that no queue pair uses any more. Dropping it closes its listeners; the caller holds no
/// lock then.
pub(super) struct Unused(Port);

impl Drop for Unused {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The ports of a device. Dropping them closes their listeners.
#[derive(Default)]
pub(super) struct Ports(Vec<Port>);

impl Ports {
    /// Reserves a queue pair number that contains one of the ports. If no number is free, opens
    /// another port. `taken` returns `true` for numbers in use.
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

    /// Releases a number. If no other queue pair uses its port, removes the port and returns it.
    pub(super) fn release(&mut self, num: u32) -> Option<Unused> {
        let port = num as u16;
        if let Some(p) = self.0.iter_mut().find(|p| p.port == port) {
            p.used[(num >> 16) as usize % PER_PORT] = false;
        }
        let unused = self.0.iter().position(|p| !p.used.contains(&true))?;
        Some(Unused(self.0.swap_remove(unused)))
    }

    /// Listens for the peers of the queue pair `num` at the address `ip`. Has no effect if its port
    /// is already open at that address, or if the number contains none of the ports.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the device does not have the address; [`Error::Io`].
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
            return Err(Error::InvalidArgument("the device does not have this GID"));
        }
        port.listen(channel, ctx, &device, ip)
    }
}

impl Drop for Ports {
    fn drop(&mut self) {
        self.0.iter().for_each(Port::close);
    }
}

/// Calls `attempt` until it does not fail with `EADDRINUSE`, at most [`PORT_ATTEMPTS`] times. Each
/// call tries another port.
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
    fn port_is_same_at_all_addresses() {
        let (ctx, channel) = (context(), create_event_channel().unwrap());
        let opened = |addresses: &[&str]| Port::open_at_all(&channel, &ctx, &device_at(addresses));
        let port = opened(&["127.0.0.1", "127.0.0.2"]).unwrap();
        for (index, (ip, id)) in port.listeners.iter().enumerate() {
            assert_eq!(*ip, IpAddr::from([127, 0, 0, 1 + index as u8]));
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
    fn only_taken_port_is_retried() {
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

    /// No number is reserved twice. If no number of a port is free, another port is opened.
    #[test]
    fn numbers_are_reserved_once() {
        let (ctx, channel) = (context(), create_event_channel().unwrap());
        let mut ports = Ports::default();
        let mut reserved = Vec::new();
        for _ in 0..PER_PORT {
            let taken = |num| reserved.contains(&num);
            let num = ports.reserve(&channel, &ctx, taken).unwrap();
            assert!(!reserved.contains(&num) && num >> 24 == 0);
            reserved.push(num);
        }
        let port = |num: &u32| *num as u16;
        assert!(reserved.iter().all(|num| port(num) == port(&reserved[0])));
        let reserve = |ports: &mut Ports, taken: Option<u32>| {
            let is_taken = |num| Some(num) == taken;
            ports.reserve(&channel, &ctx, is_taken).unwrap()
        };
        let other = reserve(&mut ports, None);
        assert_ne!(port(&other), port(&reserved[0]));
        assert_eq!(ports.0.len(), 2);
        // A number that is free in `ports` may be in use by a queue pair of another kind.
        assert!(ports.release(reserved[7]).is_none());
        let second = reserve(&mut ports, Some(reserved[7]));
        assert!(port(&second) == port(&other) && second != other);
        assert_eq!(reserve(&mut ports, None), reserved[7]);
        // Releasing the last number of a port closes its listeners.
        let id = ports.0[1].listeners[0].1.clone();
        assert!(ports.release(other).is_none());
        assert!(!is_destroyed(&id));
        drop(ports.release(second).unwrap());
        assert!(is_destroyed(&id));
        let id = ports.0[0].listeners[0].1.clone();
        drop(ports);
        assert!(is_destroyed(&id));
    }

    /// An address that the device got after the port was opened gets exactly one listener.
    #[test]
    fn new_address_gets_listener() {
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
        // For a number without a port of the device, the call has no effect.
        let unrelated = num ^ 1;
        ports.listen_at(&channel, &ctx, unrelated, foreign).unwrap();
    }
}
