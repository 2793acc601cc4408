//! Writing: the state machine fills plans, and the socket takes the octets from where they lie.
//!
//! Invariant of the `unsafe`: the runs of a plan name bytes of the plan's scratch or of registered
//! memory. Registered memory stays valid because the memory table is locked for reading from before
//! the runs are made until the system call has returned.

use super::super::effects::{DriveHost, Due, Effects};
use super::super::held_receives;
use super::super::link::Socket;
use super::super::liveness;
use super::super::pool;
use super::super::qp::{QpInner, QpState};
use super::broken;
use crate::conn::peer_gone;
use crate::crc::crc32c;
use crate::objects::hooks::StreamDirection;
use crate::sys::guarded::MemoryTable;
use crate::sys::raw_slice::RawSlice;
use iwarp_rnic::qp::{Env, RunKind, TxFill, TxPlan};
use parking_lot::{MutexGuard, RwLockReadGuard};
use std::io::{self, ErrorKind};
use std::sync::Arc;

/// Writes until nothing is pending or the socket is full.
pub(crate) fn tx(qp: &Arc<QpInner>) {
    let mut effects = Effects::default();
    let mut g = qp.state.lock();
    if g.link.is_none() {
        return;
    }
    if g.link.takes_nothing() {
        peer_gone::start_request_timer(&mut g);
        return;
    }
    let _ = g.cork.send();
    if is_due(&g) {
        // An injected fault may hold the data back.
        if qp.passes(StreamDirection::Out) {
            g = write_all(qp, g, &mut effects);
            liveness::watch(qp, &mut g);
        }
    }
    qp.collect_effects(&mut g, &mut effects);
    drop(g);
    effects.apply(qp);
}

fn is_due(g: &QpState) -> bool {
    g.link
        .open()
        .is_some_and(|open| g.machine.wants_tx() || open.stalled.is_some())
}

fn write_all<'a>(
    qp: &'a Arc<QpInner>,
    mut g: MutexGuard<'a, QpState>,
    effects: &mut Effects,
) -> MutexGuard<'a, QpState> {
    loop {
        let Some(socket) = g.link.socket().cloned() else {
            break;
        };
        let memory = qp.ctx.memory.read();
        let stalled = g.link.open_mut().and_then(|open| open.stalled.take());
        let begins = stalled.is_none();
        let plan = match stalled {
            Some(plan) => plan,
            None => match fill(qp, &mut g, &socket, &memory, effects) {
                Filled::Ready(plan) => plan,
                Filled::Nothing => break,
                Filled::More => {
                    drop(memory);
                    MutexGuard::bump(&mut g);
                    continue;
                }
                Filled::Memory => {
                    drop(memory);
                    let mut memory = qp.ctx.memory.write();
                    g.machine
                        .tx_memory(&mut memory, &mut DriveHost::new(qp, effects));
                    continue;
                }
            },
        };
        let more;
        (g, more) = write(qp, g, &socket, memory, (plan, begins), effects);
        if !more || !is_due(&g) {
            break;
        }
    }
    g
}

enum Filled {
    Ready(Box<TxPlan>),
    Nothing,
    /// The state machine has done its share of work. Other threads may lock the queue pair in
    /// between.
    More,
    /// The next request changes the memory table.
    Memory,
}

/// Has the state machine fill a plan with what is to be written next.
#[inline]
fn fill(
    qp: &Arc<QpInner>,
    g: &mut QpState,
    socket: &Socket,
    memory: &MemoryTable,
    effects: &mut Effects,
) -> Filled {
    let Ok(mut plan) = pool::take_tx() else {
        g.machine.abort(&mut DriveHost::new(qp, effects));
        return Filled::Nothing;
    };
    if wants_mss(g) {
        follow_mss(qp, g, socket);
    }
    if let Some(open) = g.link.open_mut() {
        open.fault_checks.count();
    }
    let filled = {
        let mut env = Env {
            memory,
            crc32c: crc32c(),
            host: &mut DriveHost::new(qp, effects),
        };
        g.machine.tx_fill(&mut plan, &mut env)
    };
    let filled = match filled {
        TxFill::Ready => return Filled::Ready(plan),
        TxFill::Idle => {
            effects.note_if(Due::MEMORY_UNUSED, memory.take_unused());
            Filled::Nothing
        }
        TxFill::More => Filled::More,
        TxFill::Memory => Filled::Memory,
    };
    pool::give_tx(plan);
    filled
}

