//! Contexts: opened devices, how functions find them, and `ibv_close_device(3)`.

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

/// An opened device. The public context is last, because inline functions in the verbs headers read
/// fields in front of it.
#[repr(C)]
pub(crate) struct ContextObject {
    vctx: UnsafeCell<verbs_context>,
    pub(crate) raw: Context,
    pub(crate) device: &'static DeviceObject,
    pub(crate) handles: Arc<Handles>,
    /// Kept open for `ibv_import_device`; its inode identifies the context.
    cmd: OwnedFd,
    inode: (u64, u64),
    /// The connection manager's context, which is never closed.
    shared: bool,
}

const PUBLIC_OFFSET: usize = std::mem::offset_of!(verbs_context, context);

struct Importable {
    open_count: usize,
    raw: Context,
    handles: Arc<Handles>,
}

/// Contexts by the inode of their `cmd_fd`, so that a duplicated descriptor finds them.
static BY_INODE: ProcessLock<HashMap<(u64, u64), Importable, Hasher>> = ProcessLock::new(
    "verbs::device::BY_INODE",
    HashMap::with_hasher(Hasher::new()),
);

impl ContextObject {
    pub(crate) const fn c(&self) -> *mut ibv_context {
        // SAFETY: `PUBLIC_OFFSET` is the offset of the public context, the cell's last field.
        unsafe { self.vctx.get().cast::<u8>().add(PUBLIC_OFFSET).cast() }
    }

    pub(crate) const fn is_shared(&self) -> bool {
        self.shared
    }
}

/// Fails with EINVAL unless objects of the two contexts can be used together: the contexts are the
/// same, or one was imported from the other. In the kernel, object numbers belong to an opened
/// device, too.
///
/// # Safety
/// Both contexts are open, or have objects that were not destroyed.
pub(crate) unsafe fn check_same(one: *mut ibv_context, other: *mut ibv_context) -> Res<()> {
    match one == other || context(one).raw.is_same(&context(other).raw) {
        true => Ok(()),
        false => Err(EINVAL),
    }
}

/// Returns the library's part of a context.
///
/// # Safety
/// `context` is an open context.
#[inline]
pub(crate) unsafe fn context<'a>(context: *mut ibv_context) -> &'a ContextObject {
    &*context
        .cast::<u8>()
        .sub(PUBLIC_OFFSET)
        .cast::<ContextObject>()
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
    // SAFETY: `stat` is a valid place for the result.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        if libc::fstat(fd, &raw mut stat) != 0 {
            return Err(std::io::Error::last_os_error().into());
        }
        Ok((stat.st_dev, stat.st_ino))
    }
}

/// Returns the shared parts of the context whose `cmd_fd` is `cmd` or was duplicated to it. Fails
/// with EINVAL if no such context is open.
pub(crate) fn shared_parts(cmd: c_int) -> Res<(Context, Arc<Handles>)> {
    let inode = inode_of(cmd)?;
    match BY_INODE.lock().get(&inode) {
        Some(known) => Ok((known.raw.clone(), Arc::clone(&known.handles))),
        None => Err(EINVAL),
    }
}

/// Returns a descriptor whose inode is unique to the context.
pub(crate) fn new_cmd_fd() -> Res<OwnedFd> {
    // SAFETY: a constant name; the new descriptor is owned here.
    unsafe {
        let mut fd = libc::memfd_create(c"iwarp-context".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            // Some sandboxes forbid memfd_create. Sandboxes that allow TCP also allow sockets.
            fd = libc::socket(libc::AF_UNIX, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        }
        if fd < 0 {
            return Err(std::io::Error::last_os_error().into());
        }
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

pub(crate) struct Parts {
    /// The function table; [`create`] fills in the other fields.
    pub(crate) functions: verbs_context,
    pub(crate) raw: Context,
    pub(crate) device: &'static DeviceObject,
    pub(crate) handles: Arc<Handles>,
    pub(crate) cmd: OwnedFd,
    pub(crate) shared: bool,
    pub(crate) with_events: bool,
}

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
    // This value makes the headers' inline functions read the fields in front of the context.
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
            open_count: 0,
            raw: object.raw.clone(),
            handles: Arc::clone(&object.handles),
        })
        .open_count += 1;
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
            entry.open_count -= 1;
            if entry.open_count == 0 {
                by_inode.remove(&object.inode);
            }
        }
        drop(by_inode);
        // Remaining objects refer to the context, and may be destroyed later.
        if object::context_has_objects(c) {
            tracing::debug!("a context was closed before its objects were destroyed");
        } else {
            drop(Box::from_raw(
                c.cast::<u8>().sub(PUBLIC_OFFSET).cast::<ContextObject>(),
            ));
        }
        Ok(0)
    })
}
