//! Finds the libraries that `cargo xtask bundle` appends to this command's own file.
//!
//! They are unpacked into the first of these folders from which the loader can load them: a folder
//! beside the program, then a folder of this user in `XDG_RUNTIME_DIR` or in the temporary folder.
//! If no folder is writable, or all are mounted `noexec`, the libraries stay in memory (`memfd`),
//! and `LD_PRELOAD` names them by their descriptors. The loader identifies a preloaded file by its
//! DT_SONAME, of which a file has only one. So the bundle also contains an empty `librdmacm.so.1`,
//! which depends on the verbs library.

use super::library::{
    self, AUDIT, Libraries, NAMES, PATHS_BUILT, PRELOAD_BUILT, Preloads, Verbs, check_trusted,
    private_dir, temporary_name, write_if_changed,
};
use iwarp_cli_common::error::{Context as _, Error, Result};
use rustix::fs::{MemfdFlags, SealFlags, StatVfsMountFlags};
use std::fs;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, symlink};
use std::path::{Path, PathBuf};

/// The last bytes of a bundle, after the lengths of the parts.
const MAGIC: &[u8; 8] = b"iwarplib";
const PARTS: usize = 4;
/// Length of the end of a bundle: the length of each part (eight little-endian bytes), and
/// [`MAGIC`].
const TAIL: usize = PARTS * 8 + MAGIC.len();
/// Lowest descriptor for a file in memory, because scripts use small numbers (`exec 3>file`).
const FIRST_DESCRIPTOR: i32 = 100;
const HELP: &str = "set TMPDIR to a folder of yours that is not mounted noexec, move this command \
    into such a folder, or set IWARP_LIBRARY to an unpacked libibverbs.so.1";

/// The libraries of a bundle, in the order of the file.
struct Bundle {
    /// The library for both names, `libibverbs.so.1` and `librdmacm.so.1`.
    verbs: Vec<u8>,
    /// A library named `librdmacm.so.1` that only depends on `verbs`.
    second_name: Vec<u8>,
    /// `librspreload.so`; empty if there is none.
    preload: Vec<u8>,
    /// `libiwarp_paths.so`; empty if there is none.
    paths: Vec<u8>,
}

/// Extracts the libraries from the command's own file. Returns `None` if the file contains none.
/// `lasting` means that they must outlive this process, also if it becomes another program.
///
/// # Errors
/// Fails if the file cannot be read, or if neither a folder nor memory can hold the libraries.
pub(super) fn find(exe: &Path, lasting: bool) -> Result<Option<Libraries>> {
    let Some(bundle) = Bundle::read(exe).context("reading this command's own file")? else {
        return Ok(None);
    };
    let mut reasons = Vec::new();
    let folders: [&dyn Fn() -> Result<PathBuf>; 2] =
        [&|| Ok(folder_beside(exe)), &|| private_dir(exe)];
    for folder in folders {
        let unpacked = folder().and_then(|dir| bundle.unpack(&dir).context(dir.display()));
        match unpacked {
            Ok(libraries) => return Ok(Some(libraries)),
            Err(e) => reasons.push(e.to_string()),
        }
    }
    if lasting {
        reasons.push("memory: only `iwarp run` can use it, not `iwarp env`".to_owned());
    } else {
        match bundle.into_memory() {
            Ok(libraries) => return Ok(Some(libraries)),
            Err(e) => reasons.push(format!("memory: {e}")),
        }
    }
    Err(Error::failed(format!(
        "there is no place for the libraries that this command carries ({}): {HELP}",
        reasons.join("; ")
    )))
}

/// Returns the folder for the libraries beside the program `exe`.
fn folder_beside(exe: &Path) -> PathBuf {
    let mut name = exe.file_name().unwrap_or_default().to_owned();
    name.push("-lib");
    exe.with_file_name(name)
}

/// Writes the libraries of the command at `exe` into the folder `dir`, as in an installation.
///
/// # Errors
/// Fails if there are no libraries, or if the folder cannot hold them.
pub(super) fn copy_libraries(exe: &Path, dir: &Path) -> Result<Libraries> {
    let own = Bundle::read(exe).context("reading this command's own file")?;
    let bundle = match own {
        Some(bundle) => bundle,
        None => Bundle::read_folder(&library::find(true)?)?,
    };
    bundle.unpack(dir).context(dir.display())
}

/// Returns the length of the command at the start of a bundle, or of the whole file if it is not a
/// bundle.
pub(super) fn command_len(exe: &Path) -> io::Result<u64> {
    let mut file = fs::File::open(exe)?;
    let len = file.metadata()?.len();
    let libraries = lengths(&mut file, len);
    Ok(libraries.map_or(len, |lengths| start(len, lengths)))
}

/// Returns the length of the command in a bundle of `len` bytes.
fn start(len: u64, lengths: [u64; PARTS]) -> u64 {
    len - TAIL as u64 - lengths.iter().sum::<u64>()
}