/// Takes what a queue pair that ends in error has left to send: the rest of a plan that the socket
/// took in part, and the Terminate after it. The state machine counts all of it as written. Returns
/// `None` if it cannot be copied; the stream is then cut.
pub(crate) fn take_unsent_tail(
    qp: &Arc<QpInner>,
    g: &mut QpState,
    effects: &mut Effects,
) -> Option<Vec<u8>> {
    let socket = g.link.socket().cloned()?;
    let memory = qp.ctx.memory.read();
    let mut tail = Vec::new();
    if let Some(plan) = g.link.open_mut().and_then(|open| open.stalled.take()) {
        take_plan(qp, g, plan, &memory, &mut tail, effects)?;
    }
    if g.machine.owes_terminate()
        && let Filled::Ready(plan) = fill(qp, g, &socket, &memory, effects)
    {
        take_plan(qp, g, plan, &memory, &mut tail, effects)?;
    }
    Some(tail)
}

/// Appends the unwritten octets of a plan to `tail`.
fn take_plan(
    qp: &Arc<QpInner>,
    g: &mut QpState,
    mut plan: Box<TxPlan>,
    memory: &MemoryTable,
    tail: &mut Vec<u8>,
    effects: &mut Effects,
) -> Option<()> {
    let remaining = plan.remaining();
    tail.try_reserve_exact(remaining).ok()?;
    let mut mapped = true;
    let resolved = plan.all_runs(memory, g.machine.accessor(), |run| {
        let octets = RawSlice::of_fragment(&run.fragment);
        mapped &= match run.kind {
            RunKind::Scratch => {
                // SAFETY: the scratch is a part of `plan`, which is ours.
                unsafe { octets.append_to(tail, octets.len()) };
                true
            }
            // If the program has unmapped registered memory, the copy fails instead of ending the
            // process.
            // SAFETY: the module's invariant; `memory` is locked.
            RunKind::Memory => unsafe { octets.append_if_mapped(tail) },
        };
    });
    plan.release(memory);
    effects.note_if(Due::MEMORY_UNUSED, memory.take_unused());
    let taken = resolved.is_ok() && mapped;
    if taken {
        let mut host = DriveHost::new(qp, effects);
        g.machine.tx_written(&mut plan, remaining, &mut host);
    }
    pool::give_tx(plan);
    taken.then_some(())
}

/// Writes a plan to the socket, and accounts for what it took. Returns `false` if nothing more can
/// be written now. `begins`: nothing of the plan was written before.
#[inline]
fn write<'a>(
    qp: &'a Arc<QpInner>,
    mut g: MutexGuard<'a, QpState>,
    socket: &Arc<Socket>,
    memory: RwLockReadGuard<'_, MemoryTable>,
    (mut plan, begins): (Box<TxPlan>, bool),
    effects: &mut Effects,
) -> (MutexGuard<'a, QpState>, bool) {
    let mut runs = pool::take_runs();
    let who = g.machine.accessor();
    let resolved = plan.runs(&memory, who, pool::TX_RUNS, |run| {
        runs.push(RawSlice::of_fragment(&run.fragment));
    });
    if resolved.is_err() {
        drop(memory);
        pool::give_runs(runs);
        pool::give_tx(plan);
        // The program has deregistered memory that a request was sending from, so the stream cannot
        // go on.
        g.machine.leave(&mut DriveHost::new(qp, effects));
        return (g, false);
    }
    // The runs refer to this copy, so it must live until the system call has returned.
    let mut _spoilt = None;
    if let Some(faults) = &qp.faults {
        faults.limit(StreamDirection::Out, &mut runs);
        if begins {
            // SAFETY: the module's invariant; `plan` is ours and `memory` is locked.
            _spoilt = unsafe { faults.spoil_copy(&mut runs) };
        }
    }
    qp.held_receives.begin();
    drop(g);
    // If the list of runs was cut short, the next call continues in the same segment.
    let end =
        plan.ends_segment() && runs.iter().map(RawSlice::len).sum::<usize>() == plan.together();
    // SAFETY: the module's invariant; `plan` is ours and `memory` is locked.
    let result = unsafe { socket.stream.send_vectored_raw(&runs, end, false) };
    if let (Some(flow), Ok(n)) = (&socket.flow, &result) {
        // SAFETY: as above; the recorder only reads.
        unsafe { flow.sent_raw(&runs, *n) };
    }
    plan.release(&memory);
    effects.note_if(Due::MEMORY_UNUSED, memory.take_unused());
    // Before `state` is locked: its holder may be waiting for the memory table.
    drop(memory);
    pool::give_runs(runs);
    let mut g = qp.state.lock();
    let linked = g.is_linked(socket);
    if let (Ok(n), true) = (&result, linked) {
        qp.bytes_transferred.add(*n);
        g.machine
            .tx_written(&mut plan, *n, &mut DriveHost::new(qp, effects));
    }
    held_receives::deliver(qp, effects);
    let stops = qp.faults.is_some() && faulty_end(qp, &result, effects);
    // If the connection has ended meanwhile, the rest of the plan must not be sent on the next one.
    if !linked || (result.is_ok() && plan.is_empty()) {
        pool::give_tx(plan);
        return (g, linked && !stops);
    }
    let more = written(qp, &mut g, plan, result, effects);
    (g, more && !stops)
}

