//! UDP sockets for unreliable datagrams: several datagrams per system call, with the fields of a
//! global routing header.
//!
//! Invariant of the `unsafe`: addresses, vectors and control data that the kernel accesses are
//! arrays of this file. They exist until the call has returned, and are passed with their real
//! sizes. Only the parts that the kernel reports as written are read.

use super::option;
use iwarp_proto::datagram::DATAGRAM_MAX;
use socket2::{Domain, Protocol, SockAddr, SockAddrStorage, Socket, Type};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Maximum number of datagrams per system call.
pub const BATCH: usize = 16;
/// From `linux/in6.h`: whether a socket receives datagrams of groups that it has not joined itself.
const IPV6_MULTICAST_ALL: i32 = 29;
/// Words of control data for a datagram: two entries with an `int` each, and room for entries that
/// the kernel may add.
const CONTROL_WORDS: usize = 16;

/// The routing fields of a datagram's IP header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Route {
    /// IPv4's type of service, or IPv6's traffic class.
    pub traffic_class: u8,
    /// Time to live, or hop limit; 0 for the system's default.
    pub hop_limit: u8,
}

/// A bound UDP socket. It never blocks.
#[derive(Debug)]
pub struct DatagramSocket {
    socket: Socket,
    v6: bool,
}

/// Where to bind a socket.
#[derive(Debug, Clone, Copy)]
pub enum Bind {
    /// An address of the host; port 0 lets the system choose.
    Address(SocketAddr),
    /// A multicast group and port, which other sockets may share, on the interface with this index.
    Group(SocketAddr, u32),
}

impl DatagramSocket {
    /// Creates a socket whose buffers have about `buffer` bytes each, if the system allows it.
    /// Datagrams to multicast groups are sent on the interface with the index `interface`, and are
    /// looped back to this host.
    ///
    /// # Errors
    /// The operating system's error: no descriptor is left, the address does not belong to the
    /// host, the port is in use, or the host has joined too many groups.
    pub fn bind(to: Bind, interface: u32, buffer: usize) -> io::Result<Self> {
        let (Bind::Address(address) | Bind::Group(address, _)) = to;
        let socket = Socket::new(
            Domain::for_address(address),
            Type::DGRAM.nonblocking(),
            Some(Protocol::UDP),
        )?;
        let this = Self {
            socket,
            v6: address.is_ipv6(),
        };
        // With smaller buffers, more datagrams are lost, which is not an error.
        let _ = this.socket.set_recv_buffer_size(buffer);
        let _ = this.socket.set_send_buffer_size(buffer);
        if this.v6 {
            this.socket.set_only_v6(true)?;
            option::set(
                &this.socket,
                libc::IPPROTO_IPV6,
                libc::IPV6_RECVTCLASS,
                1i32,
            )?;
            option::set(
                &this.socket,
                libc::IPPROTO_IPV6,
                libc::IPV6_RECVHOPLIMIT,
                1i32,
            )?;
            this.socket.set_multicast_if_v6(interface)?;
        } else {
            option::set(&this.socket, libc::IPPROTO_IP, libc::IP_RECVTOS, 1i32)?;
            option::set(&this.socket, libc::IPPROTO_IP, libc::IP_RECVTTL, 1i32)?;
            // Let routers fragment datagrams. Path MTU discovery would lose the first datagrams.
            let off = libc::IP_PMTUDISC_DONT;
            option::set(&this.socket, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, off)?;
            // SAFETY: the structure contains only numbers, so all zeros are a valid value.
            let mut request: libc::ip_mreqn = unsafe { std::mem::zeroed() };
            request.imr_ifindex = interface as i32;
            option::set(
                &this.socket,
                libc::IPPROTO_IP,
                libc::IP_MULTICAST_IF,
                request,
            )?;
        }
        match to {
            Bind::Address(_) => this.socket.bind(&address.into())?,
            Bind::Group(_, index) => {
                this.socket.set_reuse_address(true)?;
                this.join(address.ip(), index)?;
                this.socket.bind(&address.into())?;
            }
        }
        Ok(this)
    }

    fn join(&self, group: IpAddr, interface: u32) -> io::Result<()> {
        match group {
            IpAddr::V4(group) => {
                // By default, a socket also receives the datagrams of groups that other sockets of
                // the host have joined, on any interface.
                option::set(&self.socket, libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, 0i32)?;
                let interface = socket2::InterfaceIndexOrAddress::Index(interface);
                self.socket.join_multicast_v4_n(&group, &interface)
            }
            IpAddr::V6(group) => {
                option::set(&self.socket, libc::IPPROTO_IPV6, IPV6_MULTICAST_ALL, 0i32)?;
                self.socket.join_multicast_v6(&group, interface)
            }
        }
    }

