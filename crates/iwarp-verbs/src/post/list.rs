//! Lists of C work requests: converts them on the stack, without allocation, and posts them in
//! portions. `send`, `datagram` and `receive` implement [`Poster`] for their queues.

use crate::abi::verbs::value::{SEND_FENCE, SEND_INLINE, SEND_SIGNALED, SEND_SOLICITED};
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Errno, Res};
use iwarp::runtime::PostFailed;
use iwarp_rnic::limits::MAX_SGE;
use iwarp_rnic::{SendFlags, Sge};
use std::ffi::{c_int, c_uint};
use std::mem::{self, MaybeUninit};

const FLAGS: c_uint = SEND_FENCE | SEND_SIGNALED | SEND_SOLICITED | SEND_INLINE;

/// A work request of C, which points to its elements and to the next request of its list.
pub(super) trait Linked {
    fn next(&self) -> *mut Self;
    fn elements(&self) -> (*mut ibv_sge, c_int);
}

impl Linked for ibv_send_wr {
    #[inline]
    fn next(&self) -> *mut Self {
        self.next
    }

    #[inline]
    fn elements(&self) -> (*mut ibv_sge, c_int) {
        (self.sg_list, self.num_sge)
    }
}

impl Linked for ibv_recv_wr {
    #[inline]
    fn next(&self) -> *mut Self {
        self.next
    }

    #[inline]
    fn elements(&self) -> (*mut ibv_sge, c_int) {
        (self.sg_list, self.num_sge)
    }
}

/// A queue to which programs post lists of requests.
pub(super) trait Poster {
    /// The request of C.
    type From: Linked;
    /// The converted request.
    type Into<'a>;

    /// Converts a request, and puts its elements into `room`. Returns `None` if they do not fit;
    /// the request then becomes the first one of the next portion. An error refuses the request.
    unsafe fn convert<'a>(
        &self,
        wr: &Self::From,
        room: &mut Room<'a>,
    ) -> Res<Option<Self::Into<'a>>>;

    /// Posts a portion.
    fn post(&self, wrs: &[Self::Into<'_>]) -> Result<(), PostFailed>;
}

/// The refused request of a list, and the reason.
type Refused<R> = (*mut R, Errno);

/// Posts a list. If a request is refused, stores it in `bad`; those before it have been posted.
#[inline]
pub(super) unsafe fn post_list<P: Poster>(
    queue: &P,
    first: *mut P::From,
    bad: *mut *mut P::From,
) -> Res<()> {
    let mut current = first;
    while !current.is_null() {
        // Most programs post one request with few elements.
        let wr = &*current;
        let posted = if wr.next().is_null() && (0..=2).contains(&wr.elements().1) {
            post_some::<P, 1, 2>(queue, current)
        } else {
            post_some::<P, 32, { 2 * MAX_SGE as usize }>(queue, current)
        };
        current = match posted {
            Ok(rest) => rest,
            Err((wr, e)) => return refuse(wr, bad, e),
        };
    }
    Ok(())
}

/// Stores the refused request in `bad`, unless that is NULL, and returns the error.
pub(super) unsafe fn refuse<R>(wr: *mut R, bad: *mut *mut R, e: Errno) -> Res<()> {
    if !bad.is_null() {
        *bad = wr;
    }
    Err(e)
}

/// Posts the first requests of a list: at most `W` requests with `S` elements. Returns the rest.
#[inline]
unsafe fn post_some<P: Poster, const W: usize, const S: usize>(
    queue: &P,
    first: *mut P::From,
) -> Result<*mut P::From, Refused<P::From>> {
    // The arrays stay uninitialized, because clearing takes as long as filling them.
    let mut sges = [const { MaybeUninit::<Sge>::uninit() }; S];
    let mut inline = [const { MaybeUninit::<&[u8]>::uninit() }; S];
    let mut wrs = [const { MaybeUninit::<P::Into<'_>>::uninit() }; W];
    let mut room = Room {
        sges: &mut sges,
        inline: &mut inline,
    };
    let (mut current, mut n, mut conversion_error) = (first, 0, None);
    while !current.is_null() && n < W {
        let wr = &*current;
        match queue.convert(wr, &mut room) {
            Ok(Some(converted)) => wrs[n].write(converted),
            Ok(None) => break,
            Err(e) => {
                conversion_error = Some(e);
                break;
            }
        };
        n += 1;
        current = wr.next();
    }
    if let Err(failed) = queue.post(assume_all_init(&wrs[..n])) {
        let mut bad = first;
        for _ in 0..failed.accepted() {
            bad = (*bad).next();
        }
        return Err((bad, failed.into()));
    }
    match conversion_error {
        Some(e) => Err((current, e)),
        None => Ok(current),
    }
}

/// Places for the elements of a portion.
pub(super) struct Room<'a> {
    sges: &'a mut [MaybeUninit<Sge>],
    inline: &'a mut [MaybeUninit<&'a [u8]>],
}

/// What a send request sends, and its flags.
pub(super) struct Data<'a> {
    pub(super) flags: SendFlags,
    pub(super) sges: &'a [Sge],
    pub(super) inline: &'a [&'a [u8]],
}

