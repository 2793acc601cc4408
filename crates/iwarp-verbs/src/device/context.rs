//! Devices and contexts: `ibv_get_device_list(3)`, `ibv_open_device(3)`, and the tables of functions in a context.

use crate::abi::verbs::*;
use crate::guard::{EINVAL, Errno, Res, UNSUPPORTED, code, minus_one, pointer, set_errno, value};
use crate::object::Hasher;
use crate::object::{self, Kind};
use crate::{cq, mr, mw, pd, post, qp_create, query, srq, srq_ops, unused, xrc};
use iwarp::runtime::{Context, ProcessLock};
use iwarp::{Config, Device, Face};
use parking_lot::Mutex;
use std::cell::UnsafeCell;
use std::collections::{HashMap, HashSet};
use std::ffi::{c_char, c_int, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::Arc;

/// `enum ibv_node_type` and `enum ibv_transport_type`.
const NODE_CA: c_int = 1;
const NODE_RNIC: c_int = 4;
const TRANSPORT_IB: c_int = 0;
const TRANSPORT_IWARP: c_int = 1;

/// A device as programs see it. Providers' libraries look at the words behind the public part to see if it is theirs.
#[repr(C)]
pub(crate) struct DeviceObject {
    c: UnsafeCell<ibv_device>,
    not_a_provider: [usize; 8],
    /// The device as it was when it was first listed. Its addresses may have changed since: see [`Self::current`].
    pub(crate) device: Device,
    pub(crate) face: Face,
}

// SAFETY: the public part is written once, before the object is shared; the rest is never written.
unsafe impl Sync for DeviceObject {}

impl DeviceObject {
    pub(crate) const fn c(&self) -> *mut ibv_device {
        self.c.get()
    }

    /// Returns the device as it is now.
    pub(crate) fn current(&self) -> Res<Device> {
        Ok(self.device.current()?.ok_or(iwarp::Error::NoDevice)?)
    }

    /// Returns `true` if it is the object for this device: for the same interface, whatever addresses that has now.
    fn is_for(&self, device: &Device, face: Face) -> bool {
        let identity = |d: &Device| (d.guid, d.index, d.name.clone(), d.interface.clone());
        self.face == face && identity(&self.device) == identity(device)
    }
}

/// Devices are never freed: programs keep pointers to them.
static DEVICES: ProcessLock<Vec<&'static DeviceObject>> =
    ProcessLock::new("verbs::device::DEVICES", Vec::new());

/// Returns the object for a device. Each device has one, which programs may compare by address.
fn device_object(device: Device, face: Face) -> &'static DeviceObject {
    let mut devices = DEVICES.lock();
    if let Some(known) = devices.iter().find(|d| d.is_for(&device, face)) {
        return known;
    }
    let (node_type, transport_type) = match face {
        Face::Rnic => (NODE_RNIC, TRANSPORT_IWARP),
        Face::Roce => (NODE_CA, TRANSPORT_IB),
    };
    let mut c = ibv_device {
        _ops: [0; 2],
        node_type,
        transport_type,
        name: [0; 64],
        dev_name: [0; 64],
        dev_path: [0; 256],
        ibdev_path: [0; 256],
    };
    fill(&mut c.name, &device.name);
    fill(&mut c.dev_name, &format!("uverbs{}", device.index));
    fill(
        &mut c.dev_path,
        &format!("/sys/class/infiniband_verbs/uverbs{}", device.index),
    );
    fill(
        &mut c.ibdev_path,
        &format!("/sys/class/infiniband/{}", device.name),
    );
    let object = Box::leak(Box::new(DeviceObject {
        c: UnsafeCell::new(c),
        not_a_provider: [0; 8],
        device,
        face,
    }));
    debug_assert_eq!(object.not_a_provider, [0; 8]);
    devices.push(object);
    object
}

