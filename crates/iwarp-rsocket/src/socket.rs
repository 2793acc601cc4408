//! Sockets: their states, connecting, accepting, waiting, closing.
//!
//! Each socket has a lock, which is never held during sleep. Lock order: the table of sockets is
//! never locked while a socket is; a listener is locked before the sockets that it accepts, which
//! are not yet known to other threads.

mod accept;
mod close;
mod connect;
mod locked;
pub(crate) mod options;

pub(crate) use close::close_all_at_exit;

use crate::errno::{Errno, Result};
use crate::fork;
use crate::notify::{CompletionWaker, EventWaker, Waiter, Waiters};
use crate::options::Options;
use crate::service;
use crate::spin;
use crate::stream::Stream;
use iwarp::runtime::cm::{CmEvent, CmEventChannel, CmEventKind, CmId};
use iwarp::runtime::create_event_channel;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::task::Waker;
use std::time::{Duration, Instant};

pub(crate) enum Phase {
    /// Neither connected nor listening; it may be bound.
    Idle,
    Listening(Listening),
    Connecting(Box<Stream>),
    Connected(Box<Stream>),
    /// Connecting failed, and the program has not tried again.
    Failed,
    Closed,
}

/// Established connections that the program has not accepted yet.
pub(crate) struct Listening {
    ready: VecDeque<Arc<Socket>>,
    backlog: usize,
}

pub(crate) struct State {
    pub(crate) phase: Phase,
    pub(crate) id: CmId,
    pub(crate) bound: Option<SocketAddr>,
    pub(crate) options: Options,
    /// The error of a connection attempt, reported once.
    error: Option<Errno>,
}

/// Called after each poll that found nothing. A program that polls in a loop sometimes yields its
/// processor, because its peer may need it to reply.
pub(crate) use iwarp::runtime::after_empty_poll;

pub(crate) struct Socket {
    fd: RawFd,
    pub(crate) domain: i32,
    generation: u32,
    channel: CmEventChannel,
    pub(crate) state: Mutex<State>,
    waiters: Arc<Waiters>,
    completion: Waker,
    event: Arc<EventWaker>,
    event_waker: Waker,
    note: locked::Note,
    tail_waker: Waker,
    this: Weak<Self>,
}

impl Socket {
    pub(crate) fn create(domain: i32, options: Options) -> Result<Arc<Self>> {
        let channel = create_event_channel()?;
        let id = CmId::create(&channel, None);
        Ok(Self::from_parts(domain, options, channel, id, Phase::Idle))
    }

    fn from_parts(
        domain: i32,
        options: Options,
        channel: CmEventChannel,
        id: CmId,
        phase: Phase,
    ) -> Arc<Self> {
        let waiters = Arc::new(Waiters::default());
        let event = Arc::new(EventWaker {
            waiters: Arc::clone(&waiters),
            is_listening: AtomicBool::new(false),
            kick: service::kick,
        });
        Arc::new_cyclic(|this| Self {
            fd: channel.as_fd().as_raw_fd(),
            domain,
            generation: fork::generation(),
            channel,
            state: Mutex::new(State {
                phase,
                id,
                bound: None,
                options,
                error: None,
            }),
            completion: Waker::from(Arc::new(CompletionWaker(Arc::clone(&waiters)))),
            event_waker: Waker::from(Arc::clone(&event)),
            event,
            waiters,
            note: locked::Note::default(),
            tail_waker: Waker::from(Arc::new(locked::TailWaker(Weak::clone(this)))),
            this: Weak::clone(this),
        })
    }

    /// Returns the socket's number: the descriptor of its event channel. The descriptor is open as
    /// long as the socket, so no other descriptor has this number.
    pub(crate) const fn number(&self) -> RawFd {
        self.fd
    }

    /// Returns `true` if the socket was created before a fork, by a parent of this process.
    pub(crate) fn is_inherited(&self) -> bool {
        self.generation != fork::generation()
    }

    pub(crate) const fn waiters(&self) -> &Arc<Waiters> {
        &self.waiters
    }

