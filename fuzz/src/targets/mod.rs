//! The targets, one file each.

mod datagrams;
mod engine;
mod fpdu;
mod messages;
mod pair;
mod pool;
mod startup;
mod stream;
mod terminate;
mod ulpdu;

pub use datagrams::datagrams;
pub use engine::{engine, matching};
pub use fpdu::fpdu;
pub use messages::{ping, portmap, rsockets, tags};
pub use pair::pair;
pub use startup::startup;
pub use stream::stream;
pub use terminate::terminate;
pub use ulpdu::ulpdu;

use std::fmt::{self, Debug};

/// Formats a value with `Debug` and discards the text, because formatting must not panic either.
fn print(value: &impl Debug) {
    struct Discard;
    impl fmt::Write for Discard {
        fn write_str(&mut self, _: &str) -> fmt::Result {
            Ok(())
        }
    }
    let printed = fmt::write(&mut Discard, format_args!("{value:?}"));
    assert!(printed.is_ok(), "Debug fails");
}
