//! Tests of `repoll_create`, `repoll_ctl` and `repoll_wait`: sets of rsockets and ordinary
//! descriptors.

use crate::common::{Rs, alone, pair, time_limit};
use iwarp_rsocket as rs;
use iwarp_rsocket::c_api::{repoll_create, repoll_ctl, repoll_wait};
use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, epoll_event};
use std::io::Write as _;
use std::os::fd::AsRawFd;
use std::ptr::null_mut;
use std::time::Duration;

const IN: u32 = libc::EPOLLIN as u32;
const OUT: u32 = libc::EPOLLOUT as u32;

struct Set(i32);

impl Drop for Set {
    fn drop(&mut self) {
        let _ = rs::close(self.0);
    }
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

impl Set {
    fn new() -> Self {
        // SAFETY: takes no pointers.
        let number = unsafe { repoll_create(libc::EPOLL_CLOEXEC) };
        assert!(number >= 0);
        Self(number)
    }

    fn control(&self, op: i32, fd: i32, events: u32, data: u64) -> Result<(), i32> {
        let mut event = epoll_event { events, u64: data };
        // SAFETY: the pointer is to a local event.
        match unsafe { repoll_ctl(self.0, op, fd, &raw mut event) } {
            0 => Ok(()),
            n => {
                assert_eq!(n, -1);
                Err(errno())
            }
        }
    }

    fn add(&self, fd: i32, events: u32, data: u64) {
        assert_eq!(self.control(EPOLL_CTL_ADD, fd, events, data), Ok(()));
    }

