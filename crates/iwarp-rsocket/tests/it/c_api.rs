//! Tests of the C functions of rsockets, with the arguments that a C program passes: sessions from
//! `rsocket` to `rclose`, including errors.

use crate::common::alone;
use iwarp_rsocket::c_api::*;
use std::ptr::{null, null_mut};

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

/// Returns the socket address of `127.0.0.1` and a port in network byte order.
fn address(port: u16) -> libc::sockaddr_in {
    // SAFETY: zero is a valid value of this structure.
    let mut a: libc::sockaddr_in = unsafe { std::mem::zeroed() };
    a.sin_family = libc::AF_INET as libc::sa_family_t;
    a.sin_addr.s_addr = u32::from_ne_bytes([127, 0, 0, 1]);
    a.sin_port = port;
    a
}

const LEN: libc::socklen_t = size_of::<libc::sockaddr_in>() as libc::socklen_t;

/// The descriptors of a session, and the peer's address from `accept`.
struct Session {
    listener: i32,
    client: i32,
    server: i32,
    listen_address: libc::sockaddr_in,
    peer: libc::sockaddr_in,
}

fn listen() -> (i32, libc::sockaddr_in) {
    // SAFETY: all pointers are to locals that outlive the calls, with their true lengths.
    unsafe {
        let l = rsocket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_NONBLOCK, 0);
        assert!(l >= 0);
        assert_ne!(rfcntl(l, libc::F_GETFL, 0) & libc::O_NONBLOCK, 0);
        let mut a = address(0);
        assert_eq!(rbind(l, (&raw const a).cast(), LEN), 0);
        assert_eq!(rlisten(l, 5), 0);
        assert_eq!(
            (raccept(l, null_mut(), null_mut()), errno()),
            (-1, libc::EAGAIN)
        );
        let mut len = LEN;
        assert_eq!(rgetsockname(l, (&raw mut a).cast(), &raw mut len), 0);
        assert_eq!(
            (len, a.sin_addr.s_addr),
            (LEN, u32::from_ne_bytes([127, 0, 0, 1]))
        );
        (l, a)
    }
}

fn connect() -> Session {
    let (l, a) = listen();
    // SAFETY: as in `listen`.
    unsafe {
        let c = rsocket(libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_TCP);
        assert_eq!(
            (rconnect(c, (&raw const a).cast(), 3), errno()),
            (-1, libc::EINVAL)
        );
        assert_eq!((rconnect(c, null(), 0), errno()), (-1, libc::EFAULT));
        assert_eq!(rconnect(c, (&raw const a).cast(), LEN), 0);
        let mut fds = [libc::pollfd {
            fd: l,
            events: libc::POLLIN,
            revents: 0,
        }];
        assert_eq!(rpoll(fds.as_mut_ptr(), 1, 10_000), 1);
        let mut peer = address(0);
        let mut len = LEN;
        let s = raccept(l, (&raw mut peer).cast(), &raw mut len);
        assert!(s >= 0);
        let mut own = address(0);
        let mut len = LEN;
        assert_eq!(rgetsockname(c, (&raw mut own).cast(), &raw mut len), 0);
        assert_eq!(own.sin_port, peer.sin_port);
        Session {
            listener: l,
            client: c,
            server: s,
            listen_address: a,
            peer,
        }
    }
}

/// Sends with each send function, and receives the data.
fn messages(session: &Session) {
    let (c, s, a) = (session.client, session.server, session.listen_address);
    // SAFETY: as in `listen`.
    unsafe {
        let iov = |data: &mut [u8]| libc::iovec {
            iov_base: data.as_mut_ptr().cast(),
            iov_len: data.len(),
        };
        let (mut x, mut y) = (*b"ab", *b"cdef");
        let out = [iov(&mut x), iov(&mut y)];
        assert_eq!(rwritev(c, out.as_ptr(), 2), 6);
        let mut msg: libc::msghdr = std::mem::zeroed();
        (msg.msg_iov, msg.msg_iovlen) = (out.as_ptr().cast_mut(), 2);
        assert_eq!(rsendmsg(c, &raw const msg, 0), 6);
        assert_eq!(rsend(c, b"ghi".as_ptr().cast(), 3, libc::MSG_NOSIGNAL), 3);
        assert_eq!(
            (
                rsendto(c, b"x".as_ptr().cast(), 1, 0, (&raw const a).cast(), LEN),
                errno()
            ),
            (-1, libc::EISCONN)
        );
        let mut got = [0u8; 15];
        let mut from = address(0);
        let mut len = LEN;
        let n = rrecvfrom(
            s,
            got.as_mut_ptr().cast(),
            15,
            libc::MSG_WAITALL,
            (&raw mut from).cast(),
            &raw mut len,
        );
        assert_eq!((n, &got), (15, b"abcdefabcdefghi"));
        assert_eq!(from.sin_port, session.peer.sin_port);
        assert_eq!(
            (rrecv(s, null_mut(), 5, libc::MSG_DONTWAIT), errno()),
            (-1, libc::EFAULT)
        );
        assert_eq!(
            (rreadv(s, out.as_ptr(), 100_000), errno()),
            (-1, libc::EINVAL)
        );
    }
}

