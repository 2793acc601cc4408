//! MPA start-up in both roles. C moves the bytes and keeps the timer; the engine decides what to
//! send and read, and enforces the time limits.
//!
//! Invariant: pointers come from C under the contract of `kernel/engine.h`: a start-up was returned
//! by `rk_mpa_new`, and C serializes the calls with it. Bytes that a call returns stay valid until
//! the next call that takes the start-up mutably.

use core::ffi::c_int;
use core::ptr::null_mut;
use core::slice;

use iwarp_proto::mpa::negotiate::{LocalParams, RtrSet};
use iwarp_proto::mpa::startup::NO_NEGOTIATION;
use iwarp_rnic::Time;
use iwarp_rnic::qp::{StreamConfig, StreamTimes};
use iwarp_rnic::startup::{Failure, Initiator, Limits, Outcome, Reading, Responder};

use crate::error::{EAGAIN, ECONNREFUSED, ECONNRESET, EINVAL, EPROTO, ETIMEDOUT};
use crate::runtime::{free_object, new_object};

const LIMITS: Limits = Limits::KERNEL;

/// One side of a start-up.
#[derive(Debug)]
pub struct Mpa {
    params: LocalParams,
    side: Side,
}

#[derive(Debug)]
enum Side {
    Initiator(Initiator),
    Responder(Responder),
}

/// The parameters of this side: `struct rk_mpa_params`.
#[derive(Debug)]
#[repr(C)]
pub struct Params {
    revision: u32,
    crc: u32,
    markers: u32,
    peer_to_peer: u32,
    ird: u16,
    ord: u16,
    max_ird: u16,
    max_ord: u16,
}

/// The contents of the peer's frame: `struct rk_mpa_peer`.
#[derive(Debug)]
#[repr(C)]
pub struct Peer {
    private_data: *const u8,
    private_data_len: u32,
    ird: u16,
    ord: u16,
}

impl Params {
    fn local(&self) -> LocalParams {
        LocalParams {
            revision: u8::try_from(self.revision).unwrap_or(2),
            crc: self.crc != 0,
            markers_rx: self.markers != 0,
            ird: self.ird,
            ord: self.ord,
            max_ird: self.max_ird,
            max_ord: self.max_ord,
            peer_to_peer: self.peer_to_peer != 0,
            rtr_offer: RtrSet::WRITE_READ,
            ird_ord_negotiate: true,
        }
    }
}

/// # Safety
/// `ptr` points to `len` bytes that are readable for `'a`, or `len` is 0.
unsafe fn byte_slice<'a>(ptr: *const u8, len: usize) -> &'a [u8] {
    if len == 0 {
        return &[];
    }
    // SAFETY: guaranteed by the caller.
    unsafe { slice::from_raw_parts(ptr, len) }
}

/// Begins a start-up. An initiator sends the private data in its request; a responder's time limit
/// starts at `now`. Returns null if there is no memory or the private data are too long.
///
/// # Safety
/// The private data are readable for the call.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rk_mpa_new(
    initiator: c_int,
    params: &Params,
    private_data: *const u8,
    len: usize,
    now: u64,
) -> *mut Mpa {
    let params = params.local();
    let side = if initiator != 0 {
        // SAFETY: guaranteed by the caller.
        match Initiator::new(params, unsafe { byte_slice(private_data, len) }, LIMITS) {
            Ok(initiator) => Side::Initiator(initiator),
            Err(_) => return null_mut(),
        }
    } else {
        Side::Responder(Responder::new(params, LIMITS, Time::from_nanos(now)))
    };
    new_object(move || Mpa { params, side })
}

/// Frees a start-up.
///
/// # Safety
/// `mpa` is null or came from [`rk_mpa_new`].
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rk_mpa_free(mpa: *mut Mpa) {
    // SAFETY: guaranteed by the caller.
    unsafe { free_object(mpa) }
}

/// Starts the time limit of an initiator's TCP connect.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_mpa_connecting(mpa: &mut Mpa, now: u64) {
    if let Side::Initiator(initiator) = &mut mpa.side {
        initiator.connecting(Time::from_nanos(now));
    }
}

/// Stores a pointer to an initiator's request in `frame`. Returns the length.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_mpa_request(mpa: &Mpa, frame: &mut *const u8) -> usize {
    let request = match &mpa.side {
        Side::Initiator(initiator) => initiator.request(),
        Side::Responder(_) => &[],
    };
    *frame = request.as_ptr();
    request.len()
}

/// Records that an initiator's request was sent. The time limit of the reply starts.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_mpa_request_sent(mpa: &mut Mpa, now: u64) {
    if let Side::Initiator(initiator) = &mut mpa.side {
        initiator.request_sent(Time::from_nanos(now));
    }
}

/// Records that the peer has closed instead of replying ([`Initiator::peer_closed`]). Returns 0 if
/// a request for another connection is ready, or `ECONNRESET` if all revisions were tried or part
/// of a reply has arrived.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_mpa_retry(mpa: &mut Mpa) -> c_int {
    match &mut mpa.side {
        Side::Initiator(initiator) => initiator.peer_closed().map_or_else(errno, |()| 0),
        Side::Responder(_) => ECONNRESET,
    }
}

/// Returns how many bytes to read next, or 0 if the peer's frame is complete or the start-up has
/// ended.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_mpa_missing(mpa: &Mpa) -> c_int {
    let wanted = match &mpa.side {
        Side::Initiator(initiator) => initiator.wanted(),
        Side::Responder(responder) => responder.wanted(),
    };
    c_int::try_from(wanted).unwrap_or(EPROTO)
}