    fn wait(&self, max: usize, timeout_ms: i32) -> Result<Vec<(u64, u32)>, i32> {
        let mut events = vec![epoll_event { events: 0, u64: 0 }; max];
        // SAFETY: the array has `max` elements.
        let n = unsafe { repoll_wait(self.0, events.as_mut_ptr(), max as i32, timeout_ms) };
        let n = usize::try_from(n).map_err(|_| errno())?;
        Ok(events[..n].iter().map(|e| (e.u64, e.events)).collect())
    }
}

#[test]
fn set_reports_rsockets_and_pipes() {
    alone("set_reports_rsockets_and_pipes", || {
        let stopwatch = time_limit(Duration::from_secs(20));
        let (c, s) = pair();
        let (reader, mut writer) = std::io::pipe().unwrap();
        let set = Set::new();
        assert_eq!(set.wait(4, 0), Ok(vec![]));
        set.add(s.0, IN, 1 << 40);
        set.add(reader.as_raw_fd(), IN, 2);
        assert_eq!(set.wait(4, 10), Ok(vec![]));
        c.send_all(b"x");
        assert_eq!(set.wait(4, -1), Ok(vec![(1 << 40, IN)]));
        writer.write_all(b"y").unwrap();
        // Nothing was read, so both are still ready.
        let mut both = set.wait(4, -1).unwrap();
        both.sort_unstable();
        assert_eq!(both, [(2, IN), (1 << 40, IN)]);
        // If the program takes one event at a time, the descriptors alternate.
        let mut single = [set.wait(1, -1).unwrap()[0], set.wait(1, -1).unwrap()[0]];
        single.sort_unstable();
        assert_eq!(single[..], both);
        assert_eq!(s.recv_n(1), b"x");
        assert_eq!(set.wait(4, -1), Ok(vec![(2, IN)]));
        assert_eq!(set.control(EPOLL_CTL_MOD, s.0, IN | OUT, 3), Ok(()));
        assert!(set.wait(4, -1).unwrap().contains(&(3, OUT)));
        assert_eq!(set.control(EPOLL_CTL_DEL, s.0, 0, 0), Ok(()));
        assert_eq!(set.wait(4, -1), Ok(vec![(2, IN)]));
        stopwatch.assert_within();
    });
}

#[test]
fn wait_notices_concurrent_changes() {
    alone("wait_notices_concurrent_changes", || {
        let stopwatch = time_limit(Duration::from_secs(20));
        let (c, s) = pair();
        let set = Set::new();
        std::thread::scope(|scope| {
            // Both threads must wake: neither may consume the other's wake-up.
            let waits = [0; 2].map(|_| scope.spawn(|| set.wait(4, 15_000)));
            std::thread::sleep(Duration::from_millis(50));
            c.send_all(b"x");
            set.add(s.0, IN, 7);
            for wait in waits {
                assert_eq!(wait.join().unwrap(), Ok(vec![(7, IN)]));
            }
        });
        let empty = Set::new();
        std::thread::scope(|scope| {
            let wait = scope.spawn(|| empty.wait(4, 15_000));
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(rs::close(empty.0), Ok(()));
            assert_eq!(wait.join().unwrap(), Err(libc::EBADF));
        });
        assert_eq!(rs::close(set.0), Ok(()));
        assert_eq!(set.wait(4, 0), Err(libc::EBADF));
        stopwatch.assert_within();
    });
}

#[test]
fn one_shot_requires_rearming() {
    alone("one_shot_requires_rearming", || {
        let (c, s) = pair();
        let set = Set::new();
        let once = IN | libc::EPOLLONESHOT as u32;
        set.add(s.0, once, 1);
        c.send_all(b"xy");
        assert_eq!(set.wait(4, 5000), Ok(vec![(1, IN)]));
        assert_eq!(set.wait(4, 20), Ok(vec![]));
        assert_eq!(set.control(EPOLL_CTL_MOD, s.0, once, 2), Ok(()));
        assert_eq!(set.wait(4, 5000), Ok(vec![(2, IN)]));
    });
}

#[test]
fn closed_descriptors_leave_the_set() {
    alone("closed_descriptors_leave_the_set", || {
        let (c, s) = pair();
        let (reader, writer) = std::io::pipe().unwrap();
        let set = Set::new();
        set.add(s.0, OUT, 1);
        set.add(reader.as_raw_fd(), IN, 2);
        assert_eq!(set.wait(4, 5000), Ok(vec![(1, OUT)]));
        let number = s.0;
        drop((s, reader, writer));
        assert_eq!(set.wait(4, 20), Ok(vec![]));
        // Another rsocket with this number is not in the set until it is added.
        let new = Rs::new();
        if new.0 == number {
            assert_eq!(set.wait(4, 20), Ok(vec![]));
            assert_eq!(set.control(EPOLL_CTL_MOD, new.0, IN, 3), Err(libc::ENOENT));
        }
        set.add(new.0, IN, 3);
        drop(c);
    });
}

#[test]
fn closed_datagram_socket_leaves_set() {
    alone("closed_datagram_socket_leaves_set", || {
        let datagram = || Rs(rs::socket(libc::AF_INET, libc::SOCK_DGRAM, 0).unwrap());
        let set = Set::new();
        let receiver = datagram();
        rs::bind(receiver.0, "127.0.0.1:0".parse().unwrap()).unwrap();
        set.add(receiver.0, IN, 1);
        assert_eq!(set.wait(4, 20), Ok(vec![]));
        let to = rs::local_address(receiver.0).unwrap();
        let sender = datagram();
        rs::send_to(sender.0, b"datagram", 0, to).unwrap();
        assert_eq!(set.wait(4, 20_000), Ok(vec![(1, IN)]));
        // If the next socket reuses the number, it is not in the set.
        let number = receiver.0;
        drop(receiver);
        let next = datagram();
        if next.0 == number {
            rs::bind(next.0, "127.0.0.1:0".parse().unwrap()).unwrap();
            let to = rs::local_address(next.0).unwrap();
            rs::send_to(sender.0, b"datagram", 0, to).unwrap();
            assert_ne!(next.poll(libc::POLLIN, 20_000), 0);
            assert_eq!(set.control(EPOLL_CTL_MOD, next.0, IN, 2), Err(libc::ENOENT));
        }
        assert_eq!(set.wait(4, 20), Ok(vec![]));
    });
}

#[test]
fn invalid_calls_fail() {
    alone("invalid_calls_fail", || {
        let (c, _s) = pair();
        let (set, other) = (Set::new(), Set::new());
        // SAFETY: NULL is allowed; the functions refuse it.
        unsafe {
            assert_eq!((repoll_create(1), errno()), (-1, libc::EINVAL));
            let add = repoll_ctl(set.0, EPOLL_CTL_ADD, c.0, null_mut());
            assert_eq!((add, errno()), (-1, libc::EFAULT));
            let wait = repoll_wait(set.0, null_mut(), 4, 0);
            assert_eq!((wait, errno()), (-1, libc::EFAULT));
        }
        assert_eq!(set.control(EPOLL_CTL_ADD, -1, IN, 0), Err(libc::EBADF));
        assert_eq!(set.control(EPOLL_CTL_ADD, 1 << 20, IN, 0), Err(libc::EBADF));
        assert_eq!(set.control(EPOLL_CTL_ADD, set.0, IN, 0), Err(libc::EINVAL));
        assert_eq!(
            set.control(EPOLL_CTL_ADD, other.0, IN, 0),
            Err(libc::EINVAL)
        );
        assert_eq!(set.control(EPOLL_CTL_MOD, c.0, IN, 0), Err(libc::ENOENT));
        assert_eq!(set.control(EPOLL_CTL_DEL, c.0, IN, 0), Err(libc::ENOENT));
        set.add(c.0, IN, 0);
        assert_eq!(set.control(EPOLL_CTL_ADD, c.0, IN, 0), Err(libc::EEXIST));
        assert_eq!(set.control(9, c.0, IN, 0), Err(libc::EINVAL));
        assert_eq!(set.wait(0, 0), Err(libc::EINVAL));
        // An rsocket is not a set. `ManuallyDrop`, because `c` already closes the rsocket.
        let not_a_set = std::mem::ManuallyDrop::new(Set(c.0));
        assert_eq!(not_a_set.control(EPOLL_CTL_ADD, 0, IN, 0), Err(libc::EBADF));
    });
}
