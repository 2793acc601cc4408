//! The kernel that a guest boots: Debian's kernel, or one built from Debian's source with
//! sanitizers.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use xtask::context::Context;
use xtask::kernel::module::{self, CLIENT, DEVICE, Use};
use xtask::kernel::{self, Kind, debug};
use xtask::process::Log;

use crate::complaints;
use crate::guest::debian::{Kernel, NEWER, OLDER};
use crate::guest::image::{self, Image};
use crate::guest::kernel_files::KernelFiles;
use crate::guest::{Clock, Guest, Machine};

/// Options that select the kernel and its boot parameters.
#[derive(Args)]
pub(crate) struct Boot {
    /// Debian's kernel 6.12, the kernel 6.1 of Debian 12, or one built with sanitizers (see
    /// `debug-kernel`)
    #[arg(long, value_enum, default_value_t = Flavour::Debian)]
    kernel: Flavour,
    /// The kernel's preemption model: none, voluntary or full
    #[arg(long, value_name = "MODEL")]
    preempt: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Flavour {
    /// Debian's kernel 6.12.
    Debian,
    /// The kernel of Debian 12.
    #[value(name = "6.1")]
    Older,
    /// A kernel with sanitizers and lock checks, which is several times slower.
    Debug,
}

/// The files from which a guest with our module is built.
pub(crate) struct Parts {
    pub(crate) kernel: KernelFiles,
    /// The engine's object file for this kernel.
    pub(crate) object: PathBuf,
    /// The directory for files that are built for this kernel.
    pub(crate) dir: PathBuf,
    /// The directory of the guest's programs, which all kernels share.
    pub(crate) programs: PathBuf,
}

impl Boot {
    /// Builds the engine, and fetches or builds the kernel. The inner error is the reason if this
    /// machine cannot build the engine.
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
            Flavour::Debian => (fetch_debian_kernel(NEWER, &cache, log)?, cache.clone()),
            Flavour::Older => {
                let dir = cache.join("older");
                (fetch_debian_kernel(OLDER, &dir, log)?, dir)
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

    /// Returns the machine that boots the kernel.
    pub(crate) fn machine(&self) -> Machine {
        Machine {
            clock: Clock::Wall,
            tap: false,
            cable: None,
            disk: None,
            record: false,
            // Without `-erms,-fsrm`, the kernel copies with `rep movsb`, which the emulator
            // executes byte by byte.
            cpu: "max,-erms,-fsrm",
            // CPU mitigations stay enabled, because they also patch the module's code.
            arguments: self
                .preempt
                .as_ref()
                .map(|model| format!("preempt={model}"))
                .unwrap_or_default(),
        }
    }

    /// Converts a time limit for Debian's kernel, in seconds, to one for this kernel.
    pub(crate) fn limit(&self, seconds: u64) -> u64 {
        match self.kernel {
            Flavour::Debian | Flavour::Older => seconds,
            Flavour::Debug => 8 * seconds,
        }
    }

    /// Returns `true` for the kernel with sanitizers.
    pub(crate) fn is_debug(&self) -> bool {
        self.kernel == Flavour::Debug
    }

    /// Returns `true` if the guest contains the modules that Debian omits and we build
    /// ([`omitted::STORAGE`](crate::guest::omitted::STORAGE)).
    pub(crate) fn has_rebuilt_modules(&self) -> bool {
        self.kernel == Flavour::Debian
    }

    /// Clears kmemleak's list of leaks from the boot.
    pub(crate) fn forget_leaks(&self, guest: &Guest) -> Result<()> {
        if self.is_debug() {
            guest.run_checked(
                &format!(
                    "mount -t debugfs debugfs /sys/kernel/debug; {SCAN}; echo clear > {LEAKS}"
                ),
                SCAN_LIMIT,
            )?;
        }
        Ok(())
    }

    /// Fails if kmemleak has found leaked memory.
    pub(crate) fn check_leaks(&self, guest: &Guest, log: &mut Log) -> Result<()> {
        if !self.is_debug() {
            return Ok(());
        }
        // kmemleak reports recently allocated blocks in a later scan only.
        let found =
            guest.run_checked(&format!("{SCAN}; sleep 6; {SCAN}; cat {LEAKS}"), SCAN_LIMIT)?;
        log.line(&found);
        if !found.trim().is_empty() {
            bail!(
                "kmemleak found leaked memory: {}",
                found.lines().next().unwrap_or_default()
            );
        }
        match complaints::first(&guest.kernel_messages()) {
            Some(line) => bail!("the guest's kernel: {line}"),
            None => Ok(()),
        }
    }
}

/// Builds the guest's image, optionally with the storage tools. The inner error is the reason if
/// this machine cannot build it.
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
    for (module, dir_name) in [(DEVICE, "device"), (CLIENT, "client")] {
        let (headers, dir_name) = (&kernel.headers, dir.join(dir_name));
        modules.push(module::build(
            context,
            (module, Use::Tests),
            &object,
            headers,
            &dir_name,
            log,
        )?);
    }
    log.say("building the file system");
    let image = image::device(context, &dir, &programs, &kernel, &modules, storage, log)?;
    Ok(Ok((image, dir)))
}

/// Fetches a kernel of Debian and its source into `cache`.
fn fetch_debian_kernel(series: &'static str, cache: &Path, log: &mut Log) -> Result<KernelFiles> {
    log.say("fetching Debian's kernel");
    let dir = cache.join("kernel");
    std::fs::create_dir_all(&dir)?;
    let kernel = Kernel::newest(series, log)?;
    kernel.fetch(&dir, log)?;
    kernel.fetch_source(&dir, log)?;
    Ok(kernel.files(&dir))
}

/// kmemleak's report.
const LEAKS: &str = "/sys/kernel/debug/kmemleak";
const SCAN: &str = "echo scan > /sys/kernel/debug/kmemleak";
/// Time limit for two scans of the guest's memory, in seconds.
const SCAN_LIMIT: u64 = 600;
