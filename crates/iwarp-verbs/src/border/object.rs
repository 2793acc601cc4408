//! The common part of all C objects: a public structure that programs read, our data behind it,
//! and an entry in the register of living objects.
//!
//! The public structure is the first field, so both parts have the same address. Slow functions
//! check that the address is registered, so destroying an object twice returns EINVAL instead of
//! crashing. Fast functions trust the program, as hardware drivers do.

use super::guard::{EINVAL, Res};
use crate::abi::verbs::ibv_context;
use iwarp::runtime::ProcessLock;
use parking_lot::{Condvar, Mutex};
use std::cell::UnsafeCell;
use std::collections::HashSet;
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::ops::Deref;
use std::sync::atomic::{AtomicU32, Ordering};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    Pd,
    Td,
    Mr,
    Buf,
    Mw,
    Dm,
    CompCntr,
    Ah,
    Channel,
    Cq,
    Srq,
    Xrcd,
    Qp,
    UdQp,
    CmChannel,
    CmId,
    CmEvent,
}

/// A C object of public type `C` with our data `T`.
#[repr(C)]
pub(crate) struct Object<C, T> {
    c: UnsafeCell<C>,
    own: T,
}

impl<C, T> Deref for Object<C, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.own
    }
}

impl<C, T> Object<C, T> {
    /// Returns the public part. Programs read and write it at any time, so it is never borrowed.
    pub(crate) const fn c(&self) -> *mut C {
        self.c.get()
    }
}

/// A hasher that can be created in a constant.
pub(crate) type Hasher = BuildHasherDefault<DefaultHasher>;

static LIVING: ProcessLock<HashSet<(Kind, usize), Hasher>> =
    ProcessLock::new("verbs::object::LIVING", HashSet::with_hasher(Hasher::new()));

/// Allocates and registers an object. Its address does not change.
pub(crate) fn create<C, T>(kind: Kind, c: C, own: T) -> *mut C {
    let object = Box::into_raw(Box::new(Object {
        c: UnsafeCell::new(c),
        own,
    }));
    LIVING.lock().insert((kind, object as usize));
    object.cast()
}

/// Looks up the object behind a pointer from the program. Fails with EINVAL if there is no such
/// living object.
///
/// # Safety
/// `kind` belongs to `C` and `T`, and the object is not destroyed while the result is in use.
pub(crate) unsafe fn find<'a, C, T>(kind: Kind, p: *mut C) -> Res<&'a Object<C, T>> {
    if !LIVING.lock().contains(&(kind, p as usize)) {
        return Err(EINVAL);
    }
    Ok(trusted(p))
}

/// Returns the object behind a pointer without looking it up.
///
/// # Safety
/// `p` is the address of a living object that [`create`] allocated with these types.
#[inline]
pub(crate) unsafe fn trusted<'a, C, T>(p: *mut C) -> &'a Object<C, T> {
    &*p.cast::<Object<C, T>>()
}

/// Unregisters an object, so that later calls do not find it. The caller then calls [`free`]. Fails
/// with EINVAL if there is no such living object, for example because it was destroyed already.
pub(crate) fn retire<C>(kind: Kind, p: *mut C) -> Res<()> {
    if LIVING.lock().remove(&(kind, p as usize)) {
        Ok(())
    } else {
        Err(EINVAL)
    }
}

/// Frees an object.
///
/// # Safety
/// As for [`find`]. The object was retired and is not in use.
pub(crate) unsafe fn free<C, T>(p: *mut C) {
    drop(Box::from_raw(p.cast::<Object<C, T>>()));
}

/// Counts the objects that use an object. Destroying it fails with EBUSY while there are users.
#[derive(Debug, Default)]
pub(crate) struct Users(AtomicU32);

impl Users {
    pub(crate) fn add(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn remove(&self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }

    pub(crate) fn any(&self) -> bool {
        self.0.load(Ordering::Acquire) != 0
    }
}

/// Counts events that the program has not acknowledged. Destroying the object waits for them.
#[derive(Debug, Default)]
pub(crate) struct Unacknowledged {
    count: Mutex<u64>,
    zero: Condvar,
}

impl Unacknowledged {
    pub(crate) fn delivered(&self) {
        *self.count.lock() += 1;
    }

    pub(crate) fn acknowledged(&self, n: u64) {
        let mut count = self.count.lock();
        *count = count.saturating_sub(n);
        if *count == 0 {
            self.zero.notify_all();
        }
    }

    pub(crate) fn wait(&self) {
        let mut count = self.count.lock();
        while *count != 0 {
            self.zero.wait(&mut count);
        }
    }
}

/// Kinds whose public structure begins with a pointer to its context.
const WITH_CONTEXT: [Kind; 13] = [
    Kind::Pd,
    Kind::Td,
    Kind::Mr,
    Kind::Buf,
    Kind::Mw,
    Kind::Dm,
    Kind::CompCntr,
    Kind::Channel,
    Kind::Cq,
    Kind::Srq,
    Kind::Qp,
    Kind::UdQp,
    Kind::Xrcd,
];

/// Returns `true` if the context has objects that were not destroyed.
pub(crate) fn context_has_objects(context: *mut ibv_context) -> bool {
    LIVING.lock().iter().any(|(kind, p)| {
        WITH_CONTEXT.contains(kind)
            // SAFETY: the object is alive; its first word points to its context and never changes.
            && unsafe { *(*p as *const *mut ibv_context) } == context
    })
}
