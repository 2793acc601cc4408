//! A library that replaces the C compiler's `libgcc_s.so.1` while linking.
//!
//! Rust's standard library unwinds stacks with functions of that library. zig does not have it and
//! would link LLVM's unwinder statically instead. If a program cancels a thread inside our library,
//! however, glibc unwinds our frames with the machine's `libgcc_s.so.1`. Rust's personality
//! function must then understand its data structures, which differ from LLVM's. So our libraries
//! must use the machine's unwinder, as those that a C compiler links. The replacement has the
//! symbols with their versions, and no code.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use xtask::context::Context;
use xtask::process::Log;

use super::platform::Platform;
use super::tools::Tools;

/// The symbols and versions.
const MAP: &str = "packaging/dist/libgcc_s.map";

/// Links the replacement and returns its path.
///
/// # Errors
/// If the list of symbols cannot be read, or if zig fails.
pub(super) fn link(
    context: &Context,
    log: &mut Log,
    tools: &Tools,
    platform: &Platform,
) -> Result<PathBuf> {
    let map = context.root.join(MAP);
    let text = fs::read_to_string(&map).with_context(|| format!("reading {}", map.display()))?;
    let dir = context.target.join("dist-unwinder").join(platform.name);
    fs::create_dir_all(&dir)?;
    let source = dir.join("symbols.S");
    fs::write(&source, definitions(&text)?)?;
    let library = dir.join("libgcc_s.so.1");
    log.run(
        tools
            .linker(&platform.zig_target())
            .args(["-shared", "-nostdlib", "-Wl,-soname,libgcc_s.so.1"])
            .arg(format!("-Wl,--version-script={}", map.display()))
            .arg(&source)
            .arg("-o")
            .arg(&library),
    )?;
    Ok(library)
}

/// Returns assembly that defines each global symbol of a version script.
fn definitions(map: &str) -> Result<String> {
    let symbols = map
        .lines()
        .filter_map(|line| line.trim().strip_suffix(';'))
        .filter(|name| name.starts_with("_Unwind_"));
    let text: String = symbols
        .map(|name| format!(".globl {name}\n.type {name},%function\n{name}:\n"))
        .collect();
    if text.is_empty() {
        bail!("{MAP} lists no symbol");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_listed_symbol_is_defined() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let text = definitions(&fs::read_to_string(root.join(MAP)).unwrap()).unwrap();
        assert!(text.contains("_Unwind_Resume:\n") && text.contains("_Unwind_GetIPInfo:\n"));
        assert!(!text.contains('*') && definitions("local: *;").is_err());
    }
}
