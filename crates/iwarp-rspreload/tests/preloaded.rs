//! Runs a C program that uses ordinary sockets with the preload library.

#[path = "../../iwarp-verbs/tests/it/common/mod.rs"]
#[allow(dead_code, reason = "this program uses only some of these items")]
mod common;

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

/// Runs a TCP echo server. Closes connections that begin with MPA, as ordinary servers do.
fn echo(listener: &TcpListener) {
    for stream in listener.incoming() {
        let mut stream = stream.unwrap();
        let mut octets = [0; 256];
        while let Ok(n @ 1..) = stream.read(&mut octets) {
            if octets.starts_with(b"MPA ") || stream.write_all(&octets[..n]).is_err() {
                break;
            }
        }
    }
}

fn program(folder: &common::Folder) -> Command {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/preloaded.c");
    let exe = folder.0.join("preloaded");
    let status = Command::new("cc")
        .args(["-Wall", "-Wextra", "-Werror", "-g", "-o"])
        .args([&exe, &source])
        .status()
        .expect("a C compiler must be installed; Rust needs it to link, too");
    assert!(status.success(), "{} does not compile", source.display());
    let mut program = Command::new(&exe);
    program
        .env("LD_PRELOAD", common::library_named("librspreload.so"))
        .env("LD_LIBRARY_PATH", &folder.0);
    program
}

/// Starts a TCP echo server. Returns its port.
fn start_echo() -> String {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port();
    std::thread::spawn(move || echo(&server));
    port.to_string()
}

#[test]
fn preloaded_program_behaves_as_with_tcp() {
    let folder = common::Folder::new("preloaded");
    common::run_checks(program(&folder).arg(start_echo()));
}

#[test]
fn fallback_keeps_socket_nonblocking() {
    let folder = common::Folder::new("preloaded-nonblocking");
    let mut program = program(&folder);
    let no_queue = "create=cq,nth=1,errno=EMFILE";
    common::run_checks(
        program
            .args([&start_echo(), "nonblocking"])
            .env("IWARP_FAULT", no_queue),
    );
}

#[test]
fn forked_workers_use_listener() {
    let folder = common::Folder::new("preloaded-workers");
    let mut program = program(&folder);
    common::run_checks(program.arg("workers").env("RDMAV_FORK_SAFE", "1"));
}
