//! Completion channels and completion queues, plain and extended.

use crate::abi::verbs::*;
use crate::device::{check_same, checked_context, context};
use crate::guard::{EBUSY, EINVAL, Errno, Res, UNSUPPORTED, code, pointer, value};
use crate::object::{self, Kind, Object, Unacknowledged, Users};
use crate::{events, pd, post, wait};
use iwarp::runtime::{CompletionChannel, CompletionQueue, ProcessLock};
use iwarp_rnic::Cqe;
use parking_lot::RawMutex;
use parking_lot::lock_api::RawMutex as _;
use std::cell::Cell;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

pub(crate) struct Channel {
    raw: CompletionChannel,
    users: Users,
}

pub(crate) struct Cq {
    pub(crate) raw: CompletionQueue,
    pub(crate) users: Users,
    comp: Unacknowledged,
    pub(crate) asynchronous: Unacknowledged,
    parent_domain: usize,
    /// Held between `ibv_start_poll` and `ibv_end_poll`.
    polling: RawMutex,
    current: Cell<Cqe>,
}

pub(crate) type CqObject = Object<ibv_cq_ex, Cq>;
type ChannelObject = Object<ibv_comp_channel, Channel>;

/// Taking an event and counting it is one step, as seen by the thread that destroys the queue.
static DELIVERY: ProcessLock<()> = ProcessLock::new("verbs::cq::DELIVERY", ());

unsafe fn find_channel<'a>(c: *mut ibv_comp_channel) -> Res<&'a ChannelObject> {
    object::find(Kind::Channel, c)
}

/// # Safety
/// As [`object::find`].
pub(crate) unsafe fn find<'a>(cq: *mut ibv_cq) -> Res<&'a CqObject> {
    object::find(Kind::Cq, cq.cast())
}

/// # Safety
/// As [`object::trusted`].
#[inline]
unsafe fn trusted<'a>(cq: *mut ibv_cq_ex) -> &'a CqObject {
    object::trusted(cq)
}

pub(crate) unsafe extern "C" fn ibv_create_comp_channel(
    c: *mut ibv_context,
) -> *mut ibv_comp_channel {
    pointer(|| {
        let raw = checked_context(c)?.raw.create_channel()?;
        let fd = raw.as_fd().as_raw_fd();
        wait::make_blocking(fd);
        let channel = ibv_comp_channel {
            context: c,
            fd,
            refcnt: 0,
        };
        let own = Channel {
            raw,
            users: Users::default(),
        };
        Ok(object::create(Kind::Channel, channel, own))
    })
}

pub(crate) unsafe extern "C" fn ibv_destroy_comp_channel(c: *mut ibv_comp_channel) -> c_int {
    code(|| {
        if find_channel(c)?.users.any() {
            return Err(EBUSY);
        }
        object::retire(Kind::Channel, c)?;
        object::free::<ibv_comp_channel, Channel>(c);
        Ok(())
    })
}

/// Counts the queues of a channel where programs can read their number. What the library goes by is `users`.
///
/// # Safety
/// The channel lives.
unsafe fn count(channel: &ChannelObject, by: c_int) {
    // Other threads may make queues of the same channel.
    AtomicI32::from_ptr(&raw mut (*channel.c()).refcnt).fetch_add(by, Ordering::Relaxed);
}

/// The parameters of a new queue.
#[derive(Default)]
struct Wanted {
    cqe: u32,
    cq_context: usize,
    channel: usize,
    comp_vector: u32,
    wc_flags: u64,
    parent_domain: usize,
}

/// All fields that a completion of a connected queue pair can have.
const WC_FLAGS: u64 = 0x7f | 1 << 7 | WC_TM_INFO | 1 << 11;
const WC_TIMESTAMP: u64 = 1 << 7 | 1 << 11;
/// The tag of a message, for which completions have room if they have no time.
const WC_TM_INFO: u64 = 1 << 10;

