//! Reading: the state machine plans where the next octets land, and the socket puts them there.
//!
//! Invariant of the `unsafe`: the runs of a plan name bytes of staging that this driver owns, or of
//! registered memory. Registered memory stays valid because the memory table is locked for reading
//! from before the runs are made until the system call has returned.

use super::super::effects::{DriveHost, Due, Effects};
use super::super::link::Socket;
use super::super::pool;
use super::super::qp::{QpInner, QpState};
use super::broken;
use crate::conn::peer_gone;
use crate::crc::crc32c;
use crate::objects::hooks::StreamDirection;
use crate::sys::clock::now_ns;
use crate::sys::guarded::MemoryTable;
use crate::sys::raw_slice::RawSlice;
use iwarp_rnic::Time;
use iwarp_rnic::qp::{Env, Events, RxBuffer, RxInterest, RxPlan, RxStatus, State};
use parking_lot::MutexGuard;
use std::io::{self, ErrorKind};
use std::sync::Arc;

/// Bytes that one call reads before other queue pairs are served.
const RX_BUDGET: usize = 1 << 20;

/// Used as the memory table where no memory is named.
static EMPTY_TABLE: MemoryTable = MemoryTable::new();

/// Progress of one call of [`rx`].
struct Reading {
    budget: usize,
    /// Something was processed without a read.
    processed: bool,
    /// The last read filled its whole plan, so more may be there.
    more: bool,
    /// The state machine has not processed all that was read.
    unfinished: bool,
}

impl Reading {
    const fn is_first(&self) -> bool {
        self.budget == RX_BUDGET && !self.processed
    }

    fn note_processed(&mut self, status: Option<RxStatus>) {
        self.processed = true;
        self.unfinished = status == Some(RxStatus::More);
    }
}

enum Step {
    Read,
    /// The state machine has done something: ask it again.
    Again,
    Discard,
    Stop,
}

enum ReadOutcome<'a> {
    /// The first read found nothing, and the state was not locked again. `true` if there is
    /// something to write.
    Nothing(bool),
    /// The connection has ended meanwhile.
    Ended(MutexGuard<'a, QpState>),
    Done(
        MutexGuard<'a, QpState>,
        Box<RxBuffer>,
        RxPlan,
        io::Result<usize>,
    ),
}

/// Reads until there is nothing more or the budget is spent.
pub(crate) fn rx(qp: &Arc<QpInner>) {
    let mut effects = Effects::default();
    let mut g = qp.state.lock();
    if g.link.is_none() || g.link.is_read_to_end() {
        return;
    }
    if !qp.passes(StreamDirection::In) {
        // The engine stops watching for readability.
        qp.collect_effects(&mut g, &mut effects);
        drop(g);
        effects.apply(qp);
        return;
    }
    let mut g = match read_all(qp, g, &mut effects) {
        Ok(g) => g,
        Err(wants_tx) => {
            // A first read without result changes nothing. Only the end of its use of memory must
            // be handled.
            if effects.due.contains(Due::MEMORY_UNUSED) {
                qp.ctx.memory_unused();
            }
            if wants_tx {
                qp.drive_tx();
            }
            return;
        }
    };
    let mut wants_tx = g.machine.wants_tx();
    qp.collect_effects(&mut g, &mut effects);
    drop(g);
    if wants_tx && effects.events.contains(Events::FATAL) {
        // Send the Terminate before the program learns of the end and destroys the queue pair.
        qp.drive_tx();
        wants_tx = false;
    }
    effects.apply(qp);
    if wants_tx {
        qp.drive_tx();
    }
}

