//! The initiator's TCP connection: the port mapper, the connect, and further attempts after a
//! refusal.

use super::{Active, End, Next, Stage, State, TIMER_MAPPER, TIMER_RECONNECT};
use crate::cm::portmap::{self, Found, Lookup};
use crate::cm::{CmEventKind, REFUSED_PAUSES};
use crate::engine::Source;
use crate::error::{Error, Result};
use crate::objects::context::random_u64;
use crate::sys::clock::now_ns;
use crate::sys::connect::{Bound, Connect, Connecting, Sharing, connect};
use crate::sys::poller::Interest;
use iwarp_rnic::Time;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

impl Active {
    pub(super) fn connect(self: &Arc<Self>, s: &mut State, bound: Option<Bound>) -> Result<Next> {
        let attempt = match bound {
            Some(bound) => bound.connect(s.target),
            None => connect(s.target, self.local),
        };
        match attempt {
            Ok(connecting) => self.begin(s, connecting),
            Err(e) => Ok(self.connect_failed(s, &e.into())),
        }
    }

    /// Asks the peer's port mapper for the listener's address. The request contains the local port,
    /// so the socket is bound first.
    pub(super) fn ask_mapper(
        self: &Arc<Self>,
        s: &mut State,
        bound: Option<Bound>,
        port: u16,
    ) -> Result<Next> {
        let any = match self.peer {
            SocketAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
            SocketAddr::V6(_) => IpAddr::from(Ipv6Addr::UNSPECIFIED),
        };
        let bound = match bound {
            Some(bound) => bound,
            None => Bound::bind(
                self.local.unwrap_or(SocketAddr::new(any, 0)),
                None,
                Sharing::Exclusive,
            )
            .map_err(Error::from)?,
        };
        let local = bound.local_addr()?;
        let lookup = match Lookup::start(self.peer, local, port, random_u64()?) {
            Ok(lookup) => lookup,
            Err(error) => {
                tracing::debug!(peer = %self.peer, %error, "cannot ask the port mapper");
                return self.connect(s, Some(bound));
            }
        };
        s.token = self.engine.token();
        self.engine.add(
            &lookup,
            s.token,
            Interest::READ,
            Arc::clone(self) as Arc<dyn Source>,
        )?;
        self.engine.after(portmap::PAUSE, s.token, TIMER_MAPPER);
        s.stage = Stage::Mapper(lookup, bound);
        Ok(Next::Wait)
    }

    /// Reads the port mapper's reply. `timed_out`: if there is no reply, sends the request again or
    /// gives up.
    pub(super) fn read_mapper(
        self: &Arc<Self>,
        s: &mut State,
        mut lookup: Lookup,
        bound: Bound,
        timed_out: bool,
    ) -> Next {
        let mut found = lookup.read_replies();
        if timed_out && found == Found::Wait {
            found = lookup.retry();
            self.engine.after(portmap::PAUSE, s.token, TIMER_MAPPER);
        }
        match found {
            Found::Wait => {
                s.stage = Stage::Mapper(lookup, bound);
                Next::Wait
            }
            Found::At(target) => {
                self.engine.remove(&lookup, s.token);
                tracing::debug!(peer = %self.peer, %target, "port mapper reply");
                s.target = target;
                self.connect(s, Some(bound)).unwrap_or_else(|e| {
                    Next::End(End::failed(CmEventKind::ConnectError, e.errno()))
                })
            }
        }
    }

    /// Handles a TCP connect that failed. If it was refused, connects again after a pause, a few
    /// times.
    pub(super) fn connect_failed(self: &Arc<Self>, s: &mut State, e: &io::Error) -> Next {
        let pause = REFUSED_PAUSES.get(s.refused).copied();
        let (Some(libc::ECONNREFUSED), Some(pause)) = (e.raw_os_error(), pause) else {
            return Next::End(End::from_io_error(e));
        };
        s.refused += 1;
        s.stage = Stage::Refused;
        s.token = self.engine.token();
        self.engine
            .add_timed(s.token, Arc::clone(self) as Arc<dyn Source>);
        self.engine.after(pause, s.token, TIMER_RECONNECT);
        Next::Wait
    }

    pub(super) fn reconnect(self: &Arc<Self>) {
        let next = {
            let mut s = self.state.lock();
            if !matches!(s.stage, Stage::Refused) {
                return;
            }
            self.engine.forget(s.token);
            s.stage = Stage::Done;
            match connect(s.target, self.local) {
                Ok(connecting) => self.begin(&mut s, connecting).unwrap_or_else(|e| {
                    Next::End(End::failed(CmEventKind::ConnectError, e.errno()))
                }),
                Err(e) => self.connect_failed(&mut s, &e.into()),
            }
        };
        if let Next::End(end) = next {
            self.finish(end);
        }
    }

    /// Continues a TCP connect. A connect to a peer on this host has succeeded already. Then the
    /// request is sent immediately, so that the progress thread need not wake.
    pub(super) fn begin(self: &Arc<Self>, s: &mut State, connecting: Connecting) -> Result<Next> {
        let octets = s.session.request();
        let (connecting, sent) = match connecting.send_now(octets) {
            Ok(now) => now,
            Err(e) => return Ok(self.connect_failed(s, &e)),
        };
        s.token = self.engine.token();
        match connecting {
            Connect::Pending(connecting) => {
                self.watch(s, &connecting, Interest::WRITE)?;
                s.session.connecting(Time::from_nanos(now_ns()));
                self.set_timer(s);
                s.stage = Stage::Tcp(connecting);
            }
            Connect::Done(stream, ends) => {
                let starting = self.starting(stream, ends);
                if let Err(e) = starting.written(octets, sent) {
                    return Ok(Next::End(End::from_io_error(&e)));
                }
                self.watch(s, &starting.stream, Interest::READ)?;
                self.await_reply(s, starting);
            }
        }
        Ok(Next::Wait)
    }

    pub(super) fn continue_connect(
        self: &Arc<Self>,
        s: &mut State,
        connecting: Connecting,
    ) -> Next {
        let token = s.token;
        let (stream, ends) = match connecting.try_finish() {
            Ok(Connect::Done(stream, ends)) => (stream, ends),
            Ok(Connect::Pending(connecting)) => {
                s.stage = Stage::Tcp(connecting);
                return Next::Wait;
            }
            Err(e) => {
                self.engine.forget(token);
                return self.connect_failed(s, &e);
            }
        };
        let starting = self.starting(stream, ends);
        if let Err(e) = starting.write(s.session.request()) {
            self.engine.remove(&starting.stream, token);
            return Next::End(End::from_io_error(&e));
        }
        let _ = self.engine.modify(&starting.stream, token, Interest::READ);
        self.await_reply(s, starting);
        Next::Wait
    }
}