unsafe fn create(c: *mut ibv_context, wanted: &Wanted) -> Res<*mut ibv_cq_ex> {
    let ctx = checked_context(c)?;
    if wanted.comp_vector >= 1 || wanted.cqe == 0 || wanted.cqe > iwarp::LIMITS.max_cqe {
        return Err(EINVAL);
    }
    let channel = wanted.channel as *mut ibv_comp_channel;
    let raw_channel = if channel.is_null() {
        None
    } else {
        let found = find_channel(channel)?;
        check_same(c, (*channel).context)?;
        Some(found)
    };
    let domain = match wanted.parent_domain {
        0 => None,
        p => {
            let p = p as *mut ibv_pd;
            let domain = pd::find(p)?;
            check_same(c, (*p).context)?;
            Some(domain)
        }
    };
    let raw = ctx.raw.create_cq(wanted.cqe, raw_channel.map(|c| &c.raw))?;
    if wanted.wc_flags & WC_TIMESTAMP != 0 {
        raw.enable_timestamps();
    }
    if let Some(channel) = raw_channel {
        channel.users.add();
        count(channel, 1);
    }
    if let Some(domain) = domain {
        domain.users.add();
    }
    let mut cq: ibv_cq_ex = std::mem::zeroed();
    cq.context = c;
    cq.channel = channel;
    cq.cq_context = wanted.cq_context as *mut c_void;
    cq.cqe = raw.capacity() as c_int;
    cq.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    cq.cond = libc::PTHREAD_COND_INITIALIZER;
    cq.start_poll = Some(start_poll);
    cq.next_poll = Some(next_poll);
    cq.end_poll = Some(end_poll);
    cq.read_opcode = Some(read_opcode);
    cq.read_vendor_err = Some(read_vendor_err);
    cq.read_byte_len = Some(read_byte_len);
    cq.read_imm_data = Some(read_imm_data);
    cq.read_qp_num = Some(read_qp_num);
    cq.read_src_qp = Some(read_src_qp);
    cq.read_wc_flags = Some(read_wc_flags);
    cq.read_slid = Some(read_zero_u32);
    cq.read_sl = Some(read_sl);
    cq.read_dlid_path_bits = Some(read_zero_u8);
    cq.read_completion_ts = Some(read_completion_ts);
    cq.read_completion_wallclock_ns = Some(read_wallclock);
    cq.read_tm_info = Some(read_tm_info);
    let own = Cq {
        raw: raw.clone(),
        users: Users::default(),
        comp: Unacknowledged::default(),
        asynchronous: Unacknowledged::default(),
        parent_domain: wanted.parent_domain,
        polling: RawMutex::INIT,
        current: Cell::default(),
    };
    let cq = object::create(Kind::Cq, cq, own);
    raw.set_user_data(cq as u64);
    Ok(cq)
}

