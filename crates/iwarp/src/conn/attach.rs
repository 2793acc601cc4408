//! How a stream that has finished MPA start-up becomes the connection of a queue pair.

use super::attributes::is_unreliable;
use super::cork::Cork;
use super::effects::{DriveHost, Due, Effects};
use super::infiniband::InfinibandParameters;
use super::link::{Link, Open, Socket};
use super::liveness::{self, Liveness};
use super::qp::{CmSink, QpInner, QpState};
use crate::engine::{Engine, Source};
use crate::error::{Error, Result};
use crate::objects::hooks::Observer;
use crate::sys::clock::now_ns;
use crate::sys::connect::Ends;
use crate::sys::poller::Interest;
use crate::sys::stream::TcpStream;
use iwarp_rnic::Time;
use iwarp_rnic::qp::{QueuePair as Machine, StreamConfig};
use std::sync::{Arc, Weak};
use std::time::Instant;

/// A stream that has finished MPA start-up, for [`QpInner::attach`].
pub(crate) struct Handover {
    pub(crate) stream: TcpStream,
    pub(crate) ends: Ends,
    /// The token under which the engine already watches the stream for reading.
    pub(crate) watched: Option<u64>,
    pub(crate) config: StreamConfig,
    pub(crate) flow: Option<Box<dyn Observer>>,
    pub(crate) cm: Option<Weak<dyn CmSink>>,
    /// The queue pair's [`epoch`](super::qp::QueuePair::epoch) when the attempt to connect began;
    /// `None` if the queue pair cannot have been reset since.
    pub(crate) epoch: Option<u64>,
    /// If set, the connection behaves as on InfiniBand.
    pub(crate) infiniband: Option<InfinibandParameters>,
}

impl QpState {
    fn forget_last_stream(&mut self) {
        self.cork = Cork::default();
        self.peer_vanished = false;
        self.stream_errno = None;
    }
}

impl QpInner {
    pub(crate) fn attach(self: &Arc<Self>, handover: Handover) -> Result<()> {
        let (engine, watched) = self.choose_engine(&handover)?;
        let token = watched.unwrap_or_else(|| engine.token());
        let mss = handover.stream.mss().unwrap_or(handover.config.emss);
        let socket = Arc::new(Socket {
            stream: handover.stream,
            ends: handover.ends,
            flow: handover.flow,
            token,
            engine: Arc::clone(&engine),
            start: Instant::now(),
        });
        engine.connection_added();
        let mut effects = Effects::default();
        {
            let mut g = self.state.lock();
            let is_stale = handover.epoch.is_some_and(|epoch| epoch != g.epoch());
            let started = if self.is_destroyed() || g.link.is_open() || is_stale {
                Err(Error::InvalidState(
                    "the queue pair is destroyed, was reset, or has a connection already",
                ))
            } else {
                self.start_stream(&mut g.machine, handover.config, mss)
            };
            if let Err(error) = started {
                drop(g);
                engine.remove(&socket.stream, token);
                return Err(error);
            }
            g.apply_infiniband(handover.infiniband);
            if let Some(flow) = &socket.flow {
                flow.framed(handover.config.markers_tx, handover.config.markers_rx);
            }
            if let Some(faults) = &self.faults {
                faults.connected(socket.ends.peer, handover.config.crc);
                effects.add_if(Due::FAULT, faults.is_due());
            }
            let liveness = Liveness::new(&socket.stream, self.ctx.config.peer_timeout);
            let open = Open::new(Arc::clone(&socket), handover.cm, liveness);
            let attached = g.link.attach(open);
            debug_assert!(attached, "there was no stream above");
            g.forget_last_stream();
            g.stream_ends = Some(socket.ends);
            // Add the stream with the lock held, so that no thread changes its interest before.
            let source = Arc::clone(self) as Arc<dyn Source>;
            let watched = if watched.is_some() {
                engine.replace_source(token, source);
                Ok(())
            } else {
                engine.add(&socket.stream, token, Interest::READ, source)
            };
            if let Err(e) = watched {
                // The stream cannot be driven, so treat it as broken.
                g.link = Link::default();
                g.machine
                    .stream_failed(&mut DriveHost::new(self, &mut effects));
                self.complete_due(&mut g, &mut effects);
                drop(g);
                effects.apply(self);
                return Err(e.into());
            }
            // Set timers only now, because the engine drops a timer that has no source.
            liveness::begin(self, &mut g);
            self.update_timer(&mut g, &mut effects);
        }
        effects.apply(self);
        // This need not read: the engine reports data that has already arrived.
        self.drive_tx();
        Ok(())
    }

    fn start_stream(&self, machine: &mut Machine, config: StreamConfig, mss: u32) -> Result<()> {
        if self.ctx.config.placed && !is_unreliable(machine) {
            machine.complete_when_placed();
        }
        if let Some(target) = &self.xrc {
            machine.set_default_pd(target.default_pd());
        }
        let emss = self.emss(mss);
        machine
            .start(StreamConfig { emss, ..config }, Time::from_nanos(now_ns()))
            .map_err(|_| Error::InvalidState("the queue pair is in the error state"))?;
        if self.ctx.config.align.applies(mss) {
            machine.align(mss);
        }
        Ok(())
    }

    /// Chooses the engine for a new connection. Returns the engine, and the token if that engine
    /// already watches the stream.
    fn choose_engine(&self, handover: &Handover) -> Result<(Arc<Engine>, Option<u64>)> {
        let first = Engine::current()?;
        let engine = Engine::for_connection(self.ctx.config.progress_threads.into())?;
        let watched = match handover.watched {
            Some(token) if !Arc::ptr_eq(&engine, &first) => {
                first.remove(&handover.stream, token);
                None
            }
            watched => watched,
        };
        Ok((engine, watched))
    }

    /// Returns the segment size for which FPDUs are built: `mss`, or the configured limit.
    pub(crate) fn emss(&self, mss: u32) -> u32 {
        self.ctx.config.mss.map_or(mss, |limit| limit.min(mss))
    }

    /// Fails a connection that was negotiated but cannot be used, and flushes all requests. Does
    /// nothing if the queue pair was reset since `epoch`, because the reset has ended the
    /// connection.
    pub(crate) fn fail_connection(self: &Arc<Self>, epoch: u64) {
        let mut effects = Effects::default();
        {
            let mut g = self.state.lock();
            if g.epoch() != epoch {
                return;
            }
            g.machine.abort(&mut DriveHost::new(self, &mut effects));
            self.collect_effects(&mut g, &mut effects);
        }
        effects.apply(self);
    }
}