/// Tells the injected faults what was sent. Returns `true` if one of them stops the sending.
#[cold]
fn faulty_end(qp: &QpInner, result: &io::Result<usize>, effects: &mut Effects) -> bool {
    let (Some(faults), Ok(n)) = (&qp.faults, result) else {
        return false;
    };
    faults.passed_octets(StreamDirection::Out, *n);
    let due = faults.is_due();
    effects.note_if(Due::FAULT, due);
    due || faults.holds(StreamDirection::Out)
}

/// Handles a socket that took a part of a plan or nothing, or that is broken. Returns `false` if
/// nothing more can be written now.
fn written(
    qp: &Arc<QpInner>,
    g: &mut MutexGuard<'_, QpState>,
    mut plan: Box<TxPlan>,
    result: io::Result<usize>,
    effects: &mut Effects,
) -> bool {
    let error = match result {
        Ok(_) => {
            keep_plan(g, plan);
            return true;
        }
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            keep_plan(g, plan);
            return false;
        }
        Err(error) => error,
    };
    tracing::debug!(qp = qp.num, %error, "send failed");
    if error.raw_os_error() == Some(libc::EFAULT) {
        // The program has unmapped registered memory. A Terminate may have to be sent.
        g.machine
            .tx_unreadable(&mut plan, &mut DriveHost::new(qp, effects));
        match plan.is_empty() {
            true => pool::give_tx(plan),
            false => keep_plan(g, plan),
        }
        return true;
    }
    pool::give_tx(plan);
    if g.machine.is_by_number() || g.machine.hides_end() {
        // Data that the peer sent before it was gone may still be readable.
        g.link.cannot_write();
    } else {
        broken(qp, g, effects);
    }
    false
}

/// Keeps a plan that the socket took in part, for the time when it takes more.
fn keep_plan(g: &mut QpState, plan: Box<TxPlan>) {
    match g.link.open_mut() {
        Some(open) => open.stalled = Some(plan),
        None => pool::give_tx(plan),
    }
}

/// Plans of large messages between two reads of the MSS, where FPDUs need not be aligned with
/// segments.
const MSS_PLANS: u8 = 16;

/// Returns `true` if the MSS should be read. With FPDUs aligned to segments, it must be right in
/// every plan.
fn wants_mss(g: &mut QpState) -> bool {
    if g.machine.alignment().is_some() {
        return true;
    }
    if !g.machine.is_segmenting() {
        return false;
    }
    g.link.open_mut().is_some_and(|open| {
        open.mss_age = open.mss_age.wrapping_add(1) % MSS_PLANS;
        open.mss_age == 1
    })
}

/// Adapts FPDUs to the MSS, which changes with the path and with the peer's window.
fn follow_mss(qp: &QpInner, g: &mut QpState, socket: &Socket) {
    let Ok(mss) = socket.stream.mss() else { return };
    match g.machine.alignment() {
        Some(now) if now == mss => {}
        Some(_) => {
            tracing::debug!(qp = qp.num, mss, "the segment size has changed");
            g.machine.set_emss(qp.emss(mss));
            g.machine.align(mss);
        }
        None => g.machine.set_emss(qp.emss(mss)),
    }
}

#[cfg(test)]
#[path = "tx_tests.rs"]
mod tests;
