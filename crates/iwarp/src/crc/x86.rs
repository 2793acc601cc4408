//! CRC32C by the instructions of x86-64, also of memory that programs, peers and the kernel may change meanwhile.
//!
//! Such memory must not be read by accesses that the compiler knows: to it they would be data races. So it is read by assembly
//! here, and needs no copy. Long inputs are folded with carry-less multiplication: the 64 octets that remain have the
//! same CRC as all that was folded into them. What is left behind whole blocks is summed by the CRC32C instruction.
//!
//! Invariant: callers promise that the octets are readable. Instructions are used only after they were detected.

use super::by_instruction;

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

/// Returns the two factors that move 128 bits on by `octets`: one for the eight octets in front, one for the eight behind. A
/// product of reversed numbers lacks one bit, which the shift brings.
const fn factors(octets: u32) -> [u64; 2] {
    let bits = 8 * octets;
    [
        (power_of_x(bits + 32) as u64) << 1,
        (power_of_x(bits - 32) as u64) << 1,
    ]
}

/// Octets per step of both loops.
const STEP: usize = 256;
/// Octets that a loop leaves.
const REST: usize = 64;

/// Returns `true` if this processor has the instructions that [`crc32c_shared`] needs.
#[inline]
pub(super) fn is_possible() -> bool {
    std::arch::is_x86_feature_detected!("sse4.2")
        && std::arch::is_x86_feature_detected!("pclmulqdq")
}

#[inline]
fn is_wide() -> bool {
    std::arch::is_x86_feature_detected!("avx512f")
        && std::arch::is_x86_feature_detected!("vpclmulqdq")
}

/// Continues the CRC32C `crc` over `len` octets at `from`.
///
/// # Safety
/// They are readable until it returns, and [`is_possible`] has returned `true`.
pub(super) unsafe fn crc32c_shared(crc: u32, from: *const u8, len: usize) -> u32 {
    // SAFETY: the octets of all steps and the rest are inside, and the instructions have been detected.
    unsafe {
        let crc = folded(crc, len / STEP, |state, steps, rest| match is_wide() {
            true => fold_wide(state, from, steps, rest),
            false => fold(state, from, steps, rest),
        });
        step_by_step(crc, from.add(len / STEP * STEP), len % STEP)
    }
}

/// Copies `len` octets from `from` to `to`, and continues the CRC32C `crc` over what it has copied: each octet is read once.
///
/// # Safety
/// They are readable and as many writable until it returns, the two do not overlap, and [`is_possible`] has returned `true`.
pub(super) unsafe fn crc32c_copying(crc: u32, from: *const u8, to: *mut u8, len: usize) -> u32 {
    let done = len / STEP * STEP;
    // SAFETY: as above, on both sides.
    unsafe {
        let crc = folded(crc, len / STEP, |state, steps, rest| match is_wide() {
            true => copy_and_fold_wide(state, from, to, steps, rest),
            false => copy_and_fold(state, from, to, steps, rest),
        });
        copy_step_by_step(crc, from.add(done), to.add(done), len % STEP)
    }
}

/// Continues a CRC over so many steps, which `fold` makes [`REST`] octets of: it gets the state and their number.
///
/// # Safety
/// [`is_possible`] has returned `true`.
#[inline(always)]
unsafe fn folded(crc: u32, steps: usize, fold: impl FnOnce(u32, usize, &mut [u8; REST])) -> u32 {
    if steps == 0 {
        return crc;
    }
    let mut rest = [0; REST];
    fold(!crc, steps, &mut rest);
    // SAFETY: the instruction has been detected.
    unsafe { by_instruction(!0, &rest) }
}

/// An instruction that loads a register from one place behind `from`, and with a third argument one that stores it behind `to`.
macro_rules! load {
    ($mov:literal, $register:literal, $at:literal) => {
        concat!($mov, " ", $register, ", [{from}", $at, "]")
    };
    ($mov:literal, $register:literal, $at:literal, $to:ident) => {
        concat!(
            load!($mov, $register, $at),
            "\n ",
            $mov,
            " [{to}",
            $at,
            "], ",
            $register
        )
    };
}

