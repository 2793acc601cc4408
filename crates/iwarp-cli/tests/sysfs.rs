//! `iwarp run --sysfs`: the program sees the devices below `/sys/class` and `/dev`, and no other process does.

mod common;

use common::{Scratch, iwarp, text};
use std::path::Path;

#[test]
fn only_the_program_sees_the_devices_in_sysfs() {
    let scratch = Scratch::new();
    // The library only has to exist: no program of this test loads it.
    let library = scratch.path("libiwarp_verbs.so");
    std::fs::write(&library, b"").unwrap();
    let script = "cd /sys/class/infiniband && ls; cat iwarp0/node_type iwarp0/ports/1/gids/0; \
                  ls iwarp0/device/net; cat iwarp0/device/net/lo/mtu /sys/class/net/lo/mtu; id -u; \
                  ls /dev/infiniband; stat -c %F /dev/infiniband/*; echo x > /dev/infiniband/uverbs0 && echo written; \
                  echo x > /dev/null && head -c 3 /dev/zero | wc -c; cat ../infiniband_verbs/uverbs0/ibdev";
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
    let there = || {
        ["/sys/class/infiniband/iwarp0", "/dev/infiniband/uverbs0"].map(|p| Path::new(p).exists())
    };
    let before = there();
    let out = iwarp(&args)
        .env("IWARP_LIBRARY", &library)
        .output()
        .unwrap();
    let error = text(&out.stderr);
    if error.contains("needs a mount namespace") {
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
    assert_eq!(there(), before);
}

/// Programs for RoCE NICs look for the nodes, so they are shown unasked where the machine allows it; and where it does not, the
/// program runs all the same.
#[test]
fn as_a_roce_nic_the_devices_are_shown_unasked() {
    let scratch = Scratch::new();
    let library = scratch.path("libiwarp_verbs.so");
    std::fs::write(&library, b"").unwrap();
    let script = "cat /sys/class/infiniband/iwarp0/node_type /sys/class/infiniband/iwarp0/ports/1/gid_attrs/types/[01]; \
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
    if text(&out.stderr).contains("takes a mount namespace") {
        assert_eq!(lines, ["roce"]);
        return;
    }
    assert_eq!(lines, ["1: CA", "IB/RoCE v1", "RoCE v2", "node", "roce"]);
}
