//! Tests of imported and shared contexts, device memory, and asynchronous events.

use super::*;
use crate::device::checked_context;
use crate::device::context::ibv_close_device;
use crate::device::list::{ibv_free_device_list, ibv_get_device_list};
use crate::lifecycle::create::ibv_create_qp;
use crate::lifecycle::destroy::ibv_destroy_qp;
use crate::lifecycle::modify::ibv_modify_qp;
use std::mem::zeroed;
use std::ptr::null_mut;

fn open_first_device() -> *mut ibv_context {
    // SAFETY: the arguments are as the manual pages require.
    unsafe {
        let list = ibv_get_device_list(null_mut());
        let context = ibv_open_device(*list);
        ibv_free_device_list(list);
        assert!(!context.is_null());
        context
    }
}

#[test]
fn imported_context_finds_objects_by_number() {
    // SAFETY: as in `open_first_device`; each object is destroyed once.
    unsafe {
        let context = open_first_device();
        let domain = pd::ibv_alloc_pd(context);
        let imported = ibv_import_device(libc::dup((*context).cmd_fd));
        assert!(!imported.is_null());
        assert_eq!(
            (*imported).async_fd,
            -1,
            "events stay with the first context"
        );
        let same = pd::ibv_import_pd(imported, (*domain).handle);
        assert!(!same.is_null());
        pd::ibv_unimport_pd(same);
        assert_eq!(ibv_close_device(imported), 0);
        assert_eq!(pd::ibv_dealloc_pd(domain), 0);
        assert_eq!(ibv_close_device(context), 0);
    }
}

/// The table of handles does not grow when regions come and go.
#[test]
fn deregistered_region_has_no_handle() {
    let mut buffer = [0u8; 64];
    // SAFETY: as in `open_first_device`; each object is destroyed once.
    unsafe {
        let context = open_first_device();
        let domain = pd::ibv_alloc_pd(context);
        let region = mr::ibv_reg_mr(domain, buffer.as_mut_ptr().cast(), buffer.len(), 1);
        let handle = (*region).handle;
        let handles = || checked_context(context).unwrap().handles.mrs.lock().len();
        assert_eq!(handles(), 1);
        assert_eq!(mr::ibv_dereg_mr(region), 0);
        assert_eq!(handles(), 0);
        assert!(mr::ibv_import_mr(domain, handle).is_null());
        assert_eq!(pd::ibv_dealloc_pd(domain), 0);
        assert_eq!(ibv_close_device(context), 0);
    }
}

#[test]
fn each_opened_context_has_its_own_shared_context() {
    let (first, second) = (open_first_device(), open_first_device());
    // SAFETY: both contexts are open.
    unsafe {
        let shared = shared_context(&context(first).raw).unwrap();
        assert_eq!(shared_context(&context(first).raw), Ok(shared));
        assert_ne!(shared_context(&context(second).raw), Ok(shared));
        assert!(context(shared).is_shared());
        assert_eq!((ibv_close_device(first), ibv_close_device(second)), (0, 0));
        assert_eq!(ibv_close_device(shared), 0);
        assert!(
            checked_context(shared).is_ok(),
            "closing a shared context has no effect"
        );
    }
}

#[test]
fn device_memory_checks_bounds() {
    // SAFETY: as in `open_first_device`; copies are from and to arrays that are long enough.
    unsafe {
        let context = open_first_device();
        let mut attr = ibv_alloc_dm_attr {
            length: 64,
            log_align_req: 0,
            comp_mask: 0,
        };
        let dm = device_memory::alloc_dm(context, &raw mut attr);
        let (to_dm, from_dm) = ((*dm).memcpy_to_dm.unwrap(), (*dm).memcpy_from_dm.unwrap());
        let mut bytes = [7u8; 8];
        assert_eq!(to_dm(dm, 60, bytes.as_ptr().cast(), 4), 0);
        assert_eq!(to_dm(dm, 64, bytes.as_ptr().cast(), 4), libc::EINVAL);
        assert_eq!(to_dm(dm, 60, bytes.as_ptr().cast(), 8), libc::EINVAL);
        assert_eq!(from_dm(bytes.as_mut_ptr().cast(), dm, 56, 8), 0);
        assert_eq!(bytes, [0, 0, 0, 0, 7, 7, 7, 7]);
        assert_eq!(device_memory::free_dm(dm), 0);
        assert_eq!(ibv_close_device(context), 0);
    }
}

/// Returns `true` if the descriptor becomes readable before the timeout.
fn is_readable(fd: c_int, timeout_ms: c_int) -> bool {
    let mut set = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: the pointer is to one live entry.
    unsafe { libc::poll(&raw mut set, 1, timeout_ms) == 1 }
}

/// Destroying an object discards its pending events; a program that polls the descriptor would
/// otherwise wait for an event that never comes.
#[test]
fn destroying_object_discards_events() {
    // SAFETY: as in `open_first_device`; each object is destroyed once.
    unsafe {
        let context = open_first_device();
        let domain = pd::ibv_alloc_pd(context);
        let queue = cq::queue::ibv_create_cq(context, 4, null_mut(), null_mut(), 0);
        let mut srq_attr: ibv_srq_init_attr = zeroed();
        (srq_attr.attr.max_wr, srq_attr.attr.max_sge) = (4, 1);
        let shared = srq::queue::ibv_create_srq(domain, &raw mut srq_attr);
        let mut attr: ibv_qp_init_attr = zeroed();
        (attr.send_cq, attr.recv_cq, attr.srq) = (queue, queue, shared);
        (attr.qp_type, attr.cap.max_send_wr, attr.cap.max_send_sge) = (value::QPT_RC, 4, 1);
        let qp = ibv_create_qp(domain, &raw mut attr);
        let mut to: ibv_qp_attr = zeroed();
        to.qp_state = value::QPS_ERR;
        assert_eq!(ibv_modify_qp(qp, &raw mut to, value::QP_STATE as c_int), 0);
        assert!(
            is_readable((*context).async_fd, 60_000),
            "no event that the last WQE was reached"
        );
        assert_eq!(ibv_destroy_qp(qp), 0);
        assert!(!is_readable((*context).async_fd, 0));
        assert_eq!(srq::queue::ibv_destroy_srq(shared), 0);
        assert_eq!(cq::queue::ibv_destroy_cq(queue), 0);
        assert_eq!(pd::ibv_dealloc_pd(domain), 0);
        assert_eq!(ibv_close_device(context), 0);
    }
}
