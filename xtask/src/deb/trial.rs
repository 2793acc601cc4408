//! `cargo xtask deb --test`: installs the package in a fresh Debian root, uses it as an ordinary
//! user, removes it, and compares the files before and after.
//!
//! `debootstrap` creates the root, which is kept in the target folder; each trial works on a copy.
//! The programs run in new namespaces, so that they have no network and leave no processes behind.
//! Continuous integration does not run this, because it needs root and downloads a Debian system.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use xtask::context::{Context, find_program};
use xtask::process::Log;

use super::{PACKAGING, output};

/// The packages in the root besides the essential packages: a verbs program, and the programs that
/// read manual pages, units and completions.
const INCLUDE: &str = "--include=perftest,man-db,systemd,bash-completion,procps";
/// The ordinary user of the trial.
const USER: &str = "ann";
/// Folders that are not compared, because their contents change in any case: caches, logs, and
/// dpkg's list, which `remove.sh` checks.
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

/// Runs the trial and prints the output of all programs.
///
/// # Errors
/// If a script fails, or if the package leaves files behind.
pub(super) fn run(context: &Context, log: &mut Log, package: &Path, suite: &str) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("--test creates a Debian root, which only root can do");
    }
    for tool in ["debootstrap", "unshare", "chroot", "ip"] {
        if find_program(tool).is_none() {
            bail!("{tool} is not installed");
        }
    }
    let base = base(context, log, suite)?;
    let root = context.target.join(format!("deb/trial-{suite}"));
    if root.exists() {
        fs::remove_dir_all(&root)?;
    }
    log.run(Command::new("cp").arg("--archive").arg(&base).arg(&root))?;
    log.run(
        Command::new("chroot")
            .arg(&root)
            .args(["useradd", "--create-home", USER]),
    )?;
    fs::copy(package, root.join("tmp/iwarp.deb"))?;

    let before = files(&root)?;
    run_script(context, log, &root, "root", "install.sh")?;
    let installed = files(&root)?;
    run_script(context, log, &root, USER, "use.sh")?;
    run_script(context, log, &root, "root", "remove.sh")?;
    let after = files(&root)?;
    let differences: Vec<&String> = after.symmetric_difference(&before).collect();
    if !differences.is_empty() {
        bail!("the package added, removed or changed these files: {differences:#?}");
    }
    log.say(format!(
        "{} files before, {} installed, {} after removal, which are the same as before",
        before.len(),
        installed.len(),
        after.len()
    ));
    fs::remove_dir_all(&root).context("removing the root")
}

/// Returns the folder of a fresh Debian root. The first call creates it.
fn base(context: &Context, log: &mut Log, suite: &str) -> Result<PathBuf> {
    let base = context.target.join(format!("deb/base-{suite}"));
    if base.is_dir() {
        return Ok(base);
    }
    // If this machine runs the same Debian release, use its own mirror.
    let targets = output(Command::new("apt-get").args([
        "indextargets",
        "--format",
        "$(CODENAME) $(REPO_URI)",
        "Created-By: Packages",
    ]))
    .unwrap_or_default();
    let mirror = targets.lines().find_map(|line| {
        let (codename, uri) = line.split_once(' ')?;
        (codename == suite).then_some(uri)
    });
    let fresh = base.with_extension("new");
    let _ = fs::remove_dir_all(&fresh);
    let mut debootstrap = Command::new("debootstrap");
    debootstrap
        .args(["--variant=minbase", INCLUDE, suite])
        .arg(&fresh)
        .args(mirror);
    log.run(&mut debootstrap)?;
    fs::rename(&fresh, &base)?;
    Ok(base)
}

/// Runs one of the trial's scripts in the root, in new namespaces, and prints its output.
fn run_script(
    context: &Context,
    log: &mut Log,
    root: &Path,
    user: &str,
    script: &str,
) -> Result<()> {
    let from = context.root.join(PACKAGING).join("trial").join(script);
    fs::copy(&from, root.join("tmp").join(script))?;
    // Prepares network and file systems in the namespaces, and then runs the script in the root.
    let setup = r#"
        set -e
        ip link set lo up
        mount -t proc proc "$1/proc"
        mount -t sysfs -o ro sysfs "$1/sys" || true
        mount -t tmpfs tmpfs "$1/run"
        mkdir -p "$1/dev/shm" "$1/dev/pts"
        mount -t tmpfs tmpfs "$1/dev/shm"
        mount -t devpts -o newinstance,ptmxmode=0666 devpts "$1/dev/pts"
        home=/root
        [ "$2" = root ] || home=/home/$2
        exec chroot --userspec="$2:$2" "$1" /usr/bin/env -i HOME="$home" LANG=C.UTF-8 TERM=dumb \
            DEBIAN_FRONTEND=noninteractive PATH=/usr/sbin:/usr/bin:/sbin:/bin \
            bash "/tmp/$3" /tmp/iwarp.deb
    "#;
    log.say(format!("---- {script}, as {user}"));
    let result = log.run_and_read(
        Command::new("unshare")
            .args([
                "--mount",
                "--net",
                "--ipc",
                "--pid",
                "--fork",
                "--kill-child",
            ])
            .args(["sh", "-c", setup, "sh"])
            .arg(root)
            .args([user, script]),
    );
    let text = match &result {
        Ok(text) => text.clone(),
        Err(_) => log.tail(200),
    };
    // Skip the lines before the script's first command, which show the command line of `unshare`.
    let text: Vec<&str> = text
        .lines()
        .skip_while(|line| !line.starts_with('+'))
        .collect();
    println!("{}", text.join("\n"));
    result.with_context(|| format!("{script} in {}", root.display()))?;
    Ok(())
}

/// Returns a line for each file: kind, permissions, owner, path and link target; and a line with
/// its checksum.
fn files(root: &Path) -> Result<BTreeSet<String>> {
    let mut find = Command::new("find");
    find.current_dir(root).arg(".").arg("(");
    for (at, path) in IGNORED.iter().enumerate() {
        if at > 0 {
            find.arg("-o");
        }
        find.args(["-path", path]);
    }
    find.args([")", "-prune", "-o", "-printf", "%y %m %U:%G %p %l\n"]);
    let mut all: BTreeSet<String> = output(&mut find)?.lines().map(str::to_owned).collect();
    let mut sums = Command::new("find");
    sums.current_dir(root).args([
        "etc",
        "usr",
        "var/lib",
        "-type",
        "f",
        "-not",
        "-path",
        "var/lib/dpkg/*",
        "-not",
        "-path",
        "var/lib/apt/*",
        "-exec",
        "sha256sum",
        "{}",
        "+",
    ]);
    all.extend(output(&mut sums)?.lines().map(str::to_owned));
    Ok(all)
}
