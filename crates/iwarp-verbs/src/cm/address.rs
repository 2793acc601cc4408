//! Look-ups: `rdma_getaddrinfo(3)`, `rdma_get_devices(3)`.

use crate::abi::cma::*;
use crate::abi::verbs::value::{QPT_RC, QPT_UC, QPT_UD, QPT_XRC_RECV, QPT_XRC_SEND};
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, ENOMEM, Errno, Res, UNSUPPORTED, minus_one, pointer, value};
use crate::device::list;
use crate::open;
use crate::process::unused;
use std::ffi::{c_char, c_int, c_uint};
use std::ptr::{null, null_mut};

const PASSIVE: c_int = 1;
const NUMERICHOST: c_int = 2;
const FAMILY: c_int = 8;
/// The family of InfiniBand addresses. No device of this library has such an address.
const AF_IB: c_int = 27;
/// Queries InfiniBand's subnet administration instead of the resolver (since rdma-core 56).
pub(super) const SUBNET: c_int = 0x10;

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

/// Converts the hints for getaddrinfo. As in librdmacm, the address family applies even without
/// `RAI_FAMILY`.
fn socket_hints(hints: &rdma_addrinfo) -> Result<libc::addrinfo, c_int> {
    // SAFETY: integers and pointers, for which zero is valid.
    let mut c: libc::addrinfo = unsafe { std::mem::zeroed() };
    if hints.ai_flags & PASSIVE != 0 {
        c.ai_flags |= libc::AI_PASSIVE;
    }
    if hints.ai_flags & NUMERICHOST != 0 {
        c.ai_flags |= libc::AI_NUMERICHOST;
    }
    if hints.ai_family != AF_IB {
        c.ai_family = hints.ai_family;
    } else if hints.ai_flags & (FAMILY | NUMERICHOST) == FAMILY | NUMERICHOST {
        // The name is a GID, and the program wants an InfiniBand address.
        return Err(libc::EAI_FAMILY);
    }
    c.ai_socktype = match hints.ai_qp_type as c_uint {
        QPT_RC | QPT_UC | QPT_XRC_SEND | QPT_XRC_RECV => libc::SOCK_STREAM,
        QPT_UD => libc::SOCK_DGRAM,
        _ => 0,
    };
    c.ai_protocol = match (hints.ai_port_space as c_uint, c.ai_socktype) {
        (PS_TCP, _) | (PS_IB, libc::SOCK_STREAM) => libc::IPPROTO_TCP,
        (PS_UDP | PS_IPOIB, _) | (PS_IB, libc::SOCK_DGRAM) => libc::IPPROTO_UDP,
        _ => 0,
    };
    Ok(c)
}

/// Fills in getaddrinfo's first address and the fields that depend on it.
unsafe fn look_up(
    node: *const c_char,
    service: *const c_char,
    hints: Option<&rdma_addrinfo>,
    to: &mut rdma_addrinfo,
) -> Result<(), c_int> {
    let given = hints.map(socket_hints).transpose()?;
    let given = given.as_ref().map_or(null(), std::ptr::from_ref);
    let mut found = null_mut();
    let status = libc::getaddrinfo(node, service, given, &raw mut found);
    if status != 0 {
        return Err(status);
    }
    let first = &*found;
    let (family, kind, protocol) = (first.ai_family, first.ai_socktype, first.ai_protocol);
    let (copied, len) = (
        copy_address(first.ai_addr, first.ai_addrlen),
        first.ai_addrlen,
    );
    libc::freeaddrinfo(found);
    let address = copied.map_err(|_| libc::EAI_MEMORY)?;
    to.ai_flags &= PASSIVE;
    to.ai_family = family;
    if to.ai_flags & PASSIVE != 0 {
        (to.ai_src_addr, to.ai_src_len) = (address, len);
    } else {
        (to.ai_dst_addr, to.ai_dst_len) = (address, len);
    }
    if to.ai_qp_type == 0 {
        to.ai_qp_type = match kind {
            libc::SOCK_STREAM => QPT_RC as c_int,
            libc::SOCK_DGRAM => QPT_UD as c_int,
            _ => 0,
        };
    }
    if to.ai_port_space == 0 {
        to.ai_port_space = match protocol {
            libc::IPPROTO_TCP => PS_TCP as c_int,
            libc::IPPROTO_UDP => PS_UDP as c_int,
            _ => 0,
        };
    }
    Ok(())
}

