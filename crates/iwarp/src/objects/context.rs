//! An opened device: its memory table, its numbers, and its asynchronous events.

use super::channel::CompletionChannel;
use super::cq::CompletionQueue;
use super::events::{AsyncEvent, AsyncEventKind, EventQueue};
use super::hooks::Hooks;
use super::member::Member;
use super::memory_waiters::MemoryWaiters;
use super::numbers::Numbers;
use super::registry::Registry;
use super::srq::SharedReceiveQueue;
use super::stats;
use super::table_lock::TableLock;
use crate::config::Config;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::sys::guarded::{self, MemoryTable, ProcessRange};
use crate::sys::null::{NULL_LEN, null_memory};
use crate::sys::on_demand::PAGER;
use crate::sys::probe::probe_range;
use crate::sys::{fork, fork::Origin};
use iwarp_rnic::counters::Counters;
use iwarp_rnic::memory::{RegionInfo, Stag, WindowType};
use iwarp_rnic::{Access, FastRegister};
use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How long a forked child waits for the memory table of its parent's device. The table may have
/// been copied while it was locked by a thread that does not exist in the child.
const INHERITED_LOCK_WAIT: Duration = Duration::from_secs(1);

pub(crate) struct ContextInner {
    pub(crate) device: Device,
    pub(crate) config: Config,
    pub(crate) memory: TableLock,
    pub(crate) async_events: EventQueue<AsyncEvent>,
    qps: RwLock<HashMap<u32, Weak<dyn Member>>>,
    pub(crate) cqs: AtomicU32,
    next_qp: AtomicU32,
    next_pd: AtomicU32,
    /// Tables that rooms above keep for the device.
    pub(super) registries: Mutex<Vec<Arc<dyn Registry>>>,
    pub(crate) datagrams: Numbers,
    /// Queue pairs that wait for memory to become unused.
    pub(crate) waiting: MemoryWaiters,
    pub(crate) hooks: Hooks,
    past: Mutex<Counters>,
    origin: Origin,
}

/// An opened device (`ibv_open_device(3)`).
#[derive(Clone)]
pub struct Context {
    pub(crate) inner: Arc<ContextInner>,
}

