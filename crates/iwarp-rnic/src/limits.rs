//! All maxima of the software RNIC, with the relations between them.

use iwarp_proto::mpa::framing::fpdu_len_with_markers;

/// Most work requests in one send, receive or shared receive queue.
pub const MAX_QP_WR: u32 = 1 << 16;
/// Most scatter/gather elements of one work request.
pub const MAX_SGE: u32 = 32;
/// Most octets of inline data that a queue pair can be created for.
pub const MAX_INLINE: u32 = 1024;
/// Largest message of one work request, in octets (verbs lengths are 32 bits; IB's limit is 2^31).
pub const MAX_MESSAGE: u32 = 1 << 31;
/// Most inbound or outbound RDMA Reads and atomics outstanding (14 bits on the wire, RFC 6581 section 9.1). A queue pair
/// allocates an entry for each that it is created for. Small Reads share a plan only if many may be outstanding.
pub const MAX_IRD: u16 = 4096;
/// See [`MAX_IRD`].
pub const MAX_ORD: u16 = 4096;
/// Most completions in one completion queue.
pub const MAX_CQE: u32 = 1 << 22;
/// Most regions and windows of one device. STag indexes have 24 bits; in a full table a peer could guess one.
pub const MAX_MR: u32 = 1 << 20;

/// Payload up to this many octets is copied beside its header instead of being sent from where it lies:
/// a copy this small costs less than one more element of a scatter list.
pub const TX_COPY_MAX: u32 = 2048;
/// Payload that is sent from where it lies is copied in parts of this size when its CRC is computed, because it may change at any
/// time. Smaller parts cost more calls of the CRC function, larger ones more of the first-level cache.
pub const SUM_PART: usize = 4096;
/// Payload in segments of at least this many octets is summed while it is copied, if there is a function for that. With shorter ones the
/// call and the octets behind the last whole step cost more than the second look at them.
pub const SUM_COPY_MIN: u32 = 1280;
/// Scratch of one transmit plan: headers, trailers, copied payload. As many loopback segments as a plan holds have room in it, also if all are
/// copied. With room for four, an answer of 256 KiB filled a plan alone, which cost a fifth of the rate.
pub const TX_SCRATCH: usize = 340 * 1024;
/// A plan is closed when it holds this many octets: about five 64 KiB loopback segments. Larger plans only delay the first
/// octet; smaller ones end more often with a short segment.
pub const TX_PLAN_BYTES: usize = 312 * 1024;
/// Most segments of one plan that need a write of their own.
pub const TX_PLAN_CUTS: usize = 256;
/// Most pieces of one plan. One system call takes at most 1024.
pub const TX_PLAN_PIECES: usize = 512;
/// Most messages of one plan. With 50 octets of payload or more, a plan's scratch is full earlier.
pub const TX_PLAN_MESSAGES: usize = 4096;
/// Read responses sent in a row while local work requests wait, so that a peer's Reads cannot stop local requests.
pub const RESPONSE_BURST: u32 = 16;

/// Receive staging of one driver: at least two of the largest FPDUs.
pub const RX_STAGING: usize = 256 * 1024;
/// Most octets asked of the stream in one read into staging. Larger reads no longer fit the second-level cache.
pub const RX_READ_MAX: usize = 128 * 1024;
/// Payload of at least this size that has not arrived yet is read straight to its destination.
pub const RX_DIRECT_MIN: u32 = 8 * 1024;
/// Staging offered behind a direct read: trailer, next header, and a small FPDU that follows a large one.
pub const RX_DIRECT_TAIL: usize = 512;
/// The last octets of an RDMA Write, kept back so that they become visible after all others.
pub const WRITE_TAIL: u32 = 8;
/// Longest untagged message that the RNIC itself consumes (Terminate with both headers is 52 octets).
pub const CONTROL_MAX: usize = 64;

/// Largest FPDU: as much as its length field can say, with markers, of which one comes at once.
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
    fn no_fpdu_is_longer() {
        for next_marker_in in 0..=512 {
            let longest = fpdu_len_with_markers(next_marker_in, 65535);
            assert!(longest <= MAX_FPDU && longest + 4 >= MAX_FPDU);
        }
        // 2 of length, 65535 of ULPDU, 3 of padding, 4 of CRC, and a marker of 4 before every 508.
        assert_eq!(MAX_FPDU, 65544 + 130 * 4);
    }

    #[test]
    fn what_programs_are_told_does_not_change() {
        let told = [MAX_QP_WR, MAX_INLINE, MAX_CQE, MAX_MR];
        assert_eq!(told, [65536, 1024, 4_194_304, 1_048_576]);
        assert_eq!(MAX_MESSAGE, 0x8000_0000);
    }
}
