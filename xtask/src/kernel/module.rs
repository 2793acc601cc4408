//! Builds kernel modules from `kernel/`, and the source package, which contains the engine as an
//! object file.
//!
//! Every module is built from a folder with the same contents as the source package, so that the
//! package is what was tested.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::context::Context;
use crate::debian::fetch;
use crate::process::Log;

/// The module that is an RDMA device.
pub const DEVICE: &str = "iwarp_rnic";
/// The module that tests the engine and does not stay loaded.
pub const TEST: &str = "iwarp_engine_test";
/// The module that is a client of an RDMA device, and does not stay loaded.
pub const CLIENT: &str = "iwarp_client_test";

/// The folders below `kernel/` with the C sources.
const FOLDERS: &[&str] = &["", "src", "probe"];
/// The folder with the test modules, which is not part of the source package.
const TEST_FOLDER: &str = "test";
/// The name that Kbuild expects for the engine's object.
const ENGINE: &str = "engine.o_shipped";
/// The licences of the package.
const LICENCES: &[&str] = &["LICENSE-APACHE", "LICENSE-MIT"];
/// Files in [`FOLDERS`] that a build does not need.
const OMITTED: &[&str] = &["engine.lds"];
/// The name of the source package.
const PACKAGE: &str = "iwarp-rnic";
/// The folders of the system's programs. A Rust compiler that a user has installed is not in them.
const SYSTEM_PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// Copies the sources and the engine to `dir`, whose earlier contents are removed.
///
/// # Errors
/// If a file cannot be copied.
fn assemble(context: &Context, object: &Path, dir: &Path, folders: &[&str]) -> Result<()> {
    if dir.exists() {
        std::fs::remove_dir_all(dir)?;
    }
    for folder in folders {
        let (from, to) = (context.root.join("kernel").join(folder), dir.join(folder));
        std::fs::create_dir_all(&to)?;
        for entry in std::fs::read_dir(from)? {
            let entry = entry?;
            let omitted = OMITTED.iter().any(|name| entry.file_name() == *name);
            if entry.file_type()?.is_file() && !omitted {
                std::fs::copy(entry.path(), to.join(entry.file_name()))?;
            }
        }
    }
    for licence in LICENCES {
        std::fs::copy(context.root.join(licence), dir.join(licence))?;
    }
    std::fs::copy(object, dir.join(ENGINE))?;
    Ok(())
}

/// Who uses a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Machines of users.
    Shipped,
    /// The tests. The module has the parameter `fail_allocation`, which makes allocations fail.
    Tests,
}

/// Builds a module in `dir` against a kernel's headers and returns its path. Warnings are errors.
///
/// # Errors
/// If the module does not build, or if a tool prints a warning.
pub fn build(
    context: &Context,
    (module, purpose): (&str, Use),
    object: &Path,
    headers: &Path,
    dir: &Path,
    log: &mut Log,
) -> Result<PathBuf> {
    let mut folders = FOLDERS.to_vec();
    if module == TEST || module == CLIENT {
        folders.push(TEST_FOLDER);
    }
    assemble(context, object, dir, &folders)?;
    let output = log
        .run_and_read(
            Command::new("make")
                .arg("-C")
                .arg(headers)
                .arg(format!("M={}", dir.display()))
                .arg(format!("MODULE={module}"))
                .arg(match purpose {
                    Use::Shipped => "IWARP_FAULTS=n",
                    Use::Tests => "IWARP_FAULTS=y",
                })
                // BTF needs the types in vmlinux, which the headers' package does not contain.
                .args(["CONFIG_DEBUG_INFO_BTF_MODULES=", "W=1", "modules"]),
        )
        .context("the module does not build")?;
    if let Some(line) = output.lines().find(|line| is_warning(line)) {
        bail!("the kernel's build printed a warning: {line}");
    }
    let module = dir.join(format!("{module}.ko"));
    log.run(Command::new("strip").arg("--strip-debug").arg(&module))?;
    Ok(module)
}

/// Returns `true` for a warning of the compiler, of objtool, or of modpost.
fn is_warning(line: &str) -> bool {
    let lower = line.to_ascii_lowercase();
    // The kernel's build always warns that the kernel was built with another revision of the
    // compiler.
    lower.contains("warning:") && !lower.contains("the compiler differs")
}

/// Writes the source package for DKMS and returns its path. Building the package needs no Rust.
///
/// # Errors
/// If a file cannot be written.
pub fn package(context: &Context, object: &Path, dir: &Path, log: &mut Log) -> Result<PathBuf> {
    let version = env!("CARGO_PKG_VERSION");
    let name = format!("{PACKAGE}-{version}");
    let folder = dir.join(&name);
    assemble(context, object, &folder, FOLDERS)?;
    std::fs::write(folder.join("dkms.conf"), settings(version))?;
    let archive = dir.join(format!("{name}-dkms.tar.gz"));
    log.run(
        Command::new("tar")
            .args(["--sort=name", "--mtime=@0", "--owner=0", "--group=0"])
            .args(["--numeric-owner", "-czf"])
            .arg(&archive)
            .arg("-C")
            .arg(dir)
            .arg(&name),
    )?;
    std::fs::remove_dir_all(folder)?;
    Ok(archive)
}

