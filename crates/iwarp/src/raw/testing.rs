//! What unit tests of these objects begin with.

use super::{CompletionQueue, Context, QpAttributes, QueuePair};
use crate::config::Config;
use crate::device::Device;

/// On the loopback interface.
pub(crate) fn context() -> Context {
    let device = Device::by_address([127, 0, 0, 1].into()).unwrap();
    Context::open(&device, Config::default()).unwrap()
}

/// With room for one request in either direction, in a protection domain of its own.
pub(super) fn queue_pair(
    ctx: &Context,
    send: &CompletionQueue,
    recv: &CompletionQueue,
) -> QueuePair {
    let attributes = QpAttributes {
        pd: ctx.allocate_pd(),
        send_cq: send.clone(),
        recv_cq: recv.clone(),
        srq: None,
        max_send_wr: 1,
        max_recv_wr: 1,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline: 0,
        signal_all: false,
        max_ird: 0,
        max_ord: 0,
    };
    ctx.create_qp(&attributes).unwrap()
}