    /// Returns the address that the socket is bound to.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        let address = self.socket.local_addr()?;
        address
            .as_socket()
            .ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Sends the datagrams of `batch` in order. Returns the number of datagrams sent, at least 1
    /// unless the batch is empty.
    ///
    /// # Errors
    /// `WouldBlock` if the socket's buffer is full. Any other error concerns the first datagram
    /// only.
    pub fn send(&self, batch: &mut Batch) -> io::Result<usize> {
        if batch.len == 0 {
            return Ok(0);
        }
        let mut vectors = [EMPTY; BATCH];
        let mut headers = batch.headers(&mut vectors);
        for header in &mut headers[..batch.len] {
            if header.msg_hdr.msg_controllen == 0 {
                header.msg_hdr.msg_control = std::ptr::null_mut();
            }
        }
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        loop {
            // SAFETY: the invariant at the head of the file holds.
            let sent = unsafe {
                libc::sendmmsg(
                    self.socket.as_raw_fd(),
                    headers.as_mut_ptr(),
                    batch.len as u32,
                    // The type differs between C libraries.
                    flags as _,
                )
            };
            match usize::try_from(sent) {
                Ok(sent) => return Ok(sent),
                Err(_) => match io::Error::last_os_error() {
                    e if e.kind() == io::ErrorKind::Interrupted => {}
                    e => return Err(e),
                },
            }
        }
    }

    /// Receives up to `max` datagrams, but at most [`BATCH`]. Returns the number of received
    /// datagrams, 0 if none has arrived.
    ///
    /// # Errors
    /// The operating system's error. It concerns an earlier datagram; the next call may succeed.
    pub fn receive(&self, batch: &mut Batch, max: usize) -> io::Result<usize> {
        let max = max.clamp(1, BATCH);
        batch.len = max;
        batch.lens = [DATAGRAM_MAX; BATCH];
        batch.control_lens = [CONTROL_WORDS * 8; BATCH];
        batch.name_lens = [size_of::<SockAddrStorage>() as libc::socklen_t; BATCH];
        let mut vectors = [EMPTY; BATCH];
        let mut headers = batch.headers(&mut vectors);
        batch.len = 0;
        // SAFETY: the invariant at the head of the file holds.
        let received = unsafe {
            libc::recvmmsg(
                self.socket.as_raw_fd(),
                headers.as_mut_ptr(),
                max as u32,
                libc::MSG_DONTWAIT as _,
                std::ptr::null_mut(),
            )
        };
        let Ok(received) = usize::try_from(received) else {
            return match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::WouldBlock => Ok(0),
                e => Err(e),
            };
        };
        for (i, header) in headers[..received].iter().enumerate() {
            let m = &header.msg_hdr;
            batch.truncated[i] = m.msg_flags & libc::MSG_TRUNC != 0;
            batch.lens[i] = (header.msg_len as usize).min(DATAGRAM_MAX);
            batch.name_lens[i] = m.msg_namelen;
            // SAFETY: the kernel has filled in `m` and its control data, which are in `batch`.
            batch.routes[i] = unsafe { parse_route(m) };
        }
        batch.len = received;
        Ok(received)
    }
}

impl AsFd for DatagramSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Reads the route of a received datagram from its control data.
///
/// # Safety
/// The kernel has filled in `m` and the memory that it refers to.
unsafe fn parse_route(m: &libc::msghdr) -> Route {
    let mut route = Route::default();
    // SAFETY: `m` refers to control data that the kernel has written.
    let mut cmsg = unsafe { libc::CMSG_FIRSTHDR(m) };
    while !cmsg.is_null() {
        // SAFETY: `cmsg` is an entry of the control data. Its value has at least one byte. The
        // values of these options are a byte, or an `int` in host order that fits into a byte.
        let (entry, octet, number) = unsafe {
            let data = libc::CMSG_DATA(cmsg);
            let int_len = libc::CMSG_LEN(size_of::<i32>() as u32) as usize;
            let has_int = (*cmsg).cmsg_len as usize >= int_len;
            let number = match has_int {
                true => data.cast::<i32>().read_unaligned() as u8,
                false => 0,
            };
            (&*cmsg, *data, number)
        };
        match (entry.cmsg_level, entry.cmsg_type) {
            (libc::IPPROTO_IP, libc::IP_TOS) => route.traffic_class = octet,
            (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => {
                route.hop_limit = number;
            }
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => route.traffic_class = number,
            _ => {}
        }
        // SAFETY: as above.
        cmsg = unsafe { libc::CMSG_NXTHDR(m, cmsg) };
    }
    route
}

/// Writes the control data that set a datagram's route. Returns their length in bytes.
fn write_route(control: &mut [u64; CONTROL_WORDS], v6: bool, route: Route) -> usize {
    let (level, class, hops) = match v6 {
        true => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, libc::IPV6_HOPLIMIT),
        false => (libc::IPPROTO_IP, libc::IP_TOS, libc::IP_TTL),
    };
    // SAFETY: these macros only compute sizes.
    let (space, entry_len) = unsafe {
        let len = size_of::<i32>() as u32;
        (libc::CMSG_SPACE(len) as usize, libc::CMSG_LEN(len) as usize)
    };
    debug_assert!(space.is_multiple_of(8) && 2 * space <= CONTROL_WORDS * 8);
    let mut used = 0;
    for (name, value) in [(class, route.traffic_class), (hops, route.hop_limit)] {
        // For both fields, 0 stands for the system's default.
        if value == 0 {
            continue;
        }
        // SAFETY: the array has room for two entries, and is aligned for them.
        unsafe {
            let cmsg = control.as_mut_ptr().byte_add(used).cast::<libc::cmsghdr>();
            cmsg.write(std::mem::zeroed());
            (*cmsg).cmsg_len = entry_len as _;
            (*cmsg).cmsg_level = level;
            (*cmsg).cmsg_type = name;
            let data = libc::CMSG_DATA(cmsg);
            data.cast::<i32>().write_unaligned(i32::from(value));
        }
        used += space;
    }
    used
}

