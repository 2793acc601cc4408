//! CRC32C by x86-64 instructions, also of memory that programs, peers and the kernel may change
//! concurrently.
//!
//! Reading such memory in Rust would be a data race, so assembly reads it, without a copy. Long
//! inputs are folded with carry-less multiplication: each step leaves 64 bytes that have the same
//! CRC as all bytes folded into them. The CRC32C instruction processes these, and the bytes after
//! the last step.
//!
//! A program may unmap registered memory, although it must not. The functions are therefore guarded
//! accesses (`guarded`), which report that they could not read the memory.
//!
//! Invariant: the memory is registered or mapped, and instructions are used only after CPU support
//! was checked.

use super::by_instruction;
use std::arch::naked_asm;
use std::ptr::null_mut;

/// The polynomial of CRC32C with its bits reversed: bit 31 belongs to x⁰.
const POLYNOMIAL: u32 = 0x82F6_3B78;

/// Returns x to the power of `n`, modulo the polynomial, with its bits reversed.
const fn power_of_x(n: u32) -> u32 {
    let mut power = 1 << 31;
    let mut i = 0;
    while i < n {
        power = (power >> 1) ^ if power & 1 == 1 { POLYNOMIAL } else { 0 };
        i += 1;
    }
    power
}

/// Returns the two factors that advance 128 bits by `octets`: one for the first eight bytes, one
/// for the last eight. The product of two bit-reversed numbers is shifted by one bit, which the
/// shift here compensates.
const fn factors(octets: u32) -> [u64; 2] {
    let bits = 8 * octets;
    [
        (power_of_x(bits + 32) as u64) << 1,
        (power_of_x(bits - 32) as u64) << 1,
    ]
}

/// Bytes per step of the folding functions.
const STEP: usize = 256;
/// Bytes to which the folding functions reduce their input.
const REST: usize = 64;

/// Returns `true` if this processor has the instructions that [`crc32c_shared`] needs.
#[inline]
pub(super) fn is_supported() -> bool {
    std::arch::is_x86_feature_detected!("sse4.2")
        && std::arch::is_x86_feature_detected!("pclmulqdq")
}

#[inline]
fn has_avx512() -> bool {
    std::arch::is_x86_feature_detected!("avx512f")
        && std::arch::is_x86_feature_detected!("vpclmulqdq")
}

/// Continues the CRC32C `crc` over `len` bytes at `from`. Returns `None` if some of them could not
/// be read.
///
/// # Safety
/// Until the call returns, the bytes are either readable or unmapped, and nothing else is mapped in
/// their place. [`is_supported`] has returned `true`.
pub(super) unsafe fn crc32c_shared(crc: u32, from: *const u8, len: usize) -> Option<u32> {
    let to = null_mut();
    // SAFETY: the steps and the bytes after them are within `len`, and CPU support was checked.
    // These functions do not copy, so `to` is not used.
    unsafe {
        let crc = reduce(crc, len / STEP, |state, steps, rest| match has_avx512() {
            true => fold_wide(state, from, to, steps, rest),
            false => fold(state, from, to, steps, rest),
        })?;
        finished(step_by_step(
            crc,
            from.wrapping_add(len / STEP * STEP),
            to,
            len % STEP,
        ))
    }
}

/// Copies `len` bytes from `from` to `to`, and continues the CRC32C `crc` over them. Each byte is
/// read only once, so the CRC always matches the copy. Returns `None` if some bytes could not be
/// read.
///
/// # Safety
/// As for [`crc32c_shared`]. `len` bytes are writable at `to`, and the two ranges do not overlap.
pub(super) unsafe fn crc32c_copying(
    crc: u32,
    from: *const u8,
    to: *mut u8,
    len: usize,
) -> Option<u32> {
    let done = len / STEP * STEP;
    // SAFETY: as above, for both ranges.
    unsafe {
        let crc = reduce(crc, len / STEP, |state, steps, rest| match has_avx512() {
            true => copy_and_fold_wide(state, from, to, steps, rest),
            false => copy_and_fold(state, from, to, steps, rest),
        })?;
        finished(copy_step_by_step(
            crc,
            from.wrapping_add(done),
            to.wrapping_add(done),
            len % STEP,
        ))
    }
}

