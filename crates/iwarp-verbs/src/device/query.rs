//! Queries of a device: attributes, port, P_Keys, clock.

use super::context::{ContextObject, checked_context, context};
use super::list::fill_c_string;
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, code, minus_one};
use iwarp::LIMITS;
use iwarp_rnic::tags::{MAX_TAG_SGE, MAX_TAGS};
use std::ffi::{c_int, c_uint, c_void};

/// RDMA Reads and atomics in flight per queue pair, in each direction.
pub(crate) const RD_ATOMIC: u16 = 64;
pub(crate) const PKEY: u16 = 0xffff;
pub(crate) const MAX_DM: u64 = 1 << 20;
/// The vendor ID: "iW" and a zero. Programs that use vendor-specific interfaces do not know it.
const VENDOR_ID: u32 = 0x69_57_00;

/// Window types 1 and 2B, events on notification, resizable shared receive queues, GUIDs, XRC.
const CAPS: c_uint = 1 << 11 | 1 << 13 | 1 << 17 | 1 << 20 | 1 << 21 | 1 << 24;
/// `IB_UVERBS_DEVICE_FLUSH_GLOBAL` and `IB_UVERBS_DEVICE_ATOMIC_WRITE`, which fit into the extended
/// capabilities only.
const CAP_FLUSH_GLOBAL: u64 = 1 << 38;
const CAP_ATOMIC_WRITE: u64 = 1 << 40;

/// Tag matching (`struct ibv_tm_caps`): bytes of a rendezvous request (the receiver's two headers,
/// and as much again for the program); buffers in a list; flags (reliable connections); outstanding
/// list operations; elements of a buffer.
const TM_CAPS: [u32; 5] = [64, MAX_TAGS, 1, MAX_TAG_OPS, MAX_TAG_SGE];
/// Outstanding operations on a tag list.
pub(crate) const MAX_TAG_OPS: u32 = 1024;

/// On-demand paging of ranges and of the whole address space. Each transport supports it for all
/// its operations: unreliable connections have Sends, receives, Writes and shared receives;
/// datagrams have Sends and both kinds of receives.
const ODP_SUPPORT: u64 = 1 | 1 << 1;
const ODP_RC: u64 = 0x3f;
const ODP_UC: u64 = 0x27;
const ODP_UD: u64 = 0x23;

fn attributes(c: &ContextObject) -> ibv_device_attr {
    let guid = c.device.device.guid.to_be();
    // SAFETY: integers only.
    let mut a: ibv_device_attr = unsafe { std::mem::zeroed() };
    fill_c_string(&mut a.fw_ver, env!("CARGO_PKG_VERSION"));
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
    // ATOMIC_GLOB: atomic with respect to other queue pairs of this process and the CPU.
    a.atomic_cap = 2;
    a.max_mw = LIMITS.max_mr as c_int;
    // The kernel limits memberships per socket.
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

/// `ibv_query_device_ex(3)`. Writes at most `size` bytes, the size in the program's header.
pub(crate) unsafe extern "C" fn query_device_ex(
    c: *mut ibv_context,
    input: *const c_void,
    to: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    code(|| {
        // The input structure has only a mask without defined bits.
        if !input.is_null() && *input.cast::<u32>() != 0 {
            return Err(EINVAL);
        }
        if to.is_null() || size < std::mem::offset_of!(ibv_device_attr_ex, comp_mask) + 4 {
            return Err(EINVAL);
        }
        let mut a: ibv_device_attr_ex = std::mem::zeroed();
        a.orig_attr = attributes(context(c));
        a.odp_caps = [ODP_SUPPORT, ODP_RC | ODP_UC << 32, ODP_UD];
        a.xrc_odp_caps = ODP_RC as u32;
        a.completion_timestamp_mask = u64::MAX;
        a.hca_core_clock = 1_000_000;
        a.device_cap_flags_ex = u64::from(CAPS) | CAP_FLUSH_GLOBAL | CAP_ATOMIC_WRITE;
        a.tm_caps = TM_CAPS;
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

/// Codes of the port's logical and physical states.
const PORT_DOWN: c_uint = 1;
const PORT_ACTIVE: c_uint = 4;
const DISABLED: u8 = 3;
const LINK_UP: u8 = 5;
/// Codes of the port's width and speed: one lane of 10 Gb/s. TCP has no speed of its own, but
/// programs expect a number.
const WIDTH_1X: u8 = 1;
const SPEED_QDR: u8 = 4;
/// The speed for these codes, in units of 100 Mb/s.
const PORT_SPEED: u64 = 100;

/// Returns the code of InfiniBand's largest MTU that fits: the MTU of a code is 256 << (code - 1).
pub(crate) const fn mtu_code(mtu: u32) -> c_uint {
    match mtu {
        4096.. => 5,
        2048.. => 4,
        1024.. => 3,
        512.. => 2,
        _ => 1,
    }
}

fn port(c: &ContextObject) -> ibv_port_attr {
    // SAFETY: integers only.
    let mut a: ibv_port_attr = unsafe { std::mem::zeroed() };
    let up = c.raw.is_port_up();
    a.state = if up { PORT_ACTIVE } else { PORT_DOWN };
    a.max_mtu = 5;
    a.active_mtu = mtu_code(c.raw.device().mtu);
    a.gid_tbl_len = c.device.face.gid_table_len() as c_int;
    a.lid = c.device.device.lid(c.device.face);
    // Connection management, device management, IP-based GIDs.
    a.port_cap_flags = 1 << 16 | 1 << 19 | 1 << 26;
    a.max_msg_sz = LIMITS.max_message;
    a.pkey_tbl_len = 1;
    a.max_vl_num = 1;
    a.active_width = WIDTH_1X;
    a.active_speed = SPEED_QDR;
    a.active_speed_ex = u32::from(SPEED_QDR);
    a.phys_state = if up { LINK_UP } else { DISABLED };
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

/// `ibv_query_port_speed(3)`: in units of 100 Mb/s.
pub(crate) unsafe extern "C" fn ibv_query_port_speed(
    c: *mut ibv_context,
    port_num: u32,
    to: *mut u64,
) -> c_int {
    code(|| {
        checked_context(c)?;
        if port_num != 1 || to.is_null() {
            return Err(EINVAL);
        }
        *to = PORT_SPEED;
        Ok(())
    })
}

/// The exported function, for programs built before `link_layer` existed: their structure has 48
/// bytes.
pub(crate) unsafe extern "C" fn ibv_query_port(
    c: *mut ibv_context,
    port_num: u8,
    to: *mut ibv_port_attr,
) -> c_int {
    query_port(c, port_num, to, 48)
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
        *to = PKEY.to_be();
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
        if port_num == 1 && u16::from_be(pkey) == PKEY {
            Ok(0)
        } else {
            Err(EINVAL)
        }
    })
}

/// Returns the device's clock: CLOCK_MONOTONIC in nanoseconds.
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
            // As in the kernel's drivers, the value is in the nanoseconds field.
            (*to).raw_clock = [0, now.tv_sec * 1_000_000_000 + now.tv_nsec];
            (*to).comp_mask = 1;
        }
        Ok(())
    })
}
