//! A queue pair with its plans and its staging.
//!
//! Invariant: pointers come from C under the contract of `kernel/engine.h`: a queue pair is what `rk_qp_new` has returned, and one call
//! at a time has it, because C takes the queue pair's lock around each. Runs that a call hands out stay valid until the call
//! that reports them as written or filled; C may use them without the lock.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ffi::{c_int, c_void};
use core::ptr::null_mut;
use core::slice;
use core::time::Duration;

use iwarp_rnic::memory::{ListedPages, Stag};
use iwarp_rnic::qp::{
    CreateError, Env, QpConfig, QueuePair, ReceiverNotReady, Run, RxBuffer, RxInterest, RxPlan,
    RxSizes, RxStatus, State, StreamConfig, StreamTimes, StreamWish, TxFill, TxPlan,
};
use iwarp_rnic::{Access, FastRegister, RecvWr, SendFlags, SendOp, SendWr, Sge, Time, Work};

use crate::device::Device;
use crate::error::{EFAULT, EINVAL, EPROTO, code};
use crate::runtime::{CRC32C, Owner, place, remove};
use crate::startup::Mpa;

/// Runs of one plan for one call of the socket.
const RUNS: usize = 512;
/// Runs of a plan for receiving.
const RX_RUNS: usize = 64;
/// Each queue pair has its own staging: as little as takes any FPDU, and 32 KiB for one read.
const STAGING: RxSizes = RxSizes {
    staging: 0,
    read_max: 32 * 1024,
};

/// A queue pair as C has it.
#[derive(Debug)]
pub struct Qp {
    machine: Box<QueuePair>,
    owner: Owner,
    staging: Box<RxBuffer>,
    rx: RxPlan,
    tx: Box<TxPlan>,
    tx_runs: Vec<Kvec>,
    rx_runs: Vec<Kvec>,
}

/// A run of octets: `struct kvec`.
#[derive(Debug)]
#[repr(C)]
pub struct Kvec {
    base: *mut u8,
    len: usize,
}

impl Kvec {
    const NOTHING: Self = Self {
        base: null_mut(),
        len: 0,
    };

    const fn of(run: &Run<'_>) -> Self {
        Self {
            base: run.fragment.as_ptr(),
            len: run.fragment.len(),
        }
    }
}

/// Makes room for `count` runs.
fn room(count: usize) -> Result<Vec<Kvec>, CreateError> {
    let mut runs = Vec::new();
    runs.try_reserve_exact(count)
        .map_err(|_| CreateError::OutOfMemory)?;
    runs.resize_with(count, || Kvec::NOTHING);
    Ok(runs)
}

/// Sizes of a queue pair: `struct rk_qp_config`.
#[derive(Debug)]
#[repr(C)]
pub struct Config {
    qp_num: u32,
    pd: u32,
    max_send_wr: u32,
    max_recv_wr: u32,
    /// Most completions that a call writes; zero for the default.
    most_completions: u32,
    /// How long a Send waits for a receive, in milliseconds; zero for the default.
    hold_ms: u32,
    max_sge: u32,
    max_inline: u32,
    max_ird: u16,
    max_ord: u16,
    signal_all: u32,
    /// Receives are asked for by `iwarp_take_receive`.
    shared_receive: u32,
}

/// What MPA start-up has agreed on: `struct rk_stream`.
#[derive(Debug)]
#[repr(C)]
pub struct Stream {
    initiator: u32,
    crc: u32,
    markers: u32,
    ird: u16,
    ord: u16,
    emss: u32,
    /// As responder: how long the initiator's first FPDU may take, in milliseconds; zero for any time.
    first_fpdu_ms: u32,
}

/// A send work request: `struct rk_send`.
#[derive(Debug)]
#[repr(C)]
pub struct Send {
    wr_id: u64,
    remote_addr: u64,
    /// Octets of a fast registration.
    len: u64,
    sges: *const Sge,
    num_sge: u32,
    op: u32,
    flags: u32,
    rkey: u32,
    /// Rights of a fast registration.
    access: u32,
    /// The octet of the first page at which a fast registration begins.
    first: u32,
    /// How many pages a fast registration has.
    num_pages: u32,
    page_shift: u32,
    /// Octets that go with the request, if it is `INLINE`.
    inline_data: *const u8,
    inline_len: u32,
}

impl Send {
    /// # Safety
    /// The region's list has so many pages of this size, and they stay for the registration.
    unsafe fn fast_register(&self, access: Access) -> FastRegister {
        FastRegister {
            new_stag: Stag(self.rkey),
            offset: u64::from(self.first),
            len: self.len,
            iova: self.remote_addr,
            access,
            // SAFETY: the caller promises it. Without pages the queue pair refuses the request.
            pages: unsafe { ListedPages::new(self.num_pages, self.page_shift) },
        }
    }
}

