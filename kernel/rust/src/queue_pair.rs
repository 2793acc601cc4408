//! Queue pairs: create, modify, post, close, free.
//!
//! Invariant: pointers come from C under the contract of `kernel/engine.h`: a queue pair was
//! returned by `rk_qp_new`, and C holds the queue pair's lock during each call with it. Runs that a
//! call returns stay valid until the call that reports them as written or filled; C may use them
//! without the lock.

use alloc::boxed::Box;
use core::ffi::{c_int, c_void};
use core::ptr::null_mut;
use core::slice;
use core::time::Duration;

use iwarp_rnic::memory::{ListedPages, Stag};
use iwarp_rnic::qp::{
    CreateError, Events, QpConfig, QueuePair, ReceiverNotReady, Run, State, StreamConfig,
    StreamTimes, StreamWish,
};
use iwarp_rnic::{Access, FastRegister, RecvWr, SendFlags, SendOp, SendWr, Sge, Time, Work};

use crate::area::Lent;
use crate::error::{EINVAL, errno_or_zero};
use crate::runtime::{Owner, free_object, new_object};
use crate::startup::Mpa;

/// A queue pair, owned by C.
#[derive(Debug)]
pub struct Qp {
    pub(crate) machine: Box<QueuePair>,
    pub(crate) owner: Owner,
    /// Present while the queue pair sends or receives.
    pub(crate) area: Option<Lent>,
}

/// A run of bytes: `struct kvec`.
#[derive(Debug)]
#[repr(C)]
pub struct Kvec {
    base: *mut u8,
    len: usize,
}

impl Kvec {
    pub(crate) const EMPTY: Self = Self {
        base: null_mut(),
        len: 0,
    };

    pub(crate) const fn from_run(run: &Run<'_>) -> Self {
        Self {
            base: run.fragment.as_ptr(),
            len: run.fragment.len(),
        }
    }
}

/// `RK_HOLD_NOT`: a Send that finds no receive ends the connection.
const HOLD_NOT: u32 = u32::MAX;

/// Configuration of a queue pair: `struct rk_qp_config`.
#[derive(Debug)]
#[repr(C)]
pub struct Config {
    qp_num: u32,
    pd: u32,
    max_send_wr: u32,
    max_recv_wr: u32,
    /// Maximum number of completions that a call writes; zero for the default.
    most_completions: u32,
    /// How long a Send waits for a receive, in milliseconds; zero for the default, or [`HOLD_NOT`].
    hold_ms: u32,
    max_sge: u32,
    max_inline: u32,
    max_ird: u16,
    max_ord: u16,
    signal_all: u32,
    /// The engine takes receives by `iwarp_take_receive`.
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
    /// Responder: time limit for the initiator's first FPDU in milliseconds; zero for none.
    first_fpdu_ms: u32,
}

/// A send work request: `struct rk_send`.
#[derive(Debug)]
#[repr(C)]
pub struct Send {
    wr_id: u64,
    remote_addr: u64,
    /// Length of a fast registration in bytes.
    len: u64,
    sges: *const Sge,
    num_sge: u32,
    op: u32,
    flags: u32,
    rkey: u32,
    /// Access rights of a fast registration.
    access: u32,
    /// Offset of a fast registration in its first page.
    first: u32,
    /// Number of pages of a fast registration.
    num_pages: u32,
    page_shift: u32,
    /// Inline data, with the flag `INLINE`.
    inline_data: *const u8,
    inline_len: u32,
    /// Immediate data.
    imm: u32,
}

impl Send {
    /// # Safety
    /// The region's list contains `num_pages` pages of this size, which stay valid as long as the
    /// registration.
    unsafe fn fast_register(&self, access: Access) -> FastRegister {
        FastRegister {
            new_stag: Stag(self.rkey),
            offset: u64::from(self.first),
            len: self.len,
            iova: self.remote_addr,
            access,
            // SAFETY: guaranteed by the caller. The queue pair refuses a request without pages.
            pages: unsafe { ListedPages::new(self.num_pages, self.page_shift) },
        }
    }
}

// Elements and runs have the same layout in C: `struct rk_sge` and `struct kvec`.
const _: () = assert!(size_of::<Sge>() == 16 && size_of::<Kvec>() == 16);

/// Creates a queue pair, whose completions are passed to C with `owner`. Returns null if a size is
/// not valid or there is no memory.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_qp_new(config: &Config, owner: *mut c_void) -> *mut Qp {
    build(config, owner).map_or(null_mut(), |qp| new_object(move || qp))
}

impl Config {
    fn to_engine(&self) -> QpConfig {
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
        config.receiver_not_ready = receiver_not_ready(self.hold_ms);
        config
    }
}

/// Converts C's `hold_ms`.
fn receiver_not_ready(hold_ms: u32) -> ReceiverNotReady {
    match (milliseconds(hold_ms), ReceiverNotReady::default()) {
        (Some(_), _) if hold_ms == HOLD_NOT => ReceiverNotReady::Terminate,
        (Some(limit), ReceiverNotReady::Hold { after_close, .. }) => ReceiverNotReady::Hold {
            limit,
            after_close: after_close.min(limit),
        },
        (_, default) => default,
    }
}

/// Converts a number of milliseconds from C, where zero means none.
fn milliseconds(ms: u32) -> Option<Duration> {
    (ms != 0).then(|| Duration::from_millis(u64::from(ms)))
}

fn build(config: &Config, owner: *mut c_void) -> Result<Qp, CreateError> {
    Ok(Qp {
        machine: QueuePair::boxed(config.to_engine())?,
        owner: Owner::new(owner)?,
        area: None,
    })
}

