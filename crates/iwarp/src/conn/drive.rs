//! Moves bytes between a queue pair and its socket: [`tx()`] writes, [`rx()`] reads. The holder of
//! the direction's baton runs it.

mod rx;
mod tx;

pub(crate) use rx::rx;
pub(crate) use tx::{take_unsent_tail, tx};

use super::effects::{DriveHost, Effects};
use super::linger::StreamEnd;
use super::qp::{QpInner, QpState};
use crate::conn::peer_gone;
use crate::objects::hooks::StreamDirection;
use iwarp_rnic::qp::RxInterest;
use parking_lot::MutexGuard;
use std::sync::Arc;

/// Handles a broken stream. Data that the peer sent before may still be readable, such as a
/// Terminate that says why.
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

pub(crate) fn fail(qp: &Arc<QpInner>, g: &mut MutexGuard<'_, QpState>, effects: &mut Effects) {
    if g.link.is_none() {
        return;
    }
    if g.machine.is_by_number() {
        g.machine.blame_absent_peer();
    }
    g.machine.stream_failed(&mut DriveHost::new(qp, effects));
    qp.end_link(g, effects, StreamEnd::Close);
}

/// Handles an error of the stream, or its closing in both directions. Normally a read finds out
/// which it is. But a held stream is not read, and the engine would report it forever. The report
/// may be stale: the queue pair may have been reset and have its next stream.
pub(crate) fn hung_up(qp: &Arc<QpInner>) {
    let mut effects = Effects::default();
    let mut g = qp.state.lock();
    let held = g.machine.rx_interest() == RxInterest::Held;
    let unread = held || !qp.passes(StreamDirection::In);
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
