//! The attributes `timeout`, `retry_cnt`, `rnr_retry` and `min_rnr_timer` of `ibv_modify_qp(3)`:
//! how long a queue pair that is connected by number waits for its peer. The codes are those of the
//! InfiniBand specification (sections 9.7.5.2.8 and 9.9.2.1).

use std::time::Duration;

/// How long requests wait for a peer that does not answer, and how long Sends wait for a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retry {
    /// The timeout of one attempt is 4.096 µs · 2^`timeout`; 0 means no limit. At most 31.
    pub timeout: u8,
    /// Number of retries if the peer does not answer. At most 7.
    pub retry_cnt: u8,
    /// Number of retries if the peer has posted no receive; 7 means no limit. At most 7.
    pub rnr_retry: u8,
    /// Code of the delay before the peer retries a Send for which this end has posted no receive.
    /// At most 31.
    pub min_rnr_timer: u8,
}

impl Default for Retry {
    /// The values that most programs use: about half a second for an answer, and no limit for a
    /// receive.
    fn default() -> Self {
        Self {
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer: 12,
        }
    }
}

/// The delays of the codes of `min_rnr_timer`, in units of 10 µs.
const RNR_TIMER: [u32; 32] = [
    65_536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
    2048, 3072, 4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768, 49_152,
];

impl Retry {
    /// Returns `true` if all values are within their ranges.
    pub fn is_valid(&self) -> bool {
        self.timeout <= 31 && self.retry_cnt <= 7 && self.rnr_retry <= 7 && self.min_rnr_timer <= 31
    }

    /// Returns how long a request waits for a peer that is gone; `None` if there is no limit.
    pub fn gone_after(&self) -> Option<Duration> {
        if self.timeout == 0 {
            return None;
        }
        let attempt = 4096u64 << self.timeout.min(31);
        let total = attempt.saturating_mul(u64::from(self.retry_cnt) + 1);
        Some(Duration::from_nanos(total))
    }

    /// Returns the delay of the code `min_rnr_timer`.
    pub fn rnr_timer(&self) -> Duration {
        let code = usize::from(self.min_rnr_timer) % RNR_TIMER.len();
        Duration::from_micros(u64::from(RNR_TIMER[code]) * 10)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_match_infiniband() {
        let with = |timeout, retry_cnt| Retry {
            timeout,
            retry_cnt,
            ..Retry::default()
        };
        assert_eq!(with(0, 7).gone_after(), None);
        assert_eq!(with(1, 0).gone_after(), Some(Duration::from_nanos(8192)));
        assert_eq!(
            with(20, 7).gone_after(),
            Some(Duration::from_nanos(8 * (4096 << 20)))
        );
        assert_eq!(
            with(31, 7).gone_after().map(|d| d.as_secs()),
            Some(8 * 8796)
        );
        let timer = |min_rnr_timer| {
            let retry = Retry {
                min_rnr_timer,
                ..Retry::default()
            };
            retry.rnr_timer().as_micros()
        };
        assert_eq!(
            [0, 1, 12, 18, 31].map(timer),
            [655_360, 10, 640, 5120, 491_520]
        );
        for (code, pair) in RNR_TIMER.windows(2).enumerate().skip(1) {
            assert!(pair[0] < pair[1], "{code}");
        }
    }

    #[test]
    fn out_of_range_values_are_invalid() {
        let good = Retry {
            timeout: 31,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer: 31,
        };
        assert!(good.is_valid() && Retry::default().is_valid());
        for bad in [
            Retry {
                timeout: 32,
                ..good
            },
            Retry {
                retry_cnt: 8,
                ..good
            },
            Retry {
                rnr_retry: 8,
                ..good
            },
            Retry {
                min_rnr_timer: 32,
                ..good
            },
        ] {
            assert!(!bad.is_valid(), "{bad:?}");
        }
    }
}
