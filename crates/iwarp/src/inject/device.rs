//! Faults of a device: failing creations of objects, its port, and its events.

use super::log::Target;
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
    /// Counts the creation of an object of this kind.
    ///
    /// # Errors
    /// The injected error, if a rule injects one.
    pub(super) fn refuse_creation(&self, name: &'static str) -> Result<()> {
        for (i, rule) in self.rules(Point::Creation) {
            let Kind::Create(object) = rule.kind else {
                continue;
            };
            if object.name != name {
                continue;
            }
            if let Some(injected) = self.process_opportunity(i) {
                self.log.record(self, &injected, &Target::default());
                return Err(match object.errno {
                    libc::ENOMEM => Error::OutOfMemory,
                    errno => Error::from(io::Error::from_raw_os_error(errno)),
                });
            }
        }
        Ok(())
    }

    /// Counts a receive for a shared receive queue. Returns `true` if posting it has to fail.
    pub(super) fn refuse_shared_receive(&self) -> bool {
        let mut refuses = false;
        for (i, rule) in self.rules(Point::Post) {
            let select = &rule.select;
            let selects_all = select.qp.is_none() && select.peer.is_none();
            let receives = select
                .ops
                .is_none_or(|ops| ops.has(crate::fault::Ops::RECV));
            if rule.kind != Kind::Post || !selects_all || !receives {
                continue;
            }
            if let Some(injected) = self.process_opportunity(i) {
                let target = Target {
                    op: Some("recv"),
                    ..Target::default()
                };
                self.log.record(self, &injected, &target);
                refuses = true;
            }
        }
        refuses
    }

    pub(super) fn port_down(self: &Arc<Self>, time: u64) {
        let until = self.wake_port_after(time);
        let before = self.port_down_until.swap(until, Ordering::Relaxed);
        if before == 0 {
            self.raise_everywhere(Event::PortError);
        }
        for (qp, _) in self.find_queue_pairs(|_| true) {
            // Lets the engine stop watching the socket while it must not be read.
            qp.with_machine(|_, _| ());
        }
    }

    /// Ends the port's down time if it has passed. Returns `true` if this call has ended it.
    pub(super) fn end_port_down(&self) -> bool {
        let until = self.port_down_until.load(Ordering::Relaxed);
        if until == 0 || now_ns() < until {
            return false;
        }
        // If another thread has extended the down time, the port stays down until the new time.
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
            for (qp, _) in self.find_queue_pairs(|_| true) {
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
        self.refuse_shared_receive()
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