/// Builds the source package with DKMS for a kernel, without Rust, and returns the module's path.
/// DKMS is unpacked from its Debian package, and works below `dir`.
///
/// # Errors
/// If DKMS cannot be downloaded, or if it does not build the module.
pub fn try_package(
    archive: &Path,
    kernel: &str,
    headers: &Path,
    dir: &Path,
    log: &mut Log,
) -> Result<PathBuf> {
    let program = dir.join("program");
    std::fs::create_dir_all(&program)?;
    fetch(&program, &["dkms".to_owned()], log)?;
    let (sources, tree) = (dir.join("sources"), dir.join("tree"));
    for folder in [&sources, &tree] {
        if folder.exists() {
            std::fs::remove_dir_all(folder)?;
        }
        std::fs::create_dir_all(folder)?;
    }
    log.run(
        Command::new("tar")
            .arg("-C")
            .arg(&sources)
            .arg("-xf")
            .arg(archive),
    )?;
    let version = env!("CARGO_PKG_VERSION");
    log.run(
        Command::new("bash")
            .arg(program.join("usr/sbin/dkms"))
            .args(["build", "-m", PACKAGE, "-v", version, "-k", kernel])
            .arg("--kernelsourcedir")
            .arg(headers)
            .arg("--sourcetree")
            .arg(&sources)
            .arg("--dkmstree")
            .arg(&tree)
            .env("PATH", SYSTEM_PATH),
    )
    .context("DKMS does not build the source package")?;
    let module = tree.join(format!(
        "{PACKAGE}/{version}/{kernel}/x86_64/module/{DEVICE}.ko"
    ));
    if !module.is_file() {
        bail!("DKMS did not create {}", module.display());
    }
    Ok(module)
}

/// The kernels for which DKMS tries to build the module, as a regular expression of bash.
const KERNELS: &str = r"^(6\.([1-9]|[1-9][0-9]+)[.-]|([7-9]|[1-9][0-9]+)\.|5\.14\..*\.el9)";

/// Returns the contents of `dkms.conf`.
fn settings(version: &str) -> String {
    format!(
        "PACKAGE_NAME=\"{PACKAGE}\"\n\
         PACKAGE_VERSION=\"{version}\"\n\
         BUILT_MODULE_NAME[0]=\"{DEVICE}\"\n\
         DEST_MODULE_LOCATION[0]=\"/updates/dkms\"\n\
         # Tables of types need a program that Debian's headers do not depend on.\n\
         MAKE[0]=\"make -C $kernel_source_dir M=$dkms_tree/$PACKAGE_NAME/$PACKAGE_VERSION/build \
         CONFIG_DEBUG_INFO_BTF_MODULES= modules\"\n\
         CLEAN=\"make -C $kernel_source_dir M=$dkms_tree/$PACKAGE_NAME/$PACKAGE_VERSION/build \
         clean\"\n\
         BUILD_EXCLUSIVE_ARCH=\"x86_64\"\n\
         # Linux 6.1 and later, and RHEL 9, whose 5.14 has newer interfaces. The build checks the\n\
         # interfaces themselves (probe/) and stops with a message if one is missing.\n\
         BUILD_EXCLUSIVE_KERNEL=\"{KERNELS}\"\n\
         BUILD_EXCLUSIVE_CONFIG=\"CONFIG_INET CONFIG_INFINIBAND CONFIG_INFINIBAND_USER_ACCESS \
         CONFIG_INFINIBAND_ADDR_TRANS\"\n\
         AUTOINSTALL=\"yes\"\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn build_warnings_are_recognised() {
        assert!(is_warning(
            "test.o: warning: objtool: f()+0x1: 'naked' return"
        ));
        assert!(is_warning("WARNING: modpost: missing symbol"));
        assert!(!is_warning(
            "warning: the compiler differs from the one used to build the kernel"
        ));
        assert!(!is_warning("  CC [M]  main.o"));
    }

    #[test]
    fn dkms_gets_module_and_version() {
        let settings = settings("1.2.3");
        assert!(settings.contains("PACKAGE_VERSION=\"1.2.3\"\n"));
        assert!(settings.contains("BUILT_MODULE_NAME[0]=\"iwarp_rnic\"\n"));
    }

    #[test]
    fn dkms_skips_old_kernels() {
        let matches = |kernel: &str| {
            let script = format!("[[ $1 =~ {KERNELS} ]]");
            Command::new("bash")
                .args(["-c", &script, "bash", kernel])
                .status()
                .unwrap()
                .success()
        };
        for kernel in [
            "6.1.0-50-amd64",
            "6.12.117+deb13-amd64",
            "7.3.4+deb13-amd64",
            "6.8.0-49-generic",
            "5.14.0-503.el9.x86_64",
            "10.0.1",
        ] {
            assert!(matches(kernel), "{kernel}");
        }
        for kernel in [
            "6.0.12-1-amd64",
            "5.10.0-30-amd64",
            "5.14.21-generic",
            "4.18.0-553.el8",
        ] {
            assert!(!matches(kernel), "{kernel}");
        }
    }
}
