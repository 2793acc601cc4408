//! Batches of the `ibv_wr_*` interface (`ibv_wr_post(3)`): a queue pair's requests between
//! `ibv_wr_start` and `ibv_wr_complete`. `post` builds and posts them.

use crate::border::guard::{Errno, Res, UNSUPPORTED};
use iwarp::runtime::UdAddress;
use iwarp_rnic::{SendFlags, SendOp, Sge};
use parking_lot::RawMutex;
use parking_lot::lock_api::RawMutex as _;
use std::cell::UnsafeCell;
use std::ops::Range;

#[derive(Clone, Copy)]
pub(crate) struct Destination {
    pub(crate) to: UdAddress,
    pub(crate) qpn: u32,
    pub(crate) qkey: u32,
}

/// Supported bits of `enum ibv_qp_create_send_ops_flags`: all but segmentation offload (bit 10).
const OPS: u64 = 0x3ff | 1 << 11 | 1 << 12;

pub(crate) struct BuiltRequest {
    pub(crate) wr_id: u64,
    pub(crate) op: SendOp,
    pub(crate) flags: SendFlags,
    pub(crate) sges: Range<usize>,
    pub(crate) inline: Range<usize>,
    pub(crate) is_inline: bool,
    pub(crate) target: Option<Destination>,
    /// XRC only: the number of the peer's shared receive queue.
    pub(crate) srq: u32,
}

#[derive(Default)]
pub(crate) struct Batch {
    pub(crate) wrs: Vec<BuiltRequest>,
    pub(crate) sges: Vec<Sge>,
    pub(crate) inline: Vec<u8>,
    pub(crate) error: Option<Errno>,
}

pub(crate) struct Builder {
    pub(crate) lock: RawMutex,
    /// Only accessed by the holder of `lock`: the thread that called `ibv_wr_start`.
    pub(crate) batch: UnsafeCell<Batch>,
}

impl Builder {
    pub(crate) fn new(ops: u64) -> Res<Self> {
        if ops & !OPS != 0 {
            return Err(UNSUPPORTED);
        }
        Ok(Self {
            lock: RawMutex::INIT,
            batch: UnsafeCell::default(),
        })
    }
}