/// Reads until there is nothing more. If the first read finds nothing, returns whether there is
/// something to write.
fn read_all<'a>(
    qp: &'a Arc<QpInner>,
    mut g: MutexGuard<'a, QpState>,
    effects: &mut Effects,
) -> Result<MutexGuard<'a, QpState>, bool> {
    let mut reading = Reading {
        budget: RX_BUDGET,
        processed: false,
        more: false,
        unfinished: false,
    };
    loop {
        if reading.unfinished {
            // Let waiting threads have the state first. Only this thread receives, so nothing is
            // overtaken.
            MutexGuard::bump(&mut g);
        }
        let Some(socket) = g.link.socket().cloned() else {
            break;
        };
        match next_step(qp, &mut g, &mut reading, effects) {
            Step::Read => {}
            Step::Again => continue,
            Step::Discard => {
                g = discard(qp, g, effects);
                break;
            }
            Step::Stop => break,
        }
        let Ok(buffer) = g.take_partial() else {
            g.machine.abort(&mut DriveHost::new(qp, effects));
            break;
        };
        match read_once(qp, g, &socket, buffer, reading.is_first(), effects) {
            ReadOutcome::Nothing(wants_tx) => return Err(wants_tx),
            ReadOutcome::Ended(guard) => {
                g = guard;
                break;
            }
            ReadOutcome::Done(guard, buffer, plan, result) => {
                g = guard;
                take_in(qp, &mut g, buffer, plan, result, &mut reading, effects);
            }
        }
        let held_but_posted = g.machine.rx_interest() == RxInterest::Held;
        if !reading.more && !held_but_posted && !reading.unfinished {
            break;
        }
    }
    Ok(g)
}

/// Does what can be done without reading.
#[inline]
fn next_step(
    qp: &Arc<QpInner>,
    g: &mut MutexGuard<'_, QpState>,
    reading: &mut Reading,
    effects: &mut Effects,
) -> Step {
    match g.machine.rx_interest() {
        RxInterest::Read if reading.unfinished => {
            reading.note_processed(process_again(qp, g, effects));
            if reading.more || reading.unfinished || g.machine.rx_interest() != RxInterest::Read {
                return Step::Again;
            }
            Step::Stop
        }
        RxInterest::Read => Step::Read,
        RxInterest::Held => {
            let status = offer_held_send(qp, g, effects);
            if status.is_none() {
                return Step::Stop;
            }
            // A message was completed, and the socket must be watched again.
            reading.note_processed(status);
            Step::Again
        }
        RxInterest::Discard => Step::Discard,
        RxInterest::Waits => {
            let status = process_again(qp, g, effects);
            if matches!(status, None | Some(RxStatus::Waits)) {
                return Step::Stop;
            }
            reading.note_processed(status);
            Step::Again
        }
        RxInterest::None => Step::Stop,
    }
}

/// Reads once. `first`: nothing has been read or processed yet.
#[inline]
fn read_once<'a>(
    qp: &'a Arc<QpInner>,
    g: MutexGuard<'a, QpState>,
    socket: &Arc<Socket>,
    mut buffer: Box<RxBuffer>,
    first: bool,
    effects: &mut Effects,
) -> ReadOutcome<'a> {
    // A read that finds nothing must be cheap: lock the table only if the plan names the program's
    // memory.
    let memory = g.machine.rx_is_direct().then(|| qp.ctx.memory.read());
    let mut plan = pool::rx_plan();
    let mut runs = pool::take_runs();
    g.machine.rx_plan(
        &mut buffer,
        memory.as_deref().unwrap_or(&EMPTY_TABLE),
        &mut plan,
        |run| runs.push(RawSlice::of_fragment(&run.fragment)),
    );
    let waiting_tx = first && g.machine.wants_tx();
    drop(g);
    if let Some(faults) = &qp.faults {
        faults.limit(StreamDirection::In, &mut runs);
    }
    // SAFETY: the module's invariant; `buffer` is ours and `memory` is locked.
    let result = unsafe { socket.stream.recv_vectored_raw(&runs) };
    if let (Some(faults), Ok(n @ 1..)) = (&qp.faults, &result) {
        if buffer.is_empty() {
            // SAFETY: as above; the plan names the memory that has just been written.
            unsafe { faults.spoil_received(&runs, *n) };
        }
        faults.passed_octets(StreamDirection::In, *n);
        effects.note_if(Due::FAULT, faults.is_due());
    }
    if let Some(memory) = &memory {
        plan.release(memory);
        effects.note_if(Due::MEMORY_UNUSED, memory.take_unused());
    }
    if let (Some(flow), Ok(n @ 1..)) = (&socket.flow, &result) {
        // SAFETY: as above; the recorder reads what has just been written there.
        unsafe { flow.received_raw(&runs, *n) };
    }
    pool::give_runs(runs);
    // Before `state` is locked: its holder may be waiting for the memory table.
    drop(memory);
    if first && result.as_ref().is_err_and(is_nothing) {
        keep_part(qp, socket, buffer);
        return ReadOutcome::Nothing(waiting_tx);
    }
    let g = qp.state.lock();
    if !g.is_linked(socket) {
        // These bytes do not belong to the next connection.
        pool::give_rx(buffer);
        return ReadOutcome::Ended(g);
    }
    ReadOutcome::Done(g, buffer, plan, result)
}

