//! Readiness: `epoll` for the progress thread, `poll` for one descriptor.
//!
//! No `unsafe`. Events are level-triggered: if a thread stops reading early (because its budget is
//! used up, or no receive is posted), the event is reported again, so no wake-up is lost. A
//! descriptor must be removed from the set before it is closed: events that were already fetched
//! may contain its token. A closed descriptor stays in the set until its last duplicate is closed.

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;
use std::fmt;
use std::io;
pub use std::os::fd::AsFd;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Shorter sleeps use `poll(2)`, because `epoll_wait(2)` rounds up to milliseconds.
const PRECISE_BELOW: Duration = Duration::from_millis(4);
/// The longest single sleep, because the kernel's timeout is an `int` of milliseconds. Longer waits
/// sleep several times.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// The events to report. Errors and hang-ups are always reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interest {
    /// Bytes, a connection or the end of the stream can be read.
    pub readable: bool,
    /// Bytes can be written, or a connect has finished.
    pub writable: bool,
}

impl Interest {
    /// Errors and hang-ups only.
    pub const NONE: Self = Self {
        readable: false,
        writable: false,
    };
    /// Readable only.
    pub const READ: Self = Self {
        readable: true,
        writable: false,
    };
    /// Writable only.
    pub const WRITE: Self = Self {
        readable: false,
        writable: true,
    };
    /// Readable and writable.
    pub const BOTH: Self = Self {
        readable: true,
        writable: true,
    };

    fn epoll(self) -> epoll::EventFlags {
        let mut flags = epoll::EventFlags::empty();
        if self.readable {
            flags |= epoll::EventFlags::IN;
        }
        if self.writable {
            flags |= epoll::EventFlags::OUT;
        }
        #[cfg(miri)]
        flags.insert(epoll::EventFlags::ET);
        flags
    }

    fn poll(self) -> PollFlags {
        let mut flags = PollFlags::empty();
        if self.readable {
            flags |= PollFlags::IN;
        }
        if self.writable {
            flags |= PollFlags::OUT;
        }
        flags
    }
}

/// An event: the token of the descriptor, and its readiness.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Readiness {
    /// The token given to [`Poller::add`].
    pub token: u64,
    /// A read will not block: data, end of stream or an error.
    pub readable: bool,
    /// A write will not block: space or an error.
    pub writable: bool,
    /// Both directions are closed, or an error is pending.
    pub broken: bool,
}

/// A reusable buffer for the events of a [`Poller::wait`]. Only its creation allocates memory.
pub struct Events {
    list: Vec<epoll::Event>,
}

impl Events {
    /// Creates a buffer for `capacity` events per wait, at least one. If more events are ready, the
    /// next wait reports the others.
    pub fn with_capacity(capacity: usize) -> Self {
        Self {
            list: Vec::with_capacity(capacity.clamp(1, 1 << 16)),
        }
    }

