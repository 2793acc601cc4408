//! Connections whose queue pair is destroyed: they are closed in the background, so that what was sent last arrives.
//!
//! Closing a socket with unread data resets the connection, and a reset overtakes data on their way. So the rest of the
//! stream is read and thrown away until the peer closes too, for a bounded time.

use super::qp::{Link, QpInner};
use crate::engine::{Engine, Source};
use crate::sys::exit;
use crate::sys::poller::Interest;
use iwarp_rnic::qp::QueuePair as Machine;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Once};
use std::time::Duration;

/// How old a connection has to be for its end, unless the responder has spoken.
///
/// siw as responder that waits for the RTR message takes the kernel down with it (`BUG` in `iwcm.c`) if the end of the stream
/// comes before it has looked at that message, which it may overlook for a while. An emulated one has needed 30 ms.
const MATURITY: Duration = Duration::from_millis(50);

/// How long to wait until the end of this stream may be sent; `None` if it may be sent now.
pub(super) fn too_early(machine: &Machine, link: &Link) -> Option<Duration> {
    if !machine.awaits_answer() || link.engine.is_foreign() {
        return None;
    }
    MATURITY
        .checked_sub(link.start.elapsed())
        .filter(|wait| !wait.is_zero())
}

struct Linger {
    link: Arc<Link>,
    token: u64,
    engine: Arc<Engine>,
    /// Its end is put off.
    waits: AtomicBool,
}

impl Linger {
    fn waits_no_more(&self) {
        if self.waits.swap(false, Ordering::Relaxed) {
            PUT_OFF.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Linger {
    fn drop(&mut self) {
        self.waits_no_more();
    }
}

const TIMER_END: u32 = 0;
const TIMER_SHUTDOWN: u32 = 1;

/// Streams whose end is put off. A process does not end before they have ended.
static PUT_OFF: AtomicU32 = AtomicU32::new(0);

/// Gives a stream up. `cut` tells that an FPDU was sent in part: then the peer has to see a reset. Its end is sent after `wait`.
pub(super) fn leave(qp: &Arc<QpInner>, link: &Arc<Link>, cut: bool, wait: Option<Duration>) {
    link.engine.remove(&link.stream, link.token);
    if link.engine.is_foreign() {
        // In a child of the process whose connection this is: closing the descriptor is all that concerns nobody else.
        return;
    }
    if cut {
        link.stream.abort();
        return;
    }
    if wait.is_none() {
        let _ = link.stream.shutdown_write();
        if drained(link) {
            return;
        }
    }
    let engine = Arc::clone(&link.engine);
    let token = engine.token();
    let linger = Arc::new(Linger {
        link: Arc::clone(link),
        token,
        engine: Arc::clone(&engine),
        waits: AtomicBool::new(wait.is_some()),
    });
    if wait.is_some() {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| exit::at_exit(end_of_process));
        PUT_OFF.fetch_add(1, Ordering::Relaxed);
    }
    if engine
        .add(&link.stream, token, Interest::READ, linger)
        .is_ok()
    {
        if let Some(wait) = wait {
            engine.after(wait, token, TIMER_SHUTDOWN);
        }
        let limit = qp.ctx.config.linger.min(Duration::from_secs(2));
        engine.after(limit + wait.unwrap_or_default(), token, TIMER_END);
    }
}

/// The engine's thread still runs while the exit handlers do.
fn end_of_process() {
    let step = Duration::from_millis(2);
    for _ in 0..(MATURITY.as_millis() / step.as_millis()) {
        if PUT_OFF.load(Ordering::Relaxed) == 0 {
            break;
        }
        std::thread::sleep(step);
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

    fn timer(self: Arc<Self>, kind: u32) {
        if kind == TIMER_SHUTDOWN {
            let _ = self.link.stream.shutdown_write();
            self.waits_no_more();
        } else {
            self.engine.remove(&self.link.stream, self.token);
        }
    }
}