/// Continues a CRC over `steps` steps. `fold` gets the state and the number of steps, reduces their
/// bytes to [`REST`] bytes, and returns 0 if it could not read them.
///
/// # Safety
/// [`is_supported`] has returned `true`.
#[inline(always)]
unsafe fn reduce(
    crc: u32,
    steps: usize,
    fold: impl FnOnce(u32, usize, &mut [u8; REST]) -> u32,
) -> Option<u32> {
    if steps == 0 {
        return Some(crc);
    }
    let mut rest = [0; REST];
    if fold(!crc, steps, &mut rest) == 0 {
        return None;
    }
    // SAFETY: CPU support was checked.
    Some(unsafe { by_instruction(!0, &rest) })
}

/// Returns the CRC in a result of [`step_by_step`], or `None` if it failed.
#[inline(always)]
const fn finished(result: u64) -> Option<u32> {
    match result {
        0 => None,
        _ => Some(result as u32),
    }
}

// The functions below are guarded accesses (`guarded`): leaf functions in the section
// `iwarp_guarded` that change only registers that a C function may change. If memory is unmapped,
// they return 0. Their arguments are in `edi` (the CRC or its state), `rsi` (`from`), `rdx` (`to`),
// `rcx` (length or number of steps) and `r8` (`rest`).

/// An instruction that loads a register from an offset of `from`. With the argument `copy`, also an
/// instruction that stores the register at the same offset of `to`.
macro_rules! load {
    ($mov:literal, $register:literal, $at:literal) => {
        concat!($mov, " ", $register, ", [rsi", $at, "]")
    };
    ($mov:literal, $register:literal, $at:literal, copy) => {
        concat!(
            load!($mov, $register, $at),
            "\n ",
            $mov,
            " [rdx",
            $at,
            "], ",
            $register
        )
    };
}

/// Defines a function that continues a CRC by the CRC32C instruction. With `copy`, the function
/// also copies the octets.
macro_rules! define_steps {
    ($name:ident $(, $copy:ident)?) => {
        /// Continues a CRC by the CRC32C instruction. Returns the CRC with bit 32 set, or 0 if an
        /// octet could not be read.
        ///
        /// # Safety
        /// As for [`crc32c_shared`], or for [`crc32c_copying`] if the function copies.
        #[unsafe(naked)]
        #[unsafe(link_section = "iwarp_guarded")]
        unsafe extern "C" fn $name(crc: u32, from: *const u8, to: *mut u8, len: usize) -> u64 {
            naked_asm!(
                "mov eax, edi",
                "not eax",
                "jmp 3f",
                "2:",
                load!("mov", "r8", "" $(, $copy)?),
                "crc32 rax, r8",
                "add rsi, 8",
                "add rdx, 8",
                "3:",
                "sub rcx, 8",
                "jae 2b",
                "add rcx, 8",
                "jz 5f",
                "4:",
                load!("mov", "r8b", "" $(, $copy)?),
                "crc32 eax, r8b",
                "inc rsi",
                "inc rdx",
                "dec rcx",
                "jnz 4b",
                "5:",
                "not eax",
                "bts rax, 32",
                "ret",
            )
        }
    };
}

define_steps!(step_by_step);
define_steps!(copy_step_by_step, copy);

static FACTORS_WIDE: [[u64; 2]; 2] = [factors(256), factors(64)];
static FACTORS: [[u64; 2]; 2] = [factors(128), factors(64)];

