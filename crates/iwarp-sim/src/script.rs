//! Random verbs programs for one connection, and the outcome of each request.
//!
//! The programs of both sides are generated together, as one sequence of steps. A request that
//! depends on an earlier step of the other side waits for a message of that side (`after_recv`). So
//! dependent steps are executed in order, and the final contents of memory are known exactly.

use iwarp_rnic::memory::{Stag, WindowType};
use iwarp_rnic::{Access, Bind, FastRegister, SendFlags, SendOp, Sge, WcFlags, WcOpcode};

use crate::memory::{Region, split_len};
use crate::rng::Rng;
use crate::world::{Effect, Expect, Message, Op, World};

/// The memory of one side of a connection, and how the generated requests use it.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Side {
    /// Index of the endpoint.
    pub e: usize,
    /// Index of its node.
    pub n: usize,
    pub pd: u32,
    /// Regions to send from.
    pub src: Vec<Region>,
    /// For the peer's writes, reads and windows.
    pub exposed: Region,
    /// For the peer's atomics.
    pub words: Region,
    /// Sinks of Reads, and their offsets. Later requests may send from them after a fence.
    pub sinks: Vec<(Sge, usize)>,
    /// Ranges of the peer that earlier Reads may still be reading. A request that changes one of
    /// them needs a fence.
    pub reading: Vec<(usize, usize)>,
    /// Ranges of the peer that requests have written: offset, length, index of the request.
    pub written: Vec<(usize, usize, usize)>,
    /// Longest message, in octets.
    pub max_message: usize,
}

/// The memory that a request accesses at the peer.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub enum Target {
    /// The peer's exposed region, by its own STag.
    Exposed,
    /// A memory window or fast registration of the peer.
    Granted(Region),
}

/// Returns a random atomic on a word with the value `old`, and the word's new value.
fn random_atomic(rng: &mut Rng, remote_addr: u64, rkey: u32, old: u64) -> (SendOp, u64) {
    let a = rng.next_u64();
    let b = rng.next_u64();
    match rng.below(4) {
        0 => {
            let add = SendOp::FetchAdd {
                remote_addr,
                rkey,
                add: a,
                mask: 0,
            };
            (add, old.wrapping_add(a))
        }
        1 => {
            // The mask separates two 32-bit fields, which are added separately.
            let mask = 1 << 31;
            let low = (old as u32).wrapping_add(a as u32);
            let high = ((old >> 32) as u32).wrapping_add((a >> 32) as u32);
            let add = SendOp::FetchAdd {
                remote_addr,
                rkey,
                add: a,
                mask,
            };
            (add, u64::from(high) << 32 | u64::from(low))
        }
        2 => {
            let compare = if rng.chance(70) { old } else { a };
            let swap = SendOp::CmpSwap {
                remote_addr,
                rkey,
                compare,
                swap: b,
                compare_mask: u64::MAX,
                swap_mask: u64::MAX,
            };
            (swap, if compare == old { b } else { old })
        }
        _ => {
            let (cm, sm) = (rng.next_u64() & a, rng.next_u64());
            let compare = if rng.chance(70) { old ^ !cm } else { b };
            let swap = SendOp::CmpSwap {
                remote_addr,
                rkey,
                compare,
                swap: a,
                compare_mask: cm,
                swap_mask: sm,
            };
            let hit = (compare ^ old) & cm == 0;
            (swap, if hit { old & !sm | a & sm } else { old })
        }
    }
}

const fn overlap(a: (usize, usize), b: (usize, usize)) -> bool {
    a.0 < b.0 + b.1 && b.0 < a.0 + a.1
}

impl Side {
    fn random_len(&self, w: &mut World) -> usize {
        let mulpdu = usize::from(iwarp_proto::mpa::framing::mulpdu(
            w.eps[self.e].stream.emss,
            w.eps[self.e].stream.markers_tx,
        ));
        let rng = &mut w.rng;
        let len = match rng.below(10) {
            0 => 0,
            1..=3 => rng.range(1, 64) as usize,
            4 | 5 => rng.index(self.max_message + 1),
            // Lengths close to a multiple of the segment length.
            6 => {
                let segment = mulpdu - if rng.chance(50) { 14 } else { 18 };
                (segment * rng.range(1, 3) as usize + rng.index(5)).saturating_sub(2)
            }
            7 => self.max_message,
            _ => rng.index(self.max_message.min(2000) + 1),
        };
        len.min(self.max_message)
    }

