//! Look-ups that end with an event, `rdma_resolve_addrinfo(3)` and `rdma_query_addrinfo(3)`, and
//! events written by the program, `rdma_write_cm_event(3)`. They exist since rdma-core 57.
//!
//! A resolver may block for seconds, so each look-up has its own thread.

use super::address::{self, Addresses, SUBNET, copy_address, rdma_getaddrinfo};
use super::channel::USER;
use super::id::complete;
use super::object::{Lookup, LookupState, find};
use crate::abi::cma::*;
use crate::border::guard::{EBUSY, EINVAL, Errno, Res, UNSUPPORTED, minus_one};
use iwarp::runtime::cm::{CmEventKind, CmId};
use std::ffi::{CStr, CString, c_char, c_int, c_uint};
use std::ptr::{null, null_mut};
use std::sync::Arc;

/// A copy of the query, because the program's memory need not outlive the call.
struct Query {
    node: Option<CString>,
    service: Option<CString>,
    hints: Option<Addresses>,
}

impl Query {
    unsafe fn new(
        node: *const c_char,
        service: *const c_char,
        hints: *const rdma_addrinfo,
    ) -> Res<Self> {
        let text = |p: *const c_char| (!p.is_null()).then(|| CStr::from_ptr(p).to_owned());
        let hints = hints.as_ref().map(|h| Self::copy(h)).transpose()?;
        Ok(Self {
            node: text(node),
            service: text(service),
            hints,
        })
    }

    unsafe fn copy(from: &rdma_addrinfo) -> Res<Addresses> {
        let to = Addresses(address::allocate::<rdma_addrinfo>()?);
        let h = &mut *to.0;
        h.ai_flags = from.ai_flags;
        h.ai_family = from.ai_family;
        h.ai_qp_type = from.ai_qp_type;
        h.ai_port_space = from.ai_port_space;
        if !from.ai_src_addr.is_null() {
            h.ai_src_addr = copy_address(from.ai_src_addr, from.ai_src_len)?;
            h.ai_src_len = from.ai_src_len;
        }
        if !from.ai_dst_addr.is_null() {
            h.ai_dst_addr = copy_address(from.ai_dst_addr, from.ai_dst_len)?;
            h.ai_dst_len = from.ai_dst_len;
        }
        Ok(to)
    }

    /// Blocks until the resolver answers. An error is the event's errno.
    fn resolve(&self) -> Res<Addresses> {
        let text = |t: &Option<CString>| t.as_ref().map_or(null(), |t| t.as_ptr());
        let hints = self.hints.as_ref().map_or(null(), |h| h.0.cast_const());
        let mut found = null_mut();
        // SAFETY: pointers to parts of this value.
        let status = unsafe {
            rdma_getaddrinfo(text(&self.node), text(&self.service), hints, &raw mut found)
        };
        match status {
            0 => Ok(Addresses(found)),
            libc::EAI_AGAIN => Err(Errno(libc::EAGAIN)),
            libc::EAI_MEMORY => Err(Errno(libc::ENOMEM)),
            // An unknown name or service, or any other failure.
            _ => Err(Errno(libc::EADDRNOTAVAIL)),
        }
    }
}

/// Looks up the address, stores the result, and writes the event.
fn resolve_and_notify(query: &Query, lookup: &Lookup, id: &CmId) {
    let (state, kind, errno) = match query.resolve() {
        Ok(found) => (LookupState::Found(found), CmEventKind::AddrinfoResolved, 0),
        Err(Errno(errno)) => (LookupState::None, CmEventKind::AddrinfoError, errno),
    };
    *lookup.0.lock() = state;
    if id.write_event(kind, errno).is_err() {
        tracing::debug!("an identifier was destroyed during its look-up");
    }
}

pub(crate) unsafe extern "C" fn rdma_resolve_addrinfo(
    id: *mut rdma_cm_id,
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
) -> c_int {
    minus_one(|| {
        let object = find(id)?;
        let flags = hints.as_ref().map_or(0, |h| h.ai_flags);
        if flags & SUBNET != 0 {
            // Subnet administration belongs to InfiniBand; `RAI_DNS` contradicts it.
            return Err(UNSUPPORTED);
        }
        let query = Query::new(node, service, hints)?;
        let (lookup, raw) = (Arc::clone(&object.lookup), object.raw.clone());
        {
            let mut state = lookup.0.lock();
            // Do not replace a result that the program has not fetched.
            if !matches!(*state, LookupState::None) {
                return Err(EBUSY);
            }
            *state = LookupState::Running;
        }
        let thread = std::thread::Builder::new().name("iwarp-lookup".into());
        let own = Arc::clone(&lookup);
        if let Err(e) = thread.spawn(move || resolve_and_notify(&query, &own, &raw)) {
            *lookup.0.lock() = LookupState::None;
            return Err(e.into());
        }
        complete(id)
    })
}

pub(crate) unsafe extern "C" fn rdma_query_addrinfo(
    id: *mut rdma_cm_id,
    to: *mut *mut rdma_addrinfo,
) -> c_int {
    minus_one(|| {
        let object = find(id)?;
        if to.is_null() {
            return Err(EINVAL);
        }
        let mut state = object.lookup.0.lock();
        match std::mem::take(&mut *state) {
            LookupState::Found(found) => {
                *to = found.into_raw();
                Ok(0)
            }
            other => {
                *state = other;
                Err(Errno(libc::ENOENT))
            }
        }
    })
}

pub(crate) unsafe extern "C" fn rdma_write_cm_event(
    id: *mut rdma_cm_id,
    event: c_uint,
    status: c_int,
    arg: u64,
) -> c_int {
    minus_one(|| {
        let object = find(id)?;
        if event != USER {
            return Err(EINVAL);
        }
        // Delivery negates an errno, but this status must arrive unchanged.
        object
            .raw
            .write_event(CmEventKind::User(arg), status.wrapping_neg())?;
        Ok(0)
    })
}
