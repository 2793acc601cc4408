//! CRC32C at the speed of the processor (RFC 5044 section 4.4).
//!
//! The implementation is chosen at run time:
//! - short inputs on x86-64 (small FPDUs, which determine the message rate): the processor's CRC32C
//!   instruction, inlined, without set-up;
//! - longer inputs on x86-64: folding with carry-less multiplication (`x86`), which is several
//!   times faster from a few hundred bytes on. It is written in assembly, because it also reads
//!   registered memory, which the program and peers may change concurrently. It can copy the memory
//!   at the same time;
//! - other processors: `crc-fast`. Registered memory is copied before its CRC is computed.
//!
//! Invariant of the `unsafe` blocks: instructions are used only after they were detected at run
//! time.

#[cfg(target_arch = "x86_64")]
mod x86;

use crc_fast::{CrcAlgorithm, Digest};
use iwarp_rnic::memory::Crc32c;

/// Inputs of at least this many octets are folded.
///
/// Nanoseconds per call on one core of an AMD EPYC with AVX-512. Each call continues the previous
/// CRC:
///
/// | octets | instruction | `x86` | `crc-fast` |
/// | ---: | ---: | ---: | ---: |
/// | 20 | 3.5 | 5.5 | 10.0 |
/// | 64 | 7.2 | 7.0 | 11.1 |
/// | 100 | 11.2 | 13.7 | 13.6 |
/// | 256 | 26.6 | 16.6 | 26.6 |
/// | 512 | 52.7 | 18.5 | 28.6 |
/// | 1448 | 149 | 43.6 | 56.1 |
/// | 4096 | 424 | 82.0 | 95.5 |
/// | 65536 | 7037 | 1223 | 1273 |
///
/// Nanoseconds to copy the payload behind a header of 18 bytes and to compute the CRC of both,
/// after the copy or during the copy:
///
/// | octets | after | during |
/// | ---: | ---: | ---: |
/// | 512 | 33 | 58 |
/// | 1024 | 49 | 70 |
/// | 1448 | 79 | 67 |
/// | 4096 | 176 | 104 |
/// | 65536 | 3233 | 1167 |
///
/// The figures come from `cargo test -p iwarp-os --release --lib crc_cost -- --ignored
/// --nocapture`.
#[cfg(target_arch = "x86_64")]
const FOLD_FROM: usize = 256;

/// Returns the CRC functions for queue pairs.
#[inline]
pub fn crc32c() -> Crc32c {
    let functions = Crc32c::new(crc32c_append);
    #[cfg(target_arch = "x86_64")]
    if x86::is_supported() {
        // SAFETY: both functions access the given memory by assembly only, and CPU support was
        // checked above.
        return unsafe {
            functions
                .with_shared(x86::crc32c_shared)
                .with_copying(x86::crc32c_copying)
        };
    }
    functions
}

/// Continues the CRC32C `crc` over `data`; start with 0. Every returned value is a complete CRC,
/// which a further call can continue.
#[inline]
pub fn crc32c_append(crc: u32, data: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if data.len() < FOLD_FROM && std::arch::is_x86_feature_detected!("sse4.2") {
        // SAFETY: CPU support was checked above.
        return unsafe { by_instruction(crc, data) };
    }
    #[cfg(target_arch = "x86_64")]
    if x86::is_supported() {
        // SAFETY: the slice is readable, and CPU support was checked above.
        return unsafe { x86::crc32c_shared(crc, data.as_ptr(), data.len()) }.unwrap_or_default();
    }
    by_crc_fast(crc, data)
}

