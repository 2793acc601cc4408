//! A folder with links to the built library under both of its names, `libibverbs.so.1` and `librdmacm.so.1`, and runs of C programs on it.
#![allow(dead_code, reason = "each test binary uses only some of these items")]

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The longest time that a C program may take.
const LIMIT: Duration = Duration::from_secs(60);

/// Returns the path of the library that cargo built for these tests.
pub(crate) fn library() -> PathBuf {
    library_named("libiwarp_verbs.so")
}

/// Returns the path of a library that cargo built for these tests.
pub(crate) fn library_named(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let deps = test.parent().unwrap();
    [deps.join(name), deps.parent().unwrap().join(name)]
        .into_iter()
        .find(|p| p.exists())
        .unwrap_or_else(|| panic!("cargo builds {name} for its integration tests"))
}

/// A folder for `LD_LIBRARY_PATH`, which is removed when this value is dropped.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new(test: &str) -> Self {
        let path =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{test}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        for name in ["libibverbs.so.1", "librdmacm.so.1"] {
            symlink(library(), path.join(name)).unwrap();
        }
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Returns `true` if a program is installed. Panics if it is missing and `IWARP_REQUIRE_RDMA_TOOLS` is set.
pub(crate) fn installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|dir| dir.join(program).is_file());
    assert!(
        found || std::env::var_os("IWARP_REQUIRE_RDMA_TOOLS").is_none(),
        "{program} is required"
    );
    if !found {
        eprintln!("skipped: {program} is not installed");
    }
    found
}

/// Runs a C program. Its last line must say that no check failed. Returns what it has written to standard error.
pub(crate) fn passes(program: &mut Command) -> String {
    let mut child = program
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
    let said = String::from_utf8_lossy(&out.stdout);
    let complaints = String::from_utf8_lossy(&out.stderr);
    assert!(
        out.status.success() && said.ends_with(" checks, 0 failed\n"),
        "{}\n{said}{complaints}",
        out.status
    );
    complaints.into_owned()
}
