//! The devices that this process has opened, and their counters: for `iwarp stat` while the process
//! runs, and on standard error when it ends (`IWARP_STATS=1`).

use super::context::ContextInner;
use crate::sys::exit::AtExit;
use crate::sys::process_lock::ProcessLock;
use iwarp_rnic::counters::Counters;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Weak};

static OPENED: ProcessLock<Vec<Weak<ContextInner>>> =
    ProcessLock::new("objects::stats::OPENED", Vec::new());
/// Totals of closed devices, by name, by address, and by whether to print them.
static CLOSED: ProcessLock<Vec<Closed>> = ProcessLock::new("objects::stats::CLOSED", Vec::new());

/// Totals of a device that was closed, over all times that it was open.
#[derive(Clone)]
pub(crate) struct Closed {
    pub(crate) name: String,
    pub(crate) address: IpAddr,
    pub(crate) counters: Counters,
    print: bool,
}

pub(crate) fn watch(ctx: &Arc<ContextInner>) {
    static PRINT: AtExit = AtExit::new(print);
    let mut opened = OPENED.lock();
    opened.retain(|c| c.strong_count() > 0);
    opened.push(Arc::downgrade(ctx));
    if ctx.config.stats {
        PRINT.plan();
    }
}

/// Adds the counters of a device that is being closed.
pub(crate) fn closed(ctx: &ContextInner, counters: &Counters) {
    let (device, print) = (&ctx.device, ctx.config.stats);
    let mut all = CLOSED.lock();
    let known = all
        .iter_mut()
        .find(|c| c.name == device.name && c.address == device.ip() && c.print == print);
    match known {
        Some(known) => known.counters.add(counters),
        None => all.push(Closed {
            name: device.name.clone(),
            address: device.ip(),
            counters: *counters,
            print,
        }),
    }
}

pub(crate) fn opened() -> Vec<Arc<ContextInner>> {
    OPENED.lock().iter().filter_map(Weak::upgrade).collect()
}

pub(crate) fn closed_devices() -> Vec<Closed> {
    CLOSED.lock().clone()
}

fn print() {
    let mut totals: BTreeMap<String, Counters> = BTreeMap::new();
    let mut add = |name: &str, counters: &Counters| {
        totals.entry(name.to_owned()).or_default().add(counters);
    };
    for closed in closed_devices().iter().filter(|closed| closed.print) {
        add(&closed.name, &closed.counters);
    }
    for ctx in opened().iter().filter(|ctx| ctx.config.stats) {
        add(&ctx.device.name, &ctx.totals().unwrap_or_default());
    }
    let process = std::process::id();
    for (device, c) in totals {
        crate::complain::stderr(&format!(
            "iwarp: process {process}, {device}: sent {} octets in {} FPDUs ({} messages), \
             received {} octets in {} FPDUs ({} messages, {} payload octets placed directly), \
             {} requests served, {} completions, {} receiver-not-ready, {} CRC errors, \
             {} marker errors, Terminates {} sent and {} received\n",
            c.tx_bytes,
            c.tx_fpdus,
            c.tx_messages,
            c.rx_bytes,
            c.rx_fpdus,
            c.rx_messages,
            c.rx_direct,
            c.rx_requests,
            c.completions,
            c.receiver_not_ready,
            c.crc_errors,
            c.marker_errors,
            c.terminates_sent,
            c.terminates_received,
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::device::Device;
    use crate::objects::context::Context;

    /// Devices with the same address are distinguished by their names.
    #[test]
    fn closed_devices_are_summed_by_name() {
        let loopback = Device::by_address([127, 0, 0, 1].into()).unwrap();
        let names = ["of the test, first", "of the test, second"];
        let devices = names.map(|name| {
            let mut device = loopback.clone();
            name.clone_into(&mut device.name);
            Context::open(&device, Config::default()).unwrap()
        });
        for _ in 0..2 {
            for (ctx, n) in devices.iter().zip([1, 10]) {
                let mut counters = Counters::default();
                counters.rx_messages = n;
                closed(&ctx.inner, &counters);
            }
        }
        let sums = names.map(|name| {
            let all = closed_devices();
            let ours = all.iter().filter(|closed| closed.name == name);
            let sums: Vec<_> = ours.map(|c| c.counters.rx_messages).collect();
            sums
        });
        assert_eq!(sums, [[2], [20]]);
    }

    #[test]
    fn closed_devices_leave_the_list() {
        let open = || crate::testing::context().inner;
        let first = open();
        let listed = |device: &Weak<ContextInner>| OPENED.lock().iter().any(|d| d.ptr_eq(device));
        let weak = Arc::downgrade(&first);
        let second = open();
        assert!(listed(&weak));
        assert!(opened().iter().any(|device| Arc::ptr_eq(device, &first)));
        drop(first);
        let third = open();
        assert!(!listed(&weak));
        assert!(listed(&Arc::downgrade(&second)) && listed(&Arc::downgrade(&third)));
    }

    #[test]
    fn closed_devices_are_summed_by_address() {
        const NAME: &str = "of the test of sums";
        let addresses = ["127.0.0.1", "127.0.0.2"];
        for _ in 0..2 {
            for (n, address) in (1..).zip(addresses) {
                let mut device = crate::testing::device_at(&[address]);
                NAME.clone_into(&mut device.name);
                let ctx = Context::open(&device, Config::default()).unwrap();
                let mut counters = Counters::default();
                counters.rx_messages = n;
                closed(&ctx.inner, &counters);
            }
        }
        let sums = addresses.map(|address| {
            let address: IpAddr = address.parse().unwrap();
            let all = closed_devices();
            let ours = all
                .iter()
                .filter(|c| c.name == NAME && c.address == address);
            let sums: Vec<_> = ours.map(|c| c.counters.rx_messages).collect();
            sums
        });
        assert_eq!(sums, [[2], [4]]);
    }
}
