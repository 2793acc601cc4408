//! Finds the C library, and creates a folder in which it has the names that programs load.
//!
//! Both names must be links to one file, so that the loader loads it once. The file is searched in
//! this order: `IWARP_LIBRARY`, the folder of an installation (`../lib/iwarp` from `bin`), the
//! build folder that contains this command, and the end of the command's own file ([`bundle`]).

use super::{bundle, missing};
use iwarp_cli_common::error::{Context as _, Error, Result};
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

/// The names that programs load.
pub(super) const NAMES: [&str; 2] = ["libibverbs.so.1", "librdmacm.so.1"];
const BUILT: &str = "libiwarp_verbs.so";
pub(super) const PRELOAD_BUILT: &str = "librspreload.so";
pub(super) const PATHS_BUILT: &str = "libiwarp_paths.so";
pub(super) const AUDIT: &str = iwarp_audit::FILE_NAME;
/// The variable that names another library file.
const VARIABLE: &str = "IWARP_LIBRARY";

/// Libraries that are ready for use.
#[derive(Debug)]
pub(super) struct Libraries {
    /// The library for both names.
    pub(super) verbs: Verbs,
    /// The audit library, which redirects requests for either name to `verbs`.
    pub(super) audit: Option<PathBuf>,
    pub(super) preloads: Preloads,
}

/// The libraries that are loaded only through `LD_PRELOAD`.
#[derive(Debug, Default)]
pub(super) struct Preloads {
    /// `librspreload.so`.
    pub(super) rsockets: Option<PathBuf>,
    /// `libiwarp_paths.so`.
    pub(super) paths: Option<PathBuf>,
}

impl Preloads {
    /// Finds the libraries in a folder. The paths are absolute, because the program may change its
    /// directory.
    fn in_folder(dir: &Path) -> Self {
        let first = |names: &[&str]| {
            let found = |name: &&str| dir.join(name).canonicalize().ok();
            names.iter().find_map(found)
        };
        Self {
            rsockets: first(&[PRELOAD_BUILT, "libiwarp_rspreload.so"]),
            paths: first(&[PATHS_BUILT]),
        }
    }
}

/// How the loader finds the library.
#[derive(Debug)]
pub(super) enum Verbs {
    /// A folder with both names, which the loader searches first.
    Folder(PathBuf),
    /// Files that the loader preloads. They exist as long as the descriptors are open.
    Memory {
        files: [PathBuf; 2],
        _descriptors: Vec<OwnedFd>,
    },
}

impl Libraries {
    /// Returns the libraries of a folder, including the audit library if the folder contains it.
    pub(super) fn in_folder(dir: PathBuf, preloads: Preloads) -> Self {
        let audit = Some(dir.join(AUDIT)).filter(|file| file.exists());
        let verbs = Verbs::Folder(dir);
        Self {
            verbs,
            audit,
            preloads,
        }
    }
}

/// Finds the libraries. `lasting` means that they must outlive this process, also if it becomes
/// another program.
///
/// # Errors
/// Fails if there are no libraries, or no writable folder for links or for unpacking a bundle.
pub(super) fn find(lasting: bool) -> Result<Libraries> {
    if let Some(file) = std::env::var_os(VARIABLE).filter(|f| !f.is_empty()) {
        let file = Path::new(&file);
        // Users may name the folder by mistake; the loader's own message would not help them.
        if !fs::metadata(file).context(setting(file))?.is_file() {
            return Err(Error::failed(format!("{}: not a file", setting(file))));
        }
        return linked(
            file,
            Preloads::in_folder(file.parent().unwrap_or(Path::new(""))),
        );
    }
    let exe = std::env::current_exe().context("looking for this command's own file")?;
    let exe_dir = exe.parent().unwrap_or(Path::new("/"));
    let installed = exe_dir.join("../lib/iwarp");
    if NAMES.iter().all(|n| installed.join(n).exists()) {
        let dir = installed.canonicalize().context("the library folder")?;
        let preloads = Preloads::in_folder(&dir);
        return Ok(Libraries::in_folder(dir, preloads));
    }
    // Test programs and examples are one folder deeper.
    for dir in [exe_dir, exe_dir.parent().unwrap_or(exe_dir)] {
        let built = dir.join(BUILT);
        if built.exists() {
            return linked(&built, Preloads::in_folder(dir));
        }
    }
    if let Some(libs) = bundle::find(&exe, lasting)? {
        return Ok(libs);
    }
    Err(Error::Advice(missing::advice(&exe)))
}

fn setting(file: &Path) -> String {
    format!("{VARIABLE}={}", file.display())
}

