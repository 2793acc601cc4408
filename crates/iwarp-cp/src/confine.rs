//! Path confinement: a peer cannot reach files outside the served directory.
//!
//! The first check is of the path's text: it must be relative and not too long, without `..` and
//! without empty or hidden components. The second check is made by `cap-std`: it opens with
//! `openat2` and RESOLVE_BENEATH, so a symbolic link out of the tree is refused when it is
//! followed, without a race. On kernels without `openat2`, `cap-std` walks the components one by
//! one, with the same result.

use cap_std::ambient_authority;
use cap_std::fs::{Dir, OpenOptions, OpenOptionsExt as _};
use iwarp_cli_common::error::{Context as _, Error, Result};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

/// Suffix of partial files. A peer cannot request a file with this suffix.
pub(crate) const PART_SUFFIX: &str = ".iwarp-part";
/// Longest path in a request, in bytes.
pub(crate) const MAX_PATH: usize = 1024;
/// Longest component in bytes. The names of partial files are longer by a prefix and a suffix.
const MAX_COMPONENT: usize = 200;

#[derive(Debug)]
pub(crate) struct Root {
    dir: Dir,
}

/// Location of one file: its opened directory and its checked name.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) dir: OwnedFd,
    pub(crate) name: String,
}

impl Root {
    /// Opens the directory to serve.
    ///
    /// # Errors
    /// Fails if it is not a directory that can be opened.
    pub(crate) fn open(dir: &Path) -> Result<Self> {
        let dir = Dir::open_ambient_dir(dir, ambient_authority()).context(dir.display())?;
        Ok(Self { dir })
    }

    /// Opens a regular file below the root for reading.
    ///
    /// # Errors
    /// Fails if the path leaves the root, does not exist, or is not a regular file.
    pub(crate) fn read(&self, path: &str) -> Result<File> {
        check(path)?;
        // NONBLOCK: opening a FIFO must not block the server.
        let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(flags.bits().cast_signed());
        let file = self
            .dir
            .open_with(path, &options)
            .context(format_args!("'{path}'"))?;
        regular(file.into_std().into(), path)
    }

    /// Opens the directory in which a file is to be created.
    ///
    /// # Errors
    /// Fails if the path leaves the root or its directory does not exist.
    pub(crate) fn place(&self, path: &str) -> Result<Place> {
        check(path)?;
        let (parent, name) = path.rsplit_once('/').unwrap_or((".", path));
        let dir = self
            .dir
            .open_dir(parent)
            .context(format_args!("'{path}'"))?;
        Ok(Place {
            dir: dir.into_std_file().into(),
            name: name.to_owned(),
        })
    }
}

impl Place {
    /// Returns a place in the local file system, without confinement.
    pub(crate) fn local(path: &Path) -> Result<Self> {
        let name = path
            .file_name()
            .and_then(|n| n.to_str())
            .ok_or_else(|| Error::usage(format!("'{}' names no file", path.display())))?;
        let parent = path
            .parent()
            .filter(|p| !p.as_os_str().is_empty())
            .unwrap_or(Path::new("."));
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let dir =
            rustix::fs::openat(CWD, parent, flags, Mode::empty()).context(parent.display())?;
        Ok(Self {
            dir,
            name: name.to_owned(),
        })
    }

    /// Renames a file of this directory to the place's name, atomically and without replacing.
    ///
    /// # Errors
    /// Returns [`Errno::EXIST`] if the name exists.
    pub(crate) fn rename_new(&self, from: &str) -> rustix::io::Result<()> {
        let (dir, to) = (&self.dir, self.name.as_str());
        match rustix::fs::renameat_with(dir, from, dir, to, RenameFlags::NOREPLACE) {
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => self.link_new(from),
            done => done,
        }
    }

