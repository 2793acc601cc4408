//! Builds kernel modules that Debian's kernel package omits, or contains without RDMA support, from
//! Debian's kernel source.
//!
//! To add a module, add its directory, its options and its path to one of the constants below.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::constants;
use super::kernel_files::KernelFiles;
use xtask::process::Log;

/// A set of modules that are built together. Paths are relative to the root of the kernel source.
pub(crate) struct Omitted {
    /// The directories of the modules.
    dirs: &'static [&'static str],
    /// Files outside these directories that the modules and tools include.
    headers: &'static [&'static str],
    /// Build tools that Debian does not ship: their paths without `.c`.
    tools: &'static [&'static str],
    /// Kconfig options, which are passed to `make` and to the compiler.
    options: &'static [&'static str],
    modules: &'static [&'static str],
}

const SIW_DIR: &str = "drivers/infiniband/sw/siw";
/// siw, which Debian omits.
pub(crate) const SIW: Omitted = Omitted {
    dirs: &[SIW_DIR],
    headers: &[],
    tools: &[],
    options: &["CONFIG_RDMA_SIW=m"],
    modules: &["drivers/infiniband/sw/siw/siw.ko"],
};

/// SMB, which Debian builds without SMB Direct, and rnbd with rtrs. Not for kernel 6.1, which has
/// SMB in other directories.
pub(crate) const STORAGE: Omitted = Omitted {
    dirs: &[
        "fs/smb",
        "drivers/infiniband/ulp/rtrs",
        "drivers/block/rnbd",
    ],
    headers: &[
        "fs/nls/nls_ucs2_data.h",
        "fs/nls/nls_ucs2_utils.h",
        "include/linux/asn1.h",
        "include/linux/asn1_ber_bytecode.h",
    ],
    tools: &["scripts/asn1_compiler"],
    options: &[
        "CONFIG_CIFS_SMB_DIRECT=y",
        "CONFIG_SMB_SERVER_SMBDIRECT=y",
        "CONFIG_INFINIBAND_RTRS=m",
        "CONFIG_INFINIBAND_RTRS_CLIENT=m",
        "CONFIG_INFINIBAND_RTRS_SERVER=m",
        "CONFIG_BLK_DEV_RNBD=y",
        "CONFIG_BLK_DEV_RNBD_CLIENT=m",
        "CONFIG_BLK_DEV_RNBD_SERVER=m",
    ],
    modules: &[
        "fs/smb/common/cifs_arc4.ko",
        "fs/smb/common/cifs_md4.ko",
        "fs/smb/client/cifs.ko",
        "fs/smb/server/ksmbd.ko",
        "drivers/infiniband/ulp/rtrs/rtrs-core.ko",
        "drivers/infiniband/ulp/rtrs/rtrs-client.ko",
        "drivers/infiniband/ulp/rtrs/rtrs-server.ko",
        "drivers/block/rnbd/rnbd-client.ko",
        "drivers/block/rnbd/rnbd-server.ko",
    ],
};

/// Whether the source is modified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Variant {
    /// The unmodified source.
    Stock,
    /// The constants of siw are turned into module parameters.
    Parameters,
}

impl Omitted {
    /// Returns the parts of the kernel source that the build needs.
    pub(crate) fn source(&self) -> impl Iterator<Item = String> {
        let files = self.dirs.iter().chain(self.headers);
        let tools = self.tools.iter().map(|tool| format!("{tool}.c"));
        files.map(|&file| file.to_owned()).chain(tools)
    }

    /// Builds the modules in `dir`, unless they are up to date. Returns their paths.
    pub(crate) fn build(
        &self,
        kernel: &KernelFiles,
        dir: &Path,
        variant: Variant,
        log: &mut Log,
    ) -> Result<Vec<PathBuf>> {
        let modules: Vec<PathBuf> = self.modules.iter().map(|name| dir.join(name)).collect();
        let stamp = dir.join("built-for");
        let stamp_content = self.stamp_content(&kernel.name, variant);
        if modules.iter().all(|module| module.exists())
            && std::fs::read_to_string(&stamp).is_ok_and(|text| text == stamp_content)
        {
            return Ok(modules);
        }
        if dir.exists() {
            std::fs::remove_dir_all(dir)?;
        }
        self.copy_source(&kernel.source, dir, log)?;
        if variant == Variant::Parameters {
            constants::to_parameters(&dir.join(SIW_DIR))?;
        }
        self.build_tools(kernel, &dir.join("include"), log)?;
        log.run(&mut self.make(&kernel.headers, dir)?)
            .with_context(|| format!("{} does not build", self.dirs.join(" ")))?;
        for module in &modules {
            log.run(Command::new("strip").arg("--strip-debug").arg(module))?;
        }
        std::fs::write(stamp, stamp_content)?;
        Ok(modules)
    }

