//! `iwarp netlink`: answers netlink requests about RDMA devices, for iproute2's `rdma`.
//!
//! The kernel's interface is `RDMA_NL_NLDEV` (`rdma/rdma_netlink.h`). `libiwarp_paths.so` starts
//! this command instead of opening a netlink socket. Standard input is a Unix socket that carries
//! one netlink datagram per message; the process ends when the program closes its end. Requests
//! come from a program of the same user, but are validated like any input.
//!
//! [`message`] implements the format, and [`answer`] the contents.

mod answer;
mod message;

use clap::Args;
use iwarp_cli_common::error::{Context as _, Result};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::os::fd::AsFd as _;

/// Longest request in bytes. Real requests are shorter than 100 bytes.
const REQUEST_MAX: usize = 8192;

/// Arguments of `iwarp netlink`.
#[derive(Debug, Args)]
pub(crate) struct NetlinkArgs {}

/// Serves standard input until the peer closes it.
pub(crate) fn run(_: &NetlinkArgs) -> Result<()> {
    let stdin = std::io::stdin();
    let socket = stdin.as_fd();
    let mut buffer = vec![0; REQUEST_MAX];
    loop {
        let (_, got) = recv(socket, &mut buffer[..], RecvFlags::TRUNC).context("standard input")?;
        if got == 0 {
            return Ok(());
        }
        let request = buffer.get(..got).unwrap_or(&buffer);
        for datagram in answer::datagrams(request) {
            match send(socket, &datagram, SendFlags::NOSIGNAL) {
                Ok(_) => {}
                // The program ended without reading the answer.
                Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => return Ok(()),
                Err(error) => return Err(error).context("standard input"),
            }
        }
    }
}
