//! Queries of a device: attributes, port, GIDs, P_Keys, clock.

use crate::abi::verbs::*;
use crate::device::{checked_context, context, fill};
use crate::guard::{EINVAL, Errno, Res, code, minus_one, value};
use iwarp::LIMITS;
use std::ffi::{c_int, c_uint, c_void};

/// RDMA Reads and atomics that a queue pair has room for, in each direction.
pub(crate) const RD_ATOMIC: u16 = 64;
/// Octets of emulated device memory per allocation.
pub(crate) const MAX_DM: u64 = 1 << 20;
/// Entries of the GID table; the first is filled.
const GID_TABLE: u32 = 4;
/// GID types as in sysfs and in `struct ibv_gid_entry`.
const GID_TYPE_SYSFS_ROCE_V2: c_uint = 1;
const GID_TYPE_ROCE_V2: u32 = 2;
/// The vendor: "iW" and a zero, so that no program takes it for a vendor with an interface of its own.
const VENDOR_ID: u32 = 0x69_57_00;

/// Window types 1 and 2B, events on notification, resizing of shared receive queues, GUIDs.
const CAPS: c_uint = 1 << 11 | 1 << 13 | 1 << 17 | 1 << 21 | 1 << 24;

/// Registration on demand, of ranges; reliable connections may use such memory for everything they do.
const ODP_SUPPORT: u64 = 1;
const ODP_RC: u64 = 0x3f;
/// Datagrams: Sends, and receives of either kind of queue.
const ODP_UD: u64 = 0x23;

fn attributes(c: &crate::device::ContextObject) -> ibv_device_attr {
    let guid = c.device.device.guid.to_be();
    // SAFETY: integers only.
    let mut a: ibv_device_attr = unsafe { std::mem::zeroed() };
    fill(&mut a.fw_ver, env!("CARGO_PKG_VERSION"));
    a.node_guid = guid;
    a.sys_image_guid = guid;
    a.max_mr_size = u64::MAX;
    a.page_size_cap = 0xffff_f000;
    a.vendor_id = VENDOR_ID;
    a.vendor_part_id = 1;
    a.hw_ver = 1;
    a.max_qp = 1 << 18;
    a.max_qp_wr = LIMITS.max_qp_wr as c_int;
    a.device_cap_flags = CAPS;
    a.max_sge = LIMITS.max_sge as c_int;
    a.max_sge_rd = LIMITS.max_sge as c_int;
    a.max_cq = 1 << 18;
    a.max_cqe = LIMITS.max_cqe as c_int;
    a.max_mr = LIMITS.max_mr as c_int;
    a.max_pd = 1 << 20;
    a.max_qp_rd_atom = c_int::from(RD_ATOMIC);
    a.max_res_rd_atom = c_int::from(RD_ATOMIC) << 18;
    a.max_qp_init_rd_atom = c_int::from(RD_ATOMIC);
    // Atomic with respect to other queue pairs of this process and to the CPU: ATOMIC_GLOB.
    a.atomic_cap = 2;
    a.max_mw = LIMITS.max_mr as c_int;
    // Memberships are limited by the system, which counts them for each socket.
    a.max_mcast_grp = 1 << 16;
    a.max_mcast_qp_attach = 1 << 16;
    a.max_total_mcast_qp_attach = 1 << 21;
    a.max_ah = 1 << 16;
    a.max_srq = 1 << 16;
    a.max_srq_wr = LIMITS.max_qp_wr as c_int;
    a.max_srq_sge = LIMITS.max_sge as c_int;
    a.max_pkeys = 1;
    a.local_ca_ack_delay = 0;
    a.phys_port_cnt = 1;
    a
}

pub(crate) unsafe extern "C" fn ibv_query_device(
    c: *mut ibv_context,
    to: *mut ibv_device_attr,
) -> c_int {
    code(|| {
        if to.is_null() {
            return Err(EINVAL);
        }
        *to = attributes(checked_context(c)?);
        Ok(())
    })
}

/// `ibv_query_device_ex(3)`. `size` is the size that the program's header knows; no more is written.
pub(crate) unsafe extern "C" fn query_device_ex(
    c: *mut ibv_context,
    input: *const c_void,
    to: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    code(|| {
        // The input structure has only a mask, of which no bit is defined.
        if !input.is_null() && *input.cast::<u32>() != 0 {
            return Err(EINVAL);
        }
        if to.is_null() || size < std::mem::offset_of!(ibv_device_attr_ex, comp_mask) + 4 {
            return Err(EINVAL);
        }
        let mut a: ibv_device_attr_ex = std::mem::zeroed();
        a.orig_attr = attributes(context(c));
        a.odp_caps = [ODP_SUPPORT, ODP_RC, ODP_UD];
        a.completion_timestamp_mask = u64::MAX;
        a.hca_core_clock = 1_000_000;
        a.device_cap_flags_ex = u64::from(CAPS);
        a.max_dm_size = MAX_DM;
        a.phys_port_cnt_ex = 1;
        std::ptr::write_bytes(to.cast::<u8>(), 0, size);
        std::ptr::copy_nonoverlapping(
            (&raw const a).cast::<u8>(),
            to.cast::<u8>(),
            size.min(size_of::<ibv_device_attr_ex>()),
        );
        Ok(())
    })
}