    /// Returns the content of the stamp file: all inputs of the build.
    fn stamp_content(&self, kernel: &str, variant: Variant) -> String {
        let source: Vec<String> = self.source().collect();
        let changes = match variant {
            Variant::Stock => "",
            Variant::Parameters => include_str!("constants.rs"),
        };
        [
            kernel,
            &source.join(" "),
            &self.options.join(" "),
            &self.modules.join(" "),
            changes,
        ]
        .join("\n")
    }

    /// Copies the source, because the build writes files next to it. Lists all directories in one
    /// Kbuild file, so that modules find each other's symbols.
    fn copy_source(&self, source: &Path, dir: &Path, log: &mut Log) -> Result<()> {
        for name in self.dirs.iter().chain(self.headers) {
            let to = dir.join(name);
            std::fs::create_dir_all(to.parent().context("the path has no parent directory")?)?;
            log.run(Command::new("cp").arg("-r").arg(source.join(name)).arg(to))?;
        }
        let dirs: Vec<String> = self.dirs.iter().map(|name| format!("{name}/")).collect();
        std::fs::write(dir.join("Kbuild"), format!("obj-y += {}\n", dirs.join(" ")))?;
        Ok(())
    }

    /// Builds the tools in the unpacked headers package, where the kernel build expects them.
    fn build_tools(&self, kernel: &KernelFiles, include: &Path, log: &mut Log) -> Result<()> {
        for tool in self.tools {
            let program = kernel.headers.join(tool);
            if program.exists() {
                continue;
            }
            log.run(
                Command::new("gcc")
                    .arg("-O1")
                    .arg("-I")
                    .arg(include)
                    .arg("-o")
                    .arg(program)
                    .arg(kernel.source.join(format!("{tool}.c"))),
            )?;
        }
        Ok(())
    }

    /// Returns the `make` command for all directories.
    fn make(&self, headers: &Path, dir: &Path) -> Result<Command> {
        let mut flags = String::new();
        for option in self.options {
            flags += &define(option).with_context(|| {
                format!("{option} is not a Kconfig option with the value y or m")
            })?;
        }
        // rnbd includes headers of rtrs by their path in the kernel source.
        for dir_name in self.dirs {
            flags += &format!(" -I{}", dir.join(dir_name).display());
        }
        let mut command = Command::new("make");
        command
            .arg("-C")
            .arg(headers)
            .arg(format!("M={}", dir.display()))
            .arg(format!("-j{}", std::thread::available_parallelism()?))
            .args(self.options)
            .arg(format!("KCFLAGS={flags}"))
            .args(["CONFIG_DEBUG_INFO_BTF_MODULES=", "modules"]);
        Ok(command)
    }
}

/// Returns the compiler option that defines a Kconfig option. `include/generated/autoconf.h`
/// defines only the options of Debian's build.
fn define(option: &str) -> Option<String> {
    match option.split_once('=')? {
        (name, "y") => Some(format!(" -D{name}=1")),
        (name, "m") => Some(format!(" -D{name}_MODULE=1")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_become_defines() {
        assert_eq!(define("CONFIG_A=y").unwrap(), " -DCONFIG_A=1");
        assert_eq!(define("CONFIG_A=m").unwrap(), " -DCONFIG_A_MODULE=1");
        assert!(define("CONFIG_A").is_none());
        assert!(define("CONFIG_A=n").is_none());
    }

    #[test]
    fn modules_are_in_built_directories() {
        for omitted in [SIW, STORAGE] {
            for module in omitted.modules {
                assert!(omitted.dirs.iter().any(|dir| module.starts_with(dir)));
            }
        }
    }

    #[test]
    fn stamps_differ_between_builds() {
        let stamp = |variant| SIW.stamp_content("6.12.1", variant);
        assert_ne!(stamp(Variant::Stock), stamp(Variant::Parameters));
        assert_ne!(
            stamp(Variant::Stock),
            STORAGE.stamp_content("6.12.1", Variant::Stock)
        );
        assert_ne!(
            stamp(Variant::Stock),
            SIW.stamp_content("6.12.2", Variant::Stock)
        );
    }
}
