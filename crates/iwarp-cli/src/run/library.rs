//! Where the C library is, and a folder in which it has the names that programs look for.
//!
//! Both names must be links to one file: the loader then loads it once. Looked for in this order: the file that
//! `IWARP_LIBRARY` names, the folder of an installation (`../lib/iwarp` beside `bin`), the build folder that this
//! command is in, and the command's own tail (`cargo xtask bundle` appends the libraries to it).

use super::missing;
use crate::error::{Context as _, Error, Result};
use std::fs;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

const NAMES: [&str; 2] = ["libibverbs.so.1", "librdmacm.so.1"];
const BUILT: &str = "libiwarp_verbs.so";
const PRELOAD_BUILT: &str = "librspreload.so";
/// Names a library file that is not where it is looked for.
const VARIABLE: &str = "IWARP_LIBRARY";
/// Ends a bundle: after the libraries come their lengths and this.
const MAGIC: &[u8; 8] = b"iwarplib";

/// Libraries ready to be used.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Libraries {
    /// Folder with both names.
    pub(super) dir: PathBuf,
    /// `librspreload.so`.
    pub(super) preload: Option<PathBuf>,
}

/// Finds the libraries.
///
/// # Errors
/// When they are nowhere, or no folder for the links can be made.
pub(super) fn find() -> Result<Libraries> {
    if let Some(file) = std::env::var_os(VARIABLE).filter(|f| !f.is_empty()) {
        let file = Path::new(&file);
        // A folder is a likely mistake, and the loader's message would name neither it nor the variable.
        if !fs::metadata(file).context(named(file))?.is_file() {
            return Err(Error::failed(format!("{}: not a file", named(file))));
        }
        return linked(file, preload_in(file.parent().unwrap_or(Path::new(""))));
    }
    let exe = std::env::current_exe().context("looking for this command's own file")?;
    let here = exe.parent().unwrap_or(Path::new("/"));
    let installed = here.join("../lib/iwarp");
    if NAMES.iter().all(|n| installed.join(n).exists()) {
        let dir = installed.canonicalize().context("the library folder")?;
        let preload = Some(dir.join(PRELOAD_BUILT)).filter(|p| p.exists());
        return Ok(Libraries { dir, preload });
    }
    // Test binaries and examples lie one folder deeper.
    for dir in [here, here.parent().unwrap_or(here)] {
        let built = dir.join(BUILT);
        if built.exists() {
            return linked(&built, preload_in(dir));
        }
    }
    if let Some(libs) = bundled(&exe)? {
        return Ok(libs);
    }
    Err(Error::failed(missing::advice(&exe)))
}

/// The preload library in a folder. Absolute, because the program may have another directory.
fn preload_in(dir: &Path) -> Option<PathBuf> {
    let names = [PRELOAD_BUILT, "libiwarp_rspreload.so"];
    names
        .iter()
        .find_map(|name| dir.join(name).canonicalize().ok())
}

fn named(file: &Path) -> String {
    format!("{VARIABLE}={}", file.display())
}

/// Gives a library file its two names, in a folder made for that.
fn linked(file: &Path, preload: Option<PathBuf>) -> Result<Libraries> {
    let file = file
        .canonicalize()
        .context(format!("the library {}", file.display()))?;
    let beside = file.parent().map(|p| p.join("iwarp-lib"));
    let dirs = beside.into_iter().chain([private_dir(&file)?]);
    for dir in dirs {
        if link_names(&dir, &file).is_ok() {
            return Ok(Libraries { dir, preload });
        }
    }
    Err(Error::failed(
        "no folder for links to the library can be made: is the temporary folder writable?",
    ))
}

/// Makes, or finds made, links with both names.
fn link_names(dir: &Path, file: &Path) -> std::io::Result<()> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(dir)?;
    for name in NAMES {
        let link = dir.join(name);
        if fs::read_link(&link).is_ok_and(|to| to == file) {
            continue;
        }
        // Put in place by renaming: another process may be doing the same.
        let fresh = dir.join(format!(".{name}.{}", std::process::id()));
        let _ = fs::remove_file(&fresh);
        symlink(file, &fresh)?;
        fs::rename(&fresh, &link)?;
    }
    Ok(())
}

