//! The kernel that a guest boots for our module: one of Debian's as it is, or one from Debian's
//! source that looks for faults.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use xtask::context::Context;
use xtask::kernel::module::{self, CLIENT, DEVICE};
use xtask::kernel::{self, Kind, debug};
use xtask::process::Log;

use super::suite;
use crate::complaints;
use crate::guest::debian::{Kernel, NEWER, OLDER};
use crate::guest::image::{self, Image};
use crate::guest::kernel_files::KernelFiles;
use crate::guest::{Guest, Machine};

/// The kernel, and how it is booted.
#[derive(Args)]
pub(crate) struct Boot {
    /// Debian's kernel 6.12, its older one, or one from its source that looks for faults (see
    /// `debug-kernel`)
    #[arg(long, value_enum, default_value_t = Flavour::Debian)]
    kernel: Flavour,
    /// When the kernel lets another thread run: none, voluntary or full
    #[arg(long, value_name = "MODEL")]
    preempt: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Flavour {
    /// As the distribution ships it.
    Debian,
    /// That of Debian 12.
    #[value(name = "6.1")]
    Older,
    /// With sanitizers and checks of locks, which make it several times slower.
    Debug,
}

/// What a guest with our module is made from.
pub(crate) struct Parts {
    /// The kernel.
    pub(crate) kernel: KernelFiles,
    /// The engine's object for it.
    pub(crate) object: PathBuf,
    /// The folder for what is made for this kernel.
    pub(crate) dir: PathBuf,
    /// The folder of the guest's programs, which are the same for all kernels.
    pub(crate) programs: PathBuf,
}

impl Boot {
    /// Builds the engine and fetches or builds the kernel. The inner error says why that cannot be
    /// done here.
    ///
    /// # Errors
    /// When something does not build, or packages cannot be fetched.
    pub(crate) fn parts(&self, context: &Context, log: &mut Log) -> Result<Result<Parts, String>> {
        log.say("building the engine");
        let kind = match self.kernel {
            Flavour::Debian | Flavour::Older => Kind::Plain,
            Flavour::Debug => Kind::Checked,
        };
        let object = match kernel::build(context, kind, log)? {
            kernel::Built::Object(object) => object.canonicalize()?,
            kernel::Built::Missing(why) => return Ok(Err(why)),
        };
        let cache = context.target.join("interop");
        std::fs::create_dir_all(&cache)?;
        // The kernel's build needs absolute paths.
        let cache = cache.canonicalize()?;
        let (kernel, dir) = match self.kernel {
            Flavour::Debian => (shipped(NEWER, &cache, log)?, cache.clone()),
            Flavour::Older => {
                let dir = cache.join("older");
                (shipped(OLDER, &dir, log)?, dir)
            }
            Flavour::Debug => (
                debug::build(context, log)?.into(),
                cache.join("debug-kernel"),
            ),
        };
        std::fs::create_dir_all(&dir)?;
        Ok(Ok(Parts {
            kernel,
            object,
            programs: cache.join("programs"),
            dir,
        }))
    }

    /// The machine that boots it.
    pub(crate) fn machine(&self) -> Machine {
        Machine {
            tap: false,
            cable: None,
            disk: None,
            record: false,
            // Without these two the kernel copies by `rep movsb`, which the emulator carries out
            // octet by octet.
            cpu: "max,-erms,-fsrm",
            // With the mitigations: what they patch is in the module too.
            arguments: self
                .preempt
                .as_ref()
                .map(|model| format!("preempt={model}"))
                .unwrap_or_default(),
        }
    }

    /// Seconds for what takes `seconds` on Debian's kernel.
    pub(crate) fn limit(&self, seconds: u64) -> u64 {
        match self.kernel {
            Flavour::Debian | Flavour::Older => seconds,
            Flavour::Debug => 8 * seconds,
        }
    }

    /// Whether this kernel looks for faults.
    pub(crate) fn is_debug(&self) -> bool {
        self.kernel == Flavour::Debug
    }

    /// Whether the guest has the modules of [`omitted::STORAGE`](crate::guest::omitted::STORAGE).
    pub(crate) fn rebuilds(&self) -> bool {
        self.kernel == Flavour::Debian
    }

    /// Forgets memory that nobody knows of since the boot, which is no matter of ours.
    ///
    /// # Errors
    /// When the kernel cannot look.
    pub(crate) fn forget_leaks(&self, guest: &Guest) -> Result<()> {
        if self.is_debug() {
            guest.must(
                &format!(
                    "mount -t debugfs debugfs /sys/kernel/debug; {SCAN}; echo clear > {LEAKS}"
                ),
                SCAN_LIMIT,
            )?;
        }
        Ok(())
    }

    /// Lets the kernel look for memory that nobody knows of any more.
    ///
    /// # Errors
    /// When there is some.
    pub(crate) fn look_for_leaks(&self, guest: &Guest, log: &mut Log) -> Result<()> {
        if !self.is_debug() {
            return Ok(());
        }
        // What has become free a moment ago is named by the second look only.
        let found = guest.must(&format!("{SCAN}; sleep 6; {SCAN}; cat {LEAKS}"), SCAN_LIMIT)?;
        log.line(&found);
        if !found.trim().is_empty() {
            bail!(
                "memory is lost: {}",
                found.lines().next().unwrap_or_default()
            );
        }
        match complaints::first(&guest.kernel_messages()) {
            Some(line) => bail!("the guest's kernel: {line}"),
            None => Ok(()),
        }
    }
}

/// The guest's files, with what storage needs if that is wanted, or why they cannot be made here.
///
/// # Errors
/// When something does not build.
pub(super) fn prepare(
    context: &Context,
    boot: &Boot,
    storage: bool,
    log: &mut Log,
) -> Result<Result<(Image, PathBuf), String>> {
    let Parts {
        kernel,
        object,
        dir,
        programs,
    } = match boot.parts(context, log)? {
        Ok(parts) => parts,
        Err(why) => return Ok(Err(why)),
    };
    log.say(format!("building the module for {}", kernel.name));
    let mut modules = Vec::new();
    for (module, folder) in [(DEVICE, "device"), (CLIENT, "client")] {
        let (headers, folder) = (&kernel.headers, dir.join(folder));
        modules.push(module::build(
            context, module, &object, headers, &folder, log,
        )?);
    }
    log.say("building the file system");
    let image = image::device(
        context,
        &dir,
        &programs,
        &kernel,
        &modules,
        storage,
        suite::add,
        log,
    )?;
    Ok(Ok((image, dir)))
}

/// A kernel as Debian ships it, below `cache`.
fn shipped(series: &'static str, cache: &Path, log: &mut Log) -> Result<KernelFiles> {
    log.say("fetching Debian's kernel");
    let dir = cache.join("kernel");
    std::fs::create_dir_all(&dir)?;
    let kernel = Kernel::newest(series, log)?;
    kernel.fetch(&dir, log)?;
    kernel.fetch_source(&dir, log)?;
    Ok(kernel.files(&dir))
}

/// Where the kernel names what it has found.
const LEAKS: &str = "/sys/kernel/debug/kmemleak";
const SCAN: &str = "echo scan > /sys/kernel/debug/kmemleak";
/// Seconds for two scans of the guest's memory.
const SCAN_LIMIT: u64 = 600;
