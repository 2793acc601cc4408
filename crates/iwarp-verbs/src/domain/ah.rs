//! Address handles: `ibv_create_ah(3)`, `ibv_create_ah_from_wc(3)`.

use super::pd;
use crate::abi::kern;
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Errno, Res, code, minus_one, pointer};
use crate::border::object::{self, Kind};
use crate::device::{checked_context, context, gid};
use iwarp::runtime::UdAddress;
use std::ffi::c_int;

pub(crate) struct Ah {
    pub(crate) pd: u32,
    pub(crate) address: UdAddress,
}

unsafe fn create_ah(p: *mut ibv_pd, attr: &ibv_ah_attr) -> Res<*mut ibv_ah> {
    let pd = pd::find(p)?;
    let c = context((*p).context);
    // RoCE NICs require a GID, and every device requires a GID or a LID.
    if attr.port_num != 1 || attr.is_global == 0 && attr.dlid == 0 {
        return Err(EINVAL);
    }
    let (source, gid) = gid::gids_of_path(c, attr)?;
    let (class, hops) = match attr.is_global {
        0 => (0, 0),
        _ => (attr.grh.traffic_class, attr.grh.hop_limit),
    };
    let address = UdAddress::new(source, gid, class, hops)?;
    pd.users.add();
    let ah = ibv_ah {
        context: (*p).context,
        pd: p,
        handle: 0,
    };
    Ok(object::create(
        Kind::Ah,
        ah,
        Ah {
            pd: pd.number,
            address,
        },
    ))
}

pub(crate) unsafe extern "C" fn ibv_create_ah(
    p: *mut ibv_pd,
    attr: *mut ibv_ah_attr,
) -> *mut ibv_ah {
    pointer(|| create_ah(p, &*attr))
}

pub(crate) unsafe extern "C" fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    code(|| {
        object::find::<ibv_ah, Ah>(Kind::Ah, ah)?;
        object::retire(Kind::Ah, ah)?;
        pd::find((*ah).pd)?.users.remove();
        object::free::<ibv_ah, Ah>(ah);
        Ok(())
    })
}

/// Returns the address of a datagram's sender, for replies from the address that received it.
unsafe fn from_wc(
    c: *mut ibv_context,
    port_num: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
) -> Res<ibv_ah_attr> {
    // Bit 0: the receive begins with a global routing header.
    if port_num != 1 || wc.is_null() || grh.is_null() || (*wc).wc_flags & 1 == 0 {
        return Err(EINVAL);
    }
    let mut attr: ibv_ah_attr = std::mem::zeroed();
    attr.is_global = 1;
    attr.port_num = port_num;
    attr.sl = (*wc).sl;
    attr.grh.hop_limit = 64;
    let octets = grh.cast::<[u8; 40]>().read_unaligned();
    if octets[0] >> 4 == 6 {
        let word = u32::from_be((*grh).version_tclass_flow);
        attr.grh.dgid = (*grh).sgid;
        attr.grh.sgid_index = gid::index_for(context(c), kern::gid_octets((*grh).dgid))?;
        attr.grh.flow_label = word & 0xf_ffff;
        attr.grh.traffic_class = (word >> 20) as u8;
        return Ok(attr);
    }
    // RoCE v2 over IPv4: the IP header is in the last 20 bytes.
    if octets[20] != 0x45 {
        return Err(Errno(libc::EPROTONOSUPPORT));
    }
    let mapped = |from: usize| {
        let mut gid = [0; 16];
        gid[10..12].fill(0xff);
        gid[12..].copy_from_slice(&octets[from..from + 4]);
        gid
    };
    attr.grh.dgid = std::mem::transmute::<[u8; 16], [u64; 2]>(mapped(32));
    attr.grh.sgid_index = gid::index_for(context(c), mapped(36))?;
    attr.grh.traffic_class = octets[21];
    Ok(attr)
}

pub(crate) unsafe extern "C" fn ibv_init_ah_from_wc(
    c: *mut ibv_context,
    port_num: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    to: *mut ibv_ah_attr,
) -> c_int {
    minus_one(|| {
        checked_context(c)?;
        *to = from_wc(c, port_num, wc, grh)?;
        Ok(0)
    })
}

pub(crate) unsafe extern "C" fn ibv_create_ah_from_wc(
    p: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    port_num: u8,
) -> *mut ibv_ah {
    pointer(|| {
        pd::find(p)?;
        let attr = from_wc((*p).context, port_num, wc, grh)?;
        create_ah(p, &attr)
    })
}
