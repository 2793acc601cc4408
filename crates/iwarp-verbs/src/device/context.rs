//! Contexts: the objects of opened devices, how functions find them, and `ibv_close_device(3)`.

use super::handles::Handles;
use super::list::DeviceObject;
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Res, minus_one};
use crate::border::object::{self, Hasher};
use crate::border::wait;
use iwarp::runtime::{Context, ProcessLock};
use std::cell::UnsafeCell;
use std::collections::{HashMap, HashSet};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

/// An opened device. The public context is the last part, because programs' inline functions look in front of it.
#[repr(C)]
pub(crate) struct ContextObject {
    vctx: UnsafeCell<verbs_context>,
    pub(crate) raw: Context,
    pub(crate) device: &'static DeviceObject,
    pub(crate) handles: Arc<Handles>,
    /// Kept open for `ibv_import_device`; its inode identifies the context.
    cmd: OwnedFd,
    inode: (u64, u64),
    /// Made for the connection manager, which never closes it.
    shared: bool,
}

const BEHIND: usize = std::mem::offset_of!(verbs_context, context);

/// A device that can be imported, and how many contexts of it are open.
struct Importable {
    open: usize,
    raw: Context,
    handles: Arc<Handles>,
}

/// Contexts by the inode of their `cmd_fd`, so that a duplicate of the descriptor finds them.
static BY_INODE: ProcessLock<HashMap<(u64, u64), Importable, Hasher>> = ProcessLock::new(
    "verbs::device::BY_INODE",
    HashMap::with_hasher(Hasher::new()),
);

impl ContextObject {
    pub(crate) const fn c(&self) -> *mut ibv_context {
        // The public context lies inside the cell, as its last field.
        // SAFETY: `BEHIND` is the offset of a field of the object.
        unsafe { self.vctx.get().cast::<u8>().add(BEHIND).cast() }
    }

    /// Returns `true` if it belongs to the connection manager.
    pub(crate) const fn is_shared(&self) -> bool {
        self.shared
    }
}

/// Checks that objects of two contexts can work together: the contexts are one, or one of them was imported from the other.
///
/// # Errors
/// EINVAL, as from the kernel, which knows the objects of each opened device by numbers of its own.
///
/// # Safety
/// Both are contexts whose objects live.
pub(crate) unsafe fn check_same(one: *mut ibv_context, other: *mut ibv_context) -> Res<()> {
    match one == other || context(one).raw.is_same(&context(other).raw) {
        true => Ok(()),
        false => Err(EINVAL),
    }
}

/// Our part of a context.
///
/// # Safety
/// `context` is an open context.
#[inline]
pub(crate) unsafe fn context<'a>(context: *mut ibv_context) -> &'a ContextObject {
    &*context.cast::<u8>().sub(BEHIND).cast::<ContextObject>()
}

/// As [`context`], for a pointer that may be invalid.
pub(crate) unsafe fn checked_context<'a>(c: *mut ibv_context) -> Res<&'a ContextObject> {
    if is_open(c) {
        Ok(context(c))
    } else {
        Err(EINVAL)
    }
}

static OPEN: ProcessLock<HashSet<usize, Hasher>> =
    ProcessLock::new("verbs::device::OPEN", HashSet::with_hasher(Hasher::new()));

fn is_open(c: *mut ibv_context) -> bool {
    OPEN.lock().contains(&(c as usize))
}

fn inode_of(fd: c_int) -> Res<(u64, u64)> {
    // SAFETY: `stat` is valid for a `struct stat`.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        if libc::fstat(fd, &raw mut stat) != 0 {
            return Err(std::io::Error::last_os_error().into());
        }
        Ok((stat.st_dev, stat.st_ino))
    }
}

/// Returns what the contexts share whose descriptor `cmd` is a duplicate of.
///
/// # Errors
/// EINVAL if no such context is open.
pub(crate) fn shared_with(cmd: c_int) -> Res<(Context, Arc<Handles>)> {
    let inode = inode_of(cmd)?;
    match BY_INODE.lock().get(&inode) {
        Some(known) => Ok((known.raw.clone(), Arc::clone(&known.handles))),
        None => Err(EINVAL),
    }
}

/// Returns a descriptor whose inode no other context has.
pub(crate) fn new_cmd_fd() -> Res<OwnedFd> {
    // SAFETY: a constant name; the descriptor is new and ours.
    unsafe {
        let mut fd = libc::memfd_create(c"iwarp-context".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            // Some sandboxes refuse that. None that allows TCP refuses a socket.
            fd = libc::socket(libc::AF_UNIX, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        }
        if fd < 0 {
            return Err(std::io::Error::last_os_error().into());
        }
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// What a context is made of.
pub(crate) struct Parts {
    /// Its functions; the fields that say something about the device are filled in here.
    pub(crate) functions: verbs_context,
    pub(crate) raw: Context,
    pub(crate) device: &'static DeviceObject,
    pub(crate) handles: Arc<Handles>,
    pub(crate) cmd: OwnedFd,
    /// It belongs to the connection manager.
    pub(crate) shared: bool,
    /// It has a descriptor for asynchronous events.
    pub(crate) with_events: bool,
}

/// Makes a context object, which is open from now on.
pub(crate) fn create(parts: Parts) -> Res<*mut ibv_context> {
    let Parts {
        functions: mut vctx,
        raw,
        device,
        handles,
        cmd,
        shared,
        with_events,
    } = parts;
    let inode = inode_of(cmd.as_raw_fd())?;
    let async_fd = if with_events {
        let fd = raw.async_fd().as_raw_fd();
        wait::make_blocking(fd);
        fd
    } else {
        -1
    };
    vctx.sz = size_of::<verbs_context>();
    let c = &mut vctx.context;
    c.device = device.c();
    c.cmd_fd = cmd.as_raw_fd();
    c.async_fd = async_fd;
    c.num_comp_vectors = 1;
    c.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    // Only this value makes the inline functions look in front of the context.
    c.abi_compat = usize::MAX as *mut c_void;
    let object = Box::leak(Box::new(ContextObject {
        vctx: UnsafeCell::new(vctx),
        raw,
        device,
        handles,
        cmd,
        inode,
        shared,
    }));
    let c = object.c();
    OPEN.lock().insert(c as usize);
    let mut by_inode = BY_INODE.lock();
    by_inode
        .entry(inode)
        .or_insert_with(|| Importable {
            open: 0,
            raw: object.raw.clone(),
            handles: Arc::clone(&object.handles),
        })
        .open += 1;
    Ok(c)
}

pub(crate) unsafe extern "C" fn ibv_close_device(c: *mut ibv_context) -> c_int {
    minus_one(|| {
        let object = checked_context(c)?;
        if object.shared {
            return Ok(0);
        }
        OPEN.lock().remove(&(c as usize));
        let mut by_inode = BY_INODE.lock();
        if let Some(entry) = by_inode.get_mut(&object.inode) {
            entry.open -= 1;
            if entry.open == 0 {
                by_inode.remove(&object.inode);
            }
        }
        drop(by_inode);
        // Objects of a closed context can still be destroyed, and they refer to it. Without any it is freed.
        if object::any_of(c) {
            tracing::debug!("a context was closed before its objects were destroyed");
        } else {
            drop(Box::from_raw(
                c.cast::<u8>().sub(BEHIND).cast::<ContextObject>(),
            ));
        }
        Ok(0)
    })
}