impl Context {
    pub(crate) fn open_with(device: &Device, config: Config, hooks: Hooks) -> Result<Self> {
        if config.memory_guard {
            guarded::enable();
        }
        let inner = Arc::new(ContextInner {
            hooks,
            device: device.clone(),
            config,
            memory: TableLock::new(MemoryTable::new()),
            async_events: EventQueue::new()?,
            qps: RwLock::default(),
            cqs: AtomicU32::new(0),
            // A random start keeps numbers of earlier processes from being reused soon.
            next_qp: AtomicU32::new(random_u32()? & 0x00ff_ffff),
            next_pd: AtomicU32::new(1),
            registries: Mutex::default(),
            datagrams: Numbers::default(),
            waiting: MemoryWaiters::default(),
            past: Mutex::default(),
            origin: Origin::here(),
        });
        stats::watch(&inner);
        Ok(Self { inner })
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Returns the settings that the device was opened with.
    pub fn config(&self) -> &Config {
        &self.inner.config
    }

    /// Returns `true` if both handles mean the same opened device.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Returns a number for a new protection domain.
    pub fn allocate_pd(&self) -> u32 {
        self.inner.next_pd.fetch_add(1, Ordering::Relaxed)
    }

    /// Allocates a protection domain (`ibv_alloc_pd(3)`) and returns its number.
    ///
    /// # Errors
    /// The error of an injected fault ([`fault`](crate::fault)).
    pub fn try_allocate_pd(&self) -> Result<u32> {
        self.inner.create("pd")?;
        Ok(self.allocate_pd())
    }

    /// Registers `len` bytes at `addr` and returns the STag, which is both lkey and rkey
    /// (`ibv_reg_mr(3)`).
    ///
    /// Tagged offsets start at `iova`. Fails if the range is not mapped, or not writable although a
    /// right writes.
    ///
    /// # Errors
    /// [`Error::BadAddress`], [`Error::Memory`], [`Error::InvalidArgument`] if the range wraps.
    ///
    /// # Safety
    /// The range must stay mapped until [`deregister`](Self::deregister) has returned, and no
    /// reference to it may exist while the RNIC or a peer can access it.
    pub unsafe fn register(
        &self,
        addr: u64,
        len: u64,
        iova: u64,
        pd: u32,
        access: Access,
    ) -> Result<u32> {
        // SAFETY: the caller's promise.
        let range = unsafe { self.checked_range(addr, len, access) }?;
        self.inner.create("mr")?;
        let random = random_u32()?;
        let mut table = self.table_with_room()?;
        Ok(table.register(range, iova, pd, access, random)?.0)
    }

    /// Registers `len` bytes at `addr` whose pages may come and go (`IBV_ACCESS_ON_DEMAND`), and
    /// returns the STag. Address 0 with a length of 2^64 - 1 is the whole address space.
    ///
    /// The range need not be mapped. An access to a missing page fails at both ends like one
    /// outside the region. While there is such a region, all payload of the device's queue pairs is
    /// copied, and each access to the region takes a system call.
    ///
    /// # Errors
    /// As [`register`](Self::register), but never [`Error::BadAddress`].
    ///
    /// # Safety
    /// Until [`deregister`](Self::deregister) has returned, no reference to memory of the range may
    /// exist while the RNIC or a peer can access it.
    pub unsafe fn register_on_demand(
        &self,
        addr: u64,
        len: u64,
        iova: u64,
        pd: u32,
        access: Access,
    ) -> Result<u32> {
        // SAFETY: the caller's promise. The memory need not be mapped, because the pager checks
        // that.
        let range = unsafe { Self::range(addr, len) }?;
        self.inner.create("mr")?;
        let random = random_u32()?;
        let mut table = self.table_with_room()?;
        let stag = table.register_on_demand((range, &PAGER), iova, pd, access, random)?;
        Ok(stag.0)
    }

    /// Locks the memory table for one more entry. If the table must grow, the memory is allocated
    /// before the lock is taken, because all connections of the device wait for the lock.
    fn table_with_room(&self) -> Result<RwLockWriteGuard<'_, MemoryTable>> {
        let lacks = self.inner.memory.read().lacks_room();
        let Some(size) = lacks else {
            return Ok(self.inner.memory.write());
        };
        let room = size.make()?;
        let late = self.inner.memory.write().attach(room);
        // Freed without the lock, too.
        drop(late);
        Ok(self.inner.memory.write())
    }

    /// # Safety
    /// As [`register`](Self::register).
    unsafe fn checked_range(&self, addr: u64, len: u64, access: Access) -> Result<ProcessRange> {
        guarded::keep();
        if !probe_range(addr, len, access.contains(Access::LOCAL_WRITE)) {
            return Err(Error::BadAddress);
        }
        // SAFETY: the caller's promise.
        unsafe { Self::range(addr, len) }
    }

    /// # Safety
    /// As [`ProcessRange::new`].
    unsafe fn range(addr: u64, len: u64) -> Result<ProcessRange> {
        // SAFETY: the caller's promise.
        unsafe { ProcessRange::new(addr, len) }.ok_or(Error::InvalidArgument(
            "the range wraps around the address space",
        ))
    }

    /// Changes a region (`ibv_rereg_mr(3)`), and returns the new STag. `None` keeps a property. An
    /// on-demand region stays one.
    ///
    /// # Errors
    /// As [`register`](Self::register); [`Error::Busy`] via `Memory` while windows are bound.
    ///
    /// # Safety
    /// As [`register`](Self::register), for the new range `(addr, len, iova)`.
    pub unsafe fn reregister(
        &self,
        stag: u32,
        memory: Option<(u64, u64, u64)>,
        pd: Option<u32>,
        access: Option<Access>,
    ) -> Result<u32> {
        let memory = match memory {
            Some((addr, len, iova)) => {
                let region = self.region(stag);
                let rights = access.or(region.map(|r| r.access)).unwrap_or_default();
                let range = if region.is_some_and(|r| r.on_demand) {
                    // SAFETY: the caller's promise.
                    unsafe { Self::range(addr, len) }
                } else {
                    // SAFETY: the caller's promise.
                    unsafe { self.checked_range(addr, len, rights) }
                };
                Some((range?, iova))
            }
            None => None,
        };
        let mut table = self.inner.memory.write();
        let (stag, _) = table.reregister(Stag(stag), memory, pd, access)?;
        Ok(stag.0)
    }

