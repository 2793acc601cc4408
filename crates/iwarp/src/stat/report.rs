//! Reads the state of queue pairs and devices, for the statistics ([`crate::stat`]).
//!
//! The objects are read one at a time, under their own locks. In a forked child, the copies of the
//! parent's objects may be locked forever. Therefore objects from before the fork are read only if
//! their locks are free.

use crate::conn::qp::{QpInner, QpState};
use crate::objects::context::ContextInner;
use crate::objects::stats;
use crate::sys::clock::now_ns;
use crate::sys::guarded::MemoryTable;
use crate::sys::sharded_lock::ReadGuard;
use crate::sys::sockopt::{TcpInfo, tcp_info};
use iwarp_rnic::counters::Counters;
use iwarp_rnic::qp::{Fault, RxInterest, State};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};
use std::time::Duration;

pub(crate) struct QpReport {
    pub(crate) number: u32,
    pub(crate) state: &'static str,
    /// `true` if the queue pair is connected by number, and not by the connection manager.
    pub(crate) numbered: bool,
    pub(crate) pd: u32,
    /// Posted send work requests that are not complete.
    pub(crate) sends_outstanding: u32,
    /// Posted receives; `None` with a shared receive queue.
    pub(crate) receives_posted: Option<u32>,
    /// Pending completions in the queue pair's completion queues, including those of other queue
    /// pairs.
    pub(crate) send_completions: usize,
    pub(crate) recv_completions: usize,
    /// How long a Send has been waiting for a receive; `None` if none waits.
    pub(crate) held_ns: Option<u64>,
    /// Total time that Sends have waited for receives.
    pub(crate) held_total_ns: u64,
    pub(crate) counters: Counters,
    /// Why the last connection ended, if it ended in error.
    pub(crate) fault: Option<Fault>,
    pub(crate) link: Option<LinkReport>,
}

pub(crate) struct LinkReport {
    pub(crate) local: SocketAddr,
    pub(crate) peer: SocketAddr,
    pub(crate) age: Duration,
    /// Octets in TCP's send buffer, not acknowledged by the peer.
    pub(crate) unacknowledged_octets: Option<u64>,
    /// `None` if the kernel does not report it.
    pub(crate) tcp: Option<TcpInfo>,
}

/// The state of a device, summed over all its contexts.
pub(crate) struct DeviceReport {
    pub(crate) name: String,
    pub(crate) address: IpAddr,
    pub(crate) opened: u32,
    pub(crate) queue_pairs: usize,
    pub(crate) completion_queues: u32,
    pub(crate) registrations: usize,
    pub(crate) registered_octets: u64,
    /// Sum over all queue pairs since the process began, including destroyed ones.
    pub(crate) counters: Counters,
}

/// Iterates over the queue pairs of one context.
pub(crate) struct QpWalk {
    ctx: Weak<ContextInner>,
    device: String,
    numbers: Vec<u32>,
}

/// Returns an iterator for each open context.
pub(crate) fn qp_walks() -> Vec<QpWalk> {
    let walk = |ctx: &Arc<ContextInner>| QpWalk {
        ctx: Arc::downgrade(ctx),
        device: ctx.device.name.clone(),
        numbers: ctx.qp_numbers().unwrap_or_default(),
    };
    stats::opened().iter().map(walk).collect()
}

impl QpWalk {
    pub(crate) fn device(&self) -> &str {
        &self.device
    }

    /// Returns the next queue pair; `Some(None)` if it was destroyed or cannot be read; `None`
    /// after the last.
    pub(crate) fn next(&mut self) -> Option<Option<QpReport>> {
        let number = self.numbers.pop()?;
        Some(self.ctx.upgrade().and_then(|ctx| read_qp(&ctx, number)))
    }
}

fn read_qp(ctx: &ContextInner, number: u32) -> Option<QpReport> {
    let qp = ctx.qp_if_free(number)?;
    let (mut report, link) = {
        let g = if ctx.is_ours() {
            qp.state.lock()
        } else {
            qp.state.try_lock()?
        };
        // In a forked child: a connection of the parent.
        if g.link.socket().is_some_and(|l| l.engine.is_foreign()) {
            return None;
        }
        (report(&qp, &g), g.link.socket().cloned())
    };
    // The lock is released, because these are system calls.
    report.link = link.map(|link| LinkReport {
        local: link.ends.local,
        peer: link.ends.peer,
        age: link.start.elapsed(),
        unacknowledged_octets: link.stream.unacknowledged_bytes().ok(),
        tcp: tcp_info(&link.stream).ok(),
    });
    if ctx.is_ours() {
        report.send_completions = qp.send_cq.len();
        report.recv_completions = qp.recv_cq.len();
    }
    Some(report)
}

