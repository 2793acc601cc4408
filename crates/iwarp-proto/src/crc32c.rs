//! CRC32c (Castagnoli), the checksum of FPDUs. RFC 5044 §4.4, which refers to iSCSI (RFC 3720
//! §12.1) for the algorithm.
//!
//! Other crates have faster implementations (SIMD, CPU instructions), so each function of this
//! project that computes a CRC takes a [`Crc32cFn`]. The implementation in this module is portable:
//! eight tables, eight octets per step, no CPU detection.

/// A CRC32c implementation. It starts with 0, and each result is a complete CRC that a further call
/// can continue: `f(f(0, a), b) == f(0, a ++ b)`.
pub type Crc32cFn = fn(crc: u32, data: &[u8]) -> u32;

/// The Castagnoli polynomial 0x1EDC6F41 with its bits reversed, because the CRC shifts to the
/// right.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// `TABLES[0]` advances the CRC by one octet, `TABLES[k]` by that octet and `k` zero octets after
/// it.
static TABLES: [[u32; 256]; 8] = tables();

#[allow(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    reason = "evaluated by the compiler only"
)]
const fn tables() -> [[u32; 256]; 8] {
    let mut t = [[0u32; 256]; 8];
    let mut i = 0;
    while i < 256 {
        let mut crc = i as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = (crc >> 1) ^ (POLYNOMIAL & (0u32.wrapping_sub(crc & 1)));
            bit += 1;
        }
        t[0][i] = crc;
        i += 1;
    }
    let mut k = 1;
    while k < 8 {
        let mut i = 0;
        while i < 256 {
            let prev = t[k - 1][i];
            t[k][i] = (prev >> 8) ^ t[0][(prev & 0xff) as usize];
            i += 1;
        }
        k += 1;
    }
    t
}

/// Continues `crc` (0 to start) over `data`, by portable slicing-by-8.
#[allow(
    clippy::indexing_slicing,
    reason = "tables have 256 entries and are indexed by octets"
)]
// Inlining does not make the loop faster, and in a large function it would run out of registers.
#[inline(never)]
pub fn append(crc: u32, data: &[u8]) -> u32 {
    //= rfc5044 section 4.4
    //# When CRCs
    //# are enabled, the CRC field in the MPA FPDU MUST be computed using the
    //# CRC32c polynomial in the manner described in the iSCSI Protocol
    //# [iSCSI] document for Header and Data Digests.
    let mut crc = !crc;
    let (chunks, rest) = data.as_chunks::<8>();
    for &[a, b, c, d, e, f, g, h] in chunks {
        let [a, b, c, d] = (crc ^ u32::from_le_bytes([a, b, c, d])).to_le_bytes();
        crc = TABLES[7][a as usize]
            ^ TABLES[6][b as usize]
            ^ TABLES[5][c as usize]
            ^ TABLES[4][d as usize]
            ^ TABLES[3][e as usize]
            ^ TABLES[2][f as usize]
            ^ TABLES[1][g as usize]
            ^ TABLES[0][h as usize];
    }
    for &octet in rest {
        crc = (crc >> 8) ^ TABLES[0][(crc as u8 ^ octet) as usize];
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computes the CRC by its definition, one bit at a time.
    fn naive(crc: u32, data: &[u8]) -> u32 {
        let mut crc = !crc;
        for &octet in data {
            crc ^= octet as u32;
            for _ in 0..8 {
                crc = if crc & 1 == 1 {
                    (crc >> 1) ^ POLYNOMIAL
                } else {
                    crc >> 1
                };
            }
        }
        !crc
    }

    #[test]
    fn rfc_3720_examples() {
        // The CRC examples of appendix B.4, in wire order.
        let mut up = [0u8; 32];
        let mut down = [0u8; 32];
        for i in 0..32 {
            up[i] = i as u8;
            down[i] = 31 - i as u8;
        }
        assert_eq!(append(0, &[0; 32]).to_le_bytes(), [0xaa, 0x36, 0x91, 0x8a]);
        assert_eq!(
            append(0, &[0xff; 32]).to_le_bytes(),
            [0x43, 0xab, 0xa8, 0x62]
        );
        assert_eq!(append(0, &up).to_le_bytes(), [0x4e, 0x79, 0xdd, 0x46]);
        assert_eq!(append(0, &down).to_le_bytes(), [0x5c, 0xdb, 0x3f, 0x11]);
        assert_eq!(append(0, b"123456789"), 0xe306_9283);
        assert_eq!(append(0, b""), 0);
    }

    #[test]
    fn append_matches_definition_at_every_split() {
        let mut data = [0u8; 67];
        for (i, b) in data.iter_mut().enumerate() {
            *b = (i * 37 + 11) as u8;
        }
        for len in 0..data.len() {
            let whole = naive(0, &data[..len]);
            for split in 0..=len {
                let (a, b) = data[..len].split_at(split);
                assert_eq!(append(append(0, a), b), whole, "{split} of {len}");
            }
        }
    }
}
