//! Moving bytes between a queue pair and its socket. Run by the holder of the direction's baton.
//!
//! Invariant of the `unsafe`: the runs of a plan name octets of the plan's scratch, of staging that this driver
//! owns, or of registered memory. The last stay valid because the memory table is locked for reading from the
//! moment the runs are made until the system call has returned.

use super::after::{After, DriveHost};
use super::late;
use super::left;
use super::pool;
use super::qp::{Guarded, Link, QpInner};
use super::silence;
use crate::crc::crc32c;
use crate::sys::clock::now_ns;
use crate::sys::raw_slice::RawSlice;
use iwarp_rnic::Time;
use iwarp_rnic::memory::MemoryTable;
use iwarp_rnic::qp::{Env, Events, RxBuffer, RxInterest, RxStatus, State, TxFill};
use parking_lot::MutexGuard;
use std::io::ErrorKind;
use std::sync::Arc;

/// Octets read in one turn before other queue pairs get theirs.
const RX_BUDGET: usize = 1 << 20;

/// Stands for the memory table where no memory is named.
static EMPTY_TABLE: MemoryTable = MemoryTable::new();

/// Writes until nothing is due or the socket is full.
pub(super) fn tx(qp: &Arc<QpInner>) {
    let mut after = After::default();
    let mut g = qp.state.lock();
    if g.link.is_none() {
        return;
    }
    if g.left.rx || g.left.tx {
        left::send(&mut g);
        return;
    }
    let _ = g.cork.send();
    if g.machine.wants_tx() || g.stalled.is_some() {
        g = tx_turns(qp, g, &mut after);
        silence::watch(qp, &mut g);
    }
    qp.settle(&mut g, &mut after);
    drop(g);
    after.run(qp);
}

fn tx_turns<'a>(
    qp: &'a Arc<QpInner>,
    mut g: MutexGuard<'a, Guarded>,
    after: &mut After,
) -> MutexGuard<'a, Guarded> {
    loop {
        let Some(link) = g.link.clone() else { return g };
        let memory = qp.ctx.memory.read();
        let mut plan = match g.stalled.take() {
            Some(plan) => plan,
            None => {
                let Ok(mut plan) = pool::take_tx() else {
                    g.machine.abort(&mut DriveHost::new(qp, after));
                    return g;
                };
                if wants_mss(&mut g) {
                    follow_mss(qp, &mut g, &link);
                }
                let filled = {
                    let mut host = DriveHost::new(qp, &mut *after);
                    let mut env = Env {
                        memory: &memory,
                        crc32c: crc32c(),
                        host: &mut host,
                    };
                    g.machine.tx_fill(&mut plan, &mut env)
                };
                match filled {
                    TxFill::Ready => plan,
                    TxFill::Idle => {
                        after.unused |= memory.take_unused();
                        pool::give_tx(plan);
                        return g;
                    }
                    TxFill::More => {
                        pool::give_tx(plan);
                        drop(memory);
                        MutexGuard::bump(&mut g);
                        continue;
                    }
                    TxFill::Memory => {
                        pool::give_tx(plan);
                        drop(memory);
                        let mut memory = qp.ctx.memory.write();
                        g.machine
                            .tx_memory(&mut memory, &mut DriveHost::new(qp, after));
                        continue;
                    }
                }
            }
        };
        let mut runs = pool::take_runs();
        let who = g.machine.accessor();
        let resolved = plan.runs(&memory, who, pool::TX_RUNS, |run| {
            runs.push(RawSlice::of_fragment(&run.fragment));
        });
        let result = if resolved.is_ok() {
            qp.late.begin();
            drop(g);
            // A part that was cut short by the number of runs is continued in the same segment.
            let end = plan.ends_segment()
                && runs.iter().map(RawSlice::len).sum::<usize>() == plan.together();
            // SAFETY: the module's invariant; `plan` is ours and `memory` is locked.
            let result = unsafe { link.stream.send_vectored_raw(&runs, end, false) };
            if let (Some(flow), Ok(n)) = (&link.flow, &result) {
                // SAFETY: as above; the recorder only reads.
                unsafe { flow.sent_raw(&runs, *n) };
            }
            plan.release(&memory);
            after.unused |= memory.take_unused();
            // Done first: the thread that holds the state may be waiting for the memory table.
            drop(memory);
            g = qp.state.lock();
            if let (Ok(n), true) = (&result, g.is_linked(&link)) {
                g.machine
                    .tx_written(&mut plan, *n, &mut DriveHost::new(qp, after));
            }
            late::deliver(qp, after);
            if !g.is_linked(&link) {
                // The connection has ended meanwhile. The rest of its plan must not be sent on the next one.
                pool::give_runs(runs);
                pool::give_tx(plan);
                return g;
            }
            result
        } else {
            drop(memory);
            // The program deregistered memory that a request was sending from: the stream cannot go on.
            Err(std::io::Error::from_raw_os_error(libc::EFAULT))
        };
        pool::give_runs(runs);
        match result {
            Ok(_) => {
                if plan.is_empty() {
                    pool::give_tx(plan);
                } else {
                    g.stalled = Some(plan);
                }
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                g.stalled = Some(plan);
                return g;
            }
            Err(error) => {
                tracing::debug!(qp = qp.num, %error, "send failed");
                pool::give_tx(plan);
                if error.raw_os_error() == Some(libc::EFAULT) {
                    g.machine.leave(&mut DriveHost::new(qp, after));
                } else if g.machine.is_connectionless() {
                    // What the peer sent before it left may still be there.
                    g.left.tx = true;
                } else {
                    broken(qp, &mut g, after);
                }
                return g;
            }
        }
        if g.link.is_none() || !(g.machine.wants_tx() || g.stalled.is_some()) {
            return g;
        }
    }
}

