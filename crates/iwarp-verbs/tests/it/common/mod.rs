//! Links to the built library under both of its names, and functions that run C programs with it.

use rustix::process::{Pid, Signal, kill_process_group};
use std::io::Read;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(240);

pub(crate) fn library() -> PathBuf {
    library_named("libiwarp_verbs.so")
}

pub(crate) fn library_named(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let deps = test.parent().unwrap();
    [deps.join(name), deps.parent().unwrap().join(name)]
        .into_iter()
        .find(|p| p.exists())
        .unwrap_or_else(|| panic!("cargo should have built {name} for these tests"))
}

/// A folder for `LD_LIBRARY_PATH`, removed on drop.
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

/// Returns `true` if a program is installed. Panics if `IWARP_REQUIRE_RDMA_TOOLS` is set and it is
/// missing.
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

/// Runs a C program. Returns its standard error. Panics unless the last line of its output reports
/// that no check failed.
pub(crate) fn run_checks(program: &mut Command) -> String {
    run_checks_within(TIMEOUT, program)
}

/// As [`run_checks`], with another timeout. Kills all processes that the program started, after the
/// timeout or when the program has ended.
pub(crate) fn run_checks_within(limit: Duration, program: &mut Command) -> String {
    let mut child = program
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let group = Pid::from_child(&child);
    // Threads read the output, because it may not fit into a pipe.
    let output = read_in_thread(child.stdout.take().unwrap());
    let errors = read_in_thread(child.stderr.take().unwrap());
    let deadline = Instant::now() + limit;
    let mut status = child.try_wait().unwrap();
    while status.is_none() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
        status = child.try_wait().unwrap();
    }
    // This fails if no process is left.
    let _ = kill_process_group(group, Signal::KILL);
    child.wait().unwrap();
    let (output, errors) = (output.join().unwrap(), errors.join().unwrap());
    let name = program.get_program().to_string_lossy();
    let Some(status) = status else {
        panic!("{name} did not end within {limit:?}\n{output}{errors}");
    };
    assert!(
        status.success() && output.ends_with(" checks, 0 failed\n"),
        "{name}: {status}\n{output}{errors}"
    );
    errors
}

fn read_in_thread(mut pipe: impl Read + Send + 'static) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut octets = Vec::new();
        let _ = pipe.read_to_end(&mut octets);
        String::from_utf8_lossy(&octets).into_owned()
    })
}