// An element and a run are passed as they are: `struct rk_sge` and `struct kvec`.
const _: () = assert!(size_of::<Sge>() == 16 && size_of::<Kvec>() == 16);

/// Makes a queue pair, whose completions name `owner`. Returns null if a size is not valid or there is no memory.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_qp_new(config: &Config, owner: *mut c_void) -> *mut Qp {
    make(config, owner).map_or(null_mut(), |qp| place(move || qp))
}

impl Config {
    fn of_engine(&self) -> QpConfig {
        let mut config = QpConfig {
            qp_num: self.qp_num,
            pd: self.pd,
            max_send_wr: self.max_send_wr,
            max_recv_wr: self.max_recv_wr,
            max_send_sge: self.max_sge,
            max_recv_sge: self.max_sge,
            max_inline: self.max_inline,
            max_ird: self.max_ird,
            max_ord: self.max_ord,
            signal_all: self.signal_all != 0,
            shared_receive: self.shared_receive != 0,
            ..QpConfig::default()
        };
        if self.most_completions != 0 {
            config.budget.completions = self.most_completions;
        }
        if let Some(wait) = milliseconds(self.hold_ms) {
            config.receiver_not_ready = ReceiverNotReady::Hold {
                limit: wait,
                after_close: wait,
            };
        }
        config
    }
}

/// A time that C has given, of which zero means none.
fn milliseconds(wait: u32) -> Option<Duration> {
    (wait != 0).then(|| Duration::from_millis(u64::from(wait)))
}

fn make(config: &Config, owner: *mut c_void) -> Result<Qp, CreateError> {
    Ok(Qp {
        machine: QueuePair::boxed(config.of_engine())?,
        owner: Owner::new(owner)?,
        staging: RxBuffer::with(STAGING)?,
        rx: RxPlan::new(RX_RUNS),
        tx: TxPlan::new()?,
        tx_runs: room(RUNS)?,
        rx_runs: room(RX_RUNS)?,
    })
}

/// Frees a queue pair.
///
/// # Safety
/// `qp` is null or came from [`rk_qp_new`].
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rk_qp_free(qp: *mut Qp) {
    // SAFETY: the caller promises it.
    unsafe { remove(qp) }
}

/// Hands over a stream after MPA start-up, at time `now` in nanoseconds. Returns 0 or an error number.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_qp_start(qp: &mut Qp, stream: &Stream, now: u64) -> c_int {
    let stream = StreamConfig {
        initiator: stream.initiator != 0,
        crc: stream.crc != 0,
        markers_tx: stream.markers != 0,
        markers_rx: stream.markers != 0,
        ird: stream.ird,
        ord: stream.ord,
        rtr: None,
        rtr_send_expected: false,
        emss: stream.emss,
        times: StreamTimes {
            first_fpdu: milliseconds(stream.first_fpdu_ms),
            ..StreamTimes::NONE
        },
    };
    let now = Time::from_nanos(now);
    qp.machine.start(stream, now).map_or(EINVAL, |()| 0)
}

/// Returns when `rk_on_time` has something to do, in nanoseconds; the largest number if at no time.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_poll_at(qp: &Qp) -> u64 {
    qp.machine.poll_at().map_or(u64::MAX, Time::as_nanos)
}

/// Tells that the peer has closed its direction behind a Send that waits for a receive.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_sender_closed(qp: &mut Qp) {
    qp.machine.sender_closed();
}

/// Does what is due at time `now`.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_on_time(qp: &mut Qp, now: u64) {
    qp.machine.on_time(Time::from_nanos(now), &mut qp.owner);
}

/// Hands over a stream whose start-up is complete, at time `now` in nanoseconds. Returns 0 or an error number.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_qp_begin(qp: &mut Qp, mpa: &Mpa, emss: u32, now: u64) -> c_int {
    let Some(stream) = mpa.stream(emss) else {
        return EINVAL;
    };
    let now = Time::from_nanos(now);
    qp.machine.start(stream, now).map_or(EINVAL, |()| 0)
}

/// Changes the state as a program asks for (`enum rk_state`). Returns 0 or an error number.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_qp_modify(qp: &mut Qp, to: c_int) -> c_int {
    let to = match to {
        0 => State::Reset,
        1 => State::Init,
        2 => State::Rtr,
        3 => State::Rts,
        4 => State::Sqd,
        6 => State::Error,
        _ => return EINVAL,
    };
    qp.machine.modify(to, &mut qp.owner).map_or(EINVAL, |()| 0)
}

/// Reports that the stream broke: reset, time-out, or an error of the system.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_stream_failed(qp: &mut Qp) {
    qp.machine.stream_failed(&mut qp.owner);
}

