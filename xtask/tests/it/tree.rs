//! `xtask` works on the tree of the current directory, wherever `xtask` was built. A test program
//! that hangs is killed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A folder. Dropping the value removes it.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("xtask-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir(&dir).unwrap();
        // cargo prints canonical paths.
        Self(dir.canonicalize().unwrap())
    }

    fn write(&self, file: &str, text: &str) {
        let file = self.0.join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn xtask(dir: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(args)
        .current_dir(dir)
        .env_remove("CARGO_TARGET_DIR")
        .output()
        .unwrap()
}

fn package(name: &str) -> String {
    format!("[package]\nname = \"{name}\"\nedition = \"2024\"\n")
}

#[test]
fn tree_is_found_from_current_directory() {
    let tree = Folder::new("tree");
    tree.write(
        "Cargo.toml",
        "[workspace]\nresolver = \"3\"\nmembers = [\"xtask\"]\n",
    );
    tree.write("xtask/Cargo.toml", &package("xtask"));
    tree.write("xtask/src/main.rs", "fn   main() {}\n");
    let probe = format!("{}[workspace]\n", package("probe"));
    tree.write("xtask/no-std-probe/Cargo.toml", &probe);
    tree.write("xtask/no-std-probe/src/main.rs", "fn main() {}\n");

    let check = || xtask(&tree.0.join("xtask/src"), &["test", "--only", "fmt"]);
    let out = check();
    let said = String::from_utf8_lossy(&out.stdout);
    let source = tree.0.join("xtask/src/main.rs");
    assert!(!out.status.success(), "{said}");
    assert!(said.contains(source.to_str().unwrap()), "{said}");
    assert!(tree.0.join("target/xtask-logs/fmt.log").is_file());

    fs::write(source, "fn main() {}\n").unwrap();
    let out = check();
    assert!(out.status.success(), "{out:?}");
}

#[test]
fn other_folders_are_refused() {
    let folder = Folder::new("other");
    let refused = || {
        let out = xtask(&folder.0, &["test", "--only", "fmt"]);
        assert_eq!(out.status.code(), Some(1), "{out:?}");
        let error = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(error.contains("inside the project's work tree"), "{error}");
        error
    };
    refused();
    folder.write("Cargo.toml", &package("other"));
    folder.write("src/main.rs", "fn main() {}\n");
    let error = refused();
    assert!(error.contains(folder.0.to_str().unwrap()), "{error}");
    assert!(!folder.0.join("target").exists());
}

/// A program whose second test and its child process never end.
const HANGING: &str = "#[test] fn ends() {}
#[test] fn hangs() { std::process::Command::new(\"sleep\").arg(\"1000\").status().unwrap(); }
";

#[test]
fn hung_test_is_killed_and_named() {
    let folder = Folder::new("hung");
    folder.write("hanging.rs", HANGING);
    folder.write("debug/deps/empty", "");
    let program = folder.0.join("debug/deps/hanging");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let built = Command::new(rustc)
        .args(["--test", "-o"])
        .args([&program, &folder.0.join("hanging.rs")])
        .status();
    assert!(built.unwrap().success());
    let watch = folder.0.join("debug/watch-tests");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_watch-tests"), watch).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("watch-tests.sh");
    // With one thread, libtest prints the name of a test when it begins.
    let run_watched = |filter: &str| {
        let mut command = Command::new(&script);
        command.arg(&program).args([filter, "--test-threads=1"]);
        command.env("CARGO_PKG_NAME", "some");
        command.env("TEST_LIMIT_S", "1").output().unwrap()
    };
    let out = run_watched("ends");
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(
        out.status.success() && said.contains("test ends ... ok\n"),
        "{out:?}"
    );

    let out = run_watched("");
    assert_eq!(out.status.code(), Some(124), "{out:?}");
    let report = String::from_utf8_lossy(&out.stderr);
    assert!(
        report.starts_with("hung: test hangs of some/hanging has been running for 1 s\n"),
        "{report}"
    );
    let child = report.lines().find(|line| line.ends_with(": sleep 1000"));
    let child = child.and_then(|line| line.split([' ', ':']).find_map(|word| word.parse().ok()));
    let child: u32 = child.unwrap_or_else(|| panic!("{report}"));
    // A killed orphan may stay as a zombie until its new parent collects it.
    let running = || {
        let stat = fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
        stat.contains(" (sleep) ") && !stat.contains(" (sleep) Z ")
    };
    for _ in 0..1000 {
        if !running() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("the child of the test is still running");
}