    /// Like [`rename_new`](Self::rename_new), by link and unlink, for file systems that cannot
    /// rename without replacing.
    fn link_new(&self, from: &str) -> rustix::io::Result<()> {
        let (dir, to) = (&self.dir, self.name.as_str());
        rustix::fs::linkat(dir, from, dir, to, AtFlags::empty())?;
        rustix::fs::unlinkat(dir, from, AtFlags::empty())
    }

    /// Checks what a rename to the name would replace. Returns `true` if it is a regular file,
    /// and `false` if the name does not exist.
    ///
    /// # Errors
    /// Fails if the name belongs to a directory, link or device.
    pub(crate) fn check_target(&self) -> Result<bool> {
        match rustix::fs::statat(
            self.dir.as_fd(),
            self.name.as_str(),
            AtFlags::SYMLINK_NOFOLLOW,
        ) {
            Ok(s) if FileType::from_raw_mode(s.st_mode) == FileType::RegularFile => Ok(true),
            Ok(_) => Err(Error::failed(format!(
                "'{}' exists and is not a regular file",
                self.name
            ))),
            Err(Errno::NOENT) => Ok(false),
            Err(e) => Err(e).context(format_args!("'{}'", self.name)),
        }
    }
}

/// Refuses anything but a regular file.
pub(crate) fn regular(fd: OwnedFd, name: &str) -> Result<File> {
    let stat = rustix::fs::fstat(&fd).context(format_args!("'{name}'"))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Error::failed(format!("'{name}' is not a regular file")));
    }
    Ok(File::from(fd))
}

