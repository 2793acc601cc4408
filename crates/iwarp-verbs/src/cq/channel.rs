//! Completion channels: `ibv_create_comp_channel(3)`, `ibv_get_cq_event(3)`.

use super::object::{Channel, ChannelObject, DELIVERY, find, find_channel, trusted};
use crate::abi::verbs::*;
use crate::border::guard::{EBUSY, code, pointer, value};
use crate::border::object::{self, Kind, Users};
use crate::border::wait;
use crate::device::checked_context;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

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

/// Changes the public count of a channel's queues. The library itself uses `users`.
///
/// # Safety
/// The channel is alive.
pub(super) unsafe fn change_refcnt(channel: &ChannelObject, by: c_int) {
    // Other threads may create queues on the same channel.
    AtomicI32::from_ptr(&raw mut (*channel.c()).refcnt).fetch_add(by, Ordering::Relaxed);
}

/// Takes one event and counts it as delivered.
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

/// Polls briefly if an event is likely to arrive soon. Returns `true` if one may be available.
unsafe fn busy_poll(channel: *mut ibv_comp_channel) -> bool {
    let channel: &ChannelObject = object::trusted(channel);
    channel.raw.busy_poll(Duration::MAX)
}

/// Records that a wait for an event, which began at `begin`, had to sleep.
unsafe fn record_sleep(channel: *mut ibv_comp_channel, begin: Instant) {
    let channel: &ChannelObject = object::trusted(channel);
    channel.raw.record_sleep(begin.elapsed());
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
                value((), || record_sleep(channel, begin));
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