fn report(qp: &QpInner, g: &QpState) -> QpReport {
    let machine = &g.machine;
    // `held_since` belongs to the open connection, and is set only while a Send waits.
    let held_since = g.link.open().map(|open| open.held_since);
    let held_ns = held_since
        .filter(|since| *since != 0 && machine.rx_interest() == RxInterest::Held)
        .map(|since| now_ns().saturating_sub(since));
    QpReport {
        number: qp.num,
        state: name_of(machine.state()),
        numbered: machine.is_by_number(),
        pd: machine.config().pd,
        sends_outstanding: machine.sends_outstanding(),
        receives_posted: (qp.srq.is_none() && qp.xrc.is_none()).then(|| machine.receives_posted()),
        send_completions: 0,
        recv_completions: 0,
        held_ns,
        held_total_ns: g.held_ns.saturating_add(held_ns.unwrap_or(0)),
        counters: *machine.counters(),
        fault: machine.fault(),
        link: None,
    }
}

const fn name_of(state: State) -> &'static str {
    match state {
        State::Reset => "RESET",
        State::Init => "INIT",
        State::Rtr => "RTR",
        State::Rts => "RTS",
        State::Sqd => "SQD",
        State::Sqe => "SQE",
        State::Error => "ERR",
    }
}

/// Slots of a memory table per step. A step takes a few dozen microseconds.
const SLOTS: usize = 4096;

/// Sums up the registered memory in steps of [`SLOTS`] slots.
pub(crate) struct MemoryWalk {
    rest: Vec<Weak<ContextInner>>,
    /// Next slot of the last table.
    slot: usize,
    octets: BTreeMap<String, u64>,
}

impl MemoryWalk {
    pub(crate) fn new() -> Self {
        Self {
            rest: stats::opened().iter().map(Arc::downgrade).collect(),
            slot: 0,
            octets: BTreeMap::new(),
        }
    }

    /// Processes the next slots. Returns `false` at the end.
    pub(crate) fn step(&mut self) -> bool {
        let Some(ctx) = self.rest.last() else {
            return false;
        };
        let part = ctx.upgrade().and_then(|ctx| {
            let octets = memory(&ctx)?.bytes_in(self.slot..self.slot + SLOTS)?;
            Some((ctx, octets))
        });
        match part {
            Some((ctx, octets)) => {
                let sum = self.octets.entry(ctx.device.name.clone()).or_default();
                *sum = sum.saturating_add(octets);
                self.slot += SLOTS;
            }
            None => {
                self.rest.pop();
                self.slot = 0;
            }
        }
        true
    }
}

fn memory(ctx: &ContextInner) -> Option<ReadGuard<'_, MemoryTable>> {
    if ctx.is_ours() {
        Some(ctx.memory.read())
    } else {
        ctx.memory.try_read()
    }
}

