//! MPA start-up: what the two frames say, in either role. The C side moves their octets.
//!
//! Invariant: pointers come from C under the contract of `kernel/engine.h`: a start-up is what `rk_mpa_new` has returned, and one call at
//! a time has it. Octets that a call hands out stay valid until the next call that takes the start-up.

use core::ffi::c_int;
use core::ptr::null_mut;
use core::slice;
use core::time::Duration;

use iwarp_proto::mpa::negotiate::{
    Agreed, Initiator, LocalParams, Outcome, PendingRequest, Responder, RtrSet,
};
use iwarp_proto::mpa::startup::{
    FrameKind, FrameReader, NO_NEGOTIATION, ReplyFrame, RequestFrame, StartupError,
};
use iwarp_rnic::qp::{StreamConfig, StreamTimes};

use crate::error::{ECONNREFUSED, ECONNRESET, EINVAL, EPROTO};
use crate::runtime::{place, remove};

/// The longest frame: header and 512 octets of private data.
const FRAME_MAX: usize = 20 + 512;

/// How long the initiator's first FPDU may take, where it has to send one.
const FIRST_FPDU: Duration = Duration::from_secs(10);
/// How long a responder waits for the initiator to speak, where that one need not: as the library does. siw is such an initiator.
const SPEAK_FIRST: Duration = Duration::from_millis(200);
/// How old a connection has to be for its end, as the library has it, for siw's sake.
const MATURITY: Duration = Duration::from_millis(50);

/// One side of a start-up.
#[derive(Debug)]
pub struct Mpa {
    params: LocalParams,
    initiator: Option<Initiator>,
    reader: FrameReader,
    request: Option<PendingRequest>,
    agreed: Option<Agreed>,
    out: [u8; FRAME_MAX],
}

/// What this side wants: `struct rk_mpa_params`.
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

/// What the peer's frame says: `struct rk_mpa_peer`.
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
    // SAFETY: the caller promises it.
    unsafe { slice::from_raw_parts(octets, len) }
}

/// Begins a start-up. An initiator's request carries the private data. Returns null if there is no memory or the data are too long.
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
) -> *mut Mpa {
    let params = params.local();
    let (initiator, kind) = if initiator != 0 {
        // SAFETY: the caller promises it.
        match Initiator::new(params, unsafe { octets(private_data, len) }) {
            Ok(initiator) => (Some(initiator), FrameKind::Reply),
            Err(_) => return null_mut(),
        }
    } else {
        (None, FrameKind::Request)
    };
    place(move || Mpa {
        params,
        initiator,
        reader: FrameReader::new(kind),
        request: None,
        agreed: None,
        out: [0; FRAME_MAX],
    })
}

/// Frees a start-up.
///
/// # Safety
/// `mpa` is null or came from [`rk_mpa_new`].
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rk_mpa_free(mpa: *mut Mpa) {
    // SAFETY: the caller promises it.
    unsafe { remove(mpa) }
}

/// Hands out an initiator's request. Returns its length.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_mpa_request(mpa: &Mpa, frame: &mut *const u8) -> usize {
    let request = match &mpa.initiator {
        Some(initiator) => initiator.request_octets(),
        None => &[],
    };
    *frame = request.as_ptr();
    request.len()
}

/// If the peer has closed instead of answering: makes the request of the next connection ([`Initiator::ask_again`]). Returns 0, or
/// `ECONNRESET` if there is nothing left to try, or some of an answer has come.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_mpa_retry(mpa: &mut Mpa) -> c_int {
    let unanswered = mpa.reader.is_empty();
    let initiator = mpa.initiator.as_mut().filter(|_| unanswered);
    match initiator.is_some_and(Initiator::ask_again) {
        true => 0,
        false => ECONNRESET,
    }
}

