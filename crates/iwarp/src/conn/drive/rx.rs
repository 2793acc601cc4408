//! Reading: the state machine plans where the next octets belong, and the socket is read directly
//! into these places.
//!
//! Invariant of the `unsafe` code: the runs of a plan refer to bytes of staging, which the calling
//! thread owns, or to registered memory. Registered memory stays valid, because the thread holds
//! the memory table's read lock from before the runs are built until the system call has returned.

use super::super::effects::{DriveHost, Due, Effects};
use super::super::link::Socket;
use super::super::pool;
use super::super::qp::{QpInner, QpState};
use super::handle_broken;
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

/// Maximum number of bytes that one call of [`rx`] reads, so that other queue pairs are served.
const RX_BUDGET: usize = 1 << 20;

/// Used as the memory table for plans that refer to no registered memory.
static EMPTY_TABLE: MemoryTable = MemoryTable::new();

struct Reading {
    budget: usize,
    /// Received data was processed without a read.
    processed: bool,
    /// The last read filled its whole plan, so the socket may have more data.
    more: bool,
    /// The state machine has not processed all data that was read.
    unfinished: bool,
}

impl Reading {
    const fn is_first(&self) -> bool {
        self.budget == RX_BUDGET && !self.processed
    }

    fn record_processed(&mut self, status: Option<RxStatus>) {
        self.processed = true;
        self.unfinished = status == Some(RxStatus::More);
    }
}

enum Step {
    Read,
    /// The state machine has made progress without a read: choose the next step again.
    Again,
    Discard,
    Stop,
}

enum ReadOutcome<'a> {
    /// The first read found no data, and the state was not locked again. The value is `true` if
    /// data is to be written.
    Nothing(bool),
    Ended(MutexGuard<'a, QpState>),
    Done(
        MutexGuard<'a, QpState>,
        Box<RxBuffer>,
        RxPlan,
        io::Result<usize>,
    ),
}

/// Reads until the socket has no more data, or the budget is spent.
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
            // The first read found no data, so nothing has changed. But another queue pair may wait
            // for the memory that the read used.
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
        // Send the Terminate before the program is notified of the end, and destroys the queue
        // pair.
        qp.drive_tx();
        wants_tx = false;
    }
    effects.apply(qp);
    if wants_tx {
        qp.drive_tx();
    }
}

/// Reads until the socket has no more data. If the first read finds no data, returns `Err`, with
/// `true` if data is to be written.
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
            // Let waiting threads lock the state first. Only this thread receives, so the order of
            // messages does not change.
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
                handle_read(qp, &mut g, buffer, plan, result, &mut reading, effects);
            }
        }
        // If a Send is held now, try again: its receive may have been posted during the read.
        let is_held = g.machine.rx_interest() == RxInterest::Held;
        if !reading.more && !is_held && !reading.unfinished {
            break;
        }
    }
    Ok(g)
}

#[inline]
fn next_step(
    qp: &Arc<QpInner>,
    g: &mut MutexGuard<'_, QpState>,
    reading: &mut Reading,
    effects: &mut Effects,
) -> Step {
    match g.machine.rx_interest() {
        RxInterest::Read if reading.unfinished => {
            reading.record_processed(process_again(qp, g, effects));
            if reading.more || reading.unfinished || g.machine.rx_interest() != RxInterest::Read {
                return Step::Again;
            }
            Step::Stop
        }
        RxInterest::Read => Step::Read,
        RxInterest::Held => {
            let status = retry_held_send(qp, g, effects);
            if status.is_none() {
                return Step::Stop;
            }
            // A message is complete. The engine must watch the socket again.
            reading.record_processed(status);
            Step::Again
        }
        RxInterest::Discard => Step::Discard,
        RxInterest::Waits => {
            let status = process_again(qp, g, effects);
            if matches!(status, None | Some(RxStatus::Waits)) {
                return Step::Stop;
            }
            reading.record_processed(status);
            Step::Again
        }
        RxInterest::None => Step::Stop,
    }
}

/// Reads once. `is_first` is `true` if this call of [`rx`] has not read or processed any data yet.
#[inline]
fn read_once<'a>(
    qp: &'a Arc<QpInner>,
    g: MutexGuard<'a, QpState>,
    socket: &Arc<Socket>,
    mut buffer: Box<RxBuffer>,
    is_first: bool,
    effects: &mut Effects,
) -> ReadOutcome<'a> {
    // A read that finds no data must be cheap, so lock the table only if the plan refers to
    // registered memory.
    let memory = g.machine.rx_is_direct().then(|| qp.ctx.memory.read());
    let mut plan = pool::rx_plan();
    let mut runs = pool::take_runs();
    g.machine.rx_plan(
        &mut buffer,
        memory.as_deref().unwrap_or(&EMPTY_TABLE),
        &mut plan,
        |run| runs.push(RawSlice::of_fragment(&run.fragment)),
    );
    let wants_tx = is_first && g.machine.wants_tx();
    drop(g);
    if let Some(faults) = &qp.faults {
        faults.limit(StreamDirection::In, &mut runs);
    }
    // SAFETY: by the module's invariant, because this thread owns `buffer` and holds the lock
    // `memory`.
    let result = unsafe { socket.stream.recv_vectored_raw(&runs) };
    if let (Some(faults), Ok(n @ 1..)) = (&qp.faults, &result) {
        if buffer.is_empty() {
            // SAFETY: as above; the runs refer to the memory that `recv_vectored_raw` has just
            // written.
            unsafe { faults.spoil_received(&runs, *n) };
        }
        faults.passed_octets(StreamDirection::In, *n);
        effects.add_if(Due::FAULT, faults.is_due());
    }
    if let Some(memory) = &memory {
        plan.release(memory);
        effects.add_if(Due::MEMORY_UNUSED, memory.take_unused());
    }
    if let (Some(flow), Ok(n @ 1..)) = (&socket.flow, &result) {
        // SAFETY: as above; the recorder only reads the bytes that `recv_vectored_raw` has just
        // written.
        unsafe { flow.received_raw(&runs, *n) };
    }
    pool::give_runs(runs);
    // Unlock the table before `state` is locked: the holder of `state` may be waiting for the
    // table.
    drop(memory);
    if is_first && result.as_ref().is_err_and(would_block) {
        keep_partial(qp, socket, buffer);
        return ReadOutcome::Nothing(wants_tx);
    }
    let g = qp.state.lock();
    if !g.is_linked(socket) {
        // These bytes do not belong to the next connection.
        pool::give_rx(buffer);
        return ReadOutcome::Ended(g);
    }
    ReadOutcome::Done(g, buffer, plan, result)
}

