//! Reports the lines and regions that the seeds and corpora reach, with the component `llvm-tools`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use xtask::context::Context;
use xtask::process;

use super::programs::{MEASURE, PACKAGES, Target, build, home, host, rustc};

/// Returns the folder of the toolchain's LLVM tools.
fn llvm_tools(context: &Context) -> Result<PathBuf> {
    let root = rustc(context, &["--print", "sysroot"])?;
    let folder = Path::new(root.trim())
        .join("lib/rustlib")
        .join(host(context)?)
        .join("bin");
    if !folder.join("llvm-cov").is_file() {
        bail!("no LLVM tools: `rustup component add llvm-tools` installs them");
    }
    Ok(folder)
}

/// Replays the seeds and the corpora in programs that are instrumented for coverage, and prints a
/// table of the files.
pub(super) fn coverage(context: &Context) -> Result<()> {
    let tools = llvm_tools(context)?;
    let home = home(context);
    let profiles = home.join("profiles");
    if profiles.exists() {
        fs::remove_dir_all(&profiles)?;
    }
    let mut programs = Vec::new();
    for package in PACKAGES {
        let fuzzer = build(context, package.0, (MEASURE, "coverage"), &mut process::run)?;
        for target in Target::all(&context.root, package)? {
            process::run(
                fuzzer
                    .command(&target)?
                    .env(
                        "LLVM_PROFILE_FILE",
                        profiles.join(format!("{}.profraw", target.name)),
                    )
                    .arg("-runs=0")
                    .args([&fuzzer.folder(&target, "corpus")?, &target.seeds]),
            )?;
            programs.push(fuzzer.programs.join(&target.name));
        }
    }
    let merged = home.join("merged.profdata");
    process::run(
        Command::new(tools.join("llvm-profdata"))
            .args(["merge", "-sparse", "-o"])
            .arg(&merged)
            .arg(&profiles),
    )?;
    let mut export = Command::new(tools.join("llvm-cov"));
    export
        .args(["export", "-summary-only", "-instr-profile"])
        .arg(&merged);
    for program in &programs {
        export.arg("-object").arg(program);
    }
    let output = export.output().context("llvm-cov")?;
    if !output.status.success() {
        bail!(
            "llvm-cov failed: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let report: Value = serde_json::from_slice(&output.stdout).context("llvm-cov's report")?;
    for line in table(&report, &context.root) {
        println!("{line}");
    }
    Ok(())
}

/// Returns a Markdown table of the files under `crates/` of which any line was run.
fn table(report: &Value, root: &Path) -> Vec<String> {
    let files = report["data"][0]["files"].as_array();
    let mut rows = Vec::new();
    let mut sums = [0; 4];
    for file in files.into_iter().flatten() {
        let name = Path::new(file["filename"].as_str().unwrap_or_default());
        // A module of another crate may have a path with `..` in it.
        let name = name.canonicalize().unwrap_or_else(|_| name.to_owned());
        let Ok(name) = name.strip_prefix(root.join("crates")) else {
            continue;
        };
        let number = |kind: &str, what: &str| file["summary"][kind][what].as_u64().unwrap_or(0);
        let counts = [
            number("lines", "covered"),
            number("lines", "count"),
            number("regions", "covered"),
            number("regions", "count"),
        ];
        if counts[0] > 0 {
            rows.push(row(&name.display().to_string(), counts));
            sums.iter_mut().zip(counts).for_each(|(sum, n)| *sum += n);
        }
    }
    rows.sort();
    let mut lines = vec![
        "| File | Lines | Regions |".to_owned(),
        "| --- | ---: | ---: |".to_owned(),
    ];
    lines.append(&mut rows);
    lines.push(row("**all**", sums));
    lines
}

fn row(name: &str, [lines, of_lines, regions, of_regions]: [u64; 4]) -> String {
    let percent = |part: u64, all: u64| format!("{} % of {all}", part * 100 / all.max(1));
    format!(
        "| {name} | {} | {} |",
        percent(lines, of_lines),
        percent(regions, of_regions)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_lists_files_of_run_crates() {
        let file = |name: &str, lines: u64| {
            serde_json::json!({ "filename": name, "summary": {
                "lines": { "covered": lines, "count": 40 },
                "regions": { "covered": 1, "count": 3 },
            }})
        };
        let files = [
            file("/r/crates/b/src/x.rs", 10),
            file("/r/crates/a/src/y.rs", 30),
            file("/r/crates/a/src/z.rs", 0),
            file("/elsewhere/crates/w.rs", 30),
        ];
        let report = serde_json::json!({ "data": [{ "files": files }] });
        let lines = table(&report, Path::new("/r"));
        assert_eq!(
            lines[2..],
            [
                "| a/src/y.rs | 75 % of 40 | 33 % of 3 |",
                "| b/src/x.rs | 25 % of 40 | 33 % of 3 |",
                "| **all** | 50 % of 80 | 33 % of 6 |",
            ]
        );
    }
}
