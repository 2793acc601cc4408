//! Compares the exported symbols and versions with those of rdma-core 65, and with the private
//! versions of earlier releases. Also checks that all symbols of the installed rdma-core exist.
//!
//! `symbols.txt` contains the public symbols as `readelf` prints them. `symbols-private.txt`
//! contains each private symbol with its versions (`IBVERBS_PRIVATE_NN`).

use crate::common;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the symbols that a library defines: name, `@@` or `@`, version.
fn exported(library: &Path) -> BTreeSet<String> {
    let out = Command::new("readelf")
        .args(["--dyn-syms", "-W"])
        .arg(library)
        .output()
        .unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    text.lines()
        .filter_map(|line| {
            // The columns are: number, value, size, type, binding, visibility, section, name.
            let columns: Vec<&str> = line.split_whitespace().collect();
            match columns[..] {
                // Absolute symbols are version names, which only some linkers export.
                [number, _, _, _, "GLOBAL", _, section, name]
                    if number.ends_with(':') && !["UND", "ABS"].contains(&section) =>
                {
                    Some(name.to_owned())
                }
                _ => None,
            }
        })
        .filter(|name| name != "Name")
        .collect()
}

/// Returns the symbols of this test's tables, in the form of [`exported`]. The first version of a
/// private symbol is the default version.
fn expected_symbols() -> BTreeSet<String> {
    let public = include_str!("symbols.txt").lines().map(str::to_owned);
    let private = include_str!("symbols-private.txt").lines();
    let private = private.flat_map(|line| {
        let mut words = line.split(' ');
        let name = words.next().unwrap_or_default();
        words.enumerate().map(move |(i, version)| {
            let at = if i == 0 { "@@" } else { "@" };
            format!("{name}{at}IBVERBS_PRIVATE_{version}")
        })
    });
    public.chain(private).collect()
}

#[test]
fn exports_match_rdma_core() {
    if !common::installed("readelf") {
        return;
    }
    let (got, want) = (exported(&common::library()), expected_symbols());
    assert_eq!(want.len(), 202 + 539);
    let missing: Vec<_> = want.difference(&got).collect();
    let extra: Vec<_> = got.difference(&want).collect();
    assert!(
        missing.is_empty() && extra.is_empty(),
        "missing {missing:?}, extra {extra:?}"
    );
}

fn installed_libraries() -> Vec<PathBuf> {
    let folders = [
        format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH),
        "/usr/lib64".to_owned(),
        "/usr/lib".to_owned(),
    ];
    let names = ["libibverbs.so.1", "librdmacm.so.1"];
    let paths = folders
        .iter()
        .flat_map(|dir| names.iter().map(move |name| Path::new(dir).join(name)));
    paths.filter(|path| path.exists()).collect()
}

#[test]
fn installed_rdma_core_exports_exist() {
    if !common::installed("readelf") {
        return;
    }
    let libraries = installed_libraries();
    assert!(
        libraries.len() >= 2 || std::env::var_os("IWARP_REQUIRE_RDMA_TOOLS").is_none(),
        "libibverbs1 and librdmacm1 are required"
    );
    // The default version of a symbol differs between releases.
    let plain = |set: BTreeSet<String>| -> BTreeSet<String> {
        set.into_iter().map(|s| s.replace("@@", "@")).collect()
    };
    let ours = plain(exported(&common::library()));
    for library in libraries {
        let theirs = plain(exported(&library));
        assert!(theirs.len() > 50, "{}: {theirs:?}", library.display());
        let missing: Vec<_> = theirs.difference(&ours).collect();
        assert!(missing.is_empty(), "{}: {missing:?}", library.display());
    }
}

#[test]
fn library_has_soname_and_nodelete() {
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

/// Without lld (on aarch64 and in distributions' packages), GNU ld gets two version scripts: that
/// of this crate and that of rustc. It must still export the versions of this crate.
#[test]
fn gnu_ld_accepts_both_version_scripts() {
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
    // rustc passes the option in one of two forms, depending on its version.
    link(&["-Wl,--version-script=list"]);
    link(&["-Wl,--version-script", "-Wl,list"]);
}

/// Returns the rows of the table of calls in a document: names, and the text for each face.
fn table_of_calls(text: &str) -> Vec<(Vec<&str>, [&str; 2])> {
    let (_, rest) = text.split_once("<!-- begin: exported -->").unwrap();
    let (table, _) = rest.split_once("<!-- end: exported -->").unwrap();
    let rows = table.lines().filter_map(|line| {
        let cells = line.strip_prefix("| ")?.strip_suffix(" |")?;
        let cells: Vec<&str> = cells.split(" | ").collect();
        let [names, iwarp, roce] = cells[..] else {
            panic!("not three cells: {line}");
        };
        let names = names.split(", ").filter_map(|name| {
            name.strip_prefix('`')
                .and_then(|name| name.strip_suffix('`'))
        });
        Some((names.collect(), [iwarp, roce]))
    });
    rows.filter(|(names, _): &(Vec<&str>, _)| !names.is_empty())
        .collect()
}

#[test]
fn calls_table_lists_every_symbol() {
    let mut listed = BTreeSet::new();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/verbs-calls.md");
    let text = std::fs::read_to_string(path).unwrap();
    for (names, faces) in table_of_calls(&text) {
        for name in names {
            assert!(listed.insert(name), "{name} is listed twice");
        }
        for cell in faces {
            let reason = cell.strip_prefix("differs on purpose, because ");
            assert!(
                cell == "as the kernel's driver" || reason.is_some_and(|reason| reason.len() > 20),
                "{cell:?}"
            );
        }
    }
    // Some exported names begin with an underscore, because the header has an inline function.
    let exported: BTreeSet<&str> = include_str!("symbols.txt")
        .lines()
        .filter_map(|line| line.split('@').next())
        .map(|name| name.trim_start_matches('_'))
        .collect();
    let missing: Vec<_> = exported.difference(&listed).collect();
    let extra: Vec<_> = listed.difference(&exported).collect();
    assert!(
        missing.is_empty() && extra.is_empty(),
        "missing {missing:?}, extra {extra:?}"
    );
}