fn is_nothing(error: &io::Error) -> bool {
    error.kind() == ErrorKind::WouldBlock
}

#[inline]
fn take_in(
    qp: &Arc<QpInner>,
    g: &mut MutexGuard<'_, QpState>,
    mut buffer: Box<RxBuffer>,
    mut plan: RxPlan,
    result: io::Result<usize>,
    reading: &mut Reading,
    effects: &mut Effects,
) {
    reading.more = false;
    match result {
        // The peer may have closed in answer to a request that is still inside `sendmsg`. That
        // request is done and must not be flushed. The next read finds the end again.
        Ok(0) if qp.held_receives.is_sending() => {}
        Ok(0) if hide_end(qp, g, effects) => {}
        Ok(0) => g
            .machine
            .rx_eof(&mut buffer, &mut DriveHost::new(qp, effects)),
        Ok(n) => {
            reading.more = n == plan.room() && reading.budget > n;
            reading.budget = reading.budget.saturating_sub(n);
            qp.bytes_transferred.add(n);
            if let Some(open) = g.link.open_mut() {
                open.fault_checks.count();
            }
            let status = filled(qp, g, &mut buffer, &mut plan, n, effects);
            reading.unfinished = status == RxStatus::More;
        }
        Err(error) if is_nothing(&error) => {}
        Err(error) => failed(qp, g, &mut buffer, &error, effects),
    }
    put_back(g, buffer);
}

#[inline]
fn filled(
    qp: &Arc<QpInner>,
    g: &mut MutexGuard<'_, QpState>,
    buffer: &mut RxBuffer,
    plan: &mut RxPlan,
    n: usize,
    effects: &mut Effects,
) -> RxStatus {
    let memory = qp.ctx.memory.read();
    let status = {
        let mut env = Env {
            memory: &memory,
            crc32c: crc32c(),
            host: &mut DriveHost::new(qp, effects),
        };
        g.machine.rx_filled(buffer, plan, n, &mut env)
    };
    effects.note_if(Due::MEMORY_UNUSED, memory.take_unused());
    drop(memory);
    qp.peer_answers.note(g.machine.counters());
    if status == RxStatus::Held {
        note_held_send(qp, g, effects);
    }
    status
}

#[cold]
fn failed(
    qp: &Arc<QpInner>,
    g: &mut MutexGuard<'_, QpState>,
    buffer: &mut RxBuffer,
    error: &io::Error,
    effects: &mut Effects,
) {
    tracing::debug!(qp = qp.num, %error, "receive failed");
    g.peer_vanished = error.raw_os_error() == Some(libc::ETIMEDOUT);
    // The program has unmapped registered memory.
    let unmapped = error.raw_os_error() == Some(libc::EFAULT);
    let hidden = !unmapped && hide_end(qp, g, effects);
    buffer.clear();
    if hidden {
        // The queue pair stays as it is.
    } else if unmapped {
        g.machine.rx_unwritable(&mut DriveHost::new(qp, effects));
    } else {
        broken(qp, g, effects);
    }
}

#[inline]
fn put_back(g: &mut QpState, buffer: Box<RxBuffer>) {
    match g.link.open_mut().filter(|_| !buffer.is_empty()) {
        Some(open) => open.partial = Some(buffer),
        None => pool::give_rx(buffer),
    }
}

