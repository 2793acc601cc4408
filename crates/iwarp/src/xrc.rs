//! XRC domains, and the targets of extended reliable connections (`IBV_QPT_XRC_RECV`). A target
//! takes receives from any shared receive queue of its domain; each message names the queue.
//!
//! A domain belongs to one opened device of one process. Opening the same file again on that device
//! returns the same domain. Domains are not shared between processes.
//!
//! Locks: the locks of a device's register of domains and of a target's selected queue are
//! innermost. They may be taken while a queue pair's state is locked.

use crate::conn::attributes::QpAttributes;
use crate::conn::effects::{DriveHost, Due, Effects};
use crate::conn::post::Request;
use crate::conn::qp::{QpInner, QueuePair};
use crate::conn::xrc_target::XrcTarget;
use crate::error::{Error, PostFailed, Result};
use crate::objects::context::{Context, ContextInner, random_u32};
use crate::objects::cq::{CompletionQueue, CqInner, Owed};
use crate::objects::registry::Registry;
use crate::objects::srq::{SharedReceiveQueue, SrqInner, XrcMembership};
use iwarp_rnic::qp::{QueuePair as Machine, XrcEnd};
use iwarp_rnic::receive_queue::TakenRecv;
use iwarp_rnic::{Cqe, PostError, SendOp, SendWr};
use parking_lot::Mutex;
use std::any::Any;
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Weak};

/// Numbers of shared receive queues have 24 bits, like those of queue pairs.
const NUMBER_MASK: u32 = 0x00ff_ffff;

#[derive(Default)]
pub(crate) struct Domains(Mutex<Register>);

impl Registry for Domains {}

#[derive(Default)]
struct Register {
    by_file: HashMap<(u64, u64), Weak<DomainInner>>,
    queues: HashMap<u32, Entry>,
    /// The last number that was assigned; 0 if there was none.
    last: u32,
}

/// A shared receive queue. The reference is weak, because dropping the queue locks the register.
struct Entry {
    queue: Weak<SrqInner>,
    /// The domain's address, which identifies it as long as the queue exists.
    domain: usize,
    pd: u32,
}

struct DomainInner {
    ctx: Arc<ContextInner>,
    /// Keeps the file open, so that its inode is not reused while the domain exists.
    _file: Option<File>,
    /// The completion queue of targets. It stays empty, because receives complete in the queues of
    /// the shared receive queues.
    unused: CompletionQueue,
}

/// A domain of extended reliable connections (`ibv_open_xrcd(3)`): targets, and the shared receive
/// queues that their peers may use.
#[derive(Clone)]
pub struct XrcDomain {
    inner: Arc<DomainInner>,
}

/// A send work request of an initiator.
#[derive(Debug, Clone, Copy)]
pub struct XrcSendWr<'a> {
    /// The request.
    pub wr: SendWr<'a>,
    /// Number of the peer's shared receive queue ([`SharedReceiveQueue::num`]). It may be 0 for
    /// RDMA Writes, Reads and atomics, which need no receive. The target then uses the protection
    /// domain of the last queue that a request has named.
    pub srq: u32,
}

impl Request for XrcSendWr<'_> {
    fn wr(&self) -> &SendWr<'_> {
        &self.wr
    }

    fn post(&self, machine: &mut Machine, host: &mut DriveHost<'_>) -> Result<(), PostError> {
        machine.post_send_to(&self.wr, self.srq, host)
    }

    fn with_op(&self, op: SendOp) -> Self {
        let wr = SendWr { op, ..self.wr };
        Self { wr, ..*self }
    }
}

/// The sizes of a target.
#[derive(Debug, Clone, Copy)]
pub struct XrcTargetAttributes {
    /// Maximum number of inbound RDMA Reads and atomics in flight (IRD).
    pub max_ird: u16,
    /// `true` if the target can be connected by GID and number ([`QueuePair::connect_peer`]).
    pub addressable: bool,
}

