//! Retries of the clients of `cp`, `ping` and `perf` while the server is full.
//!
//! A full server usually has a free place within a fraction of a second, because it evicts idle
//! clients. A client therefore retries often at first, so that it gets the place before others do.
//! The delay grows with the elapsed time, so that a server that stays full sees fewer retries.

use crate::error::{Error, Result};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// How long a client keeps retrying.
const TIME_LIMIT: Duration = Duration::from_secs(10);
const MIN_DELAY: Duration = Duration::from_millis(20);
/// The delay is the elapsed time divided by this, but at least [`MIN_DELAY`].
const DELAY_DIVISOR: u32 = 50;

/// Calls `attempt` until it returns something other than [`Error::Busy`], for at most 10 s.
///
/// # Errors
/// Returns the last attempt's error.
pub fn retry_while_busy<T>(mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
    let begin = Instant::now();
    loop {
        match attempt() {
            Err(Error::Busy(why)) => {
                let Some(delay) = delay_after(begin.elapsed()) else {
                    return Err(Error::Busy(why));
                };
                tracing::info!("{why}; retrying");
                std::thread::sleep(delay);
            }
            outcome => return outcome,
        }
    }
}

/// Tries the addresses of a server in turn.
///
/// # Errors
/// Returns [`Error::Busy`] if at least one attempt returned it, otherwise the last error.
pub fn try_addresses<T>(
    addresses: &[SocketAddr],
    mut attempt: impl FnMut(SocketAddr) -> Result<T>,
) -> Result<T> {
    let mut last = Error::failed("there is no address to connect to");
    for &address in addresses {
        match attempt(address) {
            Ok(x) => return Ok(x),
            Err(e) if matches!(e, Error::Busy(_)) || !matches!(last, Error::Busy(_)) => last = e,
            Err(_) => {}
        }
    }
    Err(last)
}

/// Returns the delay before the next attempt if `waited` has elapsed since the first one, or
/// `None` if the time limit would be exceeded.
fn delay_after(waited: Duration) -> Option<Duration> {
    let delay = (waited / DELAY_DIVISOR).max(MIN_DELAY);
    (waited + delay < TIME_LIMIT).then_some(delay)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the times of all attempts, if the attempts themselves take no time.
    fn attempt_times() -> Vec<Duration> {
        let mut now = Duration::ZERO;
        let mut all = vec![now];
        while let Some(delay) = delay_after(now) {
            now += delay;
            all.push(now);
        }
        all
    }

    #[test]
    fn retries_slow_down_and_end() {
        let all = attempt_times();
        assert_eq!(all[1], Duration::from_millis(20));
        let within = |ms| all.iter().filter(|t| t.as_millis() <= ms).count();
        // Attempts are frequent in the first second, so a place that becomes free is found soon.
        assert!(within(250) >= 12, "{all:?}");
        assert!(within(1000) >= 50, "{all:?}");
        let last = all[all.len() - 1];
        assert!(last < TIME_LIMIT && last > TIME_LIMIT / 10 * 9, "{last:?}");
        assert!(all.len() < 200, "{}", all.len());
    }

    #[test]
    fn only_busy_servers_are_retried() {
        let mut attempts = 0;
        let got = retry_while_busy(|| {
            attempts += 1;
            match attempts {
                1 | 2 => Err(Error::Busy("no place".into())),
                n => Ok(n),
            }
        });
        assert_eq!(got, Ok(3));
        let mut attempts = 0;
        let failed = retry_while_busy(|| {
            attempts += 1;
            Err::<(), _>(Error::failed("nobody listens"))
        });
        assert_eq!(
            (failed, attempts),
            (Err(Error::failed("nobody listens")), 1)
        );
    }

    /// A name may have two addresses, and the server may listen on one of them only and be full.
    #[test]
    fn busy_wins_over_unreachable() {
        let addresses: [SocketAddr; 2] = ["[::1]:7", "127.0.0.1:7"].map(|a| a.parse().unwrap());
        let busy = || Error::Busy("no place".into());
        for busy_address in addresses {
            let outcome = try_addresses(&addresses, |a| match a == busy_address {
                true => Err::<(), _>(busy()),
                false => Err(Error::failed("nobody listens")),
            });
            assert_eq!(outcome, Err(busy()));
        }
        let found = try_addresses(&addresses, |a| match a == addresses[1] {
            true => Ok(a),
            false => Err(busy()),
        });
        assert_eq!(found, Ok(addresses[1]));
        let none = try_addresses(&[], |_| Ok(())).unwrap_err();
        assert!(none.to_string().contains("no address"), "{none}");
    }
}