/// Defines a function that folds with four registers of 64 octets. With `copy`, the function also
/// copies the octets.
macro_rules! define_fold_wide {
    ($name:ident $(, $copy:ident)?) => {
        /// Folds `steps` times [`STEP`] octets into [`REST`] octets, with four registers of 64
        /// octets. Returns 1, or 0 if an octet could not be read.
        ///
        /// # Safety
        /// `steps` is not zero. The octets at `from` are as [`crc32c_shared`] requires. If the
        /// function copies, as many are writable at `to`. The CPU supports AVX-512F and VPCLMULQDQ.
        #[unsafe(naked)]
        #[unsafe(link_section = "iwarp_guarded")]
        unsafe extern "C" fn $name(
            state: u32,
            from: *const u8,
            to: *mut u8,
            steps: usize,
            rest: &mut [u8; REST],
        ) -> u32 {
            // Code that uses only registers 16 to 31 needs no `vzeroupper`.
            naked_asm!(
                "lea rax, [rip + {factors}]",
                "vbroadcasti32x4 zmm20, xmmword ptr [rax]",
                "vmovd xmm21, edi",
                load!("vmovdqu64", "zmm16", "" $(, $copy)?),
                load!("vmovdqu64", "zmm17", " + 64" $(, $copy)?),
                load!("vmovdqu64", "zmm18", " + 128" $(, $copy)?),
                load!("vmovdqu64", "zmm19", " + 192" $(, $copy)?),
                "vpxorq zmm16, zmm16, zmm21",
                "jmp 3f",
                "2:",
                "add rsi, 256",
                "add rdx, 256",
                "vpclmulqdq zmm21, zmm16, zmm20, 0x00",
                "vpclmulqdq zmm22, zmm17, zmm20, 0x00",
                "vpclmulqdq zmm23, zmm18, zmm20, 0x00",
                "vpclmulqdq zmm24, zmm19, zmm20, 0x00",
                load!("vmovdqu64", "zmm25", "" $(, $copy)?),
                load!("vmovdqu64", "zmm26", " + 64" $(, $copy)?),
                load!("vmovdqu64", "zmm27", " + 128" $(, $copy)?),
                load!("vmovdqu64", "zmm28", " + 192" $(, $copy)?),
                "vpclmulqdq zmm16, zmm16, zmm20, 0x11",
                "vpclmulqdq zmm17, zmm17, zmm20, 0x11",
                "vpclmulqdq zmm18, zmm18, zmm20, 0x11",
                "vpclmulqdq zmm19, zmm19, zmm20, 0x11",
                "vpternlogq zmm16, zmm21, zmm25, 0x96",
                "vpternlogq zmm17, zmm22, zmm26, 0x96",
                "vpternlogq zmm18, zmm23, zmm27, 0x96",
                "vpternlogq zmm19, zmm24, zmm28, 0x96",
                "3:",
                "dec rcx",
                "jnz 2b",
                "vbroadcasti32x4 zmm20, xmmword ptr [rax + 16]",
                "vpclmulqdq zmm21, zmm16, zmm20, 0x00",
                "vpclmulqdq zmm16, zmm16, zmm20, 0x11",
                "vpternlogq zmm17, zmm16, zmm21, 0x96",
                "vpclmulqdq zmm21, zmm17, zmm20, 0x00",
                "vpclmulqdq zmm17, zmm17, zmm20, 0x11",
                "vpternlogq zmm18, zmm17, zmm21, 0x96",
                "vpclmulqdq zmm21, zmm18, zmm20, 0x00",
                "vpclmulqdq zmm18, zmm18, zmm20, 0x11",
                "vpternlogq zmm19, zmm18, zmm21, 0x96",
                "vmovdqu64 zmmword ptr [r8], zmm19",
                "mov eax, 1",
                "ret",
                factors = sym FACTORS_WIDE,
            )
        }
    };
}

define_fold_wide!(fold_wide);
define_fold_wide!(copy_and_fold_wide, copy);

/// Advances the 16 bytes of a register by the factors in `xmm9`.
macro_rules! advance {
    ($register:literal) => {
        concat!(
            "movdqa xmm8, ",
            $register,
            "\n pclmulqdq xmm8, xmm9, 0x00",
            "\n pclmulqdq ",
            $register,
            ", xmm9, 0x11",
            "\n pxor ",
            $register,
            ", xmm8\n",
        )
    };
}

/// Advances the 16 bytes of a register, and adds the 16 bytes at an offset of `from`.
macro_rules! fold_into {
    ($register:literal, $at:literal $(, $copy:ident)?) => {
        concat!(
            advance!($register),
            load!("movdqu", "xmm10", $at $(, $copy)?),
            "\n pxor ",
            $register,
            ", xmm10",
        )
    };
}

/// Folds the 16 bytes of a register into another one.
macro_rules! merge {
    ($register:literal, $other:literal) => {
        concat!(advance!($register), "pxor ", $other, ", ", $register)
    };
}

