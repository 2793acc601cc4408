//! Reading: the state machine says where the next octets should land, and the socket puts them there.
//!
//! Invariant of the `unsafe`: the runs of a plan name octets of staging that this driver owns, or of registered memory. The last
//! stay valid because the memory table is locked for reading from the moment the runs are made until the system call has returned.

use super::super::effects::{DriveHost, Due, Effects};
use super::super::link::Socket;
use super::super::pool;
use super::super::qp::{QpInner, QpState};
use super::broken;
use crate::conn::peer_gone;
use crate::crc::crc32c;
use crate::objects::hooks::Way;
use crate::sys::clock::now_ns;
use crate::sys::guarded::MemoryTable;
use crate::sys::raw_slice::RawSlice;
use iwarp_rnic::Time;
use iwarp_rnic::qp::{Env, Events, RxBuffer, RxInterest, RxPlan, RxStatus, State};
use parking_lot::MutexGuard;
use std::io::{self, ErrorKind};
use std::sync::Arc;

/// Octets read in one turn before other queue pairs get theirs.
const RX_BUDGET: usize = 1 << 20;

/// Stands for the memory table where no memory is named.
static EMPTY_TABLE: MemoryTable = MemoryTable::new();

/// Where a thread that reads has got to.
struct Turn {
    /// Octets that it may still read.
    left: usize,
    /// It has processed something without reading.
    resumed: bool,
    /// The last look took as much as there was room for.
    more: bool,
    /// The state machine has done its share of what was read, and is not through.
    unfinished: bool,
}

impl Turn {
    /// Nothing has happened yet.
    const fn is_first(&self) -> bool {
        self.left == RX_BUDGET && !self.resumed
    }

    /// Notes how processing without reading has ended.
    fn resume(&mut self, status: Option<RxStatus>) {
        self.resumed = true;
        self.unfinished = status == Some(RxStatus::More);
    }
}

/// What the state machine wants next.
enum Step {
    Read,
    /// It has done something: ask again.
    Again,
    Discard,
    Stop,
}

/// What a look at the socket has come to.
enum Look<'a> {
    /// It was the first, there is nothing, and the state has not been locked again. `true` if there is something to write.
    Vain(bool),
    /// The connection has ended meanwhile.
    Ended(MutexGuard<'a, QpState>),
    Looked(
        MutexGuard<'a, QpState>,
        Box<RxBuffer>,
        RxPlan,
        io::Result<usize>,
    ),
}

/// Reads until nothing is there or the budget is spent.
pub(crate) fn rx(qp: &Arc<QpInner>) {
    let mut effects = Effects::default();
    let mut g = qp.state.lock();
    if g.link.is_none() || g.link.is_read_to_end() {
        return;
    }
    if !qp.passes(Way::In) {
        // The engine stops looking for octets.
        qp.collect_effects(&mut g, &mut effects);
        drop(g);
        effects.apply(qp);
        return;
    }
    let mut g = match turns(qp, g, &mut effects) {
        Ok(g) => g,
        Err(wants_tx) => {
            // A first look without result changes nothing, so it needs no further work, only what its early end needs.
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
        // The Terminate is sent before the program hears of the end and destroys the queue pair.
        qp.drive_tx();
        wants_tx = false;
    }
    effects.apply(qp);
    if wants_tx {
        qp.drive_tx();
    }
}

/// Takes turns until nothing is there. If the first was in vain, returns whether there is something to write.
fn turns<'a>(
    qp: &'a Arc<QpInner>,
    mut g: MutexGuard<'a, QpState>,
    effects: &mut Effects,
) -> Result<MutexGuard<'a, QpState>, bool> {
    let mut turn = Turn {
        left: RX_BUDGET,
        resumed: false,
        more: false,
        unfinished: false,
    };
    loop {
        if turn.unfinished {
            // Whoever waits for the state has it first. Only this thread receives, so nothing comes in between.
            MutexGuard::bump(&mut g);
        }
        let Some(socket) = g.link.socket().cloned() else {
            break;
        };
        match next_step(qp, &mut g, &mut turn, effects) {
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
        match look(qp, g, &socket, buffer, turn.is_first(), effects) {
            Look::Vain(wants_tx) => return Err(wants_tx),
            Look::Ended(guard) => {
                g = guard;
                break;
            }
            Look::Looked(guard, buffer, plan, result) => {
                g = guard;
                take_in(qp, &mut g, buffer, plan, result, &mut turn, effects);
            }
        }
        let held_but_posted = g.machine.rx_interest() == RxInterest::Held;
        if !turn.more && !held_but_posted && !turn.unfinished {
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
    turn: &mut Turn,
    effects: &mut Effects,
) -> Step {
    match g.machine.rx_interest() {
        RxInterest::Read if turn.unfinished => {
            turn.resume(process(qp, g, effects));
            if turn.more || turn.unfinished || g.machine.rx_interest() != RxInterest::Read {
                return Step::Again;
            }
            Step::Stop
        }
        RxInterest::Read => Step::Read,
        RxInterest::Held => {
            let status = resume(qp, g, effects);
            if status.is_none() {
                return Step::Stop;
            }
            // It has completed something, and the socket has to be watched again.
            turn.resume(status);
            Step::Again
        }
        RxInterest::Discard => Step::Discard,
        RxInterest::Waits => {
            let status = process(qp, g, effects);
            if matches!(status, None | Some(RxStatus::Waits)) {
                return Step::Stop;
            }
            turn.resume(status);
            Step::Again
        }
        RxInterest::None => Step::Stop,
    }
}

/// Reads once. `first`: nothing else has happened yet.
#[inline]
fn look<'a>(
    qp: &'a Arc<QpInner>,
    g: MutexGuard<'a, QpState>,
    socket: &Arc<Socket>,
    mut buffer: Box<RxBuffer>,
    first: bool,
    effects: &mut Effects,
) -> Look<'a> {
    // An empty look must be cheap: the table is locked only when the plan names memory of the program.
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
        faults.limit(Way::In, &mut runs);
    }
    // SAFETY: the module's invariant; `buffer` is ours and `memory` is locked.
    let result = unsafe { socket.stream.recv_vectored_raw(&runs) };
    if let (Some(faults), Ok(n @ 1..)) = (&qp.faults, &result) {
        if buffer.is_empty() {
            // SAFETY: as above; the plan names the memory that has just been written.
            unsafe { faults.spoil_received(&runs, *n) };
        }
        faults.passed_octets(Way::In, *n);
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
    // Done first: the thread that holds the state may be waiting for the memory table.
    drop(memory);
    if first && result.as_ref().is_err_and(is_nothing) {
        keep_part(qp, socket, buffer);
        return Look::Vain(waiting_tx);
    }
    let g = qp.state.lock();
    if !g.is_linked(socket) {
        // Its octets do not belong to the next connection.
        pool::give_rx(buffer);
        return Look::Ended(g);
    }
    Look::Looked(g, buffer, plan, result)
}

