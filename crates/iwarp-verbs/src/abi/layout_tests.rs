//! Compares the layout of every structure with what the C compiler makes of Debian's headers.

use super::{Layout, cma, verbs};
use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

/// C names of fields that have another name here: parts of anonymous unions, and Rust keywords.
fn c_name<'a>(layout: &Layout, field: &'a str) -> &'a str {
    match (layout.name, field) {
        ("rdma_addr", "ibaddr") => "addr.ibaddr",
        ("rdma_cm_event", "param") => "param",
        (_, f) => f.strip_prefix("r#").unwrap_or(f),
    }
}

fn headers_installed() -> bool {
    ["infiniband/verbs.h", "rdma/rdma_cma.h"]
        .iter()
        .all(|h| std::path::Path::new("/usr/include").join(h).exists())
}

#[test]
fn every_field_lies_where_the_c_compiler_puts_it() {
    if !headers_installed() {
        assert!(
            std::env::var_os("IWARP_REQUIRE_RDMA_TOOLS").is_none(),
            "libibverbs-dev and librdmacm-dev are required"
        );
        eprintln!("skipped: needs libibverbs-dev and librdmacm-dev");
        return;
    }
    let all: Vec<&Layout> = verbs::ALL.iter().chain(cma::ALL).collect();
    let mut program = String::from(
        "#include <stdio.h>\n#include <stddef.h>\n#include <rdma/rdma_cma.h>\n\
         #define S(s) printf(#s \" %zu\\n\", sizeof(struct s));\n\
         #define F(s, f) printf(#s \".\" #f \" %zu %zu\\n\", offsetof(struct s, f), sizeof(((struct s *)0)->f));\n\
         int main(void) {\n",
    );
    let mut want = String::new();
    for layout in &all {
        writeln!(program, "S({})", layout.name).unwrap();
        writeln!(want, "{} {}", layout.name, layout.size).unwrap();
        for (field, offset, size) in layout.fields {
            let field = c_name(layout, field);
            writeln!(program, "F({}, {field})", layout.name).unwrap();
            writeln!(want, "{}.{field} {offset} {size}", layout.name).unwrap();
        }
    }
    program.push_str("return 0; }\n");
    let exe = std::env::temp_dir().join(format!("iwarp-layout-{}", std::process::id()));
    let mut cc = Command::new("cc")
        .args(["-x", "c", "-", "-o"])
        .arg(&exe)
        .stdin(Stdio::piped())
        .spawn()
        .expect("a C compiler, which linking Rust needs as well");
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
    let got = String::from_utf8(out.stdout).unwrap();
    assert!(
        all.len() > 50 && got.lines().count() > 500,
        "too little compared"
    );
    for (got, want) in got.lines().zip(want.lines()) {
        assert_eq!(got, want);
    }
    assert_eq!(got.lines().count(), want.lines().count());
}
