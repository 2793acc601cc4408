//! Fixed pieces of work. `cargo xtask instructions` counts their instructions with callgrind, but
//! only those inside [`measured`].
//!
//! Times depend on the load of the machine; numbers of instructions do not. Only code that is the
//! same on every machine is counted, so CRC32C is the portable version, and there are no system
//! calls. Files: `arena` (memory for registration), `link` (two queue pairs without sockets),
//! `cases` (the table of the pieces of work).

mod arena;
mod cases;
mod link;

use std::process::ExitCode;

/// Calls `f`. callgrind counts instructions only inside this function, whose name `cargo xtask
/// instructions` passes to it.
#[inline(never)]
pub(crate) fn measured<R>(f: impl FnOnce() -> R) -> R {
    let result = f();
    // Without a statement after the call, the compiler could turn the call into a jump, and
    // callgrind would not detect the return of this function.
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
            eprintln!("there is no case {name:?}; --list prints the names");
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
