//! Link arguments of the C library: symbol versions, name, and no unloading.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

/// A wrapper of GNU's `ld` that names anonymous version scripts.
///
/// rustc writes an anonymous script, which makes everything local except the exports it knows.
/// GNU's linker refuses an anonymous script together with a named one. lld accepts both, and is not
/// wrapped, because its file name is different.
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
    let env_var = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"));
    let dir = env_var("CARGO_MANIFEST_DIR");
    println!("cargo:rerun-if-changed=build.rs");
    // An absolute path, so that moving the checkout triggers a rebuild.
    println!("cargo:rerun-if-changed={dir}/symbols.map");
    let out = env_var("OUT_DIR");
    let map = version_script(&dir, &out);
    println!("cargo:rustc-cdylib-link-arg=-Wl,--version-script={map}");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libibverbs.so.1");
    // The progress thread must survive a plug-in's dlclose.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    for name in ["ld", "ld.bfd"] {
        let Some(real) = linker_path(name) else {
            continue;
        };
        let file = Path::new(&out).join(name);
        std::fs::write(&file, format!("{LD}'{real}' \"$@\"\n")).expect("OUT_DIR is writable");
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&file, mode).expect("OUT_DIR belongs to this build");
    }
    println!("cargo:rustc-cdylib-link-arg=-B{out}/");
}

/// Returns the path of the version script for the linker in use.
///
/// zig uses only the last script, which is ours. Without rustc's script, all symbols of Rust's
/// standard library would be exported, so zig gets a script that makes symbols without a version
/// local. GNU's linker refuses two scripts that say so.
fn version_script(dir: &str, out: &str) -> String {
    let map = format!("{dir}/symbols.map");
    // cargo-zigbuild passes a version of glibc to zig, which then prints its own version but fails.
    let is_zig = ask_linker("--version").is_some_and(|(_, text)| text.contains("ziglang"));
    if !is_zig {
        return map;
    }
    let text = std::fs::read_to_string(&map).expect("symbols.map is readable");
    let complete = text.replacen("{ }", "{ local: *; }", 1);
    assert_ne!(text, complete, "symbols.map has an empty version node");
    let file = format!("{out}/symbols.map");
    std::fs::write(&file, complete).expect("OUT_DIR is writable");
    file
}

/// Returns the path of the linker that the C compiler runs as `name`, or `None` if unknown.
fn linker_path(name: &str) -> Option<String> {
    let (success, path) = ask_linker(&format!("-print-prog-name={name}"))?;
    (success && !path.is_empty()).then_some(path)
}

/// Returns whether the C compiler succeeds with this option, and what it prints.
fn ask_linker(option: &str) -> Option<(bool, String)> {
    println!("cargo:rerun-if-env-changed=RUSTC_LINKER");
    let linker = std::env::var_os("RUSTC_LINKER").unwrap_or_else(|| "cc".into());
    let output = Command::new(linker).arg(option).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some((output.status.success(), text.trim().to_owned()))
}
