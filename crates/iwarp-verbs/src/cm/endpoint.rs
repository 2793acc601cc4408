//! Queue pairs of identifiers, and the synchronous interface's endpoints (`rdma_create_ep(3)`).

use super::object::{ACCESS_ALL, IdObject, QpInit, find, is_synchronous};
use super::{datagram, event, id, identifier, sockaddr};
use crate::abi::cma::*;
use crate::abi::verbs::value as v;
use crate::abi::verbs::value::{QPS_INIT, QPT_RC, QPT_UD, QPT_XRC_RECV, QPT_XRC_SEND};
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Errno, Res, UNSUPPORTED, minus_one, value};
use crate::cq::{channel as comp_channel, queue as cq};
use crate::device::check_same;
use crate::domain::xrcd;
use crate::lifecycle::{create, destroy, modify};
use crate::qp::connected;
use crate::srq::queue as srq;
use iwarp::runtime::ProcessLock;
use iwarp_rnic::qp::State;
use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use std::time::Duration;

fn last_error() -> Errno {
    std::io::Error::last_os_error().into()
}

fn non_null<T>(p: *mut T) -> Res<*mut T> {
    if p.is_null() {
        Err(last_error())
    } else {
        Ok(p)
    }
}

unsafe fn make_cq(id: *mut rdma_cm_id, depth: u32) -> Res<(*mut ibv_comp_channel, *mut ibv_cq)> {
    let channel = non_null(comp_channel::ibv_create_comp_channel((*id).verbs))?;
    let cq = cq::ibv_create_cq((*id).verbs, depth.max(1) as c_int, id.cast(), channel, 0);
    match non_null(cq) {
        Ok(cq) => Ok((channel, cq)),
        Err(e) => {
            comp_channel::ibv_destroy_comp_channel(channel);
            Err(e)
        }
    }
}

/// Creates the completion queues that this type of queue pair needs and that the program did not
/// pass. An XRC target's shared receive queue, from `rdma_create_srq`, needs a completion queue for
/// receives, although the queue pair itself needs none.
unsafe fn add_missing_cqs(
    id: *mut rdma_cm_id,
    object: &IdObject,
    attr: &mut ibv_qp_init_attr_ex,
) -> Res<()> {
    if attr.send_cq.is_null() && attr.qp_type != QPT_XRC_RECV {
        if (*id).send_cq.is_null() {
            ((*id).send_cq_channel, (*id).send_cq) = make_cq(id, attr.cap.max_send_wr)?;
        }
        attr.send_cq = (*id).send_cq;
        object.endpoint.lock().owns_cqs = true;
    }
    if attr.recv_cq.is_null() && attr.qp_type != QPT_XRC_SEND {
        add_missing_recv_cq(id, object, attr.cap.max_recv_wr.max(srq_depth(id)))?;
        attr.recv_cq = (*id).recv_cq;
    }
    Ok(())
}

unsafe fn add_missing_recv_cq(id: *mut rdma_cm_id, object: &IdObject, depth: u32) -> Res<()> {
    if (*id).recv_cq.is_null() {
        ((*id).recv_cq_channel, (*id).recv_cq) = make_cq(id, depth)?;
    }
    object.endpoint.lock().owns_cqs = true;
    Ok(())
}

unsafe fn srq_depth(id: *mut rdma_cm_id) -> u32 {
    srq::find((*id).srq).map_or(0, |s| s.raw.attributes().0)
}

/// Destroys the completion queues that the library created, unless they are in use.
unsafe fn destroy_cqs(id: *mut rdma_cm_id, object: &IdObject) {
    if !object.endpoint.lock().owns_cqs {
        return;
    }
    for (cq, channel) in [
        (&raw mut (*id).send_cq, &raw mut (*id).send_cq_channel),
        (&raw mut (*id).recv_cq, &raw mut (*id).recv_cq_channel),
    ] {
        if !(*cq).is_null() && cq::ibv_destroy_cq(*cq) == 0 {
            *cq = null_mut();
            if !(*channel).is_null() {
                comp_channel::ibv_destroy_comp_channel(*channel);
                *channel = null_mut();
            }
        }
    }
    object.endpoint.lock().owns_cqs = !(*id).send_cq.is_null() || !(*id).recv_cq.is_null();
}