/// Copies addresses from the hints where the look-up found none.
unsafe fn copy_hints(to: &mut rdma_addrinfo, hints: &rdma_addrinfo, named: bool) -> Res<()> {
    let given = |address: *mut libc::sockaddr, len| !address.is_null() && len > 0;
    if !named && given(hints.ai_dst_addr, hints.ai_dst_len) {
        to.ai_dst_addr = copy_address(hints.ai_dst_addr, hints.ai_dst_len)?;
        to.ai_dst_len = hints.ai_dst_len;
    }
    if to.ai_src_len == 0 && given(hints.ai_src_addr, hints.ai_src_len) {
        to.ai_src_addr = copy_address(hints.ai_src_addr, hints.ai_src_len)?;
        to.ai_src_len = hints.ai_src_len;
    }
    Ok(())
}

/// Translates names to addresses as librdmacm does: there is one result, from getaddrinfo's first
/// address. Without a name and a service the result is a copy of the hints. Returns getaddrinfo's
/// code if a name is not found, and -1 with `errno` set for other errors.
pub(crate) unsafe extern "C" fn rdma_getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
    res: *mut *mut rdma_addrinfo,
) -> c_int {
    let mut status = 0;
    let result = minus_one(|| {
        let hints = hints.as_ref();
        let named = !node.is_null() || !service.is_null();
        if res.is_null() || !(named || hints.is_some()) {
            return Err(EINVAL);
        }
        if hints.is_some_and(|h| h.ai_flags & SUBNET != 0) {
            return Err(UNSUPPORTED);
        }
        let to = allocate::<rdma_addrinfo>()?;
        if let Some(hints) = hints {
            (*to).ai_flags = hints.ai_flags;
            (*to).ai_family = hints.ai_family;
            (*to).ai_qp_type = hints.ai_qp_type;
            (*to).ai_port_space = hints.ai_port_space;
        }
        if named && let Err(code) = look_up(node, service, hints, &mut *to) {
            rdma_freeaddrinfo(to);
            // Programs print getaddrinfo's codes with gai_strerror.
            status = code;
            return Err(match code {
                libc::EAI_MEMORY => ENOMEM,
                _ => Errno(libc::EADDRNOTAVAIL),
            });
        }
        if let Some(hints) = hints
            && let Err(e) = copy_hints(&mut *to, hints, named)
        {
            rdma_freeaddrinfo(to);
            return Err(e);
        }
        *res = to;
        Ok(0)
    });
    if status != 0 { status } else { result }
}

pub(crate) unsafe extern "C" fn rdma_freeaddrinfo(res: *mut rdma_addrinfo) {
    value((), || {
        let mut current = res;
        while !current.is_null() {
            let next = (*current).ai_next;
            for part in [
                (*current).ai_src_addr.cast(),
                (*current).ai_dst_addr.cast(),
                (*current).ai_src_canonname.cast(),
                (*current).ai_dst_canonname.cast(),
                (*current).ai_route,
                (*current).ai_connect,
            ] {
                libc::free(part);
            }
            libc::free(current.cast());
            current = next;
        }
    });
}

/// A list from `rdma_getaddrinfo`; freed on drop.
pub(crate) struct Addresses(pub(super) *mut rdma_addrinfo);

// SAFETY: only this value refers to the list, and any thread may free the C library's memory.
unsafe impl Send for Addresses {}

impl Drop for Addresses {
    fn drop(&mut self) {
        // SAFETY: allocated by `rdma_getaddrinfo` or [`allocate`], and freed only here.
        unsafe { rdma_freeaddrinfo(self.0) };
    }
}

impl Addresses {
    pub(super) const fn into_raw(self) -> *mut rdma_addrinfo {
        let list = self.0;
        std::mem::forget(self);
        list
    }
}

/// Returns the contexts that identifiers share, one per device. They stay open.
pub(crate) unsafe extern "C" fn rdma_get_devices(num: *mut c_int) -> *mut *mut ibv_context {
    unused::record_use();
    pointer(|| {
        let mut contexts = Vec::new();
        for device in list::devices()? {
            let raw = iwarp::runtime::cm::device_context(&device.device)?;
            contexts.push(open::shared_context(&raw)?);
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
