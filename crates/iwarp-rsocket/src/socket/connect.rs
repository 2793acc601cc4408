//! The connecting side.

use super::{Phase, Socket, State};
use crate::errno::{Errno, Result};
use crate::stream::Stream;
use crate::wire::Hello;
use iwarp::runtime::cm::{CmEvent, CmEventKind, CmId, ConnectionParameters};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

impl Socket {
    /// Connects. Blocks until connected, unless the socket is nonblocking. Fails with EPROTO if the
    /// peer is not an rsocket, with ENODEV if no device has a route, and with the errors of
    /// connect(2).
    pub(crate) fn connect(&self, to: SocketAddr) -> Result<()> {
        let nonblocking = {
            let mut s = self.lock();
            self.pump(&mut s, true);
            match &s.phase {
                Phase::Idle | Phase::Failed => {}
                Phase::Connecting(_) => return Err(Errno::ALREADY),
                Phase::Connected(_) => return Err(Errno::ISCONN),
                Phase::Listening(_) => return Err(Errno::ISCONN),
                Phase::Closed => return Err(Errno::BADF),
            }
            if self.domain == libc::AF_INET && to.is_ipv6() {
                return Err(Errno(libc::EAFNOSUPPORT));
            }
            self.start(&mut s, to)?;
            s.options.nonblocking
        };
        if nonblocking {
            // As with TCP, even if the peer has answered already.
            return Err(Errno::INPROGRESS);
        }
        self.wait_until(true, None, |s| match &s.phase {
            Phase::Connecting(_) => None,
            Phase::Connected(_) => Some(Ok(())),
            _ => Some(Err(s.error.take().unwrap_or(Errno::CONNREFUSED))),
        })
    }

    fn start(&self, s: &mut State, to: SocketAddr) -> Result<()> {
        s.error = None;
        if let Phase::Failed = s.phase {
            // An identifier cannot be reused after a failed attempt.
            s.id.destroy();
            s.id = CmId::create(&self.channel, None);
            if let Some(bound) = s.bound {
                s.id.bind(bound)?;
            }
            s.phase = Phase::Idle;
        }
        self.try_start(s, to)
            .inspect_err(|_| s.phase = Phase::Failed)
    }

    fn try_start(&self, s: &mut State, to: SocketAddr) -> Result<()> {
        s.id.resolve_addr(None, connect_address(to))?;
        s.id.resolve_route()?;
        // Both steps complete immediately, and their events carry no information.
        while !self.channel.is_empty() {
            let _ = self.channel.try_next();
        }
        let ctx = s.id.context().ok_or(Errno(libc::ENODEV))?;
        let stream = Stream::new(&ctx, s.options.sizes)?;
        s.id.set_queue_pair(Some(&stream.qp));
        let hello = stream.hello().encode().to_vec();
        s.phase = Phase::Connecting(Box::new(stream));
        let parameters = ConnectionParameters {
            private_data: hello,
            ..Default::default()
        };
        Ok(s.id.connect(&parameters)?)
    }
}

impl State {
    pub(super) fn handle_connecting(&mut self, kind: CmEventKind, event: &CmEvent) {
        let Phase::Connecting(_) = &self.phase else {
            return;
        };
        let status = |default: i32| {
            Errno(if event.status == 0 {
                default
            } else {
                event.status
            })
        };
        let error = match kind {
            CmEventKind::Established => match Hello::decode(&event.private_data) {
                Ok(hello) => return self.established(&hello),
                Err(reason) => {
                    tracing::debug!(?reason, "the peer is not a compatible rsocket");
                    Errno::PROTO
                }
            },
            CmEventKind::Rejected => Errno::CONNREFUSED,
            CmEventKind::Unreachable => status(libc::ETIMEDOUT),
            CmEventKind::ConnectError => status(libc::ECONNREFUSED),
            CmEventKind::Disconnected => Errno::CONNRESET,
            _ => return,
        };
        self.error = Some(error);
        self.phase = Phase::Failed;
    }

    fn established(&mut self, hello: &Hello) {
        match std::mem::replace(&mut self.phase, Phase::Failed) {
            Phase::Connecting(mut stream) => {
                stream.set_peer(hello);
                self.phase = Phase::Connected(stream);
            }
            other => self.phase = other,
        }
    }
}

/// Maps the unspecified address to this host, as connect(2) does.
fn connect_address(to: SocketAddr) -> SocketAddr {
    let to = match to.ip().to_canonical() {
        IpAddr::V4(ip) => SocketAddr::new(ip.into(), to.port()),
        IpAddr::V6(_) => to,
    };
    match to.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => {
            SocketAddr::new(Ipv4Addr::LOCALHOST.into(), to.port())
        }
        IpAddr::V6(ip) if ip.is_unspecified() => {
            SocketAddr::new(Ipv6Addr::LOCALHOST.into(), to.port())
        }
        _ => to,
    }
}