fn port(c: &crate::device::ContextObject) -> ibv_port_attr {
    let device = &c.device.device;
    // IB's MTU codes: 256 << (code - 1).
    let mtu = match device.mtu {
        4096.. => 5,
        2048.. => 4,
        1024.. => 3,
        512.. => 2,
        _ => 1,
    };
    // SAFETY: integers only.
    let mut a: ibv_port_attr = unsafe { std::mem::zeroed() };
    a.state = 4;
    a.max_mtu = 5;
    a.active_mtu = mtu;
    a.gid_tbl_len = GID_TABLE as c_int;
    // Connection management, device management, IP based GIDs.
    a.port_cap_flags = 1 << 16 | 1 << 19 | 1 << 26;
    a.max_msg_sz = LIMITS.max_message;
    a.pkey_tbl_len = 1;
    a.max_vl_num = 1;
    // 1X of 10 Gb/s.
    a.active_width = 1;
    a.active_speed = 4;
    a.phys_state = 5;
    // Ethernet.
    a.link_layer = 2;
    a
}

pub(crate) unsafe extern "C" fn query_port(
    c: *mut ibv_context,
    port_num: u8,
    to: *mut ibv_port_attr,
    len: usize,
) -> c_int {
    code(|| {
        if port_num != 1 || to.is_null() {
            return Err(EINVAL);
        }
        let a = port(checked_context(c)?);
        std::ptr::write_bytes(to.cast::<u8>(), 0, len);
        std::ptr::copy_nonoverlapping(
            (&raw const a).cast::<u8>(),
            to.cast::<u8>(),
            len.min(size_of::<ibv_port_attr>()),
        );
        Ok(())
    })
}

/// The exported function, for programs built before `link_layer` existed: their structure has 48 octets.
pub(crate) unsafe extern "C" fn ibv_query_port(
    c: *mut ibv_context,
    port_num: u8,
    to: *mut ibv_port_attr,
) -> c_int {
    query_port(c, port_num, to, 48)
}

/// The GID table of a port: entry 0 is the device's address.
fn gid(c: &crate::device::ContextObject, port_num: u32, index: u32) -> Res<Option<[u8; 16]>> {
    if port_num != 1 || index >= GID_TABLE {
        return Err(EINVAL);
    }
    Ok((index == 0).then(|| c.device.device.gid()))
}

pub(crate) unsafe extern "C" fn ibv_query_gid(
    c: *mut ibv_context,
    port_num: u8,
    index: c_int,
    to: *mut [u8; 16],
) -> c_int {
    minus_one(|| {
        let index = u32::try_from(index).map_err(|_| EINVAL)?;
        *to = gid(checked_context(c)?, u32::from(port_num), index)?.unwrap_or_default();
        Ok(0)
    })
}

fn entry(c: &crate::device::ContextObject, index: u32, gid: [u8; 16]) -> ibv_gid_entry {
    // SAFETY: any 16 octets are two integers.
    let gid = unsafe { std::mem::transmute::<[u8; 16], [u64; 2]>(gid) };
    let name = std::ffi::CString::new(c.device.device.interface.as_str()).unwrap_or_default();
    ibv_gid_entry {
        gid,
        gid_index: index,
        port_num: 1,
        gid_type: GID_TYPE_ROCE_V2,
        // SAFETY: a C string.
        ndev_ifindex: unsafe { libc::if_nametoindex(name.as_ptr()) },
    }
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
        *to = match gid(c, port_num, index)? {
            Some(gid) => entry(c, index, gid),
            None => return Err(Errno(libc::ENODATA)),
        };
        Ok(())
    })
}

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
        let Some(gid) = gid(c, 1, 0)? else {
            return Ok(0);
        };
        *to = entry(c, 0, gid);
        Ok(1)
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
        gid(checked_context(c)?, u32::from(port_num), index)?;
        *to = GID_TYPE_SYSFS_ROCE_V2;
        Ok(0)
    })
}

pub(crate) unsafe extern "C" fn ibv_query_pkey(
    c: *mut ibv_context,
    port_num: u8,
    index: c_int,
    to: *mut u16,
) -> c_int {
    minus_one(|| {
        checked_context(c)?;
        if port_num != 1 || index != 0 {
            return Err(EINVAL);
        }
        *to = 0xffff;
        Ok(0)
    })
}

pub(crate) unsafe extern "C" fn ibv_get_pkey_index(
    c: *mut ibv_context,
    port_num: u8,
    pkey: u16,
) -> c_int {
    minus_one(|| {
        checked_context(c)?;
        if port_num == 1 && pkey == 0xffff {
            Ok(0)
        } else {
            Err(EINVAL)
        }
    })
}

/// The device's clock is the monotonic one, in nanoseconds.
pub(crate) unsafe extern "C" fn query_rt_values(
    c: *mut ibv_context,
    to: *mut ibv_values_ex,
) -> c_int {
    code(|| {
        checked_context(c)?;
        let asked = (*to).comp_mask;
        (*to).comp_mask = 0;
        if asked & 1 != 0 {
            let mut now: libc::timespec = std::mem::zeroed();
            libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now);
            // As with the kernel's drivers, the value is in the field of the nanoseconds.
            (*to).raw_clock = [0, now.tv_sec * 1_000_000_000 + now.tv_nsec];
            (*to).comp_mask = 1;
        }
        Ok(())
    })
}
