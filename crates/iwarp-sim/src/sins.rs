//! Sins: requests that must not succeed, each with the Terminate and the status that must follow
//! (RFC 5040 section 4.8, RFC 5041 section 7.2, RFC 7306 section 8.2).

use iwarp_proto::rdmap::TerminateCode as Code;
use iwarp_rnic::memory::WindowType;
use iwarp_rnic::{Access, Bind, SendFlags, SendOp, Sge, WcStatus};

use crate::memory::Region;
use crate::script::{Side, Target};
use crate::world::{Effect, Expect, World};

/// The mistake in an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sin {
    Index,
    Key,
    Bounds,
    Before,
    Wrap,
    Rights,
    Domain,
    Window,
}

const SINS: &[Sin] = &[
    Sin::Index,
    Sin::Key,
    Sin::Bounds,
    Sin::Before,
    Sin::Wrap,
    Sin::Rights,
    Sin::Domain,
    Sin::Window,
];

const fn tagged(sin: Sin) -> Code {
    match sin {
        Sin::Index | Sin::Key => Code::DDP_TAGGED_INVALID_STAG,
        Sin::Bounds | Sin::Before => Code::DDP_TAGGED_BASE_BOUNDS,
        Sin::Wrap => Code::DDP_TAGGED_TO_WRAP,
        Sin::Rights => Code::RDMAP_ACCESS,
        Sin::Domain | Sin::Window => Code::DDP_TAGGED_NOT_ASSOCIATED,
    }
}

const fn rdmap(sin: Sin) -> Code {
    match sin {
        Sin::Index | Sin::Key => Code::RDMAP_INVALID_STAG,
        Sin::Bounds | Sin::Before => Code::RDMAP_BASE_BOUNDS,
        Sin::Wrap => Code::RDMAP_TO_WRAP,
        Sin::Rights => Code::RDMAP_ACCESS,
        Sin::Domain | Sin::Window => Code::RDMAP_STAG_NOT_ASSOCIATED,
    }
}

impl Side {
    /// Makes one illegal request. Returns its index.
    pub fn sin(&mut self, w: &mut World, peer: &mut Self, reads: bool) -> usize {
        match w.rng.below(if reads { 10 } else { 6 }) {
            0 => self.local_sin(w, peer, reads),
            1 => self.bad_invalidate(w, peer),
            2..=5 => self.remote_sin(w, peer, 0),
            6 | 7 => self.remote_sin(w, peer, 1),
            8 => self.remote_sin(w, peer, 2),
            _ => self.misaligned(w, peer),
        }
    }

