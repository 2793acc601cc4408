//! The counters of a queue pair.

/// Totals since the queue pair was created. All wrap at 2^64.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Counters {
    /// Octets written to the stream, framing included.
    pub tx_bytes: u64,
    /// Octets read from the stream, framing included.
    pub rx_bytes: u64,
    /// FPDUs built.
    pub tx_fpdus: u64,
    /// FPDUs accepted.
    pub rx_fpdus: u64,
    /// Messages (work requests, responses, Terminates) sent in full.
    pub tx_messages: u64,
    /// Messages received in full.
    pub rx_messages: u64,
    /// Payload octets sent.
    pub tx_payload: u64,
    /// Payload octets placed.
    pub rx_payload: u64,
    /// Payload octets that were read straight to their destination.
    pub rx_direct: u64,
    /// RDMA Read Requests and atomics served.
    pub rx_requests: u64,
    /// FPDUs dropped because of a wrong CRC.
    pub crc_errors: u64,
    /// FPDUs dropped because of a wrong marker.
    pub marker_errors: u64,
    /// Sends that arrived before a receive was posted.
    pub receiver_not_ready: u64,
    /// Terminates sent.
    pub terminates_sent: u64,
    /// Terminates received.
    pub terminates_received: u64,
    /// Completions written.
    pub completions: u64,
}

impl Counters {
    /// Returns all counters with their names, in a fixed order.
    pub const fn named(&self) -> [(&'static str, u64); 16] {
        [
            ("tx_bytes", self.tx_bytes),
            ("rx_bytes", self.rx_bytes),
            ("tx_fpdus", self.tx_fpdus),
            ("rx_fpdus", self.rx_fpdus),
            ("tx_messages", self.tx_messages),
            ("rx_messages", self.rx_messages),
            ("tx_payload", self.tx_payload),
            ("rx_payload", self.rx_payload),
            ("rx_direct", self.rx_direct),
            ("rx_requests", self.rx_requests),
            ("crc_errors", self.crc_errors),
            ("marker_errors", self.marker_errors),
            ("receiver_not_ready", self.receiver_not_ready),
            ("terminates_sent", self.terminates_sent),
            ("terminates_received", self.terminates_received),
            ("completions", self.completions),
        ]
    }

    /// Adds the counters of `other`, for the totals of a device.
    pub const fn add(&mut self, other: &Self) {
        self.tx_bytes = self.tx_bytes.wrapping_add(other.tx_bytes);
        self.rx_bytes = self.rx_bytes.wrapping_add(other.rx_bytes);
        self.tx_fpdus = self.tx_fpdus.wrapping_add(other.tx_fpdus);
        self.rx_fpdus = self.rx_fpdus.wrapping_add(other.rx_fpdus);
        self.tx_messages = self.tx_messages.wrapping_add(other.tx_messages);
        self.rx_messages = self.rx_messages.wrapping_add(other.rx_messages);
        self.tx_payload = self.tx_payload.wrapping_add(other.tx_payload);
        self.rx_payload = self.rx_payload.wrapping_add(other.rx_payload);
        self.rx_direct = self.rx_direct.wrapping_add(other.rx_direct);
        self.rx_requests = self.rx_requests.wrapping_add(other.rx_requests);
        self.crc_errors = self.crc_errors.wrapping_add(other.crc_errors);
        self.marker_errors = self.marker_errors.wrapping_add(other.marker_errors);
        self.receiver_not_ready = self
            .receiver_not_ready
            .wrapping_add(other.receiver_not_ready);
        self.terminates_sent = self.terminates_sent.wrapping_add(other.terminates_sent);
        self.terminates_received = self
            .terminates_received
            .wrapping_add(other.terminates_received);
        self.completions = self.completions.wrapping_add(other.completions);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A counter missing from one of the lists would stay zero there.
    #[test]
    fn every_counter_is_added_and_named() {
        let fields = size_of::<Counters>() / size_of::<u64>();
        let mut sum = Counters::default();
        assert_eq!(sum.named().len(), fields);
        let one = Counters {
            tx_bytes: 1,
            rx_bytes: 2,
            tx_fpdus: 3,
            rx_fpdus: 4,
            tx_messages: 5,
            rx_messages: 6,
            tx_payload: 7,
            rx_payload: 8,
            rx_direct: 9,
            rx_requests: 10,
            crc_errors: 11,
            marker_errors: 12,
            receiver_not_ready: 13,
            terminates_sent: 14,
            terminates_received: 15,
            completions: 16,
        };
        sum.add(&one);
        sum.add(&one);
        for (at, (name, value)) in sum.named().into_iter().enumerate() {
            assert_eq!(value, 2 * (at as u64 + 1), "{name}");
        }
    }
}
