//! Illegal requests, and the Terminate and the completion status that each must cause (RFC 5040
//! section 4.8, RFC 5041 section 7.2, RFC 7306 section 8.2).

use iwarp_proto::rdmap::TerminateCode as Code;
use iwarp_rnic::memory::{Stag, WindowType};
use iwarp_rnic::{Access, Bind, SendFlags, SendOp, Sge, WcStatus};

use crate::memory::Region;
use crate::script::{Side, Target};
use crate::world::{Effect, Expect, World};

/// What is wrong with an access to the peer's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mistake {
    /// The index of the STag is not in use.
    Index,
    /// The key of the STag is wrong.
    Key,
    /// The access crosses the end of the region or window.
    Bounds,
    /// The access starts before the region.
    Before,
    /// The tagged offset wraps around.
    Wrap,
    /// The region does not allow this kind of access.
    Rights,
    /// The region belongs to another protection domain.
    Domain,
    /// The memory window is bound to another queue pair.
    Window,
    /// The memory was unmapped.
    Unmapped,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RemoteAccess {
    Write,
    Read,
    Atomic,
}

const MISTAKES: &[Mistake] = &[
    Mistake::Index,
    Mistake::Key,
    Mistake::Bounds,
    Mistake::Before,
    Mistake::Wrap,
    Mistake::Rights,
    Mistake::Domain,
    Mistake::Window,
    Mistake::Unmapped,
];

/// Returns the code with which the peer must refuse a Write.
const fn write_code(mistake: Mistake) -> Code {
    match mistake {
        Mistake::Index | Mistake::Key => Code::DDP_TAGGED_INVALID_STAG,
        Mistake::Bounds | Mistake::Before | Mistake::Unmapped => Code::DDP_TAGGED_BASE_BOUNDS,
        Mistake::Wrap => Code::DDP_TAGGED_TO_WRAP,
        Mistake::Rights => Code::RDMAP_ACCESS,
        Mistake::Domain | Mistake::Window => Code::DDP_TAGGED_NOT_ASSOCIATED,
    }
}

/// Returns the code with which the peer must refuse a Read or an atomic.
const fn read_code(mistake: Mistake) -> Code {
    match mistake {
        Mistake::Index | Mistake::Key => Code::RDMAP_INVALID_STAG,
        Mistake::Bounds | Mistake::Before | Mistake::Unmapped => Code::RDMAP_BASE_BOUNDS,
        Mistake::Wrap => Code::RDMAP_TO_WRAP,
        Mistake::Rights => Code::RDMAP_ACCESS,
        Mistake::Domain | Mistake::Window => Code::RDMAP_STAG_NOT_ASSOCIATED,
    }
}

impl Side {
    /// Adds one illegal request. Returns its index.
    pub fn illegal_request(&mut self, w: &mut World, peer: &mut Self, reads: bool) -> usize {
        match w.rng.below(if reads { 10 } else { 6 }) {
            0 => self.illegal_local(w, peer, reads),
            1 => self.bad_invalidate(w, peer),
            2..=5 => self.illegal_remote(w, peer, RemoteAccess::Write),
            6 | 7 => self.illegal_remote(w, peer, RemoteAccess::Read),
            8 => self.illegal_remote(w, peer, RemoteAccess::Atomic),
            _ => self.misaligned(w, peer),
        }
    }

    /// Adds a request that fails locally, because its elements or parameters are invalid.
    fn illegal_local(&mut self, w: &mut World, peer: &Self, reads: bool) -> usize {
        let flags = SendFlags::empty();
        match w.rng.below(if reads { 5 } else { 4 }) {
            0 => {
                let stag = self.exposed.stag;
                // An ordinary region cannot be invalidated.
                let index = self.push(
                    w,
                    SendOp::LocalInvalidate { stag: Stag(stag) },
                    flags,
                    Vec::new(),
                );
                self.expect(w, index, Expect::Local(WcStatus::LocalProtection))
            }
            1 => {
                let mw_stag = w.window(self.n, self.pd, WindowType::Type2);
                let bind = Bind {
                    mw_stag,
                    new_stag: mw_stag,
                    mr_stag: Stag(self.exposed.stag),
                    addr: self.exposed.base,
                    len: self.exposed.len as u64 + 1,
                    access: Access::REMOTE_READ,
                };
                let index = self.push(w, SendOp::Bind(bind), flags, Vec::new());
                self.expect(w, index, Expect::Local(WcStatus::MwBind))
            }
            4 => {
                let index = self.read(w, peer, Target::Exposed);
                // The source region does not allow local writing.
                let sink = match w.rng.chance(50) {
                    true => self.src[0],
                    false => w.unmapped_region(self.n, self.pd, 8, Access::LOCAL_WRITE),
                };
                let op = &mut w.eps[self.e].ops[index];
                op.local.clear();
                op.sges = vec![Sge {
                    addr: sink.base,
                    len: 1,
                    lkey: sink.stag,
                }];
                op.byte_len = 1;
                self.expect(w, index, Expect::Local(WcStatus::LocalProtection))
            }
            _ => {
                let src = self.src[0];
                let (addr, lkey) = match w.rng.below(3) {
                    0 => (src.base, src.stag ^ 1),
                    1 => (src.base.wrapping_add(src.len as u64), src.stag),
                    _ => {
                        let region = w.unmapped_region(self.n, self.pd, 8, Access::empty());
                        (region.base, region.stag)
                    }
                };
                let sge = Sge { addr, len: 1, lkey };
                let index = self.push(w, SendOp::Send, flags, vec![sge]);
                self.expect(w, index, Expect::Local(WcStatus::LocalProtection))
            }
        }
    }

