//! Fixed work, whose instructions `cargo xtask instructions` counts under callgrind. callgrind
//! counts only inside [`measured`].
//!
//! Times depend on what else the machine does; numbers of instructions do not. Only code that is
//! the same on every machine is counted: the portable CRC32C, and no system calls. Files: `arena`
//! (memory that can be registered), `link` (two queue pairs joined without sockets), `cases` (the
//! table).

mod arena;
mod cases;
mod link;

use std::process::ExitCode;

/// Runs `f`. callgrind counts instructions only inside this function; `cargo xtask instructions`
/// passes it the function's name.
#[inline(never)]
pub(crate) fn measured<R>(f: impl FnOnce() -> R) -> R {
    let result = f();
    // Without a statement after the call the compiler could make the call a jump, and callgrind
    // would not see this function return.
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