const EMPTY: libc::iovec = libc::iovec {
    iov_base: std::ptr::null_mut(),
    iov_len: 0,
};

/// Buffers for the datagrams of one system call.
pub struct Batch {
    len: usize,
    octets: Box<[u8]>,
    lens: [usize; BATCH],
    names: [SockAddrStorage; BATCH],
    name_lens: [libc::socklen_t; BATCH],
    control: Box<[[u64; CONTROL_WORDS]; BATCH]>,
    control_lens: [usize; BATCH],
    truncated: [bool; BATCH],
    routes: [Route; BATCH],
}

impl Default for Batch {
    fn default() -> Self {
        Self {
            len: 0,
            octets: vec![0; BATCH * Self::SLOT].into_boxed_slice(),
            lens: [0; BATCH],
            names: std::array::from_fn(|_| SockAddrStorage::zeroed()),
            name_lens: [0; BATCH],
            control: Box::new([[0; CONTROL_WORDS]; BATCH]),
            control_lens: [0; BATCH],
            truncated: [false; BATCH],
            routes: [Route::default(); BATCH],
        }
    }
}

impl Batch {
    /// Unused bytes before each datagram, which the caller may fill.
    pub const FRONT: usize = 8;
    const SLOT: usize = Self::FRONT + DATAGRAM_MAX;

    /// Removes all datagrams.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Returns the number of datagrams in the batch.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if the batch contains no datagram.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns a buffer for a datagram of `len` bytes, or `None` if the batch is full or `len` is
    /// too long. Write the datagram to it, then call [`commit`](Self::commit).
    pub fn room(&mut self, len: usize) -> Option<&mut [u8]> {
        if self.len == BATCH || len > DATAGRAM_MAX {
            return None;
        }
        self.lens[self.len] = len;
        let from = self.len * Self::SLOT + Self::FRONT;
        self.octets.get_mut(from..from + len)
    }

    /// Adds the datagram that was written to the buffer of [`room`](Self::room).
    pub fn commit(&mut self, to: SocketAddr, route: Route) {
        let i = self.len;
        let v6 = to.is_ipv6();
        let to = SockAddr::from(to);
        self.name_lens[i] = to.len();
        self.names[i] = to.as_storage();
        self.control_lens[i] = write_route(&mut self.control[i], v6, route);
        self.len += 1;
    }

    /// Returns the received datagram number `i`, its sender, and its route. The datagram is
    /// preceded by [`FRONT`](Self::FRONT) unused bytes. Returns `None` if the datagram was
    /// truncated because it is too long, or if it has no IP source address.
    pub fn received(&mut self, i: usize) -> Option<(&mut [u8], SocketAddr, Route)> {
        if i >= self.len || self.truncated[i] {
            return None;
        }
        let name = std::mem::replace(&mut self.names[i], SockAddrStorage::zeroed());
        // SAFETY: the kernel has written the address and its length.
        let from = unsafe { SockAddr::new(name, self.name_lens[i]) }.as_socket()?;
        let start = i * Self::SLOT;
        let octets = self
            .octets
            .get_mut(start..start + Self::FRONT + self.lens[i])?;
        Some((octets, from, self.routes[i]))
    }