    /// Ends a registration. When this returns, the memory is no longer accessed.
    ///
    /// # Errors
    /// [`Error::Memory`]: there is no such region, or windows are bound to it. [`Error::Busy`]
    /// after a second in a forked child, if the parent was using the device's memory during the
    /// fork.
    pub fn deregister(&self, stag: u32) -> Result<()> {
        // Accesses in progress hold the table for reading, so this waits for them.
        let mut table = match self.inner.origin.is_foreign() {
            false => self.inner.memory.write(),
            true => {
                let table = fork::try_for(INHERITED_LOCK_WAIT, || self.inner.memory.try_write());
                table.ok_or(Error::Busy)?
            }
        };
        table.deregister(Stag(stag))?;
        Ok(())
    }

    /// Waits until all accesses to registered memory have ended that began before the call.
    pub(crate) fn wait_for_accesses(&self) {
        // Accesses hold the table for reading.
        drop(self.inner.memory.write());
    }

    /// Creates a null region (`ibv_alloc_null_mr(3)`) and returns its key. Data written to it is
    /// discarded, and reads return zeros, for local requests and for the peer. It contains every
    /// address.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]: there is no address space for it; [`Error::Memory`].
    pub fn register_null(&self, pd: u32) -> Result<u32> {
        let memory = null_memory().map_err(|error| {
            tracing::warn!(%error, "no memory for a null region");
            Error::OutOfMemory
        })?;
        // SAFETY: both ranges stay mapped as long as the process lives. Only the second is written.
        let range = |addr| unsafe { ProcessRange::new(addr, NULL_LEN) }.ok_or(Error::OutOfMemory);
        let (zeros, sink) = (range(memory.zeros)?, range(memory.sink)?);
        let random = random_u32()?;
        let stag = self
            .table_with_room()?
            .register_null(zeros, sink, pd, random)?;
        Ok(stag.0)
    }

    /// Reserves memory for fast registration by work request ([`FastRegister`]).
    ///
    /// # Errors
    /// As [`register`](Self::register).
    ///
    /// # Safety
    /// As [`register`](Self::register).
    pub unsafe fn allocate_fast(&self, addr: u64, len: u64, pd: u32) -> Result<u32> {
        // SAFETY: the caller's promise.
        let range = unsafe { self.checked_range(addr, len, Access::LOCAL_WRITE) }?;
        let random = random_u32()?;
        let stag = self.table_with_room()?.allocate_fast(range, pd, random)?;
        Ok(stag.0)
    }

