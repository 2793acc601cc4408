//! Work whose instructions are counted by `cargo xtask instructions` under callgrind, which collects only inside
//! [`measured`].
//!
//! Times shift with everything else that a machine does; instruction counts do not. Only code that is the same on
//! every machine is counted: the portable CRC32C, and no system calls. Files: `arena` (memory that may be
//! registered), `link` (two queue pairs joined without sockets), `cases` (the table).

mod arena;
mod cases;
mod link;

use std::process::ExitCode;

/// Runs `f` and is the function that the counter is switched on in. The name is known to `cargo xtask instructions`.
#[inline(never)]
pub(crate) fn measured<R>(f: impl FnOnce() -> R) -> R {
    let result = f();
    // What comes after `f` keeps the compiler from turning this into a jump, which would hide the return.
    std::hint::black_box(());
    result
}

fn main() -> ExitCode {
    let name = std::env::args().nth(1).unwrap_or_default();
    if name == "--list" {
        for case in cases::CASES {
            println!("{}\t{}\t{}", case.name, case.count, case.about);
        }
        return ExitCode::SUCCESS;
    }
    match cases::CASES.iter().find(|case| case.name == name) {
        Some(case) => {
            (case.run)();
            ExitCode::SUCCESS
        }
        None => {
            eprintln!("no case {name:?}; --list shows them");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_case_runs_and_checks_itself() {
        for case in super::cases::CASES {
            (case.run)();
        }
    }
}
