//! Posting to datagram queue pairs.

use super::list::{Poster, Room};
use super::send::{WR_SEND, WR_SEND_WITH_IMM};
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Res};
use crate::border::object::{self, Object};
use crate::device::check_same;
use crate::domain::ah::Ah;
use crate::qp::batch::Destination;
use crate::qp::datagram::{UdObject, trusted};
use iwarp::runtime::{PostFailed, UdSendWr};

/// Returns a request's destination. Fails with EINVAL if the address handle is NULL, or if it
/// belongs to another protection domain.
pub(super) unsafe fn destination(
    qp: &UdObject,
    ah: *mut ibv_ah,
    qpn: u32,
    qkey: u32,
) -> Res<Destination> {
    if ah.is_null() {
        return Err(EINVAL);
    }
    let c = (*ah).context;
    let ah: &Object<ibv_ah, Ah> = object::trusted(ah);
    if ah.pd != qp.raw.pd() {
        return Err(EINVAL);
    }
    check_same(c, (*qp.c()).qp_base.context)?;
    let to = ah.address;
    Ok(Destination { to, qpn, qkey })
}

impl Poster for UdObject {
    type From = ibv_send_wr;
    type Into<'a> = UdSendWr<'a>;

    unsafe fn convert<'a>(
        &self,
        wr: &ibv_send_wr,
        room: &mut Room<'a>,
    ) -> Res<Option<UdSendWr<'a>>> {
        let immediate = match wr.opcode {
            WR_SEND => None,
            WR_SEND_WITH_IMM => Some(u32::from_be(wr.imm_data)),
            _ => return Err(EINVAL),
        };
        let ud = wr.wr.ud;
        let target = destination(self, ud.ah, ud.remote_qpn, ud.remote_qkey)?;
        let data = room.data(wr, self.max_sge.send)?;
        Ok(data.map(|data| UdSendWr {
            wr_id: wr.wr_id,
            immediate,
            flags: data.flags,
            to: target.to,
            remote_qp: target.qpn,
            remote_qkey: target.qkey,
            sges: data.sges,
            inline: data.inline,
        }))
    }

    fn post(&self, wrs: &[UdSendWr<'_>]) -> Result<(), PostFailed> {
        self.raw.post_send(wrs)
    }
}

/// Posts a whole `ibv_wr_*` batch, or nothing and returns an error.
pub(super) unsafe fn post_all(q: *mut ibv_qp, wrs: &[UdSendWr<'_>]) -> Res<()> {
    let posted = trusted(q).raw.post_send_all(wrs);
    Ok(posted?)
}
