//! Connections whose queue pair is destroyed: they are closed in the background, so that what was sent last arrives.
//!
//! Closing a socket with unread data resets the connection, and a reset overtakes data on their way. So the rest of the
//! stream is read and thrown away until the peer closes too, for a bounded time.

use super::qp::{Link, QpInner};
use crate::engine::{Engine, Source};
use crate::sys::poller::Interest;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

struct Linger {
    link: Arc<Link>,
    token: u64,
    engine: Arc<Engine>,
}

/// Gives a stream up. `cut` tells that an FPDU was sent in part: then the peer has to see a reset.
pub(super) fn leave(qp: &Arc<QpInner>, link: &Arc<Link>, cut: bool) {
    link.engine.remove(&link.stream, link.token);
    if link.engine.is_foreign() {
        // In a child of the process whose connection this is: closing the descriptor is all that concerns nobody else.
        return;
    }
    if cut {
        link.stream.abort();
        return;
    }
    let _ = link.stream.shutdown_write();
    if drained(link) {
        return;
    }
    let engine = Arc::clone(&link.engine);
    let token = engine.token();
    let linger = Arc::new(Linger {
        link: Arc::clone(link),
        token,
        engine: Arc::clone(&engine),
    });
    if engine
        .add(&link.stream, token, Interest::READ, linger)
        .is_ok()
    {
        engine.after(qp.ctx.config.linger.min(Duration::from_secs(2)), token, 0);
    }
}

/// Reads and throws away. True at the end of the stream.
fn drained(link: &Link) -> bool {
    let mut sink = [0u8; 16 * 1024];
    for _ in 0..64 {
        match link.stream.recv(&mut sink) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(e) => return e.kind() != ErrorKind::WouldBlock,
        }
    }
    false
}

impl Source for Linger {
    fn ready(self: Arc<Self>, _: bool, _: bool, _: bool) -> bool {
        if drained(&self.link) {
            self.engine.remove(&self.link.stream, self.token);
        }
        true
    }

    fn timer(self: Arc<Self>, _: u32) {
        self.engine.remove(&self.link.stream, self.token);
    }
}