impl Bundle {
    /// Reads the libraries of an installation.
    fn read_folder(libs: &Libraries) -> Result<Self> {
        let Verbs::Folder(dir) = &libs.verbs else {
            return Err(Error::failed("the libraries are only in memory"));
        };
        let read = |file: &Path| fs::read(file).context(file.display());
        let optional = |file: &Option<PathBuf>| match file {
            Some(file) => read(file),
            None => Ok(Vec::new()),
        };
        Ok(Self {
            verbs: read(&dir.join(NAMES[0]))?,
            // Only libraries in memory need it.
            second_name: Vec::new(),
            preload: optional(&libs.preloads.rsockets)?,
            paths: optional(&libs.preloads.paths)?,
        })
    }

    fn read(exe: &Path) -> io::Result<Option<Self>> {
        let mut file = fs::File::open(exe)?;
        let len = file.metadata()?.len();
        let Some(lengths) = lengths(&mut file, len) else {
            return Ok(None);
        };
        let start = start(len, lengths);
        let [verbs, second_name, preload, paths] = lengths;
        file.seek(SeekFrom::Start(start))?;
        let mut part = |len: u64| {
            let mut octets = Vec::new();
            (&mut file).take(len).read_to_end(&mut octets)?;
            match octets.len() as u64 == len {
                true => Ok(octets),
                false => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
            }
        };
        Ok(Some(Self {
            verbs: part(verbs)?,
            second_name: part(second_name)?,
            preload: part(preload)?,
            paths: part(paths)?,
        }))
    }

    /// Creates the files and links of an installation in `dir`, unless they are already correct.
    fn unpack(&self, dir: &Path) -> io::Result<Libraries> {
        match fs::DirBuilder::new().mode(0o755).create(dir) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
        check_trusted(dir)?;
        let flags = rustix::fs::statvfs(dir)?.f_flag;
        if flags.contains(StatVfsMountFlags::NOEXEC) {
            return Err(io::Error::other("mounted noexec"));
        }
        let [verbs, second] = NAMES;
        write_if_changed(&self.verbs, &dir.join(verbs))?;
        // A link, not a copy: the loader would load two files twice, with two engines.
        let link = dir.join(second);
        if !fs::read_link(&link).is_ok_and(|to| to == Path::new(verbs)) {
            let temporary = temporary_name(&link);
            let _ = fs::remove_file(&temporary);
            symlink(verbs, &temporary)?;
            fs::rename(&temporary, &link)?;
        }
        let preloads = self.store_preloads(|name, octets| {
            let file = dir.join(name);
            write_if_changed(octets, &file)?;
            Ok(file)
        })?;
        write_if_changed(iwarp_audit::LIBRARY, &dir.join(AUDIT))?;
        Ok(Libraries::in_folder(dir.to_owned(), preloads))
    }

    /// Keeps the libraries in memory for this process, the program that it becomes, and children.
    fn into_memory(self) -> io::Result<Libraries> {
        let mut descriptors = Vec::new();
        let mut keep = |name: &str, octets: &[u8]| {
            let (descriptor, path) = create_in_memory(name, octets)?;
            descriptors.push(descriptor);
            Ok::<_, io::Error>(path)
        };
        let files = [
            keep(NAMES[0], &self.verbs)?,
            keep(NAMES[1], &self.second_name)?,
        ];
        let audit = keep(AUDIT, iwarp_audit::LIBRARY)?;
        let preloads = self.store_preloads(keep)?;
        Ok(Libraries {
            verbs: Verbs::Memory {
                files,
                _descriptors: descriptors,
            },
            audit: Some(audit),
            preloads,
        })
    }

    /// Stores the libraries that are only preloaded. `store` gets name and contents, and returns
    /// the path.
    fn store_preloads(
        &self,
        mut store: impl FnMut(&str, &[u8]) -> io::Result<PathBuf>,
    ) -> io::Result<Preloads> {
        let mut part = |name: &str, octets: &[u8]| match octets {
            [] => Ok(None),
            _ => store(name, octets).map(Some),
        };
        Ok(Preloads {
            rsockets: part(PRELOAD_BUILT, &self.preload)?,
            paths: part(PATHS_BUILT, &self.paths)?,
        })
    }
}

/// Reads the lengths of the parts at the end of a bundle. Returns `None` if it is not a bundle.
fn lengths(file: &mut fs::File, len: u64) -> Option<[u64; PARTS]> {
    let mut tail = [0u8; TAIL];
    let tail_start = len.checked_sub(TAIL as u64)?;
    file.seek(SeekFrom::Start(tail_start)).ok()?;
    file.read_exact(&mut tail).ok()?;
    let (words, magic) = tail.split_at(TAIL - MAGIC.len());
    let mut lengths = [0; PARTS];
    for (length, word) in lengths.iter_mut().zip(words.chunks_exact(8)) {
        *length = u64::from_le_bytes(word.try_into().ok()?);
    }
    let sum = lengths
        .iter()
        .try_fold(0u64, |sum, &len| sum.checked_add(len))?;
    (magic == MAGIC && sum < tail_start && lengths[0] > 0 && lengths[1] > 0).then_some(lengths)
}

