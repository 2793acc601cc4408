//! The guarded accesses on aarch64.
//!
//! Each is a leaf function in the section `iwarp_guarded`: it calls nothing, has no stack frame,
//! and changes only registers that a C function may change. So, if an instruction faults, the
//! thread can continue in [`failed`]. A function that succeeds returns 1 in `w0`, and [`failed`]
//! returns 0.
//!
//! Invariant: the functions access only the given bytes.

use std::arch::naked_asm;

#[repr(C)]
pub(super) struct Exchanged {
    /// 1, or 0 if the word could not be accessed.
    pub(super) done: u64,
    /// The previous value of the word.
    pub(super) found: u64,
}

/// Returns from any of these functions with 0. The thread continues here after a fault.
#[unsafe(naked)]
#[unsafe(link_section = "iwarp_guarded")]
pub(super) extern "C" fn failed() {
    naked_asm!("mov x0, #0", "mov x1, #0", "ret")
}

#[repr(C)]
pub(super) struct Bounds {
    pub(super) start: usize,
    pub(super) end: usize,
}

/// Returns the bounds of the section. The linker defines both symbols; they are hidden, so that no
/// library exports them.
#[unsafe(naked)]
pub(super) extern "C" fn bounds() -> Bounds {
    naked_asm!(
        ".hidden __start_iwarp_guarded",
        ".hidden __stop_iwarp_guarded",
        "adrp x0, __start_iwarp_guarded",
        "add x0, x0, :lo12:__start_iwarp_guarded",
        "adrp x1, __stop_iwarp_guarded",
        "add x1, x1, :lo12:__stop_iwarp_guarded",
        "ret",
    )
}

/// Copies `len` octets. Returns 1, or 0 if some of them could not be accessed.
#[unsafe(naked)]
#[unsafe(link_section = "iwarp_guarded")]
pub(super) unsafe extern "C" fn copy(to: *mut u8, from: *const u8, len: usize) -> u32 {
    naked_asm!(
        "subs x2, x2, #64",
        "b.lo 3f",
        "2:",
        "ldp q0, q1, [x1]",
        "ldp q2, q3, [x1, #32]",
        "stp q0, q1, [x0]",
        "stp q2, q3, [x0, #32]",
        "add x1, x1, #64",
        "add x0, x0, #64",
        "subs x2, x2, #64",
        "b.hs 2b",
        "3:",
        // The bits of `w2` are those of the remaining length, which is `x2` + 64.
        "tbz w2, #5, 4f",
        "ldp q0, q1, [x1], #32",
        "stp q0, q1, [x0], #32",
        "4:",
        "tbz w2, #4, 4f",
        "ldr q0, [x1], #16",
        "str q0, [x0], #16",
        "4:",
        "tbz w2, #3, 4f",
        "ldr x3, [x1], #8",
        "str x3, [x0], #8",
        "4:",
        "tbz w2, #2, 4f",
        "ldr w3, [x1], #4",
        "str w3, [x0], #4",
        "4:",
        "tbz w2, #1, 4f",
        "ldrh w3, [x1], #2",
        "strh w3, [x0], #2",
        "4:",
        "tbz w2, #0, 4f",
        "ldrb w3, [x1]",
        "strb w3, [x0]",
        "4:",
        "mov w0, #1",
        "ret",
    )
}

/// Stores a byte after all previous stores.
#[unsafe(naked)]
#[unsafe(link_section = "iwarp_guarded")]
pub(super) unsafe extern "C" fn store_octet(at: *mut u8, octet: u8) -> u32 {
    naked_asm!("stlrb w1, [x0]", "mov w0, #1", "ret")
}

/// Stores a word at an aligned address after all previous stores.
#[unsafe(naked)]
#[unsafe(link_section = "iwarp_guarded")]
pub(super) unsafe extern "C" fn store_word(at: *mut u64, word: u64) -> u32 {
    naked_asm!("stlr x1, [x0]", "mov w0, #1", "ret")
}

/// Replaces a word by `new` if it is `old`.
#[unsafe(naked)]
#[unsafe(link_section = "iwarp_guarded")]
pub(super) unsafe extern "C" fn exchange(at: *mut u64, old: u64, new: u64) -> Exchanged {
    naked_asm!(
        "mov x4, x1",
        "2:",
        "ldaxr x1, [x0]",
        "cmp x1, x4",
        "b.ne 3f",
        "stlxr w3, x2, [x0]",
        "cbnz w3, 2b",
        "3:",
        "mov x0, #1",
        "ret",
    )
}
