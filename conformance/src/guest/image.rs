//! Builds the image of a guest: Debian's kernel, siw in two variants, and a small file system.
//!
//! To add a kernel module, add a line to [`MODULES`]; its dependencies are added automatically. To
//! add a program, add a line to [`PROGRAMS`], and its package to `debian.rs`; its libraries are
//! added automatically. `cargo xtask interop siw --exec 'modprobe ib_iser && lsmod'` tests a module
//! in the guest.

use std::collections::{BTreeSet, VecDeque};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::archive;
use super::debian::{self, Kernel};
use super::kernel_files::KernelFiles;
use super::omitted::{self, SIW, Variant};
use super::python;
use xtask::context::{Context, find_program};
use xtask::process::Log;

/// Kernel modules that every guest contains.
const BASE_MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_net",
    "crc32c_generic",
    "crc32c_intel",
    "libcrc32c",
];
/// Kernel modules of guests with RDMA.
const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_net",
    "crc32c_generic",
    "crc32c_intel",
    "libcrc32c",
    "crc32_generic",
    "ib_core",
    "ib_uverbs",
    "ib_cm",
    "iw_cm",
    "rdma_cm",
    "rdma_ucm",
    "ib_iser",
    "ib_isert",
    "iscsi_target_mod",
    "target_core_mod",
    "target_core_file",
    "libiscsi",
    "scsi_transport_iscsi",
    "sd_mod",
    "ext4",
    "nvme-rdma",
    "nvmet-rdma",
    "null_blk",
    "brd",
    "loop",
    "8021q",
    "bridge",
    "veth",
];

/// Programs of guests with RDMA.
const PROGRAMS: &[&str] = &[
    "ip",
    "rdma",
    "rping",
    "ucmatose",
    "rdma_client",
    "rdma_server",
    "rdma_xclient",
    "rdma_xserver",
    "rstream",
    "riostream",
    "rcopy",
    "cmtime",
    "qperf",
    "fi_pingpong",
    "ibv_devinfo",
    "ib_write_bw",
    "ib_write_lat",
    "ib_read_bw",
    "ib_read_lat",
    "ib_send_bw",
    "ib_send_lat",
    "iwpmd",
    "iscsid",
    "iscsiadm",
    "mkfs.ext4",
    "setpriv",
];

/// The name of the guest's iSCSI initiator.
pub(crate) const GUEST_NAME: &str = "iqn.2024-01.example:guest";

/// Additional files of guests for storage tests.
const STORAGE: Extra = Extra {
    modules: &[
        "nvme-tcp",
        "nvmet-tcp",
        "nfsd",
        "nfsv3",
        "nfsv4",
        "rpcrdma",
        "virtio_blk",
        "ksmbd",
        "cifs",
        "nls_utf8",
        // Algorithms that ksmbd and cifs request by name.
        "cmac",
        "ccm",
        "gcm",
        "ghash_generic",
        "ctr",
    ],
    programs: &[
        "nvme",
        "fio",
        "exportfs",
        "mount",
        "mount.nfs",
        "rpc.mountd",
        "rpcbind",
        "ksmbd.adduser",
        "ksmbd.control",
        "ksmbd.mountd",
        "mount.cifs",
    ],
    scripts: &[
        "nvme-target",
        "nvme-disk",
        "nfs-server",
        "nfs-disk",
        "smb-server",
        "smb-disk",
        "rnbd-server",
        "rnbd-disk",
        "iser-target",
        "iser-disk",
        "mixed-load",
    ],
    config_files: &[
        "etc/netconfig",
        "etc/rpc",
        "etc/services",
        "etc/protocols",
        // ksmbd.adduser writes passwords in UTF-16.
        "usr/lib/x86_64-linux-gnu/gconv/gconv-modules",
        "usr/lib/x86_64-linux-gnu/gconv/UTF-16.so",
    ],
};

/// Additional files of some guests. Not all guests contain them, because they double the size of
/// the file system.
#[derive(Default)]
struct Extra {
    modules: &'static [&'static str],
    programs: &'static [&'static str],
    scripts: &'static [&'static str],
    config_files: &'static [&'static str],
}

/// The files from which a guest boots.
pub(crate) struct Image {
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: PathBuf,
    /// The kernel release, as `uname -r` prints it.
    pub(crate) release: String,
}

impl KernelFiles {
    /// Returns the image of this kernel with a file system.
    fn image_with(&self, initramfs: PathBuf) -> Image {
        Image {
            kernel: self.image.clone(),
            initramfs,
            release: self.name.clone(),
        }
    }
}