impl Context {
    /// Opens an XRC domain (`ibv_open_xrcd(3)`). With a file, returns the existing domain of that
    /// file, or a new one if there is none and `create` is `true`. Without a file, returns a new
    /// domain that cannot be opened again.
    ///
    /// # Errors
    /// As with the kernel:
    /// - [`Error::InvalidArgument`]: the domain exists and `exclusive` is `true`, or `file` is
    ///   `None` and `create` is `false`.
    /// - [`Error::Io`] with `EAGAIN`: the domain does not exist and `create` is `false`.
    /// - [`Error::Io`]: the descriptor is invalid.
    pub fn open_xrc_domain(
        &self,
        file: Option<BorrowedFd<'_>>,
        create: bool,
        exclusive: bool,
    ) -> Result<XrcDomain> {
        let Some(file) = file else {
            if !create {
                return Err(Error::InvalidArgument(
                    "without a file, `create` has to be set",
                ));
            }
            return DomainInner::new(&self.inner, None);
        };
        let file = File::from(file.try_clone_to_owned()?);
        let metadata = file.metadata()?;
        let key = (metadata.dev(), metadata.ino());
        let domains = self.inner.registry::<Domains>();
        let mut register = domains.0.lock();
        match register.by_file.get(&key).and_then(Weak::upgrade) {
            Some(_) if exclusive => Err(Error::InvalidArgument("the domain exists")),
            Some(inner) => Ok(XrcDomain { inner }),
            None if !create => Err(std::io::Error::from_raw_os_error(libc::EAGAIN).into()),
            None => {
                let domain = DomainInner::new(&self.inner, Some(file))?;
                register.by_file.retain(|_, d| d.strong_count() > 0);
                register.by_file.insert(key, Arc::downgrade(&domain.inner));
                Ok(domain)
            }
        }
    }

    /// Creates a shared receive queue of an XRC domain (`ibv_create_srq_ex(3)` with
    /// `IBV_SRQT_XRC`). Its receives complete in `cq`.
    ///
    /// # Errors
    /// The errors of [`create_srq`](Self::create_srq), and [`Error::InvalidArgument`] if the domain
    /// belongs to another device.
    pub fn create_xrc_srq(
        &self,
        domain: &XrcDomain,
        cq: &CompletionQueue,
        pd: u32,
        depth: u32,
        max_sge: u32,
    ) -> Result<SharedReceiveQueue> {
        self.check(domain)?;
        let random = random_u32()?;
        let domains = self.inner.registry::<Domains>();
        let mut register = domains.0.lock();
        let number = register.number(random).ok_or(Error::OutOfMemory)?;
        let address = domain.address();
        // The queue holds its domain, so that the address in the register's entry stays unique.
        let (registered, domain) = (Arc::clone(&domains), domain.clone());
        let xrc = XrcMembership {
            number,
            cq: cq.clone(),
            forget: Box::new(move || {
                let _kept = &domain;
                registered.0.lock().queues.remove(&number);
            }),
        };
        let srq =
            SharedReceiveQueue::create_for(&self.inner, pd, (depth, max_sge), Some(xrc), None)?;
        let entry = Entry {
            queue: Arc::downgrade(&srq.inner),
            domain: address,
            pd,
        };
        register.queues.insert(number, entry);
        Ok(srq)
    }

    /// Creates the initiator of an extended reliable connection (`IBV_QPT_XRC_SEND`). The
    /// attributes of receives are ignored.
    ///
    /// # Errors
    /// The errors of [`create_qp`](Self::create_qp) and, with `addressable`, of
    /// [`create_addressable_qp`](Self::create_addressable_qp).
    pub fn create_xrc_initiator(
        &self,
        attributes: &QpAttributes,
        addressable: bool,
    ) -> Result<QueuePair> {
        let attributes = QpAttributes {
            recv_cq: attributes.send_cq.clone(),
            srq: None,
            max_recv_wr: 0,
            max_ird: 0,
            ..attributes.clone()
        };
        QueuePair::create_xrc(&self.inner, &attributes, None, addressable)
    }

    /// Creates the target of an extended reliable connection (`IBV_QPT_XRC_RECV`).
    ///
    /// # Errors
    /// The errors of [`create_xrc_initiator`](Self::create_xrc_initiator), and
    /// [`Error::InvalidArgument`] if the domain belongs to another device.
    pub fn create_xrc_target(
        &self,
        domain: &XrcDomain,
        attributes: XrcTargetAttributes,
    ) -> Result<QueuePair> {
        self.check(domain)?;
        let unused = domain.inner.unused.clone();
        let sizes = QpAttributes {
            // Used until a request names a queue. No protection domain has this number.
            pd: 0,
            send_cq: unused.clone(),
            recv_cq: unused,
            srq: None,
            unreliable: false,
            max_send_wr: 0,
            max_recv_wr: 0,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
            signal_all: false,
            max_ird: attributes.max_ird,
            max_ord: 0,
        };
        let target = Target {
            domain: domain.clone(),
            selected: Mutex::default(),
            delivered: Mutex::default(),
            drivers: Mutex::default(),
        };
        QueuePair::create_xrc(&self.inner, &sizes, Some(target), attributes.addressable)
    }

