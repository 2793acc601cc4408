//! The targets, one file each.

mod engine;
mod fpdu;
mod startup;
mod stream;
mod terminate;
mod ulpdu;

pub use engine::engine;
pub use fpdu::fpdu;
pub use startup::startup;
pub use stream::stream;
pub use terminate::terminate;
pub use ulpdu::ulpdu;

use std::fmt::{self, Debug};

/// Prints a value to nowhere: formatting visits every field and name table.
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
