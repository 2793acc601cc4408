//! Tests of the message at exit if a program loaded the libraries but opened no device.

use crate::common;
use std::path::Path;
use std::process::Command;

const LINE: &str = "iwarp: unused loaded the RDMA libraries, but opened no device\n";

/// Runs the program and returns its standard error. `run` is the value of `IWARP_RUN` in the shell.
fn standard_error(folder: &common::Folder, run: &str, arguments: &str) -> String {
    let script = format!(
        "export IWARP_RUN={run}; exec {}/unused {arguments}",
        folder.0.display()
    );
    let out = Command::new("sh")
        .args(["-c", &script])
        .env("LD_LIBRARY_PATH", &folder.0)
        .output()
        .unwrap();
    assert!(out.status.success(), "{arguments}: {}", out.status);
    String::from_utf8(out.stderr).unwrap()
}

#[test]
fn message_if_no_device_opened() {
    if !Path::new("/usr/include/rdma/rdma_cma.h").exists() {
        eprintln!("skipped: needs libibverbs-dev and librdmacm-dev");
        return;
    }
    let folder = common::Folder::new("unused");
    let status = Command::new("cc")
        .args(["-Wall", "-Wextra", "-Werror", "-o"])
        .arg(folder.0.join("unused"))
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/unused.c"))
        .arg("-L")
        .arg(&folder.0)
        .args(["-l:libibverbs.so.1", "-l:librdmacm.so.1"])
        .status()
        .unwrap();
    assert!(status.success());
    // `$$` is the program's process ID; 1 is another process.
    for (run, arguments, expected) in [
        ("$$", "nothing", LINE),
        ("$$", "list", LINE),
        ("$$", "list child", ""),
        ("$$", "guid", ""),
        ("$$", "open", ""),
        ("$$", "cm", ""),
        ("1", "list", LINE),
        ("1", "nothing", ""),
        ("1", "open", ""),
        ("", "list", ""),
        ("x", "nothing", ""),
    ] {
        assert_eq!(
            standard_error(&folder, run, arguments),
            expected,
            "{run} {arguments}"
        );
    }
}
