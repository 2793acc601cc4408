//! `cargo xtask install --prefix DIR` and `cargo xtask bundle`: the command together with its libraries.
//!
//! An installation has the libraries in `lib/iwarp`, where `bin/iwarp run` finds them. A bundle is the command's own
//! file with the libraries behind its end: one file to drop into a container.

use anyhow::{Context as _, Result, bail};
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Ends a bundle; `iwarp run` looks for it.
const MAGIC: &[u8; 8] = b"iwarplib";
/// The built files: the command, the C library, the preload library.
struct Built {
    command: PathBuf,
    verbs: PathBuf,
    preload: Option<PathBuf>,
}

/// Cargo's output folder.
fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from)
}

/// Builds everything in release mode.
fn build() -> Result<Built> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args([
        "build",
        "--release",
        "-p",
        "iwarp-cli",
        "-p",
        "iwarp-verbs",
        "-p",
        "iwarp-rspreload",
    ]);
    if !command.status().context("starting cargo")?.success() {
        bail!("the build failed");
    }
    let dir = target().join("release");
    let preload = ["librspreload.so", "libiwarp_rspreload.so"].map(|n| dir.join(n));
    Ok(Built {
        command: dir.join("iwarp"),
        verbs: dir.join("libiwarp_verbs.so"),
        preload: preload.into_iter().find(|p| p.exists()),
    })
}

/// Puts command and libraries below `prefix`.
pub fn install(prefix: &Path) -> Result<()> {
    let built = build()?;
    let (bin, lib) = (prefix.join("bin"), prefix.join("lib/iwarp"));
    for dir in [&bin, &lib] {
        fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
    }
    place(&built.command, &bin.join("iwarp"), 0o755)?;
    place(&built.verbs, &lib.join("libibverbs.so.1"), 0o644)?;
    if let Some(preload) = &built.preload {
        place(preload, &lib.join("librspreload.so"), 0o644)?;
    }
    // A link and not a copy: two files would be two engines in one process.
    let link = lib.join("librdmacm.so.1");
    let _ = fs::remove_file(&link);
    symlink("libibverbs.so.1", &link).with_context(|| format!("linking {}", link.display()))?;
    println!(
        "installed {} and {}",
        bin.join("iwarp").display(),
        lib.display()
    );
    Ok(())
}

/// Copies a file in place of an older one, which running programs keep.
fn place(from: &Path, to: &Path, mode: u32) -> Result<()> {
    let fresh = to.with_extension("new");
    fs::copy(from, &fresh)
        .with_context(|| format!("copying {} to {}", from.display(), fresh.display()))?;
    fs::set_permissions(&fresh, fs::Permissions::from_mode(mode))?;
    fs::rename(&fresh, to).with_context(|| format!("putting {} in place", to.display()))
}

/// Writes one file that is the command and carries the libraries.
pub fn bundle(output: Option<&Path>) -> Result<()> {
    let built = build()?;
    let default = target().join("iwarp-bundle");
    let output = output.unwrap_or(&default);
    if let Some(dir) = output.parent() {
        fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
    }
    let verbs = fs::read(&built.verbs).context("reading the library")?;
    let preload = built
        .preload
        .map(fs::read)
        .transpose()
        .context("reading the preload library")?
        .unwrap_or_default();
    let fresh = output.with_extension("new");
    fs::copy(&built.command, &fresh).with_context(|| format!("writing {}", fresh.display()))?;
    let mut file = fs::OpenOptions::new().append(true).open(&fresh)?;
    file.write_all(&bundle_tail(&verbs, &preload))?;
    drop(file);
    fs::set_permissions(&fresh, fs::Permissions::from_mode(0o755))?;
    fs::rename(&fresh, output).with_context(|| format!("writing {}", output.display()))?;
    println!("{}: the command with its libraries", output.display());
    Ok(())
}

/// What follows the command in a bundle.
fn bundle_tail(verbs: &[u8], preload: &[u8]) -> Vec<u8> {
    let mut tail = Vec::with_capacity(verbs.len() + preload.len() + 24);
    tail.extend_from_slice(verbs);
    tail.extend_from_slice(preload);
    tail.extend_from_slice(&(verbs.len() as u64).to_le_bytes());
    tail.extend_from_slice(&(preload.len() as u64).to_le_bytes());
    tail.extend_from_slice(MAGIC);
    tail
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_ends_with_lengths_and_magic() {
        let tail = bundle_tail(b"abc", b"de");
        assert_eq!(&tail[..5], b"abcde");
        assert_eq!(tail[5..13], 3u64.to_le_bytes());
        assert_eq!(tail[13..21], 2u64.to_le_bytes());
        assert_eq!(&tail[21..], MAGIC);
    }
}
