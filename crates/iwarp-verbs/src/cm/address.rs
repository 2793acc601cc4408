//! Look-ups: `rdma_getaddrinfo(3)`, `rdma_get_devices(3)`.

use super::sockaddr;
use crate::abi::cma::*;
use crate::abi::verbs::*;
use crate::device;
use crate::guard::{EINVAL, ENOMEM, Errno, Res, UNSUPPORTED, minus_one, pointer, value};
use std::ffi::{c_char, c_int};
use std::ptr::null_mut;

const PASSIVE: c_int = 1;
const NUMERICHOST: c_int = 2;
const FAMILY: c_int = 8;
/// Asks InfiniBand's subnet administration instead of the resolver (since rdma-core 56).
pub(super) const SUBNET: c_int = 0x10;
const QPT_RC: c_int = 2;
const QPT_UD: c_int = 4;

pub(super) unsafe fn allocate<T>() -> Res<*mut T> {
    let p = libc::calloc(1, size_of::<T>()).cast::<T>();
    if p.is_null() { Err(ENOMEM) } else { Ok(p) }
}

pub(super) unsafe fn copy_address(
    from: *const libc::sockaddr,
    len: libc::socklen_t,
) -> Res<*mut libc::sockaddr> {
    let to = allocate::<libc::sockaddr_storage>()?;
    let len = (len as usize).min(size_of::<libc::sockaddr_storage>());
    std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast::<u8>(), len);
    Ok(to.cast())
}

/// Returns the address that getaddrinfo finds first.
unsafe fn look_up(
    node: *const c_char,
    service: *const c_char,
    hints: Option<&rdma_addrinfo>,
    to: &mut rdma_addrinfo,
) -> Result<(), c_int> {
    let mut c: libc::addrinfo = std::mem::zeroed();
    c.ai_socktype = libc::SOCK_STREAM;
    if let Some(hints) = hints {
        if hints.ai_flags & PASSIVE != 0 {
            c.ai_flags |= libc::AI_PASSIVE;
        }
        if hints.ai_flags & NUMERICHOST != 0 {
            c.ai_flags |= libc::AI_NUMERICHOST;
        }
        if hints.ai_flags & FAMILY != 0 {
            c.ai_family = hints.ai_family;
        }
    }
    let mut found = null_mut();
    let status = libc::getaddrinfo(node, service, &raw const c, &raw mut found);
    if status != 0 {
        return Err(status);
    }
    let first = &*found;
    let copied = copy_address(first.ai_addr, first.ai_addrlen);
    let (family, len) = (first.ai_family, first.ai_addrlen);
    libc::freeaddrinfo(found);
    let address = copied.map_err(|_| libc::EAI_MEMORY)?;
    to.ai_family = family;
    if to.ai_flags & PASSIVE != 0 {
        to.ai_src_addr = address;
        to.ai_src_len = len;
    } else {
        to.ai_dst_addr = address;
        to.ai_dst_len = len;
    }
    Ok(())
}

/// Fills in what follows from the hints.
unsafe fn complete(to: &mut rdma_addrinfo, hints: Option<&rdma_addrinfo>) -> Res<()> {
    (to.ai_qp_type, to.ai_port_space) =
        match hints.map_or((0, 0), |h| (h.ai_qp_type, h.ai_port_space)) {
            (0, 0) => (QPT_RC, PS_TCP as c_int),
            (QPT_UD, 0) => (QPT_UD, PS_UDP as c_int),
            (ty, 0) => (ty, PS_TCP as c_int),
            (0, ps) if ps == PS_UDP as c_int => (QPT_UD, ps),
            (0, ps) => (QPT_RC, ps),
            given => given,
        };
    let Some(hints) = hints else { return Ok(()) };
    if to.ai_flags & PASSIVE == 0 && hints.ai_src_len > 0 && !hints.ai_src_addr.is_null() {
        to.ai_src_addr = copy_address(hints.ai_src_addr, hints.ai_src_len)?;
        to.ai_src_len = hints.ai_src_len;
    }
    Ok(())
}

pub(crate) unsafe extern "C" fn rdma_getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
    res: *mut *mut rdma_addrinfo,
) -> c_int {
    let mut status = 0;
    let result = minus_one(|| {
        let hints = hints.as_ref();
        if res.is_null() {
            return Err(EINVAL);
        }
        if hints.is_some_and(|h| h.ai_flags & SUBNET != 0) {
            return Err(UNSUPPORTED);
        }
        let to = allocate::<rdma_addrinfo>()?;
        (*to).ai_flags = hints.map_or(0, |h| h.ai_flags);
        let filled = if !node.is_null() || !service.is_null() {
            look_up(node, service, hints, &mut *to)
        } else {
            copy_hints(&mut *to, hints).map_err(|_| libc::EAI_NONAME)
        };
        if let Err(code) = filled {
            rdma_freeaddrinfo(to);
            // The codes of getaddrinfo are passed on, because programs print them with gai_strerror.
            status = code;
            return Err(Errno(libc::EADDRNOTAVAIL));
        }
        if let Err(e) = complete(&mut *to, hints) {
            rdma_freeaddrinfo(to);
            return Err(e);
        }
        *res = to;
        Ok(0)
    });
    if status != 0 { status } else { result }
}

/// Without a name the addresses are in the hints.
unsafe fn copy_hints(to: &mut rdma_addrinfo, hints: Option<&rdma_addrinfo>) -> Res<()> {
    let hints = hints.ok_or(EINVAL)?;
    let passive = hints.ai_flags & PASSIVE != 0;
    let (from, len) = if passive {
        (hints.ai_src_addr, hints.ai_src_len)
    } else {
        (hints.ai_dst_addr, hints.ai_dst_len)
    };
    sockaddr::read(from)?;
    let address = copy_address(from, len)?;
    to.ai_family = c_int::from((*address).sa_family);
    if passive {
        (to.ai_src_addr, to.ai_src_len) = (address, len);
    } else {
        (to.ai_dst_addr, to.ai_dst_len) = (address, len);
    }
    Ok(())
}

pub(crate) unsafe extern "C" fn rdma_freeaddrinfo(res: *mut rdma_addrinfo) {
    value((), || {
        let mut at = res;
        while !at.is_null() {
            let next = (*at).ai_next;
            for part in [
                (*at).ai_src_addr.cast(),
                (*at).ai_dst_addr.cast(),
                (*at).ai_src_canonname.cast(),
                (*at).ai_dst_canonname.cast(),
                (*at).ai_route,
                (*at).ai_connect,
            ] {
                libc::free(part);
            }
            libc::free(at.cast());
            at = next;
        }
    });
}

/// The contexts that identifiers share, one for each device; they stay open.
pub(crate) unsafe extern "C" fn rdma_get_devices(num: *mut c_int) -> *mut *mut ibv_context {
    pointer(|| {
        let mut contexts = Vec::new();
        for device in device::devices()? {
            let raw = iwarp::raw::cm::device_context(&device.device)?;
            contexts.push(device::shared_context(&raw)?);
        }
        let list = libc::calloc(contexts.len() + 1, size_of::<usize>()).cast::<*mut ibv_context>();
        if list.is_null() {
            return Err(ENOMEM);
        }
        for (i, c) in contexts.iter().enumerate() {
            *list.add(i) = *c;
        }
        if !num.is_null() {
            *num = contexts.len() as c_int;
        }
        Ok(list)
    })
}

pub(crate) unsafe extern "C" fn rdma_free_devices(list: *mut *mut ibv_context) {
    libc::free(list.cast());
}
