//! A folder with links to the built library under both of its names, `libibverbs.so.1` and `librdmacm.so.1`.
#![allow(dead_code, reason = "each test binary uses only some of these items")]

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Returns the path of the library that cargo built for these tests.
pub(crate) fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let name = "libiwarp_verbs.so";
    let deps = test.parent().unwrap();
    [deps.join(name), deps.parent().unwrap().join(name)]
        .into_iter()
        .find(|p| p.exists())
        .expect("cargo builds the library for its integration tests")
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
