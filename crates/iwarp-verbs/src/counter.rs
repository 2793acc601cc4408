//! Completion counters (`ibv_create_comp_cntr(3)`, since rdma-core 65).
//!
//! Each queue pair counts its own completions, so that threads that complete requests share no
//! memory. A counter's value is a base, which the program sets, plus the counts of the attached
//! queue pairs. When a queue pair is destroyed, its counts are added to the base. A program that
//! only reads a counter sees it advance, because the progress thread drives sockets that no other
//! thread polls.
//!
//! This room uses `qp` and the rooms below it. `lifecycle` detaches the counters of a queue pair.

use crate::abi::recent::*;
use crate::abi::verbs::*;
use crate::border::guard::{EBUSY, EINVAL, Res, UNSUPPORTED, code, pointer};
use crate::border::object::{self, Kind, Object};
use crate::device::checked_context;
use crate::qp::{connected, datagram};
use iwarp::runtime::{ProcessLock, QueuePair};
use iwarp_rnic::qp::State;
use iwarp_rnic::tally::Counted;
use parking_lot::Mutex;
use std::ffi::{c_int, c_uint};

const TYPE_BYTES: c_uint = 1;
const OPS: u32 = 0x3f;
/// Reported to programs, but not enforced: counters are ordinary memory.
const MAX_COUNTERS: u32 = 1 << 20;

#[derive(Debug, Clone, Copy, Default)]
struct Values {
    completed: u64,
    failed: u64,
}

impl Values {
    const fn plus(self, other: Self) -> Self {
        Self {
            completed: self.completed.wrapping_add(other.completed),
            failed: self.failed.wrapping_add(other.failed),
        }
    }

    const fn minus(self, other: Self) -> Self {
        Self {
            completed: self.completed.wrapping_sub(other.completed),
            failed: self.failed.wrapping_sub(other.failed),
        }
    }
}

/// A queue pair that a counter is attached to.
struct Attached {
    qp: usize,
    raw: QueuePair,
    ops: u32,
}

impl Attached {
    fn values(&self, bytes: bool) -> Values {
        let selected = |op: &Counted| self.ops & 1 << *op as u32 != 0;
        let ops = Counted::ALL.into_iter().filter(selected);
        ops.fold(Values::default(), |sum, op| {
            let count = self.raw.tally(op);
            sum.plus(Values {
                completed: if bytes { count.octets } else { count.succeeded },
                failed: count.failed,
            })
        })
    }
}

#[derive(Default)]
struct Inner {
    /// The value that the program set, plus the counts of destroyed queue pairs, minus the counts
    /// that attached queue pairs had when the value was set or they were attached.
    base: Values,
    attached: Vec<Attached>,
}

pub(crate) struct CompCntr {
    bytes: bool,
    inner: Mutex<Inner>,
}

impl CompCntr {
    /// Applies `f` to the values.
    fn change(&self, f: impl FnOnce(Values) -> Values) {
        let mut inner = self.inner.lock();
        let counted = self.counted(&inner);
        let now = inner.base.plus(counted);
        inner.base = f(now).minus(counted);
    }

    fn counted(&self, inner: &Inner) -> Values {
        let each = inner.attached.iter().map(|a| a.values(self.bytes));
        each.fold(Values::default(), Values::plus)
    }

    fn now(&self) -> Values {
        let inner = self.inner.lock();
        inner.base.plus(self.counted(&inner))
    }

    /// Adds the queue pair's counts to the base and detaches it.
    fn detach(&self, qp: usize) {
        let mut inner = self.inner.lock();
        let (detached, kept): (Vec<_>, Vec<_>) = inner.attached.drain(..).partition(|a| a.qp == qp);
        inner.attached = kept;
        for a in detached {
            inner.base = inner.base.plus(a.values(self.bytes));
        }
    }
}

/// Attached counters: the queue pair's address, the counter's address, and the operations. This
/// lock is taken before a counter's.
static ATTACHED: ProcessLock<Vec<(usize, usize, u32)>> =
    ProcessLock::new("verbs::comp_cntr::ATTACHED", Vec::new());

unsafe fn find<'a>(cntr: *mut ibv_comp_cntr) -> Res<&'a Object<ibv_comp_cntr, CompCntr>> {
    object::find(Kind::CompCntr, cntr)
}

/// Detaches a queue pair's counters before it is destroyed.
pub(crate) unsafe fn detach(q: *mut ibv_qp) {
    let mut all = ATTACHED.lock();
    for (_, cntr, _) in all.extract_if(.., |(qp, ..)| *qp == q as usize) {
        if let Ok(cntr) = find(cntr as *mut ibv_comp_cntr) {
            cntr.detach(q as usize);
        }
    }
}