/// Defines a function that continues a CRC by the CRC32C instruction; with a name for `to` it copies the octets there as well.
macro_rules! define_steps {
    ($name:ident $(, $to:ident)?) => {
        /// Continues a CRC by the CRC32C instruction.
        ///
        /// # Safety
        /// As [`crc32c_shared`], and [`crc32c_copying`] if it copies.
        unsafe fn $name(crc: u32, from: *const u8, $($to: *mut u8,)? len: usize) -> u32 {
            let mut state = u64::from(!crc);
            // SAFETY: it reads `len` octets, and writes as many if it copies, which the caller has promised. Else it writes only
            // its operands.
            unsafe {
                core::arch::asm!(
                    "jmp 3f",
                    "2:",
                    load!("mov", "{octets:r}", "" $(, $to)?),
                    "crc32 {state:r}, {octets:r}",
                    "add {from}, 8",
                    $(concat!("add {", stringify!($to), "}, 8"),)?
                    "3:",
                    "sub {len}, 8",
                    "jae 2b",
                    "add {len}, 8",
                    "jz 5f",
                    "4:",
                    load!("mov", "{octets:l}", "" $(, $to)?),
                    "crc32 {state:e}, {octets:l}",
                    "inc {from}",
                    $(concat!("inc {", stringify!($to), "}"),)?
                    "dec {len}",
                    "jnz 4b",
                    "5:",
                    state = inout(reg) state,
                    octets = out(reg) _,
                    from = inout(reg) from => _,
                    $($to = inout(reg) $to => _,)?
                    len = inout(reg) len => _,
                    options(nostack),
                );
            }
            !(state as u32)
        }
    };
}

define_steps!(step_by_step);
define_steps!(copy_step_by_step, to);

/// Defines a function that folds with four registers of 64 octets; with a name for `to` it copies the octets there as well.
macro_rules! define_fold_wide {
    ($name:ident $(, $to:ident)?) => {
        /// Folds `steps` times [`STEP`] octets into 64, with four registers of 64 octets.
        ///
        /// # Safety
        /// `steps` is not zero, so many octets at `from` are readable, and at `to` writable if it copies. AVX-512F and VPCLMULQDQ have been
        /// detected.
        unsafe fn $name(
            state: u32,
            from: *const u8,
            $($to: *mut u8,)?
            steps: usize,
            rest: &mut [u8; REST],
        ) {
            static FACTORS: [[u64; 2]; 2] = [factors(256), factors(64)];
            // Registers from 16 on need no `vzeroupper` behind.
            // SAFETY: it reads `steps` times `STEP` octets at `from`, writes as many at `to` if it copies, as the caller has promised, reads
            // the factors, and writes `rest`.
            unsafe {
                core::arch::asm!(
                    "vbroadcasti32x4 zmm20, xmmword ptr [{factors}]",
                    "vmovd xmm21, {state:e}",
                    load!("vmovdqu64", "zmm16", "" $(, $to)?),
                    load!("vmovdqu64", "zmm17", " + 64" $(, $to)?),
                    load!("vmovdqu64", "zmm18", " + 128" $(, $to)?),
                    load!("vmovdqu64", "zmm19", " + 192" $(, $to)?),
                    "vpxorq zmm16, zmm16, zmm21",
                    "jmp 3f",
                    "2:",
                    "add {from}, 256",
                    $(concat!("add {", stringify!($to), "}, 256"),)?
                    "vpclmulqdq zmm21, zmm16, zmm20, 0x00",
                    "vpclmulqdq zmm22, zmm17, zmm20, 0x00",
                    "vpclmulqdq zmm23, zmm18, zmm20, 0x00",
                    "vpclmulqdq zmm24, zmm19, zmm20, 0x00",
                    load!("vmovdqu64", "zmm25", "" $(, $to)?),
                    load!("vmovdqu64", "zmm26", " + 64" $(, $to)?),
                    load!("vmovdqu64", "zmm27", " + 128" $(, $to)?),
                    load!("vmovdqu64", "zmm28", " + 192" $(, $to)?),
                    "vpclmulqdq zmm16, zmm16, zmm20, 0x11",
                    "vpclmulqdq zmm17, zmm17, zmm20, 0x11",
                    "vpclmulqdq zmm18, zmm18, zmm20, 0x11",
                    "vpclmulqdq zmm19, zmm19, zmm20, 0x11",
                    "vpternlogq zmm16, zmm21, zmm25, 0x96",
                    "vpternlogq zmm17, zmm22, zmm26, 0x96",
                    "vpternlogq zmm18, zmm23, zmm27, 0x96",
                    "vpternlogq zmm19, zmm24, zmm28, 0x96",
                    "3:",
                    "dec {steps}",
                    "jnz 2b",
                    "vbroadcasti32x4 zmm20, xmmword ptr [{factors} + 16]",
                    "vpclmulqdq zmm21, zmm16, zmm20, 0x00",
                    "vpclmulqdq zmm16, zmm16, zmm20, 0x11",
                    "vpternlogq zmm17, zmm16, zmm21, 0x96",
                    "vpclmulqdq zmm21, zmm17, zmm20, 0x00",
                    "vpclmulqdq zmm17, zmm17, zmm20, 0x11",
                    "vpternlogq zmm18, zmm17, zmm21, 0x96",
                    "vpclmulqdq zmm21, zmm18, zmm20, 0x00",
                    "vpclmulqdq zmm18, zmm18, zmm20, 0x11",
                    "vpternlogq zmm19, zmm18, zmm21, 0x96",
                    "vmovdqu64 zmmword ptr [{rest}], zmm19",
                    factors = in(reg) &raw const FACTORS,
                    state = in(reg) state,
                    from = inout(reg) from => _,
                    $($to = inout(reg) $to => _,)?
                    steps = inout(reg) steps => _,
                    rest = in(reg) rest,
                    out("zmm16") _, out("zmm17") _, out("zmm18") _, out("zmm19") _, out("zmm20") _,
                    out("zmm21") _, out("zmm22") _, out("zmm23") _, out("zmm24") _, out("zmm25") _,
                    out("zmm26") _, out("zmm27") _, out("zmm28") _,
                    options(nostack),
                );
            }
        }
    };
}

