//! Sockets over RDMA (`rsocket(7)`): the C functions of `iwarp-rsocket`, for `exports`.

pub(crate) use iwarp_rsocket::c_api::{
    raccept, rbind, rclose, rconnect, repoll_create, repoll_ctl, repoll_wait, rfcntl, rgetpeername,
    rgetsockname, rgetsockopt, riomap, riounmap, riowrite, rlisten, rpoll, rread, rreadv, rrecv,
    rrecvfrom, rrecvmsg, rselect, rsend, rsendmsg, rsendto, rsetsockopt, rshutdown, rwrite,
    rwritev,
};

use crate::process::unused;
use std::ffi::c_int;

pub(crate) unsafe extern "C" fn rsocket(domain: c_int, ty: c_int, protocol: c_int) -> c_int {
    unused::record_use();
    iwarp_rsocket::c_api::rsocket(domain, ty, protocol)
}