    /// Carries out a fast registration immediately, without a work request.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn fast_register(&self, wr: &FastRegister, pd: u32) -> Result<()> {
        Ok(self.inner.memory.read().fast_register(wr, pd)?)
    }

    /// Returns a region or window, if it exists.
    pub fn region(&self, stag: u32) -> Option<RegionInfo> {
        self.inner.memory.read().info(Stag(stag))
    }

    /// Allocates a memory window (`ibv_alloc_mw(3)`) and returns its STag.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn allocate_window(&self, ty: WindowType, pd: u32) -> Result<Stag> {
        self.inner.create("mw")?;
        let random = random_u32()?;
        Ok(self.table_with_room()?.allocate_window(ty, pd, random)?)
    }

    /// Deallocates a window, bound or not.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn deallocate_window(&self, stag: Stag) -> Result<()> {
        Ok(self.inner.memory.write().deallocate_window(stag)?)
    }

    /// Creates a completion channel.
    ///
    /// # Errors
    /// The operating system's error: no descriptors left.
    pub fn create_channel(&self) -> Result<CompletionChannel> {
        self.inner.create("channel")?;
        CompletionChannel::create(self.inner.config.busy_poll)
    }

    /// Creates a completion queue for at least `capacity` completions (`ibv_create_cq(3)`).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], [`Error::OutOfMemory`].
    pub fn create_cq(
        &self,
        capacity: u32,
        channel: Option<&CompletionChannel>,
    ) -> Result<CompletionQueue> {
        self.inner.create("cq")?;
        CompletionQueue::create(&self.inner, capacity, channel)
    }

    /// Creates a shared receive queue (`ibv_create_srq(3)`).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], [`Error::OutOfMemory`].
    pub fn create_srq(&self, pd: u32, depth: u32, max_sge: u32) -> Result<SharedReceiveQueue> {
        self.inner.create("srq")?;
        SharedReceiveQueue::create(&self.inner, pd, depth, max_sge)
    }

    /// Writes what [`Config::capture`] has recorded so far to its file. Does nothing without a
    /// capture.
    ///
    /// # Errors
    /// The file cannot be written; the recording has then stopped.
    pub fn flush_capture(&self) -> Result<()> {
        match &self.inner.hooks.recorder {
            Some(recorder) => Ok(recorder.flush()?),
            None => Ok(()),
        }
    }

    /// Returns `true` unless an injected fault has taken the port down.
    pub fn is_port_up(&self) -> bool {
        let plan = self.inner.hooks.faults.as_ref();
        plan.is_none_or(|plan| !plan.is_port_down())
    }

    /// Takes an asynchronous event.
    pub fn try_async_event(&self) -> Option<AsyncEvent> {
        self.inner.async_events.try_next()
    }

    /// Waits for an asynchronous event; `None` waits without limit.
    ///
    /// # Errors
    /// [`Error::TimedOut`].
    pub fn async_event(&self, timeout: Option<Duration>) -> Result<AsyncEvent> {
        self.inner.async_events.next(timeout)
    }

    /// Returns the queue of the asynchronous events.
    pub fn async_events(&self) -> &EventQueue<AsyncEvent> {
        &self.inner.async_events
    }

    /// Returns a descriptor that is readable while asynchronous events are pending.
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        self.inner.async_events.as_fd()
    }

    /// Returns the totals of all queue pairs since the device was opened.
    pub fn counters(&self) -> Counters {
        self.inner.totals().unwrap_or_default()
    }
}

impl ContextInner {
    /// Checks whether an injected fault fails the creation of an object: `pd`, `mr`, `mw`, `cq`,
    /// `srq`, `qp` or `channel`.
    ///
    /// # Errors
    /// The error of the fault.
    #[inline]
    pub(crate) fn create(&self, name: &'static str) -> Result<()> {
        match &self.hooks.faults {
            None => Ok(()),
            Some(plan) => plan.create(name),
        }
    }

    /// Chooses a free number with `number`, and adds the queue pair that `make` creates with it.
    pub(crate) fn enter_qp<M: Member>(
        &self,
        number: impl FnOnce(&dyn Fn(u32) -> bool) -> Result<u32>,
        make: impl FnOnce(u32) -> Result<Arc<M>>,
    ) -> Result<Arc<M>> {
        let mut qps = self.qps.write();
        let num = number(&|num| qps.contains_key(&num) || self.datagrams.contains(num))?;
        let qp = make(num)?;
        qps.insert(num, Arc::downgrade(&qp) as _);
        Ok(qp)
    }

    /// Takes a number that contains `port` for a datagram queue pair.
    pub(crate) fn take_ud_number(&self, port: u16, random: u32) -> Option<u32> {
        let qps = self.qps.read();
        self.datagrams
            .take(port, random, |num| qps.contains_key(&num))
    }

    /// Removes a datagram queue pair, and adds its counters to the totals.
    pub(crate) fn remove_ud(&self, num: u32, counters: &Counters) {
        let mut past = self.past.lock();
        self.datagrams.remove(num);
        past.add(counters);
    }

    /// Returns the next number that is not `taken`.
    pub(crate) fn any_number(&self, taken: &dyn Fn(u32) -> bool) -> u32 {
        loop {
            let num = self.next_qp.fetch_add(1, Ordering::Relaxed) & 0x00ff_ffff;
            // 0 and 1 are used for management on other transports.
            if num > 1 && !taken(num) {
                return num;
            }
        }
    }