    /// Chooses `len` octets to send. Returns the scatter/gather elements and the contents.
    fn gather(&mut self, w: &mut World, len: usize, flags: &mut SendFlags) -> (Vec<Sge>, Vec<u8>) {
        let n = self.n;
        if w.rng.chance(15)
            && len > 0
            && let Some(&(sge, off)) = self.sinks.iter().rfind(|s| s.0.len as usize >= len)
        {
            // Without a fence, an earlier Read may not have filled its sink yet.
            *flags |= SendFlags::FENCE;
            let sge = Sge {
                len: len as u32,
                ..sge
            };
            return (vec![sge], w.nodes[n].model[off..off + len].to_vec());
        }
        let max_sge = w.eps[self.e].qp.config().max_send_sge as usize;
        let (mut sges, mut data) = (Vec::new(), Vec::new());
        for l in split_len(&mut w.rng, len, max_sge) {
            let r = self.src[w.rng.index(self.src.len())];
            let off = r.off + w.rng.index(r.len - l + 1);
            sges.push(Sge {
                addr: r.tagged(off),
                len: l as u32,
                lkey: r.stag,
            });
            data.extend_from_slice(&w.nodes[n].model[off..off + l]);
        }
        (sges, data)
    }

    /// Adds a request to the program. Returns its index.
    pub fn push(&mut self, w: &mut World, op: SendOp, flags: SendFlags, sges: Vec<Sge>) -> usize {
        if flags.contains(SendFlags::FENCE) {
            self.reading.clear();
        }
        let byte_len = sges.iter().map(|s| s.len).sum();
        let after_recv = w.eps[self.e].inbound.len();
        let ep = &mut w.eps[self.e];
        // Only requests that depend on the other side wait, so that the two programs run
        // concurrently.
        let after_recv = if ep.wait_next { after_recv } else { 0 };
        ep.wait_next = false;
        let before = ep.ops.last().map_or(0, |o| o.after_recv);
        ep.ops.push(Op {
            op,
            flags,
            sges,
            inline: None,
            after_recv: after_recv.max(before),
            local: Vec::new(),
            remote: Vec::new(),
            exclusive: false,
            byte_len,
            counter_sink: None,
            expect: Expect::Success,
        });
        ep.ops.len() - 1
    }

