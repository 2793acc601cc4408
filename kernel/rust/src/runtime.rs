//! The C functions that the engine calls: allocator, panic handler, CRC, and completions.
//!
//! Invariant: the C side implements them as `kernel/engine.h` says. The engine allocates memory
//! only when it creates an object, never for a work request or an FPDU. `cargo xtask test --only
//! kernel` checks that in the compiled object.

use core::alloc::{GlobalAlloc, Layout};
use core::ffi::{c_int, c_void};
use core::ptr::NonNull;

use iwarp_rnic::memory::{Crc32c, Pages};
use iwarp_rnic::qp::{Direction, Host};
use iwarp_rnic::receive_queue::{ReceiveQueue, TakenRecv};
use iwarp_rnic::{AllocError, Cqe, RecvWr, Sge};

unsafe extern "C" {
    fn iwarp_alloc(size: usize, align: usize, zeroed: bool) -> *mut u8;
    fn iwarp_free(ptr: *mut u8);
    fn iwarp_crc32c(crc: u32, octets: *const u8, len: usize) -> u32;
    fn iwarp_take_receive(owner: *mut c_void, receive: *mut Receive) -> bool;
    fn iwarp_complete(owner: *mut c_void, receive: c_int, completion: *const Completion);
    #[cfg(feature = "runtime")]
    fn iwarp_panic(text: *const u8, text_len: usize, file: *const u8, file_len: usize, line: u32);
}

struct KernelAllocator;

// SAFETY: `iwarp_alloc` returns null or unused memory of this size and alignment, which stays
// allocated until `iwarp_free`.
unsafe impl GlobalAlloc for KernelAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the function accepts any size, and any power of two as alignment.
        unsafe { iwarp_alloc(layout.size(), layout.align(), false) }
    }

    /// Lets the kernel zero the memory: it may be configured to zero every allocation anyway.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the function accepts any size, and any power of two as alignment.
        unsafe { iwarp_alloc(layout.size(), layout.align(), true) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, _: Layout) {
        // SAFETY: the caller passes memory that `alloc` has returned.
        unsafe { iwarp_free(ptr) }
    }
}

#[cfg(feature = "runtime")]
#[global_allocator]
static ALLOCATOR: KernelAllocator = KernelAllocator;

/// Reports the location without formatting, and stops this thread.
#[cfg(feature = "runtime")]
#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    let text = info.message().as_str().unwrap_or_default();
    let (file, line) = info
        .location()
        .map_or(("", 0), |location| (location.file(), location.line()));
    // SAFETY: both texts are valid for the call. `ud2` raises the same exception as the kernel's
    // BUG(), and does not return.
    unsafe {
        iwarp_panic(text.as_ptr(), text.len(), file.as_ptr(), file.len(), line);
        core::arch::asm!("ud2", options(noreturn))
    }
}

/// The kernel's CRC32C.
// SAFETY: the kernel's function only reads the given memory. The compiler does not see its body, so
// it cannot assume that the memory stays unchanged.
pub(crate) const CRC32C: Crc32c = unsafe { Crc32c::new(crc32c).with_shared(shared_crc32c) };

fn crc32c(crc: u32, octets: &[u8]) -> u32 {
    // SAFETY: the slice is readable for the call.
    unsafe { iwarp_crc32c(crc, octets.as_ptr(), octets.len()) }
}

/// Continues a CRC over memory that programs may change concurrently.
///
/// # Safety
/// `len` bytes at `ptr` are readable for the call.
unsafe fn shared_crc32c(crc: u32, ptr: *const u8, len: usize) -> Option<u32> {
    // SAFETY: guaranteed by the caller. The pages of the memory are pinned.
    Some(unsafe { iwarp_crc32c(crc, ptr, len) })
}

/// Allocates memory, and constructs a value in it without a copy on the stack. Returns null if
/// there is no memory; `construct` is dropped in that case.
#[inline]
pub(crate) fn new_object<T>(construct: impl FnOnce() -> T) -> *mut T {
    let layout = Layout::new::<T>();
    // SAFETY: `T` is always a structure whose size is not zero.
    let ptr = unsafe { KernelAllocator.alloc(layout) }.cast::<T>();
    if let Some(ptr) = NonNull::new(ptr) {
        // SAFETY: the pointer is to new memory with the layout of `T`.
        unsafe { ptr.write(construct()) };
    }
    ptr
}