/// Creates a file in memory. The loader can load it by the returned path while the descriptor is
/// open in this process.
fn create_in_memory(name: &str, octets: &[u8]) -> io::Result<(OwnedFd, PathBuf)> {
    let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
    // Kernels before 6.3 do not know `MFD_EXEC`, and do not need it.
    let file = rustix::fs::memfd_create(name, flags | MemfdFlags::EXEC)
        .or_else(|_| rustix::fs::memfd_create(name, flags))?;
    let mut file = fs::File::from(file);
    file.write_all(octets)?;
    rustix::fs::fcntl_add_seals(
        &file,
        SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL,
    )?;
    let descriptor = rustix::io::fcntl_dupfd_cloexec(&file, FIRST_DESCRIPTOR)
        .unwrap_or_else(|_| OwnedFd::from(file));
    // The program that this process becomes inherits the descriptor.
    rustix::io::fcntl_setfd(&descriptor, rustix::io::FdFlags::empty())?;
    // Not /proc/self: many programs close all descriptors in their children.
    let path = format!("/proc/{}/fd/{}", std::process::id(), descriptor.as_raw_fd());
    Ok((descriptor, path.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    const PARTS: [&[u8]; super::PARTS] = [b"LIBRARY", b"NAME", b"PRE", b"PATHS"];

    fn bytes(parts: [&[u8]; super::PARTS]) -> Vec<u8> {
        let mut bytes = b"program".to_vec();
        bytes.extend(parts.concat());
        for part in parts {
            bytes.extend((part.len() as u64).to_le_bytes());
        }
        bytes.extend(MAGIC);
        bytes
    }

    /// Writes a bundle into a folder of its own.
    fn bundle(name: &str, bytes: &[u8]) -> (PathBuf, PathBuf) {
        let dir = std::env::temp_dir().join(format!("iwarp-bundle-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir(&dir).unwrap();
        let exe = dir.join("iwarp");
        fs::write(&exe, bytes).unwrap();
        (dir, exe)
    }

    #[test]
    fn bundle_is_unpacked_beside_the_program() {
        let (dir, exe) = bundle("beside", &bytes(PARTS));
        // In the second iteration, all files exist already.
        for _ in 0..2 {
            let libs = find(&exe, true).unwrap().unwrap();
            let Verbs::Folder(folder) = libs.verbs else {
                panic!("in memory")
            };
            assert_eq!(folder, dir.join("iwarp-lib"));
            for name in NAMES {
                assert_eq!(fs::read(folder.join(name)).unwrap(), PARTS[0]);
            }
            let Preloads { rsockets, paths } = libs.preloads;
            assert_eq!(fs::read(rsockets.unwrap()).unwrap(), PARTS[2]);
            assert_eq!(fs::read(paths.unwrap()).unwrap(), PARTS[3]);
            assert_eq!(fs::read(libs.audit.unwrap()).unwrap(), iwarp_audit::LIBRARY);
            assert_eq!(fs::read_dir(&folder).unwrap().count(), 5);
        }
        // A new version of the same length replaces the files.
        fs::write(&exe, bytes([b"library", b"NAME", b"", b""])).unwrap();
        let libs = find(&exe, true).unwrap().unwrap();
        assert!(libs.preloads.rsockets.is_none() && libs.preloads.paths.is_none());
        assert_eq!(
            fs::read(dir.join("iwarp-lib").join(NAMES[1])).unwrap(),
            b"library"
        );
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn other_files_have_no_libraries() {
        let mut cut = bytes(PARTS);
        cut.drain(..8);
        let mut huge = bytes(PARTS);
        let at = huge.len() - TAIL;
        huge[at..at + 8].fill(0xff);
        for (name, bytes) in [
            (
                "none",
                &b"no bundle at all, but quite long enough to be one"[..],
            ),
            ("short", b"x"),
            ("cut", &cut),
            ("huge", &huge),
            ("empty", &bytes([b"", b"NAME", b"", b""])),
        ] {
            let (dir, exe) = bundle(name, bytes);
            assert!(find(&exe, true).unwrap().is_none(), "{name}");
            fs::remove_dir_all(dir).unwrap();
        }
    }

    /// Another user who can write to the folder could replace the library.
    #[test]
    fn shared_folder_is_not_used() {
        let (dir, exe) = bundle("open", &bytes(PARTS));
        let folder = folder_beside(&exe);
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
        let bundle = Bundle::read(&exe).unwrap().unwrap();
        let error = bundle.unpack(&folder).err().unwrap().to_string();
        assert!(error.contains("another user"), "{error}");
        // Another user's link to a folder of ours is refused, too.
        let link = dir.join("link");
        symlink(&dir, &link).unwrap();
        assert!(check_trusted(&link).is_err() && check_trusted(&dir).is_ok());
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn memory_file_is_readable_and_sealed() {
        let (descriptor, path) = create_in_memory("name", b"octets").unwrap();
        assert!(descriptor.as_raw_fd() >= FIRST_DESCRIPTOR);
        assert!(rustix::io::fcntl_getfd(&descriptor).unwrap().is_empty());
        assert_eq!(fs::read(&path).unwrap(), b"octets");
        assert!(fs::write(&path, b"other").is_err());
        drop(descriptor);
        assert!(fs::read(&path).is_err());
    }
}