    fn check(&self, domain: &XrcDomain) -> Result<()> {
        match Arc::ptr_eq(&domain.inner.ctx, &self.inner) {
            true => Ok(()),
            false => Err(Error::InvalidArgument(
                "the domain belongs to another device",
            )),
        }
    }
}

/// Extended reliable connections.
impl QueuePair {
    /// Creates an end of an extended reliable connection: a target if `target` is given, else an
    /// initiator.
    pub(crate) fn create_xrc(
        ctx: &Arc<ContextInner>,
        a: &QpAttributes,
        target: Option<Target>,
        addressable: bool,
    ) -> Result<Self> {
        let end = match target {
            Some(_) => XrcEnd::Target,
            None => XrcEnd::Initiator,
        };
        let directory = addressable.then(|| ctx.directory()).transpose()?;
        let number = |taken: &dyn Fn(u32) -> bool| match &directory {
            Some(directory) => directory.reserve_number(taken),
            None => Ok(ctx.next_free_number(taken)),
        };
        let qp = Self::create_as(ctx, a, target.map(|target| Box::new(target) as _), number)?;
        qp.inner.state.lock().machine.set_xrc(end);
        Ok(qp)
    }

    /// Returns which end of an extended reliable connection the queue pair is; `None` for other
    /// queue pairs.
    pub fn xrc_end(&self) -> Option<XrcEnd> {
        self.inner.state.lock().machine.xrc_end()
    }

    /// Returns the domain of a target.
    pub fn xrc_domain(&self) -> Option<&XrcDomain> {
        Some(&Target::of(&self.inner)?.domain)
    }

    /// Posts requests as [`post_send`](Self::post_send) does. Each names a shared receive queue of
    /// the peer.
    ///
    /// # Errors
    /// The errors of [`post_send`](Self::post_send).
    pub fn post_send_xrc(&self, wrs: &[XrcSendWr<'_>]) -> Result<(), PostFailed> {
        self.post_list(wrs)
    }

    /// Posts requests as [`post_send_all`](Self::post_send_all) does. Each names a shared receive
    /// queue of the peer.
    ///
    /// # Errors
    /// The errors of [`post_send`](Self::post_send).
    pub fn post_send_all_xrc(&self, wrs: &[XrcSendWr<'_>]) -> Result<(), PostFailed> {
        self.post_whole_list(wrs)
    }
}

impl Register {
    fn number(&mut self, random: u32) -> Option<u32> {
        if self.last == 0 {
            // Start at a random number, so that requests with a number from an earlier process most
            // likely reach no queue.
            self.last = random & NUMBER_MASK;
        }
        self.last = next_number(self.last, |number| self.queues.contains_key(&number))?;
        Some(self.last)
    }
}

/// Returns the first free number after `last`. The last one tried is `last` itself.
fn next_number(last: u32, is_taken: impl Fn(u32) -> bool) -> Option<u32> {
    (1..=NUMBER_MASK + 1)
        .map(|step| (last + step) & NUMBER_MASK)
        .find(|number| *number != 0 && !is_taken(*number))
}

impl DomainInner {
    // Returns a handle, because handles share the value.
    #[expect(clippy::new_ret_no_self)]
    fn new(ctx: &Arc<ContextInner>, file: Option<File>) -> Result<XrcDomain> {
        let inner = Self {
            ctx: Arc::clone(ctx),
            _file: file,
            unused: CompletionQueue::create(ctx, 1, None)?,
        };
        Ok(XrcDomain {
            inner: Arc::new(inner),
        })
    }
}

impl XrcDomain {
    /// Returns `true` if both handles refer to the same domain.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    fn address(&self) -> usize {
        Arc::as_ptr(&self.inner) as usize
    }

    fn queue(&self, number: u32) -> Option<Arc<SrqInner>> {
        let domains = self.inner.ctx.registry::<Domains>();
        let register = domains.0.lock();
        let entry = register.queues.get(&number)?;
        match entry.domain == self.address() {
            true => entry.queue.upgrade(),
            false => None,
        }
    }

    /// Returns the protection domain of the domain's shared receive queue with the lowest number.
    fn default_pd(&self) -> Option<u32> {
        let domains = self.inner.ctx.registry::<Domains>();
        let register = domains.0.lock();
        let ours = register.queues.iter();
        let ours = ours.filter(|(_, entry)| entry.domain == self.address());
        ours.min_by_key(|(number, _)| **number)
            .map(|(_, entry)| entry.pd)
    }
}

/// The additional state of a queue pair that is a target.
pub(crate) struct Target {
    domain: XrcDomain,
    /// The queue that the last request has named, if it exists.
    selected: Mutex<Option<Arc<SrqInner>>>,
    /// Effects on the used queues, which are applied after all locks are released.
    delivered: Mutex<Delivered>,
    /// The completion queues that have received completions. Polling them drives the socket.
    drivers: Mutex<Vec<Weak<CqInner>>>,
}

impl XrcTarget for Target {
    fn select(&self, number: u32) -> Option<u32> {
        let mut selected = self.selected.lock();
        *selected = self.domain.queue(number);
        selected.as_ref().map(|queue| queue.pd)
    }

