//! The guarded accesses on x86-64.
//!
//! Each is a leaf function in the section `iwarp_guarded`: it calls nothing, pushes nothing, and
//! changes only registers that a C function may change. So, if an instruction faults, the thread
//! can continue in [`failed`]. A function that succeeds returns 1 in `eax`, and [`failed`] returns
//! 0.
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
    naked_asm!("xor eax, eax", "xor edx, edx", "ret")
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
        "lea rax, [rip + __start_iwarp_guarded]",
        "lea rdx, [rip + __stop_iwarp_guarded]",
        "ret",
    )
}

/// Longer copies are faster with [`copy_avx`].
pub(super) const SHORT: usize = 128;

/// The part of both copy functions that copies up to [`SHORT`] bytes, by pairs of overlapping loads
/// and stores. All loads come first. Longer copies continue after it.
macro_rules! copy_short {
    () => {
        "
        mov eax, 1
        cmp rdx, 16
        jb 4f
        cmp rdx, 32
        ja 2f
        movups xmm0, [rsi]
        movups xmm1, [rsi + rdx - 16]
        movups [rdi], xmm0
        movups [rdi + rdx - 16], xmm1
        ret
    2:
        cmp rdx, 128
        ja 9f
        movups xmm0, [rsi]
        movups xmm1, [rsi + 16]
        movups xmm2, [rsi + rdx - 32]
        movups xmm3, [rsi + rdx - 16]
        cmp rdx, 64
        jbe 3f
        movups xmm4, [rsi + 32]
        movups xmm5, [rsi + 48]
        movups xmm6, [rsi + rdx - 64]
        movups xmm7, [rsi + rdx - 48]
        movups [rdi + 32], xmm4
        movups [rdi + 48], xmm5
        movups [rdi + rdx - 64], xmm6
        movups [rdi + rdx - 48], xmm7
    3:
        movups [rdi], xmm0
        movups [rdi + 16], xmm1
        movups [rdi + rdx - 32], xmm2
        movups [rdi + rdx - 16], xmm3
        ret
    4:
        cmp edx, 8
        jb 5f
        mov rcx, [rsi]
        mov r8, [rsi + rdx - 8]
        mov [rdi], rcx
        mov [rdi + rdx - 8], r8
        ret
    5:
        cmp edx, 4
        jb 6f
        mov ecx, [rsi]
        mov r8d, [rsi + rdx - 4]
        mov [rdi], ecx
        mov [rdi + rdx - 4], r8d
        ret
    6:
        test edx, edx
        jz 8f
        movzx ecx, byte ptr [rsi]
        cmp edx, 1
        je 7f
        movzx r8d, word ptr [rsi + rdx - 2]
        mov [rdi + rdx - 2], r8w
    7:
        mov [rdi], cl
    8:
        ret
    9:
        "
    };
}

/// Copies `len` bytes with 16-byte registers. Returns 1, or 0 if some of them could not be
/// accessed.
#[unsafe(naked)]
#[unsafe(link_section = "iwarp_guarded")]
pub(super) unsafe extern "C" fn copy(to: *mut u8, from: *const u8, len: usize) -> u32 {
    naked_asm!(
        copy_short!(),
        // Copy the first 16 bytes, then continue at the next aligned address of `to`.
        "movups xmm0, [rsi]",
        "movups [rdi], xmm0",
        "mov ecx, edi",
        "neg ecx",
        "and ecx, 15",
        "add rdi, rcx",
        "add rsi, rcx",
        "sub rdx, rcx",
        "2:",
        "movups xmm0, [rsi]",
        "movups xmm1, [rsi + 16]",
        "movups xmm2, [rsi + 32]",
        "movups xmm3, [rsi + 48]",
        "movaps [rdi], xmm0",
        "movaps [rdi + 16], xmm1",
        "movaps [rdi + 32], xmm2",
        "movaps [rdi + 48], xmm3",
        "add rsi, 64",
        "add rdi, 64",
        "sub rdx, 64",
        "cmp rdx, 64",
        "ja 2b",
        // Copy the last 64 bytes. Some of them may be copied twice.
        "movups xmm0, [rsi + rdx - 64]",
        "movups xmm1, [rsi + rdx - 48]",
        "movups xmm2, [rsi + rdx - 32]",
        "movups xmm3, [rsi + rdx - 16]",
        "movups [rdi + rdx - 64], xmm0",
        "movups [rdi + rdx - 48], xmm1",
        "movups [rdi + rdx - 32], xmm2",
        "movups [rdi + rdx - 16], xmm3",
        "ret",
    )
}

/// Like [`copy`], with 32-byte registers. The CPU must support AVX.
#[unsafe(naked)]
#[unsafe(link_section = "iwarp_guarded")]
pub(super) unsafe extern "C" fn copy_avx(to: *mut u8, from: *const u8, len: usize) -> u32 {
    naked_asm!(
        copy_short!(),
        "vmovups ymm0, [rsi]",
        "vmovups [rdi], ymm0",
        "mov ecx, edi",
        "neg ecx",
        "and ecx, 31",
        "add rdi, rcx",
        "add rsi, rcx",
        "sub rdx, rcx",
        "cmp rdx, 128",
        "jbe 3f",
        "2:",
        "vmovups ymm0, [rsi]",
        "vmovups ymm1, [rsi + 32]",
        "vmovups ymm2, [rsi + 64]",
        "vmovups ymm3, [rsi + 96]",
        "vmovaps [rdi], ymm0",
        "vmovaps [rdi + 32], ymm1",
        "vmovaps [rdi + 64], ymm2",
        "vmovaps [rdi + 96], ymm3",
        "sub rsi, -128",
        "sub rdi, -128",
        "add rdx, -128",
        "cmp rdx, 128",
        "ja 2b",
        "3:",
        "vmovups ymm0, [rsi + rdx - 128]",
        "vmovups ymm1, [rsi + rdx - 96]",
        "vmovups ymm2, [rsi + rdx - 64]",
        "vmovups ymm3, [rsi + rdx - 32]",
        "vmovups [rdi + rdx - 128], ymm0",
        "vmovups [rdi + rdx - 96], ymm1",
        "vmovups [rdi + rdx - 64], ymm2",
        "vmovups [rdi + rdx - 32], ymm3",
        "vzeroupper",
        "ret",
    )
}

/// Stores a byte after all previous stores: on x86, stores become visible in order.
#[unsafe(naked)]
#[unsafe(link_section = "iwarp_guarded")]
pub(super) unsafe extern "C" fn store_octet(at: *mut u8, octet: u8) -> u32 {
    naked_asm!("mov [rdi], sil", "mov eax, 1", "ret")
}

/// Stores a word at an aligned address after all previous stores.
#[unsafe(naked)]
#[unsafe(link_section = "iwarp_guarded")]
pub(super) unsafe extern "C" fn store_word(at: *mut u64, word: u64) -> u32 {
    naked_asm!("mov [rdi], rsi", "mov eax, 1", "ret")
}

/// Replaces a word by `new` if it is `old`.
#[unsafe(naked)]
#[unsafe(link_section = "iwarp_guarded")]
pub(super) unsafe extern "C" fn exchange(at: *mut u64, old: u64, new: u64) -> Exchanged {
    naked_asm!(
        "mov rax, rsi",
        "lock cmpxchg [rdi], rdx",
        "mov rdx, rax",
        "mov eax, 1",
        "ret",
    )
}
