//! UDP sockets of the connection manager. They report the destination address of each message, so
//! that the reply can be sent from that address.
//!
//! Invariant of the `unsafe`: addresses, bytes and control data that the kernel accesses are
//! variables of the calling function, and are passed with their real sizes. Only the parts that the
//! kernel reports as written are read.

use super::address::canonical;
use super::connect::Sharing;
use super::option;
use socket2::{Domain, Protocol, SockAddr, SockAddrStorage, Socket, Type};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Words of control data: one entry, and room for entries that the kernel may add.
const CONTROL_WORDS: usize = 16;

/// A bound UDP socket. It never blocks.
#[derive(Debug)]
pub struct ServiceSocket {
    socket: Socket,
    v6: bool,
}

/// The length and the addresses of a received message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// Length of the message in bytes. It exceeds the buffer if the message was truncated.
    pub len: usize,
    /// The sender's address.
    pub peer: SocketAddr,
    /// The destination address on this host; `None` for a multicast or broadcast address.
    pub to: Option<IpAddr>,
}

impl ServiceSocket {
    /// Binds a socket to `address`; for port 0, the kernel chooses a free port. If `only_v6` is
    /// `None`, the system's default applies. Sockets that [share](Sharing::Shared) a port do not
    /// exclude each other until one has [claimed](Self::claim) it.
    ///
    /// # Errors
    /// The operating system's error: no descriptor is left, the address does not belong to the
    /// host, or the port is in use.
    pub fn bind(address: SocketAddr, only_v6: Option<bool>, sharing: Sharing) -> io::Result<Self> {
        let socket = Socket::new(
            Domain::for_address(address),
            Type::DGRAM.nonblocking(),
            Some(Protocol::UDP),
        )?;
        let this = Self {
            socket,
            v6: address.is_ipv6(),
        };
        if this.v6 {
            if let Some(only_v6) = only_v6 {
                this.socket.set_only_v6(only_v6)?;
            }
            option::set(
                &this.socket,
                libc::IPPROTO_IPV6,
                libc::IPV6_RECVPKTINFO,
                1i32,
            )?;
        } else {
            option::set(&this.socket, libc::IPPROTO_IP, libc::IP_PKTINFO, 1i32)?;
        }
        this.socket.set_reuse_address(sharing == Sharing::Shared)?;
        this.socket.bind(&address.into())?;
        Ok(this)
    }

    /// Stops sharing the port: no other socket can bind it from now on.
    pub fn claim(&self) -> io::Result<()> {
        self.socket.set_reuse_address(false)
    }

    /// Returns the address that the socket is bound to.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        let address = self.socket.local_addr()?;
        address
            .as_socket()
            .ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Converts an address to this socket's address family.
    fn to_own_family(&self, address: SocketAddr) -> SocketAddr {
        match canonical(address) {
            SocketAddr::V4(v4) if self.v6 => (v4.ip().to_ipv6_mapped(), v4.port()).into(),
            address => address,
        }
    }

    /// Connects the socket: from now on, it only receives from `peer`, and [`send`](Self::send)
    /// sends to `peer`.
    ///
    /// # Errors
    /// The operating system's error, such as no route.
    pub fn connect(&self, peer: SocketAddr) -> io::Result<()> {
        self.socket.connect(&self.to_own_family(peer).into())
    }

