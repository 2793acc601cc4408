//! How long the clients of `cp`, `ping` and `perf` go on asking a server that has no place for them now.
//!
//! A full server has a place again as soon as a client that does nothing may be evicted, which takes a fraction of a second. So a
//! client asks often at first: a crowd that comes again and again wants the same place, and the one who asks first gets it. Each
//! pause is in proportion to the time that has passed: a server that stays full is asked less often.

use crate::error::{Error, Result};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// How long a client goes on asking.
const LIMIT: Duration = Duration::from_secs(10);
/// The first pause, and the shortest.
const SHORTEST: Duration = Duration::from_millis(20);
/// A pause takes this part of the time that has passed.
const PART: u32 = 50;

/// Calls `attempt` until its outcome is not [`Error::Busy`], or until 10 s have passed.
///
/// # Errors
/// That of the last attempt.
pub fn ask<T>(mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
    let begin = Instant::now();
    loop {
        match attempt() {
            Err(Error::Busy(why)) => {
                let Some(pause) = pause_after(begin.elapsed()) else {
                    return Err(Error::Busy(why));
                };
                tracing::info!("{why}; asking again");
                std::thread::sleep(pause);
            }
            outcome => return outcome,
        }
    }
}

/// Tries the addresses of a server in turn.
///
/// # Errors
/// That of the last attempt, or [`Error::Busy`] if the server had no place at one of the addresses.
pub fn first_that_answers<T>(
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

/// Returns the pause before the next attempt if `waited` has passed since the first one. Returns `None` if there is no time left
/// for another attempt.
fn pause_after(waited: Duration) -> Option<Duration> {
    let pause = (waited / PART).max(SHORTEST);
    (waited + pause < LIMIT).then_some(pause)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The times of all attempts, if an attempt takes no time.
    fn attempts() -> Vec<Duration> {
        let mut now = Duration::ZERO;
        let mut all = vec![now];
        while let Some(pause) = pause_after(now) {
            now += pause;
            all.push(now);
        }
        all
    }

    #[test]
    fn a_server_is_asked_often_at_first_and_not_for_ever() {
        let all = attempts();
        assert_eq!(all[1], Duration::from_millis(20));
        let within = |ms| all.iter().filter(|t| t.as_millis() <= ms).count();
        // A place that becomes free after 200 ms, or after any other part of a second, is seen soon.
        assert!(within(250) >= 12, "{all:?}");
        assert!(within(1000) >= 50, "{all:?}");
        let last = all[all.len() - 1];
        assert!(last < LIMIT && last > LIMIT / 10 * 9, "{last:?}");
        assert!(all.len() < 200, "{}", all.len());
    }

    #[test]
    fn only_a_busy_server_is_asked_again() {
        let mut asked = 0;
        let got = ask(|| {
            asked += 1;
            match asked {
                1 | 2 => Err(Error::Busy("no place".into())),
                n => Ok(n),
            }
        });
        assert_eq!(got, Ok(3));
        let mut asked = 0;
        let failed = ask(|| {
            asked += 1;
            Err::<(), _>(Error::failed("nobody listens"))
        });
        assert_eq!((failed, asked), (Err(Error::failed("nobody listens")), 1));
    }

    /// A name may have two addresses, and a server that listens at one of them and is busy.
    #[test]
    fn a_busy_server_is_not_taken_for_one_that_is_not_there() {
        let addresses: [SocketAddr; 2] = ["[::1]:7", "127.0.0.1:7"].map(|a| a.parse().unwrap());
        let busy = || Error::Busy("no place".into());
        for at in 0..2 {
            let outcome = first_that_answers(&addresses, |a| match a == addresses[at] {
                true => Err::<(), _>(busy()),
                false => Err(Error::failed("nobody listens")),
            });
            assert_eq!(outcome, Err(busy()));
        }
        let found = first_that_answers(&addresses, |a| match a == addresses[1] {
            true => Ok(a),
            false => Err(busy()),
        });
        assert_eq!(found, Ok(addresses[1]));
        let none = first_that_answers(&[], |_| Ok(())).unwrap_err();
        assert!(none.to_string().contains("no address"), "{none}");
    }
}
