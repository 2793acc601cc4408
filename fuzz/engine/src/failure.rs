//! Running one input, and what counts as a failure: a panic in any thread, caught or not, and an input that takes too long.

use std::panic::{self, AssertUnwindSafe};
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use crate::Target;

/// An input that takes longer than this counts as a failure, because a peer could use it to keep us busy. Correct code needs far
/// less time for any input.
pub(crate) const SLOW: Duration = Duration::from_secs(5);

/// The first panic since it was last taken: where, and its message.
static PANIC: Mutex<Option<(String, String)>> = Mutex::new(None);

/// What an input has done wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    /// In one or two words, for the name of the file.
    pub(crate) kind: &'static str,
    /// The file and line of the panic, by which a smaller input is known to fail for the same reason.
    pub(crate) place: String,
    /// For a person.
    pub(crate) text: String,
}

/// Notes panics of all threads instead of printing them, because thousands come while an input is being minimised.
fn listen() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        panic::set_hook(Box::new(|info| {
            let place = info
                .location()
                .map_or_else(String::new, |at| format!("{}:{}", at.file(), at.line()));
            let payload = info.payload();
            let text = match (
                payload.downcast_ref::<&str>(),
                payload.downcast_ref::<String>(),
            ) {
                (Some(text), _) => text,
                (_, Some(text)) => text.as_str(),
                _ => "a panic without a text",
            };
            let mut first = PANIC.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert((place, text.to_owned()));
        }));
    });
}

/// Runs an input again that was slow. On a busy machine it may have waited for the processor.
fn is_slow_again(target: &Target, data: &[u8]) -> bool {
    let start = Instant::now();
    let _ = panic::catch_unwind(AssertUnwindSafe(|| (target.run)(data)));
    start.elapsed() > SLOW
}

/// Runs one input.
pub(crate) fn run(target: &Target, data: &[u8]) -> Result<(), Failure> {
    listen();
    let start = Instant::now();
    let caught = panic::catch_unwind(AssertUnwindSafe(|| (target.run)(data)));
    let took = start.elapsed();
    let noted = match PANIC.try_lock() {
        Ok(mut first) => first.take(),
        Err(_) => None,
    };
    // A panic that the code under test has caught itself is a bug, too.
    if let Some((place, text)) = noted {
        return Err(Failure {
            kind: "panic",
            text: format!("panics at {place}: {text}"),
            place,
        });
    }
    if caught.is_err() {
        return Err(Failure {
            kind: "panic",
            place: String::new(),
            text: "panics".into(),
        });
    }
    if took > SLOW && is_slow_again(target, data) {
        return Err(Failure {
            kind: "slow",
            place: String::new(),
            text: format!("takes {:.1} s", took.as_secs_f64()),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_are_failures_also_if_they_are_caught_or_in_another_thread() {
        let target = |run| Target {
            name: "test",
            run,
            len_max: 8,
        };
        let plain = target(|data| assert!(data.len() < 2, "too long"));
        assert_eq!(run(&plain, &[1]), Ok(()));
        let failure = run(&plain, &[1, 2]).unwrap_err();
        assert!(failure.text.ends_with("too long"), "{failure:?}");
        assert!(
            failure.place.starts_with("fuzz/engine/src/failure.rs:"),
            "{failure:?}"
        );
        let caught = target(|_| drop(panic::catch_unwind(|| panic!("inside"))));
        assert!(run(&caught, &[]).is_err());
        let thread = target(|_| drop(std::thread::spawn(|| panic!("there")).join()));
        assert!(run(&thread, &[]).is_err());
        assert_eq!(run(&plain, &[1]), Ok(()), "an old panic is forgotten");
    }
}
