//! The C functions that the engine calls: allocator, panic handler, CRC, and completions.
//!
//! Invariant: the C side implements them as `kernel/engine.h` says. Only objects are allocated
//! here, never anything for a work request or an FPDU; `cargo xtask test --only kernel` checks that
//! in the compiled object.

use core::alloc::{GlobalAlloc, Layout};
use core::ffi::{c_int, c_void};
use core::ptr::NonNull;

use iwarp_rnic::memory::{Crc32c, Pages};
use iwarp_rnic::qp::{Direction, Host};
use iwarp_rnic::receive_queue::{ReceiveQueue, TakenRecv};
use iwarp_rnic::{AllocError, Cqe, RecvWr, Sge};

unsafe extern "C" {
    fn iwarp_alloc(size: usize, align: usize, zeroed: bool) -> *mut u8;
    fn iwarp_free(at: *mut u8);
    fn iwarp_crc32c(crc: u32, octets: *const u8, len: usize) -> u32;
    fn iwarp_take_receive(owner: *mut c_void, receive: *mut Receive) -> bool;
    fn iwarp_complete(owner: *mut c_void, receive: c_int, completion: *const Completion);
    #[cfg(feature = "runtime")]
    fn iwarp_panic(text: *const u8, text_len: usize, file: *const u8, file_len: usize, line: u32);
}

struct Kernel;

// SAFETY: `iwarp_alloc` returns null or unused memory of this size and alignment, which stays
// allocated until `iwarp_free`.
unsafe impl GlobalAlloc for Kernel {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the function takes any size and any power of two as alignment.
        unsafe { iwarp_alloc(layout.size(), layout.align(), false) }
    }

    /// The kernel may be configured to zero memory anyway, so it must not be zeroed twice.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        unsafe { iwarp_alloc(layout.size(), layout.align(), true) }
    }

    unsafe fn dealloc(&self, at: *mut u8, _: Layout) {
        // SAFETY: the caller passes memory that `alloc` has returned.
        unsafe { iwarp_free(at) }
    }
}

#[cfg(feature = "runtime")]
#[global_allocator]
static ALLOCATOR: Kernel = Kernel;

/// Reports the location without formatting, and stops this thread.
#[cfg(feature = "runtime")]
#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    let text = info.message().as_str().unwrap_or_default();
    let (file, line) = info
        .location()
        .map_or(("", 0), |place| (place.file(), place.line()));
    // SAFETY: both texts are valid for the call. `ud2` raises the same exception as the kernel's
    // BUG(), and does not return.
    unsafe {
        iwarp_panic(text.as_ptr(), text.len(), file.as_ptr(), file.len(), line);
        core::arch::asm!("ud2", options(noreturn))
    }
}

/// The kernel's CRC32C.
// SAFETY: the kernel's function reads the given memory, and the compiler cannot see into it.
pub(crate) const CRC32C: Crc32c = unsafe { Crc32c::new(crc32c).with_shared(shared_crc32c) };

fn crc32c(crc: u32, octets: &[u8]) -> u32 {
    // SAFETY: the slice is readable for the call.
    unsafe { iwarp_crc32c(crc, octets.as_ptr(), octets.len()) }
}

/// Continues a CRC over memory that programs may change concurrently.
///
/// # Safety
/// `len` octets at `from` are readable until it returns.
unsafe fn shared_crc32c(crc: u32, from: *const u8, len: usize) -> Option<u32> {
    // SAFETY: guaranteed by the caller. The pages of the memory are pinned.
    Some(unsafe { iwarp_crc32c(crc, from, len) })
}

/// Creates a value in its own allocation, so that it needs no stack. Returns null if there is no
/// memory; `make` is dropped then.
#[inline]
pub(crate) fn place<T>(make: impl FnOnce() -> T) -> *mut T {
    let layout = Layout::new::<T>();
    // SAFETY: callers place structures, whose size is not zero.
    let at = unsafe { Kernel.alloc(layout) }.cast::<T>();
    if let Some(at) = NonNull::new(at) {
        // SAFETY: new memory with the layout of `T`.
        unsafe { at.write(make()) };
    }
    at
}

/// Drops a value that [`place`] has created, and frees its memory. Null is allowed.
///
/// # Safety
/// `at` is null or came from [`place`], and is not used any more.
pub(crate) unsafe fn remove<T>(at: *mut T) {
    if at.is_null() {
        return;
    }
    // SAFETY: the caller guarantees that the value is valid and no longer used.
    unsafe {
        at.drop_in_place();
        Kernel.dealloc(at.cast(), Layout::new::<T>());
    }
}

// The engine numbers its operations like `enum rk_opcode` of engine.h, which lists all of them.
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

/// The most elements of a receive.
pub(crate) const RECEIVE_SGES: usize = 6;

/// An element as C has it: `struct rk_sge`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Element {
    addr: u64,
    len: u32,
    lkey: u32,
}

/// A receive of a program: `struct rk_receive`.
#[repr(C)]
struct Receive {
    wr_id: u64,
    num_sge: u32,
    sges: [Element; RECEIVE_SGES],
}

/// The C object that owns a queue pair.
#[derive(Debug)]
pub(crate) struct Owner {
    at: *mut c_void,
    /// Stores a receive of C while the engine takes it.
    taken: ReceiveQueue,
}

impl Owner {
    pub(crate) fn new(at: *mut c_void) -> Result<Self, AllocError> {
        let taken = ReceiveQueue::new(1, RECEIVE_SGES as u32)?;
        Ok(Self { at, taken })
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
        unsafe { iwarp_complete(self.at, receive, &raw const completion) }
    }

    fn take_shared_receive(&mut self, taken: &mut TakenRecv) -> bool {
        let mut receive = Receive {
            wr_id: 0,
            num_sge: 0,
            sges: [Element::default(); RECEIVE_SGES],
        };
        // SAFETY: the owner outlives the queue pair; C fills in the structure before it returns.
        if !unsafe { iwarp_take_receive(self.at, &raw mut receive) } {
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
