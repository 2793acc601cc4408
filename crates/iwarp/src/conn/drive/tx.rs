//! Writing: the state machine fills plans, and the socket takes the octets directly from the
//! memory to which a plan refers.
//!
//! Invariant of the `unsafe` code: the runs of a plan refer to bytes of the plan's scratch or to
//! registered memory. Registered memory stays valid, because the thread holds the memory table's
//! read lock from before the runs are built until the system call has returned.

use super::super::effects::{DriveHost, Due, Effects};
use super::super::held_receives;
use super::super::link::Socket;
use super::super::liveness;
use super::super::pool;
use super::super::qp::{QpInner, QpState};
use super::handle_broken;
use crate::conn::peer_gone;
use crate::crc::crc32c;
use crate::objects::hooks::StreamDirection;
use crate::sys::guarded::MemoryTable;
use crate::sys::raw_slice::RawSlice;
use crate::sys::sharded_lock::ReadGuard;
use iwarp_rnic::qp::{Env, RunKind, TxFill, TxPlan};
use parking_lot::MutexGuard;
use std::io::{self, ErrorKind};
use std::sync::Arc;

/// Writes until no data is pending, or the socket is full.
pub(crate) fn tx(qp: &Arc<QpInner>) {
    let mut effects = Effects::default();
    let mut g = qp.state.lock();
    if g.link.is_none() {
        return;
    }
    if g.link.is_peer_gone() {
        peer_gone::start_request_timer(&mut g);
        return;
    }
    let _ = g.cork.send();
    if is_due(&g) {
        // An injected fault may stall this direction.
        if qp.passes(StreamDirection::Out) {
            g = write_all(qp, g, &mut effects);
            liveness::watch(qp, &mut g);
        }
    }
    qp.collect_effects(&mut g, &mut effects);
    drop(g);
    effects.apply(qp);
}

/// Returns `true` if there is data to write.
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
        let is_new = stalled.is_none();
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
        (g, more) = write(qp, g, &socket, memory, (plan, is_new), effects);
        if !more || !is_due(&g) {
            break;
        }
    }
    g
}

enum Filled {
    Ready(Box<TxPlan>),
    Nothing,
    /// The state machine has more work, but other threads may lock the queue pair first.
    More,
    /// The next request changes the memory table, which must be locked for writing.
    Memory,
}

/// Has the state machine fill a plan with the data to write next.
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
        update_mss(qp, g, socket);
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
            effects.add_if(Due::MEMORY_UNUSED, memory.take_unused());
            Filled::Nothing
        }
        TxFill::More => Filled::More,
        TxFill::Memory => Filled::Memory,
    };
    pool::give_tx(plan);
    filled
}

/// Copies the unsent data of a queue pair that ends in error: the rest of a plan that the socket
/// has taken in part, and the Terminate that follows it. The state machine then regards all of it
/// as written. Returns `None` if the data cannot be copied; the stream is then cut.
pub(crate) fn take_unsent_tail(
    qp: &Arc<QpInner>,
    g: &mut QpState,
    effects: &mut Effects,
) -> Option<Vec<u8>> {
    let socket = g.link.socket().cloned()?;
    let memory = qp.ctx.memory.read();
    let mut tail = Vec::new();
    if let Some(plan) = g.link.open_mut().and_then(|open| open.stalled.take()) {
        append_plan(qp, g, plan, &memory, &mut tail, effects)?;
    }
    if g.machine.owes_terminate()
        && let Filled::Ready(plan) = fill(qp, g, &socket, &memory, effects)
    {
        append_plan(qp, g, plan, &memory, &mut tail, effects)?;
    }
    Some(tail)
}

/// Appends the unwritten octets of a plan to `tail`. Returns `None` if they cannot be copied.
fn append_plan(
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
                // SAFETY: the scratch is a part of `plan`, which this function owns.
                unsafe { octets.append_to(tail, octets.len()) };
                true
            }
            // If the program has unmapped registered memory, the copy fails instead of crashing the
            // process.
            // SAFETY: by the module's invariant, because the caller holds the lock of `memory`.
            RunKind::Memory => unsafe { octets.append_if_mapped(tail) },
        };
    });
    plan.release(memory);
    effects.add_if(Due::MEMORY_UNUSED, memory.take_unused());
    let is_copied = resolved.is_ok() && mapped;
    if is_copied {
        let mut host = DriveHost::new(qp, effects);
        g.machine.tx_written(&mut plan, remaining, &mut host);
    }
    pool::give_tx(plan);
    is_copied.then_some(())
}