/// Returns the state as `enum rk_state`.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_qp_state(qp: &Qp) -> c_int {
    match qp.machine.state() {
        State::Reset => 0,
        State::Init => 1,
        State::Rtr => 2,
        State::Rts => 3,
        State::Sqd => 4,
        State::Sqe => 5,
        State::Error => 6,
    }
}

/// What [`rk_qp_counters`] fills.
const COUNTERS: usize = 16;

/// Adds the counters of a queue pair to those in `totals`, in the order of [`Counters::named`](iwarp_rnic::counters::Counters).
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_qp_counters(qp: &Qp, totals: &mut [u64; COUNTERS]) {
    let counters: [_; COUNTERS] = qp.machine.counters().named();
    for (total, (_, count)) in totals.iter_mut().zip(counters) {
        *total = total.wrapping_add(count);
    }
}

/// Begins the graceful end: what is queued is sent first.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_qp_close(qp: &mut Qp) {
    qp.machine.close(&mut qp.owner);
}

/// Returns what should be done with the stream, as `enum rk_wish`.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_qp_wish(qp: &Qp) -> c_int {
    match qp.machine.stream_wish() {
        StreamWish::Keep => 0,
        StreamWish::ShutdownWrite => 1,
        StreamWish::Leave { cut: false, .. } => 2,
        StreamWish::Leave { cut: true, .. } | StreamWish::Abort => 3,
    }
}

/// Reports that the sending side of the stream is shut down.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_qp_shutdown_done(qp: &mut Qp) {
    qp.machine.shutdown_done(&mut qp.owner);
}

/// Reports that the stream has been taken away.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_qp_stream_gone(qp: &mut Qp) {
    qp.machine.stream_gone(&mut qp.owner);
}

/// # Safety
/// `sges` names `count` elements, or `count` is 0.
unsafe fn elements<'a>(sges: *const Sge, count: u32) -> &'a [Sge] {
    if count == 0 {
        return &[];
    }
    // SAFETY: the caller promises it.
    unsafe { slice::from_raw_parts(sges, count as usize) }
}

/// Posts a send work request. Returns 0 or an error number.
///
/// # Safety
/// The elements of the request and its inline data are readable for the call. The pages of a fast registration are in the list of
/// its region, and stay until it has ended.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rk_post_send(qp: &mut Qp, send: &Send) -> c_int {
    let (remote_addr, rkey) = (send.remote_addr, send.rkey);
    let (Some(flags), Some(access)) = (
        SendFlags::from_bits(send.flags),
        Access::from_bits(send.access),
    ) else {
        return EINVAL;
    };
    let op = match send.op {
        0 => SendOp::Send,
        1 => SendOp::SendInv(rkey),
        2 => SendOp::Write { remote_addr, rkey },
        3 => SendOp::Read { remote_addr, rkey },
        4 => SendOp::LocalInvalidate { stag: Stag(rkey) },
        // SAFETY: the caller promises it.
        5 => SendOp::FastRegister(unsafe { send.fast_register(access) }),
        _ => return EINVAL,
    };
    // SAFETY: the caller promises it.
    let sges = unsafe { elements(send.sges, send.num_sge) };
    let octets = if flags.contains(SendFlags::INLINE) && send.inline_len > 0 {
        // SAFETY: the caller promises it.
        unsafe { slice::from_raw_parts(send.inline_data, send.inline_len as usize) }
    } else {
        &[]
    };
    let request = SendWr {
        inline: &[octets],
        ..SendWr::new(send.wr_id, op, sges).with_flags(flags)
    };
    code(qp.machine.post_send(&request, &mut qp.owner))
}

/// Posts a receive. Returns 0 or an error number.
///
/// # Safety
/// The elements are readable for the call.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rk_post_recv(
    qp: &mut Qp,
    wr_id: u64,
    sges: *const Sge,
    count: u32,
) -> c_int {
    // SAFETY: the caller promises it.
    let sges = unsafe { elements(sges, count) };
    let request = RecvWr { wr_id, sges };
    code(qp.machine.post_recv(&request, &mut qp.owner))
}

/// Writes some of the completions that are due. Returns `true` if there are more.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_complete_due(qp: &mut Qp) -> bool {
    qp.machine.completions_due() && qp.machine.complete_due(&mut qp.owner) == Work::More
}

/// Returns `true` if there is something to send.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_wants_tx(qp: &Qp) -> bool {
    !qp.tx.is_done() || qp.machine.wants_tx()
}

