//! Moves bytes between a queue pair and its socket: [`tx()`] writes, [`rx()`] reads. Only the
//! thread that holds the baton of the direction calls them.

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

/// Handles a broken stream: fails the queue pair, unless the end of the stream is hidden from it.
pub(crate) fn handle_broken(
    qp: &Arc<QpInner>,
    g: &mut MutexGuard<'_, QpState>,
    effects: &mut Effects,
) {
    if g.link.is_none() {
        return;
    }
    if g.machine.hides_end() {
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

/// Handles a report of the engine that the stream has an error or is closed in both directions.
/// Usually a read then returns the reason. But while a Send is held, or a fault stalls the stream,
/// nothing is read, and the engine would repeat its report forever. The report may be about an
/// earlier stream of the queue pair.
pub(crate) fn handle_hang_up(qp: &Arc<QpInner>) {
    let mut effects = Effects::default();
    let mut g = qp.state.lock();
    let held = g.machine.rx_interest() == RxInterest::Held;
    let unread = held || !qp.passes(StreamDirection::In);
    let socket = g.link.socket();
    if unread && socket.is_some_and(|socket| socket.stream.is_hung_up()) {
        if held && g.machine.hides_end() {
            peer_gone::hide_end_behind_held(&mut g, &mut effects);
        } else {
            handle_broken(qp, &mut g, &mut effects);
        }
        qp.collect_effects(&mut g, &mut effects);
    }
    drop(g);
    effects.apply(qp);
}