unsafe fn pd_of(id: *mut rdma_cm_id, pd: *mut ibv_pd) -> Res<*mut ibv_pd> {
    if (*id).verbs.is_null() {
        return Err(EINVAL);
    }
    let pd = if pd.is_null() { (*id).pd } else { pd };
    if pd.is_null() {
        return Err(EINVAL);
    }
    check_same((*id).verbs, (*pd).context)?;
    Ok(pd)
}

/// Returns the device's XRC domain for programs that pass none.
unsafe fn default_xrcd(verbs: *mut ibv_context) -> Res<*mut ibv_xrcd> {
    static DOMAINS: ProcessLock<Vec<(usize, usize)>> =
        ProcessLock::new("verbs::cm::DOMAINS", Vec::new());
    let mut domains = DOMAINS.lock();
    if let Some((_, xrcd)) = domains.iter().find(|d| d.0 == verbs as usize) {
        return Ok(*xrcd as *mut ibv_xrcd);
    }
    let mut attr = ibv_xrcd_init_attr {
        comp_mask: 3,
        fd: -1,
        oflags: libc::O_CREAT,
    };
    let xrcd = non_null(xrcd::open_xrcd(verbs, &raw mut attr))?;
    domains.push((verbs as usize, xrcd as usize));
    Ok(xrcd)
}

const ATTR_PD: u32 = 1;
const ATTR_XRCD: u32 = 2;

unsafe fn create_qp(id: *mut rdma_cm_id, pd: *mut ibv_pd, attr: &mut ibv_qp_init_attr) -> Res<()> {
    let mut ex: ibv_qp_init_attr_ex = std::mem::zeroed();
    ex.qp_context = attr.qp_context;
    ex.send_cq = attr.send_cq;
    ex.recv_cq = attr.recv_cq;
    ex.srq = attr.srq;
    ex.cap = attr.cap;
    ex.qp_type = attr.qp_type;
    ex.sq_sig_all = attr.sq_sig_all;
    ex.comp_mask = ATTR_PD;
    ex.pd = pd;
    create_qp_ex(id, &mut ex)?;
    // The program reads the created queues from its structure.
    (attr.send_cq, attr.recv_cq, attr.srq) = (ex.send_cq, ex.recv_cq, ex.srq);
    attr.cap = ex.cap;
    Ok(())
}

unsafe fn create_qp_ex(id: *mut rdma_cm_id, a: &mut ibv_qp_init_attr_ex) -> Res<()> {
    let object = find(id)?;
    if !(*id).qp.is_null() {
        return Err(EINVAL);
    }
    check_type(object, a.qp_type)?;
    let given = match a.comp_mask & ATTR_PD {
        0 => null_mut(),
        _ => a.pd,
    };
    let pd = pd_of(id, given)?;
    a.comp_mask |= ATTR_PD;
    a.pd = pd;
    if a.srq.is_null() {
        a.srq = (*id).srq;
    }
    if a.qp_type == QPT_XRC_RECV && (a.comp_mask & ATTR_XRCD == 0 || a.xrcd.is_null()) {
        a.xrcd = default_xrcd((*id).verbs)?;
        a.comp_mask |= ATTR_XRCD;
    }
    let new = add_missing_cqs(id, object, a)
        .and_then(|()| non_null(create::create_qp_ex((*id).verbs, a)));
    let q = match new {
        Ok(q) => q,
        Err(e) => {
            destroy_cqs(id, object);
            return Err(e);
        }
    };
    adopt(id, object, q, pd)
}

