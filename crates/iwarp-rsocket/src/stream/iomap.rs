//! Buffers mapped for direct writing: local buffers, which the peer writes, and the peer's buffers.

use super::Stream;
use crate::errno::{Errno, Result};
use crate::wire::{Mapping, Window};
use iwarp::Access;
use iwarp::runtime::Context;

struct LocalMapping {
    addr: u64,
    len: usize,
    stag: u32,
    offset: u64,
    /// The entry in the peer's table; `None` if the peer may not write the buffer.
    index: Option<u16>,
    unsent: bool,
}

#[derive(Default)]
pub(crate) struct Iomaps {
    local: Vec<LocalMapping>,
    /// Number of entries in the peer's table.
    peer_entries: u16,
    /// The peer's buffers, by their index in the local directory.
    peers: Vec<Mapping>,
}

impl Iomaps {
    pub(super) const fn set_peer_entries(&mut self, peer_entries: u16) {
        self.peer_entries = peer_entries;
    }

    pub(super) fn set_peer_mapping(&mut self, index: u32, mapping: Mapping) {
        let index = index as usize;
        if self.peers.len() <= index {
            self.peers.resize(index + 1, Mapping::default());
        }
        self.peers[index] = mapping;
    }

    pub(super) fn find(&self, offset: u64) -> Option<(Mapping, u64)> {
        self.peers.iter().find_map(|m| Some((*m, m.find(offset)?)))
    }

    pub(super) fn has_unsent(&self) -> bool {
        self.local.iter().any(|o| o.unsent)
    }

    pub(super) fn next_unsent(&mut self) -> Option<(u16, Mapping)> {
        self.local.iter_mut().find_map(|o| {
            let index = o.index.filter(|_| o.unsent)?;
            o.unsent = false;
            let window = Window {
                addr: o.addr,
                key: o.stag,
                len: o.len as u32,
            };
            Some((
                index,
                Mapping {
                    offset: o.offset,
                    window,
                },
            ))
        })
    }

    fn free_index(&self) -> Option<u16> {
        (0..self.peer_entries).find(|i| self.local.iter().all(|o| o.index != Some(*i)))
    }

    pub(super) fn clear(&mut self, ctx: &Context) {
        for local in self.local.drain(..) {
            let _ = ctx.deregister(local.stag);
        }
    }
}

impl Stream {
    /// Registers a buffer, and allows the peer to write it if `writable` is `true`. The default
    /// offset is the buffer's address. Fails with ENOMEM if the peer has no free entry, with EINVAL
    /// if the length is zero or above 4 GiB - 1, and with EFAULT if the memory is not accessible.
    ///
    /// # Safety
    /// The buffer must stay mapped until it is unmapped here or the connection is destroyed, and it
    /// may change at any time.
    pub(crate) unsafe fn map(
        &mut self,
        addr: u64,
        len: usize,
        writable: bool,
        offset: Option<u64>,
    ) -> Result<u64> {
        if len == 0 || u32::try_from(len).is_err() {
            return Err(Errno::INVAL);
        }
        let index = match writable {
            true => Some(self.iomaps.free_index().ok_or(Errno::NOMEM)?),
            false => None,
        };
        let mut access = Access::LOCAL_WRITE;
        access.set(Access::REMOTE_WRITE, writable);
        let (ctx, pd) = (self.pd.context().clone(), self.pd.number());
        // SAFETY: guaranteed by the caller.
        let stag = unsafe { ctx.register(addr, len as u64, addr, pd, access) }?;
        let offset = offset.unwrap_or(addr);
        let unsent = index.is_some();
        self.iomaps.local.push(LocalMapping {
            addr,
            len,
            stag,
            offset,
            index,
            unsent,
        });
        Ok(offset)
    }

    /// Removes a mapping. Fails with EINVAL if the buffer is not mapped.
    pub(crate) fn unmap(&mut self, addr: u64, len: usize) -> Result<()> {
        let index = self
            .iomaps
            .local
            .iter()
            .position(|o| o.addr == addr && o.len == len);
        let local = self.iomaps.local.swap_remove(index.ok_or(Errno::INVAL)?);
        self.pd.context().deregister(local.stag)?;
        Ok(())
    }
}
