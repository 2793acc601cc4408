//! Registered regions of the simulated hosts, and scatter/gather lists into them.

use iwarp_rnic::memory::{Stag, WindowType};
use iwarp_rnic::{Access, Sge};

use crate::plant::Plant;
use crate::rng::Rng;
use crate::world::{ARENA, Node, World, pattern};

/// A registered range of an arena.
#[derive(Debug, Clone, Copy)]
pub struct Region {
    /// Offset in the arena.
    pub off: usize,
    /// Length in octets.
    pub len: usize,
    /// Tagged offset of the first octet.
    pub base: u64,
    /// STag of the region.
    pub stag: u32,
}

impl Region {
    /// Returns the tagged offset of the octet at offset `off` of the arena.
    pub const fn tagged(&self, off: usize) -> u64 {
        self.base.wrapping_add((off - self.off) as u64)
    }
}

/// All local and remote rights.
pub const ALL_RIGHTS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::MW_BIND);

impl Node {
    /// Reserves `len` octets of the arena, with unused octets before and after them. Returns their
    /// offset.
    pub fn allocate(&mut self, n: usize, len: usize, aligned: bool, rng: &mut Rng) -> usize {
        let guard = rng.range(64, 200) as usize;
        let mut off = self.used + guard;
        if aligned {
            off = off.next_multiple_of(8);
        }
        self.used = off + len + 64;
        assert!(
            self.used <= ARENA,
            "the programs need more memory than the arena has"
        );
        for i in self.model.len()..self.used {
            self.model.push(pattern(n, i));
        }
        off
    }
}

impl World {
    /// Reserves and registers a range.
    pub fn region(&mut self, n: usize, pd: u32, len: usize, access: Access) -> Region {
        let off = self.nodes[n].allocate(n, len, true, &mut self.rng);
        self.register(n, pd, off, len, access)
    }

    /// Reserves and registers a range, and unmaps its memory.
    pub fn unmapped_region(&mut self, n: usize, pd: u32, len: usize, access: Access) -> Region {
        let region = self.region(n, pd, len, access);
        self.nodes[n].arena.unmap(region.off, region.len);
        region
    }

    /// Registers a range that is already reserved.
    pub fn register(
        &mut self,
        n: usize,
        pd: u32,
        off: usize,
        len: usize,
        access: Access,
    ) -> Region {
        let mut access = access;
        if self.rng.chance(20) && !access.contains(Access::MW_BIND) {
            access |= Access::ZERO_BASED;
        }
        let iova = self.iova(len as u64);
        let slack = if self.planted.is(Plant::WideGrant) {
            48
        } else {
            0
        };
        let random = self.rng.next_u32();
        let node = &mut self.nodes[n];
        let host = node.arena.range(off, len + slack);
        let registered = node.table.register(host, iova, pd, access, random);
        let stag = registered.expect("a valid registration");
        let base = if access.contains(Access::ZERO_BASED) {
            0
        } else {
            iova
        };
        Region {
            off,
            len,
            base,
            stag: stag.0,
        }
    }

    /// Returns a random first tagged offset for a range of `len` octets.
    pub fn iova(&mut self, len: u64) -> u64 {
        match self.rng.below(8) {
            // The end of the range is close to the largest offset, which no range can include.
            0 => (u64::MAX - len - 64) & !7,
            1 => 0,
            _ => (self.rng.next_u64() >> 8) & !7,
        }
    }

    /// Reserves a range and allocates an STag for its fast registration.
    pub fn fast_region(&mut self, n: usize, pd: u32, len: usize) -> Region {
        let off = self.nodes[n].allocate(n, len, true, &mut self.rng);
        let random = self.rng.next_u32();
        let node = &mut self.nodes[n];
        let host = node.arena.range(off, len);
        let stag = node.table.allocate_fast(host, pd, random);
        Region {
            off,
            len,
            base: 0,
            stag: stag.expect("room in the table").0,
        }
    }

    /// Allocates an unbound memory window.
    pub fn window(&mut self, n: usize, pd: u32, ty: WindowType) -> Stag {
        let random = self.rng.next_u32();
        let window = self.nodes[n].table.allocate_window(ty, pd, random);
        window.expect("room in the table")
    }

    /// Reserves and registers `len` octets in at most `max_parts` separate parts. Returns the
    /// scatter/gather elements, and the offset and length of each part.
    pub fn scatter(
        &mut self,
        n: usize,
        pd: u32,
        len: usize,
        max_parts: u32,
        aligned: bool,
    ) -> (Vec<Sge>, Vec<(usize, usize)>) {
        let lens = split_len(&mut self.rng, len, max_parts as usize);
        let mut parts = Vec::new();
        for &l in &lens {
            let off = self.nodes[n].allocate(n, l, aligned, &mut self.rng);
            parts.push((off, l));
        }
        let sges = self.register_parts(n, pd, &parts);
        (sges, parts)
    }

    /// Registers parts, together as one region or separately.
    fn register_parts(&mut self, n: usize, pd: u32, parts: &[(usize, usize)]) -> Vec<Sge> {
        let together = self.rng.chance(70);
        let mut region = None;
        let mut sges = Vec::new();
        for &(off, len) in parts {
            let r = match region {
                Some(r) if together => r,
                _ => {
                    let end = if together {
                        parts.last().map_or(off + len, |p| p.0 + p.1)
                    } else {
                        off + len
                    };
                    self.register(n, pd, off, end - off, Access::LOCAL_WRITE)
                }
            };
            region = Some(r);
            sges.push(Sge {
                addr: r.tagged(off),
                len: len as u32,
                lkey: r.stag,
            });
        }
        sges
    }
}

/// Splits a length into 1 to `max_parts` parts, some of which may be empty. For length 0, the list
/// itself is sometimes empty.
pub fn split_len(rng: &mut Rng, len: usize, max_parts: usize) -> Vec<usize> {
    if max_parts == 0 || len == 0 && rng.chance(60) {
        assert!(len == 0, "no elements for a message");
        return Vec::new();
    }
    let n = if rng.chance(50) {
        1
    } else {
        1 + rng.index(max_parts)
    };
    let mut cuts: Vec<usize> = (1..n).map(|_| rng.index(len + 1)).collect();
    cuts.push(0);
    cuts.push(len);
    cuts.sort_unstable();
    cuts.windows(2).map(|w| w[1] - w[0]).collect()
}
