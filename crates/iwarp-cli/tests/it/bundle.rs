//! A bundle is an `iwarp` command that contains its libraries. These tests check where it unpacks
//! them: beside itself, in the temporary folder, or in memory.
//!
//! Small libraries that the tests compile replace the real ones, so that the program can print
//! which ones it got. Read-only and `noexec` file systems are mounted in namespaces.

use crate::common::{Scratch, compile, str, text};
use std::path::Path;
use std::process::{Command, Output};

/// The program is linked with both libraries and prints a text from each, to identify them.
const PROGRAM: &str = "const char *one(void); const char *two(void); int puts(const char *);
    int main(void) { puts(one()); puts(two()); return 0; }";
/// The program loads the library that its argument names.
const LOADS: &str = "#include <dlfcn.h>
    int puts(const char *);
    int main(int count, char **names) {
        void *library = dlopen(names[count - 1], RTLD_NOW);
        puts(library ? ((const char *(*)(void))dlsym(library, \"one\"))() : dlerror());
        return 0;
    }";
const BUNDLED: &str = "const char *one(void) { return \"first of the bundle\"; }
    const char *two(void) { return \"second of the bundle\"; }";
const SYSTEM: &str = "const char *one(void) { return \"not of the bundle\"; }
    const char *two(void) { return \"not of the bundle\"; }";

/// Creates a scratch folder with a bundle in `bin`, an empty folder `tmp`, and in `system` a
/// program that is linked with both libraries.
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
    shared(&system.join(ibverbs), SYSTEM, ibverbs, &[]);
    shared(&system.join(rdmacm), SYSTEM, rdmacm, &[]);
    compile(
        &system.join("program"),
        PROGRAM,
        &[
            "-Wl,--no-as-needed",
            str(&system.join(ibverbs)),
            str(&system.join(rdmacm)),
            &format!("-Wl,-rpath,{},--disable-new-dtags", system.display()),
        ],
    );
    compile(&system.join("loads"), LOADS, &["-ldl"]);
    let first = scratch.path("first.so");
    shared(&first, BUNDLED, ibverbs, &[]);
    let second = scratch.path("second.so");
    let needed = ["-Wl,--no-as-needed", str(&first)];
    shared(&second, "", rdmacm, &needed);
    let exe = scratch.sub("bin").join("iwarp");
    let mut bytes = std::fs::read(env!("CARGO_BIN_EXE_iwarp")).unwrap();
    let parts = [&first, &second].map(|part| std::fs::read(part).unwrap());
    bytes.extend(parts.concat());
    for len in [parts[0].len(), parts[1].len(), 0, 0] {
        bytes.extend((len as u64).to_le_bytes());
    }
    bytes.extend(b"iwarplib");
    // `install` creates the file; see `missing_libraries_have_instructions` in `run.rs`.
    let content = scratch.path("content");
    std::fs::write(&content, bytes).unwrap();
    let installed = Command::new("install").arg(&content).arg(&exe).status();
    assert!(installed.unwrap().success());
    scratch
}

/// Runs a script in a new mount namespace, where `$D` is the scratch folder and `iwarp` the bundle.
/// Returns `None` if this machine does not allow namespaces.
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

/// Runs the script and checks that stdout is `wanted` and stderr is empty.
fn check_output(script: &str, wanted: &str) {
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
fn folder_beside_the_program_comes_first() {
    let script = "iwarp run -- system/program; ls bin; ls tmp";
    check_output(script, &format!("{BOTH}iwarp\niwarp-lib\n"));
}

#[test]
fn read_only_program_uses_temporary_folder() {
    let script = format!("{READ_ONLY_PROGRAM}iwarp run -- system/program; ls tmp | wc -l");
    check_output(&script, &format!("{BOTH}1\n"));
}

/// The loader cannot map libraries from a `noexec` file system. It would load the system's
/// libraries instead, or fail.
#[test]
fn noexec_folder_is_not_used() {
    let script = format!("{READ_ONLY_PROGRAM}{NOEXEC_TMP}iwarp run -- system/program");
    check_output(&script, BOTH);
}

/// As in a container with a read-only file system.
#[test]
fn libraries_stay_in_memory_without_folder() {
    let script = format!(
        "{READ_ONLY_PROGRAM}{NOEXEC_TMP}mount -o remount,ro tmp\niwarp run -- system/program"
    );
    check_output(&script, BOTH);
}

/// The audit library, which is in memory as well, redirects all names to the file in memory.
#[test]
fn libraries_in_memory_have_all_names() {
    let script = format!(
        "{READ_ONLY_PROGRAM}{NOEXEC_TMP}mount -o remount,ro tmp
        for name in libibverbs.so librdmacm-ab12cd.so.1 $D/system/libibverbs.so.1; do
            iwarp run -- system/loads $name; iwarp run -- env -u LD_PRELOAD system/loads $name
        done"
    );
    check_output(&script, &"first of the bundle\n".repeat(6));
}

/// Python and MPI launchers close all inherited descriptors, including those of the libraries in
/// memory. Their children must find the libraries nevertheless.
#[test]
fn children_find_libraries_in_memory() {
    let close =
        "for fd in $(ls /proc/self/fd); do [ $fd -le 2 ] || eval \"exec $fd>&-\" || true; done";
    let script = format!(
        "{READ_ONLY_PROGRAM}{NOEXEC_TMP}iwarp run -- bash -c \
         '({close}; ls -l /proc/self/fd | grep -c memfd; system/program); true'"
    );
    check_output(&script, &format!("0\n{BOTH}"));
}

/// `env` cannot use memory, which would be freed before a shell uses the output of `env`.
#[test]
fn env_needs_a_folder() {
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
        "memory: only `iwarp run`",
        "set TMPDIR to",
    ] {
        assert!(error.contains(part), "{part} in {error}");
    }
    // The command succeeds with a folder as the message asks for.
    let script = format!("{script} || TMPDIR=$D/system bin/iwarp env");
    let out = in_namespace(&scratch, &script).unwrap();
    assert!(text(&out.stdout).contains("/system/iwarp-0/"), "{out:?}");
}

/// A library in `IWARP_LIBRARY` needs links with the names that programs load. No folder can hold
/// them here.
#[test]
fn links_need_a_folder() {
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