    /// Returns the address of the connected peer.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        let address = self.socket.peer_addr()?.as_socket();
        let address = address.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
        Ok(canonical(address))
    }

    /// Sends a message to the connected peer.
    ///
    /// # Errors
    /// The operating system's error. `ConnectionRefused` concerns an earlier message: no socket is
    /// bound to the peer's port.
    pub fn send(&self, octets: &[u8]) -> io::Result<()> {
        self.socket
            .send_with_flags(octets, libc::MSG_NOSIGNAL)
            .map(|_| ())
    }

    /// Sends a message from an address of this host.
    ///
    /// # Errors
    /// The operating system's error. `WouldBlock` if the socket's buffer is full.
    pub fn send_from(&self, octets: &[u8], from: IpAddr, to: SocketAddr) -> io::Result<()> {
        let mut control = [0u64; CONTROL_WORDS];
        let used = write_source(&mut control, self.v6, from);
        let to = SockAddr::from(self.to_own_family(to));
        let mut vector = libc::iovec {
            iov_base: octets.as_ptr().cast_mut().cast(),
            iov_len: octets.len(),
        };
        // SAFETY: the structure contains numbers and pointers, so all zeros are a valid value.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_name = to.as_ptr().cast_mut().cast();
        header.msg_namelen = to.len();
        header.msg_iov = &raw mut vector;
        header.msg_iovlen = 1;
        header.msg_control = control.as_mut_ptr().cast();
        header.msg_controllen = used as _;
        // SAFETY: the invariant at the head of the file holds.
        let sent = unsafe {
            libc::sendmsg(
                self.socket.as_raw_fd(),
                &raw const header,
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            )
        };
        match sent {
            0.. => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Receives a message. Returns `None` if none has arrived.
    ///
    /// # Errors
    /// The operating system's error. It concerns an earlier message; the next call may succeed.
    pub fn receive(&self, into: &mut [u8]) -> io::Result<Option<Arrival>> {
        let mut name = SockAddrStorage::zeroed();
        let mut control = [0u64; CONTROL_WORDS];
        let mut vector = libc::iovec {
            iov_base: into.as_mut_ptr().cast(),
            iov_len: into.len(),
        };
        // SAFETY: the structure contains numbers and pointers, so all zeros are a valid value.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_name = (&raw mut name).cast();
        header.msg_namelen = size_of::<SockAddrStorage>() as libc::socklen_t;
        header.msg_iov = &raw mut vector;
        header.msg_iovlen = 1;
        header.msg_control = control.as_mut_ptr().cast();
        header.msg_controllen = size_of_val(&control) as _;
        // SAFETY: the invariant at the head of the file holds.
        let received = unsafe {
            libc::recvmsg(
                self.socket.as_raw_fd(),
                &raw mut header,
                libc::MSG_DONTWAIT | libc::MSG_TRUNC,
            )
        };
        let Ok(len) = usize::try_from(received) else {
            return match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
                e => Err(e),
            };
        };
        // SAFETY: the kernel has written the address and its length, and the control data, which
        // are variables of this function.
        let (peer, to) = unsafe {
            (
                SockAddr::new(name, header.msg_namelen),
                destination(&header),
            )
        };
        let peer = peer
            .as_socket()
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
        Ok(Some(Arrival {
            len,
            peer: canonical(peer),
            to,
        }))
    }
}

impl AsFd for ServiceSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Returns the local address to which a message was sent. Returns `None` if the kernel does not
/// report it, or for a multicast or broadcast address.
///
/// # Safety
/// The kernel has filled in `header` and the memory that it refers to.
unsafe fn destination(header: &libc::msghdr) -> Option<IpAddr> {
    // SAFETY: `header` refers to control data that the kernel has written.
    let mut cmsg = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !cmsg.is_null() {
        // SAFETY: `cmsg` is an entry of the control data, with the length in its header.
        let (entry, data) = unsafe { (&*cmsg, libc::CMSG_DATA(cmsg)) };
        let holds = |value_len: usize| {
            // SAFETY: the macro only computes a size.
            let entry_len = unsafe { libc::CMSG_LEN(value_len as u32) };
            entry.cmsg_len as u64 >= u64::from(entry_len)
        };
        match (entry.cmsg_level, entry.cmsg_type) {
            (libc::IPPROTO_IP, libc::IP_PKTINFO) if holds(size_of::<libc::in_pktinfo>()) => {
                // SAFETY: the entry contains this structure.
                let info = unsafe { data.cast::<libc::in_pktinfo>().read_unaligned() };
                // The two differ if the destination is a multicast or broadcast address.
                let is_own = info.ipi_addr.s_addr == info.ipi_spec_dst.s_addr;
                let ip = u32::from_be(info.ipi_addr.s_addr);
                return is_own.then(|| IpAddr::V4(ip.into()));
            }
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) if holds(size_of::<libc::in6_pktinfo>()) => {
                // SAFETY: the entry contains this structure.
                let info = unsafe { data.cast::<libc::in6_pktinfo>().read_unaligned() };
                let ip = IpAddr::from(info.ipi6_addr.s6_addr).to_canonical();
                let is_broadcast = ip == IpAddr::from([255, 255, 255, 255]);
                return (!ip.is_multicast() && !is_broadcast).then_some(ip);
            }
            _ => {}
        }
        // SAFETY: as above.
        cmsg = unsafe { libc::CMSG_NXTHDR(header, cmsg) };
    }
    None
}

