//! The file that is received ([`Part`]) and the file that is sent ([`Source`]). Data are received
//! into a partial file (`.NAME.iwarp-part`), which is verified and renamed when it is complete.
//!
//! Data are written strictly in order, so the length of the partial file is the progress of the
//! copy. To continue a copy, the receiver hashes the partial file, and the sender compares the hash
//! with that of the beginning of its own file. The hashes differ if a crash left a hole, if the
//! partial file belongs to another file of that name, or if the source has changed.

use crate::confine::{PART_SUFFIX, Place, regular};
use iwarp_cli_common::error::{Context as _, Error, Result};
use iwarp_cli_common::service::zeros;
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};
use std::fs::File;
use std::io::{Read, Seek as _, SeekFrom, Write as _};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes that are read at a time for hashing.
pub(crate) const HASH_CHUNK: usize = 256 << 10;
/// How often to reopen a partial file that another copy completed and renamed before it was locked.
const LOCK_ATTEMPTS: usize = 100;
/// The umask if the kernel does not report it: others may not write.
const DEFAULT_UMASK: u32 = 0o022;

/// A SHA-256 hash.
pub(crate) type Hash = [u8; 32];

/// A partial file, locked by this process.
#[derive(Debug)]
pub(crate) struct Part {
    place: Place,
    name: String,
    file: File,
    hash: Sha256,
    len: u64,
    existing: Existing,
}

/// What to do if a file already has the name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Existing {
    /// Replace the file atomically.
    Replace,
    /// Keep the file and refuse the copy.
    Keep,
}

impl Part {
    /// Opens or creates the partial file of a place and hashes its first bytes, at most `limit`.
    /// The file is truncated if `keep` is `false` or it is longer than `limit`. `stop` ends hashing
    /// early.
    ///
    /// # Errors
    /// Fails if the file cannot be created, if another copy to the same name is running, if the
    /// name belongs to a file that must be kept, or if `stop` became `true`.
    pub(crate) fn open(
        place: Place,
        keep: bool,
        limit: u64,
        existing: Existing,
        stop: &AtomicBool,
    ) -> Result<Self> {
        Self::open_with(place, keep, limit, existing, stop, &mut || {})
    }

    /// Like [`open`](Self::open); calls `opened` between opening and locking.
    fn open_with(
        place: Place,
        keep: bool,
        limit: u64,
        existing: Existing,
        stop: &AtomicBool,
        opened: &mut dyn FnMut(),
    ) -> Result<Self> {
        let exists = place.check_target()?;
        if exists && existing == Existing::Keep {
            return Err(already_exists(&place.name));
        }
        let name = format!(".{}{PART_SUFFIX}", place.name);
        let mut part = Self {
            file: lock(&place, &name, opened)?,
            place,
            name,
            hash: Sha256::new(),
            len: 0,
            existing,
        };
        let len = part.file.metadata().context("partial file")?.len();
        if keep && len <= limit {
            part.len = hash_prefix(&mut part.file, len, &mut part.hash, stop)?;
        } else {
            part.restart()?;
        }
        Ok(part)
    }

    /// Returns the length of the partial file in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Returns the SHA-256 of the partial file.
    pub(crate) fn hash(&self) -> Hash {
        self.hash.clone().finalize().into()
    }

    /// Truncates the partial file.
    pub(crate) fn restart(&mut self) -> Result<()> {
        self.file
            .set_len(0)
            .and_then(|()| self.file.seek(SeekFrom::Start(0)))
            .context("partial file")?;
        (self.hash, self.len) = (Sha256::new(), 0);
        Ok(())
    }

    pub(crate) fn append(&mut self, data: &[u8]) -> Result<()> {
        self.file
            .write_all(data)
            .context(format_args!("cannot write '{}'", self.place.name))?;
        self.hash.update(data);
        self.len += data.len() as u64;
        Ok(())
    }

    /// Syncs the data to disk, then renames the complete file to its final name.
    ///
    /// # Errors
    /// Fails if the hash differs or the rename fails. If the hash differs, the partial file is
    /// removed, because it cannot be continued.
    pub(crate) fn commit(self, expected: &Hash, mode: u32) -> Result<()> {
        self.commit_with(expected, mode, File::sync_all)
    }