    /// Removes a queue pair, and adds its counters to the totals.
    pub(crate) fn remove_qp(&self, num: u32, counters: &Counters) {
        {
            // In one step: a thread that sums up must neither miss the counters nor count them
            // twice.
            let mut past = self.past.lock();
            self.qps.write().remove(&num);
            past.add(counters);
        }
        self.each_registry(|registry| registry.destroyed(num));
    }

    /// Returns the sum of `past` and the counters of existing queue pairs. Without `wait`, locked
    /// queue pairs are left out.
    fn sum(
        past: MutexGuard<'_, Counters>,
        datagrams: Vec<Arc<dyn Member>>,
        qps: RwLockReadGuard<'_, HashMap<u32, Weak<dyn Member>>>,
        wait: bool,
    ) -> Counters {
        let mut sum = *past;
        let connected: Vec<_> = qps.values().filter_map(Weak::upgrade).collect();
        drop(qps);
        let members = connected.iter().chain(&datagrams);
        for counters in members.filter_map(|qp| qp.counters(wait)) {
            sum.add(&counters);
        }
        // Unlock before the members are dropped: the last handle may be here, and its end takes
        // this lock.
        drop(past);
        sum
    }

    /// Returns `true` unless a parent of this process opened the device.
    pub(crate) fn is_ours(&self) -> bool {
        !self.origin.is_foreign()
    }

    /// Returns the totals of all queue pairs since the device was opened. In a forked child, locked
    /// queue pairs are left out, and `None` is returned if a list is locked.
    pub(crate) fn totals(&self) -> Option<Counters> {
        if self.is_ours() {
            let past = self.past.lock();
            let datagrams = self.datagrams.all(true)?;
            return Some(Self::sum(past, datagrams, self.qps.read(), true));
        }
        let past = self.past.try_lock()?;
        let datagrams = self.datagrams.all(false)?;
        let qps = self.qps.try_read()?;
        Some(Self::sum(past, datagrams, qps, false))
    }

    /// Returns the numbers of the queue pairs, in no order. In a forked child, returns `None` if
    /// the list is locked.
    pub(crate) fn qp_numbers(&self) -> Option<Vec<u32>> {
        let qps = if self.is_ours() {
            self.qps.read()
        } else {
            self.qps.try_read()?
        };
        Some(qps.keys().copied().collect())
    }

    pub(crate) fn member(&self, num: u32) -> Option<Arc<dyn Member>> {
        self.qps.read().get(&num)?.upgrade()
    }

    /// Returns the connected queue pair with this number. In a forked child, returns `None` if the
    /// list is locked.
    pub(crate) fn member_if_free(&self, num: u32) -> Option<Arc<dyn Member>> {
        let qps = if self.is_ours() {
            self.qps.read()
        } else {
            self.qps.try_read()?
        };
        qps.get(&num)?.upgrade()
    }

    pub(crate) fn completion_queues(&self) -> u32 {
        self.cqs.load(Ordering::Relaxed)
    }

    pub(crate) fn raise(&self, kind: AsyncEventKind) {
        self.async_events.push(AsyncEvent { kind });
    }
}

impl Drop for ContextInner {
    fn drop(&mut self) {
        self.each_registry(|registry| registry.closed());
        if !self.origin.is_foreign() {
            let past = *self.past.get_mut();
            stats::closed(self, &past);
        }
    }
}

impl std::fmt::Debug for ContextInner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context")
            .field("device", &self.device.name)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.inner.fmt(f)
    }
}

/// Returns 32 bits that a peer cannot guess.
pub(crate) fn random_u32() -> Result<u32> {
    getrandom::u32().map_err(no_random)
}

pub(crate) fn random_u64() -> Result<u64> {
    getrandom::u64().map_err(no_random)
}

fn no_random(e: getrandom::Error) -> Error {
    Error::Io(std::io::Error::other(e.to_string()))
}

#[cfg(test)]
#[path = "context_tests.rs"]
mod tests;
