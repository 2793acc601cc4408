//! `iwarp run --sysfs`: the program sees the devices below `/sys/class`, and no other process does.

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
                  ls iwarp0/device/net; cat iwarp0/device/net/lo/mtu /sys/class/net/lo/mtu; id -u";
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
    let there = || Path::new("/sys/class/infiniband/iwarp0").exists();
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
            &user
        ]
    );
    assert_eq!(there(), before);
}
