//! The devices that this process has opened, and their counters. `iwarp stat` reads them while the
//! process runs. With `IWARP_STATS=1`, they are printed on standard error when it ends.

use super::context::ContextInner;
use crate::sys::exit::AtExit;
use crate::sys::process_lock::ProcessLock;
use iwarp_rnic::counters::Counters;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Weak};

static OPENED: ProcessLock<Vec<Weak<ContextInner>>> =
    ProcessLock::new("objects::stats::OPENED", Vec::new());
/// Totals of closed devices; one entry per name, address and `print` flag.
static CLOSED: ProcessLock<Vec<Closed>> = ProcessLock::new("objects::stats::CLOSED", Vec::new());

/// Totals of a closed device, summed over all contexts that had it open.
#[derive(Clone)]
pub(crate) struct Closed {
    pub(crate) name: String,
    pub(crate) address: IpAddr,
    pub(crate) counters: Counters,
    print: bool,
}

pub(crate) fn register(ctx: &Arc<ContextInner>) {
    static PRINT: AtExit = AtExit::new(print);
    let mut opened = OPENED.lock();
    opened.retain(|c| c.strong_count() > 0);
    opened.push(Arc::downgrade(ctx));
    if ctx.config.stats {
        PRINT.plan();
    }
}

/// Adds the counters of a device that is being closed to the totals.
pub(crate) fn closed(ctx: &ContextInner, counters: &Counters) {
    let (device, print) = (&ctx.device, ctx.config.stats);
    let mut all = CLOSED.lock();
    let existing = all
        .iter_mut()
        .find(|c| c.name == device.name && c.address == device.ip() && c.print == print);
    match existing {
        Some(existing) => existing.counters.add(counters),
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
    let pid = std::process::id();
    for (device, c) in totals {
        crate::complain::stderr(&format!(
            "iwarp: process {pid}, {device}: sent {} octets in {} FPDUs ({} messages), \
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

    #[test]
    fn closed_devices_are_summed_by_name() {
        let loopback = Device::by_address([127, 0, 0, 1].into()).unwrap();
        let names = ["test of sums by name, 1", "test of sums by name, 2"];
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
    fn closed_device_is_removed_from_list() {
        let open = || crate::testing::context().inner;
        let first = open();
        let is_listed =
            |device: &Weak<ContextInner>| OPENED.lock().iter().any(|d| d.ptr_eq(device));
        let weak = Arc::downgrade(&first);
        let second = open();
        assert!(is_listed(&weak));
        assert!(opened().iter().any(|device| Arc::ptr_eq(device, &first)));
        drop(first);
        // Opening a device removes dead entries.
        let third = open();
        assert!(!is_listed(&weak));
        assert!(is_listed(&Arc::downgrade(&second)) && is_listed(&Arc::downgrade(&third)));
    }

    #[test]
    fn closed_devices_are_summed_by_address() {
        const NAME: &str = "test of sums by address";
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
