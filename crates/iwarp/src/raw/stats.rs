//! Counters on standard error when the process ends, for programs that cannot ask for them (`IWARP_STATS=1`).

use super::context::{Context, ContextInner};
use crate::sys::exit;
use iwarp_rnic::counters::Counters;
use parking_lot::Mutex;
use std::sync::{Arc, Once, Weak};

static OPENED: Mutex<Vec<Weak<ContextInner>>> = Mutex::new(Vec::new());
/// Totals of devices that were closed before the end.
static CLOSED: Mutex<Vec<(String, Counters)>> = Mutex::new(Vec::new());

/// A device was opened whose counters are wanted.
pub(super) fn watch(ctx: &Arc<ContextInner>) {
    static ONCE: Once = Once::new();
    let mut opened = OPENED.lock();
    opened.retain(|c| c.strong_count() > 0);
    opened.push(Arc::downgrade(ctx));
    ONCE.call_once(|| exit::at_exit(print));
}

/// Such a device is closed.
pub(super) fn closed(device: &str, counters: Counters) {
    CLOSED.lock().push((device.to_owned(), counters));
}

fn print() {
    let opened: Vec<_> = OPENED.lock().iter().filter_map(Weak::upgrade).collect();
    let mut totals: Vec<(String, Counters)> = std::mem::take(&mut *CLOSED.lock());
    totals.extend(opened.into_iter().map(|inner| {
        let ctx = Context { inner };
        (ctx.device().name.clone(), ctx.counters())
    }));
    let process = std::process::id();
    for (device, c) in totals {
        crate::complain::stderr(&format!(
            "iwarp: process {process}, {device}: sent {} octets in {} FPDUs ({} messages), received {} octets in {} FPDUs \
             ({} messages, {} payload octets placed directly), {} requests served, {} completions, {} receiver-not-ready, \
             {} CRC errors, {} marker errors, Terminates {} sent and {} received\n",
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
