//! Writes the package's control file, checksums and changelog.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use xtask::context::Context;
use xtask::process::cargo;

use super::output;

const NAME: &str = "iwarp";
/// The Debian revision, which counts packages of the same upstream version.
const REVISION: &str = "1";
/// The package's description, in the format of Debian's control files.
const DESCRIPTION: &str = "\
RDMA over plain TCP in user space (iWARP)
 iwarp is an RDMA device in software. It speaks iWARP (RFC 5040 and others) over
 ordinary TCP sockets and needs no special hardware, no kernel module and no
 privileges.
 .
 \"iwarp run -- PROGRAM\" runs unmodified programs for libibverbs, librdmacm and
 rsockets on it. \"iwarp perf\" measures it beside plain TCP, \"iwarp cp\" copies
 files by one-sided RDMA, and \"iwarp ping\" speaks the protocol of rping.
 .
 The libraries are in a private folder. They do not replace those of the system.
";

/// The values of the control file that differ between packages.
pub(super) struct Facts {
    version: String,
    architecture: String,
    maintainer: String,
    homepage: String,
    /// The `Depends` field, computed from the symbols that the programs need.
    depends: String,
    /// Time of the last commit, in seconds since 1970. No file in the package is newer, so that building again gives the same package.
    pub(super) epoch: String,
}

impl Facts {
    /// Finds the values in the workspace's manifest, in git's history and in the built programs.
    pub(super) fn find(context: &Context, stage: &Path) -> Result<Self> {
        let metadata =
            output(cargo(&context.root).args(["metadata", "--no-deps", "--format-version=1"]))?;
        let metadata: Value = serde_json::from_str(&metadata).context("cargo metadata")?;
        let packages = metadata["packages"].as_array();
        let command = packages
            .and_then(|list| list.iter().find(|package| package["name"] == "iwarp-cli"))
            .context("there is no crate iwarp-cli")?;
        let text = |value: &Value, name: &str| -> Result<String> {
            let text = value[name].as_str().map(str::to_owned);
            text.with_context(|| format!("Cargo.toml has no {name}"))
        };
        let name = std::env::var("DEBFULLNAME").ok();
        let mail = std::env::var("DEBEMAIL").ok();
        let maintainer = match name.zip(mail) {
            Some((name, mail)) => format!("{name} <{mail}>"),
            None => text(&metadata["metadata"], "maintainer")?,
        };
        Ok(Self {
            version: format!("{}-{REVISION}", text(command, "version")?),
            architecture: line(Command::new("dpkg").arg("--print-architecture"))?,
            maintainer,
            homepage: text(command, "homepage")?,
            depends: depends(context, stage)?,
            epoch: epoch(context)?,
        })
    }

    pub(super) fn file_name(&self) -> String {
        format!("{NAME}_{}_{}.deb", self.version, self.architecture)
    }

    /// Returns the text of the control file.
    pub(super) fn control(&self, stage: &Path) -> Result<String> {
        let Self {
            version,
            architecture,
            maintainer,
            homepage,
            depends,
            ..
        } = self;
        Ok(format!(
            "Package: {NAME}\nVersion: {version}\nArchitecture: {architecture}\nMaintainer: {maintainer}\n\
             Installed-Size: {size}\nDepends: {depends}\nSuggests: ibverbs-utils, perftest, rdmacm-utils\n\
             Section: net\nPriority: optional\nHomepage: {homepage}\nDescription: {DESCRIPTION}",
            size = kibibytes(stage)?
        ))
    }

    /// Returns the Debian changelog, which names the version and the time of the last commit.
    pub(super) fn changelog(&self) -> String {
        let seconds = self.epoch.parse().unwrap_or(0);
        format!(
            "{NAME} ({}) unstable; urgency=medium\n\n  * See changelog.gz for what is new in this version.\n\n \
             -- {}  {}\n",
            self.version,
            self.maintainer,
            mail_date(seconds)
        )
    }
}

/// Returns `SOURCE_DATE_EPOCH` if it is set, and otherwise the time of the last commit.
fn epoch(context: &Context) -> Result<String> {
    if let Ok(epoch) = std::env::var("SOURCE_DATE_EPOCH") {
        return Ok(epoch);
    }
    let mut git = Command::new("git");
    git.current_dir(&context.root);
    line(git.args(["log", "-1", "--format=%ct"]))
}

