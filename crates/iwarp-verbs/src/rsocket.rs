//! Sockets over RDMA (`rsocket(7)`).

use crate::guard::{UNSUPPORTED, minus_one};
use std::ffi::{c_int, c_void};

macro_rules! not_yet {
    ($($name:ident)*) => { $(
        pub(crate) unsafe extern "C" fn $name() -> isize {
            minus_one(|| Err(UNSUPPORTED)) as isize
        }
    )* }
}

not_yet! { raccept rbind rclose rconnect rfcntl rgetpeername rgetsockname rgetsockopt riomap riounmap riowrite rlisten
rread rreadv rrecv rrecvfrom rrecvmsg rselect rsend rsendmsg rsendto rsetsockopt rshutdown rsocket rwrite rwritev }

/// Programs call it for ordinary descriptors as well.
pub(crate) unsafe extern "C" fn rpoll(fds: *mut c_void, n: libc::nfds_t, timeout: c_int) -> c_int {
    libc::poll(fds.cast(), n, timeout)
}
