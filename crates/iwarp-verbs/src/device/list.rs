//! Devices: `ibv_get_device_list(3)`, and queries of a device that is not open.

use super::face;
use crate::abi::verbs::*;
use crate::border::guard::{EINVAL, Errno, Res, minus_one, pointer, value};
use crate::process::unused;
use iwarp::runtime::ProcessLock;
use iwarp::{Config, Device, Face};
use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int};
use std::ptr::null_mut;

/// `enum ibv_node_type` and `enum ibv_transport_type`.
const NODE_CA: c_int = 1;
const NODE_RNIC: c_int = 4;
const TRANSPORT_IB: c_int = 0;
const TRANSPORT_IWARP: c_int = 1;

/// A device. Provider libraries recognize their devices by the words behind the public part; here,
/// these words are zero.
#[repr(C)]
pub(crate) struct DeviceObject {
    c: UnsafeCell<ibv_device>,
    not_a_provider: [usize; 8],
    /// The device as it was when first listed. [`Self::current`] returns its current addresses.
    pub(crate) device: Device,
    pub(crate) face: Face,
}

// SAFETY: the public part is written once, before the object is shared; the rest never changes.
unsafe impl Sync for DeviceObject {}

impl DeviceObject {
    pub(crate) const fn c(&self) -> *mut ibv_device {
        self.c.get()
    }

    pub(crate) fn current(&self) -> Res<Device> {
        Ok(self.device.current()?.ok_or(iwarp::Error::NoDevice)?)
    }

    /// Returns `true` if this object represents the interface of `device`, whatever its addresses.
    fn represents(&self, device: &Device, face: Face) -> bool {
        let identity = |d: &Device| (d.guid, d.index, d.name.clone(), d.interface.clone());
        self.face == face && identity(&self.device) == identity(device)
    }
}

/// Devices are never freed, because programs keep pointers to them.
static DEVICES: ProcessLock<Vec<&'static DeviceObject>> =
    ProcessLock::new("verbs::device::DEVICES", Vec::new());

/// Returns the object of a device. There is only one, because programs may compare addresses.
pub(crate) fn device_object(device: Device, face: Face) -> &'static DeviceObject {
    let mut devices = DEVICES.lock();
    if let Some(known) = devices.iter().find(|d| d.represents(&device, face)) {
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
    fill_c_string(&mut c.name, &device.name);
    fill_c_string(&mut c.dev_name, &format!("uverbs{}", device.index));
    fill_c_string(
        &mut c.dev_path,
        &format!("/sys/class/infiniband_verbs/uverbs{}", device.index),
    );
    fill_c_string(
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

/// Copies text into a C array, truncated if necessary, with a terminating zero.
pub(crate) fn fill_c_string(to: &mut [c_char], text: &str) {
    let max_len = to.len() - 1;
    for (to, from) in to.iter_mut().zip(text.bytes().take(max_len)) {
        *to = from as c_char;
    }
}

pub(crate) fn devices() -> Res<Vec<&'static DeviceObject>> {
    let face = Config::from_env().face;
    face::hint_ignored_nics(face);
    let object = |device| device_object(device, face);
    Ok(Device::list()?.into_iter().map(object).collect())
}

pub(crate) unsafe extern "C" fn ibv_get_device_list(num: *mut c_int) -> *mut *mut ibv_device {
    pointer(|| {
        let devices = devices()?;
        unused::record_listing();
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

pub(crate) unsafe fn device_of<'a>(device: *mut ibv_device) -> Res<&'a DeviceObject> {
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
    unused::record_guid_read();
    value(0, || device_of(device).map_or(0, |d| d.device.guid.to_be()))
}
