//! The entry point, the exit and the panic handler, which a C library would provide otherwise.

use core::arch::{asm, global_asm};
use core::panic::PanicInfo;

// The kernel jumps here with the stack aligned to 16 octets. A function expects this alignment
// before the `call` that enters it.
global_asm!(
    ".globl _start",
    "_start:",
    "xor ebp, ebp",
    "and rsp, -16",
    "call {start}",
    "ud2",
    start = sym start,
);

extern "C" fn start() -> ! {
    exit(crate::run())
}

fn exit(status: i32) -> ! {
    // SAFETY: system call 60 is exit; it takes the status and does not return.
    unsafe {
        asm!("syscall", in("rax") 60, in("rdi") status, options(noreturn, nostack));
    }
}

#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    exit(101)
}

/// The prebuilt `alloc` was compiled for unwinding and refers to this symbol. It is never called,
/// because nothing here unwinds.
// SAFETY: no other function of this program has this name.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

/// The prebuilt `alloc` refers to this symbol as well.
// SAFETY: no other function of this program has this name.
#[unsafe(no_mangle)]
extern "C" fn _Unwind_Resume() -> ! {
    exit(102)
}
