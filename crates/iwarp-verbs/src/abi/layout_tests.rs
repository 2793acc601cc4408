//! Compares every structure's layout with that of the installed C headers. Structures and fields
//! newer than rdma-core 44 are compared if the headers have them.

use super::{Layout, cma, recent, verbs};
use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

/// Returns the C name of a field, which differs for parts of anonymous unions and Rust keywords.
fn c_name<'a>(layout: &Layout, field: &'a str) -> &'a str {
    match (layout.name, field) {
        ("rdma_addr", "ibaddr") => "addr.ibaddr",
        ("rdma_cm_event", "param") => "param",
        ("ibv_ops_wr", "unexpected_cnt") => "tm.unexpected_cnt",
        ("ibv_ops_wr", "handle") => "tm.handle",
        ("ibv_ops_wr", "recv_wr_id") => "tm.add.recv_wr_id",
        ("ibv_ops_wr", "sg_list") => "tm.add.sg_list",
        ("ibv_ops_wr", "num_sge") => "tm.add.num_sge",
        ("ibv_ops_wr", "tag") => "tm.add.tag",
        ("ibv_ops_wr", "mask") => "tm.add.mask",
        (_, f) => f.strip_prefix("r#").unwrap_or(f),
    }
}

const HEADERS: [&str; 2] = [
    "/usr/include/infiniband/verbs.h",
    "/usr/include/rdma/rdma_cma.h",
];

fn headers_installed() -> bool {
    HEADERS.iter().all(|h| std::path::Path::new(h).exists())
}

/// Fields that rdma-core 44 does not have; they are at the end of their structures.
const NEWER_FIELDS: [&str; 2] = ["active_speed_ex", "wr_flush"];

fn mentioned(headers: &str, name: &str) -> bool {
    let is_separator = |c: char| !(c.is_alphanumeric() || c == '_');
    headers.split(is_separator).any(|word| word == name)
}

/// Returns a C program that prints sizes and offsets, and the output that matches our layouts.
fn comparison(headers: &str, all: &[&Layout]) -> (String, String) {
    let mut program = String::from(
        "#include <stdio.h>\n#include <stddef.h>\n#include <rdma/rdma_cma.h>\n\
         #define S(s) printf(#s \" %zu\\n\", sizeof(struct s));\n\
         #define B(s, f) printf(#s \".\" #f \" %zu\\n\", \
         sizeof(struct s) - offsetof(struct s, f));\n\
         #define F(s, f) printf(#s \".\" #f \" %zu %zu\\n\", \
         offsetof(struct s, f), sizeof(((struct s *)0)->f));\n\
         int main(void) {\n",
    );
    let mut want = String::new();
    for layout in all {
        let name = layout.name;
        // This structure grows at its front; programs address fields from its end.
        if name == "verbs_context" {
            for (field, offset, _) in layout.fields {
                let field = c_name(layout, field);
                writeln!(program, "B({name}, {field})").unwrap();
                writeln!(want, "{name}.{field} {}", layout.size - offset).unwrap();
            }
            continue;
        }
        let missing = |field: &str| NEWER_FIELDS.contains(&field) && !mentioned(headers, field);
        // In the header, the structure ends where its first missing field begins.
        let end = layout.fields.iter().find(|(field, ..)| missing(field));
        let size = end.map_or(layout.size, |(_, offset, _)| *offset);
        writeln!(program, "S({name})").unwrap();
        writeln!(want, "{name} {size}").unwrap();
        for (field, offset, size) in layout.fields.iter().filter(|(field, ..)| !missing(field)) {
            let field = c_name(layout, field);
            writeln!(program, "F({name}, {field})").unwrap();
            writeln!(want, "{name}.{field} {offset} {size}").unwrap();
        }
    }
    program.push_str("return 0; }\n");
    (program, want)
}

/// Compiles and runs a C program. Returns its output.
fn output(program: &str) -> String {
    let exe = std::env::temp_dir().join(format!("iwarp-layout-{}", std::process::id()));
    let mut cc = Command::new("cc")
        .args(["-x", "c", "-", "-o"])
        .arg(&exe)
        .stdin(Stdio::piped())
        .spawn()
        .expect("cc can be started; Rust needs it for linking, too");
    cc.stdin
        .take()
        .unwrap()
        .write_all(program.as_bytes())
        .unwrap();
    assert!(
        cc.wait().unwrap().success(),
        "the C program does not compile:\n{program}"
    );
    let out = Command::new(&exe).output().unwrap();
    let _ = std::fs::remove_file(&exe);
    String::from_utf8(out.stdout).unwrap()
}

#[test]
fn layout_matches_c_headers() {
    if !headers_installed() {
        assert!(
            std::env::var_os("IWARP_REQUIRE_RDMA_TOOLS").is_none(),
            "libibverbs-dev and librdmacm-dev are required"
        );
        eprintln!("skipped: needs libibverbs-dev and librdmacm-dev");
        return;
    }
    let headers: String = HEADERS
        .iter()
        .map(|h| std::fs::read_to_string(h).unwrap())
        .collect();
    let later = recent::ALL.iter().filter(|l| mentioned(&headers, l.name));
    let all: Vec<&Layout> = verbs::ALL.iter().chain(cma::ALL).chain(later).collect();
    let (program, want) = comparison(&headers, &all);
    let got = output(&program);
    assert!(
        all.len() > 50 && got.lines().count() > 500,
        "too few structures or fields were compared"
    );
    for (got, want) in got.lines().zip(want.lines()) {
        assert_eq!(got, want);
    }
    assert_eq!(got.lines().count(), want.lines().count());
}
