//! Moving octets between a queue pair and its socket: [`tx()`] writes, [`rx()`] reads. Each is run
//! by the holder of its direction's baton.

mod rx;
mod tx;

pub(crate) use rx::rx;
pub(crate) use tx::{take_unsent_tail, tx};

use super::effects::{DriveHost, Effects};
use super::linger::StreamEnd;
use super::qp::{QpInner, QpState};
use crate::conn::peer_gone;
use crate::objects::hooks::Way;
use iwarp_rnic::qp::RxInterest;
use parking_lot::MutexGuard;
use std::sync::Arc;

/// The stream is broken. Octets that the peer sent before may still be there: a Terminate tells
/// why.
pub(crate) fn broken(qp: &Arc<QpInner>, g: &mut MutexGuard<'_, QpState>, effects: &mut Effects) {
    if g.link.is_none() {
        return;
    }
    if g.machine.hides_end() {
        // The program knows of no stream that could break, only of a peer that does not answer.
        peer_gone::hide_end(qp, g, effects);
        return;
    }
    fail(qp, g, effects);
}

/// The stream fails, and the queue pair with it.
pub(crate) fn fail(qp: &Arc<QpInner>, g: &mut MutexGuard<'_, QpState>, effects: &mut Effects) {
    if g.link.is_none() {
        return;
    }
    if g.machine.is_connectionless() {
        g.machine.blame_absent_peer();
    }
    g.machine.stream_failed(&mut DriveHost::new(qp, effects));
    qp.end_link(g, effects, StreamEnd::Close);
}

/// The stream has an error or is closed in both directions. Reading tells what it is, but a held
/// stream is not read, and would be reported for ever. The report may come late, when the queue
/// pair has been reset and has another stream already.
pub(crate) fn hung_up(qp: &Arc<QpInner>) {
    let mut effects = Effects::default();
    let mut g = qp.state.lock();
    let held = g.machine.rx_interest() == RxInterest::Held;
    let unread = held || !qp.passes(Way::In);
    if unread && g.link.socket().is_some_and(|l| l.stream.is_hung_up()) {
        if held && g.machine.hides_end() {
            peer_gone::hide_end_behind_held(&mut g, &mut effects);
        } else {
            broken(qp, &mut g, &mut effects);
        }
        qp.collect_effects(&mut g, &mut effects);
    }
    drop(g);
    effects.apply(qp);
}