pub(crate) unsafe extern "C" fn ibv_create_cq(
    c: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> *mut ibv_cq {
    pointer(|| {
        let wanted = Wanted {
            cqe: u32::try_from(cqe).map_err(|_| EINVAL)?,
            cq_context: cq_context as usize,
            channel: channel as usize,
            comp_vector: u32::try_from(comp_vector).map_err(|_| EINVAL)?,
            ..Wanted::default()
        };
        Ok(create(c, &wanted)?.cast())
    })
}

pub(crate) unsafe extern "C" fn create_cq_ex(
    c: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    pointer(|| {
        let attr = &*attr;
        if attr.comp_mask & !3 != 0 || attr.wc_flags & !WC_FLAGS != 0 {
            return Err(UNSUPPORTED);
        }
        if attr.wc_flags & WC_TM_INFO != 0 && attr.wc_flags & WC_TIMESTAMP != 0 {
            return Err(UNSUPPORTED);
        }
        // Single-threaded use is a hint. Overruns cannot be ignored.
        if attr.comp_mask & 1 != 0 && attr.flags & !1 != 0 {
            return Err(UNSUPPORTED);
        }
        let wanted = Wanted {
            cqe: attr.cqe,
            cq_context: attr.cq_context as usize,
            channel: attr.channel as usize,
            comp_vector: attr.comp_vector,
            wc_flags: attr.wc_flags,
            parent_domain: if attr.comp_mask & 2 != 0 {
                attr.parent_domain as usize
            } else {
                0
            },
        };
        create(c, &wanted)
    })
}

pub(crate) unsafe extern "C" fn ibv_resize_cq(c: *mut ibv_cq, cqe: c_int) -> c_int {
    code(|| {
        let cq = find(c)?;
        let cqe = u32::try_from(cqe).map_err(|_| EINVAL)?;
        cq.raw.resize(cqe)?;
        (*c).cqe = cq.raw.capacity() as c_int;
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn ibv_destroy_cq(c: *mut ibv_cq) -> c_int {
    code(|| {
        let cq = find(c)?;
        if cq.users.any() {
            return Err(EBUSY);
        }
        {
            let _delivery = DELIVERY.lock();
            cq.raw.set_user_data(0);
            cq.raw.forget_events();
        }
        events::forget(&context((*c).context).raw, cq.raw.clone());
        cq.comp.wait();
        cq.asynchronous.wait();
        object::retire(Kind::Cq, c.cast::<ibv_cq_ex>())?;
        if let Ok(channel) = find_channel((*c).channel) {
            // The channel may be destroyed as soon as it has no users.
            count(channel, -1);
            channel.users.remove();
        }
        if let Ok(pd) = pd::find(cq.parent_domain as *mut ibv_pd) {
            pd.users.remove();
        }
        object::free::<ibv_cq_ex, Cq>(c.cast());
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    code(|| {
        trusted(cq.cast()).raw.arm(solicited_only != 0);
        Ok(())
    })
}

/// Takes one event, counted as delivered.
unsafe fn take_event(channel: *mut ibv_comp_channel, was_read: bool) -> Option<*mut ibv_cq> {
    let channel: &ChannelObject = object::trusted(channel);
    let _delivery = DELIVERY.lock();
    loop {
        let queue = channel.raw.events();
        let cq = if was_read {
            queue.try_next_after_read()
        } else {
            queue.try_next()
        }?;
        let object = cq.user_data() as *mut ibv_cq_ex;
        // A queue that is being destroyed delivers no more events.
        if !object.is_null() {
            trusted(object).comp.delivered();
            return Some(object.cast());
        }
    }
}

/// Polls for a moment if an event is likely to come soon.
unsafe fn busy_poll(channel: *mut ibv_comp_channel) -> bool {
    let channel: &ChannelObject = object::trusted(channel);
    channel.raw.busy_poll(Duration::MAX)
}

/// Notes that the wait for an event, which began at `begin`, ended in sleep.
unsafe fn slept(channel: *mut ibv_comp_channel, begin: Instant) {
    let channel: &ChannelObject = object::trusted(channel);
    channel.raw.slept(begin.elapsed());
}

pub(crate) unsafe extern "C-unwind" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    let mut was_read = false;
    let mut slept_since = None;
    loop {
        if let Some(got) = value(None, || take_event(channel, was_read)) {
            *cq = got;
            *cq_context = (*got).cq_context;
            if let Some(begin) = slept_since {
                value((), || slept(channel, begin));
            }
            return 0;
        }
        if !was_read && wait::blocks((*channel).fd) {
            let begin = Instant::now();
            if value(false, || busy_poll(channel)) {
                continue;
            }
            slept_since = Some(begin);
        }
        if wait::consume((*channel).fd) != 0 {
            return -1;
        }
        was_read = true;
    }
}

pub(crate) unsafe extern "C" fn ibv_ack_cq_events(c: *mut ibv_cq, n: c_uint) {
    value((), || {
        if let Ok(cq) = find(c) {
            (*c).comp_events_completed = (*c).comp_events_completed.wrapping_add(n);
            cq.comp.acknowledged(u64::from(n));
        }
    });
}

unsafe fn show(c: *mut ibv_cq_ex, cqe: &Cqe) {
    (*c).wr_id = cqe.wr_id;
    (*c).status = post::wc_status(cqe.status);
    trusted(c).current.set(*cqe);
}

unsafe fn poll_one(c: *mut ibv_cq_ex) -> Res<()> {
    let mut cqe = [Cqe::default()];
    match trusted(c).raw.poll(&mut cqe) {
        Ok(1) => {
            show(c, &cqe[0]);
            Ok(())
        }
        Ok(_) => Err(Errno(libc::ENOENT)),
        Err(_) => Err(Errno(libc::EIO)),
    }
}

unsafe extern "C" fn start_poll(c: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    if !attr.is_null() && (*attr).comp_mask != 0 {
        return libc::EINVAL;
    }
    let cq = trusted(c);
    cq.polling.lock();
    let result = value(Err(Errno(libc::EIO)), || poll_one(c));
    match result {
        Ok(()) => 0,
        Err(e) => {
            cq.polling.unlock();
            e.0
        }
    }
}

unsafe extern "C" fn next_poll(c: *mut ibv_cq_ex) -> c_int {
    // Only the start of a batch looks at the sockets.
    if value(true, || trusted(c).raw.is_empty()) {
        return libc::ENOENT;
    }
    match value(Err(Errno(libc::EIO)), || poll_one(c)) {
        Ok(()) => 0,
        Err(e) => e.0,
    }
}

unsafe extern "C" fn end_poll(c: *mut ibv_cq_ex) {
    trusted(c).polling.unlock();
}

unsafe extern "C" fn read_opcode(c: *mut ibv_cq_ex) -> u32 {
    post::wc_opcode(trusted(c).current.get().opcode)
}

unsafe extern "C" fn read_vendor_err(c: *mut ibv_cq_ex) -> u32 {
    post::vendor_err(&trusted(c).current.get())
}

unsafe extern "C" fn read_byte_len(c: *mut ibv_cq_ex) -> u32 {
    trusted(c).current.get().byte_len
}

unsafe extern "C" fn read_imm_data(c: *mut ibv_cq_ex) -> u32 {
    post::imm_or_stag(&trusted(c).current.get())
}

unsafe extern "C" fn read_qp_num(c: *mut ibv_cq_ex) -> u32 {
    trusted(c).current.get().qp_num
}

unsafe extern "C" fn read_src_qp(c: *mut ibv_cq_ex) -> u32 {
    trusted(c).current.get().src_qp()
}

unsafe extern "C" fn read_wc_flags(c: *mut ibv_cq_ex) -> u32 {
    post::wc_flags(&trusted(c).current.get())
}

unsafe extern "C" fn read_zero_u32(_: *mut ibv_cq_ex) -> u32 {
    0
}

unsafe extern "C" fn read_sl(c: *mut ibv_cq_ex) -> u8 {
    post::service_level(&trusted(c).current.get())
}

unsafe extern "C" fn read_zero_u8(_: *mut ibv_cq_ex) -> u8 {
    0
}

unsafe extern "C" fn read_tm_info(c: *mut ibv_cq_ex, to: *mut ibv_wc_tm_info) {
    let (tag, app_ctx) = trusted(c).current.get().tag().unwrap_or_default();
    // As its sender has written it.
    let r#priv = app_ctx.to_be();
    to.write(ibv_wc_tm_info { tag, r#priv });
}

unsafe extern "C" fn read_completion_ts(c: *mut ibv_cq_ex) -> u64 {
    trusted(c).current.get().timestamp_ns
}

unsafe extern "C" fn read_wallclock(c: *mut ibv_cq_ex) -> u64 {
    let now = |clock| {
        let mut t: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(clock, &raw mut t);
        t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
    };
    let age = now(libc::CLOCK_MONOTONIC).saturating_sub(trusted(c).current.get().timestamp_ns);
    now(libc::CLOCK_REALTIME).saturating_sub(age)
}
