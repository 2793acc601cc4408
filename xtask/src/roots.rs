//! Fresh Debian roots, in which packages are installed, used and removed.
//!
//! `debootstrap` creates a root, which is kept in the target folder; each trial works on a copy.
//! The programs run in new namespaces, so that they have no network and leave no processes behind.
//! Continuous integration does not use roots, because they need root and a download.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use xtask::context::find_program;
use xtask::process::Log;

use crate::deb::output;

/// The ordinary user of a root.
pub(crate) const USER: &str = "ann";
/// Folders that are not compared, because their contents change in any case: caches, logs, and
/// dpkg's list, which the scripts check.
const IGNORED: &[&str] = &[
    "./proc",
    "./sys",
    "./dev",
    "./run",
    "./tmp",
    "./home",
    "./var/cache",
    "./var/log",
    "./var/lib/apt",
    "./var/lib/dpkg",
];
/// The kernel's folder with the emulators of foreign programs.
const EMULATORS: &str = "/proc/sys/fs/binfmt_misc";

/// Which root a trial needs.
pub(crate) struct Kind<'a> {
    /// The Debian release.
    pub(crate) suite: &'a str,
    /// Debian's name of the processor; `None` for that of this machine.
    pub(crate) foreign: Option<&'a str>,
    /// The packages besides the essential ones, separated by commas.
    pub(crate) packages: &'a str,
}

impl Kind<'_> {
    fn name(&self) -> String {
        match self.foreign {
            Some(architecture) => format!("{}-{architecture}", self.suite),
            None => self.suite.to_owned(),
        }
    }
}

/// A copy of a fresh root.
pub(crate) struct Root {
    /// The folder of the root.
    pub(crate) path: PathBuf,
}

impl Root {
    /// Creates a root with an ordinary user. `dir` keeps what later calls can use again.
    ///
    /// # Errors
    /// If this is not root, if a tool or an emulator is missing, or if the download fails.
    pub(crate) fn create(log: &mut Log, dir: &Path, kind: &Kind<'_>) -> Result<Self> {
        if !rustix::process::geteuid().is_root() {
            bail!("the trial creates a Debian root, which only root can do");
        }
        for tool in ["debootstrap", "unshare", "chroot", "ip"] {
            if find_program(tool).is_none() {
                bail!("{tool} is not installed");
            }
        }
        let base = base(log, dir, kind)?;
        let path = dir.join(format!("trial-{}", kind.name()));
        if path.exists() {
            fs::remove_dir_all(&path)?;
        }
        log.run(Command::new("cp").arg("--archive").arg(&base).arg(&path))?;
        log.run(
            Command::new("chroot")
                .arg(&path)
                .args(["useradd", "--create-home", USER]),
        )?;
        Ok(Self { path })
    }

    /// Runs a script in the root, in new namespaces, and prints its output. The script gets
    /// `arguments`.
    ///
    /// # Errors
    /// If the script fails.
    pub(crate) fn run(
        &self,
        log: &mut Log,
        user: &str,
        script: &Path,
        arguments: &[&str],
    ) -> Result<()> {
        let name = script.file_name().context("a script without a name")?;
        let name = name.to_string_lossy();
        fs::copy(script, self.path.join("tmp").join(&*name))?;
        // Prepares network and file systems in the namespaces, and then runs the script in the
        // root.
        let setup = r#"
            set -e
            root=$1 user=$2 script=$3
            shift 3
            ip link set lo up
            mount -t proc proc "$root/proc"
            mount -t sysfs -o ro sysfs "$root/sys" || true
            mount -t tmpfs tmpfs "$root/run"
            mkdir -p "$root/dev/shm" "$root/dev/pts"
            mount -t tmpfs tmpfs "$root/dev/shm"
            mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
            home=/root
            [ "$user" = root ] || home=/home/$user
            exec chroot --userspec="$user:$user" "$root" /usr/bin/env -i HOME="$home" \
                LANG=C.UTF-8 TERM=dumb DEBIAN_FRONTEND=noninteractive \
                PATH=/usr/sbin:/usr/bin:/sbin:/bin bash "/tmp/$script" "$@"
        "#;
        log.say(format!("---- {name} {}, as {user}", arguments.join(" ")));
        let result = log.run_and_read(
            Command::new("unshare")
                .args(["--mount", "--net", "--ipc", "--pid"])
                .args(["--fork", "--kill-child", "sh", "-c", setup, "sh"])
                .arg(&self.path)
                .args([user, &name])
                .args(arguments),
        );
        let text = match &result {
            Ok(text) => text.clone(),
            Err(_) => log.tail(200),
        };
        // Skip the lines before the script's first command, which show the command line of
        // `unshare`.
        let text: Vec<&str> = text
            .lines()
            .skip_while(|line| !line.starts_with('+'))
            .collect();
        println!("{}", text.join("\n"));
        result.with_context(|| format!("{name} in {}", self.path.display()))?;
        Ok(())
    }