/// Plans of large messages between two looks at the size of segments, where FPDUs need not begin with them.
const MSS_PLANS: u8 = 16;

/// Returns `true` if the size of segments should be looked at. For FPDUs aligned with segments it has to be right in every plan.
fn wants_mss(g: &mut Guarded) -> bool {
    if g.machine.alignment().is_some() {
        return true;
    }
    if !g.machine.is_segmenting() {
        return false;
    }
    g.mss_age = g.mss_age.wrapping_add(1) % MSS_PLANS;
    g.mss_age == 1
}

/// Segments become smaller or larger when the path changes, or the peer's window opens, and FPDUs with them.
fn follow_mss(qp: &QpInner, g: &mut Guarded, link: &Link) {
    let Ok(mss) = link.stream.mss() else { return };
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

/// The stream is broken. Octets that the peer sent before may still be there: a Terminate tells why.
pub(super) fn broken(qp: &Arc<QpInner>, g: &mut MutexGuard<'_, Guarded>, after: &mut After) {
    if g.link.is_none() {
        return;
    }
    if g.machine.is_connectionless() {
        // The program knows of no stream that could break, only of a peer that does not answer.
        g.machine.blame_absent_peer();
    }
    g.machine.stream_failed(&mut DriveHost::new(qp, after));
    qp.drop_link(g, after);
}

/// Reads until nothing is there or the budget is spent.
pub(super) fn rx(qp: &Arc<QpInner>) {
    let mut after = After::default();
    let mut g = qp.state.lock();
    if g.link.is_none() || g.left.rx {
        return;
    }
    let mut left = RX_BUDGET;
    let mut resumed = false;
    let (mut more, mut unfinished) = (false, false);
    loop {
        if unfinished {
            // Whoever waits for the state has it first. Only this thread receives, so nothing comes in between.
            MutexGuard::bump(&mut g);
        }
        let Some(link) = g.link.clone() else { break };
        match g.machine.rx_interest() {
            RxInterest::Read if unfinished => {
                unfinished = process(qp, &mut g, &mut after) == Some(RxStatus::More);
                resumed = true;
                if more || unfinished || g.machine.rx_interest() != RxInterest::Read {
                    continue;
                }
                break;
            }
            RxInterest::Read => {}
            RxInterest::Held => {
                let Some(status) = resume(qp, &mut g, &mut after) else {
                    break;
                };
                // It has completed something, and the socket has to be watched again.
                resumed = true;
                unfinished = status == RxStatus::More;
                continue;
            }
            RxInterest::Discard => {
                g = discard(qp, g, &mut after);
                break;
            }
            RxInterest::Waits => {
                let status = process(qp, &mut g, &mut after);
                if matches!(status, None | Some(RxStatus::Waits)) {
                    break;
                }
                resumed = true;
                unfinished = status == Some(RxStatus::More);
                continue;
            }
            RxInterest::None => break,
        }
        let Ok(mut buffer) = g.partial.take().map_or_else(pool::take_rx, Ok) else {
            g.machine.abort(&mut DriveHost::new(qp, &mut after));
            break;
        };
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
        // A first look without result changes nothing, so it needs no further work, only what its early end needs.
        let first = left == RX_BUDGET && !resumed;
        let waiting_tx = first && g.machine.wants_tx();
        drop(g);
        // SAFETY: the module's invariant; `buffer` is ours and `memory` is locked.
        let result = unsafe { link.stream.recv_vectored_raw(&runs) };
        if let Some(memory) = &memory {
            plan.release(memory);
            after.unused |= memory.take_unused();
        }
        let nothing = |e: &std::io::Error| e.kind() == ErrorKind::WouldBlock;
        if first && result.as_ref().is_err_and(nothing) {
            drop(memory);
            pool::give_runs(runs);
            keep_part(qp, &link, buffer);
            if after.unused {
                qp.ctx.memory_unused();
            }
            if waiting_tx {
                qp.drive_tx();
            }
            return;
        }
        if let (Some(flow), Ok(n @ 1..)) = (&link.flow, &result) {
            // SAFETY: as above; the recorder reads what has just been written there.
            unsafe { flow.received_raw(&runs, *n) };
        }
        pool::give_runs(runs);
        // Done first: the thread that holds the state may be waiting for the memory table.
        drop(memory);
        g = qp.state.lock();
        if !g.is_linked(&link) {
            // The connection has ended meanwhile; its octets do not belong to the next one.
            pool::give_rx(buffer);
            break;
        }
        more = false;
        match result {
            // The request that the peer has answered by closing may still be in the system call: it is done, and must not be flushed. The
            // end is still there at the next look.
            Ok(0) if qp.late.is_sending() => {}
            Ok(0) if peer_left(qp, &mut g, &buffer) => {}
            Ok(0) => {
                g.eof = true;
                g.machine
                    .rx_eof(&mut buffer, &mut DriveHost::new(qp, &mut after));
            }
            Ok(n) => {
                more = n == plan.room() && left > n;
                left = left.saturating_sub(n);
                let memory = qp.ctx.memory.read();
                let status = {
                    let mut host = DriveHost::new(qp, &mut after);
                    let mut env = Env {
                        memory: &memory,
                        crc32c: crc32c(),
                        host: &mut host,
                    };
                    g.machine.rx_filled(&mut buffer, &mut plan, n, &mut env)
                };
                after.unused |= memory.take_unused();
                drop(memory);
                unfinished = status == RxStatus::More;
                if status == RxStatus::Held {
                    held(qp, &mut g, &mut after);
                }
            }
            Err(e) if nothing(&e) => {}
            Err(error) => {
                tracing::debug!(qp = qp.num, %error, "receive failed");
                let left =
                    error.raw_os_error() != Some(libc::EFAULT) && peer_left(qp, &mut g, &buffer);
                buffer.clear();
                if left {
                    // Nothing that the program sees.
                } else if error.raw_os_error() == Some(libc::EFAULT) {
                    g.machine.abort(&mut DriveHost::new(qp, &mut after));
                } else {
                    broken(qp, &mut g, &mut after);
                }
            }
        }
        put_back(&mut g, buffer);
        let held_but_posted = g.machine.rx_interest() == RxInterest::Held;
        if !more && !held_but_posted && !unfinished {
            break;
        }
    }
    let mut wants_tx = g.machine.wants_tx();
    qp.settle(&mut g, &mut after);
    drop(g);
    if wants_tx && after.events.contains(Events::FATAL) {
        // The Terminate is sent before the program hears of the end and destroys the queue pair.
        qp.drive_tx();
        wants_tx = false;
    }
    after.run(qp);
    if wants_tx {
        qp.drive_tx();
    }
}

/// A part of an FPDU stays with the queue pair.
#[inline]
fn put_back(g: &mut Guarded, buffer: Box<RxBuffer>) {
    if buffer.is_empty() {
        pool::give_rx(buffer);
    } else {
        g.partial = Some(buffer);
    }
}

/// The same without the lock, which is taken only if there is such a part, and the connection's end may have come before that.
#[inline]
fn keep_part(qp: &QpInner, link: &Arc<Link>, buffer: Box<RxBuffer>) {
    let state = (!buffer.is_empty()).then(|| qp.state.lock());
    match state.filter(|g| g.is_linked(link)) {
        Some(mut g) => g.partial = Some(buffer),
        None => pool::give_rx(buffer),
    }
}

/// The stream has come to its end. Returns `true` if the program must not see it.
fn peer_left(qp: &Arc<QpInner>, g: &mut MutexGuard<'_, Guarded>, buffer: &RxBuffer) -> bool {
    let left = g.machine.peer_left(buffer);
    if left {
        left::leave(qp, g);
    }
    left
}

/// A Send has met no receive: its time begins.
fn held(qp: &Arc<QpInner>, g: &mut MutexGuard<'_, Guarded>, after: &mut After) {
    if g.held_since != 0 {
        return;
    }
    let now = now_ns();
    g.held_since = now;
    tracing::trace!(qp = qp.num, "receiver not ready");
    g.machine
        .on_time(Time::from_nanos(now), &mut DriveHost::new(qp, after));
}

/// Offers a held Send again. Returns `None` if there is still no receive.
fn resume(
    qp: &Arc<QpInner>,
    g: &mut MutexGuard<'_, Guarded>,
    after: &mut After,
) -> Option<RxStatus> {
    let ready = match &qp.srq {
        Some(srq) => !srq.inner.wait(qp),
        None if qp.xrc.is_some() => qp.xrc.as_ref().is_some_and(|target| !target.wait(qp)),
        None => g.machine.receives_posted() > 0,
    };
    if !ready || g.partial.is_none() {
        return None;
    }
    g.end_hold();
    process(qp, g, after)
}

/// Processes again what has been received. Returns `None` if there is no memory for that.
fn process(
    qp: &Arc<QpInner>,
    g: &mut MutexGuard<'_, Guarded>,
    after: &mut After,
) -> Option<RxStatus> {
    // An STag that the peer has invalidated may be all that is left to do, and then there is no part of an FPDU.
    let mut buffer = g.partial.take().map_or_else(pool::take_rx, Ok).ok()?;
    let mut plan = pool::rx_plan();
    let memory = qp.ctx.memory.read();
    let status = {
        let mut host = DriveHost::new(qp, after);
        let mut env = Env {
            memory: &memory,
            crc32c: crc32c(),
            host: &mut host,
        };
        g.machine.rx_filled(&mut buffer, &mut plan, 0, &mut env)
    };
    after.unused |= memory.take_unused();
    drop(memory);
    if status == RxStatus::Held {
        held(qp, g, after);
    }
    put_back(g, buffer);
    Some(status)
}

/// The stream has an error or is closed in both directions. Reading tells what it is, but a held stream is not read, and
/// would be reported for ever. The report may come late, when the queue pair has been reset and has another stream already.
pub(super) fn hung_up(qp: &Arc<QpInner>) {
    let mut after = After::default();
    let mut g = qp.state.lock();
    let held = g.machine.rx_interest() == RxInterest::Held;
    if held && g.link.as_ref().is_some_and(|l| l.stream.is_hung_up()) {
        broken(qp, &mut g, &mut after);
        qp.settle(&mut g, &mut after);
    }
    drop(g);
    after.run(qp);
}

/// The queue pair is done with this stream: throw away what still comes, until the peer closes.
fn discard<'a>(
    qp: &'a Arc<QpInner>,
    g: MutexGuard<'a, Guarded>,
    after: &mut After,
) -> MutexGuard<'a, Guarded> {
    let Some(link) = g.link.clone() else { return g };
    debug_assert_eq!(g.machine.state(), State::Error);
    drop(g);
    let mut sink = [0u8; 16 * 1024];
    let mut end = None;
    for _ in 0..RX_BUDGET / sink.len() {
        match link.stream.recv(&mut sink) {
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
    if !g.is_linked(&link) {
        return g;
    }
    match end {
        Some(true) => {
            g.eof = true;
            if let Ok(mut buffer) = g.partial.take().map_or_else(pool::take_rx, Ok) {
                g.machine
                    .rx_eof(&mut buffer, &mut DriveHost::new(qp, after));
                pool::give_rx(buffer);
            }
        }
        Some(false) => broken(qp, &mut g, after),
        None => {}
    }
    g
}