fn options(c: i32) {
    // SAFETY: as in `listen`.
    unsafe {
        let mut value = 0i32;
        let mut len = 4;
        let place = (&raw mut value).cast();
        assert_eq!(
            rgetsockopt(c, libc::SOL_SOCKET, libc::SO_TYPE, place, &raw mut len),
            0
        );
        assert_eq!((value, len), (libc::SOCK_STREAM, 4));
        assert_eq!(
            (rsetsockopt(c, 77, 1, place.cast_const(), 4), errno()),
            (-1, libc::EOPNOTSUPP)
        );
        // A stream has no control data.
        let mut control = [0u8; 64];
        let mut msg: libc::msghdr = std::mem::zeroed();
        (msg.msg_control, msg.msg_controllen) = (control.as_mut_ptr().cast(), 64);
        let received = rrecvmsg(c, &raw mut msg, libc::MSG_DONTWAIT);
        assert_eq!((received, errno()), (-1, libc::EOPNOTSUPP));
    }
}

#[test]
fn stream_session() {
    alone("stream_session", || {
        let session = connect();
        messages(&session);
        options(session.client);
        let (l, c, s) = (session.listener, session.client, session.server);
        let mut got = [0u8; 15];
        // SAFETY: as in `listen`.
        unsafe {
            assert_eq!(
                (
                    riomap(c, got.as_mut_ptr().cast(), 15, libc::PROT_READ, 0, -1),
                    errno()
                ),
                (-1, libc::EINVAL)
            );
            assert_eq!(riowrite(c, b"x".as_ptr().cast(), 1, 0, 0), 0);
            let mut set: libc::fd_set = std::mem::zeroed();
            libc::FD_SET(c, &raw mut set);
            let mut t = libc::timeval {
                tv_sec: 0,
                tv_usec: 1000,
            };
            assert_eq!(
                rselect(c + 1, &raw mut set, null_mut(), null_mut(), &raw mut t),
                0
            );
            assert_eq!(rshutdown(c, libc::SHUT_WR), 0);
            assert_eq!(rread(s, got.as_mut_ptr().cast(), 15), 0);
            for fd in [c, s, l] {
                assert_eq!(rclose(fd), 0);
                assert_eq!((rclose(fd), errno()), (-1, libc::EBADF));
            }
        }
    });
}

/// A datagram socket passes message headers to the kernel.
#[test]
fn datagram_session() {
    alone("datagram_session", || {
        // SAFETY: as in `listen`.
        unsafe {
            let [a, b] = [(); 2].map(|()| rsocket(libc::AF_INET, libc::SOCK_DGRAM, 0));
            let mut listen_address = address(0);
            assert_eq!(rbind(b, (&raw const listen_address).cast(), LEN), 0);
            let mut len = LEN;
            assert_eq!(
                rgetsockname(b, (&raw mut listen_address).cast(), &raw mut len),
                0
            );
            let to = (&raw const listen_address).cast();
            let x = b"x".as_ptr().cast();
            // Without an address, the socket must be connected.
            assert_eq!(
                (rsendto(a, x, 1, 0, null(), 0), errno()),
                (-1, libc::EDESTADDRREQ)
            );
            assert_eq!((rsendto(a, x, 1, 0, to, 3), errno()), (-1, libc::EINVAL));
            assert_eq!(rsendto(a, x, 1, 0, to, LEN), 1);
            let mut data = *b"header";
            let mut piece = libc::iovec {
                iov_base: data.as_mut_ptr().cast(),
                iov_len: 6,
            };
            let mut msg: libc::msghdr = std::mem::zeroed();
            (msg.msg_iov, msg.msg_iovlen) = (&raw mut piece, 1);
            (msg.msg_name, msg.msg_namelen) = (to.cast_mut().cast(), LEN);
            assert_eq!(rsendmsg(a, &raw const msg, 0), 6);
            // `rread` of zero bytes keeps the datagram in the queue; `rrecv` removes it.
            let mut got = [0u8; 16];
            assert_eq!(rread(b, null_mut(), 0), 0);
            assert_eq!(rrecv(b, got.as_mut_ptr().cast(), 16, libc::MSG_PEEK), 1);
            assert_eq!(rrecv(b, null_mut(), 0, 0), 0);
            let mut from = address(0);
            let mut room = libc::iovec {
                iov_base: got.as_mut_ptr().cast(),
                iov_len: 4,
            };
            msg.msg_iov = &raw mut room;
            (msg.msg_name, msg.msg_namelen) = ((&raw mut from).cast(), LEN);
            assert_eq!(rrecvmsg(b, &raw mut msg, 0), 4);
            assert_eq!((&got[..4], msg.msg_namelen), (&b"head"[..], LEN));
            assert_eq!(msg.msg_flags & libc::MSG_TRUNC, libc::MSG_TRUNC);
            assert_eq!(rconnect(b, (&raw const from).cast(), LEN), 0);
            assert_eq!(rwrite(b, x, 1), 1);
            let mut len = LEN;
            let mut again = address(0);
            let place = (&raw mut again).cast();
            assert_eq!(
                rrecvfrom(a, got.as_mut_ptr().cast(), 16, 0, place, &raw mut len),
                1
            );
            assert_eq!((len, again.sin_port), (LEN, listen_address.sin_port));
            // An address without a family removes the default destination.
            from.sin_family = libc::AF_UNSPEC as libc::sa_family_t;
            assert_eq!(rconnect(b, (&raw const from).cast(), LEN), 0);
            assert_eq!((rwrite(b, x, 1), errno()), (-1, libc::EDESTADDRREQ));
            assert_eq!((rconnect(b, null(), LEN), errno()), (-1, libc::EFAULT));
            for fd in [a, b] {
                assert_eq!(rclose(fd), 0);
                assert_eq!((rwrite(fd, x, 1), errno()), (-1, libc::EBADF));
            }
        }
    });
}