/// Creates a folder with links to a library file under its two names, and with the audit library.
fn linked(file: &Path, preloads: Preloads) -> Result<Libraries> {
    let file = file
        .canonicalize()
        .context(format!("the library {}", file.display()))?;
    let beside = file.with_file_name("iwarp-lib");
    let mut reasons = Vec::new();
    let folders: [&dyn Fn() -> Result<PathBuf>; 2] =
        [&|| Ok(beside.clone()), &|| private_dir(&file)];
    for folder in folders {
        let filled = folder().and_then(|dir| {
            link_names(&dir, &file)
                .and_then(|()| write_if_changed(iwarp_audit::LIBRARY, &dir.join(AUDIT)))
                .context(dir.display())?;
            Ok(dir)
        });
        match filled {
            Ok(dir) => return Ok(Libraries::in_folder(dir, preloads)),
            Err(e) => reasons.push(e.to_string()),
        }
    }
    Err(Error::failed(format!(
        "there is no place for links to {} ({}): set TMPDIR to a folder that you can write to",
        file.display(),
        reasons.join("; ")
    )))
}

/// Creates links with both names to `file`. Correct links are kept.
fn link_names(dir: &Path, file: &Path) -> std::io::Result<()> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(dir)?;
    check_trusted(dir)?;
    for name in NAMES {
        let link = dir.join(name);
        if fs::read_link(&link).is_ok_and(|to| to == file) {
            continue;
        }
        // Create a temporary link and rename it: another process may be doing the same.
        let temporary = dir.join(format!(".{name}.{}", std::process::id()));
        let _ = fs::remove_file(&temporary);
        symlink(file, &temporary)?;
        fs::rename(&temporary, &link)?;
    }
    Ok(())
}

/// Writes a file, unless it has these contents already.
pub(super) fn write_if_changed(octets: &[u8], to: &Path) -> std::io::Result<()> {
    if fs::read(to).is_ok_and(|contents| contents == octets) {
        return Ok(());
    }
    // Write and rename: another process may be doing the same, or have the older file open.
    let temporary = temporary_name(to);
    let written = fs::write(&temporary, octets).and_then(|()| fs::rename(&temporary, to));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Returns a name in the folder of `path` that no other process uses.
pub(super) fn temporary_name(path: &Path) -> PathBuf {
    path.with_extension(format!("new-{}", std::process::id()))
}

/// Checks that only this user and root can write to a folder.
///
/// # Errors
/// Fails if another user can write to it, or if the folder cannot be examined.
pub(super) fn check_trusted(dir: &Path) -> std::io::Result<()> {
    let meta = fs::symlink_metadata(dir)?;
    let owners = [0, rustix::process::geteuid().as_raw()];
    if meta.is_dir() && owners.contains(&meta.uid()) && meta.permissions().mode() & 0o022 == 0 {
        return Ok(());
    }
    Err(std::io::Error::other("another user may write to it"))
}

/// Returns a path in the folder of [`user_dir`] that is unique for this version of a file.
pub(super) fn private_dir(file: &Path) -> Result<PathBuf> {
    let meta = fs::metadata(file).context("the library file")?;
    let (dev, ino, mtime) = (meta.dev(), meta.ino(), meta.mtime());
    Ok(user_dir()?.join(format!("{dev:x}-{ino:x}-{mtime:x}")))
}

/// Creates a folder to which only this user can write, and returns its path.
pub(super) fn user_dir() -> Result<PathBuf> {
    let base = std::env::var_os("XDG_RUNTIME_DIR")
        .map(PathBuf::from)
        .filter(|p| p.is_dir());
    let base = base.unwrap_or_else(std::env::temp_dir);
    let user = rustix::process::geteuid().as_raw();
    let dir = base.join(format!("iwarp-{user}"));
    if let Err(e) = fs::DirBuilder::new().mode(0o700).create(&dir)
        && e.kind() != std::io::ErrorKind::AlreadyExists
    {
        return Err(Error::failed(format!("{}: {e}", dir.display())));
    }
    // In a shared parent folder, another user may have created this folder first.
    let owner = fs::symlink_metadata(&dir).context(dir.display())?;
    if !owner.is_dir() || owner.uid() != user || owner.permissions().mode() & 0o022 != 0 {
        return Err(Error::failed(format!(
            "{} is not a folder of this user alone",
            dir.display()
        )));
    }
    Ok(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("iwarp-test-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir(&dir).unwrap();
        dir
    }

    #[test]
    fn both_names_link_to_one_file() {
        let dir = scratch("links");
        let file = dir.join(BUILT);
        fs::write(&file, b"x").unwrap();
        // The second iteration stands for the next process.
        for _ in 0..2 {
            let Verbs::Folder(folder) = linked(&file, Preloads::default()).unwrap().verbs else {
                panic!("in memory")
            };
            for name in NAMES {
                assert_eq!(
                    fs::read_link(folder.join(name)).unwrap(),
                    file.canonicalize().unwrap()
                );
            }
        }
        fs::remove_dir_all(dir).unwrap();
    }
}
