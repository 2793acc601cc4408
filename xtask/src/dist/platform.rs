//! The processors for which there are artefacts, and their names in each kind of package.

use anyhow::{Result, bail};

/// The oldest glibc with which the programs work: that of Debian 10 and RHEL 8.
pub(super) const GLIBC: &str = "2.28";

/// A processor.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Platform {
    /// The name that Linux, RPM and Python use.
    pub(super) name: &'static str,
    /// The name that Debian and OCI images use.
    pub(super) debian: &'static str,
    /// Whether DKMS can build the kernel module for it.
    pub(super) module: bool,
}

/// All platforms.
pub(super) const PLATFORMS: [Platform; 2] = [
    Platform {
        name: "x86_64",
        debian: "amd64",
        module: true,
    },
    Platform {
        name: "aarch64",
        debian: "arm64",
        module: false,
    },
];

impl Platform {
    /// Returns the platform with this name, for the command line.
    pub(super) fn named(name: &str) -> Result<&'static Self> {
        let found = PLATFORMS.iter().find(|platform| platform.name == name);
        match found {
            Some(platform) => Ok(platform),
            None => bail!("{name} is neither x86_64 nor aarch64"),
        }
    }

    /// Returns `true` for the processor of this machine.
    pub(super) fn is_host(&self) -> bool {
        self.name == std::env::consts::ARCH
    }

    /// Returns Rust's name of the target with a C library (`gnu` or `musl`).
    pub(super) fn target(&self, library: &str) -> String {
        format!("{}-unknown-linux-{library}", self.name)
    }

    /// Returns zig's name of the target with the oldest supported glibc.
    pub(super) fn zig_target(&self) -> String {
        format!("{}-linux-gnu.{GLIBC}", self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn platforms_are_found_by_name() {
        for platform in &PLATFORMS {
            assert_eq!(Platform::named(platform.name).unwrap(), platform);
        }
        assert!(Platform::named("amd64").is_err());
        let arm = Platform::named("aarch64").unwrap();
        assert_eq!(arm.target("musl"), "aarch64-unknown-linux-musl");
        assert_eq!(arm.zig_target(), "aarch64-linux-gnu.2.28");
    }
}