/// Writes control data that set the source address of a message. Returns their length in bytes.
fn write_source(control: &mut [u64; CONTROL_WORDS], v6: bool, from: IpAddr) -> usize {
    // SAFETY: the structures contain only numbers, so all zeros are valid values.
    let (mut v4_info, mut v6_info): (libc::in_pktinfo, libc::in6_pktinfo) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    let (level, kind, value, len) = match (v6, from) {
        (false, IpAddr::V4(ip)) => {
            v4_info.ipi_spec_dst.s_addr = u32::from(ip).to_be();
            let value = (&raw const v4_info).cast::<u8>();
            let len = size_of::<libc::in_pktinfo>();
            (libc::IPPROTO_IP, libc::IP_PKTINFO, value, len)
        }
        (true, _) => {
            v6_info.ipi6_addr.s6_addr = match from {
                IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
                IpAddr::V6(ip) => ip.octets(),
            };
            let value = (&raw const v6_info).cast::<u8>();
            let len = size_of::<libc::in6_pktinfo>();
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, value, len)
        }
        // An IPv4 socket cannot send from an IPv6 address.
        (false, IpAddr::V6(_)) => return 0,
    };
    // SAFETY: the array has room for one entry with the structure, and is aligned for it.
    unsafe {
        let space = libc::CMSG_SPACE(len as u32) as usize;
        debug_assert!(space <= size_of_val(control));
        let cmsg = control.as_mut_ptr().cast::<libc::cmsghdr>();
        cmsg.write(std::mem::zeroed());
        (*cmsg).cmsg_len = libc::CMSG_LEN(len as u32) as _;
        (*cmsg).cmsg_level = level;
        (*cmsg).cmsg_type = kind;
        std::ptr::copy_nonoverlapping(value, libc::CMSG_DATA(cmsg), len);
        space
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};
    use std::time::{Duration, Instant};

    fn any_v6() -> SocketAddr {
        (Ipv6Addr::UNSPECIFIED, 0).into()
    }

    fn next(socket: &ServiceSocket, into: &mut [u8]) -> Arrival {
        let start = Instant::now();
        loop {
            if let Some(arrival) = socket.receive(into).unwrap() {
                return arrival;
            }
            assert!(start.elapsed() < Duration::from_secs(10));
        }
    }

    #[test]
    fn reply_is_sent_from_destination_address() {
        let v4 = IpAddr::from(Ipv4Addr::new(127, 0, 0, 9));
        let v6 = IpAddr::from(Ipv6Addr::LOCALHOST);
        let any_v4 = (Ipv4Addr::UNSPECIFIED, 0).into();
        for (at, only_v6, to) in [
            (any_v4, None, v4),
            (any_v6(), Some(false), v4),
            (any_v6(), Some(false), v6),
            (any_v6(), Some(true), v6),
        ] {
            let socket = ServiceSocket::bind(at, only_v6, Sharing::Exclusive).unwrap();
            let port = socket.local_addr().unwrap().port();
            let peer = UdpSocket::bind(if to.is_ipv4() {
                "127.0.0.1:0"
            } else {
                "[::1]:0"
            });
            let peer = peer.unwrap();
            peer.set_read_timeout(Some(Duration::from_secs(10)))
                .unwrap();
            peer.send_to(b"question", (to, port)).unwrap();
            let mut buffer = [0; 4];
            let arrival = next(&socket, &mut buffer);
            assert_eq!(
                (arrival.len, &buffer),
                (8, b"ques"),
                "the full length is returned"
            );
            assert_eq!(arrival.peer, peer.local_addr().unwrap());
            assert_eq!(arrival.to, Some(to));
            socket.send_from(b"answer", to, arrival.peer).unwrap();
            let mut buffer = [0; 10];
            let (len, from) = peer.recv_from(&mut buffer).unwrap();
            assert_eq!((&buffer[..len], from), (&b"answer"[..], (to, port).into()));
        }
    }

    #[test]
    fn broadcast_has_no_destination() {
        let any = (Ipv4Addr::UNSPECIFIED, 0).into();
        let socket = ServiceSocket::bind(any, None, Sharing::Exclusive).unwrap();
        let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
        peer.set_broadcast(true).unwrap();
        let port = socket.local_addr().unwrap().port();
        let all = SocketAddr::from(([127, 255, 255, 255], port));
        peer.send_to(b"all", all).unwrap();
        assert_eq!(next(&socket, &mut [0; 4]).to, None);
    }

    #[test]
    fn connected_socket_reports_missing_peer() {
        let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
        let socket = ServiceSocket::bind(any_v6(), Some(false), Sharing::Exclusive).unwrap();
        let address = peer.local_addr().unwrap();
        socket.connect(address).unwrap();
        socket.send(b"question").unwrap();
        let mut buffer = [0; 10];
        let (_, from) = peer.recv_from(&mut buffer).unwrap();
        let port = socket.local_addr().unwrap().port();
        assert_eq!(from, (Ipv4Addr::LOCALHOST, port).into());
        peer.send_to(b"answer", from).unwrap();
        assert_eq!(next(&socket, &mut buffer).peer, address);
        drop(peer);
        let start = Instant::now();
        // A child that another test has forked keeps a copy of the peer's descriptor until it
        // exits, so repeat the message.
        let refused = loop {
            if let Err(e) = socket.send(b"question") {
                break e.kind();
            }
            match socket.receive(&mut buffer) {
                Ok(None) => assert!(start.elapsed() < Duration::from_secs(10)),
                Ok(arrival) => panic!("{arrival:?}"),
                Err(e) => break e.kind(),
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        assert_eq!(refused, io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn shared_port_can_be_claimed() {
        let at = |port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let bind = |port, sharing| ServiceSocket::bind(at(port), None, sharing);
        let first = bind(0, Sharing::Shared).unwrap();
        let port = first.local_addr().unwrap().port();
        assert!(bind(port, Sharing::Exclusive).is_err());
        let second = bind(port, Sharing::Shared).unwrap();
        second.claim().unwrap();
        assert!(bind(port, Sharing::Shared).is_err());
    }
}
