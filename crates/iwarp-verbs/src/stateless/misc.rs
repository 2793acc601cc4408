//! Small functions: names, rates, fork, sysfs files.

use crate::abi::verbs::*;
use crate::border::guard::{UNSUPPORTED, code};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

fn name(names: &[&'static CStr], value: c_uint, unknown: &'static CStr) -> *const c_char {
    names
        .get(value as usize)
        .copied()
        .unwrap_or(unknown)
        .as_ptr()
}

pub(crate) unsafe extern "C" fn ibv_node_type_str(node_type: c_int) -> *const c_char {
    const NAMES: [&CStr; 8] = [
        c"unknown",
        c"InfiniBand channel adapter",
        c"InfiniBand switch",
        c"InfiniBand router",
        c"iWARP NIC",
        c"usNIC",
        c"usNIC UDP",
        c"unspecified",
    ];
    name(&NAMES, node_type.max(0) as c_uint, c"unknown")
}

pub(crate) unsafe extern "C" fn ibv_port_state_str(state: c_uint) -> *const c_char {
    const NAMES: [&CStr; 6] = [
        c"no state change (NOP)",
        c"down",
        c"init",
        c"armed",
        c"active",
        c"active defer",
    ];
    name(&NAMES, state, c"invalid state")
}

pub(crate) unsafe extern "C" fn ibv_event_type_str(event: c_uint) -> *const c_char {
    const NAMES: [&CStr; 21] = [
        c"CQ error",
        c"local work queue catastrophic error",
        c"invalid request local work queue error",
        c"local access violation work queue error",
        c"communication established",
        c"send queue drained",
        c"path migrated",
        c"path migration request error",
        c"local catastrophic error",
        c"port active",
        c"port error",
        c"LID change",
        c"P_Key change",
        c"SM change",
        c"SRQ catastrophic error",
        c"SRQ limit reached",
        c"last WQE reached",
        c"client reregistration",
        c"GID table change",
        c"WQ fatal",
        c"device link speed change",
    ];
    name(&NAMES, event, c"unknown")
}

pub(crate) unsafe extern "C" fn ibv_wc_status_str(status: c_uint) -> *const c_char {
    const NAMES: [&CStr; 24] = [
        c"success",
        c"local length error",
        c"local QP operation error",
        c"local EE context operation error",
        c"local protection error",
        c"Work Request Flushed Error",
        c"memory management operation error",
        c"bad response error",
        c"local access error",
        c"remote invalid request error",
        c"remote access error",
        c"remote operation error",
        c"transport retry counter exceeded",
        c"RNR retry counter exceeded",
        c"local RDD violation error",
        c"remote invalid RD request",
        c"aborted error",
        c"invalid EE context number",
        c"invalid EE context state",
        c"fatal error",
        c"response timeout error",
        c"general error",
        c"TM error",
        c"TM software rendezvous",
    ];
    name(&NAMES, status, c"unknown")
}

/// Returns an operation's name. Declared in rdma-core's header since version 57.
pub(crate) unsafe extern "C" fn ibv_wr_opcode_str(opcode: c_uint) -> *const c_char {
    // Numbers 12 and 13 are not assigned.
    const NAMES: [&CStr; 16] = [
        c"rdma-write",
        c"rdma-write-with-imm",
        c"send",
        c"send-with-imm",
        c"rdma-read",
        c"atomic-cmp-and-swp",
        c"atomic-fetch-and-add",
        c"local-inv",
        c"bind-mw",
        c"send-with-inv",
        c"tso",
        c"driver1",
        c"unknown",
        c"unknown",
        c"flush",
        c"atomic-write",
    ];
    name(&NAMES, opcode, c"unknown")
}

/// Rates: `enum ibv_rate`, the multiple of 2.5 Gb/s or -1, and Mb/s.
const RATES: [(c_uint, c_int, c_int); 23] = [
    (2, 1, 2500),
    (5, 2, 5000),
    (3, 4, 10000),
    (6, 8, 20000),
    (4, 12, 30000),
    (7, 16, 40000),
    (8, 24, 60000),
    (9, 32, 80000),
    (10, 48, 120_000),
    (11, -1, 14062),
    (12, -1, 56250),
    (13, -1, 112_500),
    (14, -1, 168_750),
    (15, 10, 25781),
    (16, 40, 103_125),
    (17, 80, 206_250),
    (18, 120, 309_375),
    (19, 11, 28125),
    (20, 20, 50000),
    (21, 160, 400_000),
    (22, 240, 600_000),
    (23, 320, 800_000),
    (24, 480, 1_200_000),
];
/// `IBV_RATE_MAX`, for unknown rates.
const RATE_MAX: c_uint = 0;

pub(crate) unsafe extern "C" fn ibv_rate_to_mult(rate: c_uint) -> c_int {
    RATES.iter().find(|r| r.0 == rate).map_or(-1, |r| r.1)
}

pub(crate) unsafe extern "C" fn mult_to_ibv_rate(mult: c_int) -> c_uint {
    RATES
        .iter()
        .find(|r| mult > 0 && r.1 == mult)
        .map_or(RATE_MAX, |r| r.0)
}

pub(crate) unsafe extern "C" fn ibv_rate_to_mbps(rate: c_uint) -> c_int {
    RATES.iter().find(|r| r.0 == rate).map_or(-1, |r| r.2)
}

pub(crate) unsafe extern "C" fn mbps_to_ibv_rate(mbps: c_int) -> c_uint {
    RATES.iter().find(|r| r.2 == mbps).map_or(RATE_MAX, |r| r.0)
}

/// Does nothing: only memory that is pinned for hardware needs protection from copy-on-write.
pub(crate) unsafe extern "C" fn ibv_fork_init() -> c_int {
    0
}

/// `IBV_FORK_UNNEEDED`.
pub(crate) unsafe extern "C" fn ibv_is_fork_initialized() -> c_uint {
    2
}

pub(crate) unsafe extern "C" fn ibv_fork_range(_: *mut c_void, _: usize) -> c_int {
    0
}

pub(crate) unsafe extern "C" fn ibv_get_sysfs_path() -> *const c_char {
    c"/sys".as_ptr()
}

/// Reads `dir/file` into `buf` without the final newline. Returns the number of bytes, or -1.
pub(crate) unsafe extern "C" fn ibv_read_sysfs_file(
    dir: *const c_char,
    file: *const c_char,
    buf: *mut c_char,
    size: usize,
) -> c_int {
    crate::border::guard::minus_one(|| {
        use std::os::unix::ffi::OsStrExt;
        let part =
            |p| std::path::Path::new(std::ffi::OsStr::from_bytes(CStr::from_ptr(p).to_bytes()));
        let text = std::fs::read(part(dir).join(part(file)))?;
        let mut n = text.len().min(size);
        std::ptr::copy_nonoverlapping(text.as_ptr(), buf.cast(), n);
        if n > 0 && text[n - 1] == b'\n' {
            n -= 1;
            *buf.add(n) = 0;
        } else if n < size {
            *buf.add(n) = 0;
        }
        Ok(n as c_int)
    })
}

/// Does nothing: the kernel resolves link-layer addresses for TCP.
pub(crate) unsafe extern "C" fn ibv_resolve_eth_l2_from_gid(
    _: *mut ibv_context,
    _: *mut ibv_ah_attr,
    _mac: *mut u8,
    _vlan: *mut u16,
) -> c_int {
    code(|| Err(UNSUPPORTED))
}
