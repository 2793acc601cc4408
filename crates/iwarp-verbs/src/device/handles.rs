//! Objects that an imported context finds by number (`ibv_import_pd(3)`, `ibv_import_mr(3)`,
//! `ibv_import_dm(3)`), and device memory, which these contexts share.

use crate::border::guard::{EINVAL, ENOMEM, Res};
use parking_lot::Mutex;
use std::alloc::Layout;
use std::collections::HashMap;
use std::sync::Arc;

#[derive(Debug, Default)]
pub(crate) struct Handles {
    pub(crate) pds: Mutex<HashMap<u32, u32>>,
    pub(crate) mrs: Mutex<HashMap<u32, Region>>,
    pub(crate) dms: Mutex<HashMap<u32, Arc<DeviceMemory>>>,
}

/// A region as seen by an imported context.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Region {
    pub(crate) stag: u32,
    pub(crate) addr: u64,
    pub(crate) length: usize,
}

/// Ordinary memory that emulates device memory.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    start: usize,
    layout: Layout,
}

impl DeviceMemory {
    /// Allocates `len` zero bytes; `len` is not zero.
    pub(crate) fn new(len: usize, align: usize) -> Res<Self> {
        let layout = Layout::from_size_align(len, align.max(64)).map_err(|_| EINVAL)?;
        // SAFETY: the layout's size is not zero, as the caller checked.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        if start.is_null() {
            return Err(ENOMEM);
        }
        Ok(Self {
            start: start as usize,
            layout,
        })
    }

    pub(crate) const fn range(&self) -> (usize, usize) {
        (self.start, self.layout.size())
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout and freed once.
        unsafe { std::alloc::dealloc(self.start as *mut u8, self.layout) };
    }
}
