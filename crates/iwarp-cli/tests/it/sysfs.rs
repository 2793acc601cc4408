//! `iwarp run --sysfs`: only the program sees the devices in `/sys/class` and `/dev`.

use crate::common::{Scratch, iwarp, text};
use std::path::Path;
use std::process::Command;

/// The error if the machine does not allow mounts and there is no preload library.
const FORBIDDEN: &str = "needs a mount namespace";

#[test]
fn only_the_program_sees_devices() {
    let scratch = Scratch::new();
    // The library only has to exist: no program of this test loads it.
    let library = scratch.path("libiwarp_verbs.so");
    std::fs::write(&library, b"").unwrap();
    let script = "cd /sys/class/infiniband && ls; cat iwarp0/node_type iwarp0/ports/1/gids/0; \
                  ls iwarp0/device/net; cat iwarp0/device/net/lo/mtu /sys/class/net/lo/mtu; id -u; \
                  ls /dev/infiniband; stat -c %F /dev/infiniband/*; \
                  echo x > /dev/infiniband/uverbs0 && echo written; \
                  echo x > /dev/null && head -c 3 /dev/zero | wc -c; \
                  cat ../infiniband_verbs/uverbs0/ibdev";
    let args = [
        "run",
        "--sysfs",
        "--bind",
        "127.0.0.1",
        "--",
        "sh",
        "-c",
        script,
    ];
    let visible = || {
        ["/sys/class/infiniband/iwarp0", "/dev/infiniband/uverbs0"].map(|p| Path::new(p).exists())
    };
    let before = visible();
    let out = iwarp(&args)
        .env("IWARP_LIBRARY", &library)
        .output()
        .unwrap();
    let error = text(&out.stderr);
    if error.contains(FORBIDDEN) {
        eprintln!("skipped: {error}");
        return;
    }
    assert!(out.status.success(), "{error}");
    let said = text(&out.stdout);
    let lines: Vec<&str> = said.lines().collect();
    let user = rustix::process::geteuid().as_raw().to_string();
    let mtu = std::fs::read_to_string("/sys/class/net/lo/mtu").unwrap();
    let gid = "0000:0000:0000:0000:0000:ffff:7f00:0001";
    assert_eq!(
        lines,
        [
            "iwarp0",
            "4: RNIC",
            gid,
            "lo",
            mtu.trim(),
            mtu.trim(),
            &user,
            "rdma_cm",
            "uverbs0",
            "character special file",
            "character special file",
            "written",
            "3",
            "iwarp0"
        ]
    );
    assert_eq!(visible(), before);
}

/// Programs for RoCE NICs look for the nodes, so `--as roce` implies `--sysfs` where the machine
/// allows it. Elsewhere the program runs without the nodes.
#[test]
fn roce_shows_devices_without_option() {
    let scratch = Scratch::new();
    let library = scratch.path("libiwarp_verbs.so");
    std::fs::write(&library, b"").unwrap();
    let script = "cd /sys/class/infiniband/iwarp0; cat node_type ports/1/gid_attrs/types/[01]; \
                  test -c /dev/infiniband/uverbs0 && echo node; echo $IWARP_AS";
    let args = [
        "run",
        "--as",
        "roce",
        "--bind",
        "127.0.0.1",
        "--",
        "sh",
        "-c",
        script,
    ];
    let out = iwarp(&args)
        .env("IWARP_LIBRARY", &library)
        .output()
        .unwrap();
    assert!(out.status.success());
    let said = text(&out.stdout);
    let lines: Vec<&str> = said.lines().collect();
    if text(&out.stderr).contains(FORBIDDEN) {
        assert_eq!(lines, ["roce"]);
        return;
    }
    assert_eq!(lines, ["1: CA", "IB/RoCE v1", "RoCE v2", "node", "roce"]);
}

/// Returns a command that runs `iwarp` in a user namespace without mount namespaces. Returns `None`
/// if there are no user namespaces.
fn without_mounts(args: &[&str]) -> Option<Command> {
    let script = "echo 0 > /proc/sys/user/max_mnt_namespaces && exec \"$@\"";
    let unshare = |words: &[&str]| {
        let mut command = Command::new("unshare");
        command
            .args(["--user", "--map-root-user", "sh", "-c", script, "sh"])
            .args(words);
        command
    };
    let works = unshare(&["true"]).output();
    if !works.is_ok_and(|out| out.status.success()) {
        eprintln!("skipped: no user namespaces here");
        return None;
    }
    let mut words = vec![env!("CARGO_BIN_EXE_iwarp")];
    words.extend(args);
    Some(unshare(&words))
}

/// Without mounts the devices are in a folder of the user, and the program gets the preload
/// library. Another run with the same devices uses the same folder.
#[test]
fn devices_without_mounts_are_in_folder() {
    let scratch = Scratch::new();
    let library = scratch.path("libiwarp_verbs.so");
    std::fs::write(&library, b"").unwrap();
    let script = "echo $IWARP_PATHS; cd $IWARP_PATHS; \
                  cat sys/class/infiniband/iwarp0/node_type; \
                  test -c dev/infiniband/rdma_cm && echo node; echo $LD_PRELOAD";
    let run = |option: &str, value: &str| {
        let args = ["run", "--bind", "127.0.0.1", option, value];
        let args: Vec<&str> = args.into_iter().filter(|word| !word.is_empty()).collect();
        let args = [&args[..], &["--", "sh", "-c", script]].concat();
        let mut command = without_mounts(&args)?;
        command
            .env("IWARP_LIBRARY", &library)
            .env("XDG_RUNTIME_DIR", scratch.path(""))
            .env_remove("LD_PRELOAD");
        Some(command.output().unwrap())
    };
    let Some(out) = run("--sysfs", "") else {
        return;
    };
    assert!(text(&out.stderr).contains(FORBIDDEN) && !out.status.success());
    let out = run("--as", "roce").unwrap();
    assert!(out.status.success(), "most programs do not need the nodes");
    assert!(text(&out.stderr).contains(FORBIDDEN));

    let paths = scratch.path("libiwarp_paths.so");
    std::fs::write(&paths, b"").unwrap();
    let mut folders = Vec::new();
    for _ in 0..2 {
        let out = run("--as", "roce").unwrap();
        let said = text(&out.stdout);
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(lines.len(), 4, "{said}{}", text(&out.stderr));
        assert_eq!(lines[1..3], ["1: CA", "node"]);
        assert_eq!(Path::new(lines[3]), paths);
        folders.push(lines[0].to_owned());
    }
    assert_eq!(folders[0], folders[1]);
    let made = std::fs::read_dir(Path::new(&folders[0]).parent().unwrap()).unwrap();
    let names: Vec<_> = made.map(|entry| entry.unwrap().file_name()).collect();
    let folders = names
        .iter()
        .filter(|n| n.to_string_lossy().contains("devices-"));
    assert_eq!(folders.count(), 1, "{names:?}");
}