/// Stores a new queue pair in the identifier. On failure, destroys the queue pair.
unsafe fn adopt(
    id: *mut rdma_cm_id,
    object: &IdObject,
    q: *mut ibv_qp,
    pd: *mut ibv_pd,
) -> Res<()> {
    let ready = match object.raw.is_for_datagrams() {
        true => make_datagrams_ready(object, q),
        false => make_ready(object, q),
    };
    if let Err(e) = ready {
        if object.raw.is_for_datagrams() {
            let _ = object.raw.set_datagram_queue_pair(None);
        }
        destroy::ibv_destroy_qp(q);
        destroy_cqs(id, object);
        return Err(e);
    }
    object.endpoint.lock().qp = q as usize;
    (*id).qp = q;
    (*id).pd = pd;
    Ok(())
}

/// Moves a connected queue pair to INIT, as `rdma_create_qp(3)` does, and stores it in the
/// identifier. The program may post receives from now on, with either face of the device.
unsafe fn make_ready(object: &IdObject, q: *mut ibv_qp) -> Res<()> {
    let own = connected::find(q)?;
    let raw = &own.raw;
    raw.modify(State::Init)?;
    // The rights that `rdma_init_qp_attr` reports.
    own.attributes.lock().qp_access_flags = ACCESS_ALL;
    (*q).state = QPS_INIT;
    own.is_new.store(false, Ordering::Release);
    object.raw.set_queue_pair(Some(raw));
    Ok(())
}

/// Moves a datagram queue pair to RTS, as `rdma_create_qp(3)` does, and stores it in the
/// identifier.
unsafe fn make_datagrams_ready(object: &IdObject, q: *mut ibv_qp) -> Res<()> {
    let mut attr: ibv_qp_attr = std::mem::zeroed();
    attr.qp_state = QPS_INIT;
    let init = v::QP_STATE | datagram::attributes(&mut attr)?;
    for (state, mask) in [
        (QPS_INIT, init),
        (v::QPS_RTR, v::QP_STATE),
        (v::QPS_RTS, v::QP_STATE | v::QP_SQ_PSN),
    ] {
        attr.qp_state = state;
        match modify::ibv_modify_qp(q, &raw mut attr, mask as c_int) {
            0 => {}
            errno => return Err(Errno(errno)),
        }
    }
    let raw = &crate::qp::datagram::find(q)?.raw;
    Ok(object.raw.set_datagram_queue_pair(Some(raw))?)
}

/// Fails with EINVAL unless identifier and queue pair are both for datagrams, or neither is.
fn check_type(object: &IdObject, qp_type: u32) -> Res<()> {
    match object.raw.is_for_datagrams() == (qp_type == QPT_UD) {
        true => Ok(()),
        false => Err(EINVAL),
    }
}