    /// Makes a request whose local elements or parameters are wrong.
    fn local_sin(&mut self, w: &mut World, peer: &Self, reads: bool) -> usize {
        let flags = SendFlags::empty();
        match w.rng.below(if reads { 5 } else { 4 }) {
            0 => {
                let stag = self.exposed.stag;
                // An ordinary region cannot be invalidated.
                let index = self.push(w, SendOp::LocalInvalidate { stag }, flags, Vec::new());
                self.expect(w, index, Expect::Local(WcStatus::LocalProtection))
            }
            1 => {
                let mw_stag = w.window(self.n, self.pd, WindowType::Type2);
                let bind = Bind {
                    mw_stag,
                    new_stag: mw_stag,
                    mr_stag: self.exposed.stag,
                    addr: self.exposed.base,
                    len: self.exposed.len as u64 + 1,
                    access: Access::REMOTE_READ,
                };
                let index = self.push(w, SendOp::Bind(bind), flags, Vec::new());
                self.expect(w, index, Expect::Local(WcStatus::MwBind))
            }
            4 => {
                let index = self.read(w, peer, Target::Exposed);
                let op = &mut w.eps[self.e].ops[index];
                op.local.clear();
                op.sges = vec![Sge {
                    addr: self.src[0].base,
                    len: 1,
                    // Without the right to write.
                    lkey: self.src[0].stag,
                }];
                op.byte_len = 1;
                self.expect(w, index, Expect::Local(WcStatus::LocalProtection))
            }
            _ => {
                let src = self.src[0];
                let (addr, lkey) = if w.rng.chance(50) {
                    (src.base, src.stag ^ 1)
                } else {
                    (src.base.wrapping_add(src.len as u64), src.stag)
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

    /// Makes a Send that invalidates an STag that it may not.
    fn bad_invalidate(&mut self, w: &mut World, peer: &Self) -> usize {
        let stag = match w.rng.below(3) {
            0 => peer.exposed.stag,
            1 => w.rng.next_u32() << 8 | 1,
            _ => w.window(peer.n, peer.pd, WindowType::Type2),
        };
        let index = self.send(w, Some(stag));
        // The payload is placed and not delivered.
        if let Some(message) = w.eps[peer.e].inbound.last_mut() {
            message.byte_len = u32::MAX;
        }
        self.expect(w, index, Expect::Refused(Code::RDMAP_CANNOT_INVALIDATE))
    }

    /// Returns the region that a sin is about, with the access changed to be wrong.
    fn spoil(&self, w: &mut World, peer: &Self, sin: Sin, len: u64, need: Access) -> (u64, u32) {
        let good = peer.exposed;
        let inside = good.tagged(good.off);
        match sin {
            Sin::Index => (inside, w.rng.next_u32() & !0xff | 0x5a),
            Sin::Key => (inside, good.stag ^ (1 << w.rng.below(8))),
            Sin::Bounds if w.rng.chance(50) => {
                // Through a window that ends inside its region.
                let window = self.inner_window(w, peer);
                let end = window.0.wrapping_add(window.1);
                (
                    end.wrapping_sub(len.min(window.1)).wrapping_add(1),
                    window.2,
                )
            }
            Sin::Bounds => {
                let end = good.base.wrapping_add(good.len as u64);
                let over = 1 + w.rng.below(len.min(32));
                // With one octet or more outside, at any end.
                (end.wrapping_sub(len).wrapping_add(over), good.stag)
            }
            Sin::Before => (good.base.wrapping_sub(1 + w.rng.below(16)), good.stag),
            Sin::Wrap => (u64::MAX - len + 2 + w.rng.below(len - 1), good.stag),
            Sin::Rights => {
                let most = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
                let access = (most | Access::LOCAL_WRITE) - need;
                let r = w.region(peer.n, peer.pd, peer.exposed.len, access);
                (r.base, r.stag)
            }
            Sin::Domain => {
                let r = w.region(
                    peer.n,
                    peer.pd + 1,
                    peer.exposed.len,
                    crate::memory::ALL_RIGHTS,
                );
                (r.base, r.stag)
            }
            Sin::Window => {
                // Of another queue pair.
                let stag = w.window(peer.n, peer.pd, WindowType::Type2);
                let bind = Bind {
                    mw_stag: stag,
                    new_stag: stag,
                    mr_stag: peer.exposed.stag,
                    addr: good.base,
                    len: good.len as u64,
                    access: Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC,
                };
                let other = iwarp_rnic::memory::Accessor {
                    pd: peer.pd,
                    qp: 9999,
                };
                let bound = w.nodes[peer.n].table.bind(&bind, other);
                bound.expect("a sound bind");
                (good.base, stag)
            }
        }
    }

    /// A window on the middle of the peer's region: address, length, STag.
    fn inner_window(&self, w: &mut World, peer: &Self) -> (u64, u64, u32) {
        let good = peer.exposed;
        let stag = w.window(peer.n, peer.pd, WindowType::Type1);
        let (addr, len) = (good.base.wrapping_add(16), good.len as u64 - 40);
        let bind = Bind {
            mw_stag: stag,
            new_stag: stag,
            mr_stag: good.stag,
            addr,
            len,
            access: Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC,
        };
        let who = w.eps[peer.e].qp.accessor();
        let bound = w.nodes[peer.n].table.bind(&bind, who);
        bound.expect("a sound bind");
        (addr, len, stag)
    }

    /// Makes a Write (0), Read (1) or atomic (2) that the peer has to refuse.
    fn remote_sin(&mut self, w: &mut World, peer: &Self, kind: u32) -> usize {
        let mut sin = SINS[w.rng.index(SINS.len())];
        if sin == Sin::Before && peer.exposed.base < 64 {
            // Nothing is in front of tagged offset zero.
            sin = Sin::Bounds;
        }
        let need = [
            Access::REMOTE_WRITE,
            Access::REMOTE_READ,
            Access::REMOTE_ATOMIC,
        ][kind as usize];
        let len = match kind {
            2 => 8,
            // Segments are checked one by one: a long Write would leave the region before it wraps.
            _ if w.rng.chance(70) || sin == Sin::Wrap => w.rng.range(2, 16),
            _ => w.rng.range(2, peer.exposed.len as u64),
        }
        .min(self.src[0].len as u64);
        let (remote_addr, rkey) = self.spoil(w, peer, sin, len, need);
        if kind == 0 {
            return self.bad_write(w, peer, sin, len as usize, (remote_addr, rkey));
        }
        let (sges, _) = w.scatter(self.n, self.pd, len as usize, 1, true);
        let op = if kind == 1 {
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
        self.expect(w, index, Expect::Refused(rdmap(sin)))
    }

    fn bad_write(
        &mut self,
        w: &mut World,
        peer: &Self,
        sin: Sin,
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
        // Its first segments may land where an earlier read still looks.
        let index = self.push(w, op, SendFlags::FENCE, vec![sge]);
        if sin == Sin::Bounds {
            // Segments before the one that crosses the end are in order, and are placed.
            let good: Region = peer.exposed;
            let from = remote_addr.wrapping_sub(good.base);
            if from < good.len as u64 {
                let inside = (good.len - from as usize).min(len);
                let data = w.nodes[self.n].model[src.off..src.off + inside].to_vec();
                for &(_, _, other) in &self.written {
                    // It may be overwritten before it is looked at.
                    w.eps[self.e].ops[other].exclusive = false;
                }
                w.eps[self.e].ops[index].remote.push(Effect {
                    off: good.off + from as usize,
                    data,
                });
            }
        }
        // A long one may break another rule first, because its first segments can be inside by themselves.
        self.expect(w, index, Expect::Refused(tagged(sin)))
    }

    /// Makes an atomic on octets that are no aligned word.
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