/// Returns how many octets to read next, 0 if the peer's frame is complete, or an error number.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_mpa_missing(mpa: &Mpa) -> c_int {
    match mpa.reader.missing() {
        Ok(count) => c_int::try_from(count).unwrap_or(EPROTO),
        Err(_) => EPROTO,
    }
}

/// Takes octets of the peer, no more than are missing. Returns 0 or an error number.
///
/// # Safety
/// `at` names `len` readable octets.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rk_mpa_push(mpa: &mut Mpa, at: *const u8, len: usize) -> c_int {
    // SAFETY: the caller promises it.
    match mpa.reader.push(unsafe { octets(at, len) }) {
        Ok(_) => 0,
        Err(_) => EPROTO,
    }
}

/// Checks the peer's frame when it is complete, and says what is in it. Returns 0, `ECONNREFUSED` if the peer's program has refused, or
/// another error number.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_mpa_check(mpa: &mut Mpa, peer: &mut Peer) -> c_int {
    match check(mpa, peer) {
        Ok(number) => number,
        Err(_) => EPROTO,
    }
}

fn check(mpa: &mut Mpa, peer: &mut Peer) -> Result<c_int, StartupError> {
    let Some(frame) = mpa.reader.frame() else {
        return Ok(EINVAL);
    };
    if let Some(initiator) = &mpa.initiator {
        let reply: &ReplyFrame<'_> = &frame;
        peer.tell(reply.ulp_private_data());
        return Ok(match initiator.on_reply(reply)? {
            Outcome::Accepted(agreed) => {
                (peer.ird, peer.ord) = (agreed.ird, agreed.ord);
                mpa.agreed = Some(agreed);
                0
            }
            Outcome::Rejected { .. } => ECONNREFUSED,
        });
    }
    let request: &RequestFrame<'_> = &frame;
    let pending = Responder::on_request(request, &mpa.params)?;
    peer.tell(request.ulp_private_data());
    let depth =
        |said: Option<u16>, own| said.filter(|&depth| depth != NO_NEGOTIATION).unwrap_or(own);
    peer.ird = depth(pending.peer_ird(), mpa.params.ird);
    peer.ord = depth(pending.peer_ord(), mpa.params.ord);
    mpa.request = Some(pending);
    Ok(0)
}

impl Peer {
    fn tell(&mut self, private_data: &[u8]) {
        self.private_data = private_data.as_ptr();
        self.private_data_len = u32::try_from(private_data.len()).unwrap_or(0);
    }
}

/// Accepts the peer's request, with depths of our program, and hands out the reply. Returns its length or an error number.
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
    let Some(request) = &mpa.request else {
        return EINVAL;
    };
    // SAFETY: the caller promises it.
    match request.accept(&params, unsafe { octets(private_data, len) }, &mut mpa.out) {
        Ok((len, agreed)) => {
            mpa.agreed = Some(agreed);
            *frame = mpa.out.as_ptr();
            c_int::try_from(len).unwrap_or(EINVAL)
        }
        Err(_) => EINVAL,
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
    let Some(request) = &mpa.request else {
        return EINVAL;
    };
    // SAFETY: the caller promises it.
    let len = request.reject(unsafe { octets(private_data, len) }, &mut mpa.out);
    *frame = mpa.out.as_ptr();
    c_int::try_from(len)
        .ok()
        .filter(|&len| len > 0)
        .unwrap_or(EINVAL)
}

impl Mpa {
    /// What the queue pair is started with, once both sides have agreed.
    pub(crate) fn stream(&self, emss: u32) -> Option<StreamConfig> {
        let agreed = self.agreed.as_ref()?;
        let times = StreamTimes {
            reminders: StreamTimes::REMINDERS,
            maturity: MATURITY,
            speak_first: (!agreed.peer_to_peer).then_some(SPEAK_FIRST),
            first_fpdu: agreed.peer_to_peer.then_some(FIRST_FPDU),
        };
        let initiator = self.initiator.is_some();
        Some(StreamConfig::agreed(agreed, initiator, emss, times))
    }
}