    /// Returns a line for each file: kind, permissions, owner, path and link target; and a line
    /// with its checksum.
    ///
    /// # Errors
    /// If the files cannot be listed.
    pub(crate) fn files(&self) -> Result<BTreeSet<String>> {
        let mut find = Command::new("find");
        find.current_dir(&self.path).arg(".").arg("(");
        for (at, path) in IGNORED.iter().enumerate() {
            if at > 0 {
                find.arg("-o");
            }
            find.args(["-path", path]);
        }
        find.args([")", "-prune", "-o", "-printf", "%y %m %U:%G %p %l\n"]);
        let mut all: BTreeSet<String> = output(&mut find)?.lines().map(str::to_owned).collect();
        let mut sums = Command::new("find");
        sums.current_dir(&self.path)
            .args(["etc", "usr", "var/lib", "-type", "f"])
            .args(["-not", "-path", "var/lib/dpkg/*"])
            .args(["-not", "-path", "var/lib/apt/*"])
            .args(["-exec", "sha256sum", "{}", "+"]);
        all.extend(output(&mut sums)?.lines().map(str::to_owned));
        Ok(all)
    }

    /// Removes the root.
    ///
    /// # Errors
    /// If a file cannot be removed.
    pub(crate) fn remove(self) -> Result<()> {
        fs::remove_dir_all(&self.path).context("removing the root")
    }
}

/// Fails if files were added, removed or changed.
///
/// # Errors
/// Lists the differences.
pub(crate) fn compare(before: &BTreeSet<String>, after: &BTreeSet<String>) -> Result<()> {
    let differences: Vec<&String> = after.symmetric_difference(before).collect();
    if differences.is_empty() {
        return Ok(());
    }
    bail!("the package added, removed or changed these files: {differences:#?}")
}

/// Returns the folder of a fresh Debian root, which must not be changed. The first call creates it.
///
/// # Errors
/// If a tool or an emulator is missing, or if the download fails.
pub(crate) fn base(log: &mut Log, dir: &Path, kind: &Kind<'_>) -> Result<PathBuf> {
    let base = dir.join(format!("base-{}", kind.name()));
    if base.is_dir() {
        return Ok(base);
    }
    if let Some(architecture) = kind.foreign {
        require_emulator(architecture)?;
    }
    let fresh = base.with_extension("new");
    let _ = fs::remove_dir_all(&fresh);
    fs::create_dir_all(dir)?;
    let mut debootstrap = Command::new("debootstrap");
    debootstrap
        .arg("--variant=minbase")
        .arg(format!("--include={}", kind.packages));
    if let Some(architecture) = kind.foreign {
        debootstrap.arg(format!("--arch={architecture}"));
    }
    debootstrap
        .arg(kind.suite)
        .arg(&fresh)
        .args(mirror(kind.suite));
    log.run(&mut debootstrap)?;
    fs::rename(&fresh, &base)?;
    Ok(base)
}

/// Returns this machine's own mirror, if the machine runs the same Debian release.
fn mirror(suite: &str) -> Option<String> {
    let targets = output(Command::new("apt-get").args([
        "indextargets",
        "--format",
        "$(CODENAME) $(REPO_URI)",
        "Created-By: Packages",
    ]))
    .unwrap_or_default();
    targets.lines().find_map(|line| {
        let (codename, uri) = line.split_once(' ')?;
        (codename == suite).then(|| uri.to_owned())
    })
}

/// Fails unless the kernel starts an emulator for the programs of another processor.
fn require_emulator(architecture: &str) -> Result<()> {
    let name = match architecture {
        "arm64" => "qemu-aarch64",
        "amd64" => "qemu-x86_64",
        other => bail!("no emulator is known for {other}"),
    };
    if Path::new(EMULATORS).join(name).exists() {
        return Ok(());
    }
    bail!(
        "the kernel does not start {name} for programs of {architecture} ({EMULATORS}): on Debian, \
         install qemu-user-static and binfmt-support"
    )
}