/// Writes a plan to the socket, and records how much the socket has taken. Returns `false` if no
/// more data can be written now. `is_new` is `true` if nothing of the plan was written before.
#[inline]
fn write<'a>(
    qp: &'a Arc<QpInner>,
    mut g: MutexGuard<'a, QpState>,
    socket: &Arc<Socket>,
    memory: ReadGuard<'_, MemoryTable>,
    (mut plan, is_new): (Box<TxPlan>, bool),
    effects: &mut Effects,
) -> (MutexGuard<'a, QpState>, bool) {
    let mut runs = pool::take_runs();
    let accessor = g.machine.accessor();
    let resolved = plan.runs(&memory, accessor, pool::TX_RUNS, |run| {
        runs.push(RawSlice::of_fragment(&run.fragment));
    });
    if resolved.is_err() {
        drop(memory);
        pool::give_runs(runs);
        pool::give_tx(plan);
        // The program has deregistered memory of a request that was sent in part, so the stream
        // cannot continue.
        g.machine.leave(&mut DriveHost::new(qp, effects));
        return (g, false);
    }
    // The runs may refer to this copy, so it must live until the system call has returned.
    let mut _corrupted_copy = None;
    if let Some(faults) = &qp.faults {
        faults.limit(StreamDirection::Out, &mut runs);
        if is_new {
            // SAFETY: by the module's invariant, because this function owns `plan` and holds the
            // lock `memory`.
            _corrupted_copy = unsafe { faults.spoil_copy(&mut runs) };
        }
    }
    qp.held_receives.begin_send();
    drop(g);
    // If the list of runs was shortened, the next call continues in the same segment.
    let ends_segment =
        plan.ends_segment() && runs.iter().map(RawSlice::len).sum::<usize>() == plan.together();
    // SAFETY: by the module's invariant, because this function owns `plan` and holds the lock
    // `memory`.
    let result = unsafe { socket.stream.send_vectored_raw(&runs, ends_segment, false) };
    if let (Some(flow), Ok(n)) = (&socket.flow, &result) {
        // SAFETY: as above; the recorder only reads the bytes.
        unsafe { flow.sent_raw(&runs, *n) };
    }
    plan.release(&memory);
    effects.add_if(Due::MEMORY_UNUSED, memory.take_unused());
    // Unlock the table before `state` is locked: the holder of `state` may be waiting for the
    // table.
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
    let stops = qp.faults.is_some() && notify_faults(qp, &result, effects);
    // If the stream has ended in the meantime, the rest of the plan must not be sent on the next
    // stream.
    if !linked || (result.is_ok() && plan.is_empty()) {
        pool::give_tx(plan);
        return (g, linked && !stops);
    }
    let more = handle_incomplete_write(qp, &mut g, plan, result, effects);
    (g, more && !stops)
}

/// Notifies the injected faults how many octets were sent. Returns `true` if a fault stops sending.
#[cold]
fn notify_faults(qp: &QpInner, result: &io::Result<usize>, effects: &mut Effects) -> bool {
    let (Some(faults), Ok(n)) = (&qp.faults, result) else {
        return false;
    };
    faults.passed_octets(StreamDirection::Out, *n);
    let due = faults.is_due();
    effects.add_if(Due::FAULT, due);
    due || faults.holds(StreamDirection::Out)
}

/// Handles a write that took only a part of a plan, or failed. Returns `false` if no more data can
/// be written now.
fn handle_incomplete_write(
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
    tracing::trace!(qp = qp.num, %error, "send failed");
    g.stream_errno = g.stream_errno.or(error.raw_os_error());
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
        // Data that the peer sent before its end may still be readable, so go on reading.
        g.link.cannot_write();
    } else {
        handle_broken(qp, g, effects);
    }
    false
}

fn keep_plan(g: &mut QpState, plan: Box<TxPlan>) {
    match g.link.open_mut() {
        Some(open) => open.stalled = Some(plan),
        None => pool::give_tx(plan),
    }
}

/// If FPDUs are not aligned to segments, the MSS is read for one of this many plans of large
/// messages.
const MSS_PLANS: u8 = 16;

/// Returns `true` if the MSS should be read now. If FPDUs are aligned to segments, it must be
/// current in each plan.
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

/// Reads the MSS and adapts the size of FPDUs. The MSS changes with the path and with the peer's
/// window.
fn update_mss(qp: &QpInner, g: &mut QpState, socket: &Socket) {
    let Ok(mss) = socket.stream.mss() else { return };
    match g.machine.alignment() {
        Some(current) if current == mss => {}
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
