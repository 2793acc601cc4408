//! Faults of the device: creation of objects, its port, and its events.

use super::log::Place;
use super::plan::Plan;
use super::qp::QpInjector;
use crate::error::{Error, Result};
use crate::fault::{Event, Kind, Point};
use crate::objects::events::{AsyncEventKind, PortEvent};
use crate::objects::hooks::{DeviceFaults, QpFaults};
use crate::sys::clock::now_ns;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

impl Plan {
    /// Called before an object of this kind is created.
    ///
    /// # Errors
    /// Returns the injected error if a rule acts.
    pub(super) fn refuse_creation(&self, name: &'static str) -> Result<()> {
        for (i, rule) in self.rules(Point::Creation) {
            let Kind::Create(object) = rule.kind else {
                continue;
            };
            if object.name != name {
                continue;
            }
            if let Some(taken) = self.process_wide(i) {
                self.log.note(self, &taken, &Place::default());
                return Err(match object.errno {
                    libc::ENOMEM => Error::OutOfMemory,
                    errno => Error::from(io::Error::from_raw_os_error(errno)),
                });
            }
        }
        Ok(())
    }

    /// Returns `true` if a receive must not be posted to a shared receive queue.
    pub(super) fn take_shared_receive(&self) -> bool {
        let mut refuses = false;
        for (i, rule) in self.rules(Point::Post) {
            let select = &rule.select;
            let anybodys = select.qp.is_none() && select.peer.is_none();
            let receives = select
                .ops
                .is_none_or(|ops| ops.has(crate::fault::Ops::RECV));
            if rule.kind != Kind::Post || !anybodys || !receives {
                continue;
            }
            if let Some(taken) = self.process_wide(i) {
                let place = Place {
                    op: Some("recv"),
                    ..Place::default()
                };
                self.log.note(self, &taken, &place);
                refuses = true;
            }
        }
        refuses
    }

    /// Takes the port down for `time` nanoseconds.
    pub(super) fn port_down(self: &Arc<Self>, time: u64) {
        let until = self.wake_port_after(time);
        let before = self.port_down_until.swap(until, Ordering::Relaxed);
        if before == 0 {
            self.raise_everywhere(Event::PortError);
        }
        for (qp, _) in self.queue_pairs_that(|_| true) {
            // The engine stops watching a socket that may not be read.
            qp.with_machine(|_, _| ());
        }
    }

    /// Returns `true` if the port's down time has ended with this call.
    pub(super) fn end_port_down(&self) -> bool {
        let until = self.port_down_until.load(Ordering::Relaxed);
        if until == 0 || now_ns() < until {
            return false;
        }
        // If the port goes down again concurrently, it stays down until the new time.
        let ended =
            self.port_down_until
                .compare_exchange(until, 0, Ordering::Relaxed, Ordering::Relaxed);
        if ended.is_err() {
            return false;
        }
        self.raise_everywhere(Event::PortActive);
        true
    }

    /// Raises an event of the port or of the device on all devices.
    pub(super) fn raise_everywhere(&self, event: Event) {
        let kind = match event {
            Event::PortActive => PortEvent::Active,
            Event::PortError => PortEvent::Error,
            Event::LidChange => PortEvent::LidChange,
            Event::PkeyChange => PortEvent::PkeyChange,
            Event::SmChange => PortEvent::SmChange,
            Event::ClientReregister => PortEvent::ClientReregister,
            Event::GidChange => PortEvent::GidChange,
            Event::DeviceFatal => PortEvent::DeviceFatal,
            _ => return,
        };
        let contexts: Vec<_> = self
            .contexts
            .lock()
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        for ctx in &contexts {
            ctx.raise(AsyncEventKind::Port(kind));
        }
        if event == Event::DeviceFatal {
            for (qp, _) in self.queue_pairs_that(|_| true) {
                qp.with_machine(|machine, host| machine.abort(host));
            }
        }
    }
}

impl DeviceFaults for Plan {
    fn create(&self, name: &'static str) -> Result<()> {
        self.refuse_creation(name)
    }

    fn refuses_shared_receive(&self) -> bool {
        self.take_shared_receive()
    }

    fn is_port_down(&self) -> bool {
        let until = self.port_down_until.load(Ordering::Relaxed);
        until != 0 && now_ns() < until
    }

    fn connect(&self, peer: SocketAddr) -> Option<i32> {
        self.refuse_connect(peer)
    }

    fn queue_pair(self: Arc<Self>, num: u32) -> Box<dyn QpFaults> {
        QpInjector::new(&self, num)
    }
}
