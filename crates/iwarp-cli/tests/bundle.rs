//! A bundle finds a place for its libraries: beside itself, in the temporary folder, or in memory.
//!
//! The libraries are small ones of our own, so that the program says which of them it got. Read-only and `noexec` file
//! systems are mounted in namespaces that the test makes.

mod common;

use common::{Scratch, str, text};
use std::path::Path;
use std::process::{Command, Output};

/// Programs are linked with both names, and each must come from the bundle.
const PROGRAM: &str = "const char *one(void); const char *two(void); int puts(const char *);
    int main(void) { puts(one()); puts(two()); return 0; }";
const FIRST: &str = "const char *one(void) { return \"first of the bundle\"; }
    const char *two(void) { return \"second of the bundle\"; }";
const OTHERS: &str = "const char *one(void) { return \"not of the bundle\"; }
    const char *two(void) { return \"not of the bundle\"; }";

/// Compiles C. Without the standard libraries, so that the dependencies are those that the test names.
fn compile(to: &Path, source: &str, args: &[&str]) {
    let file = to.with_extension("c");
    std::fs::write(&file, source).unwrap();
    let status = Command::new("cc")
        .arg("-o")
        .arg(to)
        .arg(&file)
        .args(args)
        .status()
        .expect("a C compiler, which linking Rust needs as well");
    assert!(status.success());
}

/// A folder with a bundle in `bin`, an empty folder `tmp`, and a program that has both names in `system`.
fn prepared() -> Scratch {
    let scratch = Scratch::new();
    let system = scratch.sub("system");
    scratch.sub("tmp");
    let shared = |to: &Path, source: &str, name: &str, more: &[&str]| {
        let soname = format!("-Wl,-soname,{name}");
        compile(
            to,
            source,
            &[&["-shared", "-fPIC", &soname][..], more].concat(),
        );
    };
    let [ibverbs, rdmacm] = ["libibverbs.so.1", "librdmacm.so.1"];
    shared(&system.join(ibverbs), OTHERS, ibverbs, &[]);
    shared(&system.join(rdmacm), OTHERS, rdmacm, &[]);
    compile(
        &system.join("program"),
        PROGRAM,
        &[
            "-Wl,--no-as-needed",
            str(&system.join(ibverbs)),
            str(&system.join(rdmacm)),
            &format!("-Wl,-rpath,{},--enable-new-dtags", system.display()),
        ],
    );
    let first = scratch.path("first.so");
    shared(&first, FIRST, ibverbs, &[]);
    let second = scratch.path("second.so");
    let needed = ["-Wl,--no-as-needed", str(&first)];
    shared(&second, "", rdmacm, &needed);
    let exe = scratch.sub("bin").join("iwarp");
    // Written anew and not copied: the command itself may be a link.
    let mut bytes = std::fs::read(env!("CARGO_BIN_EXE_iwarp")).unwrap();
    let parts = [&first, &second].map(|part| std::fs::read(part).unwrap());
    bytes.extend(parts.concat());
    for len in [parts[0].len(), parts[1].len(), 0] {
        bytes.extend((len as u64).to_le_bytes());
    }
    bytes.extend(b"iwarplib");
    std::fs::write(&exe, bytes).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&exe, mode).unwrap();
    scratch
}

/// Runs a script in a mount namespace, in which the folder is `$D` and the bundle `iwarp`; `None` if the machine allows
/// no namespaces.
fn in_namespace(scratch: &Scratch, script: &str) -> Option<Output> {
    let unshare = |script: &str| {
        let mut command = Command::new("unshare");
        command
            .args(["--user", "--map-root-user", "--mount", "sh", "-euc", script])
            .env("D", scratch.path(""))
            .env("TMPDIR", scratch.path("tmp"))
            .env_remove("XDG_RUNTIME_DIR")
            .env_remove("IWARP_LIBRARY")
            .env_remove("LD_LIBRARY_PATH")
            .env_remove("LD_PRELOAD");
        command.output()
    };
    if !unshare("true").is_ok_and(|out| out.status.success()) {
        println!("skipped: no user and mount namespaces here");
        return None;
    }
    let script = format!("cd $D/; iwarp() {{ bin/iwarp \"$@\"; }}\n{script}");
    Some(unshare(&script).unwrap())
}

const BOTH: &str = "first of the bundle\nsecond of the bundle\n";
const READ_ONLY_PROGRAM: &str = "mount --bind bin bin; mount -o remount,bind,ro bin\n";
const NOEXEC_TMP: &str = "mount -t tmpfs -o noexec,mode=0777 tmpfs tmp\n";

/// Runs the script and checks what it writes.
fn says(script: &str, wanted: &str) {
    let scratch = prepared();
    let Some(out) = in_namespace(&scratch, script) else {
        return;
    };
    assert_eq!(
        (text(&out.stdout).as_str(), text(&out.stderr).as_str()),
        (wanted, "")
    );
    assert!(out.status.success());
}

#[test]
fn the_folder_beside_the_program_comes_first() {
    let script = "iwarp run -- system/program; ls bin; ls tmp";
    says(script, &format!("{BOTH}iwarp\niwarp-lib\n"));
}

#[test]
fn a_read_only_program_uses_the_temporary_folder() {
    let script = format!("{READ_ONLY_PROGRAM}iwarp run -- system/program; ls tmp | wc -l");
    says(&script, &format!("{BOTH}1\n"));
}

/// The loader maps nothing from there: it would go on to the system's libraries, or end the program.
#[test]
fn a_temporary_folder_that_is_noexec_is_not_used() {
    let script = format!("{READ_ONLY_PROGRAM}{NOEXEC_TMP}iwarp run -- system/program");
    says(&script, BOTH);
}

/// As from a container's image that nothing may write to.
#[test]
fn a_system_without_a_writable_folder_keeps_the_libraries_in_memory() {
    let script = format!(
        "{READ_ONLY_PROGRAM}{NOEXEC_TMP}mount -o remount,ro tmp\niwarp run -- system/program"
    );
    says(&script, BOTH);
}

/// Shells keep the descriptors of their script, Python and MPI's launchers close all: the children must not miss them.
#[test]
fn children_without_the_descriptors_have_the_libraries_in_memory() {
    let close =
        "for fd in $(ls /proc/self/fd); do [ $fd -le 2 ] || eval \"exec $fd>&-\" || true; done";
    let script = format!(
        "{READ_ONLY_PROGRAM}{NOEXEC_TMP}iwarp run -- bash -c '({close}; ls -l /proc/self/fd | grep -c memfd; system/program); true'"
    );
    says(&script, &format!("0\n{BOTH}"));
}

/// What `env` prints is used after its end, when its memory is gone.
#[test]
fn without_any_folder_env_says_what_to_do() {
    let scratch = prepared();
    let script = format!("{READ_ONLY_PROGRAM}{NOEXEC_TMP}iwarp env");
    let Some(out) = in_namespace(&scratch, &script) else {
        return;
    };
    let error = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{error}");
    for part in [
        "iwarp-lib: Read-only",
        ": mounted noexec;",
        "memory: only for `iwarp run`",
        "set TMPDIR to",
    ] {
        assert!(error.contains(part), "{part} in {error}");
    }
    // With the folder that it asks for it works.
    let script = format!("{script} || TMPDIR=$D/system bin/iwarp env");
    let out = in_namespace(&scratch, &script).unwrap();
    assert!(text(&out.stdout).contains("/system/iwarp-0/"), "{out:?}");
}

/// A library that has been built lies beside the command, on a source tree that is mounted read-only as well.
#[test]
fn links_have_no_place_without_a_writable_folder() {
    let scratch = prepared();
    let script = format!(
        "{READ_ONLY_PROGRAM}{NOEXEC_TMP}mount -o remount,ro tmp
        mount --bind system system; mount -o remount,bind,ro system
        IWARP_LIBRARY=$D/system/libibverbs.so.1 bin/iwarp run -- true"
    );
    let Some(out) = in_namespace(&scratch, &script) else {
        return;
    };
    let error = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{error}");
    assert!(
        error.contains("links to") && error.contains("set TMPDIR to a folder"),
        "{error}"
    );
}
