//! The files of a kernel: what a guest boots, and what modules are built from.

use std::path::PathBuf;

use xtask::kernel::debug::DebugKernel;

/// The paths of one kernel's files.
pub(crate) struct KernelFiles {
    /// The release, as `uname -r` prints it.
    pub(crate) name: String,
    /// The bootable image.
    pub(crate) image: PathBuf,
    /// The build directory (`/lib/modules/…/build`) against which modules are compiled.
    pub(crate) headers: PathBuf,
    /// The directory that contains `lib/modules`.
    pub(crate) modules: PathBuf,
    /// The source tree from which the directories of the modules are copied.
    pub(crate) source: PathBuf,
    /// `true` if the tests build [`STORAGE`](super::omitted::STORAGE) for this kernel.
    pub(crate) builds_storage: bool,
}

impl From<DebugKernel> for KernelFiles {
    fn from(kernel: DebugKernel) -> Self {
        Self {
            name: kernel.name,
            image: kernel.image,
            modules: kernel.modules,
            headers: kernel.source.clone(),
            source: kernel.source,
            // The storage modules are tested only with Debian's kernel.
            builds_storage: false,
        }
    }
}