    /// Returns the events of the last wait.
    pub fn iter(&self) -> impl Iterator<Item = Readiness> + '_ {
        self.list.iter().map(|event| {
            let (flags, data) = (event.flags, event.data);
            let broken = flags.intersects(epoll::EventFlags::ERR | epoll::EventFlags::HUP);
            Readiness {
                token: data.u64(),
                readable: flags.contains(epoll::EventFlags::IN) || broken,
                writable: flags.contains(epoll::EventFlags::OUT) || broken,
                broken,
            }
        })
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// A set of descriptors to wait for. Any thread may change the set while another one waits.
#[derive(Debug)]
pub struct Poller {
    fd: OwnedFd,
    /// Miri knows only edge-triggered events.
    #[cfg(miri)]
    levels: crate::miri::Levels,
}

impl Poller {
    /// Creates an empty set.
    ///
    /// # Errors
    /// No descriptor (`EMFILE`, `ENFILE`) or memory (`ENOMEM`) is left.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            fd: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            #[cfg(miri)]
            levels: crate::miri::Levels::default(),
        })
    }

    /// Adds a descriptor; its events carry `token`.
    ///
    /// # Errors
    /// `EEXIST` if the descriptor is already in the set. `EPERM` for a descriptor that cannot be
    /// polled, such as a regular file. `ENOSPC` or `ENOMEM` if there is no room or memory.
    pub fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        #[cfg(miri)]
        self.levels.set(fd.as_fd(), token, interest.epoll());
        epoll::add(
            &self.fd,
            fd,
            epoll::EventData::new_u64(token),
            interest.epoll(),
        )?;
        Ok(())
    }

    /// Changes the token and the interest of a descriptor in the set.
    ///
    /// # Errors
    /// `ENOENT` if the descriptor is not in the set.
    pub fn modify(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        #[cfg(miri)]
        self.levels.set(fd.as_fd(), token, interest.epoll());
        epoll::modify(
            &self.fd,
            fd,
            epoll::EventData::new_u64(token),
            interest.epoll(),
        )?;
        Ok(())
    }

    /// Removes a descriptor from the set. Events that a waiting thread has already fetched may
    /// contain its token.
    ///
    /// # Errors
    /// `ENOENT` if the descriptor is not in the set.
    pub fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        #[cfg(miri)]
        self.levels.remove(fd.as_fd());
        epoll::delete(&self.fd, fd)?;
        Ok(())
    }

    /// Waits for events for at most `timeout` (`None`: no limit), and returns their number. A
    /// `timeout` of 4 ms or more is rounded up to milliseconds.
    ///
    /// A signal does not end the wait early.
    ///
    /// # Errors
    /// The kernel's error if the set is unusable, which does not occur in practice.
    pub fn wait(&self, events: &mut Events, timeout: Option<Duration>) -> io::Result<usize> {
        let deadline = Deadline::after(timeout);
        loop {
            match self.step(events, deadline.remaining()) {
                Ok(0) if deadline.is_over() => return Ok(0),
                Ok(0) | Err(Errno::INTR) => {}
                Ok(count) => return Ok(count),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn step(&self, events: &mut Events, mut time: Duration) -> Result<usize, Errno> {
        events.list.clear();
        #[cfg(miri)]
        {
            self.levels.renew(&self.fd);
            // Look again soon: what another thread leaves unread is no new event.
            time = time.min(Duration::from_millis(5));
        }
        if !cfg!(miri) && !time.is_zero() && time < PRECISE_BELOW {
            // `epoll_pwait2(2)` needs only one call, but older kernels do not have it, and
            // sandboxes may kill a process that calls it.
            let mut set = [PollFd::new(&self.fd, PollFlags::IN)];
            if poll(&mut set, Some(&timespec(time)))? == 0 {
                return Ok(0);
            }
            time = Duration::ZERO;
        }
        let room = rustix::buffer::spare_capacity(&mut events.list);
        epoll::wait(&self.fd, room, Some(&timespec(time)))
    }

    /// Fetches the events that are ready, without waiting.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait).
    pub fn wait_zero(&self, events: &mut Events) -> io::Result<usize> {
        match self.step(events, Duration::ZERO) {
            Ok(count) => Ok(count),
            Err(Errno::INTR) => Ok(0),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for Poller {
    /// Returns the descriptor of the set, which is readable while a descriptor in the set has an
    /// event.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Waits until a descriptor has an event of `interest`, an error or a hang-up. Returns `false` on
/// timeout.
///
/// # Errors
/// The kernel's error (`ENOMEM`).
pub fn wait_fd(fd: impl AsFd, interest: Interest, timeout: Option<Duration>) -> io::Result<bool> {
    let deadline = Deadline::after(timeout);
    let fd = fd.as_fd();
    loop {
        let spec = timespec(deadline.remaining());
        match poll(
            &mut [PollFd::from_borrowed_fd(fd, interest.poll())],
            Some(&spec),
        ) {
            Ok(0) if deadline.is_over() => return Ok(false),
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}

/// The time when a wait ends. An interrupted wait continues with the remaining time.
#[derive(Clone, Copy)]
enum Deadline {
    Never,
    Now,
    At(Instant),
}

impl Deadline {
    fn after(timeout: Option<Duration>) -> Self {
        match timeout {
            None => Self::Never,
            Some(Duration::ZERO) => Self::Now,
            // Treat a timeout beyond the range of `Instant` as no limit.
            Some(timeout) => Instant::now()
                .checked_add(timeout)
                .map_or(Self::Never, Self::At),
        }
    }

    fn remaining(self) -> Duration {
        match self {
            Self::Never => LONGEST,
            Self::Now => Duration::ZERO,
            Self::At(at) => at.saturating_duration_since(Instant::now()).min(LONGEST),
        }
    }

    fn is_over(self) -> bool {
        match self {
            Self::Never => false,
            Self::Now => true,
            Self::At(at) => Instant::now() >= at,
        }
    }
}

fn timespec(time: Duration) -> Timespec {
    let time = time.min(LONGEST);
    Timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: time.subsec_nanos().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eventfd::EventFd;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::sync::mpsc;

    #[test]
    fn events_are_level_triggered() {
        let poller = Poller::new().expect("epoll");
        let (first, second) = (EventFd::new().expect("a"), EventFd::new().expect("b"));
        poller.add(&first, 11, Interest::READ).expect("add");
        poller.add(&second, u64::MAX, Interest::READ).expect("add");
        let mut events = Events::with_capacity(8);
        assert_eq!(poller.wait_zero(&mut events).expect("wait"), 0);
        assert_eq!(events.iter().count(), 0);

        second.signal();
        for _ in 0..2 {
            assert_eq!(poller.wait(&mut events, None).expect("wait"), 1);
            let event = events.iter().next().expect("event");
            assert_eq!(event.token, u64::MAX);
            assert!(event.readable && !event.writable && !event.broken);
        }
        assert!(second.drain());
        first.signal();
        assert_eq!(poller.wait_zero(&mut events).expect("wait"), 1);
        assert_eq!(events.iter().next().map(|event| event.token), Some(11));

        poller.modify(&first, 12, Interest::NONE).expect("modify");
        assert_eq!(poller.wait_zero(&mut events).expect("wait"), 0);
        poller.modify(&first, 12, Interest::BOTH).expect("modify");
        assert_eq!(poller.wait_zero(&mut events).expect("wait"), 1);
        let event = events.iter().next().expect("event");
        assert!(event.token == 12 && event.readable && event.writable);
        poller.remove(&first).expect("remove");
        assert_eq!(poller.wait_zero(&mut events).expect("wait"), 0);
        assert_eq!(
            poller.remove(&first).expect_err("gone").raw_os_error(),
            Some(libc::ENOENT)
        );
    }

    #[test]
    fn small_buffer_gets_remaining_events_later() {
        let poller = Poller::new().expect("epoll");
        let all: Vec<EventFd> = (0..5).map(|_| EventFd::new().expect("eventfd")).collect();
        for (token, event) in all.iter().enumerate() {
            poller
                .add(event, token as u64, Interest::READ)
                .expect("add");
            event.signal();
        }
        let mut events = Events::with_capacity(2);
        let mut seen = Vec::new();
        while poller.wait_zero(&mut events).expect("wait") > 0 {
            assert!(events.iter().count() <= 2);
            for event in events.iter() {
                seen.push(event.token);
                assert!(all[event.token as usize].drain());
            }
        }
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2, 3, 4]);
    }

    #[test]
    fn wait_does_not_time_out_early() {
        let poller = Poller::new().expect("epoll");
        let mut events = Events::with_capacity(1);
        let start = Instant::now();
        let limit = Duration::from_micros(5_300);
        assert_eq!(poller.wait(&mut events, Some(limit)).expect("wait"), 0);
        assert!(start.elapsed() >= limit, "{:?}", start.elapsed());
        assert!(start.elapsed() < Duration::from_secs(5));
    }

    /// A wait of 100 µs must not take a millisecond.
    #[test]
    fn short_wait_is_precise() {
        let poller = Poller::new().expect("epoll");
        let event = EventFd::new().expect("eventfd");
        poller.add(&event, 3, Interest::READ).expect("add");
        let mut events = Events::with_capacity(1);
        let short = Duration::from_micros(100);
        let begin = Instant::now();
        // A busy machine may delay some of the waits, but not all.
        loop {
            let start = Instant::now();
            assert_eq!(poller.wait(&mut events, Some(short)).expect("wait"), 0);
            let took = start.elapsed();
            assert!(took >= short, "{took:?}");
            if took < Duration::from_micros(900) {
                break;
            }
            assert!(begin.elapsed() < Duration::from_secs(20), "{took:?}");
        }
        event.signal();
        assert_eq!(poller.wait(&mut events, Some(short)).expect("wait"), 1);
        assert_eq!(events.iter().next().map(|event| event.token), Some(3));
    }

    #[test]
    fn reset_is_reported_without_interest() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        let mut peer = TcpStream::connect(listener.local_addr().expect("addr")).expect("connect");
        let (stream, _) = listener.accept().expect("accept");
        let poller = Poller::new().expect("epoll");
        poller.add(&stream, 5, Interest::NONE).expect("add");
        let mut events = Events::with_capacity(4);
        assert_eq!(poller.wait_zero(&mut events).expect("wait"), 0);
        // The peer resets the connection.
        peer.write_all(b"unread").expect("write");
        socket2::SockRef::from(&peer)
            .set_linger(Some(Duration::ZERO))
            .expect("linger");
        drop(peer);
        assert_eq!(
            poller
                .wait(&mut events, Some(Duration::from_secs(10)))
                .expect("wait"),
            1
        );
        let event = events.iter().next().expect("event");
        assert!(event.token == 5 && event.broken && event.readable && event.writable);
    }

    #[test]
    fn closed_direction_is_readable() {
        let (stream, peer) = std::os::unix::net::UnixStream::pair().expect("pair");
        let poller = Poller::new().expect("epoll");
        poller.add(&stream, 5, Interest::READ).expect("add");
        peer.shutdown(std::net::Shutdown::Write).expect("shutdown");
        let mut events = Events::with_capacity(1);
        let limit = Some(Duration::from_secs(10));
        assert_eq!(poller.wait(&mut events, limit).expect("wait"), 1);
        let event = events.iter().next().expect("event");
        assert!(event.readable && !event.writable && !event.broken);
    }

    #[test]
    fn endless_wait_is_never_over() {
        for timeout in [None, Some(Duration::MAX)] {
            let deadline = Deadline::after(timeout);
            assert!(!deadline.is_over());
            assert_eq!(deadline.remaining(), LONGEST);
        }
    }

    /// Installs a handler for an otherwise unused signal, so that the signal interrupts system
    /// calls.
    fn let_signals_interrupt() {
        extern "C" fn nothing(_: libc::c_int) {}
        // SAFETY: the handler does nothing, and nothing else in this process uses the signal.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
            assert_eq!(
                libc::sigaction(libc::SIGURG, &raw const action, std::ptr::null_mut()),
                0
            );
        }
    }

    /// Signals the calling thread every 2 ms. A kernel timer is punctual even on a busy machine.
    struct Alarm(libc::timer_t);

    impl Alarm {
        fn start() -> Self {
            let_signals_interrupt();
            // SAFETY: all zeros are a valid `sigevent`, and the pointers are to local variables.
            unsafe {
                let mut event: libc::sigevent = std::mem::zeroed();
                event.sigev_notify = libc::SIGEV_THREAD_ID;
                event.sigev_signo = libc::SIGURG;
                event.sigev_notify_thread_id = libc::gettid();
                let mut timer = std::ptr::null_mut();
                let status =
                    libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer);
                assert_eq!(status, 0);
                let alarm = Self(timer);
                alarm.set(Duration::from_millis(2));
                alarm
            }
        }

        /// Sets the interval of the signals; zero stops them.
        fn set(&self, interval: Duration) {
            let interval = libc::timespec {
                tv_sec: 0,
                tv_nsec: interval.subsec_nanos().into(),
            };
            let times = libc::itimerspec {
                it_interval: interval,
                it_value: interval,
            };
            // SAFETY: the timer exists until `self` is dropped, and `times` is a valid value.
            let set =
                unsafe { libc::timer_settime(self.0, 0, &raw const times, std::ptr::null_mut()) };
            assert_eq!(set, 0);
        }
    }

    impl Drop for Alarm {
        fn drop(&mut self) {
            // SAFETY: the timer was created in `start`, and is deleted only here.
            unsafe { libc::timer_delete(self.0) };
        }
    }

    // SAFETY: a timer belongs to the process, and `timer_settime(2)` may be called by any thread.
    unsafe impl Sync for Alarm {}

    /// Repeated signals must not restart the wait each time.
    #[test]
    fn signals_do_not_prolong_wait() {
        let poller = Poller::new().expect("epoll");
        let never = EventFd::new().expect("eventfd");
        let limit = Some(Duration::from_millis(40));
        let mut events = Events::with_capacity(1);
        let mut waits: [&mut dyn FnMut() -> bool; 2] = [
            &mut || poller.wait(&mut events, limit).expect("wait") > 0,
            &mut || wait_fd(&never, Interest::READ, limit).expect("wait"),
        ];
        for (i, wait) in waits.iter_mut().enumerate() {
            let alarm = &Alarm::start();
            let (sender, receiver) = mpsc::channel();
            std::thread::scope(|scope| {
                let watchdog = scope.spawn(move || {
                    let result = receiver.recv_timeout(Duration::from_secs(20));
                    alarm.set(Duration::ZERO);
                    result.is_ok()
                });
                assert!(!wait());
                sender.send(()).expect("the watchdog is waiting");
                assert!(watchdog.join().expect("no panic"), "wait {i} did not end");
            });
        }
    }

    #[test]
    fn signal_does_not_shorten_wait() {
        let_signals_interrupt();
        // SAFETY: the call has no requirements.
        let sleeper = unsafe { libc::pthread_self() };
        let poller = Poller::new().expect("epoll");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..5 {
                    std::thread::sleep(Duration::from_millis(4));
                    // SAFETY: the waiting thread exists until the scope ends.
                    unsafe { libc::pthread_kill(sleeper, libc::SIGURG) };
                }
            });
            let start = Instant::now();
            let limit = Duration::from_millis(40);
            let mut events = Events::with_capacity(1);
            assert_eq!(poller.wait(&mut events, Some(limit)).expect("wait"), 0);
            assert!(start.elapsed() >= limit);
        });
    }
}
