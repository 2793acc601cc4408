//! The exported symbols and their versions are exactly those of Debian 12's `libibverbs` and `librdmacm`.

mod common;

use std::collections::BTreeSet;
use std::process::Command;

#[test]
fn exports_are_debians() {
    if !common::installed("readelf") {
        return;
    }
    let out = Command::new("readelf")
        .args(["--dyn-syms", "-W"])
        .arg(common::library())
        .output()
        .unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    let got: BTreeSet<&str> = text
        .lines()
        .filter_map(|line| {
            // The columns are: number, value, size, type, binding, visibility, section, name.
            let columns: Vec<&str> = line.split_whitespace().collect();
            match columns[..] {
                // Absolute symbols are the names of the versions, which only some linkers export.
                [number, _, _, _, "GLOBAL", _, section, name]
                    if number.ends_with(':') && !["UND", "ABS"].contains(&section) =>
                {
                    Some(name)
                }
                _ => None,
            }
        })
        .filter(|name| *name != "Name")
        .collect();
    let want: BTreeSet<&str> = include_str!("symbols.txt").lines().collect();
    assert_eq!(want.len(), 248);
    let missing: Vec<_> = want.difference(&got).collect();
    let extra: Vec<_> = got.difference(&want).collect();
    assert!(
        missing.is_empty() && extra.is_empty(),
        "missing {missing:?}, extra {extra:?}"
    );
}

#[test]
fn the_library_stays_loaded_and_has_its_name() {
    if !common::installed("readelf") {
        return;
    }
    let out = Command::new("readelf")
        .args(["-d", "-W"])
        .arg(common::library())
        .output()
        .unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(text.contains("[libibverbs.so.1]"), "{text}");
    assert!(text.contains("NODELETE"), "{text}");
}

/// Where rustc does not link with lld (on aarch64, and in the packages of distributions), GNU ld gets two version scripts: ours,
/// and the one that rustc writes. It must export our versions nevertheless.
#[test]
fn gnu_ld_takes_our_version_script_beside_that_of_rustc() {
    if !common::installed("ld.bfd") {
        return;
    }
    let folder = common::Folder::new("linker");
    let path = |name: &str| folder.0.join(name);
    let source = "void inside(void) {} void behind(void) {}\n\
        __asm__(\".symver behind, ibv_query_gid@@IBVERBS_1.1\");\n";
    std::fs::write(path("x.c"), source).unwrap();
    std::fs::write(path("list"), "{\n\n  local:\n    *;\n};\n").unwrap();
    let map = concat!(env!("CARGO_MANIFEST_DIR"), "/symbols.map");
    let link = |script: &[&str]| {
        let status = Command::new("cc")
            .current_dir(&folder.0)
            .args(["-shared", "-fPIC", "-fuse-ld=bfd", "-o", "x.so", "x.c"])
            .args(["-B", concat!(env!("OUT_DIR"), "/")])
            .args(script)
            .arg(format!("-Wl,--version-script={map}"))
            .status()
            .expect("a C compiler must be installed; Rust needs it to link, too");
        assert!(status.success(), "{script:?}");
        let out = Command::new("readelf")
            .args(["--dyn-syms", "-W"])
            .arg(path("x.so"))
            .output()
            .unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        assert!(text.contains("ibv_query_gid@@IBVERBS_1.1"), "{text}");
        assert!(!text.contains("inside"), "{text}");
    };
    // Versions of rustc differ in how they pass the option.
    link(&["-Wl,--version-script=list"]);
    link(&["-Wl,--version-script", "-Wl,list"]);
}