fn would_block(error: &io::Error) -> bool {
    error.kind() == ErrorKind::WouldBlock
}

#[inline]
fn handle_read(
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
        // The peer may have closed in answer to a request whose `sendmsg` has not returned. That
        // request has succeeded and must not be flushed. The next read finds the end again.
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
            let status = process(qp, g, &mut buffer, &mut plan, n, effects);
            reading.unfinished = status == RxStatus::More;
        }
        Err(error) if would_block(&error) => {}
        Err(error) => handle_read_error(qp, g, &mut buffer, &error, effects),
    }
    put_back(g, buffer);
}

/// Has the state machine process `n` bytes that were read.
#[inline]
fn process(
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
    effects.add_if(Due::MEMORY_UNUSED, memory.take_unused());
    drop(memory);
    qp.peer_answers.record(g.machine.counters());
    if status == RxStatus::Held {
        begin_hold(qp, g, effects);
    }
    status
}

#[cold]
fn handle_read_error(
    qp: &Arc<QpInner>,
    g: &mut MutexGuard<'_, QpState>,
    buffer: &mut RxBuffer,
    error: &io::Error,
    effects: &mut Effects,
) {
    tracing::trace!(qp = qp.num, %error, "receive failed");
    g.stream_errno = g.stream_errno.or(error.raw_os_error());
    g.peer_vanished = error.raw_os_error() == Some(libc::ETIMEDOUT);
    // `EFAULT`: the program has unmapped registered memory.
    let unmapped = error.raw_os_error() == Some(libc::EFAULT);
    let hidden = !unmapped && hide_end(qp, g, effects);
    buffer.clear();
    if hidden {
        // The queue pair stays in RTS.
    } else if unmapped {
        g.machine.rx_unwritable(&mut DriveHost::new(qp, effects));
    } else {
        handle_broken(qp, g, effects);
    }
}

/// Keeps `buffer` for the stream if it contains a part of an FPDU, and returns it to the pool if
/// not.
#[inline]
fn put_back(g: &mut QpState, buffer: Box<RxBuffer>) {
    match g.link.open_mut().filter(|_| !buffer.is_empty()) {
        Some(open) => open.partial = Some(buffer),
        None => pool::give_rx(buffer),
    }
}

/// Does the same as [`put_back`], but locks the state only if there is a part of an FPDU. The
/// stream may have ended in the meantime.
#[inline]
fn keep_partial(qp: &QpInner, socket: &Arc<Socket>, buffer: Box<RxBuffer>) {
    if buffer.is_empty() {
        return pool::give_rx(buffer);
    }
    let mut g = qp.state.lock();
    match g.link.open_mut() {
        Some(open) if Arc::ptr_eq(&open.socket, socket) => open.partial = Some(buffer),
        _ => pool::give_rx(buffer),
    }
}

/// Hides the end of the stream from the queue pair, if it must be hidden. Returns `true` in that
/// case.
fn hide_end(qp: &Arc<QpInner>, g: &mut MutexGuard<'_, QpState>, effects: &mut Effects) -> bool {
    let hidden = g.machine.hides_end();
    if hidden {
        peer_gone::hide_end(qp, g, effects);
    }
    hidden
}

/// Starts the time limit of a Send for which no receive is posted.
fn begin_hold(qp: &Arc<QpInner>, g: &mut MutexGuard<'_, QpState>, effects: &mut Effects) {
    let Some(open) = g.link.open_mut().filter(|open| open.held_since == 0) else {
        return;
    };
    let now = now_ns();
    open.held_since = now;
    tracing::trace!(qp = qp.num, "receiver not ready");
    g.machine
        .on_time(Time::from_nanos(now), &mut DriveHost::new(qp, effects));
}

/// Processes a held Send if there is a receive for it now. Returns `None` if there is none.
fn retry_held_send(
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

/// Has the state machine go on with data that was received before. Returns `None` if no buffer can
/// be allocated.
fn process_again(
    qp: &Arc<QpInner>,
    g: &mut MutexGuard<'_, QpState>,
    effects: &mut Effects,
) -> Option<RxStatus> {
    // The buffer is empty if the state machine has waited only for the end of an invalidation.
    let mut buffer = g.take_partial().ok()?;
    let status = process(qp, g, &mut buffer, &mut pool::rx_plan(), 0, effects);
    put_back(g, buffer);
    Some(status)
}

/// Reads and discards data until the peer closes, because the queue pair is in error.
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
    // `Some(true)` after a FIN, `Some(false)` after an error.
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
        Some(false) => handle_broken(qp, &mut g, effects),
        None => {}
    }
    g
}

#[cfg(test)]
#[path = "rx_tests.rs"]
mod tests;
