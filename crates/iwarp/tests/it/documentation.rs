//! Every public module starts with an example. `cargo test --doc` runs the examples; this test
//! checks that they are there.

use std::fs;
use std::path::{Path, PathBuf};

/// A module, and what is written about it.
struct Module {
    name: String,
    documentation: Vec<String>,
}

/// Adds the module of this file and its public modules.
fn add(file: &Path, name: &str, out: &mut Vec<Module>) {
    let text = fs::read_to_string(file).expect("a source file");
    let own = text.lines().map_while(|line| line.strip_prefix("//!"));
    out.push(Module {
        name: name.into(),
        documentation: own.map(str::to_owned).collect(),
    });
    let mut before = Vec::new();
    for line in text.lines() {
        if let Some(text) = line.strip_prefix("///") {
            before.push(text.to_owned());
            continue;
        }
        // Attributes are between the documentation and the module.
        if line.starts_with("#[") {
            continue;
        }
        let documentation = std::mem::take(&mut before);
        let Some(rest) = line.strip_prefix("pub mod ") else {
            continue;
        };
        let inner = rest.trim_end_matches([';', '{', ' ']);
        let full = format!("{name}::{inner}");
        match rest.ends_with(';') {
            true => add(&source(file, inner), &full, out),
            // It re-exports a private module.
            false => out.push(Module {
                name: full,
                documentation,
            }),
        }
    }
}

/// Returns the source of a module that `parent` declares.
fn source(parent: &Path, name: &str) -> PathBuf {
    let folder = parent.parent().expect("a folder");
    let file = folder.join(name).with_extension("rs");
    match file.exists() {
        true => file,
        false => folder.join(name).join("mod.rs"),
    }
}

#[test]
fn public_modules_start_with_examples() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lib.rs");
    let mut modules = Vec::new();
    add(&root, "iwarp", &mut modules);
    assert!(modules.len() >= 14, "{} modules", modules.len());
    for module in modules {
        let lines: Vec<_> = module.documentation.iter().map(|l| l.trim()).collect();
        let example = lines.iter().position(|line| line.starts_with("```"));
        let name = module.name;
        let at = example.unwrap_or_else(|| panic!("{name} has no example"));
        assert_eq!(lines[at], "```", "{name}: the example does not run");
        let limit = if name == "iwarp" { 20 } else { 15 };
        assert!(at <= limit, "{name}: the example is line {at}");
    }
}
