//! Multicast groups of identifiers for datagrams: `rdma_join_multicast(3)`.

use super::channel::{DELIVERY, MULTICAST_ERROR, MULTICAST_JOIN};
use super::id;
use super::object::{MulticastGroup, find};
use super::sockaddr;
use crate::abi::cma::*;
use crate::border::guard::{EINVAL, Res, UNSUPPORTED, minus_one};
use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

unsafe fn join(
    id: *mut rdma_cm_id,
    address: SocketAddr,
    send_only: bool,
    context: *mut c_void,
) -> Res<c_int> {
    static KEYS: AtomicU64 = AtomicU64::new(1);
    let object = find(id)?;
    let key = KEYS.fetch_add(1, Ordering::Relaxed);
    id::drop_event(id)?;
    // Registered first, because the event may be delivered immediately.
    object.groups.lock().push(MulticastGroup {
        key,
        context: context as usize,
        events: Arc::default(),
    });
    if let Err(e) = object.raw.join_multicast(address, send_only, key) {
        object.groups.lock().retain(|g| g.key != key);
        return Err(e.into());
    }
    id::complete(id)
}

pub(crate) unsafe extern "C" fn rdma_join_multicast(
    id: *mut rdma_cm_id,
    address: *mut libc::sockaddr,
    context: *mut c_void,
) -> c_int {
    minus_one(|| join(id, sockaddr::read(address)?, false, context))
}

#[repr(C)]
pub(crate) struct JoinAttributes {
    comp_mask: u32,
    join_flags: u32,
    addr: *mut libc::sockaddr,
}

const MASK_ADDRESS: u32 = 1;
const MASK_FLAGS: u32 = 1 << 1;

/// Join flags: full member, and send-only member.
const FULL_MEMBER: u32 = 0;
const SEND_ONLY: u32 = 1;

pub(crate) unsafe extern "C" fn rdma_join_multicast_ex(
    id: *mut rdma_cm_id,
    attributes: *mut c_void,
    context: *mut c_void,
) -> c_int {
    minus_one(|| {
        let Some(a) = attributes.cast::<JoinAttributes>().as_ref() else {
            return Err(EINVAL);
        };
        if a.comp_mask & !(MASK_ADDRESS | MASK_FLAGS) != 0 {
            return Err(UNSUPPORTED);
        }
        if a.comp_mask != MASK_ADDRESS | MASK_FLAGS || a.join_flags > SEND_ONLY {
            return Err(EINVAL);
        }
        let send_only = a.join_flags != FULL_MEMBER;
        join(id, sockaddr::read(a.addr)?, send_only, context)
    })
}

pub(crate) unsafe extern "C" fn rdma_leave_multicast(
    id: *mut rdma_cm_id,
    address: *mut libc::sockaddr,
) -> c_int {
    minus_one(|| {
        let object = find(id)?;
        let address = sockaddr::read(address)?;
        let group = {
            // A thread that takes one of the group's events either has counted it already, or
            // discards it.
            let _delivery = DELIVERY.lock();
            let key = object.raw.leave_multicast(address)?;
            let mut groups = object.groups.lock();
            let index = groups.iter().position(|g| g.key == key);
            index.map(|i| groups.swap_remove(i))
        };
        if !(*id).event.is_null() && is_multicast_event(&*(*id).event) {
            // The library keeps this event, so the program cannot acknowledge it.
            id::drop_event(id)?;
        }
        if let Some(group) = group {
            group.events.wait();
        }
        Ok(0)
    })
}

fn is_multicast_event(event: &rdma_cm_event) -> bool {
    [MULTICAST_JOIN, MULTICAST_ERROR].contains(&event.event)
}
