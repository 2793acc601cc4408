//! `cargo xtask install --prefix DIR` and `cargo xtask bundle`: the command together with its
//! libraries.
//!
//! An installation contains the libraries in `lib/iwarp`, where `bin/iwarp run` finds them. A
//! bundle is a single file, for example for a container: the command with the libraries appended.
//! `iwarp-cli/src/run/bundle.rs` reads it.

use anyhow::{Context as _, Result, bail};
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use crate::context::Context;
use crate::layout::{self, Built};
use crate::process::run;
use crate::release_builds;

/// The last octets of a bundle, by which `iwarp run` recognises it.
const MAGIC: &[u8; 8] = b"iwarplib";

/// Builds everything in release mode.
///
/// # Errors
/// When the build fails.
pub fn build(context: &Context) -> Result<Built> {
    run(&mut release_builds::installation(context))?;
    let dir = context.target.join("release");
    // Cargo cannot build this library, so it is part of the command (crates/iwarp-audit/build.rs).
    let audit = dir.join(iwarp_audit::FILE_NAME);
    fs::write(&audit, iwarp_audit::LIBRARY)
        .with_context(|| format!("writing {}", audit.display()))?;
    let preload = ["librspreload.so", "libiwarp_rspreload.so"].map(|n| dir.join(n));
    Ok(Built {
        command: dir.join("iwarp"),
        runnable: dir.join("iwarp"),
        verbs: dir.join("libiwarp_verbs.so"),
        preload: preload.into_iter().find(|p| p.exists()),
        paths: dir.join("libiwarp_paths.so"),
        audit,
    })
}

/// Installs command, libraries, manual pages and completions below `prefix`.
///
/// # Errors
/// If the build fails, or if a file cannot be written.
pub fn install(context: &Context, prefix: &Path) -> Result<()> {
    let built = build(context)?;
    let files = layout::files(context, &built)?;
    layout::put(&files, prefix)?;
    println!(
        "installed {} and {}; manual pages and completions are in {}",
        prefix.join("bin/iwarp").display(),
        prefix.join("lib/iwarp").display(),
        prefix.join("share").display()
    );
    Ok(())
}

/// Removes what [`install`] has installed below `prefix`.
///
/// # Errors
/// If there is nothing, or if a file cannot be removed.
pub fn uninstall(prefix: &Path) -> Result<()> {
    let removed = layout::remove(prefix)?;
    if removed.is_empty() {
        bail!("nothing is installed in {}", prefix.display());
    }
    println!("removed {} files from {}", removed.len(), prefix.display());
    Ok(())
}

/// Builds everything in release mode, and writes a bundle: one executable file that contains the
/// command and the libraries.
///
/// # Errors
/// When the build fails, or the file cannot be written.
pub fn bundle(context: &Context, output: Option<&Path>) -> Result<()> {
    let built = build(context)?;
    let default = context.target.join("iwarp-bundle");
    let output = output.unwrap_or(&default);
    let second_name = context.target.join("release/librdmacm-name.so");
    let linker = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    run(&mut second_name_linker(
        context,
        linker,
        &built.verbs,
        &second_name,
    ))?;
    write_bundle(&built.command, &built, &second_name, output)?;
    println!("{}: the command with its libraries", output.display());
    Ok(())
}

/// Writes a bundle of this command and the built libraries.
///
/// # Errors
/// If a file cannot be read or written.
pub fn write_bundle(
    command: &Path,
    built: &Built,
    second_name: &Path,
    output: &Path,
) -> Result<()> {
    if let Some(dir) = output.parent() {
        fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
    }
    let read = |file: &Path| fs::read(file).with_context(|| format!("reading {}", file.display()));
    let preload = built.preload.as_deref().map(read).transpose()?;
    let (verbs, second_name, paths) =
        (read(&built.verbs)?, read(second_name)?, read(&built.paths)?);
    let tail = bundle_tail([&verbs, &second_name, &preload.unwrap_or_default(), &paths]);
    let temporary = output.with_extension("new");
    fs::copy(command, &temporary).with_context(|| format!("writing {}", temporary.display()))?;
    let mut file = fs::OpenOptions::new().append(true).open(&temporary)?;
    file.write_all(&tail)?;
    drop(file);
    fs::set_permissions(&temporary, fs::Permissions::from_mode(0o755))?;
    fs::rename(&temporary, output).with_context(|| format!("writing {}", output.display()))
}

/// Returns the command that links a library without code to the file `to`, for bundles in memory
/// and for archives, where no symbolic link can give our library its second name. Its DT_SONAME is
/// `librdmacm.so.1`, it defines that library's symbol versions, and it depends on our library,
/// which the loader also finds in the same folder. `linker` is a C compiler.
#[must_use]
pub fn second_name_linker(
    context: &Context,
    mut linker: Command,
    verbs: &Path,
    to: &Path,
) -> Command {
    let versions = context.root.join("crates/iwarp-verbs/symbols.map");
    linker
        .args(["-shared", "-nostdlib", "-s", "-Wl,-soname,librdmacm.so.1"])
        .arg(format!("-Wl,--version-script={}", versions.display()))
        .args([
            "-Wl,--no-as-needed",
            "-Wl,-z,nodelete",
            "-Wl,-rpath,$ORIGIN",
        ])
        .arg(verbs)
        // zig does not link without a source.
        .args(["-x", "c", "/dev/null", "-o"])
        .arg(to);
    linker
}

/// Returns the end of a bundle, after the command: the parts, their lengths, and [`MAGIC`].
fn bundle_tail(parts: [&[u8]; 4]) -> Vec<u8> {
    let mut tail = parts.concat();
    for part in parts {
        tail.extend_from_slice(&(part.len() as u64).to_le_bytes());
    }
    tail.extend_from_slice(MAGIC);
    tail
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tail_ends_with_lengths_and_magic() {
        let tail = bundle_tail([b"abc", b"d", b"ef", b"ghij"]);
        assert_eq!(&tail[..10], b"abcdefghij");
        for (i, length) in [3u64, 1, 2, 4].into_iter().enumerate() {
            assert_eq!(tail[10 + i * 8..18 + i * 8], length.to_le_bytes());
        }
        assert_eq!(&tail[42..], MAGIC);
    }
}