/// Returns the packages, with versions, that have the libraries that the programs need.
fn depends(context: &Context, stage: &Path) -> Result<String> {
    // dpkg-shlibdeps works only inside a source package, so a minimal one is made.
    let source = context.target.join("deb/source");
    fs::create_dir_all(source.join("debian"))?;
    let control = format!("Source: {NAME}\n\nPackage: {NAME}\nArchitecture: any\n");
    fs::write(source.join("debian/control"), control)?;
    let lib = stage.join("usr/lib/iwarp");
    let text = line(
        Command::new("dpkg-shlibdeps")
            .current_dir(&source)
            .arg("-O")
            .arg(stage.join("usr/bin/iwarp"))
            .arg(lib.join("libibverbs.so.1"))
            .arg(lib.join("librspreload.so"))
            .arg(lib.join("libiwarp_paths.so")),
    )?;
    let Some(depends) = text.strip_prefix("shlibs:Depends=") else {
        bail!("dpkg-shlibdeps says {text:?}");
    };
    Ok(depends.to_owned())
}

/// Returns the last line that a command prints. The lines before it are warnings.
fn line(command: &mut Command) -> Result<String> {
    let text = output(command)?;
    let last = text.lines().map(str::trim).rfind(|line| !line.is_empty());
    Ok(last.context("a command printed nothing")?.to_owned())
}

/// Returns the installed size in KiB, as Debian's policy computes it: each file is rounded up, and a folder counts 1.
fn kibibytes(dir: &Path) -> Result<u64> {
    let mut total = 1;
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let meta = fs::symlink_metadata(&path)?;
        total += match meta.is_dir() {
            true if path.ends_with("DEBIAN") => 0,
            true => kibibytes(&path)?,
            false => meta.size().div_ceil(1024).max(1),
        };
    }
    Ok(total)
}

/// Returns the checksums of all files below `usr`. The settings in `etc` are left out, because administrators change them.
pub(super) fn sums(stage: &Path) -> Result<String> {
    let mut find = Command::new("find");
    find.current_dir(stage).args(["usr", "-type", "f"]);
    let mut files: Vec<String> = output(&mut find)?.lines().map(str::to_owned).collect();
    files.sort();
    output(Command::new("md5sum").current_dir(stage).args(files))
}

/// Formats a time as in an e-mail header, in UTC.
fn mail_date(seconds: i64) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [&str; 12] = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    let (days, rest) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let name = DAYS[usize::try_from(days.rem_euclid(7)).unwrap_or(0)];
    let leap = |year: i64| year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let (mut year, mut day) = (1970, days);
    while day >= 365 + i64::from(leap(year)) {
        day -= 365 + i64::from(leap(year));
        year += 1;
    }
    let mut month = 0;
    let lengths = [
        31,
        28 + i64::from(leap(year)),
        31,
        30,
        31,
        30,
        31,
        31,
        30,
        31,
        30,
        31,
    ];
    while day >= lengths[month] {
        day -= lengths[month];
        month += 1;
    }
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!(
        "{name}, {:02} {} {year} {hour:02}:{minute:02}:{second:02} +0000",
        day + 1,
        MONTHS[month]
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Facts {
        Facts {
            version: "1.2.3-1".into(),
            architecture: "amd64".into(),
            maintainer: "Ann <ann@example.org>".into(),
            homepage: "https://example.org".into(),
            depends: "libc6 (>= 2.34)".into(),
            epoch: "951827696".into(),
        }
    }

    #[test]
    fn dates_are_those_of_mail() {
        assert_eq!(mail_date(0), "Thu, 01 Jan 1970 00:00:00 +0000");
        // A leap day in a year that ends a century.
        assert_eq!(mail_date(951_827_696), "Tue, 29 Feb 2000 12:34:56 +0000");
        assert_eq!(mail_date(1_798_761_599), "Thu, 31 Dec 2026 23:59:59 +0000");
    }

    #[test]
    fn the_changelog_names_version_and_time() {
        let text = facts().changelog();
        assert!(text.starts_with("iwarp (1.2.3-1) unstable;"), "{text}");
        let end = " -- Ann <ann@example.org>  Tue, 29 Feb 2000 12:34:56 +0000\n";
        assert!(text.ends_with(end), "{text}");
    }

    #[test]
    fn sizes_are_rounded_up() {
        let dir = std::env::temp_dir().join(format!("xtask-size-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(dir.join("DEBIAN")).unwrap();
        fs::create_dir_all(dir.join("usr")).unwrap();
        fs::write(dir.join("usr/a"), vec![0; 1025]).unwrap();
        fs::write(dir.join("usr/b"), b"").unwrap();
        fs::write(dir.join("DEBIAN/control"), vec![0; 9000]).unwrap();
        // The folder and usr count one each, then two and one.
        assert_eq!(kibibytes(&dir).unwrap(), 5);
        let control = facts().control(&dir).unwrap();
        assert!(control.contains("\nInstalled-Size: 5\n") && control.ends_with("system.\n"));
        assert_eq!(facts().file_name(), "iwarp_1.2.3-1_amd64.deb");
        fs::remove_dir_all(dir).unwrap();
    }
}