    fn random_flags(&self, w: &mut World) -> SendFlags {
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::SIGNALED, w.rng.chance(60));
        flags.set(SendFlags::FENCE, w.rng.chance(8));
        flags.set(SendFlags::SOLICITED, w.rng.chance(20));
        flags
    }

    /// Sometimes turns the payload of a request into inline data.
    fn maybe_inline(&self, w: &mut World, index: usize, data: &[u8]) {
        let max_inline = w.eps[self.e].qp.config().max_inline as usize;
        if data.len() <= max_inline && w.rng.chance(50) {
            let op = &mut w.eps[self.e].ops[index];
            op.flags |= SendFlags::INLINE;
            op.inline = Some(data.to_vec());
            // The elements of an inline request are ignored, so make them invalid.
            op.sges = vec![Sge {
                addr: 1,
                len: 2,
                lkey: 3,
            }];
        }
    }

    /// Records the message that a request sends, and the expected completion of its receive.
    fn record_message(
        &self,
        w: &mut World,
        index: usize,
        data: Vec<u8>,
        opcode: WcOpcode,
        imm: Option<u32>,
        inv: Option<u32>,
    ) {
        let op = &w.eps[self.e].ops[index];
        let mut flags = WcFlags::empty();
        flags.set(WcFlags::SOLICITED, op.flags.contains(SendFlags::SOLICITED));
        flags.set(WcFlags::WITH_IMM, imm.is_some());
        flags.set(WcFlags::WITH_INV, inv.is_some());
        let byte_len = op.byte_len;
        w.eps[self.e ^ 1].inbound.push(Message {
            op: index,
            data,
            opcode,
            byte_len,
            flags,
            imm_or_stag: imm.or(inv).unwrap_or(0),
        });
    }

    /// Adds a Send of a random length, which invalidates `inv` if given. Returns its index.
    pub fn send(&mut self, w: &mut World, inv: Option<u32>) -> usize {
        let len = self.random_len(w);
        self.send_with_len(w, len, inv)
    }

    /// Adds a Send of `len` octets, which invalidates `inv` if given. Returns its index.
    pub fn send_with_len(&mut self, w: &mut World, len: usize, inv: Option<u32>) -> usize {
        let mut flags = self.random_flags(w);
        if inv.is_some() {
            // Reads that use the STag must be complete before it is invalidated.
            flags |= SendFlags::FENCE;
        }
        let imm = (inv.is_none() && w.rng.chance(25)).then(|| w.rng.next_u32());
        let (sges, data) = self.gather(w, len, &mut flags);
        let op = match (inv, imm) {
            (Some(stag), _) => SendOp::SendInv(stag),
            (None, Some(imm)) => SendOp::SendImm(imm),
            (None, None) => SendOp::Send,
        };
        let index = self.push(w, op, flags, sges);
        w.eps[self.e].ops[index].byte_len = len as u32;
        self.maybe_inline(w, index, &data);
        self.record_message(w, index, data, WcOpcode::Recv, imm, inv);
        index
    }

    /// Adds an RDMA Write, with immediate data if `imm` is set. Returns its index.
    pub fn write(&mut self, w: &mut World, peer: &Self, target: Target, imm: bool) -> usize {
        let region = match target {
            Target::Exposed => peer.exposed,
            Target::Granted(r) => r,
        };
        let len = self.random_len(w).min(region.len);
        let off = region.off + w.rng.index(region.len - len + 1);
        let mut flags = self.random_flags(w);
        if self.reading.iter().any(|r| overlap(*r, (off, len))) {
            // Without the fence, the earlier Read could return octets of this Write.
            flags |= SendFlags::FENCE;
        }
        let (sges, data) = self.gather(w, len, &mut flags);
        let (remote_addr, rkey) = (region.tagged(off), region.stag);
        // The address and STag of an empty Write are not checked, so any values are valid.
        let (remote_addr, rkey) = if len == 0 && w.rng.chance(50) {
            (w.rng.next_u64(), w.rng.next_u32())
        } else {
            (remote_addr, rkey)
        };
        let imm = imm.then(|| w.rng.next_u32());
        let op = match imm {
            Some(imm) => SendOp::WriteImm {
                remote_addr,
                rkey,
                imm,
            },
            None => SendOp::Write { remote_addr, rkey },
        };
        let index = self.push(w, op, flags, sges);
        self.record_change(w, peer, index, off, &data);
        w.eps[self.e].ops[index].byte_len = len as u32;
        self.maybe_inline(w, index, &data);
        if imm.is_some() {
            self.record_message(w, index, Vec::new(), WcOpcode::RecvWriteImm, imm, None);
        }
        index
    }

    /// Records that a request changes octets of the peer's memory.
    fn record_change(&mut self, w: &mut World, peer: &Self, index: usize, off: usize, data: &[u8]) {
        w.nodes[peer.n].model[off..off + data.len()].copy_from_slice(data);
        let mut exclusive = true;
        for &(o, l, other) in &self.written {
            if overlap((o, l), (off, data.len())) {
                exclusive = false;
                w.eps[self.e].ops[other].exclusive = false;
            }
        }
        self.written.push((off, data.len(), index));
        let op = &mut w.eps[self.e].ops[index];
        op.exclusive = exclusive;
        op.remote.push(Effect {
            off,
            data: data.to_vec(),
        });
    }

    /// Adds an RDMA Read. Returns its index.
    pub fn read(&mut self, w: &mut World, peer: &Self, target: Target) -> usize {
        let region = match target {
            Target::Exposed => peer.exposed,
            Target::Granted(r) => r,
        };
        let len = self.random_len(w).min(region.len);
        let off = region.off + w.rng.index(region.len - len + 1);
        let data = w.nodes[peer.n].model[off..off + len].to_vec();
        let max_sge = w.eps[self.e].qp.config().max_send_sge;
        let (sges, parts) = w.scatter(self.n, self.pd, len, max_sge, false);
        let op = SendOp::Read {
            remote_addr: region.tagged(off),
            rkey: region.stag,
        };
        let flags = self.random_flags(w);
        let index = self.push(w, op, flags, sges.clone());
        self.reading.push((off, len));
        let mut rest = &data[..];
        for (sge, &(at, l)) in sges.iter().zip(&parts) {
            let (now, later) = rest.split_at(l);
            rest = later;
            w.nodes[self.n].model[at..at + l].copy_from_slice(now);
            w.eps[self.e].ops[index].local.push(Effect {
                off: at,
                data: now.to_vec(),
            });
            if sge.len > 0 {
                self.sinks.push((*sge, at));
            }
        }
        index
    }

    /// Adds an atomic on one of the peer's words. Returns its index.
    pub fn atomic(&mut self, w: &mut World, peer: &Self, target: Target) -> usize {
        let region = match target {
            Target::Exposed => peer.words,
            Target::Granted(r) => r,
        };
        let words = region.len / 8;
        let off = region.off + 8 * w.rng.index(words);
        let model = &mut w.nodes[peer.n].model;
        let old = u64::from_ne_bytes(std::array::from_fn(|i| model[off + i]));
        let (remote_addr, rkey) = (region.tagged(off), region.stag);
        let (op, new) = random_atomic(&mut w.rng, remote_addr, rkey, old);
        let mut flags = self.random_flags(w);
        if self.reading.iter().any(|r| overlap(*r, (off, 8))) {
            flags |= SendFlags::FENCE;
        }
        let aligned = w.rng.chance(50);
        let (sges, parts) = w.scatter(self.n, self.pd, 8, 1, aligned);
        let index = self.push(w, op, flags, sges);
        let at = parts[0].0;
        w.nodes[self.n].model[at..at + 8].copy_from_slice(&old.to_ne_bytes());
        w.eps[self.e].ops[index].local.push(Effect {
            off: at,
            data: old.to_ne_bytes().to_vec(),
        });
        self.record_change(w, peer, index, off, &new.to_ne_bytes());
        index
    }

    /// Adds an Atomic Write of eight octets. Returns its index. It, and all later requests of this
    /// side, complete only once the peer has placed them.
    pub fn atomic_write(&mut self, w: &mut World, peer: &Self) -> usize {
        let region = peer.exposed;
        let off = region.off + 8 * w.rng.index(region.len / 8);
        let mut flags = self.random_flags(w);
        if self.reading.iter().any(|r| overlap(*r, (off, 8))) {
            flags |= SendFlags::FENCE;
        }
        let r = self.src[0];
        let from = r.off + w.rng.index(r.len - 8);
        let sge = Sge {
            addr: r.tagged(from),
            len: 8,
            lkey: r.stag,
        };
        let data = w.nodes[self.n].model[from..from + 8].to_vec();
        let op = SendOp::AtomicWrite {
            remote_addr: region.tagged(off),
            rkey: region.stag,
        };
        let index = self.push(w, op, flags, vec![sge]);
        self.record_change(w, peer, index, off, &data);
        index
    }

    /// Adds an atomic that increments the counter of the peer's host, which all connections share.
    pub fn increment_counter(&mut self, w: &mut World, peer: &Self) {
        let (_, remote_addr, rkey) = w.nodes[peer.n].counter;
        let op = SendOp::FetchAdd {
            remote_addr,
            rkey,
            add: 1,
            mask: 0,
        };
        let (sges, parts) = w.scatter(self.n, self.pd, 8, 1, true);
        let flags = self.random_flags(w);
        let index = self.push(w, op, flags, sges);
        w.eps[self.e].ops[index].counter_sink = Some(parts[0].0);
    }

    /// Adds a series of requests: this side binds a window or registers memory for the peer, the
    /// peer accesses it, and one side unbinds or invalidates it. The peer may read if `reads`.
    pub fn grant_and_revoke(&mut self, w: &mut World, peer: &mut Self, reads: bool) -> Region {
        let (region, can_invalidate) = match w.rng.below(3) {
            0 => (self.grant_window(w, WindowType::Type1), false),
            1 => (self.grant_window(w, WindowType::Type2), true),
            _ => (self.grant_fast_registration(w), true),
        };
        // The peer waits for this message before it uses the STag.
        self.send_with_len(w, 8.min(self.max_message), None);
        w.eps[peer.e].wait_next = true;
        for _ in 0..w.rng.range(1, 3) {
            let target = Target::Granted(region);
            match w.rng.below(3) {
                0 if reads => drop(peer.read(w, self, target)),
                1 => drop(peer.write(w, self, target, true)),
                _ => drop(peer.write(w, self, target, false)),
            }
        }
        let peer_invalidates = can_invalidate && w.rng.chance(60);
        if peer_invalidates {
            peer.send(w, Some(region.stag));
        } else {
            let index = peer.send(w, None);
            w.eps[peer.e].ops[index].flags |= SendFlags::FENCE;
            peer.reading.clear();
            w.eps[self.e].wait_next = true;
            let flags = self.random_flags(w);
            let op = if !can_invalidate {
                // A bind of length zero unbinds the window.
                SendOp::Bind(Bind {
                    mw_stag: Stag(region.stag),
                    new_stag: Stag(region.stag ^ 1),
                    mr_stag: Stag(self.exposed.stag),
                    addr: 0,
                    len: 0,
                    access: Access::empty(),
                })
            } else {
                SendOp::LocalInvalidate {
                    stag: Stag(region.stag),
                }
            };
            self.push(w, op, flags, Vec::new());
        }
        region
    }

    fn grant_window(&mut self, w: &mut World, ty: WindowType) -> Region {
        let stag = w.window(self.n, self.pd, ty);
        let new_stag = stag.with_key(w.rng.next_u32() as u8);
        let len = 1 + w.rng.index(self.exposed.len.min(self.max_message.max(64)));
        let off = self.exposed.off + w.rng.index(self.exposed.len - len + 1);
        let mut access = Access::REMOTE_READ | Access::REMOTE_WRITE;
        access.set(Access::ZERO_BASED, w.rng.chance(30));
        let flags = self.random_flags(w);
        let addr = self.exposed.tagged(off);
        let bind = Bind {
            mw_stag: stag,
            new_stag,
            mr_stag: Stag(self.exposed.stag),
            addr,
            len: len as u64,
            access,
        };
        self.push(w, SendOp::Bind(bind), flags, Vec::new());
        let zero = access.contains(Access::ZERO_BASED);
        Region {
            off,
            len,
            base: if zero { 0 } else { addr },
            stag: new_stag.0,
        }
    }

    fn grant_fast_registration(&mut self, w: &mut World) -> Region {
        let max_len = self.max_message.max(64) + 64;
        let allocated = w.fast_region(self.n, self.pd, max_len);
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        self.fast_register(w, allocated, access)
    }

    /// Adds a fast registration of a random part of an allocated region.
    fn fast_register(&mut self, w: &mut World, allocated: Region, access: Access) -> Region {
        let len = 1 + w.rng.index(allocated.len);
        let offset = w.rng.index(allocated.len - len + 1);
        let iova = w.iova(len as u64);
        let new_stag = Stag(allocated.stag).with_key(w.rng.next_u32() as u8);
        let flags = self.random_flags(w);
        let fast = FastRegister {
            new_stag,
            offset: offset as u64,
            len: len as u64,
            iova,
            access,
            pages: None,
        };
        self.push(w, SendOp::FastRegister(fast), flags, Vec::new());
        Region {
            off: allocated.off + offset,
            len,
            base: iova,
            stag: new_stag.0,
        }
    }

    /// Adds a series of requests: a fast registration, a Send from the registered range, and an
    /// invalidation.
    pub fn register_send_invalidate(&mut self, w: &mut World) {
        let allocated = w.fast_region(self.n, self.pd, self.max_message.max(64));
        for _ in 0..w.rng.range(1, 2) {
            let region = self.fast_register(w, allocated, Access::LOCAL_WRITE);
            let len = region.len.min(self.max_message);
            let flags = self.random_flags(w);
            let data = w.nodes[self.n].model[region.off..region.off + len].to_vec();
            let sge = Sge {
                addr: region.base,
                len: len as u32,
                lkey: region.stag,
            };
            let index = self.push(w, SendOp::Send, flags, vec![sge]);
            self.record_message(w, index, data, WcOpcode::Recv, None, None);
            let flags = self.random_flags(w);
            let stag = Stag(region.stag);
            self.push(w, SendOp::LocalInvalidate { stag }, flags, Vec::new());
        }
    }
}
