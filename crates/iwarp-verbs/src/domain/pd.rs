//! Protection domains, thread domains, parent domains, address handles.

use crate::abi::verbs::*;
use crate::device::{check_same, checked_context, context};
use crate::guard::{EBUSY, EINVAL, Errno, Res, UNSUPPORTED, code, minus_one, pointer};
use crate::object::{self, Kind, Object, Users};
use crate::{qp, query};
use iwarp::runtime::UdAddress;
use std::ffi::c_int;

#[derive(Debug)]
pub(crate) struct Pd {
    /// Number in the runtime. A parent domain has the number of its protection domain.
    pub(crate) number: u32,
    pub(crate) users: Users,
    /// The protection domain and thread domain of a parent domain.
    parent: Option<(usize, usize)>,
    /// It was imported: the number belongs to another domain.
    imported: bool,
}

pub(crate) type PdObject = Object<ibv_pd, Pd>;

/// # Safety
/// As [`object::find`].
pub(crate) unsafe fn find<'a>(pd: *mut ibv_pd) -> Res<&'a PdObject> {
    object::find(Kind::Pd, pd)
}

fn create(
    c: *mut ibv_context,
    number: u32,
    parent: Option<(usize, usize)>,
    imported: bool,
) -> *mut ibv_pd {
    let own = Pd {
        number,
        users: Users::default(),
        parent,
        imported,
    };
    let pd = ibv_pd {
        context: c,
        handle: number,
    };
    object::create(Kind::Pd, pd, own)
}

pub(crate) unsafe extern "C" fn ibv_alloc_pd(c: *mut ibv_context) -> *mut ibv_pd {
    pointer(|| {
        let ctx = checked_context(c)?;
        let number = ctx.raw.try_allocate_pd()?;
        ctx.handles.pds.lock().insert(number, number);
        Ok(create(c, number, None, false))
    })
}

pub(crate) unsafe extern "C" fn ibv_dealloc_pd(p: *mut ibv_pd) -> c_int {
    code(|| {
        let pd = find(p)?;
        if pd.users.any() {
            return Err(EBUSY);
        }
        object::retire(Kind::Pd, p)?;
        match pd.parent {
            Some((parent, td)) => {
                find(parent as *mut ibv_pd)?.users.remove();
                if let Ok(td) = find_td(td as *mut ibv_td) {
                    td.remove();
                }
            }
            None if !pd.imported => {
                context((*p).context).handles.pds.lock().remove(&pd.number);
            }
            None => {}
        }
        object::free::<ibv_pd, Pd>(p);
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn ibv_import_pd(c: *mut ibv_context, handle: u32) -> *mut ibv_pd {
    pointer(|| {
        let ctx = checked_context(c)?;
        if !ctx.handles.pds.lock().contains_key(&handle) {
            return Err(EINVAL);
        }
        Ok(create(c, handle, None, true))
    })
}

pub(crate) unsafe extern "C" fn ibv_unimport_pd(p: *mut ibv_pd) {
    crate::guard::value((), || {
        if object::retire(Kind::Pd, p).is_ok() {
            object::free::<ibv_pd, Pd>(p);
        }
    });
}

unsafe fn find_td<'a>(td: *mut ibv_td) -> Res<&'a Object<ibv_td, Users>> {
    object::find(Kind::Td, td)
}

pub(crate) unsafe extern "C" fn alloc_td(
    c: *mut ibv_context,
    attr: *mut ibv_td_init_attr,
) -> *mut ibv_td {
    pointer(|| {
        checked_context(c)?;
        if !attr.is_null() && (*attr).comp_mask != 0 {
            return Err(UNSUPPORTED);
        }
        Ok(object::create(
            Kind::Td,
            ibv_td { context: c },
            Users::default(),
        ))
    })
}

pub(crate) unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    code(|| {
        if find_td(td)?.any() {
            return Err(EBUSY);
        }
        object::retire(Kind::Td, td)?;
        object::free::<ibv_td, Users>(td);
        Ok(())
    })
}

/// `enum ibv_parent_domain_init_attr_mask`: custom allocators, their context, and that buffers may lie in memory which a confidential guest
/// shares with its host (since rdma-core 65).
const PARENT_ATTRIBUTES: u32 = 7;

/// Custom allocators are for buffers that hardware shares; there are none here. All memory is as good as shared.
pub(crate) unsafe extern "C" fn alloc_parent_domain(
    c: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    pointer(|| {
        checked_context(c)?;
        let attr = &*attr;
        if attr.comp_mask & !PARENT_ATTRIBUTES != 0 {
            return Err(UNSUPPORTED);
        }
        let parent = find(attr.pd)?;
        check_same(c, (*attr.pd).context)?;
        if !attr.td.is_null() {
            let td = find_td(attr.td)?;
            check_same(c, (*attr.td).context)?;
            td.add();
        }
        parent.users.add();
        Ok(create(
            c,
            parent.number,
            Some((attr.pd as usize, attr.td as usize)),
            false,
        ))
    })
}

/// An address handle.
pub(crate) struct Ah {
    /// Number of its protection domain.
    pub(crate) pd: u32,
    pub(crate) address: UdAddress,
}

unsafe fn create_ah(p: *mut ibv_pd, attr: &ibv_ah_attr) -> Res<*mut ibv_ah> {
    let pd = find(p)?;
    let c = context((*p).context);
    // RoCE NICs refuse a handle without a GID, and so does every device if there is no LID either.
    if attr.port_num != 1 || attr.is_global == 0 && attr.dlid == 0 {
        return Err(EINVAL);
    }
    let (source, gid) = qp::gids_of_path(c, attr)?;
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
        find((*ah).pd)?.users.remove();
        object::free::<ibv_ah, Ah>(ah);
        Ok(())
    })
}

/// Makes the peer's address from a datagram's completion. The answer comes from the address that the datagram was sent to.
unsafe fn from_wc(
    c: *mut ibv_context,
    port_num: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
) -> Res<ibv_ah_attr> {
    // Bit 0: the completion has a global routing header.
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
        attr.grh.sgid_index = query::index_for(context(c), crate::kern::octets((*grh).dgid))?;
        attr.grh.flow_label = word & 0xf_ffff;
        attr.grh.traffic_class = (word >> 20) as u8;
        return Ok(attr);
    }
    // RoCE v2 over IPv4: the IP header is in the last 20 octets.
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
    attr.grh.sgid_index = query::index_for(context(c), mapped(36))?;
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
        find(p)?;
        let attr = from_wc((*p).context, port_num, wc, grh)?;
        create_ah(p, &attr)
    })
}
