//! Sockets over RDMA (`rsocket(7)`): exports the functions of `iwarp-rsocket` under their versions.

pub(crate) use iwarp_rsocket::c_api::{
    raccept, rbind, rclose, rconnect, repoll_create, repoll_ctl, repoll_wait, rfcntl, rgetpeername,
    rgetsockname, rgetsockopt, riomap, riounmap, riowrite, rlisten, rpoll, rread, rreadv, rrecv,
    rrecvfrom, rrecvmsg, rselect, rsend, rsendmsg, rsendto, rsetsockopt, rshutdown, rsocket,
    rwrite, rwritev,
};
