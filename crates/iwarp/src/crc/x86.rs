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
    let (steps, mut crc) = (len / STEP, crc);
    if steps > 0 {
        let mut rest = [0; REST];
        // SAFETY: the octets of all steps are inside, and the instructions have been detected.
        unsafe {
            if is_wide() {
                fold_wide(!crc, from, steps, &mut rest);
            } else {
                fold(!crc, from, steps, &mut rest);
            }
            crc = by_instruction(!0, &rest);
        }
    }
    // SAFETY: what is left of the octets; the instruction has been detected.
    unsafe { step_by_step(crc, from.add(steps * STEP), len % STEP) }
}

/// Continues a CRC by the CRC32C instruction.
///
/// # Safety
/// As [`crc32c_shared`].
unsafe fn step_by_step(crc: u32, from: *const u8, len: usize) -> u32 {
    let mut state = u64::from(!crc);
    // SAFETY: it reads `len` octets, which the caller has promised, and writes only its operands.
    unsafe {
        core::arch::asm!(
            "jmp 3f",
            "2:",
            "crc32 {state:r}, qword ptr [{from}]",
            "add {from}, 8",
            "3:",
            "sub {len}, 8",
            "jae 2b",
            "add {len}, 8",
            "jz 5f",
            "4:",
            "crc32 {state:e}, byte ptr [{from}]",
            "inc {from}",
            "dec {len}",
            "jnz 4b",
            "5:",
            state = inout(reg) state,
            from = inout(reg) from => _,
            len = inout(reg) len => _,
            options(nostack, readonly),
        );
    }
    !(state as u32)
}