/// Fills the plan, if all of the last one is written. Returns `enum rk_fill`.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_tx_fill(qp: &mut Qp, device: &Device) -> c_int {
    if !qp.tx.is_done() {
        return 1;
    }
    let mut env = Env {
        memory: &device.table,
        crc32c: CRC32C,
        host: &mut qp.owner,
    };
    match qp.machine.tx_fill(&mut qp.tx, &mut env) {
        TxFill::Idle => 0,
        TxFill::Ready => 1,
        TxFill::Memory => 2,
        TxFill::More => 3,
    }
}

/// Carries out the request that needs the memory table for itself.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_tx_memory(qp: &mut Qp, device: &mut Device) {
    qp.machine.tx_memory(&mut device.table, &mut qp.owner);
}

/// Hands out the runs of the plan that are to be written together. Returns how many there are, or an error number.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_tx_runs(qp: &mut Qp, device: &Device, runs: &mut *const Kvec) -> c_int {
    let who = qp.machine.accessor();
    let mut count = 0;
    let mut slots = qp.tx_runs.iter_mut();
    let visit = |run: Run<'_>| {
        if let Some(slot) = slots.next() {
            *slot = Kvec::of(&run);
            count += 1;
        }
    };
    match qp.tx.runs(&device.table, who, RUNS, visit) {
        Ok(()) => {
            *runs = qp.tx_runs.as_ptr();
            count
        }
        Err(_) => EFAULT,
    }
}

/// Reports that the socket took so many octets of the runs. The memory that they named is not used any more.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_tx_written(qp: &mut Qp, device: &Device, octets: usize) {
    qp.tx.release(&device.table);
    qp.machine.tx_written(&mut qp.tx, octets, &mut qp.owner);
}

/// Returns `true` if the queue pair waits until nobody uses memory that is being invalidated or registered.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_waits_for_memory(qp: &Qp) -> bool {
    qp.machine.waits_for_memory()
}

/// Lets a queue pair that waits for memory try again.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_retry_memory(qp: &mut Qp) {
    qp.machine.retry_memory();
}

/// Hands out the runs to which the next octets should be read. Returns how many there are.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_rx_plan(qp: &mut Qp, device: &Device, runs: &mut *const Kvec) -> c_int {
    let mut count = 0;
    let mut slots = qp.rx_runs.iter_mut();
    let visit = |run: Run<'_>| {
        if let Some(slot) = slots.next() {
            *slot = Kvec::of(&run);
            count += 1;
        }
    };
    qp.machine
        .rx_plan(&mut qp.staging, &device.table, &mut qp.rx, visit);
    *runs = qp.rx_runs.as_ptr();
    count
}

/// Processes octets that were read to the runs. Returns `enum rk_rx` or an error number.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_rx_filled(qp: &mut Qp, device: &Device, mut octets: usize) -> c_int {
    let mut env = Env {
        memory: &device.table,
        crc32c: CRC32C,
        host: &mut qp.owner,
    };
    loop {
        let status = qp
            .machine
            .rx_filled(&mut qp.staging, &mut qp.rx, octets, &mut env);
        // C hands over less at a time than the staging holds: that is the limit.
        if status != RxStatus::More {
            return number(status);
        }
        octets = 0;
    }
}

/// Processes octets that are in memory. Says in `taken` how many of them are done with, and returns `enum rk_rx` or an error number.
///
/// # Safety
/// `at` names `len` readable octets, if any.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rk_rx_input(
    qp: &mut Qp,
    device: &Device,
    at: *const u8,
    len: usize,
    taken: &mut usize,
) -> c_int {
    let mut env = Env {
        memory: &device.table,
        crc32c: CRC32C,
        host: &mut qp.owner,
    };
    let mut octets: &[u8] = match len {
        0 => &[],
        // SAFETY: the caller promises it.
        _ => unsafe { slice::from_raw_parts(at, len) },
    };
    *taken = 0;
    loop {
        let (count, status) = qp.machine.rx_input(octets, &mut qp.staging, &mut env);
        *taken = taken.wrapping_add(count);
        // A packet is the limit.
        if status != RxStatus::More {
            return number(status);
        }
        octets = octets.get(count..).unwrap_or(&[]);
    }
}

/// Returns whether the stream should be read now, as `enum rk_rx_interest`.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_rx_interest(qp: &Qp) -> c_int {
    match qp.machine.rx_interest() {
        RxInterest::Read => 0,
        RxInterest::Held | RxInterest::Waits => 1,
        RxInterest::Discard => 2,
        RxInterest::None => 3,
    }
}

const fn number(status: RxStatus) -> c_int {
    match status {
        RxStatus::Ok | RxStatus::More => 0,
        RxStatus::Held => 1,
        RxStatus::Waits => 2,
        RxStatus::Failed => EPROTO,
    }
}

/// Reports that the peer has closed its direction, and that everything before that was read.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_rx_eof(qp: &mut Qp) {
    qp.machine.rx_eof(&mut qp.staging, &mut qp.owner);
}
