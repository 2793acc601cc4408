//! The files of an installation, and their paths below a prefix.
//!
//! `cargo xtask install` and the Debian package install the same files. The built command itself
//! writes its manual pages and completions, so they always describe that command. The page iwarp(7)
//! comes from `docs/options.md`.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::context::Context;
use crate::manual;
use crate::process::run;

/// Each shell, and the path below the prefix at which it finds our completions.
const COMPLETIONS: &[(&str, &str)] = &[
    ("bash", "share/bash-completion/completions/iwarp"),
    ("zsh", "share/zsh/site-functions/_iwarp"),
    ("fish", "share/fish/vendor_completions.d/iwarp.fish"),
];

/// The path of the command.
pub const COMMAND: &str = "bin/iwarp";
/// The folder of the libraries.
const LIBRARY_FOLDER: &str = "lib/iwarp";
/// The path of the page about environment variables.
const VARIABLES_PAGE: &str = "share/man/man7/iwarp.7";

/// The names of the libraries.
const LIBRARIES: [&str; 5] = [
    "libibverbs.so.1",
    "librdmacm.so.1",
    "librspreload.so",
    "libiwarp_paths.so",
    "libiwarp_audit.so",
];

/// The paths of the built files.
pub struct Built {
    /// The command `iwarp`.
    pub command: PathBuf,
    /// A build of the same command that runs on this machine, which writes the manual pages and
    /// completions.
    pub runnable: PathBuf,
    /// The C library, which is installed as `libibverbs.so.1` and `librdmacm.so.1`.
    pub verbs: PathBuf,
    /// The preload library `librspreload.so`.
    pub preload: Option<PathBuf>,
    /// The preload library `libiwarp_paths.so`.
    pub paths: PathBuf,
    /// The audit library `libiwarp_audit.so`.
    pub audit: PathBuf,
}

/// The content of an installed file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A copy of this file.
    Copy(PathBuf),
    /// A symbolic link to this name.
    Link(&'static str),
}

/// A file of an installation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// The path, relative to the prefix.
    pub to: PathBuf,
    /// The content.
    pub source: Source,
    /// The permissions of a copy.
    pub mode: u32,
}

impl File {
    /// Describes a copy of `from` that all users may read.
    pub fn copy(from: impl Into<PathBuf>, to: impl Into<PathBuf>) -> Self {
        Self {
            to: to.into(),
            source: Source::Copy(from.into()),
            mode: 0o644,
        }
    }

    /// Describes a copy of `from` that all users may read and execute.
    pub fn program(from: impl Into<PathBuf>, to: impl Into<PathBuf>) -> Self {
        Self {
            mode: 0o755,
            ..Self::copy(from, to)
        }
    }
}

/// Returns the files of an installation: the built ones, and the manual pages and completions that
/// the built command writes.
///
/// # Errors
/// If the command cannot be run, or if it writes no manual pages or completions.
pub fn files(context: &Context, built: &Built) -> Result<Vec<File>> {
    let mut files = vec![File::program(&built.command, COMMAND)];
    files.extend(libraries(built));
    let documents = context.target.join("documents");
    let _ = fs::remove_dir_all(&documents);
    let man = documents.join("man");
    run(Command::new(&built.runnable).arg("man").arg(&man))?;
    let mut pages = fs::read_dir(&man)?
        .map(|page| page.map(|page| page.path()))
        .collect::<Result<Vec<_>, _>>()?;
    if pages.is_empty() {
        bail!("{} wrote no manual page", built.runnable.display());
    }
    pages.sort();
    for page in pages {
        let name = page.file_name().context("a page without a name")?;
        let to = Path::new("share/man/man1").join(name);
        files.push(File::copy(page, to));
    }
    let variables = documents.join("iwarp.7");
    fs::write(&variables, manual::page(&context.root)?)?;
    files.push(File::copy(variables, VARIABLES_PAGE));
    for (shell, to) in COMPLETIONS {
        let file = documents.join(shell);
        let output = Command::new(&built.runnable)
            .args(["completions", shell])
            .output()?;
        if !output.status.success() || output.stdout.is_empty() {
            bail!("there are no completions for {shell}: {}", output.status);
        }
        fs::write(&file, output.stdout)?;
        files.push(File::copy(file, *to));
    }
    Ok(files)
}

/// Returns the libraries of an installation.
#[must_use]
pub fn libraries(built: &Built) -> Vec<File> {
    let to = |name: &str| Path::new(LIBRARY_FOLDER).join(name);
    let mut files = vec![
        File::copy(&built.verbs, to("libibverbs.so.1")),
        // A link, because with two files a process that loads both names would have two engines.
        File {
            source: Source::Link("libibverbs.so.1"),
            ..File::copy("", to("librdmacm.so.1"))
        },
        File::copy(&built.paths, to("libiwarp_paths.so")),
        File::copy(&built.audit, to("libiwarp_audit.so")),
    ];
    let preload = built.preload.iter();
    files.extend(preload.map(|from| File::copy(from, to("librspreload.so"))));
    files
}

