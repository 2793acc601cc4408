//! The symbols of `IBVERBS_PRIVATE_NN`, which rdma-core's own libraries and providers import.
//!
//! rdma-core renames the version whenever a symbol changes: 25 up to release 32, 33 in release 33,
//! 34 up to 56, 57 in 57 and 58, 59 up to 63, then 64 and 65. A program may be linked with the
//! providers of the release it was built with, as UCX is with libmlx5, so this library exports all
//! these versions. Most of the functions are never called: see [`providers`].

use crate::device::gid;
use crate::stateless::{misc, providers};

/// Exports each function under the given first version and all later ones.
macro_rules! since {
    (25: $($f:path => $name:literal;)*) => {
        export! { $($f => $name "@" "IBVERBS_PRIVATE_25";)* }
        since! { 33: $($f => $name;)* }
    };
    (33: $($f:path => $name:literal;)*) => {
        export! { $($f => $name "@" "IBVERBS_PRIVATE_33";)* }
        since! { 34: $($f => $name;)* }
    };
    (34: $($f:path => $name:literal;)*) => {
        export! { $(
            $f => $name "@@" "IBVERBS_PRIVATE_34";
            $f => $name "@" "IBVERBS_PRIVATE_57";
            $f => $name "@" "IBVERBS_PRIVATE_59";
        )* }
        since! { later 64: $($f => $name;)* }
    };
    (59: $($f:path => $name:literal;)*) => {
        export! { $($f => $name "@@" "IBVERBS_PRIVATE_59";)* }
        since! { later 64: $($f => $name;)* }
    };
    (64: $($f:path => $name:literal;)*) => {
        export! { $($f => $name "@@" "IBVERBS_PRIVATE_64"; $f => $name "@" "IBVERBS_PRIVATE_65";)* }
    };
    (65: $($f:path => $name:literal;)*) => {
        export! { $($f => $name "@@" "IBVERBS_PRIVATE_65";)* }
    };
    (later 64: $($f:path => $name:literal;)*) => {
        export! { $($f => $name "@" "IBVERBS_PRIVATE_64"; $f => $name "@" "IBVERBS_PRIVATE_65";)* }
    };
}

/// The only variable, under each version. Providers set it; it is never read.
macro_rules! object {
    ($($at:literal $version:literal;)*) => { $(
        std::arch::global_asm!(
            ".pushsection .data.verbs_allow_disassociate_destroy,\"aw\",@progbits",
            concat!(".globl __sv_allow_disassociate_", $version),
            concat!(".type __sv_allow_disassociate_", $version, ",@object"),
            concat!("__sv_allow_disassociate_", $version, ": .byte 0"),
            concat!(".size __sv_allow_disassociate_", $version, ", 1"),
            concat!(
                ".symver __sv_allow_disassociate_", $version,
                ", verbs_allow_disassociate_destroy", $at, "IBVERBS_PRIVATE_", $version
            ),
            ".popsection",
        );
    )* };
}

object! {
    "@" "25";
    "@" "33";
    "@@" "34";
    "@" "57";
    "@" "59";
    "@" "64";
    "@" "65";
}

// Symbols that later releases removed.
export! {
    providers::command => "ibv_cmd_query_device" "@" "IBVERBS_PRIVATE_25";
    providers::command => "ibv_cmd_query_device" "@@" "IBVERBS_PRIVATE_33";
    providers::command => "ibv_cmd_query_device_ex" "@@" "IBVERBS_PRIVATE_25";
    providers::minus_one => "ibv_get_fw_ver" "@@" "IBVERBS_PRIVATE_25";
}

export! {
    providers::verbs_register_driver => "verbs_register_driver_25" "@@" "IBVERBS_PRIVATE_25";
    providers::verbs_register_driver => "verbs_register_driver_33" "@@" "IBVERBS_PRIVATE_33";
    providers::verbs_register_driver => "verbs_register_driver_34" "@@" "IBVERBS_PRIVATE_34";
    providers::verbs_register_driver => "verbs_register_driver_57" "@@" "IBVERBS_PRIVATE_57";
    providers::verbs_register_driver => "verbs_register_driver_59" "@@" "IBVERBS_PRIVATE_59";
    providers::verbs_register_driver => "verbs_register_driver_64" "@@" "IBVERBS_PRIVATE_64";
    providers::verbs_register_driver => "verbs_register_driver_65" "@@" "IBVERBS_PRIVATE_65";
}

