//! MPA start-up in both roles. C moves the bytes and keeps the timer; the session decides what to
//! send and read, and has the time limits.
//!
//! Invariant: pointers come from C under the contract of `kernel/engine.h`: a start-up was returned
//! by `rk_mpa_new`, and calls with it exclude each other. Bytes that a call hands out stay valid
//! until the next call that takes the start-up mutably.

use core::ffi::c_int;
use core::ptr::null_mut;
use core::slice;

use iwarp_proto::mpa::negotiate::{LocalParams, RtrSet};
use iwarp_proto::mpa::startup::NO_NEGOTIATION;
use iwarp_rnic::Time;
use iwarp_rnic::qp::{StreamConfig, StreamTimes};
use iwarp_rnic::startup::{Failure, Initiator, Limits, Outcome, Reading, Responder};

use crate::error::{EAGAIN, ECONNREFUSED, ECONNRESET, EINVAL, EPROTO, ETIMEDOUT};
use crate::runtime::{place, remove};

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
/// `octets` names `len` octets that stay readable for the call, or `len` is 0.
unsafe fn octets<'a>(octets: *const u8, len: usize) -> &'a [u8] {
    if len == 0 {
        return &[];
    }
    // SAFETY: guaranteed by the caller.
    unsafe { slice::from_raw_parts(octets, len) }
}

/// Begins a start-up. An initiator's request carries the private data; a responder's time begins
/// now. Returns null if there is no memory or the data are too long.
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
        match Initiator::new(params, unsafe { octets(private_data, len) }, LIMITS) {
            Ok(initiator) => Side::Initiator(initiator),
            Err(_) => return null_mut(),
        }
    } else {
        Side::Responder(Responder::new(params, LIMITS, Time::from_nanos(now)))
    };
    place(move || Mpa { params, side })
}

/// Frees a start-up.
///
/// # Safety
/// `mpa` is null or came from [`rk_mpa_new`].
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rk_mpa_free(mpa: *mut Mpa) {
    // SAFETY: guaranteed by the caller.
    unsafe { remove(mpa) }
}

/// Starts the time limit of an initiator's TCP connect.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_mpa_connecting(mpa: &mut Mpa, now: u64) {
    if let Side::Initiator(initiator) = &mut mpa.side {
        initiator.connecting(Time::from_nanos(now));
    }
}

/// Hands out an initiator's request. Returns its length.
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

/// Records that an initiator's request is sent: the reply is next.
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
        Side::Initiator(initiator) => initiator.peer_closed().map_or_else(number, |()| 0),
        Side::Responder(_) => ECONNRESET,
    }
}

/// Returns how many octets to read next; 0 if none are wanted, because the peer's frame is
/// complete or the start-up is over.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_mpa_missing(mpa: &Mpa) -> c_int {
    let wanted = match &mpa.side {
        Side::Initiator(initiator) => initiator.wanted(),
        Side::Responder(responder) => responder.wanted(),
    };
    c_int::try_from(wanted).unwrap_or(EPROTO)
}

/// Takes bytes of the peer, at most as many as are missing. Returns `EAGAIN` if its frame is
/// incomplete. Otherwise stores its contents in `peer`, and returns 0, `ECONNREFUSED` if the peer's
/// program has rejected the connection, or another error number.
///
/// # Safety
/// `at` names `len` readable octets.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rk_mpa_push(
    mpa: &mut Mpa,
    at: *const u8,
    len: usize,
    peer: &mut Peer,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    let octets = unsafe { octets(at, len) };
    match &mut mpa.side {
        Side::Initiator(initiator) => match initiator.received(octets) {
            Ok(received) => match received.outcome {
                Some(outcome) => peer.answers(initiator.private_data(), &outcome),
                None => EAGAIN,
            },
            Err(failure) => number(failure),
        },
        Side::Responder(responder) => match responder.received(octets) {
            Ok(received) => match received.outcome {
                Some(()) => peer.asks(responder, &mpa.params),
                None => EAGAIN,
            },
            Err(failure) => number(failure),
        },
    }
}

/// Returns when to call [`rk_mpa_on_time`] next, in nanoseconds; the largest number if there is no
/// limit.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_mpa_poll_at(mpa: &Mpa) -> u64 {
    let at = match &mpa.side {
        Side::Initiator(initiator) => initiator.poll_at(),
        Side::Responder(responder) => responder.poll_at(),
    };
    at.unwrap_or(Time::NEVER).as_nanos()
}

/// Checks the limits; bytes that have arrived must be pushed first. Returns 0, or `ETIMEDOUT` if a
/// limit has expired.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_mpa_on_time(mpa: &mut Mpa, now: u64) -> c_int {
    let now = Time::from_nanos(now);
    let result = match &mut mpa.side {
        // No limit in LIMITS depends on the acknowledgement.
        Side::Initiator(initiator) => initiator.on_time(now, || true),
        Side::Responder(responder) => responder.on_time(now),
    };
    result.map_or_else(number, |()| 0)
}

fn number(failure: Failure) -> c_int {
    match failure {
        Failure::Closed { .. } => ECONNRESET,
        Failure::Frame(_) => EPROTO,
        Failure::TimedOut(_) => ETIMEDOUT,
    }
}

impl Peer {
    /// Stores the contents of a reply. Returns 0 or an error number.
    fn answers(&mut self, private_data: &[u8], outcome: &Outcome) -> c_int {
        self.says(private_data);
        match outcome {
            Outcome::Accepted(agreed) => {
                (self.ird, self.ord) = (agreed.ird, agreed.ord);
                0
            }
            Outcome::Rejected { .. } => ECONNREFUSED,
        }
    }

    /// Stores the contents of a request. Returns 0 or an error number.
    fn asks(&mut self, responder: &Responder, ours: &LocalParams) -> c_int {
        let Some(request) = responder.request() else {
            return EINVAL;
        };
        self.says(responder.private_data());
        let depth =
            |said: Option<u16>, own| said.filter(|&depth| depth != NO_NEGOTIATION).unwrap_or(own);
        self.ird = depth(request.peer_ird(), ours.ird);
        self.ord = depth(request.peer_ord(), ours.ord);
        0
    }

    fn says(&mut self, private_data: &[u8]) {
        self.private_data = private_data.as_ptr();
        self.private_data_len = u32::try_from(private_data.len()).unwrap_or(0);
    }
}

/// Accepts the peer's request with the program's depths, and hands out the reply. Returns its
/// length or an error number.
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
    match responder.accept(&params, unsafe { octets(private_data, len) }) {
        Ok(Some(_)) => hand_out(responder.reply(), frame),
        Ok(None) | Err(_) => EINVAL,
    }
}

/// Rejects the peer's request, and hands out the reply. Returns its length or an error number.
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
    match responder.reject(unsafe { octets(private_data, len) }) {
        true => hand_out(responder.reply(), frame),
        false => EINVAL,
    }
}

fn hand_out(reply: &[u8], frame: &mut *const u8) -> c_int {
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