/// Builds the guest for the siw suite. Reuses files of an earlier run.
pub(crate) fn build(context: &Context, cache: &Path, log: &mut Log) -> Result<Image> {
    let kernel_dir = cache.join("kernel");
    let programs_dir = cache.join("programs");
    log.say("fetching Debian's kernel, siw's source and the guest's programs");
    std::fs::create_dir_all(&kernel_dir)?;
    let kernel = Kernel::newest(debian::NEWER, log)?;
    kernel.fetch(&kernel_dir, log)?;
    kernel.fetch_source(&kernel_dir, log)?;
    debian::fetch_programs(&programs_dir, log)?;

    log.say(format!(
        "building siw for {}, as it is and with parameters",
        kernel.release.name
    ));
    let files = kernel.files(&kernel_dir);
    let siw = siw(&files, cache, log)?;

    log.say("building the file system");
    let root = cache.join("root");
    if root.exists() {
        std::fs::remove_dir_all(&root)?;
    }
    let mut stage = Stage {
        root: &root,
        programs: &programs_dir,
        log,
    };
    stage.create_directories()?;
    stage.siw_modules(&siw)?;
    stage.kernel_modules(&files, MODULES)?;
    let source = context.root.join("conformance/guest");
    stage.init_and_agent(&source, cache)?;
    stage.siw_files(&source, cache)?;
    stage.user_space(PROGRAMS)?;
    let initramfs = cache.join("initramfs.cpio");
    archive::write(&root, &initramfs)?;
    Ok(files.image_with(initramfs))
}

/// Builds a guest without RDMA programs, with one of our kernel modules in `/lib/iwarp`.
pub(crate) fn small(
    context: &Context,
    cache: &Path,
    kernel: &KernelFiles,
    module: &Path,
    log: &mut Log,
) -> Result<Image> {
    let root = cache.join("root");
    if root.exists() {
        std::fs::remove_dir_all(&root)?;
    }
    let mut stage = Stage {
        root: &root,
        programs: &kernel.modules,
        log,
    };
    stage.create_directories()?;
    let name = module
        .file_name()
        .context("the module's path has no file name")?;
    stage.copy(module, &format!("usr/lib/iwarp/{}", name.to_string_lossy()))?;
    stage.kernel_modules(kernel, BASE_MODULES)?;
    stage.init_and_agent(&context.root.join("conformance/guest"), cache)?;
    let initramfs = cache.join("initramfs.cpio");
    archive::write(&root, &initramfs)?;
    Ok(kernel.image_with(initramfs))
}

/// C programs of the guests that test the module.
const PEERS: [&str; 15] = [
    "peer",
    "hostile",
    "failing",
    "stubborn",
    "revoking",
    "sharing",
    "elder",
    "in_order",
    "violating",
    "unread",
    "rejecting",
    "accepting",
    "limited",
    "withdrawing",
    "rewriting",
];

/// Builds a guest with RDMA programs, our modules in `/lib/iwarp`, and siw, which is not loaded, in
/// `/lib/siw`.
pub(crate) fn device(
    context: &Context,
    cache: &Path,
    programs_dir: &Path,
    kernel: &KernelFiles,
    modules: &[PathBuf],
    storage: bool,
    log: &mut Log,
) -> Result<Image> {
    let extra = if storage { STORAGE } else { Extra::default() };
    debian::fetch_programs(programs_dir, log)?;
    let siw = siw(kernel, cache, log)?;
    let rebuilt = if storage && kernel.builds_storage {
        omitted::STORAGE.build(kernel, &cache.join("storage"), Variant::Stock, log)?
    } else {
        Vec::new()
    };
    let root = cache.join("device-root");
    if root.exists() {
        std::fs::remove_dir_all(&root)?;
    }
    let mut stage = Stage {
        root: &root,
        programs: programs_dir,
        log,
    };
    stage.create_directories()?;
    stage.siw_modules(&siw)?;
    for module in modules {
        let name = module
            .file_name()
            .context("the module's path has no file name")?;
        stage.copy(module, &format!("usr/lib/iwarp/{}", name.to_string_lossy()))?;
    }
    for module in modules.iter().chain(&rebuilt) {
        let name = module
            .file_name()
            .context("the module's path has no file name")?;
        // modprobe prefers this directory.
        let updates = format!("usr/lib/modules/{}/updates", kernel.name);
        stage.copy(module, &format!("{updates}/{}", name.to_string_lossy()))?;
    }
    stage.kernel_modules(kernel, &[MODULES, extra.modules].concat())?;
    let files = context.root.join("conformance/guest");
    stage.init_and_agent(&files, cache)?;
    for program in PEERS {
        stage.compile(program, &files, cache, &["-lrdmacm", "-libverbs"])?;
    }
    stage.hostile_peer(&context.root, cache)?;
    stage.scripts(&files, &["half-fpdus", "late-reader", "refused"])?;
    stage.scripts(&files, extra.scripts)?;
    stage.user_space(&[PROGRAMS, extra.programs].concat())?;
    for config_files in extra.config_files {
        stage.copy(&programs_dir.join(config_files), config_files)?;
    }
    python::add(&mut stage)?;
    let initramfs = cache.join("device.cpio");
    archive::write(&root, &initramfs)?;
    Ok(kernel.image_with(initramfs))
}

