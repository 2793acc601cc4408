//! The loopback device, its GID, and attributes of queue pairs on it, for tests of
//! `iwarp::runtime`.

use iwarp::Device;
use iwarp::runtime::{CompletionQueue, QpAttributes};
use std::net::{IpAddr, Ipv4Addr};

const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

pub fn device() -> Device {
    Device::by_address(ADDRESS).unwrap()
}

/// Returns the GID of the IPv4 address.
pub fn gid() -> [u8; 16] {
    device().address(ADDRESS).unwrap().gid()
}

/// Returns attributes of a small queue pair with one completion queue and `depth` outstanding RDMA
/// Reads and atomics per direction.
pub fn attributes(pd: u32, cq: &CompletionQueue, depth: u16) -> QpAttributes {
    QpAttributes {
        pd,
        send_cq: cq.clone(),
        recv_cq: cq.clone(),
        srq: None,
        unreliable: false,
        max_send_wr: 16,
        max_recv_wr: 16,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline: 64,
        signal_all: false,
        max_ird: depth,
        max_ord: depth,
    }
}
