//! An opened device: its memory table, the numbers of its objects, and its asynchronous events.

use super::any_qp::AnyQp;
use super::channel::CompletionChannel;
use super::cq::CompletionQueue;
use super::events::{AsyncEvent, AsyncEventKind, EventQueue};
use super::hooks::Hooks;
use super::memory_waiters::MemoryWaiters;
use super::registry::Registry;
use super::srq::SharedReceiveQueue;
use super::stats;
use super::ud_table::UdTable;
use crate::config::Config;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::sys::guarded::{self, MemoryTable, ProcessRange};
use crate::sys::null::{NULL_LEN, null_memory};
use crate::sys::on_demand::PAGER;
use crate::sys::probe::probe_range;
use crate::sys::sharded_lock::{ShardedLock, WriteGuard};
use crate::sys::{fork, fork::Origin};
use iwarp_rnic::counters::Counters;
use iwarp_rnic::memory::{Accessor, RegionInfo, Stag, WindowType};
use iwarp_rnic::{Access, FastRegister};
use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard};
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How long a forked child waits for the lock of the memory table of its parent's device. A thread
/// that does not exist in the child may have held the lock during the fork.
const INHERITED_LOCK_WAIT: Duration = Duration::from_secs(1);

pub(crate) struct ContextInner {
    pub(crate) device: Device,
    pub(crate) config: Config,
    pub(crate) memory: ShardedLock<MemoryTable>,
    pub(crate) async_events: EventQueue<AsyncEvent>,
    /// All queue pairs except datagram queue pairs, by number.
    qps: RwLock<HashMap<u32, Weak<dyn AnyQp>>>,
    pub(crate) cq_count: AtomicU32,
    next_qp: AtomicU32,
    next_pd: AtomicU32,
    /// Per-device tables that belong to the rooms above this one.
    pub(super) registries: Mutex<Vec<Arc<dyn Registry>>>,
    /// Datagram queue pairs, by number.
    pub(crate) ud_qps: UdTable,
    /// Queue pairs that wait for memory to become unused.
    pub(crate) waiting: MemoryWaiters,
    pub(crate) hooks: Hooks,
    retired_counters: Mutex<Counters>,
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
            memory: ShardedLock::new(MemoryTable::new()),
            async_events: EventQueue::new()?,
            qps: RwLock::default(),
            cq_count: AtomicU32::new(0),
            // A random start keeps numbers of earlier processes from being reused soon.
            next_qp: AtomicU32::new(random_u32()? & 0x00ff_ffff),
            next_pd: AtomicU32::new(1),
            registries: Mutex::default(),
            ud_qps: UdTable::default(),
            waiting: MemoryWaiters::default(),
            retired_counters: Mutex::default(),
            origin: Origin::current_process(),
        });
        stats::register(&inner);
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

    /// Returns `true` if both handles refer to the same opened device.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Allocates a protection domain and returns its number. Ignores injected faults.
    pub fn allocate_pd(&self) -> u32 {
        self.inner.next_pd.fetch_add(1, Ordering::Relaxed)
    }

    /// Allocates a protection domain (`ibv_alloc_pd(3)`) and returns its number.
    ///
    /// # Errors
    /// Returns the error of an injected fault ([`fault`](crate::fault)).
    pub fn try_allocate_pd(&self) -> Result<u32> {
        self.inner.check_fault("pd")?;
        Ok(self.allocate_pd())
    }

    /// Registers `len` bytes at `addr` and returns the STag, which is both lkey and rkey
    /// (`ibv_reg_mr(3)`).
    ///
    /// Tagged offsets start at `iova`.
    ///
    /// # Errors
    /// Returns [`Error::BadAddress`] if the range wraps around the address space, is not mapped, or
    /// is not writable although `access` includes local write. Returns [`Error::Memory`] if the
    /// memory table refuses the region.
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
        // SAFETY: guaranteed by the caller.
        let range = unsafe { self.checked_range(addr, len, access) }?;
        self.inner.check_fault("mr")?;
        let random = random_u32()?;
        let mut table = self.table_with_room()?;
        Ok(table.register(range, iova, pd, access, random)?.0)
    }

    /// Registers `len` bytes at `addr`, which the program may map and unmap at any time
    /// (`IBV_ACCESS_ON_DEMAND`), and returns the STag. Address 0 with a length of 2^64 - 1 is the
    /// whole address space.
    ///
    /// An access to an unmapped page fails, at both ends, as an access outside the region does. As
    /// long as an on-demand region exists, the device's queue pairs copy all payloads, and each
    /// access to the region costs a system call.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the range wraps around the address space, and
    /// [`Error::Memory`] if the memory table refuses the region.
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
        // SAFETY: guaranteed by the caller. The memory need not be mapped, because the pager checks
        // each access.
        let range = unsafe { Self::range(addr, len) }?;
        self.inner.check_fault("mr")?;
        let random = random_u32()?;
        let mut table = self.table_with_room()?;
        let stag = table.register_on_demand((range, &PAGER), iova, pd, access, random)?;
        Ok(stag.0)
    }

    /// Locks the memory table for writing, with room for at least one more entry. If the table must
    /// grow, allocates the memory before it takes the lock: all connections of the device wait for
    /// that lock.
    fn table_with_room(&self) -> Result<WriteGuard<'_, MemoryTable>> {
        let needed = self.inner.memory.read().missing_slots();
        let Some(size) = needed else {
            return Ok(self.inner.memory.write());
        };
        let room = size.make()?;
        let leftover = self.inner.memory.write().attach(room);
        // The lock was released above, so freeing the old storage delays no connection.
        drop(leftover);
        Ok(self.inner.memory.write())
    }

    /// # Safety
    /// As [`register`](Self::register).
    unsafe fn checked_range(&self, addr: u64, len: u64, access: Access) -> Result<ProcessRange> {
        guarded::keep_installed();
        if !probe_range(addr, len, access.contains(Access::LOCAL_WRITE)) {
            return Err(Error::BadAddress);
        }
        // SAFETY: guaranteed by the caller.
        unsafe { Self::range(addr, len) }
    }

    /// # Safety
    /// As [`ProcessRange::new`].
    unsafe fn range(addr: u64, len: u64) -> Result<ProcessRange> {
        // SAFETY: guaranteed by the caller.
        unsafe { ProcessRange::new(addr, len) }.ok_or(Error::InvalidArgument(
            "the range wraps around the address space",
        ))
    }

    /// Changes a region (`ibv_rereg_mr(3)`), and returns the new STag. A property given as `None`
    /// does not change. An on-demand region stays on-demand.
    ///
    /// # Errors
    /// Fails as [`register`](Self::register) or, for an on-demand region,
    /// [`register_on_demand`](Self::register_on_demand) does. Returns [`Error::Memory`] with
    /// [`MemoryError::Busy`](iwarp_rnic::memory::MemoryError::Busy) while windows are bound to the
    /// region.
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
                    // SAFETY: guaranteed by the caller.
                    unsafe { Self::range(addr, len) }
                } else {
                    // SAFETY: guaranteed by the caller.
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

    /// Ends a registration (`ibv_dereg_mr(3)`). No thread accesses the memory after this returns.
    ///
    /// # Errors
    /// Returns [`Error::Memory`] if the region does not exist, is being accessed, or has windows
    /// bound to it. In a forked child, returns [`Error::Busy`] after one second if the parent was
    /// accessing the device's memory at the time of the fork.
    pub fn deregister(&self, stag: u32) -> Result<()> {
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

    /// Waits for all accesses to registered memory that began before the call.
    pub(crate) fn wait_for_accesses(&self) {
        // Accesses hold the table's read lock.
        drop(self.inner.memory.write());
    }

    /// Creates a null region (`ibv_alloc_null_mr(3)`) and returns its STag. Data written to it is
    /// discarded, and reads return zeros, for local requests and for the peer. The region covers
    /// the whole address space.
    ///
    /// # Errors
    /// Returns [`Error::OutOfMemory`] if the process cannot map the region's memory, and
    /// [`Error::Memory`] if the memory table refuses the region.
    pub fn register_null(&self, pd: u32) -> Result<u32> {
        let memory = null_memory().map_err(|error| {
            tracing::warn!(%error, "no memory for a null region");
            Error::OutOfMemory
        })?;
        // SAFETY: both ranges stay mapped until the process ends. The table writes only to the
        // sink.
        let range = |addr| unsafe { ProcessRange::new(addr, NULL_LEN) }.ok_or(Error::OutOfMemory);
        let (zeros, sink) = (range(memory.zeros)?, range(memory.sink)?);
        let random = random_u32()?;
        let stag = self
            .table_with_room()?
            .register_null(zeros, sink, pd, random)?;
        Ok(stag.0)
    }

    /// Allocates an STag for later fast registration of memory in this range by a work request
    /// ([`FastRegister`]). Until then, the STag gives no access.
    ///
    /// # Errors
    /// Returns [`Error::BadAddress`] if the range wraps around the address space, or is not mapped
    /// and writable. Returns [`Error::Memory`] if the memory table refuses the entry.
    ///
    /// # Safety
    /// As [`register`](Self::register).
    pub unsafe fn allocate_fast(&self, addr: u64, len: u64, pd: u32) -> Result<u32> {
        // SAFETY: guaranteed by the caller.
        let range = unsafe { self.checked_range(addr, len, Access::LOCAL_WRITE) }?;
        let random = random_u32()?;
        let stag = self.table_with_room()?.allocate_fast(range, pd, random)?;
        Ok(stag.0)
    }

    /// Does the same as [`allocate_fast`](Self::allocate_fast) for memory that only one queue pair
    /// and its peer may use.
    ///
    /// # Errors
    /// See [`allocate_fast`](Self::allocate_fast).
    ///
    /// # Safety
    /// As [`register`](Self::register).
    pub(crate) unsafe fn allocate_fast_for(
        &self,
        (addr, len): (u64, u64),
        accessor: Accessor,
    ) -> Result<Stag> {
        // SAFETY: guaranteed by the caller.
        let range = unsafe { self.checked_range(addr, len, Access::LOCAL_WRITE) }?;
        let random = random_u32()?;
        let mut table = self.table_with_room()?;
        Ok(table.allocate_fast_for(range, accessor, random)?)
    }

    /// Invalidates an STag immediately, without a work request. Returns `true` if nothing uses its
    /// memory any more.
    ///
    /// # Errors
    /// Returns [`Error::InvalidState`] if the STag is not valid.
    pub(crate) fn invalidate(&self, stag: Stag, accessor: Accessor) -> Result<bool> {
        let invalidated = self.inner.memory.read().invalidate(stag, accessor, false);
        invalidated.map_err(|_| Error::InvalidState("the STag is not valid"))
    }

    /// Performs a fast registration immediately, without a work request.
    ///
    /// # Errors
    /// Returns [`Error::Memory`] if the memory table refuses the registration.
    pub fn fast_register(&self, wr: &FastRegister, pd: u32) -> Result<()> {
        Ok(self.inner.memory.read().fast_register(wr, pd)?)
    }

    /// Returns the properties of a region or window; `None` if it does not exist.
    pub fn region(&self, stag: u32) -> Option<RegionInfo> {
        self.inner.memory.read().info(Stag(stag))
    }

    /// Allocates a memory window (`ibv_alloc_mw(3)`) and returns its STag.
    ///
    /// # Errors
    /// Returns [`Error::Memory`] if the memory table has no room.
    pub fn allocate_window(&self, ty: WindowType, pd: u32) -> Result<Stag> {
        self.inner.check_fault("mw")?;
        let random = random_u32()?;
        Ok(self.table_with_room()?.allocate_window(ty, pd, random)?)
    }

    /// Deallocates a window, bound or not.
    ///
    /// # Errors
    /// Returns [`Error::Memory`] if the window does not exist or is being accessed.
    pub fn deallocate_window(&self, stag: Stag) -> Result<()> {
        Ok(self.inner.memory.write().deallocate_window(stag)?)
    }

    /// Creates a completion channel.
    ///
    /// # Errors
    /// Returns the operating system's error if no file descriptors are left.
    pub fn create_channel(&self) -> Result<CompletionChannel> {
        self.inner.check_fault("channel")?;
        CompletionChannel::create(self.inner.config.busy_poll)
    }

    /// Creates a completion queue for at least `capacity` completions (`ibv_create_cq(3)`).
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if `capacity` is out of range, and [`Error::OutOfMemory`]
    /// if the queue cannot be allocated.
    pub fn create_cq(
        &self,
        capacity: u32,
        channel: Option<&CompletionChannel>,
    ) -> Result<CompletionQueue> {
        self.inner.check_fault("cq")?;
        CompletionQueue::create(&self.inner, capacity, channel)
    }

    /// Creates a shared receive queue (`ibv_create_srq(3)`).
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if a size is out of range, and [`Error::OutOfMemory`] if
    /// the queue cannot be allocated.
    pub fn create_srq(&self, pd: u32, depth: u32, max_sge: u32) -> Result<SharedReceiveQueue> {
        self.inner.check_fault("srq")?;
        SharedReceiveQueue::create(&self.inner, pd, depth, max_sge)
    }

    /// Writes all recorded packets to the file of [`Config::capture`]. Does nothing if no capture
    /// is configured.
    ///
    /// # Errors
    /// Fails if the file cannot be written. Recording stops in that case.
    pub fn flush_capture(&self) -> Result<()> {
        match &self.inner.hooks.recorder {
            Some(recorder) => Ok(recorder.flush()?),
            None => Ok(()),
        }
    }

    /// Returns `false` if an injected fault has taken the port down.
    pub fn is_port_up(&self) -> bool {
        let plan = self.inner.hooks.faults.as_ref();
        plan.is_none_or(|plan| !plan.is_port_down())
    }

    /// Takes the oldest asynchronous event; `None` if there is none.
    pub fn try_async_event(&self) -> Option<AsyncEvent> {
        self.inner.async_events.try_next()
    }

    /// Waits for an asynchronous event. A timeout of `None` waits without limit.
    ///
    /// # Errors
    /// Returns [`Error::TimedOut`] if no event comes in time, or the operating system's error if it
    /// cannot wait.
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
    /// Returns the error of an injected fault that makes the creation of this kind of object fail:
    /// `pd`, `mr`, `mw`, `cq`, `srq`, `qp` or `channel`.
    #[inline]
    pub(crate) fn check_fault(&self, name: &'static str) -> Result<()> {
        match &self.hooks.faults {
            None => Ok(()),
            Some(plan) => plan.create(name),
        }
    }

    /// Adds the queue pair that `make` creates. `choose_number` picks its number; its argument
    /// tells whether a number is in use.
    pub(crate) fn insert_qp<M: AnyQp>(
        &self,
        choose_number: impl FnOnce(&dyn Fn(u32) -> bool) -> Result<u32>,
        make: impl FnOnce(u32) -> Result<Arc<M>>,
    ) -> Result<Arc<M>> {
        let mut qps = self.qps.write();
        let num = choose_number(&|num| qps.contains_key(&num) || self.ud_qps.contains(num))?;
        let qp = make(num)?;
        qps.insert(num, Arc::downgrade(&qp) as _);
        Ok(qp)
    }

    /// Allocates a queue pair number that encodes `port`, for a datagram queue pair. Returns `None`
    /// if all such numbers are in use.
    pub(crate) fn take_ud_number(&self, port: u16, random: u32) -> Option<u32> {
        let qps = self.qps.read();
        self.ud_qps.take(port, random, |num| qps.contains_key(&num))
    }

    pub(crate) fn remove_ud(&self, num: u32, counters: &Counters) {
        let mut retired = self.retired_counters.lock();
        self.ud_qps.remove(num);
        retired.add(counters);
    }

    /// Returns the next queue pair number for which `taken` returns `false`.
    pub(crate) fn next_free_number(&self, taken: &dyn Fn(u32) -> bool) -> u32 {
        loop {
            let num = self.next_qp.fetch_add(1, Ordering::Relaxed) & 0x00ff_ffff;
            if num > 1 && !taken(num) {
                return num;
            }
        }
    }

    /// Removes a queue pair. Adds its counters to the totals, and notifies the registries.
    pub(crate) fn remove_qp(&self, num: u32, counters: &Counters) {
        {
            // Under one lock: a thread that computes the totals must neither miss these counters
            // nor count them twice.
            let mut retired = self.retired_counters.lock();
            self.qps.write().remove(&num);
            retired.add(counters);
        }
        self.each_registry(|registry| registry.destroyed(num));
    }

    /// Returns the sum of `retired` and the counters of existing queue pairs. Without `wait`, skips
    /// queue pairs whose state is locked.
    fn sum(
        retired: MutexGuard<'_, Counters>,
        ud_qps: Vec<Arc<dyn AnyQp>>,
        qps: RwLockReadGuard<'_, HashMap<u32, Weak<dyn AnyQp>>>,
        wait: bool,
    ) -> Counters {
        let mut sum = *retired;
        let connected: Vec<_> = qps.values().filter_map(Weak::upgrade).collect();
        drop(qps);
        let members = connected.iter().chain(&ud_qps);
        for counters in members.filter_map(|qp| qp.counters(wait)) {
            sum.add(&counters);
        }
        // Unlock before the members are dropped: one of them may be the last handle, and dropping
        // it takes this lock.
        drop(retired);
        sum
    }

    /// Returns `true` if this process opened the device, rather than inherited it through a fork.
    pub(crate) fn is_ours(&self) -> bool {
        !self.origin.is_foreign()
    }

    /// Returns the totals of all queue pairs since the device was opened. Does not wait for locks
    /// in a forked child: skips locked queue pairs, and returns `None` if the counters or a list of
    /// queue pairs are locked.
    pub(crate) fn totals(&self) -> Option<Counters> {
        if self.is_ours() {
            let retired = self.retired_counters.lock();
            let ud_qps = self.ud_qps.all(true)?;
            return Some(Self::sum(retired, ud_qps, self.qps.read(), true));
        }
        let retired = self.retired_counters.try_lock()?;
        let ud_qps = self.ud_qps.all(false)?;
        let qps = self.qps.try_read()?;
        Some(Self::sum(retired, ud_qps, qps, false))
    }

    /// Returns the numbers of the queue pairs except datagram queue pairs, in no particular order.
    /// In a forked child, returns `None` if the list is locked.
    pub(crate) fn qp_numbers(&self) -> Option<Vec<u32>> {
        let qps = if self.is_ours() {
            self.qps.read()
        } else {
            self.qps.try_read()?
        };
        Some(qps.keys().copied().collect())
    }

    pub(crate) fn member(&self, num: u32) -> Option<Arc<dyn AnyQp>> {
        self.qps.read().get(&num)?.upgrade()
    }

    /// Returns the same as [`member`](Self::member). In a forked child, returns `None` if the list
    /// is locked.
    pub(crate) fn try_member(&self, num: u32) -> Option<Arc<dyn AnyQp>> {
        let qps = if self.is_ours() {
            self.qps.read()
        } else {
            self.qps.try_read()?
        };
        qps.get(&num)?.upgrade()
    }

    pub(crate) fn completion_queues(&self) -> u32 {
        self.cq_count.load(Ordering::Relaxed)
    }

    pub(crate) fn raise(&self, kind: AsyncEventKind) {
        self.async_events.push(AsyncEvent { kind });
    }
}

impl Drop for ContextInner {
    fn drop(&mut self) {
        self.each_registry(|registry| registry.closed());
        if !self.origin.is_foreign() {
            let totals = *self.retired_counters.get_mut();
            stats::closed(self, &totals);
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
    Error::from(std::io::Error::other(e.to_string()))
}

#[cfg(test)]
#[path = "context_tests.rs"]
mod tests;
