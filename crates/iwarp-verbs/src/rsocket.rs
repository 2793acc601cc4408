//! Sockets over RDMA (`rsocket(7)`): exports the functions of `iwarp-rsocket` under their versions.

pub(crate) use iwarp_rsocket::c_api::{
    raccept, rbind, rclose, rconnect, repoll_create, repoll_ctl, repoll_wait, rfcntl, rgetpeername,
    rgetsockname, rgetsockopt, riomap, riounmap, riowrite, rlisten, rpoll, rread, rreadv, rrecv,
    rrecvfrom, rrecvmsg, rselect, rsend, rsendmsg, rsendto, rsetsockopt, rshutdown, rwrite,
    rwritev,
};

use crate::process::unused;
use std::ffi::c_int;

pub(crate) unsafe extern "C" fn rsocket(domain: c_int, ty: c_int, protocol: c_int) -> c_int {
    unused::used();
    iwarp_rsocket::c_api::rsocket(domain, ty, protocol)
}