/// Folds `steps` times [`STEP`] octets into 64, with four registers of 64 octets.
///
/// # Safety
/// `steps` is not zero, so many octets at `from` are readable, and AVX-512F and VPCLMULQDQ have been detected.
unsafe fn fold_wide(state: u32, from: *const u8, steps: usize, rest: &mut [u8; REST]) {
    static FACTORS: [[u64; 2]; 2] = [factors(256), factors(64)];
    // Registers from 16 on need no `vzeroupper` behind.
    // SAFETY: it reads `steps` times `STEP` octets at `from`, which the caller has promised, and the factors, and writes `rest`.
    unsafe {
        core::arch::asm!(
            "vbroadcasti32x4 zmm20, xmmword ptr [{factors}]",
            "vmovd xmm21, {state:e}",
            "vpxorq zmm16, zmm21, zmmword ptr [{from}]",
            "vmovdqu64 zmm17, zmmword ptr [{from} + 64]",
            "vmovdqu64 zmm18, zmmword ptr [{from} + 128]",
            "vmovdqu64 zmm19, zmmword ptr [{from} + 192]",
            "jmp 3f",
            "2:",
            "add {from}, 256",
            "vpclmulqdq zmm21, zmm16, zmm20, 0x00",
            "vpclmulqdq zmm22, zmm17, zmm20, 0x00",
            "vpclmulqdq zmm23, zmm18, zmm20, 0x00",
            "vpclmulqdq zmm24, zmm19, zmm20, 0x00",
            "vpclmulqdq zmm16, zmm16, zmm20, 0x11",
            "vpclmulqdq zmm17, zmm17, zmm20, 0x11",
            "vpclmulqdq zmm18, zmm18, zmm20, 0x11",
            "vpclmulqdq zmm19, zmm19, zmm20, 0x11",
            "vpternlogq zmm16, zmm21, zmmword ptr [{from}], 0x96",
            "vpternlogq zmm17, zmm22, zmmword ptr [{from} + 64], 0x96",
            "vpternlogq zmm18, zmm23, zmmword ptr [{from} + 128], 0x96",
            "vpternlogq zmm19, zmm24, zmmword ptr [{from} + 192], 0x96",
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
            steps = inout(reg) steps => _,
            rest = in(reg) rest,
            out("zmm16") _, out("zmm17") _, out("zmm18") _, out("zmm19") _, out("zmm20") _,
            out("zmm21") _, out("zmm22") _, out("zmm23") _, out("zmm24") _,
            options(nostack),
        );
    }
}

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
    ($register:literal, $place:literal) => {
        concat!(
            move_on!($register),
            "movdqu xmm10, ",
            $place,
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

/// As [`fold_wide`], with eight registers of 16 octets.
///
/// # Safety
/// `steps` is not zero, so many octets at `from` are readable, and PCLMULQDQ has been detected.
unsafe fn fold(state: u32, from: *const u8, steps: usize, rest: &mut [u8; REST]) {
    static FACTORS: [[u64; 2]; 2] = [factors(128), factors(64)];
    let rounds = steps * (STEP / 128);
    // SAFETY: it reads 128 octets at `from` per round, which the caller has promised, and the factors, and writes `rest`.
    unsafe {
        core::arch::asm!(
            "movdqu xmm9, xmmword ptr [{factors}]",
            "movdqu xmm0, xmmword ptr [{from}]",
            "movdqu xmm1, xmmword ptr [{from} + 16]",
            "movdqu xmm2, xmmword ptr [{from} + 32]",
            "movdqu xmm3, xmmword ptr [{from} + 48]",
            "movdqu xmm4, xmmword ptr [{from} + 64]",
            "movdqu xmm5, xmmword ptr [{from} + 80]",
            "movdqu xmm6, xmmword ptr [{from} + 96]",
            "movdqu xmm7, xmmword ptr [{from} + 112]",
            "movd xmm8, {state:e}",
            "pxor xmm0, xmm8",
            "jmp 3f",
            "2:",
            "add {from}, 128",
            fold_into!("xmm0", "[{from}]"),
            fold_into!("xmm1", "[{from} + 16]"),
            fold_into!("xmm2", "[{from} + 32]"),
            fold_into!("xmm3", "[{from} + 48]"),
            fold_into!("xmm4", "[{from} + 64]"),
            fold_into!("xmm5", "[{from} + 80]"),
            fold_into!("xmm6", "[{from} + 96]"),
            fold_into!("xmm7", "[{from} + 112]"),
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
            rounds = inout(reg) rounds => _,
            rest = in(reg) rest,
            out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _, out("xmm4") _, out("xmm5") _,
            out("xmm6") _, out("xmm7") _, out("xmm8") _, out("xmm9") _, out("xmm10") _,
            options(nostack),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    type Fold = unsafe fn(u32, *const u8, usize, &mut [u8; REST]);

    /// Both ways to fold, as far as this processor has them.
    fn folds() -> Vec<Fold> {
        let mut folds: Vec<Fold> = vec![];
        if is_possible() {
            folds.push(fold);
        }
        if is_possible() && is_wide() {
            folds.push(fold_wide);
        }
        folds
    }

    #[test]
    fn every_number_of_steps() {
        let data: Vec<u8> = (0..9 * STEP as u32 + 1)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        for fold in folds() {
            for steps in 1..=9 {
                let data = &data[1..][..steps * STEP];
                let mut rest = [0; REST];
                // SAFETY: so many octets are there, and the processor has the instructions.
                unsafe { fold(!0xDEAD_BEEF, data.as_ptr(), steps, &mut rest) };
                let want = iwarp_proto::crc32c::append(0xDEAD_BEEF, data);
                assert_eq!(iwarp_proto::crc32c::append(!0, &rest), want, "{steps}");
            }
        }
    }

    proptest! {
        #[test]
        fn any_data_from_anywhere(data in proptest::collection::vec(any::<u8>(), 0..5000), start: u32, cut: prop::sample::Index) {
            let data = &data[cut.index(data.len() + 1)..];
            if is_possible() {
                // SAFETY: the octets are there, and the instructions were just detected.
                let crc = unsafe { crc32c_shared(start, data.as_ptr(), data.len()) };
                prop_assert_eq!(crc, iwarp_proto::crc32c::append(start, data));
            }
        }
    }
}