define_fold_wide!(fold_wide);
define_fold_wide!(copy_and_fold_wide, to);

/// Moves the 16 octets of one register on, by the factors in another.
macro_rules! move_on {
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

/// Moves the 16 octets of one register on and adds those at the place they get to.
macro_rules! fold_into {
    ($register:literal, $at:literal $(, $to:ident)?) => {
        concat!(
            move_on!($register),
            load!("movdqu", "xmm10", $at $(, $to)?),
            "\n pxor ",
            $register,
            ", xmm10",
        )
    };
}

/// Moves the 16 octets of one register on to another.
macro_rules! merge {
    ($register:literal, $other:literal) => {
        concat!(move_on!($register), "pxor ", $other, ", ", $register)
    };
}

/// As [`define_fold_wide`], with eight registers of 16 octets.
macro_rules! define_fold {
    ($name:ident $(, $to:ident)?) => {
        /// As [`fold_wide`], with eight registers of 16 octets.
        ///
        /// # Safety
        /// As there, but PCLMULQDQ has been detected.
        unsafe fn $name(
            state: u32,
            from: *const u8,
            $($to: *mut u8,)?
            steps: usize,
            rest: &mut [u8; REST],
        ) {
            static FACTORS: [[u64; 2]; 2] = [factors(128), factors(64)];
            let rounds = steps * (STEP / 128);
            // SAFETY: as there, with 128 octets per round.
            unsafe {
                core::arch::asm!(
                    "movdqu xmm9, xmmword ptr [{factors}]",
                    load!("movdqu", "xmm0", "" $(, $to)?),
                    load!("movdqu", "xmm1", " + 16" $(, $to)?),
                    load!("movdqu", "xmm2", " + 32" $(, $to)?),
                    load!("movdqu", "xmm3", " + 48" $(, $to)?),
                    load!("movdqu", "xmm4", " + 64" $(, $to)?),
                    load!("movdqu", "xmm5", " + 80" $(, $to)?),
                    load!("movdqu", "xmm6", " + 96" $(, $to)?),
                    load!("movdqu", "xmm7", " + 112" $(, $to)?),
                    "movd xmm8, {state:e}",
                    "pxor xmm0, xmm8",
                    "jmp 3f",
                    "2:",
                    "add {from}, 128",
                    $(concat!("add {", stringify!($to), "}, 128"),)?
                    fold_into!("xmm0", "" $(, $to)?),
                    fold_into!("xmm1", " + 16" $(, $to)?),
                    fold_into!("xmm2", " + 32" $(, $to)?),
                    fold_into!("xmm3", " + 48" $(, $to)?),
                    fold_into!("xmm4", " + 64" $(, $to)?),
                    fold_into!("xmm5", " + 80" $(, $to)?),
                    fold_into!("xmm6", " + 96" $(, $to)?),
                    fold_into!("xmm7", " + 112" $(, $to)?),
                    "3:",
                    "dec {rounds}",
                    "jnz 2b",
                    "movdqu xmm9, xmmword ptr [{factors} + 16]",
                    merge!("xmm0", "xmm4"),
                    merge!("xmm1", "xmm5"),
                    merge!("xmm2", "xmm6"),
                    merge!("xmm3", "xmm7"),
                    "movdqu xmmword ptr [{rest}], xmm4",
                    "movdqu xmmword ptr [{rest} + 16], xmm5",
                    "movdqu xmmword ptr [{rest} + 32], xmm6",
                    "movdqu xmmword ptr [{rest} + 48], xmm7",
                    factors = in(reg) &raw const FACTORS,
                    state = in(reg) state,
                    from = inout(reg) from => _,
                    $($to = inout(reg) $to => _,)?
                    rounds = inout(reg) rounds => _,
                    rest = in(reg) rest,
                    out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _, out("xmm4") _, out("xmm5") _,
                    out("xmm6") _, out("xmm7") _, out("xmm8") _, out("xmm9") _, out("xmm10") _,
                    options(nostack),
                );
            }
        }
    };
}

define_fold!(fold);
define_fold!(copy_and_fold, to);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    type Fold = unsafe fn(u32, *const u8, *mut u8, usize, &mut [u8; REST]);

    unsafe fn fold_only(state: u32, from: *const u8, _: *mut u8, n: usize, rest: &mut [u8; REST]) {
        // SAFETY: as the caller has promised.
        unsafe { fold(state, from, n, rest) }
    }

    unsafe fn wide_only(state: u32, from: *const u8, _: *mut u8, n: usize, rest: &mut [u8; REST]) {
        // SAFETY: as the caller has promised.
        unsafe { fold_wide(state, from, n, rest) }
    }

    /// All ways to fold, as far as this processor has them, and whether they copy.
    fn folds() -> Vec<(Fold, bool)> {
        let mut folds: Vec<(Fold, bool)> = vec![];
        if is_possible() {
            folds.extend([(fold_only as Fold, false), (copy_and_fold, true)]);
        }
        if is_possible() && is_wide() {
            folds.extend([(wide_only as Fold, false), (copy_and_fold_wide, true)]);
        }
        folds
    }

    #[test]
    fn every_number_of_steps() {
        let data: Vec<u8> = (0..9 * STEP as u32 + 1)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        for (fold, copies) in folds() {
            for steps in 1..=9 {
                let data = &data[1..][..steps * STEP];
                let (mut rest, mut copy) = ([0; REST], vec![0; data.len() + 1]);
                // SAFETY: so many octets are there on both sides, and the processor has the instructions.
                unsafe {
                    fold(
                        !0xDEAD_BEEF,
                        data.as_ptr(),
                        copy.as_mut_ptr(),
                        steps,
                        &mut rest,
                    )
                };
                let want = iwarp_proto::crc32c::append(0xDEAD_BEEF, data);
                assert_eq!(iwarp_proto::crc32c::append(!0, &rest), want, "{steps}");
                let last = copy.pop();
                assert_eq!(last, Some(0), "one behind {steps}");
                match copies {
                    true => assert!(copy == data, "{steps}"),
                    false => assert!(copy.iter().all(|octet| *octet == 0)),
                }
            }
        }
    }

    /// What a peer receives has to have the CRC that it is sent with, also if the program writes to it meanwhile.
    #[test]
    fn the_sum_is_that_of_the_copy() {
        use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

        if !is_possible() {
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
                // SAFETY: the octets are there on both sides, and the instructions were just detected.
                let crc = unsafe {
                    crc32c_copying(7, shared.as_ptr().cast(), copy.as_mut_ptr(), copy.len())
                };
                if crc != iwarp_proto::crc32c::append(7, &copy) {
                    done.store(true, Ordering::Relaxed);
                    panic!("another sum");
                }
            }
            done.store(true, Ordering::Relaxed);
        });
    }

    proptest! {
        #[test]
        fn any_data_from_anywhere(data in proptest::collection::vec(any::<u8>(), 0..5000), start: u32, cut: prop::sample::Index) {
            let data = &data[cut.index(data.len() + 1)..];
            if is_possible() {
                // SAFETY: the octets are there, and the instructions were just detected.
                let crc = unsafe { crc32c_shared(start, data.as_ptr(), data.len()) };
                prop_assert_eq!(crc, iwarp_proto::crc32c::append(start, data));
                let mut copy = vec![0x5A; data.len() + 1];
                // SAFETY: as above, and there is room for them.
                let crc = unsafe { crc32c_copying(start, data.as_ptr(), copy.as_mut_ptr(), data.len()) };
                prop_assert_eq!(crc, iwarp_proto::crc32c::append(start, data));
                prop_assert_eq!(copy.pop(), Some(0x5A));
                prop_assert_eq!(&copy[..], data);
            }
        }
    }
}