    /// Calls `f` with the locked state, without processing events.
    pub(crate) fn with_state<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        f(&mut self.lock())
    }

    /// Processes events and completions. With `drive` the thread also drives the connection.
    pub(crate) fn pump(&self, s: &mut State, drive: bool) {
        // Reading an empty queue costs a system call.
        while !self.channel.is_empty() {
            match self.channel.try_next() {
                Some(event) => self.handle(s, event),
                None => break,
            }
        }
        if let Phase::Connected(stream) = &mut s.phase {
            stream.process(drive);
        }
    }

    fn handle(&self, s: &mut State, event: CmEvent) {
        match (&mut s.phase, event.kind) {
            (Phase::Listening(_), CmEventKind::ConnectRequest) => self.answer_request(s, event),
            (_, CmEventKind::ConnectRequest) => {
                let _ = event.id.reject(&[]);
            }
            (Phase::Connecting(_), kind) => s.handle_connecting(kind, &event),
            (
                Phase::Connected(stream),
                CmEventKind::Disconnected
                | CmEventKind::ConnectError
                | CmEventKind::Unreachable
                | CmEventKind::Rejected,
            ) => {
                // Data that arrived before the end is still in the completion queue.
                stream.process(false);
                stream.lost();
            }
            _ => {}
        }
    }

    /// Requests a wake-up by the next change. The caller must then check the socket once more.
    pub(crate) fn arm(&self, s: &State) {
        if let Phase::Connected(stream) = &s.phase {
            stream.cq.wake_at_next(&self.completion);
        }
        self.channel.wake_at_next(&self.event_waker);
    }

    /// Repeats `step`, under the lock, until it returns a result. Fails with EAGAIN if there is no
    /// result, and `wait` is `false` or the timeout has passed. Fails with EINTR if a signal
    /// handler ran.
    pub(crate) fn wait_until<R>(
        &self,
        wait: bool,
        timeout: Option<Duration>,
        mut step: impl FnMut(&mut State) -> Option<Result<R>>,
    ) -> Result<R> {
        let start = {
            let mut s = self.lock();
            if let Some(result) = step(&mut s) {
                return result;
            }
            self.pump(&mut s, true);
            if let Some(result) = step(&mut s) {
                return result;
            }
            if !wait {
                drop(s);
                after_empty_poll();
                return Err(Errno::AGAIN);
            }
            Instant::now()
        };
        let window = spin::window();
        while start.elapsed() < window {
            let mut s = self.lock();
            self.pump(&mut s, true);
            if let Some(result) = step(&mut s) {
                spin::hit();
                return result;
            }
            drop(s);
            after_empty_poll();
        }
        spin::miss(window, start.elapsed());
        let deadline = timeout.and_then(|t| start.checked_add(t));
        let waiter = Waiter::for_this_thread()?;
        let _joined = self.waiters.join(&waiter);
        loop {
            {
                let mut s = self.lock();
                self.arm(&s);
                self.pump(&mut s, false);
                if let Some(result) = step(&mut s) {
                    spin::slept(start.elapsed());
                    return result;
                }
            }
            if !waiter.wait(deadline)? {
                return Err(Errno::AGAIN);
            }
        }
    }

    /// Returns the events for `poll`. With `drive` the thread also drives the connection.
    pub(crate) fn poll_events(&self, wanted: i16, drive: bool, arm: bool) -> i16 {
        const IN: i16 = libc::POLLIN | libc::POLLRDNORM;
        const OUT: i16 = libc::POLLOUT | libc::POLLWRNORM;
        if self.is_inherited() {
            // The socket never changes in this process, and its lock may be held by the parent's
            // threads.
            return libc::POLLERR | libc::POLLHUP;
        }
        let mut s = self.lock();
        if arm {
            self.arm(&s);
        }
        self.pump(&mut s, drive);
        match &s.phase {
            Phase::Idle | Phase::Connecting(_) => 0,
            Phase::Listening(l) if l.ready.is_empty() => 0,
            Phase::Listening(_) => wanted & IN,
            Phase::Failed => (wanted & (IN | OUT)) | libc::POLLERR | libc::POLLHUP,
            Phase::Closed => libc::POLLNVAL,
            Phase::Connected(stream) => {
                let mut events = 0;
                if stream.is_readable() {
                    events |= wanted & IN;
                }
                if stream.is_writable() {
                    events |= wanted & OUT;
                }
                if stream.is_at_end() {
                    events |= wanted & libc::POLLRDHUP;
                }
                // Programs that treat POLLHUP as an error would lose unread data.
                if stream.is_at_end() && stream.cannot_write() && stream.available() == 0 {
                    events |= libc::POLLHUP;
                }
                if stream.error().is_some() {
                    events |= libc::POLLERR;
                }
                events
            }
        }
    }

    /// Returns the socket's address, and the peer's address or ENOTCONN.
    pub(crate) fn addresses(&self) -> (Option<SocketAddr>, Result<SocketAddr>) {
        let s = self.lock();
        let (local, peer) = s.id.addresses();
        let peer = match s.phase {
            Phase::Connected(_) => peer.ok_or(Errno::NOTCONN),
            _ => Err(Errno::NOTCONN),
        };
        let local = local.or(s.bound).map(|a| self.in_domain(a));
        (local, peer.map(|a| self.in_domain(a)))
    }

    /// Returns an address in the socket's family: IPv4 in mapped form for an IPv6 socket.
    fn in_domain(&self, address: SocketAddr) -> SocketAddr {
        match address {
            SocketAddr::V4(a) if self.domain == libc::AF_INET6 => {
                SocketAddr::new(a.ip().to_ipv6_mapped().into(), a.port())
            }
            other => other,
        }
    }

    /// Binds the socket. Fails with EINVAL if it is already bound or connected, and with the errors
    /// of bind(2).
    pub(crate) fn bind(&self, address: SocketAddr) -> Result<()> {
        let mut s = self.lock();
        if !matches!(s.phase, Phase::Idle | Phase::Failed) || s.bound.is_some() {
            return Err(Errno::INVAL);
        }
        if self.domain == libc::AF_INET && address.is_ipv6() {
            return Err(Errno(libc::EAFNOSUPPORT));
        }
        if let Some(only) = s.options.only_v6 {
            s.id.set_only_v6(only);
        }
        s.id.set_reuse_address(s.options.reuse_address);
        let bound = SocketAddr::new(address.ip().to_canonical(), address.port());
        let bound = match (address, bound) {
            // Keep the scope of a link-local address.
            (SocketAddr::V6(_), SocketAddr::V6(_)) => address,
            (_, other) => other,
        };
        s.id.bind(bound).map_err(|e| match e {
            iwarp::Error::NoDevice => Errno(libc::EADDRNOTAVAIL),
            e => e.into(),
        })?;
        s.bound = s.id.addresses().0.or(Some(bound));
        Ok(())
    }
}

