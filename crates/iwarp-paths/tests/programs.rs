//! Runs programs of the distribution with the library: they find our directories at the redirected
//! place, and all other files unchanged.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the path of the library that cargo built for this test.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let deps = test.parent().unwrap();
    let name = "libiwarp_paths.so";
    [deps.join(name), deps.parent().unwrap().join(name)]
        .into_iter()
        .find(|path| path.exists())
        .expect("cargo builds the library for its integration tests")
}

/// A directory with a device, which is removed when the value is dropped.
struct Tree(PathBuf);

impl Tree {
    fn new(test: &str) -> Self {
        let root =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{test}-{}", std::process::id()));
        let device = root.join("sys/class/infiniband/iwarp0");
        std::fs::create_dir_all(&device).unwrap();
        std::fs::write(device.join("node_type"), "1: CA\n").unwrap();
        let nodes = root.join("dev/infiniband");
        std::fs::create_dir_all(&nodes).unwrap();
        symlink("/dev/null", nodes.join("uverbs0")).unwrap();
        Self(root)
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn run(script: &str, root: Option<&Path>) -> String {
    let mut command = Command::new("sh");
    command.args(["-c", script]).env("LD_PRELOAD", library());
    command.env_remove("IWARP_PATHS");
    if let Some(root) = root {
        command.env("IWARP_PATHS", root);
    }
    let out = command.output().unwrap();
    String::from_utf8(out.stdout).unwrap()
}

#[test]
fn programs_find_devices() {
    let tree = Tree::new("ours");
    let output = |script: &str| run(script, Some(&tree.0));
    for (script, wanted) in [
        ("cat /sys/class/infiniband/iwarp0/node_type", "1: CA\n"),
        (
            "read x < /sys/class/infiniband/iwarp0/node_type; echo $x",
            "1: CA\n",
        ),
        (
            "ls /sys/class/infiniband/ /dev/infiniband",
            "/dev/infiniband:\nuverbs0\n\n/sys/class/infiniband/:\niwarp0\n",
        ),
        (
            "test -c /dev/infiniband/uverbs0 && test -w /dev/infiniband/uverbs0 && echo node",
            "node\n",
        ),
        (
            "stat -L -c %F /dev/infiniband/uverbs0",
            "character special file\n",
        ),
        (
            "echo x > /dev/infiniband/uverbs0 && echo written",
            "written\n",
        ),
        ("find /sys/class/infiniband -name node_type | wc -l", "1\n"),
        ("test -e /dev/infiniband/uverbs1 || echo none", "none\n"),
    ] {
        assert_eq!(output(script), wanted, "{script}");
    }
}

#[test]
fn other_paths_are_unchanged() {
    let tree = Tree::new("others");
    let script = "ls /sys/class/net; cat /proc/self/comm; ls -d /dev/null; \
                  readlink /proc/self/exe | wc -l; umask 077; \
                  f=$(mktemp) && echo x > $f && stat -c %a $f && rm $f";
    let wanted = run(script, None);
    assert!(wanted.ends_with("600\n"), "{wanted}");
    assert_eq!(run(script, Some(&tree.0)), wanted);
    // If `IWARP_PATHS` is not set, the library changes nothing.
    let exists = Path::new("/dev/infiniband").exists();
    let output = run("test -e /dev/infiniband && echo exists", None);
    assert_eq!(output == "exists\n", exists);
}
