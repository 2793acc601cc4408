//! Structures of `infiniband/verbs.h` that are newer than rdma-core 44 and Debian 12's header.

use super::c_structs;
use super::verbs::ibv_context;
use std::ffi::{c_int, c_uint, c_void};

c_structs! { ALL;
    struct ibv_dmah [8] {
        context: *mut ibv_context,
    }
    struct ibv_mr_init_attr [72] {
        length: usize,
        access: c_int,
        comp_mask: u64,
        iova: u64,
        addr: *mut c_void,
        fd: c_int,
        fd_offset: u64,
        dmah: *mut ibv_dmah,
        buf: *mut ibv_buf,
    }
    struct ibv_comp_cntr_caps [16] {
        max_value: u64,
        max_counters: u32,
        supported_qp_attach_ops: u32,
    }
    struct ibv_comp_cntr [16] {
        context: *mut ibv_context,
        handle: u32,
    }
    struct ibv_comp_cntr_init_attr [12] {
        comp_mask: u32,
        r#type: c_uint,
        flags: u32,
    }
    struct ibv_qp_attach_comp_cntr_attr [8] {
        comp_mask: u32,
        op_mask: u32,
    }
}

/// The public part of a `struct ibv_buf`, which is opaque to programs.
#[repr(C)]
pub(crate) struct ibv_buf {
    context: *mut ibv_context,
}

impl ibv_buf {
    pub(crate) const fn new(context: *mut ibv_context) -> Self {
        Self { context }
    }
}
