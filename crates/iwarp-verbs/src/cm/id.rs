//! Functions for identifiers: creation, destruction, addresses, options.

use super::channel::{self, DELIVERY};
use super::event;
use super::identifier::{self, publish_timeout, refresh};
use super::object::{Id, find, is_synchronous};
use super::sockaddr;
use crate::abi::cma::*;
use crate::border::guard::{EINVAL, Errno, Res, UNSUPPORTED, minus_one, value};
use crate::border::object::{self, Kind};
use iwarp::runtime::cm::CmId;
use std::ffi::{c_int, c_uint, c_void};
use std::net::SocketAddr;
use std::ptr::null_mut;
use std::time::Duration;

pub(crate) unsafe extern "C" fn rdma_create_id(
    channel: *mut rdma_event_channel,
    to: *mut *mut rdma_cm_id,
    context: *mut c_void,
    ps: c_uint,
) -> c_int {
    minus_one(|| {
        *to = identifier::create(channel, context, ps)?;
        Ok(0)
    })
}

pub(crate) unsafe fn destroy(id: *mut rdma_cm_id) -> Res<()> {
    let object = find(id)?;
    if !(*id).event.is_null() {
        let event = std::mem::replace(&mut (*id).event, null_mut());
        event::acknowledge(event)?;
    }
    // As in the kernel, the connection ends with its identifier. The program destroys the queue
    // pair.
    let _ = object.raw.disconnect();
    {
        let _delivery = DELIVERY.lock();
        object.raw.set_user_data(0);
        object.raw.destroy();
    }
    object.events.wait();
    object::retire(Kind::CmId, id)?;
    let channel = object.endpoint.lock().channel;
    object::free::<rdma_cm_id, Id>(id);
    if channel != 0 {
        channel::destroy(channel as *mut rdma_event_channel);
    }
    Ok(())
}

pub(crate) unsafe extern "C" fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int {
    minus_one(|| {
        destroy(id)?;
        Ok(0)
    })
}

pub(crate) unsafe extern "C" fn rdma_migrate_id(
    id: *mut rdma_cm_id,
    channel: *mut rdma_event_channel,
) -> c_int {
    minus_one(|| {
        let object = find(id)?;
        if is_synchronous(object) {
            // The library keeps this event, so the program cannot acknowledge it.
            drop_event(id)?;
        }
        let own = channel.is_null();
        let to = if own { channel::create()? } else { channel };
        // The queue and the listener's mode change together: a connection request in between would
        // create an identifier of the other mode (synchronous or not).
        let old = {
            let _delivery = DELIVERY.lock();
            object.raw.migrate(&channel::find(to)?.queue);
            (*id).channel = to;
            std::mem::replace(
                &mut object.endpoint.lock().channel,
                if own { to as usize } else { 0 },
            )
        };
        // Delivered events belong to the old channel and must be acknowledged first.
        object.events.wait();
        if old != 0 {
            channel::destroy(old as *mut rdma_event_channel);
        }
        Ok(0)
    })
}

/// If the identifier is synchronous, waits for a call's event and stores it in `id->event`.
pub(crate) unsafe fn complete(id: *mut rdma_cm_id) -> Res<c_int> {
    let object = find(id)?;
    if !is_synchronous(object) {
        return Ok(0);
    }
    drop_event(id)?;
    let mut event = null_mut();
    if event::rdma_get_cm_event((*id).channel, &raw mut event) != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    (*id).event = event;
    match (*event).status {
        0 => Ok(0),
        // The status of a rejection may be a reason code instead of an errno.
        _ if (*event).event == 8 => Err(Errno(libc::ECONNREFUSED)),
        // A datagram listener that names no queue pair replies with a positive reason.
        reason if reason > 0 => Err(Errno(libc::ECONNREFUSED)),
        errno => Err(Errno(errno.abs())),
    }
}

/// Acknowledges the event that a synchronous identifier's last call stored.
pub(crate) unsafe fn drop_event(id: *mut rdma_cm_id) -> Res<()> {
    if !(*id).event.is_null() {
        let event = std::mem::replace(&mut (*id).event, null_mut());
        event::acknowledge(event)?;
    }
    Ok(())
}

pub(crate) unsafe extern "C" fn rdma_bind_addr(
    id: *mut rdma_cm_id,
    address: *mut libc::sockaddr,
) -> c_int {
    minus_one(|| {
        let address = sockaddr::read(address)?;
        find(id)?
            .raw
            .bind(address)
            .map_err(|error| map_bind_error(address, error.into()))?;
        refresh(id);
        Ok(0)
    })
}

/// Maps a failed bind's error as Linux does: a used port on a wildcard address is EADDRNOTAVAIL.
fn map_bind_error(address: SocketAddr, error: Errno) -> Errno {
    if address.ip().is_unspecified() && error == Errno(libc::EADDRINUSE) {
        return Errno(libc::EADDRNOTAVAIL);
    }
    error
}

pub(crate) unsafe extern "C" fn rdma_resolve_addr(
    id: *mut rdma_cm_id,
    source: *mut libc::sockaddr,
    peer: *mut libc::sockaddr,
    timeout_ms: c_int,
) -> c_int {
    minus_one(|| {
        let (source, peer) = (sockaddr::read_optional(source)?, sockaddr::read(peer)?);
        // As in the kernel, a negative timeout is a very long one.
        let timeout = Duration::from_millis(u64::from(timeout_ms as u32));
        find(id)?.raw.resolve_addr_within(source, peer, timeout)?;
        refresh(id);
        complete(id)
    })
}