/// Drops a value that [`new_object`] has created, and frees its memory. Null is allowed.
///
/// # Safety
/// `ptr` is null or came from [`new_object`], and is not used any more.
pub(crate) unsafe fn free_object<T>(ptr: *mut T) {
    if ptr.is_null() {
        return;
    }
    // SAFETY: the caller guarantees that the value is valid and no longer used.
    unsafe {
        ptr.drop_in_place();
        KernelAllocator.dealloc(ptr.cast(), Layout::new::<T>());
    }
}

// The engine's opcodes have the same numbers as `enum rk_opcode` of engine.h.
const _: () = {
    use iwarp_rnic::WcOpcode as Op;
    let mut order: &[Op] = &[
        Op::Send,
        Op::Write,
        Op::Read,
        Op::CmpSwap,
        Op::FetchAdd,
        Op::Bind,
        Op::LocalInvalidate,
        Op::FastRegister,
        Op::AtomicWrite,
        Op::Recv,
        Op::RecvWriteImm,
    ];
    let mut number = 0;
    while let [first, rest @ ..] = order {
        assert!(*first as usize == number);
        number += 1;
        order = rest;
    }
};

/// A work completion: `struct rk_completion`.
#[repr(C)]
struct Completion {
    wr_id: u64,
    status: u32,
    opcode: u32,
    byte_len: u32,
    imm_or_stag: u32,
    flags: u32,
    vendor_err: u32,
}

/// Maximum number of scatter/gather elements of a receive: `RK_RECEIVE_SGES`.
pub(crate) const RECEIVE_SGES: usize = 6;

/// A scatter/gather element: `struct rk_sge`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Element {
    addr: u64,
    len: u32,
    lkey: u32,
}

/// A receive that a program has posted: `struct rk_receive`.
#[repr(C)]
struct Receive {
    wr_id: u64,
    num_sge: u32,
    sges: [Element; RECEIVE_SGES],
}

/// The C object that owns a queue pair.
#[derive(Debug)]
pub(crate) struct Owner {
    ptr: *mut c_void,
    /// Holds a receive from `iwarp_take_receive` until the engine takes it.
    taken: ReceiveQueue,
}

impl Owner {
    pub(crate) fn new(ptr: *mut c_void) -> Result<Self, AllocError> {
        let taken = ReceiveQueue::new(1, RECEIVE_SGES as u32)?;
        Ok(Self { ptr, taken })
    }
}

impl Host for Owner {
    type Memory = Pages;

    fn complete(&mut self, direction: Direction, cqe: Cqe) {
        let completion = Completion {
            wr_id: cqe.wr_id,
            status: cqe.status as u32,
            opcode: cqe.opcode as u32,
            byte_len: cqe.byte_len,
            imm_or_stag: cqe.imm_or_stag,
            flags: cqe.flags.bits(),
            vendor_err: cqe.vendor_err,
        };
        let receive = c_int::from(direction == Direction::Recv);
        // SAFETY: the owner outlives the queue pair; C copies the completion before it returns.
        unsafe { iwarp_complete(self.ptr, receive, &raw const completion) }
    }

    fn take_shared_receive(&mut self, taken: &mut TakenRecv) -> bool {
        let mut receive = Receive {
            wr_id: 0,
            num_sge: 0,
            sges: [Element::default(); RECEIVE_SGES],
        };
        // SAFETY: the owner outlives the queue pair; C fills in the structure before it returns.
        if !unsafe { iwarp_take_receive(self.ptr, &raw mut receive) } {
            return false;
        }
        let sges = receive
            .sges
            .map(|Element { addr, len, lkey }| Sge { addr, len, lkey });
        let sges = sges.get(..receive.num_sge as usize).unwrap_or_default();
        let request = RecvWr {
            wr_id: receive.wr_id,
            sges,
        };
        self.taken.post(&request).is_ok() && self.taken.take(taken)
    }
}
