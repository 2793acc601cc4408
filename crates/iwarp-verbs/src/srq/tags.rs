//! Operations on a shared receive queue's tag list: `ibv_post_srq_ops(3)`.

use super::queue::SrqObject;
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Res, UNSUPPORTED, code};
use crate::border::object;
use iwarp::runtime::{TagOperation, TagRequest};
use iwarp_rnic::Sge;
use iwarp_rnic::tags::{MAX_TAG_SGE, TaggedBuffer};
use std::ffi::{c_int, c_uint};

const TAG_ADD: c_uint = 0;
const TAG_DEL: c_uint = 1;
const TAG_SYNC: c_uint = 2;

const SIGNALED: c_int = 1;
const TM_SYNC: c_int = 1 << 1;

/// Posts a list of operations, and executes them immediately. Stops at the first failure.
pub(crate) unsafe extern "C" fn post_srq_ops(
    s: *mut ibv_srq,
    wr: *mut ibv_ops_wr,
    bad: *mut *mut ibv_ops_wr,
) -> c_int {
    code(|| {
        let srq: &SrqObject = object::trusted(s);
        let mut current = wr;
        while let Some(request) = current.as_mut() {
            let posted = post(srq, request);
            if posted.is_err() && !bad.is_null() {
                *bad = current;
            }
            posted?;
            current = request.next;
        }
        Ok(())
    })
}

unsafe fn post(srq: &SrqObject, wr: &mut ibv_ops_wr) -> Res<()> {
    if wr.flags & !(SIGNALED | TM_SYNC) != 0 {
        return Err(EINVAL);
    }
    let mut sges = [Sge::default(); MAX_TAG_SGE as usize];
    let operation = match wr.opcode {
        TAG_ADD => TagOperation::Add(TaggedBuffer {
            wr_id: wr.recv_wr_id,
            tag: wr.tag,
            mask: wr.mask,
            sges: convert_sges(wr, &mut sges)?,
        }),
        TAG_DEL => TagOperation::Remove(wr.handle),
        TAG_SYNC => TagOperation::Synchronize,
        _ => return Err(UNSUPPORTED),
    };
    let request = TagRequest {
        wr_id: wr.wr_id,
        operation,
        signaled: wr.flags & SIGNALED != 0,
        handled: (wr.flags & TM_SYNC != 0).then_some(wr.unexpected_cnt),
    };
    if let Some(handle) = srq.raw.post_tag(&request)? {
        wr.handle = handle;
    }
    Ok(())
}

unsafe fn convert_sges<'a>(wr: &ibv_ops_wr, to: &'a mut [Sge]) -> Res<&'a [Sge]> {
    let number = usize::try_from(wr.num_sge).map_err(|_| EINVAL)?;
    let to = to.get_mut(..number).ok_or(EINVAL)?;
    for (i, to) in to.iter_mut().enumerate() {
        let sge = &*wr.sg_list.add(i);
        *to = Sge {
            addr: sge.addr,
            len: sge.length,
            lkey: sge.lkey,
        };
    }
    Ok(to)
}