fn is_nothing(error: &io::Error) -> bool {
    error.kind() == ErrorKind::WouldBlock
}

/// Gives the state machine what was read.
#[inline]
fn take_in(
    qp: &Arc<QpInner>,
    g: &mut MutexGuard<'_, QpState>,
    mut buffer: Box<RxBuffer>,
    mut plan: RxPlan,
    result: io::Result<usize>,
    turn: &mut Turn,
    effects: &mut Effects,
) {
    turn.more = false;
    match result {
        // The request that the peer has answered by closing may still be in the system call: it is done, and must not be flushed. The
        // end is still there at the next look.
        Ok(0) if qp.held_receives.is_sending() => {}
        Ok(0) if hide_end(qp, g, effects) => {}
        Ok(0) => g
            .machine
            .rx_eof(&mut buffer, &mut DriveHost::new(qp, effects)),
        Ok(n) => {
            turn.more = n == plan.room() && turn.left > n;
            turn.left = turn.left.saturating_sub(n);
            qp.bytes_transferred.add(n);
            if let Some(open) = g.link.open_mut() {
                open.looks.count();
            }
            let status = filled(qp, g, &mut buffer, &mut plan, n, effects);
            turn.unfinished = status == RxStatus::More;
        }
        Err(error) if is_nothing(&error) => {}
        Err(error) => failed(qp, g, &mut buffer, &error, effects),
    }
    put_back(g, buffer);
}

/// Has the state machine process the `n` octets that have come.
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
        held(qp, g, effects);
    }
    status
}

/// The socket has an error.
#[cold]
fn failed(
    qp: &Arc<QpInner>,
    g: &mut MutexGuard<'_, QpState>,
    buffer: &mut RxBuffer,
    error: &io::Error,
    effects: &mut Effects,
) {
    tracing::debug!(qp = qp.num, %error, "receive failed");
    // Registered memory that the program has unmapped.
    let unmapped = error.raw_os_error() == Some(libc::EFAULT);
    let left = !unmapped && hide_end(qp, g, effects);
    buffer.clear();
    if left {
        // Nothing that the program sees.
    } else if unmapped {
        g.machine.rx_unwritable(&mut DriveHost::new(qp, effects));
    } else {
        broken(qp, g, effects);
    }
}

/// A part of an FPDU stays with the queue pair.
#[inline]
fn put_back(g: &mut QpState, buffer: Box<RxBuffer>) {
    match g.link.open_mut().filter(|_| !buffer.is_empty()) {
        Some(open) => open.partial = Some(buffer),
        None => pool::give_rx(buffer),
    }
}

/// Keeps a part of an FPDU. The state is locked only if there is one; the connection may have ended
/// before that.
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

/// The stream has come to its end. Returns `true` if that must not change the queue pair.
fn hide_end(qp: &Arc<QpInner>, g: &mut MutexGuard<'_, QpState>, effects: &mut Effects) -> bool {
    let hidden = g.machine.hides_end();
    if hidden {
        peer_gone::hide_end(qp, g, effects);
    }
    hidden
}

/// A Send has met no receive: its time begins.
fn held(qp: &Arc<QpInner>, g: &mut MutexGuard<'_, QpState>, effects: &mut Effects) {
    let Some(open) = g.link.open_mut().filter(|open| open.held_since == 0) else {
        return;
    };
    let now = now_ns();
    open.held_since = now;
    tracing::trace!(qp = qp.num, "receiver not ready");
    g.machine
        .on_time(Time::from_nanos(now), &mut DriveHost::new(qp, effects));
}

/// Offers a held Send again. Returns `None` if there is still no receive.
fn resume(
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
    process(qp, g, effects)
}

/// Processes again what has been received. Returns `None` if there is no memory for that.
fn process(
    qp: &Arc<QpInner>,
    g: &mut MutexGuard<'_, QpState>,
    effects: &mut Effects,
) -> Option<RxStatus> {
    // An STag that the peer has invalidated may be all that is left to do, and then there is no part of an FPDU.
    let mut buffer = g.take_partial().ok()?;
    let status = filled(qp, g, &mut buffer, &mut pool::rx_plan(), 0, effects);
    put_back(g, buffer);
    Some(status)
}

/// The queue pair is done with this stream: throw away what still comes, until the peer closes.
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
