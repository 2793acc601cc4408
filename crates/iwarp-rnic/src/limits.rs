//! All limits of the software RNIC, and the relations between them.

use iwarp_proto::mpa::framing::fpdu_len_with_markers;

/// Maximum work requests in one send, receive or shared receive queue.
pub const MAX_QP_WR: u32 = 1 << 16;
/// Maximum scatter/gather elements of one work request.
pub const MAX_SGE: u32 = 32;
/// Maximum inline data of a queue pair, in bytes.
pub const MAX_INLINE: u32 = 1024;
/// Maximum message size in octets. Verbs lengths have 32 bits; InfiniBand's limit is 2^31.
pub const MAX_MESSAGE: u32 = 1 << 31;
/// Maximum outstanding RDMA Reads and atomics, inbound and outbound (14 bits on the wire, RFC 6581
/// section 9.1). A queue pair allocates as many entries as it is created for. A high limit allows
/// many small Reads to share a plan.
pub const MAX_IRD: u16 = 4096;
/// See [`MAX_IRD`].
pub const MAX_ORD: u16 = 4096;
/// Maximum completions in one completion queue.
pub const MAX_CQE: u32 = 1 << 22;
/// Maximum regions and windows of one device. STag indexes have 24 bits; if most of them were in
/// use, a peer could guess one.
pub const MAX_MR: u32 = 1 << 20;

/// Payload up to this size is copied next to its header, because such a copy costs less than one
/// more scatter/gather element.
pub const TX_COPY_MAX: u32 = 2048;
/// Registered memory may change at any time, so it is copied in parts of this size to compute its
/// CRC. Smaller parts cost more calls of the CRC function; larger parts evict more of the level 1
/// cache.
pub const SUM_PART: usize = 4096;
/// The CRC of at least this much payload is computed while it is copied, if the CRC function
/// supports that. For less payload, the call and the unaligned end cost more than reading the
/// payload twice.
pub const SUM_COPY_MIN: u32 = 1280;
/// Scratch of one transmit plan: headers, trailers and copied payload. It has room for all loopback
/// segments of a full plan, even if all are copied.
pub const TX_SCRATCH: usize = 340 * 1024;
/// A plan is closed when it holds this many octets: about five 64 KiB loopback segments. Larger
/// plans only delay the first octet; smaller ones end with a short segment more often.
pub const TX_PLAN_BYTES: usize = 312 * 1024;
/// Maximum positions of one plan at which a write must end because a TCP segment ends there.
pub const TX_PLAN_CUTS: usize = 256;
/// Maximum pieces of one plan. One system call takes at most 1024.
pub const TX_PLAN_PIECES: usize = 512;
/// Maximum messages of one plan. With 50 octets of payload or more, the scratch is full first.
pub const TX_PLAN_MESSAGES: usize = 4096;
/// Read responses sent in a row while local work requests are pending, so that a peer's Reads
/// cannot starve them.
pub const RESPONSE_BURST: u32 = 16;

/// Receive staging of one driver, in bytes: at least two of the largest FPDUs.
pub const RX_STAGING: usize = 256 * 1024;
/// Maximum size of one read into staging. Larger reads no longer fit the level 2 cache.
pub const RX_READ_MAX: usize = 128 * 1024;
/// Payload of at least this size that has not arrived yet is read directly to its destination.
pub const RX_DIRECT_MIN: u32 = 8 * 1024;
/// Staging offered behind a direct read, for the trailer, the next header, and a small FPDU after a
/// large one.
pub const RX_DIRECT_TAIL: usize = 512;
/// The last octets of an RDMA Write, held back until all others are visible.
pub const WRITE_TAIL: u32 = 8;
/// Maximum length of an untagged message for the RNIC itself. A Terminate with both headers has 52
/// octets.
pub const CONTROL_MAX: usize = 64;

/// Length of the largest FPDU: a ULPDU of the maximum length, with markers, one of them at the
/// start.
pub const MAX_FPDU: usize = fpdu_len_with_markers(0, u16::MAX as usize);

const _: () = assert!(RX_STAGING >= MAX_FPDU + RX_READ_MAX);
const _: () = assert!(TX_SCRATCH >= 2 * MAX_FPDU);
const _: () = assert!(TX_PLAN_PIECES <= 1024);
const _: () = assert!(MAX_IRD < 0x3fff && MAX_ORD < 0x3fff);
const _: () = assert!(WRITE_TAIL < RX_DIRECT_MIN);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_fpdu_exceeds_maximum() {
        for next_marker_in in 0..=512 {
            let longest = fpdu_len_with_markers(next_marker_in, 65535);
            assert!(longest <= MAX_FPDU && longest + 4 >= MAX_FPDU);
        }
        // Length 2, ULPDU 65535, padding 3, CRC 4, and a 4-octet marker before every 508 octets.
        assert_eq!(MAX_FPDU, 65544 + 130 * 4);
    }

    #[test]
    fn reported_limits_do_not_change() {
        let reported = [MAX_QP_WR, MAX_INLINE, MAX_CQE, MAX_MR];
        assert_eq!(reported, [65536, 1024, 4_194_304, 1_048_576]);
        assert_eq!(MAX_MESSAGE, 0x8000_0000);
    }
}
