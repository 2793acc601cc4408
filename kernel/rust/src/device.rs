//! The memory table of a device.
//!
//! Invariant: pointers come from C under the contract of `kernel/engine.h`: a device was returned
//! by `rk_device_new`, and a call that takes it mutably excludes all others.

use core::ffi::c_int;

use iwarp_rnic::Access;
use iwarp_rnic::memory::{MemoryTable, NewSlotsSize, Pages, Room, Stag};

use crate::error::{ENOMEM, errno_or_zero};
use crate::runtime::{free_object, new_object};

/// Binary logarithm of the page size, 4096 bytes.
const PAGE_SHIFT: u32 = 12;

/// The state that the queue pairs of a device share.
#[derive(Debug)]
pub struct Device {
    pub(crate) table: MemoryTable<Pages>,
}

/// Creates a device. Returns null if there is no memory.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_device_new() -> *mut Device {
    new_object(|| Device {
        table: MemoryTable::new(),
    })
}

/// Frees a device that has no queue pairs any more.
///
/// # Safety
/// `device` is null or came from [`rk_device_new`].
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rk_device_free(device: *mut Device) {
    // SAFETY: guaranteed by the caller.
    unsafe { free_object(device) }
}

/// Slots that are allocated without the device's lock, and then attached to its memory table.
#[derive(Debug)]
pub struct Slots {
    size: Option<NewSlotsSize>,
    room: Option<Room<Pages>>,
}

/// Creates an empty [`Slots`]. Returns null if there is no memory.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_slots_new() -> *mut Slots {
    new_object(|| Slots {
        size: None,
        room: None,
    })
}

/// Frees a [`Slots`], with the slots that were not attached.
///
/// # Safety
/// `slots` is null or came from [`rk_slots_new`].
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rk_slots_free(slots: *mut Slots) {
    // SAFETY: guaranteed by the caller.
    unsafe { free_object(slots) }
}

/// Returns `true` if the next registration needs more slots, and records how many.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_slots_lacking(device: &Device, slots: &mut Slots) -> bool {
    slots.size = device.table.missing_slots();
    slots.size.is_some()
}

/// Allocates the recorded number of slots. Returns 0 or an error number.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_slots_make(slots: &mut Slots) -> c_int {
    match slots.size.take().map(NewSlotsSize::make) {
        Some(Ok(room)) => slots.room = Some(room),
        Some(Err(_)) => return ENOMEM,
        None => {}
    }
    0
}

/// Attaches the slots to the table. If another caller has added enough meanwhile, they stay in
/// `slots`.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_slots_attach(device: &mut Device, slots: &mut Slots) {
    slots.room = slots.room.take().and_then(|room| device.table.attach(room));
}

/// Registers `len` bytes of directly mapped memory. Returns the STag, or 0 on failure.
///
/// # Safety
/// The memory stays mapped until `rk_deregister` has returned.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rk_register(
    device: &mut Device,
    addr: u64,
    len: u64,
    pd: u32,
    access: u32,
    random: u32,
) -> u32 {
    let Some(access) = Access::from_bits(access) else {
        return 0;
    };
    // SAFETY: the caller guarantees that the memory stays valid.
    let Some(range) = (unsafe { Pages::together(addr, len) }) else {
        return 0;
    };
    let stag = device.table.register(range, addr, pd, access, random);
    stag.map_or(0, |stag| stag.0)
}

/// Registers `len` bytes, beginning at byte `first` of the first page. Their tagged offsets start
/// at `iova`. Returns the STag, or 0 on failure.
///
/// # Safety
/// `list` contains the address of each page. The list and the pages stay valid until
/// `rk_deregister` has returned.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rk_register_pages(
    device: &mut Device,
    list: *const u64,
    first: u64,
    len: u64,
    iova: u64,
    pd: u32,
    access: u32,
    random: u32,
) -> u32 {
    let Some(access) = Access::from_bits(access) else {
        return 0;
    };
    // SAFETY: the caller guarantees that the list and the pages stay valid.
    let Some(pages) = (unsafe { Pages::new(list, PAGE_SHIFT, first, len) }) else {
        return 0;
    };
    let stag = device.table.register(pages, iova, pd, access, random);
    stag.map_or(0, |stag| stag.0)
}

/// Allocates an STag for later fast registrations of the pages in `list`, which has room for
/// `most_pages` addresses. Returns 0 on failure.
///
/// # Safety
/// The list stays valid until `rk_deregister` has returned.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rk_allocate_fast(
    device: &mut Device,
    list: *const u64,
    most_pages: u32,
    pd: u32,
    random: u32,
) -> u32 {
    // SAFETY: the caller guarantees that the list stays valid.
    let Some(pages) = (unsafe { Pages::listed(list, most_pages) }) else {
        return 0;
    };
    let stag = device.table.allocate_fast(pages, pd, random);
    stag.map_or(0, |stag| stag.0)
}

/// Returns `true` if memory that a queue pair waits for has become unused since the last call.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_take_unused(device: &Device) -> bool {
    device.table.take_unused()
}

/// Ends a registration. Returns 0 or an error number.
// SAFETY: the prefix `rk_` belongs to this crate.
#[unsafe(no_mangle)]
pub extern "C" fn rk_deregister(device: &mut Device, stag: u32) -> c_int {
    errno_or_zero(device.table.deregister(Stag(stag)))
}