    /// Like [`commit`](Self::commit); syncs with `sync`.
    fn commit_with(
        self,
        expected: &Hash,
        mode: u32,
        sync: impl FnOnce(&File) -> std::io::Result<()>,
    ) -> Result<()> {
        if self.hash() != *expected {
            self.remove();
            return Err(Error::failed(format!(
                "'{}': SHA-256 differs, the data were damaged in transit",
                self.place.name
            )));
        }
        rustix::fs::fchmod(&self.file, permissions(mode, *UMASK)).context("permissions")?;
        sync(&self.file).context(format_args!("cannot write '{}'", self.place.name))?;
        let (from, to) = (self.name.as_str(), self.place.name.as_str());
        match self.existing {
            Existing::Replace => {
                let dir = &self.place.dir;
                rustix::fs::renameat(dir, from, dir, to)
                    .context(format_args!("cannot create '{to}'"))
            }
            Existing::Keep => self.place.rename_new(from).map_err(|e| {
                if e != Errno::EXIST {
                    return Error::failed(format!("cannot create '{to}': {e}"));
                }
                // The name exists by now, so the partial file is of no use any more.
                self.remove();
                already_exists(to)
            }),
        }
    }

    fn remove(&self) {
        let _ = rustix::fs::unlinkat(&self.place.dir, self.name.as_str(), AtFlags::empty());
    }
}

/// The umask of this process. It is read from `/proc`, because umask(2) would change it briefly for
/// all threads.
static UMASK: LazyLock<u32> = LazyLock::new(|| {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    umask_in(&status).unwrap_or(DEFAULT_UMASK)
});

/// Returns the umask in the text of `/proc/PID/status`.
fn umask_in(status: &str) -> Option<u32> {
    let octal = status.lines().find_map(|l| l.strip_prefix("Umask:"))?;
    u32::from_str_radix(octal.trim(), 8).ok()
}

/// Returns the permissions of a new file for which the peer requests `mode`. The umask applies,
/// set-uid bits are dropped, and the owner can always read and write the file.
fn permissions(mode: u32, umask: u32) -> Mode {
    Mode::from_raw_mode(mode & 0o777 & !umask | 0o600)
}

fn already_exists(name: &str) -> Error {
    Error::failed(format!(
        "'{name}' exists already and is not replaced (the server was started without --overwrite)"
    ))
}

/// Opens or creates a partial file and locks it. Between the two, another copy may rename the file
/// to its final name. Such a file must not be changed, so the partial file is opened again.
fn lock(place: &Place, name: &str, opened: &mut dyn FnMut()) -> Result<File> {
    let flags =
        OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    for _ in 0..LOCK_ATTEMPTS {
        let fd = rustix::fs::openat(&place.dir, name, flags, Mode::RUSR | Mode::WUSR)
            .context(format_args!("'{}'", place.name))?;
        let file = regular(fd, name)?;
        opened();
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(
            |e| match e {
                Errno::WOULDBLOCK => {
                    Error::failed(format!("'{}' is being written by another copy", place.name))
                }
                e => Error::failed(format!("'{}' cannot be locked: {e}", place.name)),
            },
        )?;
        let locked = rustix::fs::fstat(&file).context("partial file")?;
        match rustix::fs::statat(&place.dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(named) if (named.st_dev, named.st_ino) == (locked.st_dev, locked.st_ino) => {
                return Ok(file);
            }
            Ok(_) | Err(Errno::NOENT) => {}
            Err(e) => return Err(e).context("partial file"),
        }
    }
    Err(Error::failed(format!(
        "'{}' is being written by many copies at a time",
        place.name
    )))
}

/// A file that is sent. It is read in order and hashed at the same time.
#[derive(Debug)]
pub(crate) struct Source {
    file: File,
    hash: Sha256,
    size: u64,
    pub(crate) mode: u32,
}

impl Source {
    /// Wraps an open file.
    pub(crate) fn new(file: File) -> Result<Self> {
        let stat = rustix::fs::fstat(&file).context("file")?;
        let size = u64::try_from(stat.st_size).context("file size")?;
        Ok(Self {
            file,
            hash: Sha256::new(),
            size,
            mode: stat.st_mode & 0o777,
        })
    }

