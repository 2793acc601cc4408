//! Runs each example without arguments, which starts both ends in one process, and checks the
//! output.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);

/// Returns the path of an example. `cargo test` builds the examples, but `cargo test --test it`
/// does not, so this function builds one that is missing.
fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let profile = test
        .parent()
        .and_then(Path::parent)
        .expect("a target directory");
    let path = profile.join("examples").join(name);
    if !path.exists() {
        let target = profile.parent().expect("a target directory");
        let built = Command::new(env!("CARGO"))
            .args([
                "build",
                "--package",
                "iwarp",
                "--example",
                name,
                "--target-dir",
            ])
            .arg(target)
            .status()
            .expect("cargo runs");
        assert!(built.success());
    }
    path
}

fn run(name: &str) -> String {
    let mut child = Command::new(example(name))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the example starts");
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("wait") {
            break status;
        }
        if start.elapsed() > LIMIT {
            let _ = child.kill();
            let _ = child.wait();
            panic!("{name} hangs");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let out = child.wait_with_output().expect("output").stdout;
    let out = String::from_utf8(out).expect("text");
    assert!(status.success(), "{name}: {out}");
    out
}

#[test]
fn hello() {
    for name in ["hello", "hello_verbs"] {
        let out = run(name);
        assert!(
            out.contains("client heard: you said 'hello over RDMA'"),
            "{out}"
        );
    }
}

#[test]
fn kv() {
    let out = run("kv");
    assert!(
        out.contains("colour = Some(\"blue\")") && out.contains("size = None"),
        "{out}"
    );
    assert!(out.contains("200 reads of a changing value"), "{out}");
}

#[test]
fn kv_verbs() {
    let out = run("kv_verbs");
    assert!(
        out.contains("colour = blue") && out.contains("size is not there"),
        "{out}"
    );
    assert!(out.contains("200 reads of a changing value"), "{out}");
}

#[test]
fn rpc() {
    let out = run("rpc");
    assert!(out.contains("100 of 100 answers are right"), "{out}");
}

#[test]
fn work_queue() {
    let out = run("work_queue");
    assert!(out.contains("1000 of 1000 results are right"), "{out}");
}

/// The example has to run; the measured ratio is not checked.
#[test]
fn cost() {
    let out = Command::new(example("cost"))
        .args(["1", "2000"])
        .output()
        .expect("runs");
    let out = String::from_utf8_lossy(&out.stdout);
    assert_eq!(out.matches("ratio").count(), 4, "{out}");
}

/// Each example fits on a page.
#[test]
fn examples_are_short() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    for (name, most) in [
        ("hello", 25),
        ("rpc", 100),
        ("kv", 100),
        ("work_queue", 100),
        ("file_transfer", 100),
    ] {
        let text = std::fs::read_to_string(folder.join(name).with_extension("rs")).expect("text");
        let lines = text.lines().filter(|line| !line.starts_with("//!")).count();
        assert!(lines <= most, "{name}: {lines} lines");
    }
}

#[test]
fn counter() {
    let out = run("counter");
    assert!(out.contains("4 clients added 500 each: 2000"), "{out}");
}

#[test]
fn file_transfer() {
    for name in ["file_transfer", "file_transfer_verbs"] {
        let out = run(name);
        assert!(out.contains("the copy is the same"), "{out}");
    }
}

#[test]
fn echo_async() {
    let out = run("echo_async");
    assert_eq!(out.matches("50 messages came back").count(), 8, "{out}");
}

#[test]
fn wrong_arguments_are_refused() {
    let out = Command::new(example("hello_verbs"))
        .arg("x")
        .output()
        .expect("runs");
    assert!(!out.status.success());
    assert!(String::from_utf8_lossy(&out.stderr).contains("usage: hello_verbs"));
}