/// Processes bytes from the peer, at most as many as [`rk_mpa_missing`] returned. Returns `EAGAIN`
/// if the peer's frame is incomplete. If it is complete, stores its contents in `peer`, and returns
/// 0, or `ECONNREFUSED` if the peer's program has rejected the connection. Returns another error
/// number if the start-up failed.
///
/// # Safety
/// `len` bytes at `ptr` are readable.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rk_mpa_push(
    mpa: &mut Mpa,
    ptr: *const u8,
    len: usize,
    peer: &mut Peer,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    let octets = unsafe { byte_slice(ptr, len) };
    match &mut mpa.side {
        Side::Initiator(initiator) => match initiator.received(octets) {
            Ok(received) => match received.outcome {
                Some(outcome) => peer.store_reply(initiator.private_data(), &outcome),
                None => EAGAIN,
            },
            Err(failure) => errno(failure),
        },
        Side::Responder(responder) => match responder.received(octets) {
            Ok(received) => match received.outcome {
                Some(()) => peer.store_request(responder, &mpa.params),
                None => EAGAIN,
            },
            Err(failure) => errno(failure),
        },
    }
}

/// Returns when to call [`rk_mpa_on_time`] next, in nanoseconds, or `U64_MAX` if no limit is
/// running.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_mpa_poll_at(mpa: &Mpa) -> u64 {
    let at = match &mpa.side {
        Side::Initiator(initiator) => initiator.poll_at(),
        Side::Responder(responder) => responder.poll_at(),
    };
    at.unwrap_or(Time::NEVER).as_nanos()
}

/// Checks the time limits. Returns 0, or `ETIMEDOUT` if a limit has expired. Push all bytes that
/// have arrived before this call.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_mpa_on_time(mpa: &mut Mpa, now: u64) -> c_int {
    let now = Time::from_nanos(now);
    let result = match &mut mpa.side {
        // No limit in LIMITS depends on whether TCP has acknowledged the request.
        Side::Initiator(initiator) => initiator.on_time(now, || true),
        Side::Responder(responder) => responder.on_time(now),
    };
    result.map_or_else(errno, |()| 0)
}

fn errno(failure: Failure) -> c_int {
    match failure {
        Failure::Closed { .. } => ECONNRESET,
        Failure::Frame(_) => EPROTO,
        Failure::TimedOut(_) => ETIMEDOUT,
    }
}

impl Peer {
    /// Stores the contents of a reply. Returns 0 or an error number.
    fn store_reply(&mut self, private_data: &[u8], outcome: &Outcome) -> c_int {
        self.store_private_data(private_data);
        match outcome {
            Outcome::Accepted(agreed) => {
                (self.ird, self.ord) = (agreed.ird, agreed.ord);
                0
            }
            Outcome::Rejected { .. } => ECONNREFUSED,
        }
    }

    /// Stores the contents of a request. Returns 0 or an error number.
    fn store_request(&mut self, responder: &Responder, ours: &LocalParams) -> c_int {
        let Some(request) = responder.request() else {
            return EINVAL;
        };
        self.store_private_data(responder.private_data());
        let offered_or = |offered: Option<u16>, own| {
            offered
                .filter(|&depth| depth != NO_NEGOTIATION)
                .unwrap_or(own)
        };
        self.ird = offered_or(request.peer_ird(), ours.ird);
        self.ord = offered_or(request.peer_ord(), ours.ord);
        0
    }

    fn store_private_data(&mut self, private_data: &[u8]) {
        self.private_data = private_data.as_ptr();
        self.private_data_len = u32::try_from(private_data.len()).unwrap_or(0);
    }
}

/// Accepts the peer's request with the program's depths, and stores a pointer to the reply in
/// `frame`. Returns the reply's length, or an error number.
///
/// # Safety
/// The private data are readable for the call.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rk_mpa_accept(
    mpa: &mut Mpa,
    ird: u16,
    ord: u16,
    private_data: *const u8,
    len: usize,
    frame: &mut *const u8,
) -> c_int {
    let params = LocalParams {
        ird,
        ord,
        ..mpa.params
    };
    let Side::Responder(responder) = &mut mpa.side else {
        return EINVAL;
    };
    // SAFETY: guaranteed by the caller.
    match responder.accept(&params, unsafe { byte_slice(private_data, len) }) {
        Ok(Some(_)) => store_frame(responder.reply(), frame),
        Ok(None) | Err(_) => EINVAL,
    }
}

/// Rejects the peer's request, and stores a pointer to the reply in `frame`. Returns the reply's
/// length, or an error number.
///
/// # Safety
/// The private data are readable for the call.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rk_mpa_reject(
    mpa: &mut Mpa,
    private_data: *const u8,
    len: usize,
    frame: &mut *const u8,
) -> c_int {
    let Side::Responder(responder) = &mut mpa.side else {
        return EINVAL;
    };
    // SAFETY: guaranteed by the caller.
    match responder.reject(unsafe { byte_slice(private_data, len) }) {
        true => store_frame(responder.reply(), frame),
        false => EINVAL,
    }
}

/// Stores a pointer to the reply in `frame`, and returns the length.
fn store_frame(reply: &[u8], frame: &mut *const u8) -> c_int {
    *frame = reply.as_ptr();
    c_int::try_from(reply.len()).unwrap_or(EINVAL)
}

impl Mpa {
    /// Returns the queue pair's stream parameters once both sides have agreed.
    pub(crate) fn stream(&self, emss: u32) -> Option<StreamConfig> {
        let (agreed, initiator) = match &self.side {
            Side::Initiator(initiator) => (initiator.agreed()?, true),
            Side::Responder(responder) => (responder.agreed()?, false),
        };
        Some(LIMITS.stream(agreed, initiator, emss, StreamTimes::REMINDERS))
    }
}