    /// Returns the length at the time of opening, in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Compares the hash of the peer's first `len` bytes with this file. If it is equal, reading
    /// continues at offset `len`, otherwise at 0. Returns the offset. `stop` ends hashing early.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or if `stop` became `true`.
    pub(crate) fn resume(&mut self, len: u64, hash: &Hash, stop: &AtomicBool) -> Result<u64> {
        self.file.seek(SeekFrom::Start(0)).context("file")?;
        self.hash = Sha256::new();
        if len > 0 && len <= self.size {
            let read = hash_prefix(&mut self.file, len, &mut self.hash, stop)?;
            if read == len && Hash::from(self.hash.clone().finalize()) == *hash {
                return Ok(len);
            }
            self.hash = Sha256::new();
            self.file.seek(SeekFrom::Start(0)).context("file")?;
        }
        Ok(0)
    }

    pub(crate) fn fill(&mut self, buf: &mut [u8]) -> Result<()> {
        self.file.read_exact(buf).map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                Error::failed("the file became shorter while it was copied")
            }
            _ => Error::failed(format!("cannot read the file: {e}")),
        })?;
        self.hash.update(&*buf);
        Ok(())
    }

    /// Returns the SHA-256 of all data so far, including those that the peer already had.
    pub(crate) fn hash(&self) -> Hash {
        self.hash.clone().finalize().into()
    }
}