impl service::Client for Socket {
    /// Answers pending requests, and requests the next wake-up.
    fn serve(&self) {
        let mut s = self.lock();
        if !matches!(s.phase, Phase::Listening(_)) {
            return;
        }
        self.arm(&s);
        self.pump(&mut s, false);
        drop(s);
        self.waiters.notify();
    }

    fn keep_alive(&self) {
        let mut s = self.lock();
        self.pump(&mut s, true);
        if let Phase::Connected(stream) = &mut s.phase {
            stream.keep_alive();
        }
    }

    fn send_old_tail(&self) -> bool {
        match &mut self.lock().phase {
            Phase::Connected(stream) => stream.check_tail(),
            _ => false,
        }
    }
}

impl State {
    /// Returns the stream of a connected socket. Fails with EAGAIN while connecting, with EBADF
    /// after closing, and with ENOTCONN or the error of a failed attempt in other phases.
    pub(crate) fn stream(&mut self) -> Result<&mut Stream> {
        match &mut self.phase {
            Phase::Connected(stream) => Ok(stream),
            Phase::Connecting(_) => Err(Errno::AGAIN),
            Phase::Failed => Err(self.error.take().unwrap_or(Errno::NOTCONN)),
            Phase::Idle | Phase::Listening(_) => Err(Errno::NOTCONN),
            Phase::Closed => Err(Errno::BADF),
        }
    }

    pub(crate) fn take_error(&mut self) -> Option<Errno> {
        match &mut self.phase {
            Phase::Connected(stream) => stream.take_error(),
            _ => self.error.take(),
        }
    }
}