pub(crate) unsafe extern "C" fn _ibv_query_comp_cntr_caps(
    c: *mut ibv_context,
    to: *mut ibv_comp_cntr_caps,
    size: usize,
) -> c_int {
    code(|| {
        checked_context(c)?;
        if to.is_null() {
            return Err(EINVAL);
        }
        let caps = ibv_comp_cntr_caps {
            max_value: u64::MAX,
            max_counters: MAX_COUNTERS,
            supported_qp_attach_ops: OPS,
        };
        std::ptr::write_bytes(to.cast::<u8>(), 0, size);
        let known = size.min(size_of::<ibv_comp_cntr_caps>());
        std::ptr::copy_nonoverlapping((&raw const caps).cast::<u8>(), to.cast(), known);
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn ibv_create_comp_cntr(
    c: *mut ibv_context,
    attr: *mut ibv_comp_cntr_init_attr,
) -> *mut ibv_comp_cntr {
    pointer(|| {
        checked_context(c)?;
        let attr = attr.as_ref().ok_or(EINVAL)?;
        if attr.comp_mask != 0 || attr.r#type > TYPE_BYTES {
            return Err(UNSUPPORTED);
        }
        if attr.flags != 0 {
            return Err(EINVAL);
        }
        let own = CompCntr {
            bytes: attr.r#type == TYPE_BYTES,
            inner: Mutex::default(),
        };
        let cntr = ibv_comp_cntr {
            context: c,
            handle: 0,
        };
        Ok(object::create(Kind::CompCntr, cntr, own))
    })
}

pub(crate) unsafe extern "C" fn ibv_destroy_comp_cntr(cntr: *mut ibv_comp_cntr) -> c_int {
    code(|| {
        // While the lock is held, the counter cannot be attached.
        let attached = ATTACHED.lock();
        find(cntr)?;
        if attached.iter().any(|(_, c, _)| *c == cntr as usize) {
            return Err(EBUSY);
        }
        object::retire(Kind::CompCntr, cntr)?;
        object::free::<ibv_comp_cntr, CompCntr>(cntr);
        Ok(())
    })
}

/// Attaches a counter to a queue pair. Datagram queue pairs do not support counters.
pub(crate) unsafe extern "C" fn ibv_qp_attach_comp_cntr(
    q: *mut ibv_qp,
    cntr: *mut ibv_comp_cntr,
    attr: *mut ibv_qp_attach_comp_cntr_attr,
) -> c_int {
    code(|| {
        if datagram::find(q).is_ok() {
            return Err(UNSUPPORTED);
        }
        let qp = connected::find(q)?;
        let attr = attr.as_ref().ok_or(EINVAL)?;
        let mut attached = ATTACHED.lock();
        let counter = find(cntr)?;
        if attr.op_mask & !OPS != 0 {
            return Err(UNSUPPORTED);
        }
        let before_rtr = matches!(connected::state_for_program(qp), State::Reset | State::Init);
        let same_device = (*q).context == (*cntr).context;
        if attr.comp_mask != 0 || attr.op_mask == 0 || !before_rtr || !same_device {
            return Err(EINVAL);
        }
        let overlaps =
            |(qp, _, ops): &(usize, usize, u32)| *qp == q as usize && ops & attr.op_mask != 0;
        if attached.iter().any(overlaps) {
            return Err(EBUSY);
        }
        qp.raw.enable_tally()?;
        counter.attach(q as usize, qp.raw.clone(), attr.op_mask);
        attached.push((q as usize, cntr as usize, attr.op_mask));
        Ok(())
    })
}

impl CompCntr {
    /// Counts the queue pair's completions from now on.
    fn attach(&self, qp: usize, raw: QueuePair, ops: u32) {
        let attached = Attached { qp, raw, ops };
        // Counting may have been enabled by another counter before.
        let before = attached.values(self.bytes);
        let mut inner = self.inner.lock();
        inner.base = inner.base.minus(before);
        inner.attached.push(attached);
    }
}

unsafe fn change(cntr: *mut ibv_comp_cntr, f: impl FnOnce(&mut Values)) -> c_int {
    code(|| {
        find(cntr)?.change(|mut values| {
            f(&mut values);
            values
        });
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn ibv_set_comp_cntr(cntr: *mut ibv_comp_cntr, to: u64) -> c_int {
    change(cntr, |values| values.completed = to)
}

pub(crate) unsafe extern "C" fn ibv_set_err_comp_cntr(cntr: *mut ibv_comp_cntr, to: u64) -> c_int {
    change(cntr, |values| values.failed = to)
}

pub(crate) unsafe extern "C" fn ibv_inc_comp_cntr(cntr: *mut ibv_comp_cntr, by: u64) -> c_int {
    change(cntr, |values| {
        values.completed = values.completed.wrapping_add(by);
    })
}

pub(crate) unsafe extern "C" fn ibv_inc_err_comp_cntr(cntr: *mut ibv_comp_cntr, by: u64) -> c_int {
    change(cntr, |values| {
        values.failed = values.failed.wrapping_add(by)
    })
}

unsafe fn read(cntr: *mut ibv_comp_cntr, to: *mut u64, field: fn(Values) -> u64) -> c_int {
    code(|| {
        let now = find(cntr)?.now();
        *to.as_mut().ok_or(EINVAL)? = field(now);
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn ibv_read_comp_cntr(
    cntr: *mut ibv_comp_cntr,
    to: *mut u64,
) -> c_int {
    read(cntr, to, |values| values.completed)
}

pub(crate) unsafe extern "C" fn ibv_read_err_comp_cntr(
    cntr: *mut ibv_comp_cntr,
    to: *mut u64,
) -> c_int {
    read(cntr, to, |values| values.failed)
}