/// Like [`define_fold_wide`], with eight registers of 16 octets.
macro_rules! define_fold {
    ($name:ident $(, $copy:ident)?) => {
        /// Like [`fold_wide`], with eight registers of 16 octets.
        ///
        /// # Safety
        /// As for [`fold_wide`], but the CPU only needs to support PCLMULQDQ.
        #[unsafe(naked)]
        #[unsafe(link_section = "iwarp_guarded")]
        unsafe extern "C" fn $name(
            state: u32,
            from: *const u8,
            to: *mut u8,
            steps: usize,
            rest: &mut [u8; REST],
        ) -> u32 {
            naked_asm!(
                // Each round of the loop folds 128 octets.
                "add rcx, rcx",
                "lea rax, [rip + {factors}]",
                "movdqu xmm9, xmmword ptr [rax]",
                load!("movdqu", "xmm0", "" $(, $copy)?),
                load!("movdqu", "xmm1", " + 16" $(, $copy)?),
                load!("movdqu", "xmm2", " + 32" $(, $copy)?),
                load!("movdqu", "xmm3", " + 48" $(, $copy)?),
                load!("movdqu", "xmm4", " + 64" $(, $copy)?),
                load!("movdqu", "xmm5", " + 80" $(, $copy)?),
                load!("movdqu", "xmm6", " + 96" $(, $copy)?),
                load!("movdqu", "xmm7", " + 112" $(, $copy)?),
                "movd xmm8, edi",
                "pxor xmm0, xmm8",
                "jmp 3f",
                "2:",
                "add rsi, 128",
                "add rdx, 128",
                fold_into!("xmm0", "" $(, $copy)?),
                fold_into!("xmm1", " + 16" $(, $copy)?),
                fold_into!("xmm2", " + 32" $(, $copy)?),
                fold_into!("xmm3", " + 48" $(, $copy)?),
                fold_into!("xmm4", " + 64" $(, $copy)?),
                fold_into!("xmm5", " + 80" $(, $copy)?),
                fold_into!("xmm6", " + 96" $(, $copy)?),
                fold_into!("xmm7", " + 112" $(, $copy)?),
                "3:",
                "dec rcx",
                "jnz 2b",
                "movdqu xmm9, xmmword ptr [rax + 16]",
                merge!("xmm0", "xmm4"),
                merge!("xmm1", "xmm5"),
                merge!("xmm2", "xmm6"),
                merge!("xmm3", "xmm7"),
                "movdqu xmmword ptr [r8], xmm4",
                "movdqu xmmword ptr [r8 + 16], xmm5",
                "movdqu xmmword ptr [r8 + 32], xmm6",
                "movdqu xmmword ptr [r8 + 48], xmm7",
                "mov eax, 1",
                "ret",
                factors = sym FACTORS,
            )
        }
    };
}

