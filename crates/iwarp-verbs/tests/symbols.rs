//! The exported names and versions are exactly those of Debian 12's two libraries.

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
            // Number, value, size, type, binding, visibility, section, name.
            let columns: Vec<&str> = line.split_whitespace().collect();
            match columns[..] {
                [number, _, _, _, _, _, section, name]
                    if number.ends_with(':') && section != "UND" =>
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
