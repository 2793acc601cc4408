//! Compiles `src/library.rs` to a shared library that depends on no other library.
//!
//! The dynamic loader loads an audit library and its dependencies into a namespace of their own, so
//! a library that needs the C library costs every process a second copy of it. Cargo cannot build
//! this one itself: without the standard library, `panic` must be `abort`, and Cargo's profiles set
//! that for whole workspaces only. The workspace's compiler flags (coverage, sanitizers) do not
//! apply for the same reason: they would bring their runtimes along.

use std::path::{Path, PathBuf};
use std::process::Command;

fn variable(name: &str) -> Option<String> {
    println!("cargo:rerun-if-env-changed={name}");
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn set_by_cargo(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"))
}

fn compiler(to: &Path) -> Command {
    let mut command = Command::new(set_by_cargo("RUSTC"));
    let source: PathBuf = [&set_by_cargo("CARGO_MANIFEST_DIR"), "src/library.rs"]
        .iter()
        .collect();
    command
        .arg(source)
        .args(["--crate-name", "iwarp_audit", "--crate-type", "cdylib"])
        .args(["--edition", "2024", "--target", &set_by_cargo("TARGET")])
        .args(["-Cpanic=abort", "-Copt-level=2", "-Clto=fat"])
        // Without this flag rustc refuses to make shared libraries for musl.
        .args(["-Ctarget-feature=-crt-static", "-Cstrip=symbols"])
        // A reference to a function of the C library is an error.
        .args(["-Clink-arg=-nostdlib", "-Clink-arg=-zdefs"])
        .arg("-o")
        .arg(to)
        // Only the workspace's flags are in these.
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    command
}

fn main() {
    for file in ["build.rs", "src"] {
        println!("cargo:rerun-if-changed={file}");
    }
    let to = Path::new(&set_by_cargo("OUT_DIR")).join("libiwarp_audit.so");
    let mut first = compiler(&to);
    // Cargo passes the linker that its configuration names.
    if let Some(linker) = variable("RUSTC_LINKER") {
        first.arg(format!("-Clinker={linker}"));
    }
    // The linker that comes with Rust works for every architecture, because nothing of the system
    // is linked. `cargo check` for another architecture usually has no other linker.
    let mut second = compiler(&to);
    second.args(["-Clinker=rust-lld", "-Clinker-flavor=ld.lld"]);
    let native =
        set_by_cargo("TARGET") == set_by_cargo("HOST") || variable("RUSTC_LINKER").is_some();
    let (first, second) = if native {
        (first, second)
    } else {
        (second, first)
    };
    let mut errors = String::new();
    for mut command in [first, second] {
        match command.output() {
            Ok(output) if output.status.success() => return,
            Ok(output) => errors.push_str(&String::from_utf8_lossy(&output.stderr)),
            Err(error) => errors.push_str(&format!("{command:?}: {error}\n")),
        }
    }
    panic!("libiwarp_audit.so cannot be built:\n{errors}");
}