/// Frees a queue pair.
///
/// # Safety
/// `qp` is null or came from [`rk_qp_new`], and has no area.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rk_qp_free(qp: *mut Qp) {
    // SAFETY: guaranteed by the caller.
    unsafe { free_object(qp) }
}

/// Starts a stream without MPA start-up, at time `now` in nanoseconds. Returns 0 or an error
/// number.
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

/// Returns when to call `rk_on_time`, in nanoseconds, or `RK_NEVER` if no timer is set.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_poll_at(qp: &Qp) -> u64 {
    qp.machine.poll_at().map_or(u64::MAX, Time::as_nanos)
}

/// Reports that the peer has closed its direction while a Send waits for a receive.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_sender_closed(qp: &mut Qp) {
    qp.machine.sender_closed();
}

/// Handles the timers that have expired at time `now`.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_on_time(qp: &mut Qp, now: u64) {
    qp.machine.on_time(Time::from_nanos(now), &mut qp.owner);
}

/// Starts a stream after MPA start-up, at time `now` in nanoseconds. Returns 0 or an error number.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_qp_begin(qp: &mut Qp, mpa: &Mpa, emss: u32, now: u64) -> c_int {
    let Some(stream) = mpa.stream(emss) else {
        return EINVAL;
    };
    let now = Time::from_nanos(now);
    qp.machine.start(stream, now).map_or(EINVAL, |()| 0)
}

/// Changes the state (`enum rk_state`) on behalf of a program. Returns 0 or an error number.
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

/// Reports that the stream failed: reset, time-out, or an error of the system.
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

/// The number of counters of [`rk_qp_counters`].
const COUNTERS: usize = 16;

/// Adds the counters of a queue pair to `totals`, in the order of
/// [`Counters::named`](iwarp_rnic::counters::Counters).
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_qp_counters(qp: &Qp, totals: &mut [u64; COUNTERS]) {
    let counters: [_; COUNTERS] = qp.machine.counters().named();
    for (total, (_, count)) in totals.iter_mut().zip(counters) {
        *total = total.wrapping_add(count);
    }
}

/// Begins a graceful close: queued requests are sent before.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_qp_close(qp: &mut Qp) {
    qp.machine.close(&mut qp.owner);
}

/// Returns `true` if the stream is being ended, until `rk_qp_stream_gone`.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_qp_is_ending(qp: &Qp) -> bool {
    qp.machine.is_ending()
}

/// Returns `true` if this side has shut down its direction, until `rk_qp_stream_gone`.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_qp_is_shut_down(qp: &Qp) -> bool {
    qp.machine.is_shut_down()
}

/// Returns `true` if the peer has closed its direction, until `rk_qp_stream_gone`.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_qp_peer_has_closed(qp: &Qp) -> bool {
    qp.machine.peer_has_closed()
}

/// Returns what C is to do with the stream, as `enum rk_wish`.
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

/// Reports that the stream is closed.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_qp_stream_gone(qp: &mut Qp) {
    // The next stream must not continue with data of this stream.
    if let Some(area) = &mut qp.area {
        area.clear();
    }
    qp.machine.stream_gone(&mut qp.owner);
}

/// # Safety
/// `sges` points to `count` elements that are readable for `'a`, or `count` is 0.
unsafe fn sge_slice<'a>(sges: *const Sge, count: u32) -> &'a [Sge] {
    if count == 0 {
        return &[];
    }
    // SAFETY: guaranteed by the caller.
    unsafe { slice::from_raw_parts(sges, count as usize) }
}

/// Posts a send work request. Returns 0 or an error number.
///
/// # Safety
/// The elements of the request and its inline data are readable for the call. The pages of a fast
/// registration are in the list of its region, and stay valid as long as the registration.
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
        // SAFETY: guaranteed by the caller.
        5 => SendOp::FastRegister(unsafe { send.fast_register(access) }),
        6 => SendOp::ReadInv { remote_addr, rkey },
        7 => SendOp::WriteImm {
            remote_addr,
            rkey,
            imm: send.imm,
        },
        8 => SendOp::SendImm(send.imm),
        _ => return EINVAL,
    };
    // SAFETY: guaranteed by the caller.
    let sges = unsafe { sge_slice(send.sges, send.num_sge) };
    let inline_data = if flags.contains(SendFlags::INLINE) && send.inline_len > 0 {
        // SAFETY: guaranteed by the caller.
        unsafe { slice::from_raw_parts(send.inline_data, send.inline_len as usize) }
    } else {
        &[]
    };
    let request = SendWr {
        inline: &[inline_data],
        ..SendWr::new(send.wr_id, op, sges).with_flags(flags)
    };
    errno_or_zero(qp.machine.post_send(&request, &mut qp.owner))
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
    // SAFETY: guaranteed by the caller.
    let sges = unsafe { sge_slice(sges, count) };
    let request = RecvWr { wr_id, sges };
    errno_or_zero(qp.machine.post_recv(&request, &mut qp.owner))
}

// The engine's events have the same bits as `enum rk_event` of engine.h.
const _: () = assert!(
    Events::SQ_DRAINED.bits() == 2
        && Events::FATAL.bits() == 4
        && Events::ACCESS_ERROR.bits() == 8
        && Events::REQUEST_ERROR.bits() == 16
        && Events::LAST_WQE.bits() == 32
        && Events::MESSAGE_IN_RTR.bits() == 256
);

/// Returns the events since the last call.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_take_events(qp: &mut Qp) -> u32 {
    qp.machine.take_events().bits()
}

/// Writes a limited number of pending completions. Returns `true` if there are more.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_complete_due(qp: &mut Qp) -> bool {
    qp.machine.completions_due() && qp.machine.complete_due(&mut qp.owner) == Work::More
}
