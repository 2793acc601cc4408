//! Every exported symbol with its version. The public symbols are those of rdma-core 65, which
//! include all of version 44 (Debian 12); a test compares them with the built library. `private`
//! contains the symbols whose version changes between releases.
//!
//! A Rust function cannot carry a symbol version, so each export is a jump in assembly whose
//! `.symver` sets the name and version. `symbols.map` defines the versions.

use crate::abi::kern;
use crate::device::{context, gid, list};
use crate::domain::{ah, pd};
use crate::lifecycle::{create, datagram, destroy, modify};
use crate::memory::{device_memory, dmabuf, mr, mr_ex};
use crate::stateless::{misc, providers, unsupported};
use crate::{cm, counter, cq, device, events, lifecycle, open, rsocket, srq};

#[cfg(target_arch = "x86_64")]
macro_rules! jump {
    () => {
        "jmp {f}"
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! jump {
    () => {
        "b {f}"
    };
}

/// `function => "name" "@@" "version"`. `"@@"` marks the version that linkers use by default, `"@"`
/// an older one.
macro_rules! export {
    ($($f:path => $name:literal $at:literal $version:literal;)*) => { $(
        std::arch::global_asm!(
            concat!(".pushsection .text.symver.", $name, $version, ",\"ax\",@progbits"),
            concat!(".globl __sv_", $name, "__", $version),
            concat!(".type __sv_", $name, "__", $version, ",@function"),
            concat!("__sv_", $name, "__", $version, ": "),
            jump!(),
            concat!(".size __sv_", $name, "__", $version, ", . - __sv_", $name, "__", $version),
            concat!(".symver __sv_", $name, "__", $version, ", ", $name, $at, $version),
            ".popsection",
            f = sym $f
        );
    )* }
}

mod private;

export! {
    kern::ibv_copy_path_rec_from_kern => "ibv_copy_path_rec_from_kern" "@@" "IBVERBS_1.0";
    kern::ibv_copy_path_rec_to_kern => "ibv_copy_path_rec_to_kern" "@@" "IBVERBS_1.0";
    kern::ibv_copy_qp_attr_from_kern => "ibv_copy_qp_attr_from_kern" "@@" "IBVERBS_1.0";
    cq::channel::ibv_create_comp_channel => "ibv_create_comp_channel" "@@" "IBVERBS_1.0";
    cq::channel::ibv_destroy_comp_channel => "ibv_destroy_comp_channel" "@@" "IBVERBS_1.0";
    misc::ibv_get_sysfs_path => "ibv_get_sysfs_path" "@@" "IBVERBS_1.0";
    misc::ibv_rate_to_mult => "ibv_rate_to_mult" "@@" "IBVERBS_1.0";
    misc::ibv_read_sysfs_file => "ibv_read_sysfs_file" "@@" "IBVERBS_1.0";
    misc::mult_to_ibv_rate => "mult_to_ibv_rate" "@@" "IBVERBS_1.0";
    events::ibv_ack_async_event => "ibv_ack_async_event" "@@" "IBVERBS_1.1";
    cq::channel::ibv_ack_cq_events => "ibv_ack_cq_events" "@@" "IBVERBS_1.1";
    pd::ibv_alloc_pd => "ibv_alloc_pd" "@@" "IBVERBS_1.1";
    datagram::ibv_attach_mcast => "ibv_attach_mcast" "@@" "IBVERBS_1.1";
    context::ibv_close_device => "ibv_close_device" "@@" "IBVERBS_1.1";
    kern::ibv_copy_ah_attr_from_kern => "ibv_copy_ah_attr_from_kern" "@@" "IBVERBS_1.1";
    ah::ibv_create_ah => "ibv_create_ah" "@@" "IBVERBS_1.1";
    ah::ibv_create_ah_from_wc => "ibv_create_ah_from_wc" "@@" "IBVERBS_1.1";
    cq::queue::ibv_create_cq => "ibv_create_cq" "@@" "IBVERBS_1.1";
    create::ibv_create_qp => "ibv_create_qp" "@@" "IBVERBS_1.1";
    srq::queue::ibv_create_srq => "ibv_create_srq" "@@" "IBVERBS_1.1";
    pd::ibv_dealloc_pd => "ibv_dealloc_pd" "@@" "IBVERBS_1.1";
    mr::ibv_dereg_mr => "ibv_dereg_mr" "@@" "IBVERBS_1.1";
    ah::ibv_destroy_ah => "ibv_destroy_ah" "@@" "IBVERBS_1.1";
    cq::queue::ibv_destroy_cq => "ibv_destroy_cq" "@@" "IBVERBS_1.1";
    destroy::ibv_destroy_qp => "ibv_destroy_qp" "@@" "IBVERBS_1.1";
    srq::queue::ibv_destroy_srq => "ibv_destroy_srq" "@@" "IBVERBS_1.1";
    datagram::ibv_detach_mcast => "ibv_detach_mcast" "@@" "IBVERBS_1.1";
    misc::ibv_fork_range => "ibv_dofork_range" "@@" "IBVERBS_1.1";
    misc::ibv_fork_range => "ibv_dontfork_range" "@@" "IBVERBS_1.1";
    misc::ibv_event_type_str => "ibv_event_type_str" "@@" "IBVERBS_1.1";
    misc::ibv_fork_init => "ibv_fork_init" "@@" "IBVERBS_1.1";
    list::ibv_free_device_list => "ibv_free_device_list" "@@" "IBVERBS_1.1";
    events::ibv_get_async_event => "ibv_get_async_event" "@@" "IBVERBS_1.1";
    cq::channel::ibv_get_cq_event => "ibv_get_cq_event" "@@" "IBVERBS_1.1";
    list::ibv_get_device_guid => "ibv_get_device_guid" "@@" "IBVERBS_1.1";
    list::ibv_get_device_list => "ibv_get_device_list" "@@" "IBVERBS_1.1";
    list::ibv_get_device_name => "ibv_get_device_name" "@@" "IBVERBS_1.1";
    ah::ibv_init_ah_from_wc => "ibv_init_ah_from_wc" "@@" "IBVERBS_1.1";
    modify::ibv_modify_qp => "ibv_modify_qp" "@@" "IBVERBS_1.1";
    srq::queue::ibv_modify_srq => "ibv_modify_srq" "@@" "IBVERBS_1.1";
    misc::ibv_node_type_str => "ibv_node_type_str" "@@" "IBVERBS_1.1";
    open::ibv_open_device => "ibv_open_device" "@@" "IBVERBS_1.1";
    misc::ibv_port_state_str => "ibv_port_state_str" "@@" "IBVERBS_1.1";
    device::query::ibv_query_device => "ibv_query_device" "@@" "IBVERBS_1.1";
    gid::ibv_query_gid => "ibv_query_gid" "@@" "IBVERBS_1.1";
    device::query::ibv_query_pkey => "ibv_query_pkey" "@@" "IBVERBS_1.1";
    device::query::ibv_query_port => "ibv_query_port" "@@" "IBVERBS_1.1";
    lifecycle::query::ibv_query_qp => "ibv_query_qp" "@@" "IBVERBS_1.1";
    srq::queue::ibv_query_srq => "ibv_query_srq" "@@" "IBVERBS_1.1";
    misc::ibv_rate_to_mbps => "ibv_rate_to_mbps" "@@" "IBVERBS_1.1";
    mr::ibv_reg_mr => "ibv_reg_mr" "@@" "IBVERBS_1.1";
    mr::ibv_rereg_mr => "ibv_rereg_mr" "@@" "IBVERBS_1.1";
    cq::queue::ibv_resize_cq => "ibv_resize_cq" "@@" "IBVERBS_1.1";
    misc::ibv_resolve_eth_l2_from_gid => "ibv_resolve_eth_l2_from_gid" "@@" "IBVERBS_1.1";
    misc::ibv_wc_status_str => "ibv_wc_status_str" "@@" "IBVERBS_1.1";
    misc::mbps_to_ibv_rate => "mbps_to_ibv_rate" "@@" "IBVERBS_1.1";
    device::query::ibv_get_pkey_index => "ibv_get_pkey_index" "@@" "IBVERBS_1.5";
    lifecycle::query::ibv_qp_to_qp_ex => "ibv_qp_to_qp_ex" "@@" "IBVERBS_1.6";
    mr::ibv_reg_mr_iova => "ibv_reg_mr_iova" "@@" "IBVERBS_1.7";
    mr::ibv_reg_mr_iova2 => "ibv_reg_mr_iova2" "@@" "IBVERBS_1.8";
    list::ibv_get_device_index => "ibv_get_device_index" "@@" "IBVERBS_1.9";
    open::ibv_import_device => "ibv_import_device" "@@" "IBVERBS_1.10";
    mr::ibv_import_mr => "ibv_import_mr" "@@" "IBVERBS_1.10";
    pd::ibv_import_pd => "ibv_import_pd" "@@" "IBVERBS_1.10";
    lifecycle::query::ibv_query_ece => "ibv_query_ece" "@@" "IBVERBS_1.10";
    lifecycle::query::ibv_set_ece => "ibv_set_ece" "@@" "IBVERBS_1.10";
    mr::ibv_unimport_mr => "ibv_unimport_mr" "@@" "IBVERBS_1.10";
    pd::ibv_unimport_pd => "ibv_unimport_pd" "@@" "IBVERBS_1.10";
    gid::_ibv_query_gid_ex => "_ibv_query_gid_ex" "@@" "IBVERBS_1.11";
    gid::_ibv_query_gid_table => "_ibv_query_gid_table" "@@" "IBVERBS_1.11";
    dmabuf::ibv_reg_dmabuf_mr => "ibv_reg_dmabuf_mr" "@@" "IBVERBS_1.12";
    device_memory::ibv_import_dm => "ibv_import_dm" "@@" "IBVERBS_1.13";
    misc::ibv_is_fork_initialized => "ibv_is_fork_initialized" "@@" "IBVERBS_1.13";
    device_memory::ibv_unimport_dm => "ibv_unimport_dm" "@@" "IBVERBS_1.13";
    lifecycle::query::ibv_query_qp_data_in_order
        => "ibv_query_qp_data_in_order" "@@" "IBVERBS_1.14";
    mr_ex::ibv_reg_mr_ex => "ibv_reg_mr_ex" "@@" "IBVERBS_1.15";
    // DMA handles are hints for PCIe; this library's devices are not on a PCIe bus.
    unsupported::unsupported_pointer => "ibv_alloc_dmah" "@@" "IBVERBS_1.15";
    unsupported::unsupported_code => "ibv_dealloc_dmah" "@@" "IBVERBS_1.15";
    unsupported::unsupported_minus_one => "ibv_dm_export_dmabuf_fd" "@@" "IBVERBS_1.16";
    device::query::ibv_query_port_speed => "ibv_query_port_speed" "@@" "IBVERBS_1.16";
    mr_ex::ibv_alloc_buf => "ibv_alloc_buf" "@@" "IBVERBS_1.17";
    mr_ex::ibv_free_buf => "ibv_free_buf" "@@" "IBVERBS_1.17";
    mr_ex::ibv_reg_buf_mr => "ibv_reg_buf_mr" "@@" "IBVERBS_1.17";
    mr_ex::ibv_export_buf_dmabuf_fd => "ibv_export_buf_dmabuf_fd" "@@" "IBVERBS_1.18";
    counter::_ibv_query_comp_cntr_caps => "_ibv_query_comp_cntr_caps" "@@" "IBVERBS_1.18";
    counter::ibv_create_comp_cntr => "ibv_create_comp_cntr" "@@" "IBVERBS_1.18";
    counter::ibv_destroy_comp_cntr => "ibv_destroy_comp_cntr" "@@" "IBVERBS_1.18";
    counter::ibv_inc_comp_cntr => "ibv_inc_comp_cntr" "@@" "IBVERBS_1.18";
    counter::ibv_inc_err_comp_cntr => "ibv_inc_err_comp_cntr" "@@" "IBVERBS_1.18";
    counter::ibv_qp_attach_comp_cntr => "ibv_qp_attach_comp_cntr" "@@" "IBVERBS_1.18";
    counter::ibv_read_comp_cntr => "ibv_read_comp_cntr" "@@" "IBVERBS_1.18";
    counter::ibv_read_err_comp_cntr => "ibv_read_err_comp_cntr" "@@" "IBVERBS_1.18";
    counter::ibv_set_comp_cntr => "ibv_set_comp_cntr" "@@" "IBVERBS_1.18";
    counter::ibv_set_err_comp_cntr => "ibv_set_err_comp_cntr" "@@" "IBVERBS_1.18";
    rsocket::raccept => "raccept" "@@" "RDMACM_1.0";
    rsocket::rbind => "rbind" "@@" "RDMACM_1.0";
    rsocket::rclose => "rclose" "@@" "RDMACM_1.0";
    rsocket::rconnect => "rconnect" "@@" "RDMACM_1.0";
    cm::connect::rdma_accept => "rdma_accept" "@@" "RDMACM_1.0";
    cm::event::rdma_ack_cm_event => "rdma_ack_cm_event" "@@" "RDMACM_1.0";
    cm::id::rdma_bind_addr => "rdma_bind_addr" "@@" "RDMACM_1.0";
    cm::connect::rdma_connect => "rdma_connect" "@@" "RDMACM_1.0";
    cm::endpoint::rdma_create_ep => "rdma_create_ep" "@@" "RDMACM_1.0";
    cm::channel::rdma_create_event_channel => "rdma_create_event_channel" "@@" "RDMACM_1.0";
    cm::id::rdma_create_id => "rdma_create_id" "@@" "RDMACM_1.0";
    cm::endpoint::rdma_create_qp => "rdma_create_qp" "@@" "RDMACM_1.0";
    cm::endpoint::rdma_create_qp_ex => "rdma_create_qp_ex" "@@" "RDMACM_1.0";
    cm::endpoint::rdma_create_srq => "rdma_create_srq" "@@" "RDMACM_1.0";
    cm::endpoint::rdma_create_srq_ex => "rdma_create_srq_ex" "@@" "RDMACM_1.0";
    cm::endpoint::rdma_destroy_ep => "rdma_destroy_ep" "@@" "RDMACM_1.0";
    cm::channel::rdma_destroy_event_channel => "rdma_destroy_event_channel" "@@" "RDMACM_1.0";
    cm::id::rdma_destroy_id => "rdma_destroy_id" "@@" "RDMACM_1.0";
    cm::endpoint::rdma_destroy_qp => "rdma_destroy_qp" "@@" "RDMACM_1.0";
    cm::endpoint::rdma_destroy_srq => "rdma_destroy_srq" "@@" "RDMACM_1.0";
    cm::connect::rdma_disconnect => "rdma_disconnect" "@@" "RDMACM_1.0";
    cm::event::rdma_event_str => "rdma_event_str" "@@" "RDMACM_1.0";
    cm::address::rdma_free_devices => "rdma_free_devices" "@@" "RDMACM_1.0";
    cm::address::rdma_freeaddrinfo => "rdma_freeaddrinfo" "@@" "RDMACM_1.0";
    cm::event::rdma_get_cm_event => "rdma_get_cm_event" "@@" "RDMACM_1.0";
    cm::address::rdma_get_devices => "rdma_get_devices" "@@" "RDMACM_1.0";
    cm::id::rdma_get_dst_port => "rdma_get_dst_port" "@@" "RDMACM_1.0";
    cm::endpoint::rdma_get_request => "rdma_get_request" "@@" "RDMACM_1.0";
    cm::id::rdma_get_src_port => "rdma_get_src_port" "@@" "RDMACM_1.0";
    cm::address::rdma_getaddrinfo => "rdma_getaddrinfo" "@@" "RDMACM_1.0";
    cm::multicast::rdma_join_multicast => "rdma_join_multicast" "@@" "RDMACM_1.0";
    cm::multicast::rdma_leave_multicast => "rdma_leave_multicast" "@@" "RDMACM_1.0";
    cm::id::rdma_listen => "rdma_listen" "@@" "RDMACM_1.0";
    cm::id::rdma_migrate_id => "rdma_migrate_id" "@@" "RDMACM_1.0";
    cm::connect::rdma_notify => "rdma_notify" "@@" "RDMACM_1.0";
    cm::connect::rdma_reject => "rdma_reject" "@@" "RDMACM_1.0";
    cm::id::rdma_resolve_addr => "rdma_resolve_addr" "@@" "RDMACM_1.0";
    cm::id::rdma_resolve_route => "rdma_resolve_route" "@@" "RDMACM_1.0";
    cm::id::rdma_set_option => "rdma_set_option" "@@" "RDMACM_1.0";
    rsocket::rfcntl => "rfcntl" "@@" "RDMACM_1.0";
    rsocket::rgetpeername => "rgetpeername" "@@" "RDMACM_1.0";
    rsocket::rgetsockname => "rgetsockname" "@@" "RDMACM_1.0";
    rsocket::rgetsockopt => "rgetsockopt" "@@" "RDMACM_1.0";
    rsocket::riomap => "riomap" "@@" "RDMACM_1.0";
    rsocket::riounmap => "riounmap" "@@" "RDMACM_1.0";
    rsocket::riowrite => "riowrite" "@@" "RDMACM_1.0";
    rsocket::rlisten => "rlisten" "@@" "RDMACM_1.0";
    rsocket::rpoll => "rpoll" "@@" "RDMACM_1.0";
    rsocket::rread => "rread" "@@" "RDMACM_1.0";
    rsocket::rreadv => "rreadv" "@@" "RDMACM_1.0";
    rsocket::rrecv => "rrecv" "@@" "RDMACM_1.0";
    rsocket::rrecvfrom => "rrecvfrom" "@@" "RDMACM_1.0";
    rsocket::rrecvmsg => "rrecvmsg" "@@" "RDMACM_1.0";
    rsocket::rselect => "rselect" "@@" "RDMACM_1.0";
    rsocket::rsend => "rsend" "@@" "RDMACM_1.0";
    rsocket::rsendmsg => "rsendmsg" "@@" "RDMACM_1.0";
    rsocket::rsendto => "rsendto" "@@" "RDMACM_1.0";
    rsocket::rsetsockopt => "rsetsockopt" "@@" "RDMACM_1.0";
    rsocket::rshutdown => "rshutdown" "@@" "RDMACM_1.0";
    rsocket::rsocket => "rsocket" "@@" "RDMACM_1.0";
    rsocket::rwrite => "rwrite" "@@" "RDMACM_1.0";
    rsocket::rwritev => "rwritev" "@@" "RDMACM_1.0";
    cm::multicast::rdma_join_multicast_ex => "rdma_join_multicast_ex" "@@" "RDMACM_1.1";
    cm::connect::rdma_establish => "rdma_establish" "@@" "RDMACM_1.2";
    cm::connect::rdma_init_qp_attr => "rdma_init_qp_attr" "@@" "RDMACM_1.2";
    cm::connect::rdma_get_remote_ece => "rdma_get_remote_ece" "@@" "RDMACM_1.3";
    cm::connect::rdma_reject_ece => "rdma_reject_ece" "@@" "RDMACM_1.3";
    cm::connect::rdma_set_local_ece => "rdma_set_local_ece" "@@" "RDMACM_1.3";
    cm::lookup::rdma_query_addrinfo => "rdma_query_addrinfo" "@@" "RDMACM_1.4";
    cm::lookup::rdma_resolve_addrinfo => "rdma_resolve_addrinfo" "@@" "RDMACM_1.4";
    cm::lookup::rdma_write_cm_event => "rdma_write_cm_event" "@@" "RDMACM_1.4";
    rsocket::repoll_create => "repoll_create" "@@" "RDMACM_1.5";
    rsocket::repoll_ctl => "repoll_ctl" "@@" "RDMACM_1.5";
    rsocket::repoll_wait => "repoll_wait" "@@" "RDMACM_1.5";
    // Version 1.0 had structures of another layout. No known program still uses it.
    unsupported::unsupported_code => "ibv_ack_async_event" "@" "IBVERBS_1.0";
    unsupported::unsupported_code => "ibv_ack_cq_events" "@" "IBVERBS_1.0";
    unsupported::unsupported_pointer => "ibv_alloc_pd" "@" "IBVERBS_1.0";
    unsupported::unsupported_code => "ibv_attach_mcast" "@" "IBVERBS_1.0";
    unsupported::unsupported_code => "ibv_close_device" "@" "IBVERBS_1.0";
    unsupported::unsupported_pointer => "ibv_create_ah" "@" "IBVERBS_1.0";
    unsupported::unsupported_pointer => "ibv_create_cq" "@" "IBVERBS_1.0";
    unsupported::unsupported_pointer => "ibv_create_qp" "@" "IBVERBS_1.0";
    unsupported::unsupported_pointer => "ibv_create_srq" "@" "IBVERBS_1.0";
    unsupported::unsupported_code => "ibv_dealloc_pd" "@" "IBVERBS_1.0";
    unsupported::unsupported_code => "ibv_dereg_mr" "@" "IBVERBS_1.0";
    unsupported::unsupported_code => "ibv_destroy_ah" "@" "IBVERBS_1.0";
    unsupported::unsupported_code => "ibv_destroy_cq" "@" "IBVERBS_1.0";
    unsupported::unsupported_code => "ibv_destroy_qp" "@" "IBVERBS_1.0";
    unsupported::unsupported_code => "ibv_destroy_srq" "@" "IBVERBS_1.0";
    unsupported::unsupported_code => "ibv_detach_mcast" "@" "IBVERBS_1.0";
    unsupported::unsupported_code => "ibv_free_device_list" "@" "IBVERBS_1.0";
    unsupported::unsupported_code => "ibv_get_async_event" "@" "IBVERBS_1.0";
    unsupported::unsupported_code => "ibv_get_cq_event" "@" "IBVERBS_1.0";
    unsupported::unsupported_pointer => "ibv_get_device_guid" "@" "IBVERBS_1.0";
    unsupported::unsupported_pointer => "ibv_get_device_list" "@" "IBVERBS_1.0";
    unsupported::unsupported_pointer => "ibv_get_device_name" "@" "IBVERBS_1.0";
    unsupported::unsupported_code => "ibv_modify_qp" "@" "IBVERBS_1.0";
    unsupported::unsupported_code => "ibv_modify_srq" "@" "IBVERBS_1.0";
    unsupported::unsupported_pointer => "ibv_open_device" "@" "IBVERBS_1.0";
    unsupported::unsupported_code => "ibv_query_device" "@" "IBVERBS_1.0";
    unsupported::unsupported_code => "ibv_query_gid" "@" "IBVERBS_1.0";
    unsupported::unsupported_code => "ibv_query_pkey" "@" "IBVERBS_1.0";
    unsupported::unsupported_code => "ibv_query_port" "@" "IBVERBS_1.0";
    unsupported::unsupported_code => "ibv_query_qp" "@" "IBVERBS_1.0";
    unsupported::unsupported_code => "ibv_query_srq" "@" "IBVERBS_1.0";
    unsupported::unsupported_pointer => "ibv_reg_mr" "@" "IBVERBS_1.0";
    unsupported::unsupported_code => "ibv_resize_cq" "@" "IBVERBS_1.0";
    providers::nothing => "ibv_register_driver" "@" "IBVERBS_1.1";
}
