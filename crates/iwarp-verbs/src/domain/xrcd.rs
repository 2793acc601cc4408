//! XRC domains: `ibv_open_xrcd(3)`.
//!
//! A domain belongs to an opened device; processes cannot share it. Opening the same file again on
//! that device returns the same domain.

use crate::abi::verbs::*;
use crate::border::guard::{EBUSY, EINVAL, Errno, Res, UNSUPPORTED, code, pointer};
use crate::border::object::{self, Kind, Object, Users};
use crate::device::checked_context;
use iwarp::runtime::XrcDomain;
use std::ffi::c_int;
use std::os::fd::BorrowedFd;

pub(crate) struct Xrcd {
    pub(crate) raw: XrcDomain,
    pub(crate) users: Users,
}

pub(crate) type XrcdObject = Object<ibv_xrcd, Xrcd>;

/// # Safety
/// As [`object::find`].
pub(crate) unsafe fn find<'a>(xrcd: *mut ibv_xrcd) -> Res<&'a XrcdObject> {
    object::find(Kind::Xrcd, xrcd)
}

const XRCD_FD: u32 = 1;
const XRCD_OFLAGS: u32 = 2;

pub(crate) unsafe extern "C" fn open_xrcd(
    c: *mut ibv_context,
    attr: *mut ibv_xrcd_init_attr,
) -> *mut ibv_xrcd {
    pointer(|| {
        let ctx = checked_context(c)?;
        let attr = attr.as_ref().ok_or(EINVAL)?;
        if attr.comp_mask & !(XRCD_FD | XRCD_OFLAGS) != 0 {
            return Err(UNSUPPORTED);
        }
        if attr.comp_mask != XRCD_FD | XRCD_OFLAGS {
            return Err(EINVAL);
        }
        if attr.oflags & !(libc::O_CREAT | libc::O_EXCL) != 0 {
            return Err(EINVAL);
        }
        let file = match attr.fd {
            -1 => None,
            fd if libc::fcntl(fd, libc::F_GETFD) < 0 => return Err(Errno(libc::EBADF)),
            fd => Some(BorrowedFd::borrow_raw(fd)),
        };
        let (create, exclusive) = (
            attr.oflags & libc::O_CREAT != 0,
            attr.oflags & libc::O_EXCL != 0,
        );
        let raw = ctx.raw.open_xrc_domain(file, create, exclusive)?;
        let users = Users::default();
        let xrcd = ibv_xrcd { context: c };
        Ok(object::create(Kind::Xrcd, xrcd, Xrcd { raw, users }))
    })
}

pub(crate) unsafe extern "C" fn close_xrcd(xrcd: *mut ibv_xrcd) -> c_int {
    code(|| {
        if find(xrcd)?.users.any() {
            return Err(EBUSY);
        }
        object::retire(Kind::Xrcd, xrcd)?;
        object::free::<ibv_xrcd, Xrcd>(xrcd);
        Ok(())
    })
}