/// Builds siw in two variants: unmodified, and with module parameters instead of constants.
fn siw(kernel: &KernelFiles, cache: &Path, log: &mut Log) -> Result<[(&'static str, PathBuf); 2]> {
    let mut build = |name: &str, variant| -> Result<PathBuf> {
        let mut modules = SIW.build(kernel, &cache.join(name), variant, log)?;
        modules.pop().context("no siw module was built")
    };
    Ok([
        ("siw", build("siw", Variant::Stock)?),
        (
            "siw-parameters",
            build("siw-parameters", Variant::Parameters)?,
        ),
    ])
}

/// The guest's file system while it is being assembled.
pub(crate) struct Stage<'a> {
    pub(crate) root: &'a Path,
    /// The directory into which Debian's packages are unpacked.
    pub(crate) programs: &'a Path,
    pub(crate) log: &'a mut Log,
}

impl Stage<'_> {
    fn copy(&self, from: &Path, to: &str) -> Result<()> {
        let to = self.root.join(to);
        if let Some(dir) = to.parent() {
            std::fs::create_dir_all(dir)?;
        }
        std::fs::copy(from, &to).with_context(|| from.display().to_string())?;
        Ok(())
    }

    pub(crate) fn executable(&self, from: &Path, to: &str) -> Result<()> {
        self.copy(from, to)?;
        std::fs::set_permissions(self.root.join(to), std::fs::Permissions::from_mode(0o755))?;
        Ok(())
    }

    fn create_directories(&mut self) -> Result<()> {
        for dir in [
            "usr/bin",
            "usr/lib",
            "usr/lib64",
            "proc",
            "sys",
            "dev",
            "tmp",
            "run",
            "etc",
            "mnt",
            "var/lib",
        ] {
            std::fs::create_dir_all(self.root.join(dir))?;
        }
        for (link, target) in [
            ("bin", "usr/bin"),
            ("sbin", "usr/bin"),
            ("usr/sbin", "bin"),
            ("lib", "usr/lib"),
            ("lib64", "usr/lib64"),
            ("var/run", "../run"),
        ] {
            symlink(target, self.root.join(link))?;
        }
        for (file, text) in [
            (
                "passwd",
                "root:x:0:0:root:/:/bin/sh\n_rpc:x:100:65534::/run:/bin/false\n",
            ),
            ("group", "root:x:0:\nnogroup:x:65534:\n"),
            ("hosts", "127.0.0.1 localhost guest\n"),
            ("nsswitch.conf", "hosts: files\n"),
            ("fstab", ""),
        ] {
            std::fs::write(self.root.join("etc").join(file), text)?;
        }
        let busybox = find_program("busybox").context("busybox is not installed")?;
        self.executable(&busybox, "usr/bin/busybox")?;
        let applets = self
            .log
            .run_and_read(Command::new(&busybox).arg("--list"))?;
        for applet in applets.lines().filter(|name| *name != "busybox") {
            let link = self.root.join("usr/bin").join(applet);
            if !link.exists() {
                symlink("busybox", link)?;
            }
        }
        Ok(())
    }

    /// Copies kernel modules and their dependencies, decompresses them, and creates the module
    /// index.
    fn kernel_modules(&mut self, kernel: &KernelFiles, names: &[&str]) -> Result<()> {
        let (dir, release) = (&kernel.modules, kernel.name.as_str());
        self.log
            .run(Command::new(sbin("depmod")).arg("-b").arg(dir).arg(release))?;
        let modules = dir.join("lib/modules").join(release);
        for wanted in names {
            let tool_output =
                self.log
                    .run_and_read(Command::new(sbin("modprobe")).arg("-d").arg(dir).args([
                        "-S",
                        release,
                        "--show-depends",
                        wanted,
                    ]));
            // Ignore errors: the module may be built into the kernel. If it does not exist at all,
            // the case that needs it fails.
            let Ok(tool_output) = tool_output else {
                continue;
            };
            for line in tool_output.lines() {
                let Some(path) = line.strip_prefix("insmod ").map(str::trim) else {
                    continue;
                };
                let name = Path::new(path).strip_prefix(&modules)?;
                let to = format!("usr/lib/modules/{release}/{}", name.display());
                let plain = to.trim_end_matches(".xz");
                if self.root.join(plain).exists() {
                    continue;
                }
                self.copy(Path::new(path), &to)?;
                if to != plain {
                    self.log
                        .run(Command::new("xz").arg("-d").arg(self.root.join(&to)))?;
                }
            }
        }
        for index in [
            "modules.order",
            "modules.builtin",
            "modules.builtin.modinfo",
        ] {
            self.copy(
                &modules.join(index),
                &format!("usr/lib/modules/{release}/{index}"),
            )?;
        }
        self.log.run(
            Command::new(sbin("depmod"))
                .arg("-b")
                .arg(self.root)
                .arg(release),
        )
    }

    /// Copies `init`, and builds the agent that runs commands.
    fn init_and_agent(&mut self, source: &Path, cache: &Path) -> Result<()> {
        self.executable(&source.join("init"), "init")?;
        self.compile("agent", source, cache, &["-static"])
    }

    /// Copies siw to a directory in which modprobe does not find it.
    fn siw_modules(&self, modules: &[(&str, PathBuf)]) -> Result<()> {
        for (name, module) in modules {
            self.copy(module, &format!("usr/lib/siw/{name}.ko"))?;
        }
        Ok(())
    }

    /// Copies the scripts of the siw suite, and builds `peer`.
    fn siw_files(&mut self, source: &Path, cache: &Path) -> Result<()> {
        self.scripts(source, &["siw-load", "iser-disk", "iser-target"])?;
        self.compile("peer", source, cache, &["-lrdmacm", "-libverbs"])
    }

    fn scripts(&self, source: &Path, names: &[&str]) -> Result<()> {
        for name in names {
            self.executable(&source.join(name), &format!("usr/bin/{name}"))?;
        }
        Ok(())
    }

    fn compile(
        &mut self,
        program: &str,
        source: &Path,
        cache: &Path,
        flags: &[&str],
    ) -> Result<()> {
        let binary = cache.join(program);
        self.log.run(
            Command::new("gcc")
                .args(["-O1", "-Wall", "-Werror", "-o"])
                .arg(&binary)
                .arg(source.join(format!("{program}.c")))
                .args(flags),
        )?;
        self.executable(&binary, &format!("usr/bin/{program}"))
    }

    /// Adds this program (stripped), which is the hostile peer, and the server that it attacks.
    fn hostile_peer(&mut self, root: &Path, cache: &Path) -> Result<()> {
        let small = cache.join("iwarp-conformance");
        let own = std::env::current_exe()?;
        self.log
            .run(Command::new("strip").arg("-o").arg(&small).arg(own))?;
        self.executable(&small, "usr/bin/iwarp-conformance")?;
        let flags = ["-lrdmacm", "-libverbs", "-lpthread"];
        self.compile(
            "granting",
            &root.join("conformance/src/attack"),
            cache,
            &flags,
        )
    }

    /// Copies Debian's programs and the libraries that they need.
    fn user_space(&mut self, programs: &[&str]) -> Result<()> {
        let dirs = ["usr/bin", "usr/sbin", "bin", "sbin"];
        let mut queue = VecDeque::new();
        for name in programs {
            let found = dirs
                .iter()
                .map(|dir| self.programs.join(dir).join(name))
                .find(|path| path.exists());
            let found = found
                .with_context(|| format!("no unpacked package contains the program {name}"))?;
            let to = format!("usr/bin/{name}");
            // Remove busybox's link of the same name first: the copy would follow it and overwrite
            // busybox.
            let _ = std::fs::remove_file(self.root.join(&to));
            self.executable(&found, &to)?;
            queue.push_back(found);
        }
        for own in ["peer", "iwarp-conformance"] {
            let own = self.root.join("usr/bin").join(own);
            if own.exists() {
                queue.push_back(own);
            }
        }
        for config_files in ["etc/iscsi/iscsid.conf", "etc/mke2fs.conf"] {
            self.copy(&self.programs.join(config_files), config_files)?;
        }
        std::fs::write(
            self.root.join("etc/iscsi/initiatorname.iscsi"),
            format!("InitiatorName={}\n", GUEST_NAME),
        )?;
        let provider = find(self.programs, |name| name.starts_with("libsiw-rdmav"))
            .context("no unpacked package contains rdma-core's provider for siw")?;
        let name = provider
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        self.copy(&provider, &format!("{LIBRARIES}/libibverbs/{name}"))?;
        self.copy(
            &self.programs.join("etc/libibverbs.d/siw.driver"),
            "etc/libibverbs.d/siw.driver",
        )?;
        queue.push_back(provider);

        // glibc loads libgcc_s at run time when a thread exits, so no program lists it as needed.
        let unwinder = find(self.programs, |name| name == "libgcc_s.so.1")
            .context("no unpacked package contains libgcc_s.so.1")?;
        self.executable(&unwinder, &format!("{LIBRARIES}/libgcc_s.so.1"))?;

        self.libraries(queue)?;
        // Programs refer to the dynamic loader by this path.
        let loader = "ld-linux-x86-64.so.2";
        let library = find(self.programs, |file| file == loader)
            .context("no unpacked package contains the dynamic loader")?;
        self.executable(&library, &format!("usr/lib64/{loader}"))
    }

    /// Copies the libraries that the files need, recursively.
    pub(crate) fn libraries(&mut self, mut queue: VecDeque<PathBuf>) -> Result<()> {
        let mut seen = BTreeSet::new();
        while let Some(file) = queue.pop_front() {
            let tool_output = self
                .log
                .run_and_read(Command::new("readelf").arg("-dW").arg(&file))?;
            for name in needed(&tool_output) {
                if !seen.insert(name.to_owned()) {
                    continue;
                }
                // Some library links are created only at installation, so search for the versioned
                // file, too.
                let library = find(self.programs, |file| file == name)
                    .or_else(|| find(self.programs, |file| is_version_of(file, name)))
                    .with_context(|| format!("no unpacked package contains the library {name}"))?;
                self.executable(&library, &format!("{LIBRARIES}/{name}"))?;
                queue.push_back(library);
            }
        }
        Ok(())
    }
}