/// Keeps a received part of an FPDU, if there is one: only then is the state locked. The connection
/// may have ended meanwhile.
#[inline]
fn keep_part(qp: &QpInner, socket: &Arc<Socket>, buffer: Box<RxBuffer>) {
    if buffer.is_empty() {
        return pool::give_rx(buffer);
    }
    let mut g = qp.state.lock();
    match g.link.open_mut() {
        Some(open) if Arc::ptr_eq(&open.socket, socket) => open.partial = Some(buffer),
        _ => pool::give_rx(buffer),
    }
}

/// Hides the end of the stream, if the queue pair must not notice it. Returns `true` if so.
fn hide_end(qp: &Arc<QpInner>, g: &mut MutexGuard<'_, QpState>, effects: &mut Effects) -> bool {
    let hidden = g.machine.hides_end();
    if hidden {
        peer_gone::hide_end(qp, g, effects);
    }
    hidden
}

/// Starts the time limit of a Send that found no receive.
fn note_held_send(qp: &Arc<QpInner>, g: &mut MutexGuard<'_, QpState>, effects: &mut Effects) {
    let Some(open) = g.link.open_mut().filter(|open| open.held_since == 0) else {
        return;
    };
    let now = now_ns();
    open.held_since = now;
    tracing::trace!(qp = qp.num, "receiver not ready");
    g.machine
        .on_time(Time::from_nanos(now), &mut DriveHost::new(qp, effects));
}

/// Offers a held Send to its receive queue again. Returns `None` if there is still no receive.
fn offer_held_send(
    qp: &Arc<QpInner>,
    g: &mut MutexGuard<'_, QpState>,
    effects: &mut Effects,
) -> Option<RxStatus> {
    let ready = match &qp.srq {
        Some(srq) => !srq.inner.wait(qp),
        None if qp.xrc.is_some() => qp.xrc.as_ref().is_some_and(|target| !target.wait(qp)),
        None => g.machine.receives_posted() > 0,
    };
    let ready = ready && qp.faults.as_ref().is_none_or(|faults| !faults.starves());
    if !ready || g.link.open().is_none_or(|open| open.partial.is_none()) {
        return None;
    }
    g.end_hold();
    process_again(qp, g, effects)
}

/// Processes again what was received. Returns `None` if there is no memory for that.
fn process_again(
    qp: &Arc<QpInner>,
    g: &mut MutexGuard<'_, QpState>,
    effects: &mut Effects,
) -> Option<RxStatus> {
    // There is no part of an FPDU if the state machine waited only for the end of an invalidation.
    let mut buffer = g.take_partial().ok()?;
    let status = filled(qp, g, &mut buffer, &mut pool::rx_plan(), 0, effects);
    put_back(g, buffer);
    Some(status)
}

/// Discards what still comes, until the peer closes: the queue pair is done with this stream.
fn discard<'a>(
    qp: &'a Arc<QpInner>,
    g: MutexGuard<'a, QpState>,
    effects: &mut Effects,
) -> MutexGuard<'a, QpState> {
    let Some(socket) = g.link.socket().cloned() else {
        return g;
    };
    debug_assert_eq!(g.machine.state(), State::Error);
    drop(g);
    let mut sink = [0u8; 16 * 1024];
    let mut end = None;
    for _ in 0..RX_BUDGET / sink.len() {
        match socket.stream.recv(&mut sink) {
            Ok(0) => {
                end = Some(true);
                break;
            }
            Ok(_) => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => break,
            Err(_) => {
                end = Some(false);
                break;
            }
        }
    }
    let mut g = qp.state.lock();
    if !g.is_linked(&socket) {
        return g;
    }
    match end {
        Some(true) => {
            if let Ok(mut buffer) = g.take_partial() {
                g.machine
                    .rx_eof(&mut buffer, &mut DriveHost::new(qp, effects));
                pool::give_rx(buffer);
            }
        }
        Some(false) => broken(qp, &mut g, effects),
        None => {}
    }
    g
}

#[cfg(test)]
#[path = "rx_tests.rs"]
mod tests;
