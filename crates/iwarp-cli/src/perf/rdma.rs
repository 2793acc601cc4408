//! iWARP as a wire under test.

use super::point::{Link, Pending, Session, Transport};
use crate::error::{Error, Result};
use std::net::{IpAddr, SocketAddr};

/// iWARP.
#[derive(Debug)]
pub(crate) struct Rdma;

impl Transport for Rdma {
    fn listen(&self, _link: &Link, _ip: IpAddr) -> Result<Box<dyn Pending>> {
        Err(Error::failed(
            "this build has no RDMA runtime yet; --op tcp measures the baseline",
        ))
    }

    fn connect(&self, _link: &Link, _to: SocketAddr) -> Result<Box<dyn Session>> {
        Err(Error::failed(
            "this build has no RDMA runtime yet; --op tcp measures the baseline",
        ))
    }
}