    fn expect(&self, w: &mut World, index: usize, expect: Expect) -> usize {
        w.eps[self.e].ops[index].expect = expect;
        index
    }

    /// Adds a Send that invalidates an STag that the peer may not invalidate.
    fn bad_invalidate(&mut self, w: &mut World, peer: &Self) -> usize {
        let stag = match w.rng.below(3) {
            0 => peer.exposed.stag,
            1 => w.rng.next_u32() << 8 | 1,
            _ => w.window(peer.n, peer.pd, WindowType::Type2).0,
        };
        let index = self.send(w, Some(stag));
        // The payload is placed, but the receive must not succeed. This length is impossible, so
        // the check fails if it does.
        if let Some(message) = w.eps[peer.e].inbound.last_mut() {
            message.byte_len = u32::MAX;
        }
        self.expect(w, index, Expect::Refused(Code::RDMAP_CANNOT_INVALIDATE))
    }

    /// Returns an address and an STag of the peer for an access that makes the mistake. The access
    /// has `len` octets and needs the right `need`.
    fn bad_access(
        &self,
        w: &mut World,
        peer: &Self,
        mistake: Mistake,
        len: u64,
        need: Access,
    ) -> (u64, u32) {
        let good = peer.exposed;
        let inside = good.tagged(good.off);
        match mistake {
            Mistake::Index => (inside, w.rng.next_u32() & !0xff | 0x5a),
            Mistake::Key => (inside, good.stag ^ (1 << w.rng.below(8))),
            Mistake::Bounds if w.rng.chance(50) => {
                // The access crosses the end of a window, but stays inside the window's region.
                let (addr, window_len, stag) = self.inner_window(w, peer);
                let end = addr.wrapping_add(window_len);
                (end.wrapping_sub(len.min(window_len)).wrapping_add(1), stag)
            }
            Mistake::Bounds => {
                let end = good.base.wrapping_add(good.len as u64);
                let over = 1 + w.rng.below(len.min(32));
                // At least the last octet is outside the region.
                (end.wrapping_sub(len).wrapping_add(over), good.stag)
            }
            Mistake::Before => (good.base.wrapping_sub(1 + w.rng.below(16)), good.stag),
            Mistake::Wrap => (u64::MAX - len + 2 + w.rng.below(len - 1), good.stag),
            Mistake::Rights => {
                let remote = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
                let access = (remote | Access::LOCAL_WRITE) - need;
                let r = w.region(peer.n, peer.pd, peer.exposed.len, access);
                (r.base, r.stag)
            }
            Mistake::Domain => {
                let r = w.region(
                    peer.n,
                    peer.pd + 1,
                    peer.exposed.len,
                    crate::memory::ALL_RIGHTS,
                );
                (r.base, r.stag)
            }
            Mistake::Unmapped => {
                let rights = crate::memory::ALL_RIGHTS;
                let r = w.unmapped_region(peer.n, peer.pd, peer.exposed.len, rights);
                (r.base, r.stag)
            }
            Mistake::Window => {
                // The window is bound to another queue pair.
                let stag = w.window(peer.n, peer.pd, WindowType::Type2);
                let bind = Bind {
                    mw_stag: stag,
                    new_stag: stag,
                    mr_stag: Stag(peer.exposed.stag),
                    addr: good.base,
                    len: good.len as u64,
                    access: Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC,
                };
                let other = iwarp_rnic::memory::Accessor {
                    pd: peer.pd,
                    qp: 9999,
                };
                let bound = w.nodes[peer.n].table.bind(&bind, other);
                bound.expect("a valid bind");
                (good.base, stag.0)
            }
        }
    }

