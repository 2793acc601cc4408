//! Tests of unmapped registered memory in runtimes with their own handlers for SIGSEGV:
//! AddressSanitizer, the Java virtual machine and Go. They run the C program `unmapped`.

use crate::common;
use crate::common::{Folder, installed, library};
use std::path::{Path, PathBuf};
use std::process::Command;

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests")
        .join(name)
}

/// Returns `true` if Debian's headers are installed. Panics if `IWARP_REQUIRE_RDMA_TOOLS` is set
/// and they are missing.
fn headers_installed() -> bool {
    let found = Path::new("/usr/include/infiniband/verbs.h").exists();
    assert!(
        found || std::env::var_os("IWARP_REQUIRE_RDMA_TOOLS").is_none(),
        "libibverbs-dev is required"
    );
    if !found {
        eprintln!("skipped: needs libibverbs-dev");
    }
    found
}

#[track_caller]
fn run_command(command: &mut Command) {
    let out = command.output().expect("the command can be started");
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{command:?}: {errors}");
}

fn run_with_both_faces(folder: &Folder, program: impl Fn(&str) -> Command) {
    for face in ["rnic", "roce"] {
        let mut program = program(face);
        program
            .env("IWARP_AS", face)
            .env("LD_LIBRARY_PATH", &folder.0);
        common::run_checks(&mut program);
    }
}

fn libraries(folder: &Folder) -> [String; 3] {
    let search_path = format!("-L{}", folder.0.display());
    [
        search_path,
        "-l:libibverbs.so.1".into(),
        "-l:librdmacm.so.1".into(),
    ]
}

#[test]
fn unmapped_memory_with_address_sanitizer() {
    if !headers_installed() {
        return;
    }
    let folder = Folder::new("unmapped-asan");
    let exe = folder.0.join("unmapped");
    let built = Command::new("cc")
        .args(["-fsanitize=address", "-pthread", "-g", "-o"])
        .args([&exe, &source("c/unmapped.c")])
        .args(libraries(&folder))
        .status();
    if !built.is_ok_and(|status| status.success()) {
        eprintln!("skipped: the C compiler has no AddressSanitizer");
        return;
    }
    for mode in ["runtime", "before-info", "after-info"] {
        run_with_both_faces(&folder, |face| {
            let mut program = Command::new(&exe);
            program.args([face, mode]);
            // The program exits without freeing all its memory.
            program.env("ASAN_OPTIONS", "detect_leaks=0");
            program
        });
    }
}

/// Returns the folder that contains `jni.h`, found relative to `javac`.
fn jni_include_dir() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let compiler = std::env::split_paths(&path).map(|dir| dir.join("javac"));
    let compiler = compiler.filter_map(|at| at.canonicalize().ok()).next()?;
    let include = compiler.parent()?.parent()?.join("include");
    include.join("jni.h").exists().then_some(include)
}

#[test]
fn unmapped_memory_in_java() {
    if !headers_installed() || !installed("java") || !installed("javac") {
        return;
    }
    let Some(include) = jni_include_dir() else {
        eprintln!("skipped: no jni.h");
        return;
    };
    let folder = Folder::new("unmapped-java");
    let native = folder.0.join("libunmapped.so");
    run_command(
        Command::new("cc")
            .args(["-shared", "-fPIC", "-pthread", "-Dmain=unmapped_main", "-o"])
            .args([
                &native,
                &source("c/unmapped.c"),
                &source("c/unmapped_jni.c"),
            ])
            .arg(format!("-I{}", include.display()))
            .arg(format!("-I{}", include.join("linux").display()))
            .args(libraries(&folder)),
    );
    let mut compile = Command::new("javac");
    run_command(
        compile
            .arg("-d")
            .args([&folder.0, &source("runtimes/Unmapped.java")]),
    );
    run_with_both_faces(&folder, |face| {
        let mut program = Command::new("java");
        program.arg("-cp").args([&folder.0]).arg("Unmapped");
        program.arg(&native).arg(face);
        program
    });
}

#[test]
fn unmapped_memory_in_go() {
    if !headers_installed() || !installed("go") {
        return;
    }
    let folder = Folder::new("unmapped-go");
    for (from, to) in [
        ("runtimes/main.go", "main.go"),
        ("runtimes/unmapped.c", "unmapped.c"),
        ("c/unmapped.c", "unmapped.inc"),
        ("c/check.h", "check.h"),
    ] {
        std::fs::copy(source(from), folder.0.join(to)).unwrap();
    }
    let cache = library().with_file_name("go-cache");
    run_command(
        Command::new("go")
            .args(["build", "-o", "unmapped"])
            .current_dir(&folder.0)
            .env("GO111MODULE", "off")
            .env("GOFLAGS", "")
            .env("GOCACHE", cache)
            .env("CGO_ENABLED", "1")
            .env("CGO_LDFLAGS", libraries(&folder).join(" ")),
    );
    run_with_both_faces(&folder, |face| {
        let mut program = Command::new(folder.0.join("unmapped"));
        program.arg(face);
        program
    });
}