pub(crate) unsafe extern "C" fn rdma_create_qp(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> c_int {
    minus_one(|| {
        create_qp(id, pd, &mut *attr)?;
        Ok(0)
    })
}

pub(crate) unsafe extern "C" fn rdma_create_qp_ex(
    id: *mut rdma_cm_id,
    attr: *mut ibv_qp_init_attr_ex,
) -> c_int {
    minus_one(|| {
        create_qp_ex(id, attr.as_mut().ok_or(EINVAL)?)?;
        Ok(0)
    })
}

pub(crate) unsafe extern "C" fn rdma_destroy_qp(id: *mut rdma_cm_id) {
    value((), || {
        let Ok(object) = find(id) else { return };
        object.endpoint.lock().qp = 0;
        if object.raw.is_for_datagrams() {
            let _ = object.raw.set_datagram_queue_pair(None);
        }
        if !(*id).qp.is_null() {
            // Unlike `ibv_destroy_qp`, this does not fail if the queue pair is in multicast groups,
            // because this function returns no error.
            let _ = destroy::destroy((*id).qp);
            (*id).qp = null_mut();
        }
        destroy_cqs(id, object);
    });
}

pub(crate) unsafe extern "C" fn rdma_create_srq(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    attr: *mut ibv_srq_init_attr,
) -> c_int {
    minus_one(|| {
        let object = find(id)?;
        if !(*id).srq.is_null() {
            return Err(EINVAL);
        }
        let attr = attr.as_mut().ok_or(EINVAL)?;
        let mut ex: ibv_srq_init_attr_ex = std::mem::zeroed();
        ex.srq_context = attr.srq_context;
        ex.attr = attr.attr;
        ex.comp_mask = srq::ATTR_TYPE | srq::ATTR_PD;
        ex.pd = pd;
        if (*id).qp_type == QPT_XRC_RECV {
            ex.srq_type = srq::TYPE_XRC;
        }
        create_srq_ex(id, object, &mut ex)?;
        attr.attr = ex.attr;
        Ok(0)
    })
}

pub(crate) unsafe extern "C" fn rdma_create_srq_ex(
    id: *mut rdma_cm_id,
    attr: *mut ibv_srq_init_attr_ex,
) -> c_int {
    minus_one(|| {
        let object = find(id)?;
        if !(*id).srq.is_null() {
            return Err(EINVAL);
        }
        create_srq_ex(id, object, attr.as_mut().ok_or(EINVAL)?)?;
        Ok(0)
    })
}

/// Creates a shared receive queue. If the program passes no protection domain or, for XRC, no XRC
/// domain or completion queue, uses defaults.
unsafe fn create_srq_ex(
    id: *mut rdma_cm_id,
    object: &IdObject,
    attr: &mut ibv_srq_init_attr_ex,
) -> Res<()> {
    let given = match attr.comp_mask & srq::ATTR_PD {
        0 => null_mut(),
        _ => attr.pd,
    };
    attr.pd = pd_of(id, given)?;
    attr.comp_mask |= srq::ATTR_PD;
    if attr.comp_mask & srq::ATTR_TYPE != 0 && attr.srq_type == srq::TYPE_XRC {
        if attr.comp_mask & srq::ATTR_XRCD == 0 || attr.xrcd.is_null() {
            attr.xrcd = default_xrcd((*id).verbs)?;
        }
        if attr.comp_mask & srq::ATTR_CQ == 0 || attr.cq.is_null() {
            add_missing_recv_cq(id, object, attr.attr.max_wr)?;
            attr.cq = (*id).recv_cq;
        }
        attr.comp_mask |= srq::ATTR_XRCD | srq::ATTR_CQ;
    }
    let s = match non_null(srq::create_srq_ex((*id).verbs, attr)) {
        Ok(s) => s,
        Err(e) => {
            destroy_cqs(id, object);
            return Err(e);
        }
    };
    object.endpoint.lock().srq = s as usize;
    (*id).srq = s;
    (*id).pd = attr.pd;
    Ok(())
}

pub(crate) unsafe extern "C" fn rdma_destroy_srq(id: *mut rdma_cm_id) {
    value((), || {
        let Ok(object) = find(id) else { return };
        // If a queue pair still uses the SRQ, `rdma_destroy_ep` destroys it later.
        if !(*id).srq.is_null() && srq::ibv_destroy_srq((*id).srq) == 0 {
            (*id).srq = null_mut();
            object.endpoint.lock().srq = 0;
        }
        destroy_cqs(id, object);
    });
}

const RAI_PASSIVE: c_int = 1;
/// Timeout for resolving the next hop, as in librdmacm.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(2);

unsafe fn create_ep(
    id: *mut rdma_cm_id,
    res: &rdma_addrinfo,
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> Res<()> {
    let object = find(id)?;
    if res.ai_flags & RAI_PASSIVE != 0 {
        object.raw.bind(sockaddr::read(res.ai_src_addr)?)?;
        identifier::refresh(id);
        if !pd.is_null() {
            (*id).pd = pd;
        }
        if !attr.is_null() {
            (*attr).qp_type = (*id).qp_type;
            object.endpoint.lock().qp_init = Some(QpInit(*attr));
        }
        return Ok(());
    }
    let source = sockaddr::read_optional(res.ai_src_addr)?;
    let peer = sockaddr::read(res.ai_dst_addr)?;
    object
        .raw
        .resolve_addr_within(source, peer, RESOLVE_TIMEOUT)?;
    id::complete(id)?;
    object.raw.resolve_route()?;
    id::complete(id)?;
    if !attr.is_null() {
        // The type follows from the address information, whatever the program put here.
        (*attr).qp_type = (*id).qp_type;
        create_qp(id, pd, &mut *attr)?;
    }
    if res.ai_connect_len > 0 && !res.ai_connect.is_null() {
        let data = std::slice::from_raw_parts(res.ai_connect.cast::<u8>(), res.ai_connect_len);
        object.endpoint.lock().connect_data = data.to_vec();
    }
    Ok(())
}

/// Sets the identifier's queue pair type from the address information: the type of the port space,
/// or an XRC initiator or target.
unsafe fn choose_type(id: *mut rdma_cm_id, wanted: u32) -> Res<()> {
    match wanted {
        QPT_XRC_SEND | QPT_XRC_RECV if (*id).qp_type == QPT_RC => (*id).qp_type = wanted,
        0 => {}
        same if same == (*id).qp_type => {}
        _ => return Err(UNSUPPORTED),
    }
    Ok(())
}

pub(crate) unsafe extern "C" fn rdma_create_ep(
    to: *mut *mut rdma_cm_id,
    res: *mut rdma_addrinfo,
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> c_int {
    minus_one(|| {
        if res.is_null() {
            return Err(EINVAL);
        }
        let res = &*res;
        let id = identifier::create(null_mut(), null_mut(), res.ai_port_space as u32)?;
        if let Err(e) = choose_type(id, res.ai_qp_type as u32) {
            rdma_destroy_ep(id);
            return Err(e);
        }
        if let Err(e) = create_ep(id, res, pd, attr) {
            rdma_destroy_ep(id);
            return Err(e);
        }
        *to = id;
        Ok(0)
    })
}

pub(crate) unsafe extern "C" fn rdma_destroy_ep(id: *mut rdma_cm_id) {
    value((), || {
        let Ok(object) = find(id) else { return };
        let (qp, srq) = {
            let endpoint = object.endpoint.lock();
            (endpoint.qp, endpoint.srq)
        };
        if qp != 0 || !(*id).qp.is_null() {
            rdma_destroy_qp(id);
        }
        if srq != 0 {
            rdma_destroy_srq(id);
        }
        if let Err(Errno(errno)) = id::destroy(id) {
            tracing::debug!(errno, "rdma_destroy_ep could not destroy the identifier");
        }
    });
}

const EVENT_CONNECT_REQUEST: u32 = 4;

pub(crate) unsafe extern "C" fn rdma_get_request(
    listen: *mut rdma_cm_id,
    to: *mut *mut rdma_cm_id,
) -> c_int {
    minus_one(|| {
        let object = find(listen)?;
        if !is_synchronous(object) {
            return Err(EINVAL);
        }
        id::drop_event(listen)?;
        let mut got: *mut rdma_cm_event = null_mut();
        if event::rdma_get_cm_event((*listen).channel, &raw mut got) != 0 {
            return Err(last_error());
        }
        let acknowledge_and_fail = |e: Errno| {
            event::acknowledge(got)?;
            Err(e)
        };
        if (*got).status != 0 {
            return acknowledge_and_fail(Errno((*got).status.abs()));
        }
        if (*got).event != EVENT_CONNECT_REQUEST {
            return acknowledge_and_fail(EINVAL);
        }
        let id = (*got).id;
        let init = object.endpoint.lock().qp_init;
        if let Some(QpInit(mut attr)) = init {
            if !(*listen).srq.is_null() && attr.srq.is_null() {
                attr.srq = (*listen).srq;
            }
            if let Err(e) = create_qp(id, (*listen).pd, &mut attr) {
                event::acknowledge(got)?;
                id::destroy(id)?;
                return Err(e);
            }
        }
        (*id).event = got;
        *to = id;
        Ok(0)
    })
}