/// Copies text into a C array, cut if necessary, with a zero at its end.
pub(crate) fn fill(to: &mut [c_char], text: &str) {
    let room = to.len() - 1;
    for (to, from) in to.iter_mut().zip(text.bytes().take(room)) {
        *to = from as c_char;
    }
}

/// All devices of this host.
pub(crate) fn devices() -> Res<Vec<&'static DeviceObject>> {
    let face = Config::from_env().face;
    crate::face::listed(face);
    let object = |device| device_object(device, face);
    Ok(Device::list()?.into_iter().map(object).collect())
}

pub(crate) unsafe extern "C" fn ibv_get_device_list(num: *mut c_int) -> *mut *mut ibv_device {
    pointer(|| {
        let devices = devices()?;
        unused::listed();
        let list = libc::calloc(devices.len() + 1, size_of::<usize>()).cast::<*mut ibv_device>();
        if list.is_null() {
            return Err(Errno(libc::ENOMEM));
        }
        for (i, device) in devices.iter().enumerate() {
            *list.add(i) = device.c();
        }
        if !num.is_null() {
            *num = devices.len() as c_int;
        }
        Ok(list)
    })
}

pub(crate) unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    libc::free(list.cast());
}

unsafe fn device_of<'a>(device: *mut ibv_device) -> Res<&'a DeviceObject> {
    if device.is_null() {
        return Err(EINVAL);
    }
    Ok(&*device.cast::<DeviceObject>())
}

pub(crate) unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    if device.is_null() {
        return null_mut();
    }
    (&raw const (*device).name).cast()
}

pub(crate) unsafe extern "C" fn ibv_get_device_index(device: *mut ibv_device) -> c_int {
    minus_one(|| Ok(device_of(device)?.device.index as c_int))
}

pub(crate) unsafe extern "C" fn ibv_get_device_guid(device: *mut ibv_device) -> u64 {
    unused::guid_read();
    value(0, || device_of(device).map_or(0, |d| d.device.guid.to_be()))
}

/// Objects that an imported context finds by number.
#[derive(Debug, Default)]
pub(crate) struct Handles {
    pub(crate) pds: Mutex<HashMap<u32, u32>>,
    pub(crate) mrs: Mutex<HashMap<u32, mr::Handle>>,
    pub(crate) dms: Mutex<HashMap<u32, Arc<mr::DeviceMemory>>>,
}

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

