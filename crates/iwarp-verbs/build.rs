//! Link arguments of the C library: version nodes, name, and that it is never unloaded.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

/// Stands in for GNU's `ld` and gives a name to each version script that has none.
///
/// rustc writes a script without a name, which makes everything local but the exports that it knows of. GNU's linker
/// does not take it together with one that has names; lld, which rustc calls by another name, takes both.
const LD: &str = r#"#!/bin/sh
named() {
    case $(head -c 1 "$1") in
    "{") sed "1s/^/IWARP_LOCAL /" "$1" >"$1.named" && printf %s "$1.named" ;;
    *) printf %s "$1" ;;
    esac
}
last=
for arg do
    shift
    case $last/$arg in
    --version-script/*) arg=$(named "$arg") ;;
    */--version-script=*) arg=--version-script=$(named "${arg#*=}") ;;
    esac
    set -- "$@" "$arg"
    last=$arg
done
exec "#;

fn main() {
    let variable = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"));
    let dir = variable("CARGO_MANIFEST_DIR");
    println!("cargo:rerun-if-changed=build.rs");
    // The whole path: a checkout that was moved must not look for the file where it was.
    println!("cargo:rerun-if-changed={dir}/symbols.map");
    println!("cargo:rustc-cdylib-link-arg=-Wl,--version-script={dir}/symbols.map");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libibverbs.so.1");
    // The progress thread must outlive a dlclose by a plug-in.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    let out = variable("OUT_DIR");
    for name in ["ld", "ld.bfd"] {
        let Some(real) = program_of_linker(name) else {
            continue;
        };
        let file = Path::new(&out).join(name);
        std::fs::write(&file, format!("{LD}'{real}' \"$@\"\n")).expect("OUT_DIR is writable");
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&file, mode).expect("OUT_DIR is ours");
    }
    println!("cargo:rustc-cdylib-link-arg=-B{out}/");
}

/// What the compiler that links calls as `name`; `None` if it cannot be asked.
fn program_of_linker(name: &str) -> Option<String> {
    let linker = std::env::var_os("RUSTC_LINKER").unwrap_or_else(|| "cc".into());
    let output = Command::new(linker)
        .arg(format!("-print-prog-name={name}"))
        .output()
        .ok()?;
    let path = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && !path.is_empty()).then_some(path)
}
