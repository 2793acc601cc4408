//! The parameters of a queue pair that InfiniBand's connection manager exchanges, for devices shown
//! as a RoCE NIC. MPA start-up has no fields for them, so they follow the program's private data in
//! the request and the reply. `docs/wire.md` describes the format.

/// Parameters of a queue pair that one end of a connection sends to the other.
///
/// With these parameters, a connection that ends only causes an event. The queue pair stays in RTS,
/// its receives stay posted, and a request that is not answered in time fails with
/// [`WcStatus::TransportRetryExceeded`](iwarp_rnic::WcStatus::TransportRetryExceeded).
/// [`CmId::disconnect`](crate::cm::CmId::disconnect) ends the queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct InfinibandParameters {
    /// The queue pair's number.
    pub qp_num: u32,
    /// Number of retries of a request; at most 7.
    pub retry_count: u8,
    /// Number of retries of a Send for which this end has posted no receive. 7 means no limit. With
    /// a smaller number, [`Config::receiver_not_ready`](crate::Config::receiver_not_ready) applies.
    pub rnr_retry_count: u8,
    /// The program requests end-to-end flow control. This is only reported to the other program.
    pub flow_control: bool,
    /// The queue pair uses a shared receive queue.
    pub srq: bool,
    /// The timeout of one attempt is 4.096 µs · 2^`ack_timeout`; `None` keeps the timeout of the
    /// queue pair ([`Retry`](super::retry::Retry)). Not sent to the other end.
    pub ack_timeout: Option<u8>,
}

const MAGIC: [u8; 8] = *b"iwarp-ib";
const FLOW_CONTROL: u8 = 1;
const SRQ: u8 = 1 << 1;
/// Length of the queue pair number, both counts, the flags, and a zero octet.
const FIELDS_LEN: usize = 8;
const LEN: usize = FIELDS_LEN + MAGIC.len();

impl InfinibandParameters {
    pub(crate) fn append_to(&self, data: &mut Vec<u8>) {
        let flags = [(self.flow_control, FLOW_CONTROL), (self.srq, SRQ)];
        let flags = flags.iter().filter(|f| f.0).map(|f| f.1).sum();
        data.extend_from_slice(&self.qp_num.to_be_bytes());
        data.extend_from_slice(&[self.retry_count, self.rnr_retry_count, flags, 0]);
        data.extend_from_slice(&MAGIC);
    }

    /// Splits private data into the parameters at its end and the program's part.
    pub(crate) fn split_from(data: &[u8]) -> (Option<Self>, &[u8]) {
        let Some((program, tail)) = data.split_last_chunk::<LEN>() else {
            return (None, data);
        };
        let Some(&[a, b, c, d, retry_count, rnr_retry_count, flags, 0]) = tail.strip_suffix(&MAGIC)
        else {
            return (None, data);
        };
        let parameters = Self {
            qp_num: u32::from_be_bytes([a, b, c, d]),
            retry_count,
            rnr_retry_count,
            flow_control: flags & FLOW_CONTROL != 0,
            srq: flags & SRQ != 0,
            ack_timeout: None,
        };
        (Some(parameters), program)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_round_trip() {
        let mut all = Vec::new();
        for (flow_control, srq) in [(false, false), (true, false), (false, true), (true, true)] {
            all.push(InfinibandParameters {
                qp_num: 0x12_3456,
                retry_count: 7,
                rnr_retry_count: 3,
                flow_control,
                srq,
                ack_timeout: None,
            });
        }
        for parameters in all {
            for program in [&b""[..], b"iwarp-ib", b"anything at all"] {
                let mut data = program.to_vec();
                parameters.append_to(&mut data);
                assert_eq!(data.len(), program.len() + 16);
                let split = InfinibandParameters::split_from(&data);
                assert_eq!(split, (Some(parameters), program));
            }
        }
    }

    #[test]
    fn parameters_have_a_fixed_format() {
        let mut data = vec![b'x'];
        InfinibandParameters {
            qp_num: 0x12_3456,
            retry_count: 5,
            rnr_retry_count: 6,
            flow_control: true,
            srq: true,
            ack_timeout: Some(20),
        }
        .append_to(&mut data);
        assert_eq!(data, b"x\x00\x12\x34\x56\x05\x06\x03\x00iwarp-ib");
    }

    /// Private data that only resembles the parameters is the program's.
    #[test]
    fn other_private_data_is_not_split() {
        for data in [
            &b""[..],
            b"iwarp-ib",
            b"1234567iwarp-ib",
            b"12345671iwarp-ib",
        ] {
            assert_eq!(InfinibandParameters::split_from(data), (None, data));
        }
    }
}
