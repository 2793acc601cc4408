//! Runs a test in its own process. Some tests change, count or limit resources of the process, such
//! as descriptors, threads, memory or the environment, or they fork.
#![allow(unreachable_pub, reason = "a module of tests")]

use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::panic::Location;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Time limit for the process of a test.
const LIMIT: Duration = Duration::from_secs(60);
/// Environment variable that is set in the process of a test.
const CHILD: &str = "IWARP_TEST_ALONE";

/// Runs `body`, the body of the test `name`, in a fresh process of this test program.
#[track_caller]
pub fn alone(name: &str, body: impl FnOnce()) {
    alone_with(name, &[], body);
}

/// Runs `body` as [`alone`] does, with additional environment variables.
#[track_caller]
pub fn alone_with(name: &str, variables: &[(&str, &str)], body: impl FnOnce()) {
    if std::env::var_os(CHILD).is_some() {
        body();
        return;
    }
    let mut output = scratch_file();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([&path_of(name), "--exact", "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .envs(variables.iter().copied())
        .stdin(Stdio::null())
        .stdout(output.try_clone().unwrap())
        .stderr(output.try_clone().unwrap())
        .spawn()
        .unwrap();
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break Some(status);
        }
        if start.elapsed() > LIMIT {
            child.kill().unwrap();
            child.wait().unwrap();
            break None;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let mut said = Vec::new();
    output.rewind().unwrap();
    output.read_to_end(&mut said).unwrap();
    let said = String::from_utf8_lossy(&said);
    let Some(status) = status else {
        panic!("{name} hangs\n{said}");
    };
    // Check the output, because libtest also succeeds if no test has the name. The exit status is
    // checked separately, because some bodies end the process.
    assert!(
        status.success() && said.contains("running 1 test\n"),
        "{name}: {status}\n{said}"
    );
}

/// Returns libtest's name of the test `name`, which includes the module of the calling file.
#[track_caller]
pub fn path_of(name: &str) -> String {
    let file = Location::caller().file();
    let (_, file) = file.rsplit_once("/tests/it/").unwrap();
    let module = file.strip_suffix(".rs").unwrap().replace('/', "::");
    format!("{module}::{name}")
}

/// Returns an unlinked file for the output. A pipe would stay open as long as any descendant of the
/// child has it open.
fn scratch_file() -> File {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("iwarp-test-alone-{}-{number}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let file = File::options()
        .read(true)
        .append(true)
        .create_new(true)
        .open(&path)
        .unwrap();
    std::fs::remove_file(path).unwrap();
    file
}