    /// Returns headers for the kernel, which describe the datagrams or the buffers for them.
    fn headers(&mut self, vectors: &mut [libc::iovec; BATCH]) -> [libc::mmsghdr; BATCH] {
        // SAFETY: the structure contains numbers and pointers, so all zeros are a valid value.
        let mut headers: [libc::mmsghdr; BATCH] = unsafe { std::mem::zeroed() };
        let base = self.octets.as_mut_ptr();
        for i in 0..self.len {
            vectors[i] = libc::iovec {
                // SAFETY: the offset is inside slot `i` of `octets`.
                iov_base: unsafe { base.add(i * Self::SLOT + Self::FRONT) }.cast(),
                iov_len: self.lens[i],
            };
            let m = &mut headers[i].msg_hdr;
            m.msg_name = (&raw mut self.names[i]).cast();
            m.msg_namelen = self.name_lens[i];
            m.msg_iov = &raw mut vectors[i];
            m.msg_iovlen = 1;
            m.msg_control = self.control[i].as_mut_ptr().cast();
            m.msg_controllen = self.control_lens[i] as _;
        }
        headers
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    fn loopback(v6: bool) -> DatagramSocket {
        let at: SocketAddr = match v6 {
            false => ([127, 0, 0, 1], 0).into(),
            true => (std::net::Ipv6Addr::LOCALHOST, 0).into(),
        };
        DatagramSocket::bind(Bind::Address(at), 1, 1 << 16).unwrap()
    }

    fn receive(socket: &DatagramSocket, batch: &mut Batch, wanted: usize) {
        let start = Instant::now();
        while socket.receive(batch, BATCH).unwrap() != wanted {
            assert!(start.elapsed() < Duration::from_secs(10));
            batch.clear();
        }
    }

    #[test]
    fn datagrams_keep_boundaries_and_routes() {
        for v6 in [false, true] {
            let (a, b) = (loopback(v6), loopback(v6));
            let (from, to) = (a.local_addr().unwrap(), b.local_addr().unwrap());
            let mut batch = Batch::default();
            let route = |traffic_class| Route {
                traffic_class,
                hop_limit: 7,
            };
            for (len, class) in [(0usize, 0x48), (1, 0), (3000, 0x48)] {
                batch.room(len).unwrap().fill(len as u8);
                batch.commit(to, route(class));
            }
            assert_eq!(a.send(&mut batch).unwrap(), 3);
            batch.clear();
            assert_eq!(batch.received(0), None, "the batch is empty");
            receive(&b, &mut batch, 3);
            for (i, (len, class)) in [(0usize, 0x48), (1, 0), (3000, 0x48)]
                .into_iter()
                .enumerate()
            {
                let (octets, sender, got_route) = batch.received(i).unwrap();
                assert_eq!((sender, got_route), (from, route(class)));
                assert_eq!(octets.len(), Batch::FRONT + len);
                assert!(octets[Batch::FRONT..].iter().all(|o| *o == len as u8));
            }
            assert_eq!(b.receive(&mut batch, BATCH).unwrap(), 0);
        }
    }

    #[test]
    fn batch_has_room_for_its_limit() {
        let mut batch = Batch::default();
        while batch.room(DATAGRAM_MAX).is_some() {
            batch.commit(([127, 0, 0, 1], 1).into(), Route::default());
        }
        assert_eq!(batch.len(), BATCH);
    }

    #[test]
    fn truncated_datagram_is_not_returned() {
        let b = loopback(false);
        let sender = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let long = vec![1; DATAGRAM_MAX + 1];
        let to = b.local_addr().unwrap();
        sender.send_to(&long, to).unwrap();
        sender.send_to(&long[1..], to).unwrap();
        let mut batch = Batch::default();
        receive(&b, &mut batch, 2);
        assert!(batch.received(0).is_none());
        assert_eq!(batch.received(1).unwrap().0.len(), Batch::SLOT);
    }

    #[test]
    fn group_datagram_reaches_members_only() {
        let group = |last| SocketAddr::from(([239, 255, 77, last], 62_812));
        let lo = 1;
        let join = |last| DatagramSocket::bind(Bind::Group(group(last), lo), lo, 1 << 16).unwrap();
        let (one, two, other) = (join(1), join(1), join(2));
        let mut batch = Batch::default();
        batch.room(5).unwrap().copy_from_slice(b"hello");
        batch.commit(group(1), Route::default());
        assert_eq!(loopback(false).send(&mut batch).unwrap(), 1);
        for socket in [&one, &two] {
            receive(socket, &mut batch, 1);
            assert_eq!(batch.received(0).unwrap().0[Batch::FRONT..], *b"hello");
        }
        assert_eq!(other.receive(&mut batch, 1).unwrap(), 0);
    }

    #[test]
    fn send_without_listener_succeeds() {
        let a = loopback(false);
        let unbound = loopback(false).local_addr().unwrap();
        let mut batch = Batch::default();
        for _ in 0..3 {
            batch.clear();
            batch.room(1).unwrap();
            batch.commit(unbound, Route::default());
            assert_eq!(a.send(&mut batch).unwrap(), 1);
        }
    }
}
