//! Objects that an imported context finds by number (`ibv_import_pd(3)`, `ibv_import_mr(3)`,
//! `ibv_import_dm(3)`), and the memory behind device memory, which all contexts that know its
//! number share.

use crate::border::guard::{EINVAL, ENOMEM, Res};
use parking_lot::Mutex;
use std::alloc::Layout;
use std::collections::HashMap;
use std::sync::Arc;

/// Objects that an imported context finds by number.
#[derive(Debug, Default)]
pub(crate) struct Handles {
    pub(crate) pds: Mutex<HashMap<u32, u32>>,
    pub(crate) mrs: Mutex<HashMap<u32, Region>>,
    pub(crate) dms: Mutex<HashMap<u32, Arc<DeviceMemory>>>,
}

/// What an imported region has to know.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Region {
    pub(crate) stag: u32,
    /// Where it lies in this process.
    pub(crate) addr: u64,
    pub(crate) length: usize,
}

/// Ordinary memory that stands for device memory.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    start: usize,
    layout: Layout,
}

impl DeviceMemory {
    /// Allocates `len` zeros, of which there must be one at least.
    pub(crate) fn new(len: usize, align: usize) -> Res<Self> {
        let layout = Layout::from_size_align(len, align.max(64)).map_err(|_| EINVAL)?;
        // SAFETY: the layout has a size above zero, as the caller has checked.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        if start.is_null() {
            return Err(ENOMEM);
        }
        Ok(Self {
            start: start as usize,
            layout,
        })
    }

    /// Returns its address and its size in octets.
    pub(crate) const fn range(&self) -> (usize, usize) {
        (self.start, self.layout.size())
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and freed once.
        unsafe { std::alloc::dealloc(self.start as *mut u8, self.layout) };
    }
}