    /// Binds a window to the middle of the peer's region. Returns its address, length and STag.
    fn inner_window(&self, w: &mut World, peer: &Self) -> (u64, u64, u32) {
        let good = peer.exposed;
        let stag = w.window(peer.n, peer.pd, WindowType::Type1);
        let (addr, len) = (good.base.wrapping_add(16), good.len as u64 - 40);
        let bind = Bind {
            mw_stag: stag,
            new_stag: stag,
            mr_stag: Stag(good.stag),
            addr,
            len,
            access: Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC,
        };
        let accessor = w.eps[peer.e].qp.accessor();
        let bound = w.nodes[peer.n].table.bind(&bind, accessor);
        bound.expect("a valid bind");
        (addr, len, stag.0)
    }

    /// Adds a request that the peer must refuse.
    fn illegal_remote(&mut self, w: &mut World, peer: &Self, kind: RemoteAccess) -> usize {
        let mut mistake = MISTAKES[w.rng.index(MISTAKES.len())];
        if mistake == Mistake::Before && peer.exposed.base < 64 {
            // Tagged offsets are not negative.
            mistake = Mistake::Bounds;
        }
        let need = match kind {
            RemoteAccess::Write => Access::REMOTE_WRITE,
            RemoteAccess::Read => Access::REMOTE_READ,
            RemoteAccess::Atomic => Access::REMOTE_ATOMIC,
        };
        let len = match kind {
            RemoteAccess::Atomic => 8,
            // The peer checks each segment separately: a long Write would exceed the bounds before
            // it wraps. A long Read response from unmapped memory may end in the middle, without a
            // Terminate code.
            _ if w.rng.chance(70) || mistake == Mistake::Wrap || mistake == Mistake::Unmapped => {
                w.rng.range(2, 16)
            }
            _ => w.rng.range(2, peer.exposed.len as u64),
        }
        .min(self.src[0].len as u64);
        let (remote_addr, rkey) = self.bad_access(w, peer, mistake, len, need);
        if kind == RemoteAccess::Write {
            return self.bad_write(w, peer, mistake, len as usize, (remote_addr, rkey));
        }
        let (sges, _) = w.scatter(self.n, self.pd, len as usize, 1, true);
        let op = if kind == RemoteAccess::Read {
            SendOp::Read { remote_addr, rkey }
        } else {
            SendOp::FetchAdd {
                remote_addr,
                rkey,
                add: 1,
                mask: 0,
            }
        };
        let index = self.push(w, op, SendFlags::empty(), sges);
        self.expect(w, index, Expect::Refused(read_code(mistake)))
    }

    fn bad_write(
        &mut self,
        w: &mut World,
        peer: &Self,
        mistake: Mistake,
        len: usize,
        (remote_addr, rkey): (u64, u32),
    ) -> usize {
        let src = self.src[0];
        let sge = Sge {
            addr: src.base,
            len: len as u32,
            lkey: src.stag,
        };
        let op = SendOp::Write { remote_addr, rkey };
        // Without the fence, its first segments could change memory that an earlier Read reads.
        let index = self.push(w, op, SendFlags::FENCE, vec![sge]);
        if mistake == Mistake::Bounds {
            // Segments before the one that crosses the end of the region are legal, and are placed.
            let good: Region = peer.exposed;
            let from = remote_addr.wrapping_sub(good.base);
            if from < good.len as u64 {
                let inside = (good.len - from as usize).min(len);
                let data = w.nodes[self.n].model[src.off..src.off + inside].to_vec();
                for &(_, _, other) in &self.written {
                    // This Write may overwrite their octets before they are checked.
                    w.eps[self.e].ops[other].exclusive = false;
                }
                w.eps[self.e].ops[index].remote.push(Effect {
                    off: good.off + from as usize,
                    data,
                });
            }
        }
        self.expect(w, index, Expect::Refused(write_code(mistake)))
    }

    fn misaligned(&mut self, w: &mut World, peer: &Self) -> usize {
        let (sges, _) = w.scatter(self.n, self.pd, 8, 1, true);
        let op = SendOp::FetchAdd {
            remote_addr: peer.exposed.base + w.rng.range(1, 7),
            rkey: peer.exposed.stag,
            add: 1,
            mask: 0,
        };
        let index = self.push(w, op, SendFlags::empty(), sges);
        self.expect(w, index, Expect::Refused(Code::RDMAP_CATASTROPHIC_STREAM))
    }
}
