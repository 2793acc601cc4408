//! The GID table of a device: `ibv_query_gid(3)`, `ibv_query_gid_ex(3)`, `ibv_query_gid_table(3)`,
//! and the addresses of a path.

use super::context::{ContextObject, checked_context};
use crate::abi::kern;
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Errno, Res, code, minus_one, value};
use iwarp::{GidEntry, GidKind};
use std::ffi::{c_int, c_uint};
use std::net::Ipv6Addr;

/// GID types of `ibv_query_gid_type`, and of `struct ibv_gid_entry`.
const GID_TYPE_SYSFS_IB_ROCE_V1: c_uint = 0;
const GID_TYPE_SYSFS_ROCE_V2: c_uint = 1;
const GID_TYPE_IB: u32 = 0;
const GID_TYPE_ROCE_V1: u32 = 1;
const GID_TYPE_ROCE_V2: u32 = 2;

/// Returns a current entry of a port's GID table, or `None` if the entry is empty.
pub(crate) fn gid(c: &ContextObject, port_num: u32, index: u32) -> Res<Option<GidEntry>> {
    if port_num != 1 || index >= c.device.face.gid_table_len() {
        return Err(EINVAL);
    }
    Ok(gids(c)?.into_iter().find(|entry| entry.index == index))
}

/// Returns the source index for a reply to a datagram that was sent to this GID. If it is a group's
/// GID, the source is the first address of the same family. If an address has several indices,
/// returns the last, which is RoCE v2. Fails with EINVAL if the device no longer has the address.
pub(crate) fn index_for(c: &ContextObject, to: [u8; 16]) -> Res<u8> {
    let table = gids(c)?;
    let is_v4 = |gid: [u8; 16]| Ipv6Addr::from(gid).to_canonical().is_ipv4();
    let own = match Ipv6Addr::from(to).to_canonical().is_multicast() {
        true => table
            .iter()
            .map(|e| e.gid)
            .find(|gid| is_v4(*gid) == is_v4(to)),
        false => Some(to),
    };
    let entry = table.iter().rfind(|entry| Some(entry.gid) == own);
    entry.and_then(|e| u8::try_from(e.index).ok()).ok_or(EINVAL)
}

fn gids(c: &ContextObject) -> Res<Vec<GidEntry>> {
    match c.device.device.current()? {
        Some(device) => Ok(device.gids(c.device.face)),
        None => Ok(Vec::new()),
    }
}

pub(crate) unsafe extern "C" fn ibv_query_gid(
    c: *mut ibv_context,
    port_num: u8,
    index: c_int,
    to: *mut [u8; 16],
) -> c_int {
    minus_one(|| {
        let index = u32::try_from(index).map_err(|_| EINVAL)?;
        let entry = gid(checked_context(c)?, u32::from(port_num), index)?;
        *to = entry.map_or([0; 16], |entry| entry.gid);
        Ok(0)
    })
}

fn entry(c: &ContextObject, from: &GidEntry) -> ibv_gid_entry {
    // SAFETY: any 16 bytes are two valid integers.
    let gid = unsafe { std::mem::transmute::<[u8; 16], [u64; 2]>(from.gid) };
    let name = std::ffi::CString::new(c.device.device.interface.as_str()).unwrap_or_default();
    ibv_gid_entry {
        gid,
        gid_index: from.index,
        port_num: 1,
        gid_type: match from.kind {
            GidKind::RoceV1 => GID_TYPE_ROCE_V1,
            GidKind::RoceV2 => GID_TYPE_ROCE_V2,
            _ => GID_TYPE_IB,
        },
        // SAFETY: `name` is a C string.
        ndev_ifindex: unsafe { libc::if_nametoindex(name.as_ptr()) },
    }
}

/// Writes an entry of `size` bytes, which is larger than `ibv_gid_entry` if the program's header is
/// newer.
unsafe fn write_entry(to: *mut ibv_gid_entry, from: ibv_gid_entry, size: usize) {
    std::ptr::write_bytes(to.cast::<u8>(), 0, size);
    to.write_unaligned(from);
}

pub(crate) unsafe extern "C" fn _ibv_query_gid_ex(
    c: *mut ibv_context,
    port_num: u32,
    index: u32,
    to: *mut ibv_gid_entry,
    flags: u32,
    size: usize,
) -> c_int {
    code(|| {
        if flags != 0 || to.is_null() || size < size_of::<ibv_gid_entry>() {
            return Err(EINVAL);
        }
        let c = checked_context(c)?;
        let Some(found) = gid(c, port_num, index)? else {
            return Err(Errno(libc::ENODATA));
        };
        write_entry(to, entry(c, &found), size);
        Ok(())
    })
}

/// Returns the GID table. As in the kernel, a partial result is an error.
pub(crate) unsafe extern "C" fn _ibv_query_gid_table(
    c: *mut ibv_context,
    to: *mut ibv_gid_entry,
    max: usize,
    flags: u32,
    size: usize,
) -> isize {
    let result = value(Err(Errno(libc::EIO)), || {
        if flags != 0 || to.is_null() || size < size_of::<ibv_gid_entry>() || max == 0 {
            return Err(EINVAL);
        }
        let c = checked_context(c)?;
        let table = gids(c)?;
        if table.len() > max {
            return Err(EINVAL);
        }
        for (i, found) in table.iter().enumerate() {
            write_entry(to.byte_add(i * size), entry(c, found), size);
        }
        Ok(table.len() as isize)
    });
    result.unwrap_or_else(|e: Errno| -(e.0 as isize))
}

pub(crate) unsafe extern "C" fn ibv_query_gid_type(
    c: *mut ibv_context,
    port_num: u8,
    index: c_uint,
    to: *mut c_uint,
) -> c_int {
    minus_one(|| {
        let found = gid(checked_context(c)?, u32::from(port_num), index)?;
        *to = match found.map(|entry| entry.kind) {
            Some(GidKind::RoceV2) => GID_TYPE_SYSFS_ROCE_V2,
            // Empty entries have this type too, as in rdma-core.
            _ => GID_TYPE_SYSFS_IB_ROCE_V1,
        };
        Ok(0)
    })
}

/// Returns the local and the peer's GID of a path. If the path has no global route header, looks
/// them up by LID.
pub(crate) fn gids_of_path(c: &ContextObject, path: &ibv_ah_attr) -> Res<([u8; 16], [u8; 16])> {
    if path.is_global == 0 {
        return c.device.device.path_to_lid(path.dlid).ok_or(EINVAL);
    }
    let own = gid(c, 1, u32::from(path.grh.sgid_index))?.ok_or(EINVAL)?;
    Ok((own.gid, kern::gid_octets(path.grh.dgid)))
}