/// Checks the text of a path.
fn check(path: &str) -> Result<()> {
    let refuse = |why: &str| Err(Error::failed(format!("'{path}' is refused: {why}")));
    if path.is_empty() || path.len() > MAX_PATH {
        return refuse("a path has 1 to 1024 octets");
    }
    if path.starts_with('/') {
        return refuse("paths are relative to the served directory");
    }
    for part in path.split('/') {
        if matches!(part, "" | "." | "..")
            || part.len() > MAX_COMPONENT
            || part.contains(char::is_control)
        {
            return refuse("a component is '.', '..', empty, too long or unprintable");
        }
        if part.ends_with(PART_SUFFIX) {
            return refuse("names of partial files are reserved");
        }
        if part.starts_with('.') {
            return refuse(
                "names that begin with a dot are hidden, and can be neither read nor written",
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::part::tests::TempDir;
    use std::io::Read as _;
    use std::os::unix::fs::symlink;

    fn tree() -> TempDir {
        let t = TempDir::new();
        std::fs::create_dir_all(t.path("root/sub")).unwrap();
        std::fs::create_dir_all(t.path("out")).unwrap();
        std::fs::write(t.path("out/secret"), "secret").unwrap();
        std::fs::write(t.path("root/sub/file"), "inside").unwrap();
        symlink(t.path("out"), t.path("root/abs")).unwrap();
        symlink("../out", t.path("root/rel")).unwrap();
        symlink("../../out/secret", t.path("root/sub/link")).unwrap();
        symlink("sub", t.path("root/good")).unwrap();
        std::fs::create_dir(t.path("root/.ssh")).unwrap();
        std::fs::write(t.path("root/.ssh/keys"), "hidden").unwrap();
        std::fs::write(t.path("root/sub/.env"), "hidden").unwrap();
        let fifo = t.path("root/fifo");
        rustix::fs::mknodat(CWD, fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        t
    }

    #[test]
    fn longest_names_and_paths_are_accepted() {
        let t = tree();
        let root = Root::open(&t.path("root")).unwrap();
        let longest = "x".repeat(MAX_COMPONENT);
        assert_eq!(root.place(&longest).unwrap().name, longest);
        // The name of its partial file is not too long, either.
        let partial = t.path("root").join(format!(".{longest}{PART_SUFFIX}"));
        std::fs::write(partial, "").unwrap();
        // Five components of 199 bytes with their slashes, and a last component of 24 bytes.
        let path = format!(
            "{}{}",
            format!("{}/", "x".repeat(199)).repeat(5),
            "y".repeat(24)
        );
        assert_eq!(path.len(), MAX_PATH);
        check(&path).unwrap();
        assert!(check(&format!("{path}y")).is_err());
    }

    #[test]
    fn new_name_replaces_nothing() {
        let t = TempDir::new();
        let place = Place::local(&t.path("a")).unwrap();
        type Rename = fn(&Place, &str) -> rustix::io::Result<()>;
        for rename in [Place::rename_new as Rename, Place::link_new] {
            std::fs::write(t.path("part"), "new").unwrap();
            rename(&place, "part").unwrap();
            assert_eq!(std::fs::read(t.path("a")).unwrap(), b"new");
            assert!(!t.path("part").exists());
            std::fs::write(t.path("part"), "other").unwrap();
            assert_eq!(rename(&place, "part"), Err(Errno::EXIST));
            assert_eq!(std::fs::read(t.path("a")).unwrap(), b"new");
            assert_eq!(std::fs::read(t.path("part")).unwrap(), b"other");
            std::fs::remove_file(t.path("a")).unwrap();
        }
    }

    #[test]
    fn local_name_without_folder_is_found() {
        // Tests run in the folder of their package.
        let relative = Place::local(Path::new("Cargo.toml")).unwrap();
        assert_eq!(relative.name, "Cargo.toml");
        assert!(relative.check_target().unwrap());
        let t = tree();
        let absolute = Place::local(&t.path("root/sub/file")).unwrap();
        assert!(absolute.check_target().unwrap());
        for no_folder in ["root/nothing/file", "root/sub/file/x"] {
            assert!(Place::local(&t.path(no_folder)).is_err(), "{no_folder}");
        }
        // Programs that are started meanwhile must not inherit the descriptor.
        let flags = rustix::io::fcntl_getfd(&absolute.dir).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        assert!(matches!(Place::local(Path::new("/")), Err(Error::Usage(_))));
    }

    #[test]
    fn nothing_outside_is_reachable() {
        let t = tree();
        let root = Root::open(&t.path("root")).unwrap();
        let mut text = String::new();
        root.read("sub/file")
            .unwrap()
            .read_to_string(&mut text)
            .unwrap();
        assert_eq!(text, "inside");
        let absolute = t.path("out/secret").to_str().unwrap().to_owned();
        for bad in [
            "",
            "/",
            ".",
            "..",
            "../out/secret",
            "sub/../../out/secret",
            "sub/..",
            "sub//file",
            "./sub/file",
            "abs/secret",
            "rel/secret",
            "sub/link",
            "abs",
            "sub",
            "fifo",
            "nothing",
            "sub/file/x",
            "a\0b",
            "a\nb",
            "sub/.file.iwarp-part",
            ".ssh/keys",
            "sub/.env",
            &absolute,
            &"x/".repeat(600),
            &"x".repeat(201),
        ] {
            assert!(root.read(bad).is_err(), "read {bad:?}");
        }
        for bad in [
            "",
            "..",
            "../x",
            "/x",
            "abs/x",
            "rel/x",
            "nodir/x",
            "sub/file/x",
            "sub/",
            ".x.iwarp-part",
            "x.iwarp-part",
            ".bashrc",
            ".ssh/authorized_keys",
            "sub/.env",
            "...",
        ] {
            assert!(root.place(bad).is_err(), "place {bad:?}");
        }
        let e = root.place(".ssh/keys").unwrap_err().to_string();
        assert!(e.contains("begin with a dot"), "{e}");
        // A link that stays inside is allowed.
        assert!(root.read("good/file").is_ok());
        let p = root.place("sub/new").unwrap();
        assert_eq!(p.name, "new");
        assert!(!p.check_target().unwrap());
        assert!(root.place("sub/link").unwrap().check_target().is_err());
        assert!(root.place("sub").unwrap().check_target().is_err());
        assert!(root.place("sub/file").unwrap().check_target().unwrap());
    }
}