define_fold!(fold);
define_fold!(copy_and_fold, copy);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    type Fold = unsafe extern "C" fn(u32, *const u8, *mut u8, usize, &mut [u8; REST]) -> u32;

    /// Returns the folding functions that this processor supports, and whether they copy.
    fn folds() -> Vec<(Fold, bool)> {
        let mut folds: Vec<(Fold, bool)> = vec![];
        if is_supported() {
            folds.extend([(fold as Fold, false), (copy_and_fold, true)]);
        }
        if is_supported() && has_avx512() {
            folds.extend([(fold_wide as Fold, false), (copy_and_fold_wide, true)]);
        }
        folds
    }

    #[test]
    fn folds_match_reference() {
        let data: Vec<u8> = (0..9 * STEP as u32 + 1)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        for (fold, copies) in folds() {
            for steps in 1..=9 {
                let data = &data[1..][..steps * STEP];
                let (mut rest, mut copy) = ([0; REST], vec![0; data.len() + 1]);
                // SAFETY: both buffers hold `steps` steps, and CPU support was checked.
                let done = unsafe {
                    fold(
                        !0xDEAD_BEEF,
                        data.as_ptr(),
                        copy.as_mut_ptr(),
                        steps,
                        &mut rest,
                    )
                };
                assert_eq!(done, 1);
                let want = iwarp_proto::crc32c::append(0xDEAD_BEEF, data);
                assert_eq!(iwarp_proto::crc32c::append(!0, &rest), want, "{steps}");
                let last = copy.pop();
                assert_eq!(last, Some(0), "octet after the copy, {steps} steps");
                match copies {
                    true => assert!(copy == data, "{steps}"),
                    false => assert!(copy.iter().all(|octet| *octet == 0)),
                }
            }
        }
    }

    /// The first unmapped byte may be in a step or after the last one.
    #[test]
    #[cfg(not(miri))]
    fn crc_of_unmapped_bytes_fails() {
        if !is_supported() {
            return;
        }
        let (mapping, hole) = crate::guarded::tests::with_a_hole();
        let mut own = vec![0; 4 * STEP];
        for len in [1, 7, 8, 9, 63, STEP, STEP + 1, 3 * STEP + 77] {
            for mapped in 0..=len {
                let at = mapping.as_ptr().wrapping_add(hole - mapped);
                // SAFETY: faults are caught, `own` has room for the copy, and CPU support was
                // checked.
                let crcs = unsafe {
                    [
                        crc32c_shared(7, at, len),
                        crc32c_copying(7, at, own.as_mut_ptr(), len),
                    ]
                };
                let want = (mapped == len).then(|| {
                    let octets: Vec<u8> = (hole - len..hole).map(|i| i as u8).collect();
                    iwarp_proto::crc32c::append(7, &octets)
                });
                assert_eq!(crcs, [want; 2], "{mapped} of {len} bytes are mapped");
            }
        }
    }

    /// Also tests the functions for processors without AVX-512.
    #[test]
    #[cfg(not(miri))]
    fn folds_of_unmapped_bytes_fail() {
        let (mapping, hole) = crate::guarded::tests::with_a_hole();
        let (mut rest, mut own) = ([0; REST], vec![0; 2 * STEP]);
        for (fold, _) in folds() {
            for mapped in 0..=2 * STEP {
                let at = mapping.as_ptr().wrapping_add(hole - mapped);
                // SAFETY: faults are caught, `own` has room for the copy, and CPU support was
                // checked.
                let done = unsafe { fold(7, at, own.as_mut_ptr(), 2, &mut rest) };
                assert_eq!(done, u32::from(mapped == 2 * STEP), "{mapped}");
            }
        }
    }

    /// The CRC in an FPDU must match its payload, even if the program changes the memory
    /// concurrently.
    #[test]
    fn crc_matches_copy() {
        use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

        if !is_supported() {
            return;
        }
        let shared: Vec<AtomicU8> = (0..4 * STEP + 77).map(|_| AtomicU8::new(0)).collect();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for value in (0..=u8::MAX).cycle() {
                    shared
                        .iter()
                        .for_each(|octet| octet.store(value, Ordering::Relaxed));
                    if done.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
            for _ in 0..20_000 {
                let mut copy = vec![0; shared.len()];
                // SAFETY: both buffers hold `copy.len()` bytes, and CPU support was checked.
                let crc = unsafe {
                    crc32c_copying(7, shared.as_ptr().cast(), copy.as_mut_ptr(), copy.len())
                };
                if crc != Some(iwarp_proto::crc32c::append(7, &copy)) {
                    done.store(true, Ordering::Relaxed);
                    panic!("the CRC does not match the copy");
                }
            }
            done.store(true, Ordering::Relaxed);
        });
    }

    proptest! {
        #[test]
        fn arbitrary_data_at_any_alignment(
            data in proptest::collection::vec(any::<u8>(), 0..5000),
            start: u32,
            cut: prop::sample::Index,
        ) {
            let data = &data[cut.index(data.len() + 1)..];
            if is_supported() {
                // SAFETY: the slice is readable, and CPU support was checked above.
                let crc = unsafe { crc32c_shared(start, data.as_ptr(), data.len()) };
                prop_assert_eq!(crc, Some(iwarp_proto::crc32c::append(start, data)));
                let mut copy = vec![0x5A; data.len() + 1];
                let (from, to) = (data.as_ptr(), copy.as_mut_ptr());
                // SAFETY: as above, and `copy` has room for the data.
                let crc = unsafe { crc32c_copying(start, from, to, data.len()) };
                prop_assert_eq!(crc, Some(iwarp_proto::crc32c::append(start, data)));
                prop_assert_eq!(copy.pop(), Some(0x5A));
                prop_assert_eq!(&copy[..], data);
            }
        }
    }
}
