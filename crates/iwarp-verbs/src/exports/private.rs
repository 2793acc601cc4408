//! The symbols of `IBVERBS_PRIVATE_NN`, which rdma-core's own libraries and providers import from libibverbs.
//!
//! rdma-core renames the version whenever one of them changes: it is 25 up to release 32, 33 in release 33, 34 up to release 56, 57 in
//! releases 57 and 58, 59 up to 63, then 64 and 65. A program that was built with one release may be linked with providers' libraries of that release (UCX with libmlx5),
//! so all of these versions are there. Nothing behind most of the names is ever called: see [`crate::private`].

use crate::{misc, private, query};

/// Exports each function under the first version that has it, and under all later ones.
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

/// The only object, under each version. Providers set it, and nothing reads it.
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

// What later releases do not have.
export! {
    private::command => "ibv_cmd_query_device" "@" "IBVERBS_PRIVATE_25";
    private::command => "ibv_cmd_query_device" "@@" "IBVERBS_PRIVATE_33";
    private::command => "ibv_cmd_query_device_ex" "@@" "IBVERBS_PRIVATE_25";
    private::minus_one => "ibv_get_fw_ver" "@@" "IBVERBS_PRIVATE_25";
}

export! {
    private::verbs_register_driver => "verbs_register_driver_25" "@@" "IBVERBS_PRIVATE_25";
    private::verbs_register_driver => "verbs_register_driver_33" "@@" "IBVERBS_PRIVATE_33";
    private::verbs_register_driver => "verbs_register_driver_34" "@@" "IBVERBS_PRIVATE_34";
    private::verbs_register_driver => "verbs_register_driver_57" "@@" "IBVERBS_PRIVATE_57";
    private::verbs_register_driver => "verbs_register_driver_59" "@@" "IBVERBS_PRIVATE_59";
    private::verbs_register_driver => "verbs_register_driver_64" "@@" "IBVERBS_PRIVATE_64";
    private::verbs_register_driver => "verbs_register_driver_65" "@@" "IBVERBS_PRIVATE_65";
}

since! { 25:
    private::zero => "__ioctl_final_num_attrs";
    private::pointer => "_verbs_init_and_alloc_context";
    private::command => "execute_ioctl";
    private::command => "ibv_cmd_advise_mr";
    private::command => "ibv_cmd_alloc_dm";
    private::command => "ibv_cmd_alloc_mw";
    private::command => "ibv_cmd_alloc_pd";
    private::command => "ibv_cmd_attach_mcast";
    private::command => "ibv_cmd_close_xrcd";
    private::command => "ibv_cmd_create_ah";
    private::command => "ibv_cmd_create_counters";
    private::command => "ibv_cmd_create_cq";
    private::command => "ibv_cmd_create_cq_ex";
    private::command => "ibv_cmd_create_flow";
    private::command => "ibv_cmd_create_flow_action_esp";
    private::command => "ibv_cmd_create_qp";
    private::command => "ibv_cmd_create_qp_ex";
    private::command => "ibv_cmd_create_qp_ex2";
    private::command => "ibv_cmd_create_rwq_ind_table";
    private::command => "ibv_cmd_create_srq";
    private::command => "ibv_cmd_create_srq_ex";
    private::command => "ibv_cmd_create_wq";
    private::command => "ibv_cmd_dealloc_mw";
    private::command => "ibv_cmd_dealloc_pd";
    private::command => "ibv_cmd_dereg_mr";
    private::command => "ibv_cmd_destroy_ah";
    private::command => "ibv_cmd_destroy_counters";
    private::command => "ibv_cmd_destroy_cq";
    private::command => "ibv_cmd_destroy_flow";
    private::command => "ibv_cmd_destroy_flow_action";
    private::command => "ibv_cmd_destroy_qp";
    private::command => "ibv_cmd_destroy_rwq_ind_table";
    private::command => "ibv_cmd_destroy_srq";
    private::command => "ibv_cmd_destroy_wq";
    private::command => "ibv_cmd_detach_mcast";
    private::command => "ibv_cmd_free_dm";
    private::command => "ibv_cmd_get_context";
    private::command => "ibv_cmd_modify_cq";
    private::command => "ibv_cmd_modify_flow_action_esp";
    private::command => "ibv_cmd_modify_qp";
    private::command => "ibv_cmd_modify_qp_ex";
    private::command => "ibv_cmd_modify_srq";
    private::command => "ibv_cmd_modify_wq";
    private::command => "ibv_cmd_open_qp";
    private::command => "ibv_cmd_open_xrcd";
    private::command => "ibv_cmd_poll_cq";
    private::command => "ibv_cmd_post_recv";
    private::command => "ibv_cmd_post_send";
    private::command => "ibv_cmd_post_srq_recv";
    private::command => "ibv_cmd_query_context";
    private::command => "ibv_cmd_query_mr";
    private::command => "ibv_cmd_query_port";
    private::command => "ibv_cmd_query_qp";
    private::command => "ibv_cmd_query_srq";
    private::command => "ibv_cmd_read_counters";
    private::command => "ibv_cmd_reg_dm_mr";
    private::command => "ibv_cmd_reg_mr";
    private::command => "ibv_cmd_req_notify_cq";
    private::command => "ibv_cmd_rereg_mr";
    private::command => "ibv_cmd_resize_cq";
    query::ibv_query_gid_type => "ibv_query_gid_type";
    private::minus_one => "ibv_read_ibdev_sysfs_file";
    private::nothing => "verbs_init_cq";
    private::pointer => "verbs_open_device";
    private::nothing => "verbs_set_ops";
    private::nothing => "verbs_uninit_context";
}

since! { 33:
    private::command => "ibv_cmd_query_device_any";
}

since! { 34:
    private::verbs_log => "__verbs_log";
    private::command => "ibv_cmd_create_cq_ex2";
    private::command => "ibv_cmd_reg_dmabuf_mr";
    misc::ibv_wr_opcode_str => "ibv_wr_opcode_str";
}

since! { 59:
    private::command => "ibv_cmd_alloc_dmah";
    private::command => "ibv_cmd_export_dmabuf_fd";
    private::command => "ibv_cmd_free_dmah";
    private::command => "ibv_cmd_query_port_speed";
    private::command => "ibv_cmd_reg_mr_ex";
}

since! { 64:
    private::pointer => "ibv_dmabuf_heap_alloc";
    private::pointer => "ibv_dmabuf_heap_cc_shared_init";
    private::nothing => "ibv_dmabuf_heap_destroy";
    private::nothing => "ibv_dmabuf_heap_free";
}

since! { 65:
    private::command => "ibv_cmd_create_comp_cntr";
    private::command => "ibv_cmd_destroy_comp_cntr";
    private::command => "ibv_cmd_inc_comp_cntr";
    private::command => "ibv_cmd_inc_err_comp_cntr";
    private::command => "ibv_cmd_qp_attach_comp_cntr";
    private::command => "ibv_cmd_query_comp_cntr_caps";
    private::command => "ibv_cmd_read_comp_cntr";
    private::command => "ibv_cmd_read_err_comp_cntr";
    private::command => "ibv_cmd_set_comp_cntr";
    private::command => "ibv_cmd_set_err_comp_cntr";
}
