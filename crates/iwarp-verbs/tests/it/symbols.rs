//! Compares the exported symbols and versions with those of rdma-core 65 and the private versions
//! of earlier releases, and checks that those of the installed rdma-core are among them.
//!
//! `symbols.txt` has the public symbols as `readelf` prints them. `symbols-private.txt` has each
//! private symbol with the numbers of its versions (`IBVERBS_PRIVATE_NN`).

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

/// Returns this test's tables in the form of [`exported`]. A private symbol's first version is its
/// default.
fn wanted() -> BTreeSet<String> {
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
    let (got, want) = (exported(&common::library()), wanted());
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
    // Releases differ in which version is the default.
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

/// Without lld (on aarch64 and in distributions' packages), GNU ld gets two version scripts: ours
/// and rustc's. It must still export our versions.
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
    // Versions of rustc pass the option in different forms.
    link(&["-Wl,--version-script=list"]);
    link(&["-Wl,--version-script", "-Wl,list"]);
}

/// Returns the rows of the marked table of calls: names, and the text for each face.
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
        for says in faces {
            let reason = says.strip_prefix("differs on purpose, because ");
            assert!(
                says == "as the kernel's driver" || reason.is_some_and(|why| why.len() > 20),
                "{says:?}"
            );
        }
    }
    // For some functions, programs call an inline function without the underscore.
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