/// A folder of this user's own for one version of a file.
fn private_dir(file: &Path) -> Result<PathBuf> {
    let meta = fs::metadata(file).context("the library file")?;
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
    // In a folder that everybody can write, somebody else may have been first.
    let owner = fs::symlink_metadata(&dir).context(dir.display())?;
    if !owner.is_dir() || owner.uid() != user || owner.permissions().mode() & 0o022 != 0 {
        return Err(Error::failed(format!(
            "{} is not a folder of this user alone",
            dir.display()
        )));
    }
    Ok(dir.join(format!(
        "{:x}-{:x}-{:x}",
        meta.dev(),
        meta.ino(),
        meta.mtime()
    )))
}

/// Takes the libraries out of the command's own file, if they are in it.
fn bundled(exe: &Path) -> Result<Option<Libraries>> {
    let mut file = fs::File::open(exe).context("opening this command's own file")?;
    let len = file.metadata().context("this command's own file")?.len();
    let Some((verbs, preload)) = bundle_lengths(&mut file, len) else {
        return Ok(None);
    };
    let dir = private_dir(exe)?.join("files");
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&dir)
        .context(dir.display())?;
    let start = len - 24 - preload - verbs;
    let verbs_file = extract(&mut file, start, verbs, &dir.join(BUILT))?;
    let preload_file = match preload {
        0 => None,
        n => Some(extract(
            &mut file,
            start + verbs,
            n,
            &dir.join(PRELOAD_BUILT),
        )?),
    };
    linked(&verbs_file, preload_file).map(Some)
}

/// Lengths of the two libraries at the end of a bundle.
fn bundle_lengths(file: &mut fs::File, len: u64) -> Option<(u64, u64)> {
    let mut tail = [0u8; 24];
    file.seek(SeekFrom::Start(len.checked_sub(24)?)).ok()?;
    file.read_exact(&mut tail).ok()?;
    let (verbs, rest) = tail.split_first_chunk()?;
    let (preload, magic) = rest.split_first_chunk()?;
    let (verbs, preload) = (u64::from_le_bytes(*verbs), u64::from_le_bytes(*preload));
    let fits = verbs.checked_add(preload).is_some_and(|n| n < len - 24);
    (magic == MAGIC && fits && verbs > 0).then_some((verbs, preload))
}

/// Writes a part of a file to `to`, unless it is there already.
fn extract(file: &mut fs::File, start: u64, len: u64, to: &Path) -> Result<PathBuf> {
    if fs::metadata(to).is_ok_and(|m| m.len() == len) {
        return Ok(to.to_owned());
    }
    let fresh = to.with_extension(std::process::id().to_string());
    file.seek(SeekFrom::Start(start))
        .context("reading the bundle")?;
    let mut out = fs::File::create(&fresh).context(fresh.display())?;
    let copied = std::io::copy(&mut file.take(len), &mut out).context("unpacking the library")?;
    if copied != len {
        return Err(Error::failed("the bundle is cut off"));
    }
    fs::rename(&fresh, to).context(to.display())?;
    Ok(to.to_owned())
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
    fn both_names_are_links_to_one_file() {
        let dir = scratch("links");
        let file = dir.join(BUILT);
        fs::write(&file, b"x").unwrap();
        let libs = linked(&file, None).unwrap();
        // Again, as the next process does.
        assert_eq!(linked(&file, None).unwrap(), libs);
        for name in NAMES {
            assert_eq!(
                fs::read_link(libs.dir.join(name)).unwrap(),
                file.canonicalize().unwrap()
            );
        }
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_bundle_is_taken_apart() {
        let dir = scratch("bundle");
        let exe = dir.join("iwarp");
        let mut bytes = b"program".to_vec();
        bytes.extend_from_slice(b"LIBRARY");
        bytes.extend_from_slice(b"PRE");
        bytes.extend_from_slice(&7u64.to_le_bytes());
        bytes.extend_from_slice(&3u64.to_le_bytes());
        bytes.extend_from_slice(MAGIC);
        fs::write(&exe, &bytes).unwrap();
        let libs = bundled(&exe).unwrap().unwrap();
        assert_eq!(fs::read(libs.dir.join(NAMES[0])).unwrap(), b"LIBRARY");
        assert_eq!(fs::read(libs.preload.unwrap()).unwrap(), b"PRE");
        fs::write(&exe, b"no bundle at all, but long enough").unwrap();
        assert_eq!(bundled(&exe).unwrap(), None);
        fs::remove_dir_all(dir).unwrap();
    }
}
