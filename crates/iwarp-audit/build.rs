//! Compiles `src/library.rs` to a shared library that depends on no other library.
//!
//! The dynamic loader loads an audit library and its dependencies into a separate namespace. If the
//! library needed the C library, every process would load a second copy of it. Cargo cannot build
//! the library: without the standard library, `panic` must be `abort`, which Cargo's profiles can
//! only set for the whole workspace. The workspace's compiler flags (coverage, sanitizers) are not
//! used, because their runtimes would be dependencies.

use std::path::{Path, PathBuf};
use std::process::Command;

fn variable(name: &str) -> Option<String> {
    println!("cargo:rerun-if-env-changed={name}");
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn set_by_cargo(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"))
}

fn compile_command(to: &Path) -> Command {
    let mut command = Command::new(set_by_cargo("RUSTC"));
    let source: PathBuf = [&set_by_cargo("CARGO_MANIFEST_DIR"), "src/library.rs"]
        .iter()
        .collect();
    command
        .arg(source)
        .args(["--crate-name", "iwarp_audit", "--crate-type", "cdylib"])
        .args(["--edition", "2024", "--target", &set_by_cargo("TARGET")])
        .args(["-Cpanic=abort", "-Copt-level=2", "-Clto=fat"])
        // Without this flag, rustc cannot build shared libraries for musl.
        .args(["-Ctarget-feature=-crt-static", "-Cstrip=symbols"])
        // Make a reference to a function of the C library an error.
        .args(["-Clink-arg=-nostdlib", "-Clink-arg=-zdefs"])
        // Builds in different folders must be identical.
        .arg(format!(
            "--remap-path-prefix={}=/iwarp-audit",
            set_by_cargo("CARGO_MANIFEST_DIR")
        ))
        .arg("-o")
        .arg(to)
        // Do not use the workspace's flags.
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    command
}

fn main() {
    for file in ["build.rs", "src"] {
        println!("cargo:rerun-if-changed={file}");
    }
    let to = Path::new(&set_by_cargo("OUT_DIR")).join("libiwarp_audit.so");
    let mut with_configured = compile_command(&to);
    // Cargo passes the linker of its configuration.
    if let Some(linker) = variable("RUSTC_LINKER") {
        with_configured.arg(format!("-Clinker={linker}"));
    }
    // Rust's own linker works for every architecture, because no system library is linked. For
    // `cargo check` of another architecture, there is usually no other linker.
    let mut with_lld = compile_command(&to);
    with_lld.args(["-Clinker=rust-lld", "-Clinker-flavor=ld.lld"]);
    let prefer_configured =
        set_by_cargo("TARGET") == set_by_cargo("HOST") || variable("RUSTC_LINKER").is_some();
    let (first, second) = if prefer_configured {
        (with_configured, with_lld)
    } else {
        (with_lld, with_configured)
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