    fn take(&self, taken: &mut TakenRecv, effects: &mut Effects) -> bool {
        let Some(queue) = self.selected.lock().clone() else {
            return false;
        };
        let (got, limit_reached) = queue.take(taken);
        if limit_reached {
            self.delivered.lock().limits.push(queue);
            effects.due |= Due::XRC_DELIVERED;
        }
        got
    }

    fn wait(&self, qp: &Arc<QpInner>) -> bool {
        let queue = self.selected.lock().clone();
        queue.is_some_and(|queue| queue.wait(qp))
    }

    fn complete(&self, cqe: Cqe, effects: &mut Effects) {
        let queue = self.selected.lock().clone();
        // Without a queue, no receive was taken.
        let Some(cq) = queue.as_ref().and_then(|q| q.xrc.as_ref()).map(|q| &q.cq) else {
            return;
        };
        let mut delivered = self.delivered.lock();
        cq.inner
            .push(&mut cq.inner.ring.lock(), cqe, delivered.owed(cq));
        effects.due |= Due::XRC_DELIVERED;
    }

    fn raise_due(&self, qp: &Arc<QpInner>) -> Vec<CompletionQueue> {
        // The entries are removed one by one, so that the lists keep their memory.
        while let Some(queue) = self.next_limit() {
            queue.raise_limit_event();
        }
        let mut overflowed = Vec::new();
        while let Some((cq, owed)) = self.next_owed() {
            self.driven_by(qp, &cq);
            if cq.inner.raise_due(owed) {
                overflowed.push(cq);
            }
        }
        overflowed
    }

    fn default_pd(&self) -> u32 {
        self.domain.default_pd().unwrap_or_default()
    }

    fn forget(&self, qp: &Arc<QpInner>) {
        for cq in self.drivers.lock().drain(..) {
            if let Some(cq) = cq.upgrade() {
                cq.remove_member(qp);
            }
        }
        *self.selected.lock() = None;
    }
}

impl Target {
    /// Returns the additional state of a target; `None` for other queue pairs.
    fn of(qp: &QpInner) -> Option<&Self> {
        let target: &dyn Any = &**qp.xrc.as_ref()?;
        target.downcast_ref()
    }

    fn next_limit(&self) -> Option<Arc<SrqInner>> {
        self.delivered.lock().limits.pop()
    }

    fn next_owed(&self) -> Option<(CompletionQueue, Owed)> {
        self.delivered.lock().owed.pop()
    }

    /// Lets polls of this completion queue drive the queue pair.
    fn driven_by(&self, qp: &Arc<QpInner>, cq: &CompletionQueue) {
        let weak = Arc::downgrade(&cq.inner);
        let mut drivers = self.drivers.lock();
        if qp.is_destroyed() || drivers.iter().any(|d| d.ptr_eq(&weak)) {
            return;
        }
        drivers.retain(|d| d.strong_count() > 0);
        drivers.push(weak);
        cq.inner.attach(qp);
    }
}

/// The effects of a target on the queues that it uses.
#[derive(Default)]
struct Delivered {
    owed: Vec<(CompletionQueue, Owed)>,
    limits: Vec<Arc<SrqInner>>,
}

impl Delivered {
    fn owed(&mut self, cq: &CompletionQueue) -> &mut Owed {
        let index = match self.owed.iter().position(|(other, _)| other.is_same(cq)) {
            Some(index) => index,
            None => {
                self.owed.push((cq.clone(), Owed::default()));
                self.owed.len() - 1
            }
        };
        &mut self.owed[index].1
    }
}

impl std::fmt::Debug for XrcDomain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("XrcDomain").finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "xrc_tests.rs"]
mod tests;
