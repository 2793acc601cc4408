//! Finds and builds the programs with the fuzz targets.
//!
//! The flags are those of `cargo fuzz build --sanitizer none`. They work with the stable toolchain,
//! because LLVM's pass for the counters (`sancov-module`) is part of every compiler.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};

use xtask::context::Context;
use xtask::process::cargo;

/// The packages with fuzz targets, and their folders. Each file in `fuzz_targets/` is a program.
pub(super) const PACKAGES: [(&str, &str); 2] =
    [("iwarp-fuzz", "fuzz"), ("iwarp-fuzz-host", "fuzz/host")];

/// Flags for a search: counters at edges, and calls at comparisons.
pub(super) const GUIDE: &str = "--cfg=fuzzing -Cpasses=sancov-module \
     -Cllvm-args=-sanitizer-coverage-level=4 \
     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
     -Cllvm-args=-sanitizer-coverage-pc-table \
     -Cllvm-args=-sanitizer-coverage-trace-compares";
/// Flags for the report: counters of source regions.
pub(super) const MEASURE: &str = "--cfg=fuzzing -Cinstrument-coverage";

/// A fuzz target: a program that libFuzzer drives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) name: String,
    pub(super) package: &'static str,
    pub(super) seeds: PathBuf,
}

impl Target {
    /// Finds the targets of a package, in the order of their names.
    pub(super) fn all(root: &Path, (package, folder): (&'static str, &str)) -> Result<Vec<Self>> {
        let folder = root.join(folder);
        let mut all = Vec::new();
        for entry in fs::read_dir(folder.join("fuzz_targets")).context(package)? {
            let path = entry?.path();
            if let (Some(stem), Some("rs")) = (
                path.file_stem().and_then(|s| s.to_str()),
                path.extension().and_then(|e| e.to_str()),
            ) {
                all.push(Self {
                    name: stem.to_owned(),
                    package,
                    seeds: folder.join("seeds").join(stem),
                });
            }
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }
}

/// The folders of the built programs, and of the corpora, failures and logs.
pub(super) struct Fuzzer {
    pub(super) programs: PathBuf,
    pub(super) state: PathBuf,
}

impl Fuzzer {
    /// Returns the folder of a target for inputs of a kind, which is created if it does not exist.
    pub(super) fn folder(&self, target: &Target, kind: &str) -> Result<PathBuf> {
        let folder = self.state.join(&target.name).join(kind);
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        Ok(folder)
    }

    /// Returns the command of a target, without arguments. Temporary files are below the state
    /// folder.
    pub(super) fn command(&self, target: &Target) -> Result<Command> {
        let mut command = Command::new(self.programs.join(&target.name));
        command
            .env("TMPDIR", self.folder(target, "tmp")?)
            // Without a backtrace, the last lines of the output contain the panic's message.
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::null());
        Ok(command)
    }
}

/// Returns the folder for all files of fuzzing.
pub(super) fn home(context: &Context) -> PathBuf {
    context.target.join("fuzz")
}

/// Returns the host's target triple.
pub(super) fn host(context: &Context) -> Result<String> {
    let version = rustc(context, &["-vV"])?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc -vV prints no host")?.to_owned())
}

pub(super) fn rustc(context: &Context, arguments: &[&str]) -> Result<String> {
    let output = Command::new("rustc")
        .current_dir(&context.root)
        .args(arguments)
        .output()
        .context("cannot start rustc")?;
    Ok(String::from_utf8(output.stdout)?)
}

/// Builds the targets of a package with instrumentation. Each kind of instrumentation has a target
/// folder of its own.
pub(super) fn build(
    context: &Context,
    package: &str,
    (flags, folder): (&str, &str),
    run: &mut dyn FnMut(&mut Command) -> Result<()>,
) -> Result<Fuzzer> {
    let host = host(context)?;
    let folder = home(context).join(folder);
    let mut command = cargo(&context.root);
    command
        .args(["build", "--profile", "fuzz", "--package", package, "--bins"])
        .args(["--features", "libfuzzer"])
        // With `--target`, the flags do not apply to build scripts and macros.
        .args(["--target", &host])
        .env("CARGO_TARGET_DIR", &folder)
        .env("RUSTFLAGS", flags);
    run(&mut command)?;
    Ok(Fuzzer {
        programs: folder.join(host).join("fuzz"),
        state: home(context).join("state"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_have_seeds_and_programs() {
        let root = Context::new(true, false).unwrap().root;
        for package in PACKAGES {
            let manifest = fs::read_to_string(root.join(package.1).join("Cargo.toml")).unwrap();
            let targets = Target::all(&root, package).unwrap();
            assert!(!targets.is_empty(), "{}", package.0);
            for target in targets {
                let row = format!("path = \"fuzz_targets/{}.rs\"", target.name);
                assert!(manifest.contains(&row), "{} has no [[bin]]", target.name);
                let seeds = fs::read_dir(&target.seeds).unwrap().count();
                assert!(seeds > 0, "{} has no seeds", target.name);
            }
        }
    }
}