impl<'a> Room<'a> {
    /// Converts the elements and flags of a send request. Returns `None` if there is too little
    /// room. Fails with EINVAL if there are more than `max` elements.
    #[inline]
    pub(super) unsafe fn data(&mut self, wr: &ibv_send_wr, max: u32) -> Res<Option<Data<'a>>> {
        let list = elements(wr, max)?;
        if list.len() > self.sges.len().min(self.inline.len()) {
            return Ok(None);
        }
        let mut data = Data {
            flags: SendFlags::from_bits_truncate(wr.send_flags & FLAGS),
            sges: &[],
            inline: &[],
        };
        if wr.send_flags & SEND_INLINE == 0 {
            data.sges = fill(&mut self.sges, list, sge);
        } else {
            data.inline = fill(&mut self.inline, list, |from| sge_bytes(from));
        }
        Ok(Some(data))
    }

    /// Converts the elements of a receive. Returns `None` if there is too little room. Fails with
    /// EINVAL if there are more than `max` elements.
    #[inline]
    pub(super) unsafe fn sges(&mut self, wr: &ibv_recv_wr, max: u32) -> Res<Option<&'a [Sge]>> {
        let list = elements(wr, max)?;
        let fits = list.len() <= self.sges.len();
        Ok(fits.then(|| fill(&mut self.sges, list, sge)))
    }
}

/// Returns the elements of a request. If their number is negative or above `max`, fails with
/// EINVAL, and does not read the list.
#[inline]
unsafe fn elements<R: Linked>(wr: &R, max: u32) -> Res<&[ibv_sge]> {
    let (list, num) = wr.elements();
    // A negative number is too large when unsigned.
    match num as u32 {
        0 => Ok(&[]),
        num if num <= max => Ok(std::slice::from_raw_parts(list, num as usize)),
        _ => Err(EINVAL),
    }
}

/// Takes the first places of `room`, converts the elements of `list` into them, and returns them.
#[inline]
unsafe fn fill<'a, T>(
    room: &mut &'a mut [MaybeUninit<T>],
    list: &[ibv_sge],
    convert: impl Fn(&ibv_sge) -> T,
) -> &'a [T] {
    let (mine, rest) = mem::take(room).split_at_mut(list.len());
    *room = rest;
    for (to, from) in mine.iter_mut().zip(list) {
        to.write(convert(from));
    }
    assume_all_init(mine)
}

#[inline]
pub(super) fn sge(from: &ibv_sge) -> Sge {
    Sge {
        addr: from.addr,
        len: from.length,
        lkey: from.lkey,
    }
}

#[inline]
unsafe fn sge_bytes<'a>(sge: &ibv_sge) -> &'a [u8] {
    if sge.length == 0 {
        return &[];
    }
    std::slice::from_raw_parts(sge.addr as *const u8, sge.length as usize)
}

/// Returns an initialized list.
///
/// # Safety
/// Every element is initialized.
#[inline]
const unsafe fn assume_all_init<T>(list: &[MaybeUninit<T>]) -> &[T] {
    &*(std::ptr::from_ref(list) as *const [T])
}
