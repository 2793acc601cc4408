//! Opens devices: `ibv_open_device(3)`, `ibv_import_device(3)`, and the connection manager's shared
//! contexts.
//!
//! A context contains a table of functions, so this room uses the rooms of all objects. `cm` and
//! `exports` use it.

use crate::abi::verbs::*;
use crate::border::guard::{Res, pointer};
use crate::device::context::{Parts, create, new_cmd_fd, shared_parts};
use crate::device::list::{device_object, device_of};
use crate::device::{context, query};
use crate::domain::{pd, xrcd};
use crate::lifecycle::{self, xrc};
use crate::memory::{device_memory, mr, mw};
use crate::process::unused;
use crate::{cq, post, srq};
use iwarp::Config;
use iwarp::runtime::{Context, ProcessLock};
use std::ffi::c_int;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;

/// Returns a context with its table of functions; all other fields are zero.
fn functions() -> verbs_context {
    // SAFETY: integers, raw pointers and optional functions, for which zero is valid.
    let mut c: verbs_context = unsafe { std::mem::zeroed() };
    c.query_port = Some(query::query_port);
    c.query_device_ex = Some(query::query_device_ex);
    c.query_rt_values = Some(query::query_rt_values);
    c.reg_dm_mr = Some(mr::reg_dm_mr);
    c.alloc_dm = Some(device_memory::alloc_dm);
    c.free_dm = Some(device_memory::free_dm);
    c.alloc_parent_domain = Some(pd::alloc_parent_domain);
    c.alloc_td = Some(pd::alloc_td);
    c.dealloc_td = Some(pd::dealloc_td);
    c.create_cq_ex = Some(cq::queue::create_cq_ex);
    c.create_qp_ex = Some(lifecycle::create::create_qp_ex);
    c.open_qp = Some(xrc::open_qp);
    c.open_xrcd = Some(xrcd::open_xrcd);
    c.close_xrcd = Some(xrcd::close_xrcd);
    c.get_srq_num = Some(srq::queue::get_srq_num);
    c.create_srq_ex = Some(srq::queue::create_srq_ex);
    c.post_srq_ops = Some(srq::tags::post_srq_ops);
    c.advise_mr = Some(mr::advise_mr);
    c.alloc_null_mr = Some(mr::alloc_null_mr);
    let ops = &mut c.context.ops;
    ops._compat_query_device = Some(query::ibv_query_device);
    ops._compat_query_port = Some(query::ibv_query_port);
    ops.alloc_mw = Some(mw::alloc_mw);
    ops.bind_mw = Some(post::send::bind_mw);
    ops.dealloc_mw = Some(mw::dealloc_mw);
    ops.poll_cq = Some(cq::completion::poll_cq);
    ops.req_notify_cq = Some(cq::queue::req_notify_cq);
    ops.post_srq_recv = Some(post::receive::post_srq_recv);
    ops.post_send = Some(post::send::post_send);
    ops.post_recv = Some(post::receive::post_recv);
    c
}

pub(crate) unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    unused::record_use();
    pointer(|| {
        let device = device_of(device)?;
        let mut config = Config::from_env();
        config.face = device.face;
        create(Parts {
            functions: functions(),
            raw: Context::open(&device.current()?, config)?,
            device,
            handles: Arc::default(),
            cmd: new_cmd_fd()?,
            shared: false,
            with_events: true,
        })
    })
}

/// Returns the connection manager's context for an opened device. Creates it on first use.
pub(crate) fn shared_context(raw: &Context) -> Res<*mut ibv_context> {
    static SHARED: ProcessLock<Vec<usize>> = ProcessLock::new("verbs::open::SHARED", Vec::new());
    let mut shared = SHARED.lock();
    for c in shared.iter() {
        // SAFETY: shared contexts are never closed.
        let object = unsafe { context(*c as *mut ibv_context) };
        if object.raw.is_same(raw) {
            return Ok(*c as *mut ibv_context);
        }
    }
    let c = create(Parts {
        functions: functions(),
        raw: raw.clone(),
        device: device_object(raw.device().clone(), raw.config().face),
        handles: Arc::default(),
        cmd: new_cmd_fd()?,
        shared: true,
        with_events: true,
    })?;
    shared.push(c as usize);
    Ok(c)
}

pub(crate) unsafe extern "C" fn ibv_import_device(cmd_fd: c_int) -> *mut ibv_context {
    unused::record_use();
    pointer(|| {
        let (raw, handles) = shared_parts(cmd_fd)?;
        let device = device_object(raw.device().clone(), raw.config().face);
        create(Parts {
            functions: functions(),
            raw,
            device,
            handles,
            // On success the library owns the descriptor (ibv_import_device(3)).
            cmd: OwnedFd::from_raw_fd(cmd_fd),
            shared: false,
            with_events: false,
        })
    })
}

#[cfg(test)]
#[path = "open_tests.rs"]
mod tests;