since! { 25:
    providers::zero => "__ioctl_final_num_attrs";
    providers::pointer => "_verbs_init_and_alloc_context";
    providers::command => "execute_ioctl";
    providers::command => "ibv_cmd_advise_mr";
    providers::command => "ibv_cmd_alloc_dm";
    providers::command => "ibv_cmd_alloc_mw";
    providers::command => "ibv_cmd_alloc_pd";
    providers::command => "ibv_cmd_attach_mcast";
    providers::command => "ibv_cmd_close_xrcd";
    providers::command => "ibv_cmd_create_ah";
    providers::command => "ibv_cmd_create_counters";
    providers::command => "ibv_cmd_create_cq";
    providers::command => "ibv_cmd_create_cq_ex";
    providers::command => "ibv_cmd_create_flow";
    providers::command => "ibv_cmd_create_flow_action_esp";
    providers::command => "ibv_cmd_create_qp";
    providers::command => "ibv_cmd_create_qp_ex";
    providers::command => "ibv_cmd_create_qp_ex2";
    providers::command => "ibv_cmd_create_rwq_ind_table";
    providers::command => "ibv_cmd_create_srq";
    providers::command => "ibv_cmd_create_srq_ex";
    providers::command => "ibv_cmd_create_wq";
    providers::command => "ibv_cmd_dealloc_mw";
    providers::command => "ibv_cmd_dealloc_pd";
    providers::command => "ibv_cmd_dereg_mr";
    providers::command => "ibv_cmd_destroy_ah";
    providers::command => "ibv_cmd_destroy_counters";
    providers::command => "ibv_cmd_destroy_cq";
    providers::command => "ibv_cmd_destroy_flow";
    providers::command => "ibv_cmd_destroy_flow_action";
    providers::command => "ibv_cmd_destroy_qp";
    providers::command => "ibv_cmd_destroy_rwq_ind_table";
    providers::command => "ibv_cmd_destroy_srq";
    providers::command => "ibv_cmd_destroy_wq";
    providers::command => "ibv_cmd_detach_mcast";
    providers::command => "ibv_cmd_free_dm";
    providers::command => "ibv_cmd_get_context";
    providers::command => "ibv_cmd_modify_cq";
    providers::command => "ibv_cmd_modify_flow_action_esp";
    providers::command => "ibv_cmd_modify_qp";
    providers::command => "ibv_cmd_modify_qp_ex";
    providers::command => "ibv_cmd_modify_srq";
    providers::command => "ibv_cmd_modify_wq";
    providers::command => "ibv_cmd_open_qp";
    providers::command => "ibv_cmd_open_xrcd";
    providers::command => "ibv_cmd_poll_cq";
    providers::command => "ibv_cmd_post_recv";
    providers::command => "ibv_cmd_post_send";
    providers::command => "ibv_cmd_post_srq_recv";
    providers::command => "ibv_cmd_query_context";
    providers::command => "ibv_cmd_query_mr";
    providers::command => "ibv_cmd_query_port";
    providers::command => "ibv_cmd_query_qp";
    providers::command => "ibv_cmd_query_srq";
    providers::command => "ibv_cmd_read_counters";
    providers::command => "ibv_cmd_reg_dm_mr";
    providers::command => "ibv_cmd_reg_mr";
    providers::command => "ibv_cmd_req_notify_cq";
    providers::command => "ibv_cmd_rereg_mr";
    providers::command => "ibv_cmd_resize_cq";
    gid::ibv_query_gid_type => "ibv_query_gid_type";
    providers::minus_one => "ibv_read_ibdev_sysfs_file";
    providers::nothing => "verbs_init_cq";
    providers::pointer => "verbs_open_device";
    providers::nothing => "verbs_set_ops";
    providers::nothing => "verbs_uninit_context";
}

since! { 33:
    providers::command => "ibv_cmd_query_device_any";
}

since! { 34:
    providers::verbs_log => "__verbs_log";
    providers::command => "ibv_cmd_create_cq_ex2";
    providers::command => "ibv_cmd_reg_dmabuf_mr";
    misc::ibv_wr_opcode_str => "ibv_wr_opcode_str";
}

since! { 59:
    providers::command => "ibv_cmd_alloc_dmah";
    providers::command => "ibv_cmd_export_dmabuf_fd";
    providers::command => "ibv_cmd_free_dmah";
    providers::command => "ibv_cmd_query_port_speed";
    providers::command => "ibv_cmd_reg_mr_ex";
}

since! { 64:
    providers::pointer => "ibv_dmabuf_heap_alloc";
    providers::pointer => "ibv_dmabuf_heap_cc_shared_init";
    providers::nothing => "ibv_dmabuf_heap_destroy";
    providers::nothing => "ibv_dmabuf_heap_free";
}

since! { 65:
    providers::command => "ibv_cmd_create_comp_cntr";
    providers::command => "ibv_cmd_destroy_comp_cntr";
    providers::command => "ibv_cmd_inc_comp_cntr";
    providers::command => "ibv_cmd_inc_err_comp_cntr";
    providers::command => "ibv_cmd_qp_attach_comp_cntr";
    providers::command => "ibv_cmd_query_comp_cntr_caps";
    providers::command => "ibv_cmd_read_comp_cntr";
    providers::command => "ibv_cmd_read_err_comp_cntr";
    providers::command => "ibv_cmd_set_comp_cntr";
    providers::command => "ibv_cmd_set_err_comp_cntr";
}
