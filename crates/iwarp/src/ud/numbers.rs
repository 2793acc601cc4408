//! Binds the sockets of a datagram queue pair, and chooses its number, which contains their port.

use super::local::{self, Local};
use crate::device::Device;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::objects::context::{ContextInner, random_u32};

/// Number of ports to try before creation fails.
const PORTS_TRIED: u32 = 16;

/// Creates sockets at the addresses of a device with a port that the system chooses, and reserves a
/// number that contains the port.
pub(super) fn bind(
    ctx: &ContextInner,
    device: &Device,
    engine: &Engine,
) -> Result<(Vec<Local>, u32)> {
    for _ in 0..PORTS_TRIED {
        let Some((sockets, port)) = local::bind_all(device, engine)? else {
            continue;
        };
        if let Some(num) = ctx.take_ud_number(port, random_u32()?) {
            return Ok((sockets, num));
        }
    }
    Err(Error::OutOfMemory)
}
