//! The files of a kernel that a guest boots, and that modules for it are built from.

use std::path::PathBuf;

use xtask::kernel::debug::DebugKernel;

/// Where everything of one kernel is.
pub(crate) struct KernelFiles {
    /// What `uname -r` prints in the guest.
    pub(crate) name: String,
    /// What is booted.
    pub(crate) image: PathBuf,
    /// What modules are built against.
    pub(crate) headers: PathBuf,
    /// The folder with `lib/modules`.
    pub(crate) modules: PathBuf,
    /// The source, or as much of it as modules are built from.
    pub(crate) source: PathBuf,
    /// Whether [`STORAGE`](super::omitted::STORAGE) can be built for it.
    pub(crate) storage: bool,
}

impl From<DebugKernel> for KernelFiles {
    fn from(kernel: DebugKernel) -> Self {
        Self {
            name: kernel.name,
            image: kernel.image,
            modules: kernel.modules,
            headers: kernel.source.clone(),
            source: kernel.source,
            // What is built for Debian's kernel is enough of these.
            storage: false,
        }
    }
}