/// Copies and links the files below `prefix`, which is created if it does not exist.
///
/// # Errors
/// When a file cannot be read or written.
pub fn put(files: &[File], prefix: &Path) -> Result<()> {
    for file in files {
        let to = prefix.join(&file.to);
        if let Some(dir) = to.parent() {
            fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
        }
        match &file.source {
            Source::Copy(from) => copy_atomically(from, &to, file.mode)?,
            Source::Link(name) => {
                let _ = fs::remove_file(&to);
                symlink(name, &to).with_context(|| format!("linking {}", to.display()))?;
            }
        }
    }
    Ok(())
}

/// Removes what [`files`] describes from `prefix`, and returns the paths. Files of other programs
/// are kept, and directories unless they are empty and have our name.
///
/// # Errors
/// When a file cannot be removed.
pub fn remove(prefix: &Path) -> Result<Vec<PathBuf>> {
    let mut ours = vec![prefix.join(COMMAND), prefix.join(VARIABLES_PAGE)];
    ours.extend(COMPLETIONS.iter().map(|(_, to)| prefix.join(to)));
    let folder = prefix.join(LIBRARY_FOLDER);
    for name in LIBRARIES {
        ours.push(folder.join(name));
    }
    let pages = fs::read_dir(prefix.join("share/man/man1"));
    for page in pages.into_iter().flatten().flatten() {
        let name = page.file_name();
        let name = name.to_string_lossy();
        if name == "iwarp.1" || (name.starts_with("iwarp-") && name.ends_with(".1")) {
            ours.push(page.path());
        }
    }
    ours.retain(|path| path.symlink_metadata().is_ok());
    for path in &ours {
        fs::remove_file(path).with_context(|| format!("removing {}", path.display()))?;
    }
    // Fails if there are other files.
    let _ = fs::remove_dir(&folder);
    Ok(ours)
}

/// Copies a file under a temporary name and renames it, so that running programs keep the old file.
fn copy_atomically(from: &Path, to: &Path, mode: u32) -> Result<()> {
    let mut temporary = to.as_os_str().to_owned();
    temporary.push(".new");
    fs::copy(from, &temporary).with_context(|| {
        let temporary = Path::new(&temporary).display();
        format!("copying {} to {temporary}", from.display())
    })?;
    fs::set_permissions(&temporary, fs::Permissions::from_mode(mode))?;
    fs::rename(&temporary, to).with_context(|| format!("putting {} in place", to.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_libraries_can_be_removed() {
        let built = Built {
            command: "c".into(),
            runnable: "c".into(),
            verbs: "v".into(),
            preload: Some("r".into()),
            paths: "p".into(),
            audit: "a".into(),
        };
        let mut installed: Vec<_> = libraries(&built).into_iter().map(|file| file.to).collect();
        installed.sort();
        let mut removed = LIBRARIES.map(|name| Path::new(LIBRARY_FOLDER).join(name));
        removed.sort();
        assert_eq!(installed, removed);
    }

    #[test]
    fn files_and_links_keep_modes() {
        let dir = std::env::temp_dir().join(format!("xtask-layout-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("from"), b"x").unwrap();
        let link = File {
            source: Source::Link("a.so.1"),
            ..File::copy("", "lib/b.so.1")
        };
        let files = [
            File::program(dir.join("from"), "bin/program"),
            File::copy(dir.join("from"), "lib/a.so.1"),
            link,
        ];
        // The second call replaces the files of the first.
        for _ in 0..2 {
            put(&files, &dir.join("prefix")).unwrap();
        }
        let mode = |file: &str| {
            let meta = fs::metadata(dir.join("prefix").join(file)).unwrap();
            meta.permissions().mode() & 0o777
        };
        assert_eq!((mode("bin/program"), mode("lib/a.so.1")), (0o755, 0o644));
        assert_eq!(fs::read(dir.join("prefix/lib/b.so.1")).unwrap(), b"x");
        assert_eq!(fs::read_dir(dir.join("prefix/lib")).unwrap().count(), 2);
        fs::remove_dir_all(dir).unwrap();
    }

    /// An empty prefix has nothing to remove. Files of others with similar names are kept.
    #[test]
    fn removal_keeps_files_of_others() {
        let dir = std::env::temp_dir().join(format!("xtask-remove-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir(&dir).unwrap();
        let (from, prefix) = (dir.join("from"), dir.join("prefix"));
        fs::write(&from, b"x").unwrap();
        assert!(remove(&prefix).unwrap().is_empty());
        let mut files = vec![File::program(&from, "bin/iwarp")];
        files.extend(LIBRARIES.map(|name| File::copy(&from, format!("lib/iwarp/{name}"))));
        files.extend(
            ["man1/iwarp.1", "man1/iwarp-cp-serve.1", "man7/iwarp.7"]
                .map(|page| File::copy(&from, format!("share/man/{page}"))),
        );
        files.extend(COMPLETIONS.iter().map(|(_, to)| File::copy(&from, *to)));
        let others = ["bin/iwarpd", "lib/x.so", "share/man/man1/iwarper.1"];
        put(&others.map(|to| File::copy(&from, to)), &prefix).unwrap();
        put(&files, &prefix).unwrap();
        let mut removed = remove(&prefix).unwrap();
        removed.sort();
        let mut installed: Vec<_> = files.iter().map(|file| prefix.join(&file.to)).collect();
        installed.sort();
        assert_eq!(removed, installed);
        assert!(!prefix.join("lib/iwarp").exists());
        assert!(others.iter().all(|other| prefix.join(other).exists()));
        fs::remove_dir_all(dir).unwrap();
    }
}