/// Hashes up to `len` bytes from the current position. Returns how many bytes it hashed.
///
/// # Errors
/// Fails if the file cannot be read, or if `stop` is set, which is checked before each
/// [`HASH_CHUNK`].
fn hash_prefix(
    file: &mut impl Read,
    len: u64,
    hash: &mut Sha256,
    stop: &AtomicBool,
) -> Result<u64> {
    let mut buf = zeros(HASH_CHUNK)?;
    let mut done = 0;
    while done < len {
        if stop.load(Ordering::Relaxed) {
            return Err(Error::failed(
                "the peer closed the connection while its file was hashed",
            ));
        }
        let want = (len - done).min(HASH_CHUNK as u64) as usize;
        match file.read(&mut buf[..want]) {
            Ok(0) => break,
            Ok(n) => {
                hash.update(&buf[..n]);
                done += n as u64;
            }
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e).context("cannot read the file"),
        }
    }
    Ok(done)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::path::{Path, PathBuf};
    use std::sync::atomic::AtomicU32;

    /// A directory that is removed on drop.
    pub(crate) struct TempDir(PathBuf);

    impl TempDir {
        pub(crate) fn new() -> Self {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let n = NEXT.fetch_add(1, Ordering::Relaxed);
            let dir =
                std::env::temp_dir().join(format!("iwarp-cp-test-{}-{n}", std::process::id()));
            std::fs::create_dir_all(&dir).unwrap();
            Self(dir)
        }

        pub(crate) fn path(&self, name: &str) -> PathBuf {
            self.0.join(name)
        }
    }

    impl Drop for TempDir {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    pub(crate) fn sha(data: &[u8]) -> Hash {
        Sha256::digest(data).into()
    }

    static NO_STOP: AtomicBool = AtomicBool::new(false);

    fn part(path: &Path, keep: bool) -> Result<Part> {
        Part::open(
            Place::local(path)?,
            keep,
            1 << 40,
            Existing::Replace,
            &NO_STOP,
        )
    }

    /// The second copy opens the partial file. Before it locks the file, the first copy completes,
    /// and a third copy may create a new partial file.
    #[test]
    fn completed_file_is_not_a_partial_one() {
        for (keep, third) in [(true, false), (false, false), (true, true), (false, true)] {
            let t = TempDir::new();
            let target = t.path("a");
            let partial = t.path(".a.iwarp-part");
            let mut first = part(&target, true).unwrap();
            first.append(b"complete").unwrap();
            let mut first = Some(first);
            let mut second = Part::open_with(
                Place::local(&target).unwrap(),
                keep,
                1 << 40,
                Existing::Replace,
                &NO_STOP,
                &mut || {
                    if let Some(first) = first.take() {
                        first.commit(&sha(b"complete"), 0o644).unwrap();
                        if third {
                            std::fs::write(&partial, "third").unwrap();
                        }
                    }
                },
            )
            .unwrap();
            let kept = if keep && third { "third" } else { "" };
            assert_eq!(second.len(), kept.len() as u64, "not the finished file");
            second.append(b"half").unwrap();
            assert_eq!(std::fs::read(&target).unwrap(), b"complete");
            assert_eq!(
                std::fs::read(&partial).unwrap(),
                format!("{kept}half").as_bytes()
            );
        }
    }

    #[test]
    fn existing_file_is_kept_by_default() {
        let t = TempDir::new();
        let target = t.path("a");
        let open = || {
            Part::open(
                Place::local(&target).unwrap(),
                true,
                99,
                Existing::Keep,
                &NO_STOP,
            )
        };
        std::fs::write(&target, "old").unwrap();
        let e = open().unwrap_err().to_string();
        assert!(e.contains("exists already"), "{e}");
        assert!(
            !t.path(".a.iwarp-part").exists(),
            "refused before a file is created"
        );
        // Another file gets the name while the copy runs.
        std::fs::remove_file(&target).unwrap();
        let mut p = open().unwrap();
        p.append(b"new").unwrap();
        std::fs::write(&target, "old").unwrap();
        let e = p.commit(&sha(b"new"), 0o644).unwrap_err().to_string();
        assert!(e.contains("exists already"), "{e}");
        assert_eq!(std::fs::read(&target).unwrap(), b"old");
        assert!(!t.path(".a.iwarp-part").exists());
        // The file of that name is removed meanwhile.
        std::fs::remove_file(&target).unwrap();
        let mut p = open().unwrap();
        p.append(b"new").unwrap();
        p.commit(&sha(b"new"), 0o644).unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"new");
    }

    #[test]
    fn parts_are_continued_and_committed() {
        let t = TempDir::new();
        let target = t.path("a");
        let mut p = part(&target, true).unwrap();
        p.append(b"hello ").unwrap();
        assert!(
            part(&target, true)
                .unwrap_err()
                .to_string()
                .contains("another copy")
        );
        drop(p);
        assert!(!target.exists());
        let mut p = part(&target, true).unwrap();
        assert_eq!((p.len(), p.hash()), (6, sha(b"hello ")));
        p.append(b"world").unwrap();
        p.commit(&sha(b"hello world"), 0o6755).unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"hello world");
        let mode = std::os::unix::fs::PermissionsExt::mode(
            &std::fs::metadata(&target).unwrap().permissions(),
        );
        assert_eq!(mode & 0o7777, 0o755 & !*UMASK);
        assert!(!t.path(".a.iwarp-part").exists());
    }

    /// After a crash of the host, a file with its final name must be complete.
    #[test]
    fn data_are_synced_before_the_rename() {
        for existing in [Existing::Replace, Existing::Keep] {
            for fails in [false, true] {
                let t = TempDir::new();
                let target = t.path("a");
                let place = Place::local(&target).unwrap();
                let mut p = Part::open(place, true, 99, existing, &NO_STOP).unwrap();
                p.append(b"data").unwrap();
                let mut synced = false;
                let outcome = p.commit_with(&sha(b"data"), 0o600, |file| {
                    synced = true;
                    assert_eq!(file.metadata()?.len(), 4);
                    assert!(!target.exists(), "renamed before the sync");
                    match fails {
                        true => Err(Errno::IO.into()),
                        false => Ok(()),
                    }
                });
                assert!(synced);
                assert_eq!(outcome.is_err(), fails);
                assert_eq!(target.exists(), !fails);
                if let Err(e) = outcome {
                    assert!(e.to_string().contains("cannot write 'a'"), "{e}");
                }
            }
        }
    }

    /// A full disk is reported immediately, and earlier data are kept.
    #[test]
    fn failed_write_is_an_error() {
        let t = TempDir::new();
        let mut p = part(&t.path("a"), true).unwrap();
        p.append(b"kept").unwrap();
        // A read-only descriptor simulates the full disk.
        p.file = File::open(t.path(".a.iwarp-part")).unwrap();
        let e = p.append(b"lost").unwrap_err().to_string();
        assert!(e.contains("cannot write 'a'"), "{e}");
        assert_eq!((p.len(), p.hash()), (4, sha(b"kept")));
    }

    /// Until the file has its permissions, other users cannot read it and other programs do not
    /// inherit it.
    #[test]
    fn partial_file_is_private() {
        let t = TempDir::new();
        let p = part(&t.path("a"), true).unwrap();
        let flags = rustix::io::fcntl_getfd(&p.file).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        let mode = p.file.metadata().unwrap().permissions();
        assert_eq!(
            std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777,
            0o600
        );
    }

    /// Other users who may write to the directory can neither redirect the data nor block the copy.
    #[test]
    fn only_regular_files_are_partial_files() {
        use rustix::fs::FileType;
        let t = TempDir::new();
        let name = t.path(".a.iwarp-part");
        std::fs::write(t.path("other"), "other").unwrap();
        std::os::unix::fs::symlink(t.path("other"), &name).unwrap();
        assert!(part(&t.path("a"), false).is_err());
        assert_eq!(std::fs::read(t.path("other")).unwrap(), b"other");
        // No file is created through a dangling link.
        std::fs::remove_file(t.path("other")).unwrap();
        assert!(part(&t.path("a"), false).is_err());
        assert!(!t.path("other").exists());
        std::fs::remove_file(&name).unwrap();
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &name, FileType::Fifo, mode, 0).unwrap();
        let e = part(&t.path("a"), false).unwrap_err().to_string();
        assert!(e.contains("not a regular file"), "{e}");
    }

    #[test]
    fn umask_limits_requested_permissions() {
        for (mode, umask, result) in [
            (0o777, 0o022, 0o755),
            (0o777, 0o077, 0o700),
            (0o4777, 0, 0o777),
            (0o444, 0o027, 0o640),
            (0, 0o777, 0o600),
        ] {
            assert_eq!(permissions(mode, umask).as_raw_mode(), result, "{mode:o}");
        }
        assert_eq!(umask_in("Name:\tx\nUmask:\t0027\nState:\tR\n"), Some(0o027));
        assert_eq!(umask_in("Name:\tUmask: 7\n"), None);
        assert_eq!(umask_in(""), None);
        // If the umask is unknown, only the owner can write.
        assert_eq!(permissions(0o777, DEFAULT_UMASK).as_raw_mode(), 0o755);
    }

    #[test]
    fn damage_is_detected_and_removed() {
        let t = TempDir::new();
        std::fs::write(t.path("a"), "old").unwrap();
        let mut p = part(&t.path("a"), true).unwrap();
        p.append(b"hellX").unwrap();
        assert!(
            p.commit(&sha(b"hello"), 0o644)
                .unwrap_err()
                .to_string()
                .contains("SHA-256")
        );
        assert_eq!(std::fs::read(t.path("a")).unwrap(), b"old");
        assert!(!t.path(".a.iwarp-part").exists());
        // Without resume, or if the partial file is too long, the copy starts from the beginning.
        std::fs::write(t.path(".a.iwarp-part"), "12345").unwrap();
        assert_eq!(
            Part::open(
                Place::local(&t.path("a")).unwrap(),
                true,
                4,
                Existing::Replace,
                &NO_STOP
            )
            .unwrap()
            .len(),
            0
        );
        std::fs::write(t.path(".a.iwarp-part"), "12345").unwrap();
        assert_eq!(part(&t.path("a"), false).unwrap().len(), 0);
    }

    #[test]
    fn sources_resume_only_after_equal_data() {
        let t = TempDir::new();
        std::fs::write(t.path("s"), "hello world").unwrap();
        let mut s = Source::new(File::open(t.path("s")).unwrap()).unwrap();
        assert_eq!(s.resume(6, &sha(b"hellO "), &NO_STOP).unwrap(), 0);
        // Reading starts at the beginning.
        let mut all = [0; 11];
        s.fill(&mut all).unwrap();
        assert_eq!((&all, s.hash()), (b"hello world", sha(b"hello world")));
        assert_eq!(s.resume(11, &sha(b"hello world"), &NO_STOP).unwrap(), 11);
        assert_eq!(s.hash(), sha(b"hello world"));
        assert_eq!(s.resume(99, &sha(b""), &NO_STOP).unwrap(), 0);
        assert_eq!(s.resume(6, &sha(b"hello "), &NO_STOP).unwrap(), 6);
        let mut rest = [0; 5];
        s.fill(&mut rest).unwrap();
        assert_eq!((&rest, s.hash()), (b"world", sha(b"hello world")));
        assert!(
            s.fill(&mut rest)
                .unwrap_err()
                .to_string()
                .contains("shorter")
        );
    }

    /// Hashing continues at the current position, in chunks, until the end of the file.
    #[test]
    fn prefixes_of_any_length_are_hashed() {
        let t = TempDir::new();
        let data: Vec<u8> = (0..2 * HASH_CHUNK + 5).map(|i| (i * i / 3) as u8).collect();
        std::fs::write(t.path("s"), &data).unwrap();
        for (from, len) in [
            (0, 0),
            (0, 1),
            (0, HASH_CHUNK - 1),
            (0, HASH_CHUNK),
            (0, HASH_CHUNK + 1),
            (7, 2 * HASH_CHUNK - 2),
            (3, 3 * HASH_CHUNK),
        ] {
            let mut file = File::open(t.path("s")).unwrap();
            file.seek(SeekFrom::Start(from as u64)).unwrap();
            let mut hash = Sha256::new();
            let done = hash_prefix(&mut file, len as u64, &mut hash, &NO_STOP).unwrap();
            let prefix = &data[from..data.len().min(from + len)];
            assert_eq!(done, prefix.len() as u64);
            assert_eq!(
                Hash::from(hash.finalize()),
                sha(prefix),
                "{len} from {from}"
            );
        }
    }

    /// A read that a signal interrupts is repeated. Any other error ends the copy.
    #[test]
    fn interrupted_read_is_repeated() {
        use std::io::{Error, ErrorKind};
        struct File(Vec<std::io::Result<&'static [u8]>>);
        impl Read for File {
            fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
                let now = self.0.remove(0)?;
                buf[..now.len()].copy_from_slice(now);
                Ok(now.len())
            }
        }
        let prefix = |reads| {
            let mut hash = Sha256::new();
            let done = hash_prefix(&mut File(reads), 4, &mut hash, &NO_STOP)?;
            Ok::<_, iwarp_cli_common::error::Error>((done, Hash::from(hash.finalize())))
        };
        let error = |kind| Err(Error::from(kind));
        let interrupted = vec![Ok(&b"ab"[..]), error(ErrorKind::Interrupted), Ok(b"cd")];
        assert_eq!(prefix(interrupted).unwrap(), (4, sha(b"abcd")));
        let broken = prefix(vec![Ok(b"ab"), error(ErrorKind::Other)]).unwrap_err();
        assert!(broken.to_string().contains("cannot read the file"));
    }

    /// The peer gets the permission bits of the mode only.
    #[test]
    fn source_sends_permission_bits_only() {
        let t = TempDir::new();
        std::fs::write(t.path("s"), "x").unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o4751);
        std::fs::set_permissions(t.path("s"), mode).unwrap();
        let s = Source::new(File::open(t.path("s")).unwrap()).unwrap();
        assert_eq!((s.mode, s.size()), (0o751, 1));
    }

    /// Hashing ends early if the client closes the connection.
    #[test]
    fn hashing_ends_on_stop() {
        let t = TempDir::new();
        let stop = AtomicBool::new(true);
        std::fs::write(t.path(".a.iwarp-part"), "12345").unwrap();
        let place = Place::local(&t.path("a")).unwrap();
        let e = Part::open(place, true, 99, Existing::Replace, &stop).unwrap_err();
        assert!(e.to_string().contains("closed the connection"), "{e}");
        // The partial file is kept for the next attempt.
        let kept = std::fs::read(t.path(".a.iwarp-part")).unwrap();
        assert_eq!(kept, b"12345");
        let mut s = Source::new(File::open(t.path(".a.iwarp-part")).unwrap()).unwrap();
        let e = s.resume(5, &sha(b"12345"), &stop).unwrap_err();
        assert!(e.to_string().contains("closed the connection"), "{e}");
    }
}
