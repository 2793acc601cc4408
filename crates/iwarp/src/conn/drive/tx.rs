//! Writing: plans are filled by the state machine, and their octets handed to the socket where they lie.
//!
//! Invariant of the `unsafe`: the runs of a plan name octets of the plan's scratch or of registered memory. The last stay valid
//! because the memory table is locked for reading from the moment the runs are made until the system call has returned.

use super::super::effects::{DriveHost, Due, Effects};
use super::super::held_receives;
use super::super::link::Socket;
use super::super::liveness;
use super::super::pool;
use super::super::qp::{QpInner, QpState};
use super::broken;
use crate::conn::peer_gone;
use crate::crc::crc32c;
use crate::objects::hooks::Way;
use crate::sys::guarded::MemoryTable;
use crate::sys::raw_slice::RawSlice;
use iwarp_rnic::qp::{Env, RunKind, TxFill, TxPlan};
use parking_lot::{MutexGuard, RwLockReadGuard};
use std::io::{self, ErrorKind};
use std::sync::Arc;

/// Writes until nothing is due or the socket is full.
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
        // A fault may hold it back.
        if qp.passes(Way::Out) {
            g = turns(qp, g, &mut effects);
            liveness::watch(qp, &mut g);
        }
    }
    qp.collect_effects(&mut g, &mut effects);
    drop(g);
    effects.apply(qp);
}

/// Returns `true` if there is something to write on a connection.
fn is_due(g: &QpState) -> bool {
    g.link
        .open()
        .is_some_and(|open| g.machine.wants_tx() || open.stalled.is_some())
}

/// Writes one plan after the other.
fn turns<'a>(
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

/// What [`fill`] has come to.
enum Filled {
    /// A plan to be written.
    Ready(Box<TxPlan>),
    /// Nothing is to be written.
    Nothing,
    /// The state machine has done its share, and other threads may have the queue pair.
    More,
    /// The next request changes the memory table.
    Memory,
}

/// Asks the state machine for what is to be written next.
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
        open.looks.count();
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

/// Takes what is left to send when the queue pair ends in error: the rest of a plan that the socket took in part, and the Terminate behind it. For the
/// state machine all of it is written. Returns `None` if it cannot be copied; then the stream is cut where it is.
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

/// Appends the unwritten octets of a plan to `rest`.
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
            // A program that unmaps registered memory breaks its promise, but while its octets are sent that does not end the process.
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

/// Hands a plan to the socket, and accounts for what it took. Returns `false` if nothing more can be written now. `begins`: nothing of the
/// plan was written before.
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
        // The program deregistered memory that a request was sending from: the stream cannot go on.
        g.machine.leave(&mut DriveHost::new(qp, effects));
        return (g, false);
    }
    // Kept until the system call has returned.
    let mut _spoilt = None;
    if let Some(faults) = &qp.faults {
        faults.limit(Way::Out, &mut runs);
        if begins {
            // SAFETY: the module's invariant; `plan` is ours and `memory` is locked.
            _spoilt = unsafe { faults.spoil_copy(&mut runs) };
        }
    }
    qp.held_receives.begin();
    drop(g);
    // A part that was cut short by the number of runs is continued in the same segment.
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
    // Done first: the thread that holds the state may be waiting for the memory table.
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
    // If the connection has ended meanwhile, the rest of its plan must not be sent on the next one.
    if !linked || (result.is_ok() && plan.is_empty()) {
        pool::give_tx(plan);
        return (g, linked && !stops);
    }
    let more = written(qp, &mut g, plan, result, effects);
    (g, more && !stops)
}

/// Counts what was sent for the faults. Returns `true` if one of them stops the sending.
#[cold]
fn faulty_end(qp: &QpInner, result: &io::Result<usize>, effects: &mut Effects) -> bool {
    let (Some(faults), Ok(n)) = (&qp.faults, result) else {
        return false;
    };
    faults.passed_octets(Way::Out, *n);
    let due = faults.is_due();
    effects.note_if(Due::FAULT, due);
    due || faults.holds(Way::Out)
}

/// The socket took a part of a plan, nothing of it, or is broken. Returns `false` if nothing more can be written now.
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
        // Registered memory that the program has unmapped. There may be a Terminate to send.
        g.machine
            .tx_unreadable(&mut plan, &mut DriveHost::new(qp, effects));
        match plan.is_empty() {
            true => pool::give_tx(plan),
            false => keep_plan(g, plan),
        }
        return true;
    }
    pool::give_tx(plan);
    if g.machine.is_connectionless() || g.machine.hides_end() {
        // What the peer sent before it left may still be there.
        g.link.cannot_write();
    } else {
        broken(qp, g, effects);
    }
    false
}

/// Keeps a plan that the socket took in part, until it takes more.
fn keep_plan(g: &mut QpState, plan: Box<TxPlan>) {
    match g.link.open_mut() {
        Some(open) => open.stalled = Some(plan),
        None => pool::give_tx(plan),
    }
}

/// Plans of large messages between two looks at the size of segments, where FPDUs need not begin with them.
const MSS_PLANS: u8 = 16;

/// Returns `true` if the size of segments should be looked at. For FPDUs aligned with segments it has to be right in every plan.
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

/// Segments become smaller or larger when the path changes, or the peer's window opens, and FPDUs with them.
fn follow_mss(qp: &QpInner, g: &mut QpState, socket: &Socket) {
    let Ok(mss) = socket.stream.mss() else { return };
    match g.machine.alignment() {
        Some(now) if now == mss => {}
        Some(_) => {
            tracing::debug!(qp = qp.num, mss, "the path has changed");
            g.machine.set_emss(qp.emss(mss));
            g.machine.align(mss);
        }
        None => g.machine.set_emss(qp.emss(mss)),
    }
}

#[cfg(test)]
#[path = "tx_tests.rs"]
mod tests;
