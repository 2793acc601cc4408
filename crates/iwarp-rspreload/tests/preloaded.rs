//! A C program for ordinary sockets on the preload library: copies of descriptors, files, waiting, flags, and a peer that speaks only TCP.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);

/// Returns the path of a library that cargo built for this test.
fn library(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let deps = test.parent().unwrap();
    [deps.join(name), deps.parent().unwrap().join(name)]
        .into_iter()
        .find(|p| p.exists())
        .unwrap_or_else(|| panic!("cargo builds {name} for its integration tests"))
}

/// Accepts connections and sends back what comes. One that sends what an RDMA peer sends is ended, as other servers do.
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

#[test]
fn a_program_for_sockets_keeps_what_the_c_library_promises() {
    let folder =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("preloaded-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    symlink(library("libiwarp_verbs.so"), folder.join("librdmacm.so.1")).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/preloaded.c");
    let exe = folder.join("preloaded");
    let status = Command::new("cc")
        .args(["-Wall", "-Wextra", "-Werror", "-g", "-o"])
        .args([&exe, &source])
        .status()
        .expect("a C compiler must be installed; Rust needs it to link, too");
    assert!(status.success(), "{} does not compile", source.display());
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port();
    // It ends with the process.
    std::thread::spawn(move || echo(&server));
    let mut child = Command::new(&exe)
        .arg(port.to_string())
        .env("LD_PRELOAD", library("librspreload.so"))
        .env("LD_LIBRARY_PATH", &folder)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let end = Instant::now() + LIMIT;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let out = child.wait_with_output().unwrap();
    let _ = std::fs::remove_dir_all(&folder);
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(
        out.status.success() && said.ends_with(" checks, 0 failed\n"),
        "{}\n{said}{}",
        out.status,
        String::from_utf8_lossy(&out.stderr)
    );
}