/// Returns a descriptor whose inode no other context has.
fn new_cmd_fd() -> Res<OwnedFd> {
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

/// Makes a context object.
fn make(
    raw: Context,
    device: &'static DeviceObject,
    handles: Arc<Handles>,
    cmd: OwnedFd,
    shared: bool,
    with_events: bool,
) -> Res<*mut ibv_context> {
    let inode = inode_of(cmd.as_raw_fd())?;
    let async_fd = if with_events {
        let fd = raw.async_fd().as_raw_fd();
        crate::wait::make_blocking(fd);
        fd
    } else {
        -1
    };
    // SAFETY: all fields are integers, raw pointers or optional functions, for which zero is a value.
    let mut vctx: verbs_context = unsafe { std::mem::zeroed() };
    vctx.sz = size_of::<verbs_context>();
    vctx.query_port = Some(query::query_port);
    vctx.query_device_ex = Some(query::query_device_ex);
    vctx.query_rt_values = Some(query::query_rt_values);
    vctx.reg_dm_mr = Some(mr::reg_dm_mr);
    vctx.alloc_dm = Some(mr::alloc_dm);
    vctx.free_dm = Some(mr::free_dm);
    vctx.alloc_parent_domain = Some(pd::alloc_parent_domain);
    vctx.alloc_td = Some(pd::alloc_td);
    vctx.dealloc_td = Some(pd::dealloc_td);
    vctx.create_cq_ex = Some(cq::create_cq_ex);
    vctx.create_qp_ex = Some(qp_create::create_qp_ex);
    vctx.open_qp = Some(xrc::open_qp);
    vctx.open_xrcd = Some(xrc::open_xrcd);
    vctx.close_xrcd = Some(xrc::close_xrcd);
    vctx.get_srq_num = Some(xrc::get_srq_num);
    vctx.create_srq_ex = Some(srq::create_srq_ex);
    vctx.post_srq_ops = Some(srq_ops::post_srq_ops);
    vctx.advise_mr = Some(mr::advise_mr);
    vctx.alloc_null_mr = Some(mr::alloc_null_mr);
    let c = &mut vctx.context;
    c.device = device.c();
    c.cmd_fd = cmd.as_raw_fd();
    c.async_fd = async_fd;
    c.num_comp_vectors = 1;
    c.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    // Only this value makes the inline functions look in front of the context.
    c.abi_compat = usize::MAX as *mut c_void;
    c.ops._compat_query_device = Some(query::ibv_query_device);
    c.ops._compat_query_port = Some(query::ibv_query_port);
    c.ops.alloc_mw = Some(mw::alloc_mw);
    c.ops.bind_mw = Some(mw::bind_mw);
    c.ops.dealloc_mw = Some(mw::dealloc_mw);
    c.ops.poll_cq = Some(post::poll_cq);
    c.ops.req_notify_cq = Some(cq::req_notify_cq);
    c.ops.post_srq_recv = Some(post::post_srq_recv);
    c.ops.post_send = Some(post::post_send);
    c.ops.post_recv = Some(post::post_recv);
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

pub(crate) unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    unused::used();
    pointer(|| {
        let device = device_of(device)?;
        let mut config = Config::from_env();
        config.face = device.face;
        let raw = Context::open(&device.current()?, config)?;
        make(raw, device, Arc::default(), new_cmd_fd()?, false, true)
    })
}

/// The context that programs see for a context of the connection manager.
pub(crate) fn shared_context(raw: &Context) -> Res<*mut ibv_context> {
    static SHARED: ProcessLock<Vec<usize>> = ProcessLock::new("verbs::device::SHARED", Vec::new());
    let mut shared = SHARED.lock();
    for c in shared.iter() {
        // SAFETY: shared contexts are never closed.
        let object = unsafe { context(*c as *mut ibv_context) };
        if object.raw.is_same(raw) {
            return Ok(*c as *mut ibv_context);
        }
    }
    let device = device_object(raw.device().clone(), raw.config().face);
    let c = make(
        raw.clone(),
        device,
        Arc::default(),
        new_cmd_fd()?,
        true,
        true,
    )?;
    shared.push(c as usize);
    Ok(c)
}

pub(crate) unsafe extern "C" fn ibv_import_device(cmd_fd: c_int) -> *mut ibv_context {
    unused::used();
    pointer(|| {
        let inode = inode_of(cmd_fd)?;
        let (raw, handles) = match BY_INODE.lock().get(&inode) {
            Some(known) => (known.raw.clone(), Arc::clone(&known.handles)),
            None => return Err(EINVAL),
        };
        let device = device_object(raw.device().clone(), raw.config().face);
        // On success the descriptor is ours (ibv_import_device(3)).
        make(
            raw,
            device,
            handles,
            OwnedFd::from_raw_fd(cmd_fd),
            false,
            false,
        )
    })
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

/// Marks an object as belonging to a context, for [`ibv_close_device`].
pub(crate) const KINDS_WITH_CONTEXT: [Kind; 13] = [
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

/// For functions that this device does not have: NULL and EOPNOTSUPP.
pub(crate) unsafe extern "C" fn unsupported_pointer() -> *mut c_void {
    set_errno(UNSUPPORTED);
    null_mut()
}

/// For functions that this device does not have: EOPNOTSUPP.
pub(crate) unsafe extern "C" fn unsupported_code() -> c_int {
    code(|| Err(UNSUPPORTED))
}

/// For functions that this device does not have: -1 and EOPNOTSUPP.
pub(crate) unsafe extern "C" fn unsupported_minus_one() -> c_int {
    minus_one(|| Err(UNSUPPORTED))
}