/// Returns all devices that this process has opened, sorted by name. `walk` must have ended.
pub(crate) fn devices(walk: &MemoryWalk) -> Vec<DeviceReport> {
    let mut all: BTreeMap<String, DeviceReport> = BTreeMap::new();
    let mut add = |name: &str, address, counters: &Counters, open: Option<&ContextInner>| {
        let d = all.entry(name.to_owned()).or_insert_with(|| DeviceReport {
            name: name.to_owned(),
            address,
            opened: 0,
            queue_pairs: 0,
            completion_queues: 0,
            registrations: 0,
            registered_octets: walk.octets.get(name).copied().unwrap_or(0),
            counters: Counters::default(),
        });
        d.counters.add(counters);
        let Some(ctx) = open else { return };
        d.opened += 1;
        d.queue_pairs += ctx.qp_numbers().map_or(0, |numbers| numbers.len());
        d.completion_queues += ctx.completion_queues();
        d.registrations += memory(ctx).map_or(0, |memory| memory.len());
    };
    for closed in stats::closed_devices() {
        add(&closed.name, closed.address, &closed.counters, None);
    }
    for ctx in stats::opened() {
        let counters = ctx.totals().unwrap_or_default();
        add(&ctx.device.name, ctx.device.ip(), &counters, Some(&ctx));
    }
    all.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, ReceiverNotReady};
    use crate::conn::attributes::QpAttributes;
    use crate::conn::qp::QueuePair;
    use crate::device::Device;
    use crate::objects::context::Context;
    use crate::testing;
    use crate::verbs::ProtectionDomain;
    use iwarp_rnic::memory::WindowType;
    use iwarp_rnic::{Access, Cqe, RecvWr};
    use std::io::Write as _;
    use std::time::Instant;

    /// Pending completions are reported. Posted receives are reported only without a shared receive
    /// queue.
    #[test]
    fn pending_completions_are_counted() {
        let ctx = testing::context();
        let [send, recv] = [0; 2].map(|_| ctx.create_cq(4, None).unwrap());
        let own = testing::queue_pair(&ctx, &send, &recv);
        let pd = ctx.allocate_pd();
        let srq = ctx.create_srq(pd, 4, 1).unwrap();
        let shared = ctx.create_qp(&QpAttributes {
            pd,
            send_cq: send.clone(),
            recv_cq: recv.clone(),
            srq: Some(srq.clone()),
            unreliable: false,
            max_send_wr: 1,
            max_recv_wr: 0,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
            signal_all: false,
            max_ird: 0,
            max_ord: 0,
        });
        let shared = shared.unwrap();
        let receive = [RecvWr {
            wr_id: 1,
            sges: &[],
        }];
        srq.post(&receive).unwrap();
        own.modify(State::Init).unwrap();
        own.post_recv(&receive).unwrap();
        let reports = || [&own, &shared].map(|qp| read_qp(&ctx.inner, qp.num()).unwrap());
        assert_eq!(reports().map(|qp| qp.receives_posted), [Some(1), None]);
        own.modify(State::Error).unwrap();
        let [own_now, shared_now] = reports();
        assert_eq!(own_now.receives_posted, Some(0));
        for report in [&own_now, &shared_now] {
            assert_eq!((report.send_completions, report.recv_completions), (0, 1));
        }
        assert_eq!(recv.poll(&mut [Cqe::default()]), Ok(1));
        assert_eq!(reports().map(|qp| qp.recv_completions), [0, 0]);
        own.destroy();
        shared.destroy();
    }

    /// `held_ns` is reported only while a Send waits.
    #[test]
    fn held_time_needs_a_held_send() {
        let ctx = testing::context_with(Config {
            receiver_not_ready: ReceiverNotReady::Hold(Duration::from_secs(3600)),
            ..Config::default()
        });
        let cq = ctx.create_cq(4, None).unwrap();
        let qp = testing::queue_pair(&ctx, &cq, &cq);
        let read_qp = || read_qp(&ctx.inner, qp.num()).unwrap();
        assert_eq!((read_qp().held_ns, read_qp().held_total_ns), (None, 0));
        let mut peer = testing::connected(&qp);
        assert_eq!(read_qp().held_ns, None);
        testing::open(&mut qp.inner.state.lock()).held_since = 1;
        assert_eq!((read_qp().held_ns, read_qp().held_total_ns), (None, 0));
        testing::open(&mut qp.inner.state.lock()).held_since = 0;
        peer.write_all(&testing::EMPTY_SEND).unwrap();
        let start = Instant::now();
        while read_qp().held_ns.is_none() {
            assert!(start.elapsed() < Duration::from_secs(20), "no Send is held");
            std::thread::yield_now();
        }
        assert!(read_qp().held_total_ns > 0);
        // After the end of the wait, its time is only part of the total.
        qp.inner.state.lock().end_hold();
        let sum = read_qp().held_total_ns;
        assert_eq!((read_qp().held_ns, read_qp().held_total_ns), (None, sum));
        qp.destroy();
    }

    #[test]
    fn states_have_verbs_names() {
        for (state, name) in [
            (State::Reset, "RESET"),
            (State::Init, "INIT"),
            (State::Rtr, "RTR"),
            (State::Rts, "RTS"),
            (State::Sqd, "SQD"),
            (State::Sqe, "SQE"),
            (State::Error, "ERR"),
        ] {
            assert_eq!(name_of(state), name);
        }
    }

    #[test]
    fn device_opened_twice_reported_once() {
        const NAME: &str = "device of the report test";
        let device = Device {
            name: NAME.to_owned(),
            ..Device::by_address([127, 0, 0, 1].into()).unwrap()
        };
        let [one, two] = [(); 2].map(|()| Context::open(&device, Config::default()).unwrap());
        let cqs = [&one, &two, &two].map(|ctx| ctx.create_cq(4, None).unwrap());
        let qps = [(&one, 0), (&one, 0), (&two, 1), (&two, 2)]
            .map(|(ctx, cq)| testing::queue_pair(ctx, &cqs[cq], &cqs[cq]));
        for ctx in [&one, &one, &one, &two, &two] {
            ctx.allocate_window(WindowType::Type1, 1).unwrap();
        }
        let _memory = [(&one, 100), (&two, 1000)].map(|(ctx, len)| {
            let pd = ProtectionDomain::new(ctx);
            pd.reg_mr(len, Access::LOCAL_WRITE).unwrap()
        });
        let mut walk = MemoryWalk::new();
        while walk.step() {}
        let devices = devices(&walk);
        let mut ours = devices.iter().filter(|device| device.name == NAME);
        let report = ours.next().expect("the device is not reported");
        assert!(ours.next().is_none());
        let created = (report.queue_pairs, report.completion_queues);
        assert_eq!((report.opened, created), (2, (4, 3)));
        assert_eq!((report.registrations, report.registered_octets), (7, 1100));
        assert_eq!(report.address, IpAddr::from([127, 0, 0, 1]));
        let mut walks: Vec<_> = qp_walks()
            .into_iter()
            .filter(|walk| walk.device() == NAME)
            .collect();
        assert_eq!(walks.len(), 2);
        let reported = walks.iter_mut().flat_map(|walk| {
            std::iter::from_fn(|| walk.next()).map(|qp| qp.expect("not destroyed").number)
        });
        let mut reported: Vec<_> = reported.collect();
        let mut created = qps.each_ref().map(QueuePair::num);
        reported.sort_unstable();
        created.sort_unstable();
        assert_eq!(reported, created);
        for qp in qps {
            qp.destroy();
        }
    }
}