pub(crate) unsafe extern "C" fn rdma_resolve_route(
    id: *mut rdma_cm_id,
    _timeout_ms: c_int,
) -> c_int {
    minus_one(|| {
        find(id)?.raw.resolve_route()?;
        complete(id)
    })
}

pub(crate) unsafe extern "C" fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int {
    minus_one(|| {
        find(id)?.raw.listen_strictly(backlog.max(0) as u32)?;
        refresh(id);
        Ok(0)
    })
}

const OPTION_ID: c_int = 0;
const OPTION_IB: c_int = 1;
const ID_TOS: c_int = 0;
const ID_REUSEADDR: c_int = 1;
const ID_AFONLY: c_int = 2;
const ID_ACK_TIMEOUT: c_int = 3;

/// The largest ACK timeout code; the field has five bits.
const ACK_TIMEOUT_MAX: u8 = 31;

/// Sets an option. As in the kernel, fails with EINVAL in some states of the identifier.
fn set_port_option(raw: &CmId, name: c_int, on: bool) -> Res<()> {
    let allowed = match name {
        ID_REUSEADDR => raw.may_reuse_address(on),
        _ => raw.may_choose_family(),
    };
    if !allowed {
        return Err(EINVAL);
    }
    match name {
        ID_REUSEADDR => raw.set_reuse_address(on),
        _ => raw.set_only_v6(on),
    }
    Ok(())
}

pub(crate) unsafe extern "C" fn rdma_set_option(
    id: *mut rdma_cm_id,
    level: c_int,
    name: c_int,
    data: *mut c_void,
    len: usize,
) -> c_int {
    minus_one(|| {
        let object = find(id)?;
        let int = || {
            if len == size_of::<c_int>() && !data.is_null() {
                Ok(*data.cast::<c_int>())
            } else {
                Err(EINVAL)
            }
        };
        match (level, name) {
            (OPTION_ID, ID_AFONLY | ID_REUSEADDR) => {
                set_port_option(&object.raw, name, int()? != 0)?;
            }
            (OPTION_ID, ID_TOS) if len == 1 && !data.is_null() => {
                object.endpoint.lock().tos = *data.cast::<u8>();
            }
            (OPTION_ID, ID_ACK_TIMEOUT) if len == 1 && !data.is_null() => {
                let timeout = *data.cast::<u8>();
                if timeout > ACK_TIMEOUT_MAX || object.raw.is_for_datagrams() {
                    return Err(EINVAL);
                }
                object.endpoint.lock().ack_timeout = Some(timeout);
                publish_timeout(id, object);
            }
            (OPTION_ID, ID_TOS | ID_ACK_TIMEOUT) => return Err(EINVAL),
            (OPTION_IB, _) => return Err(UNSUPPORTED),
            _ => return Err(Errno(libc::ENOSYS)),
        }
        Ok(0)
    })
}

/// Returns our port and the peer's in network byte order; zero if unknown.
unsafe fn ports(id: *mut rdma_cm_id) -> (u16, u16) {
    value((0, 0), || {
        let Ok(object) = find(id) else { return (0, 0) };
        let (local, peer) = object.raw.addresses();
        let port = |a: Option<SocketAddr>| a.map_or(0, |a| a.port().to_be());
        (port(local), port(peer))
    })
}

pub(crate) unsafe extern "C" fn rdma_get_src_port(id: *mut rdma_cm_id) -> u16 {
    ports(id).0
}

pub(crate) unsafe extern "C" fn rdma_get_dst_port(id: *mut rdma_cm_id) -> u16 {
    ports(id).1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn synchronous_loopback_id_defers_device() {
        let mut address = loopback();
        let address = (&raw mut address).cast::<libc::sockaddr>();
        // SAFETY: identifiers of this test, used as the manual pages require.
        unsafe {
            let mut id = null_mut();
            assert_eq!(
                rdma_create_id(null_mut(), &raw mut id, null_mut(), PS_TCP),
                0
            );
            assert_eq!(rdma_bind_addr(id, address), 0);
            assert!((*id).verbs.is_null() && (*id).pd.is_null());
            assert_ne!(rdma_get_src_port(id), 0);
            assert_eq!(rdma_listen(id, 1), 0);
            assert!(!(*id).verbs.is_null() && !(*id).pd.is_null());
            let mut peer = (*id).route.addr.src_storage;
            assert_eq!(rdma_destroy_id(id), 0);

            assert_eq!(
                rdma_create_id(null_mut(), &raw mut id, null_mut(), PS_TCP),
                0
            );
            assert_eq!(rdma_bind_addr(id, address), 0);
            assert_eq!(
                rdma_resolve_addr(id, null_mut(), (&raw mut peer).cast(), 1000),
                0
            );
            assert!(!(*id).verbs.is_null() && !(*id).pd.is_null());
            assert_eq!(rdma_destroy_id(id), 0);
        }
    }

    #[test]
    fn bound_loopback_id_has_device() {
        let mut address = loopback();
        let address = (&raw mut address).cast::<libc::sockaddr>();
        // SAFETY: a channel and an identifier of this test, used as the manual pages require.
        unsafe {
            let channel = channel::rdma_create_event_channel();
            assert!(!channel.is_null());
            let mut id = null_mut();
            assert_eq!(rdma_create_id(channel, &raw mut id, null_mut(), PS_TCP), 0);
            assert_eq!(rdma_bind_addr(id, address), 0);
            assert!(!(*id).verbs.is_null());
            assert_eq!(rdma_destroy_id(id), 0);
            channel::rdma_destroy_event_channel(channel);
        }
    }

    fn loopback() -> libc::sockaddr_storage {
        sockaddr::write("127.0.0.1:0".parse().unwrap()).0
    }
}