/// The directory in which Debian's dynamic loader searches libraries.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

/// Finds a file below `dir` by its name. Ignores dangling links.
pub(crate) fn find(dir: &Path, matches: impl Fn(&str) -> bool + Copy) -> Option<PathBuf> {
    let mut subdirs = Vec::new();
    for entry in std::fs::read_dir(dir).ok()?.flatten() {
        let path = entry.path();
        if entry.file_type().ok()?.is_dir() {
            subdirs.push(path);
        } else if matches(&entry.file_name().to_string_lossy()) && path.exists() {
            return Some(path);
        }
    }
    subdirs.iter().find_map(|dir| find(dir, matches))
}

/// Returns `true` if `file` is a version of `library`, as `libx.so.1.16` is of `libx.so.1`.
fn is_version_of(file: &str, library: &str) -> bool {
    file.strip_prefix(library)
        .is_some_and(|rest| rest.starts_with('.'))
}

/// Returns the libraries that `readelf -d` lists as needed.
fn needed(tool_output: &str) -> impl Iterator<Item = &str> {
    tool_output
        .lines()
        .filter(|line| line.contains("(NEEDED)"))
        .filter_map(|line| Some(line.split_once('[')?.1.split_once(']')?.0))
}

/// Returns the path of a program that may be in `/usr/sbin`, which may be missing from `PATH`.
pub(crate) fn sbin(name: &str) -> PathBuf {
    find_program(name).unwrap_or_else(|| Path::new("/usr/sbin").join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_versions_are_recognized() {
        assert!(is_version_of("libx.so.1.16", "libx.so.1"));
        assert!(!is_version_of("libx.so.12", "libx.so.1"));
        assert!(!is_version_of("libx.so.1", "libx.so.1"));
    }

    #[test]
    fn needed_libraries_are_read() {
        let tool_output = " 0x1 (NEEDED)   Shared library: [libc.so.6]\n\
                      0xe (SONAME) Library soname: [libx.so.1]\n";
        assert_eq!(needed(tool_output).collect::<Vec<_>>(), ["libc.so.6"]);
    }
}
