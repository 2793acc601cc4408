//! `infiniband/verbs.h`.

use super::c_structs;
use std::ffi::{c_char, c_int, c_uint, c_void};

pub(crate) type Slot = usize;
pub(crate) type PortQuery =
    unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, usize) -> c_int;
pub(crate) type ReadU8 = unsafe extern "C" fn(*mut ibv_cq_ex) -> u8;
pub(crate) type ReadU16 = unsafe extern "C" fn(*mut ibv_cq_ex) -> u16;
pub(crate) type ReadU32 = unsafe extern "C" fn(*mut ibv_cq_ex) -> u32;
pub(crate) type ReadU64 = unsafe extern "C" fn(*mut ibv_cq_ex) -> u64;

const MUTEX: usize = size_of::<libc::pthread_mutex_t>();
const COND: usize = size_of::<libc::pthread_cond_t>();

c_structs! { ALL;
    struct ibv_device [664] {
        _ops: [usize; 2],
        node_type: c_int,
        transport_type: c_int,
        name: [c_char; 64],
        dev_name: [c_char; 64],
        dev_path: [c_char; 256],
        ibdev_path: [c_char; 256],
    }
    struct ibv_context_ops [256] {
        _compat_query_device: Option<
            unsafe extern "C" fn(*mut ibv_context, *mut ibv_device_attr) -> c_int,
        >,
        _compat_query_port: Option<
            unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int,
        >,
        _compat_alloc_pd: Slot,
        _compat_dealloc_pd: Slot,
        _compat_reg_mr: Slot,
        _compat_rereg_mr: Slot,
        _compat_dereg_mr: Slot,
        alloc_mw: Option<unsafe extern "C" fn(*mut ibv_pd, c_uint) -> *mut ibv_mw>,
        bind_mw: Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_mw, *mut ibv_mw_bind) -> c_int>,
        dealloc_mw: Option<unsafe extern "C" fn(*mut ibv_mw) -> c_int>,
        _compat_create_cq: Slot,
        poll_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int>,
        req_notify_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int>,
        _compat_cq_event: Slot,
        _compat_resize_cq: Slot,
        _compat_destroy_cq: Slot,
        _compat_create_srq: Slot,
        _compat_modify_srq: Slot,
        _compat_query_srq: Slot,
        _compat_destroy_srq: Slot,
        post_srq_recv: Option<
            unsafe extern "C" fn(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int,
        >,
        _compat_create_qp: Slot,
        _compat_query_qp: Slot,
        _compat_modify_qp: Slot,
        _compat_destroy_qp: Slot,
        post_send: Option<
            unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int,
        >,
        post_recv: Option<
            unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int,
        >,
        _compat_create_ah: Slot,
        _compat_destroy_ah: Slot,
        _compat_attach_mcast: Slot,
        _compat_detach_mcast: Slot,
        _compat_async_event: Slot,
    }
    struct ibv_context [288 + MUTEX] {
        device: *mut ibv_device,
        ops: ibv_context_ops,
        cmd_fd: c_int,
        async_fd: c_int,
        num_comp_vectors: c_int,
        mutex: libc::pthread_mutex_t,
        abi_compat: *mut c_void,
    }
    struct verbs_context [608 + MUTEX] {
        query_port: Option<PortQuery>,
        advise_mr: Option<
            unsafe extern "C" fn(*mut ibv_pd, c_uint, u32, *mut ibv_sge, u32) -> c_int,
        >,
        alloc_null_mr: Option<unsafe extern "C" fn(*mut ibv_pd) -> *mut ibv_mr>,
        read_counters: Slot,
        attach_counters_point_flow: Slot,
        create_counters: Slot,
        destroy_counters: Slot,
        reg_dm_mr: Option<
            unsafe extern "C" fn(*mut ibv_pd, *mut ibv_dm, u64, usize, c_uint) -> *mut ibv_mr,
        >,
        alloc_dm: Option<
            unsafe extern "C" fn(*mut ibv_context, *mut ibv_alloc_dm_attr) -> *mut ibv_dm,
        >,
        free_dm: Option<unsafe extern "C" fn(*mut ibv_dm) -> c_int>,
        modify_flow_action_esp: Slot,
        destroy_flow_action: Slot,
        create_flow_action_esp: Slot,
        modify_qp_rate_limit: Slot,
        alloc_parent_domain: Option<
            unsafe extern "C" fn(*mut ibv_context, *mut ibv_parent_domain_init_attr) -> *mut ibv_pd,
        >,
        dealloc_td: Option<unsafe extern "C" fn(*mut ibv_td) -> c_int>,
        alloc_td: Option<
            unsafe extern "C" fn(*mut ibv_context, *mut ibv_td_init_attr) -> *mut ibv_td,
        >,
        modify_cq: Slot,
        post_srq_ops: Option<
            unsafe extern "C" fn(*mut ibv_srq, *mut ibv_ops_wr, *mut *mut ibv_ops_wr) -> c_int,
        >,
        destroy_rwq_ind_table: Slot,
        create_rwq_ind_table: Slot,
        destroy_wq: Slot,
        modify_wq: Slot,
        create_wq: Slot,
        query_rt_values: Option<
            unsafe extern "C" fn(*mut ibv_context, *mut ibv_values_ex) -> c_int,
        >,
        create_cq_ex: Option<
            unsafe extern "C" fn(*mut ibv_context, *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex,
        >,
        r#priv: Slot,
        query_device_ex: Option<
            unsafe extern "C" fn(
                *mut ibv_context,
                *const c_void,
                *mut ibv_device_attr_ex,
                usize,
            ) -> c_int,
        >,
        ibv_destroy_flow: Slot,
        ABI_placeholder2: Slot,
        ibv_create_flow: Slot,
        ABI_placeholder1: Slot,
        open_qp: Option<
            unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_open_attr) -> *mut ibv_qp,
        >,
        create_qp_ex: Option<
            unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp,
        >,
        get_srq_num: Option<unsafe extern "C" fn(*mut ibv_srq, *mut u32) -> c_int>,
        create_srq_ex: Option<
            unsafe extern "C" fn(*mut ibv_context, *mut ibv_srq_init_attr_ex) -> *mut ibv_srq,
        >,
        open_xrcd: Option<
            unsafe extern "C" fn(*mut ibv_context, *mut ibv_xrcd_init_attr) -> *mut ibv_xrcd,
        >,
        close_xrcd: Option<unsafe extern "C" fn(*mut ibv_xrcd) -> c_int>,
        _ABI_placeholder3: u64,
        sz: usize,
        context: ibv_context,
    }
    struct ibv_pd [16] {
        context: *mut ibv_context,
        handle: u32,
    }
    struct ibv_xrcd [8] {
        context: *mut ibv_context,
    }
    struct ibv_xrcd_init_attr [12] {
        comp_mask: u32,
        fd: c_int,
        oflags: c_int,
    }
    struct ibv_qp_open_attr [32] {
        comp_mask: u32,
        qp_num: u32,
        xrcd: *mut ibv_xrcd,
        qp_context: *mut c_void,
        qp_type: c_uint,
    }
    struct ibv_td [8] {
        context: *mut ibv_context,
    }
    struct ibv_td_init_attr [4] {
        comp_mask: u32,
    }
    struct ibv_parent_domain_init_attr [48] {
        pd: *mut ibv_pd,
        td: *mut ibv_td,
        comp_mask: u32,
        alloc: Option<
            unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, usize, u64) -> *mut c_void,
        >,
        free: Option<unsafe extern "C" fn(*mut ibv_pd, *mut c_void, *mut c_void, u64)>,
        pd_context: *mut c_void,
    }
    struct ibv_mr [48] {
        context: *mut ibv_context,
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        handle: u32,
        lkey: u32,
        rkey: u32,
    }
    struct ibv_mw [32] {
        context: *mut ibv_context,
        pd: *mut ibv_pd,
        rkey: u32,
        handle: u32,
        r#type: c_uint,
    }
    struct ibv_dm [32] {
        context: *mut ibv_context,
        memcpy_to_dm: Option<unsafe extern "C" fn(*mut ibv_dm, u64, *const c_void, usize) -> c_int>,
        memcpy_from_dm: Option<unsafe extern "C" fn(*mut c_void, *mut ibv_dm, u64, usize) -> c_int>,
        comp_mask: u32,
        handle: u32,
    }
    struct ibv_alloc_dm_attr [16] {
        length: usize,
        log_align_req: u32,
        comp_mask: u32,
    }
    struct ibv_ah [24] {
        context: *mut ibv_context,
        pd: *mut ibv_pd,
        handle: u32,
    }
    struct ibv_comp_channel [16] {
        context: *mut ibv_context,
        fd: c_int,
        refcnt: c_int,
    }
    struct ibv_cq [40 + MUTEX + COND] {
        context: *mut ibv_context,
        channel: *mut ibv_comp_channel,
        cq_context: *mut c_void,
        handle: u32,
        cqe: c_int,
        mutex: libc::pthread_mutex_t,
        cond: libc::pthread_cond_t,
        comp_events_completed: u32,
        async_events_completed: u32,
    }
    struct ibv_cq_ex [200 + MUTEX + COND] {
        context: *mut ibv_context,
        channel: *mut ibv_comp_channel,
        cq_context: *mut c_void,
        handle: u32,
        cqe: c_int,
        mutex: libc::pthread_mutex_t,
        cond: libc::pthread_cond_t,
        comp_events_completed: u32,
        async_events_completed: u32,
        comp_mask: u32,
        status: c_uint,
        wr_id: u64,
        start_poll: Option<unsafe extern "C" fn(*mut ibv_cq_ex, *mut ibv_poll_cq_attr) -> c_int>,
        next_poll: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> c_int>,
        end_poll: Option<unsafe extern "C" fn(*mut ibv_cq_ex)>,
        read_opcode: Option<ReadU32>,
        read_vendor_err: Option<ReadU32>,
        read_byte_len: Option<ReadU32>,
        read_imm_data: Option<ReadU32>,
        read_qp_num: Option<ReadU32>,
        read_src_qp: Option<ReadU32>,
        read_wc_flags: Option<ReadU32>,
        read_slid: Option<ReadU32>,
        read_sl: Option<ReadU8>,
        read_dlid_path_bits: Option<ReadU8>,
        read_completion_ts: Option<ReadU64>,
        read_cvlan: Option<ReadU16>,
        read_flow_tag: Option<ReadU32>,
        read_tm_info: Option<unsafe extern "C" fn(*mut ibv_cq_ex, *mut ibv_wc_tm_info)>,
        read_completion_wallclock_ns: Option<ReadU64>,
    }
    struct ibv_wc_tm_info [16] {
        tag: u64,
        r#priv: u32,
    }
    struct ibv_poll_cq_attr [4] {
        comp_mask: u32,
    }
    struct ibv_cq_init_attr_ex [56] {
        cqe: u32,
        cq_context: *mut c_void,
        channel: *mut ibv_comp_channel,
        comp_vector: u32,
        wc_flags: u64,
        comp_mask: u32,
        flags: u32,
        parent_domain: *mut ibv_pd,
    }
    struct ibv_srq [40 + MUTEX + COND] {
        context: *mut ibv_context,
        srq_context: *mut c_void,
        pd: *mut ibv_pd,
        handle: u32,
        mutex: libc::pthread_mutex_t,
        cond: libc::pthread_cond_t,
        events_completed: u32,
    }
    struct ibv_srq_attr [12] {
        max_wr: u32,
        max_sge: u32,
        srq_limit: u32,
    }
    struct ibv_srq_init_attr [24] {
        srq_context: *mut c_void,
        attr: ibv_srq_attr,
    }
    struct ibv_srq_init_attr_ex [64] {
        srq_context: *mut c_void,
        attr: ibv_srq_attr,
        comp_mask: u32,
        srq_type: c_uint,
        pd: *mut ibv_pd,
        xrcd: *mut ibv_xrcd,
        cq: *mut ibv_cq,
        tm_cap: [u32; 2],
    }
    struct ibv_ops_wr [72] {
        wr_id: u64,
        next: *mut ibv_ops_wr,
        opcode: c_uint,
        flags: c_int,
        unexpected_cnt: u32,
        handle: u32,
        recv_wr_id: u64,
        sg_list: *mut ibv_sge,
        num_sge: c_int,
        tag: u64,
        mask: u64,
    }
    struct ibv_qp [72 + MUTEX + COND] {
        context: *mut ibv_context,
        qp_context: *mut c_void,
        pd: *mut ibv_pd,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        srq: *mut ibv_srq,
        handle: u32,
        qp_num: u32,
        state: c_uint,
        qp_type: c_uint,
        mutex: libc::pthread_mutex_t,
        cond: libc::pthread_cond_t,
        events_completed: u32,
    }
    struct ibv_qp_ex [272 + MUTEX + COND] {
        qp_base: ibv_qp,
        comp_mask: u64,
        wr_id: u64,
        wr_flags: c_uint,
        wr_atomic_cmp_swp: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u64, u64)>,
        wr_atomic_fetch_add: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u64)>,
        wr_bind_mw: Option<
            unsafe extern "C" fn(*mut ibv_qp_ex, *mut ibv_mw, u32, *const ibv_mw_bind_info),
        >,
        wr_local_inv: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32)>,
        wr_rdma_read: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64)>,
        wr_rdma_write: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64)>,
        wr_rdma_write_imm: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u32)>,
        wr_send: Option<unsafe extern "C" fn(*mut ibv_qp_ex)>,
        wr_send_imm: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32)>,
        wr_send_inv: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32)>,
        wr_send_tso: Option<unsafe extern "C" fn(*mut ibv_qp_ex, *mut c_void, u16, u16)>,
        wr_set_ud_addr: Option<unsafe extern "C" fn(*mut ibv_qp_ex, *mut ibv_ah, u32, u32)>,
        wr_set_xrc_srqn: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32)>,
        wr_set_inline_data: Option<unsafe extern "C" fn(*mut ibv_qp_ex, *mut c_void, usize)>,
        wr_set_inline_data_list: Option<
            unsafe extern "C" fn(*mut ibv_qp_ex, usize, *const ibv_data_buf),
        >,
        wr_set_sge: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u32)>,
        wr_set_sge_list: Option<unsafe extern "C" fn(*mut ibv_qp_ex, usize, *const ibv_sge)>,
        wr_start: Option<unsafe extern "C" fn(*mut ibv_qp_ex)>,
        wr_complete: Option<unsafe extern "C" fn(*mut ibv_qp_ex) -> c_int>,
        wr_abort: Option<unsafe extern "C" fn(*mut ibv_qp_ex)>,
        wr_atomic_write: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, *const c_void)>,
        wr_flush: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, usize, u8, u8)>,
    }
    struct ibv_data_buf [16] {
        addr: *mut c_void,
        length: usize,
    }
    struct ibv_wc [48] {
        wr_id: u64,
        status: c_uint,
        opcode: c_uint,
        vendor_err: u32,
        byte_len: u32,
        imm_data: u32,
        qp_num: u32,
        src_qp: u32,
        wc_flags: c_uint,
        pkey_index: u16,
        slid: u16,
        sl: u8,
        dlid_path_bits: u8,
    }
    struct ibv_sge [16] {
        addr: u64,
        length: u32,
        lkey: u32,
    }
    struct ibv_send_wr [128] {
        wr_id: u64,
        next: *mut ibv_send_wr,
        sg_list: *mut ibv_sge,
        num_sge: c_int,
        opcode: c_uint,
        send_flags: c_uint,
        imm_data: u32,
        wr: send_wr_target,
        qp_type: u32,
        bind_mw: send_wr_bind,
    }
    struct ibv_recv_wr [32] {
        wr_id: u64,
        next: *mut ibv_recv_wr,
        sg_list: *mut ibv_sge,
        num_sge: c_int,
    }
    struct ibv_mw_bind_info [32] {
        mr: *mut ibv_mr,
        addr: u64,
        length: u64,
        mw_access_flags: c_uint,
    }
    struct ibv_mw_bind [48] {
        wr_id: u64,
        send_flags: c_uint,
        bind_info: ibv_mw_bind_info,
    }
    struct ibv_qp_cap [20] {
        max_send_wr: u32,
        max_recv_wr: u32,
        max_send_sge: u32,
        max_recv_sge: u32,
        max_inline_data: u32,
    }
    struct ibv_qp_init_attr [64] {
        qp_context: *mut c_void,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        srq: *mut ibv_srq,
        cap: ibv_qp_cap,
        qp_type: c_uint,
        sq_sig_all: c_int,
    }
    struct ibv_qp_init_attr_ex [136] {
        qp_context: *mut c_void,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        srq: *mut ibv_srq,
        cap: ibv_qp_cap,
        qp_type: c_uint,
        sq_sig_all: c_int,
        comp_mask: u32,
        pd: *mut ibv_pd,
        xrcd: *mut ibv_xrcd,
        create_flags: u32,
        max_tso_header: u16,
        rwq_ind_tbl: *mut c_void,
        rx_hash_conf: [u64; 3],
        source_qpn: u32,
        send_ops_flags: u64,
    }
    struct ibv_global_route [24] {
        dgid: [u64; 2],
        flow_label: u32,
        sgid_index: u8,
        hop_limit: u8,
        traffic_class: u8,
    }
    struct ibv_grh [40] {
        version_tclass_flow: u32,
        paylen: u16,
        next_hdr: u8,
        hop_limit: u8,
        sgid: [u64; 2],
        dgid: [u64; 2],
    }
    struct ibv_ah_attr [32] {
        grh: ibv_global_route,
        dlid: u16,
        sl: u8,
        src_path_bits: u8,
        static_rate: u8,
        is_global: u8,
        port_num: u8,
    }
    struct ibv_qp_attr [144] {
        qp_state: c_uint,
        cur_qp_state: c_uint,
        path_mtu: c_uint,
        path_mig_state: c_uint,
        qkey: u32,
        rq_psn: u32,
        sq_psn: u32,
        dest_qp_num: u32,
        qp_access_flags: c_uint,
        cap: ibv_qp_cap,
        ah_attr: ibv_ah_attr,
        alt_ah_attr: ibv_ah_attr,
        pkey_index: u16,
        alt_pkey_index: u16,
        en_sqd_async_notify: u8,
        sq_draining: u8,
        max_rd_atomic: u8,
        max_dest_rd_atomic: u8,
        min_rnr_timer: u8,
        port_num: u8,
        timeout: u8,
        retry_cnt: u8,
        rnr_retry: u8,
        alt_port_num: u8,
        alt_timeout: u8,
        rate_limit: u32,
    }
    struct ibv_device_attr [232] {
        fw_ver: [c_char; 64],
        node_guid: u64,
        sys_image_guid: u64,
        max_mr_size: u64,
        page_size_cap: u64,
        vendor_id: u32,
        vendor_part_id: u32,
        hw_ver: u32,
        max_qp: c_int,
        max_qp_wr: c_int,
        device_cap_flags: c_uint,
        max_sge: c_int,
        max_sge_rd: c_int,
        max_cq: c_int,
        max_cqe: c_int,
        max_mr: c_int,
        max_pd: c_int,
        max_qp_rd_atom: c_int,
        max_ee_rd_atom: c_int,
        max_res_rd_atom: c_int,
        max_qp_init_rd_atom: c_int,
        max_ee_init_rd_atom: c_int,
        atomic_cap: c_uint,
        max_ee: c_int,
        max_rdd: c_int,
        max_mw: c_int,
        max_raw_ipv6_qp: c_int,
        max_raw_ethy_qp: c_int,
        max_mcast_grp: c_int,
        max_mcast_qp_attach: c_int,
        max_total_mcast_qp_attach: c_int,
        max_ah: c_int,
        max_fmr: c_int,
        max_map_per_fmr: c_int,
        max_srq: c_int,
        max_srq_wr: c_int,
        max_srq_sge: c_int,
        max_pkeys: u16,
        local_ca_ack_delay: u8,
        phys_port_cnt: u8,
    }
    struct ibv_device_attr_ex [400] {
        orig_attr: ibv_device_attr,
        comp_mask: u32,
        odp_caps: [u64; 3],
        completion_timestamp_mask: u64,
        hca_core_clock: u64,
        device_cap_flags_ex: u64,
        tso_caps: [u32; 2],
        rss_caps: [u64; 4],
        max_wq_type_rq: u32,
        packet_pacing_caps: [u32; 3],
        raw_packet_caps: u32,
        tm_caps: [u32; 5],
        cq_mod_caps: [u16; 2],
        max_dm_size: u64,
        pci_atomic_caps: [u16; 3],
        xrc_odp_caps: u32,
        phys_port_cnt_ex: u32,
    }
    struct ibv_port_attr [56] {
        state: c_uint,
        max_mtu: c_uint,
        active_mtu: c_uint,
        gid_tbl_len: c_int,
        port_cap_flags: u32,
        max_msg_sz: u32,
        bad_pkey_cntr: u32,
        qkey_viol_cntr: u32,
        pkey_tbl_len: u16,
        lid: u16,
        sm_lid: u16,
        lmc: u8,
        max_vl_num: u8,
        sm_sl: u8,
        subnet_timeout: u8,
        init_type_reply: u8,
        active_width: u8,
        active_speed: u8,
        phys_state: u8,
        link_layer: u8,
        flags: u8,
        port_cap_flags2: u16,
        active_speed_ex: u32,
    }
    struct ibv_gid_entry [32] {
        gid: [u64; 2],
        gid_index: u32,
        port_num: u32,
        gid_type: u32,
        ndev_ifindex: u32,
    }
    struct ibv_async_event [16] {
        element: async_element,
        event_type: c_uint,
    }
    struct ibv_ece [12] {
        vendor_id: u32,
        options: u32,
        comp_mask: u32,
    }
    struct ibv_values_ex [24] {
        comp_mask: u32,
        raw_clock: [i64; 2],
    }
    struct ibv_sa_path_rec [64] {
        dgid: [u64; 2],
        sgid: [u64; 2],
        dlid: u16,
        slid: u16,
        raw_traffic: c_int,
        flow_label: u32,
        hop_limit: u8,
        traffic_class: u8,
        reversible: c_int,
        numb_path: u8,
        pkey: u16,
        sl: u8,
        mtu_selector: u8,
        mtu: u8,
        rate_selector: u8,
        rate: u8,
        packet_life_time_selector: u8,
        packet_life_time: u8,
        preference: u8,
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union send_wr_target {
    pub(crate) rdma: rdma_target,
    pub(crate) atomic: atomic_target,
    pub(crate) ud: ud_target,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct rdma_target {
    pub(crate) remote_addr: u64,
    pub(crate) rkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct atomic_target {
    pub(crate) remote_addr: u64,
    pub(crate) compare_add: u64,
    pub(crate) swap: u64,
    pub(crate) rkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ud_target {
    pub(crate) ah: *mut ibv_ah,
    pub(crate) remote_qpn: u32,
    pub(crate) remote_qkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct send_wr_bind {
    pub(crate) mw: *mut ibv_mw,
    pub(crate) rkey: u32,
    pub(crate) bind_info: ibv_mw_bind_info,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union async_element {
    pub(crate) cq: *mut ibv_cq,
    pub(crate) qp: *mut ibv_qp,
    pub(crate) srq: *mut ibv_srq,
    pub(crate) port_num: c_int,
}

/// Constants that several files use.
pub(crate) mod value {
    use std::ffi::c_uint;

    pub(crate) const QPS_RESET: c_uint = 0;
    pub(crate) const QPS_INIT: c_uint = 1;
    pub(crate) const QPS_RTR: c_uint = 2;
    pub(crate) const QPS_RTS: c_uint = 3;
    pub(crate) const QPS_SQD: c_uint = 4;
    pub(crate) const QPS_SQE: c_uint = 5;
    pub(crate) const QPS_ERR: c_uint = 6;

    pub(crate) const QPT_RC: c_uint = 2;
    pub(crate) const QPT_UC: c_uint = 3;
    pub(crate) const QPT_UD: c_uint = 4;
    pub(crate) const QPT_XRC_SEND: c_uint = 9;
    pub(crate) const QPT_XRC_RECV: c_uint = 10;

    pub(crate) const SEND_FENCE: c_uint = 1;
    pub(crate) const SEND_SIGNALED: c_uint = 2;
    pub(crate) const SEND_SOLICITED: c_uint = 4;
    pub(crate) const SEND_INLINE: c_uint = 8;

    pub(crate) const QP_STATE: c_uint = 1;
    pub(crate) const QP_CUR_STATE: c_uint = 1 << 1;
    pub(crate) const QP_EN_SQD_ASYNC_NOTIFY: c_uint = 1 << 2;
    pub(crate) const QP_ACCESS_FLAGS: c_uint = 1 << 3;
    pub(crate) const QP_PKEY_INDEX: c_uint = 1 << 4;
    pub(crate) const QP_PORT: c_uint = 1 << 5;
    pub(crate) const QP_QKEY: c_uint = 1 << 6;
    pub(crate) const QP_AV: c_uint = 1 << 7;
    pub(crate) const QP_PATH_MTU: c_uint = 1 << 8;
    pub(crate) const QP_TIMEOUT: c_uint = 1 << 9;
    pub(crate) const QP_RETRY_CNT: c_uint = 1 << 10;
    pub(crate) const QP_RNR_RETRY: c_uint = 1 << 11;
    pub(crate) const QP_RQ_PSN: c_uint = 1 << 12;
    pub(crate) const QP_MAX_QP_RD_ATOMIC: c_uint = 1 << 13;
    pub(crate) const QP_MIN_RNR_TIMER: c_uint = 1 << 15;
    pub(crate) const QP_SQ_PSN: c_uint = 1 << 16;
    pub(crate) const QP_MAX_DEST_RD_ATOMIC: c_uint = 1 << 17;
    pub(crate) const QP_DEST_QPN: c_uint = 1 << 20;
}
