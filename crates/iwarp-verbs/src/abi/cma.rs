//! `rdma/rdma_cma.h`.

use super::c_structs;
use super::verbs::{
    ibv_ah_attr, ibv_comp_channel, ibv_context, ibv_cq, ibv_pd, ibv_qp, ibv_sa_path_rec, ibv_srq,
};
use std::ffi::{c_char, c_int, c_uint, c_void};

c_structs! { ALL;
    struct rdma_event_channel [4] {
        fd: c_int,
    }
    struct rdma_ib_addr [40] {
        sgid: [u64; 2],
        dgid: [u64; 2],
        pkey: u16,
    }
    struct rdma_addr [296] {
        src_storage: libc::sockaddr_storage,
        dst_storage: libc::sockaddr_storage,
        ibaddr: rdma_ib_addr,
    }
    struct rdma_route [312] {
        addr: rdma_addr,
        path_rec: *mut ibv_sa_path_rec,
        num_paths: c_int,
    }
    struct rdma_cm_id [416] {
        verbs: *mut ibv_context,
        channel: *mut rdma_event_channel,
        context: *mut c_void,
        qp: *mut ibv_qp,
        route: rdma_route,
        ps: c_uint,
        port_num: u8,
        event: *mut rdma_cm_event,
        send_cq_channel: *mut ibv_comp_channel,
        send_cq: *mut ibv_cq,
        recv_cq_channel: *mut ibv_comp_channel,
        recv_cq: *mut ibv_cq,
        srq: *mut ibv_srq,
        pd: *mut ibv_pd,
        qp_type: c_uint,
    }
    struct rdma_conn_param [24] {
        private_data: *const c_void,
        private_data_len: u8,
        responder_resources: u8,
        initiator_depth: u8,
        flow_control: u8,
        retry_count: u8,
        rnr_retry_count: u8,
        srq: u8,
        qp_num: u32,
    }
    struct rdma_ud_param [56] {
        private_data: *const c_void,
        private_data_len: u8,
        ah_attr: ibv_ah_attr,
        qp_num: u32,
        qkey: u32,
    }
    struct rdma_cm_event [80] {
        id: *mut rdma_cm_id,
        listen_id: *mut rdma_cm_id,
        event: c_uint,
        status: c_int,
        param: event_param,
    }
    struct rdma_addrinfo [96] {
        ai_flags: c_int,
        ai_family: c_int,
        ai_qp_type: c_int,
        ai_port_space: c_int,
        ai_src_len: libc::socklen_t,
        ai_dst_len: libc::socklen_t,
        ai_src_addr: *mut libc::sockaddr,
        ai_dst_addr: *mut libc::sockaddr,
        ai_src_canonname: *mut c_char,
        ai_dst_canonname: *mut c_char,
        ai_route_len: usize,
        ai_route: *mut c_void,
        ai_connect_len: usize,
        ai_connect: *mut c_void,
        ai_next: *mut rdma_addrinfo,
    }
}

/// Parameters of an event: `conn` for connections, `ud` for datagrams, and `arg` for events that
/// the program wrote.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union event_param {
    pub(crate) conn: rdma_conn_param,
    pub(crate) ud: rdma_ud_param,
    pub(crate) arg: u64,
}

pub(crate) const PS_IPOIB: c_uint = 0x0002;
pub(crate) const PS_TCP: c_uint = 0x0106;
pub(crate) const PS_UDP: c_uint = 0x0111;
pub(crate) const PS_IB: c_uint = 0x013f;