fn by_crc_fast(crc: u32, data: &[u8]) -> u32 {
    // The state is the complement of the CRC. 32-bit algorithms do not use its upper half.
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!crc));
    digest.update(data);
    digest.finalize() as u32
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
fn by_instruction(crc: u32, data: &[u8]) -> u32 {
    use std::arch::x86_64::{_mm_crc32_u8, _mm_crc32_u16, _mm_crc32_u32, _mm_crc32_u64};
    let (words, mut rest) = data.as_chunks::<8>();
    let mut wide = u64::from(!crc);
    for word in words {
        wide = _mm_crc32_u64(wide, u64::from_le_bytes(*word));
    }
    let mut state = wide as u32;
    if let Some((half, after)) = rest.split_first_chunk::<4>() {
        state = _mm_crc32_u32(state, u32::from_le_bytes(*half));
        rest = after;
    }
    if let Some((pair, after)) = rest.split_first_chunk::<2>() {
        state = _mm_crc32_u16(state, u16::from_le_bytes(*pair));
        rest = after;
    }
    if let Some(last) = rest.first() {
        state = _mm_crc32_u8(state, *last);
    }
    !state
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Computes the CRC one bit at a time, from the polynomial alone.
    fn reference(crc: u32, data: &[u8]) -> u32 {
        let mut state = !crc;
        for byte in data {
            state ^= u32::from(*byte);
            for _ in 0..8 {
                state = (state >> 1) ^ if state & 1 == 1 { 0x82F6_3B78 } else { 0 };
            }
        }
        !state
    }

    #[test]
    fn rfc_3720_test_vectors() {
        let ascending: Vec<u8> = (0..32).collect();
        let descending: Vec<u8> = (0..32).rev().collect();
        assert_eq!(crc32c_append(0, &[0; 32]), 0x8A91_36AA);
        assert_eq!(crc32c_append(0, &[0xFF; 32]), 0x62A8_AB43);
        assert_eq!(crc32c_append(0, &ascending), 0x46DD_794E);
        assert_eq!(crc32c_append(0, &descending), 0x113F_DB5C);
        assert_eq!(crc32c_append(0, b"123456789"), 0xE306_9283);
        assert_eq!(crc32c_append(0x1234_5678, b""), 0x1234_5678);
    }

    #[test]
    fn append_matches_reference_at_every_length() {
        let data: Vec<u8> = (0..1200u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        for len in 0..data.len() {
            let want = reference(0xDEAD_BEEF, &data[..len]);
            assert_eq!(
                crc32c_append(0xDEAD_BEEF, &data[..len]),
                want,
                "length {len}"
            );
            assert_eq!(
                by_crc_fast(0xDEAD_BEEF, &data[..len]),
                want,
                "crc-fast, length {len}"
            );
        }
    }

    proptest! {
        #[test]
        fn crc_continues_at_any_split(
            data in proptest::collection::vec(any::<u8>(), 0..5000),
            start: u32,
            cut: prop::sample::Index,
        ) {
            let (head, tail) = data.split_at(cut.index(data.len() + 1));
            let whole = reference(start, &data);
            prop_assert_eq!(crc32c_append(start, &data), whole);
            prop_assert_eq!(crc32c_append(crc32c_append(start, head), tail), whole);
            prop_assert_eq!(by_crc_fast(by_crc_fast(start, head), tail), whole);
            prop_assert_eq!(iwarp_proto::crc32c::append(start, &data), whole);
            #[cfg(target_arch = "x86_64")]
            if std::arch::is_x86_feature_detected!("sse4.2") {
                // SAFETY: CPU support was checked above.
                prop_assert_eq!(unsafe { by_instruction(start, &data) }, whole);
            }
        }
    }

    type Route = fn(u32, &[u8]) -> u32;

    /// Returns the ways of computing a CRC that this processor supports.
    fn routes() -> Vec<(&'static str, Route)> {
        #[allow(unused_mut, reason = "the other functions exist on x86-64 only")]
        let mut routes: Vec<(&str, Route)> =
            vec![("append", crc32c_append), ("crc-fast", by_crc_fast)];
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("sse4.2") {
            fn checked(crc: u32, data: &[u8]) -> u32 {
                // SAFETY: CPU support was checked above.
                unsafe { by_instruction(crc, data) }
            }
            routes.push(("instruction", checked));
        }
        #[cfg(target_arch = "x86_64")]
        if x86::is_supported() {
            fn in_place(crc: u32, data: &[u8]) -> u32 {
                // SAFETY: the slice is readable, and CPU support was checked above.
                unsafe { x86::crc32c_shared(crc, data.as_ptr(), data.len()) }.unwrap()
            }
            routes.push(("shared", in_place));
            // With `copy_first`, one CRC call covers the header and the copied payload. With
            // `copying`, the CRC of the header is computed first.
            std::thread_local! {
                static TO: std::cell::RefCell<Vec<u8>> = std::cell::RefCell::new(vec![0; 1 << 16]);
            }
            fn copy_first(crc: u32, data: &[u8]) -> u32 {
                TO.with_borrow_mut(|to| {
                    let to = std::hint::black_box(&mut to[..data.len()]);
                    to.copy_from_slice(data);
                    crc32c_append(crc, to)
                })
            }
            fn copying(crc: u32, data: &[u8]) -> u32 {
                TO.with_borrow_mut(|to| {
                    let to = std::hint::black_box(&mut to[..data.len()]);
                    let (head, rest) = data.split_at(18.min(data.len()));
                    let crc = crc32c_append(crc, head);
                    // SAFETY: both buffers hold `data.len()` bytes, and CPU support was checked
                    // above.
                    unsafe { x86::crc32c_copying(crc, rest.as_ptr(), to.as_mut_ptr(), rest.len()) }
                        .unwrap()
                })
            }
            routes.push(("copy first", copy_first));
            routes.push(("copying", copying));
        }
        routes
    }

    #[test]
    #[ignore = "prints a measurement"]
    fn crc_cost() {
        let routes = routes();
        let data = vec![0xA5u8; 1 << 16];
        for len in [
            4, 18, 20, 38, 64, 84, 100, 128, 160, 192, 224, 256, 320, 384, 512, 768, 1024, 1448,
            4096, 65536,
        ] {
            for (name, route) in &routes {
                let rounds = (20_000_000 / (len + 60)).max(1000) as u32;
                let best = (0..5)
                    .map(|_| {
                        let start = std::time::Instant::now();
                        let mut crc = 0;
                        for _ in 0..rounds {
                            crc = route(
                                std::hint::black_box(crc),
                                std::hint::black_box(&data[..len]),
                            );
                        }
                        std::hint::black_box(crc);
                        start.elapsed().as_nanos() as f64 / f64::from(rounds)
                    })
                    .fold(f64::MAX, f64::min);
                print!("  {name} {best:7.1}");
            }
            println!("  at {len}");
        }
    }
}
