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

/// Formats a value and discards the text. Formatting visits every field and every table of names.
fn print(value: &impl Debug) {
    struct Nowhere;
    impl fmt::Write for Nowhere {
        fn write_str(&mut self, _: &str) -> fmt::Result {
            Ok(())
        }
    }
    let printed = fmt::write(&mut Nowhere, format_args!("{value:?}"));
    assert!(printed.is_ok(), "Debug fails");
}
