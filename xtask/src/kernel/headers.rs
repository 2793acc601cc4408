//! The headers of Debian's kernels, against which modules are built. The packages are unpacked and
//! not installed.

use std::cmp::Reverse;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::toolchain::{dependency, show};
use crate::debian::{fetch, fields};
use crate::process::Log;

/// The kernels for which modules are built: 6.1 of Debian 12, and 6.12 of Debian 13, which Debian
/// 12 offers as well.
pub const SERIES: &[&str] = &["6.12", "6.1"];

/// One kernel of Debian.
#[derive(Debug)]
pub struct Release {
    /// The output of `uname -r`.
    pub name: String,
    /// The version of all its packages.
    pub version: String,
    /// The package with the tools of the kernel's build.
    kbuild: String,
}

impl Release {
    /// Returns the newest kernel of a series such as 6.12, or `None` if apt offers none.
    ///
    /// # Errors
    /// If apt fails.
    pub fn newest(series: &str, log: &mut Log) -> Result<Option<Self>> {
        let names = Self::names(series, log)?;
        names.first().map(|name| Self::named(name, log)).transpose()
    }

    /// Returns the names (`uname -r`) of the kernels of a series, the newest first.
    ///
    /// # Errors
    /// If apt fails.
    pub fn names(series: &str, log: &mut Log) -> Result<Vec<String>> {
        let names = log.run_and_read(
            Command::new("apt-cache").args(["pkgnames", &format!("linux-headers-{series}.")]),
        )?;
        Ok(newest_first(&names))
    }

    /// Returns the kernel with this name (`uname -r`).
    ///
    /// # Errors
    /// If apt offers no such kernel.
    pub fn named(name: &str, log: &mut Log) -> Result<Self> {
        let shown = show(&format!("linux-headers-{name}"), log)?;
        let version = fields(&shown, "Version").next();
        Ok(Self {
            name: name.to_owned(),
            version: version
                .context("the package of headers has no version")?
                .to_owned(),
            kbuild: dependency(&shown, "linux-kbuild-")
                .context("the package of headers does not depend on linux-kbuild")?,
        })
    }

    /// Returns the packages with headers and build tools.
    pub fn packages(&self) -> Vec<String> {
        let common = self.name.trim_end_matches("-amd64");
        [
            format!("linux-headers-{}", self.name),
            format!("linux-headers-{common}-common"),
            self.kbuild.clone(),
        ]
        .iter()
        .map(|package| format!("{package}={}", self.version))
        .collect()
    }

    /// Downloads and unpacks headers, build tools and the packages in `further` below `dir`.
    ///
    /// # Errors
    /// If the download or the unpacking fails.
    pub fn fetch(&self, dir: &Path, further: &[String], log: &mut Log) -> Result<()> {
        let mut packages = self.packages();
        packages.extend_from_slice(further);
        std::fs::create_dir_all(dir)?;
        fetch(dir, &packages, log)?;
        // The packages refer to each other by their installed paths. Replace them by the paths
        // below `dir`.
        let makefile = self.headers(dir).join("Makefile");
        let text = std::fs::read_to_string(&makefile)?;
        let prefix = format!("{}/usr/", dir.display());
        if !text.contains(&prefix) {
            let text = text
                .replace("/usr/src/", &format!("{prefix}src/"))
                .replace("/usr/lib/", &format!("{prefix}lib/"));
            std::fs::write(&makefile, text)?;
        }
        Ok(())
    }

    /// Returns the folder against which modules are built, if the packages are below `dir`.
    pub fn headers(&self, dir: &Path) -> PathBuf {
        dir.join("usr/src")
            .join(format!("linux-headers-{}", self.name))
    }
}

/// Returns the kernels whose headers `apt-cache pkgnames` lists, without variants such as real
/// time.
fn newest_first(names: &str) -> Vec<String> {
    let mut names: Vec<String> = names
        .lines()
        .filter_map(|line| line.strip_prefix("linux-headers-"))
        .filter(|name| {
            name.strip_suffix("-amd64")
                .is_some_and(|rest| rest.ends_with(|c: char| c.is_ascii_digit()))
        })
        .map(str::to_owned)
        .collect();
    names.sort_by_key(|name| Reverse(numbers(name)));
    names
}

/// Returns the numbers of a version, for sorting: as text, 6.12.9 would come after 6.12.117.
fn numbers(name: &str) -> Vec<u32> {
    name.split(|c: char| !c.is_ascii_digit())
        .filter_map(|digits| digits.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_ordered_by_their_numbers() {
        let names = "linux-headers-6.12.9+deb12-amd64\nlinux-headers-6.12.117+deb12-amd64\n\
            linux-headers-6.12.117+deb12-common\nlinux-headers-6.12.118+deb12-rt-amd64\n\
            linux-headers-6.12.118+deb12-cloud-amd64\n";
        assert_eq!(
            newest_first(names),
            ["6.12.117+deb12-amd64", "6.12.9+deb12-amd64"]
        );
        let names = "linux-headers-6.1.0-9-amd64\nlinux-headers-6.1.0-56-amd64\n";
        assert_eq!(newest_first(names), ["6.1.0-56-amd64", "6.1.0-9-amd64"]);
        assert!(newest_first("").is_empty());
    }

    #[test]
    fn all_packages_have_one_version() {
        let release = Release {
            name: "6.1.0-56-amd64".into(),
            version: "6.1.192-2".into(),
            kbuild: "linux-kbuild-6.1".into(),
        };
        assert_eq!(
            release.packages(),
            [
                "linux-headers-6.1.0-56-amd64=6.1.192-2",
                "linux-headers-6.1.0-56-common=6.1.192-2",
                "linux-kbuild-6.1=6.1.192-2",
            ]
        );
    }
}
