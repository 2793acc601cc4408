//! The operating system as the engine sees it, implemented by the [`world`](crate::world). Each
//! module replaces the module of the same name in the runtime.

pub(crate) mod clock;
pub(crate) mod eventfd;
pub(crate) mod poller;
#[path = "../../../../iwarp-os/src/prefetch.rs"]
pub(crate) mod prefetch;
pub(crate) mod thread;

/// No memory is accessed here.
pub(crate) mod guarded {
    pub(crate) const fn keep() {}

    pub(crate) const fn keep_regularly(_now: u64) {}
}

/// No process forks here.
pub(crate) mod fork {
    pub(crate) const fn generation() -> u32 {
        0
    }
}

/// Descriptors are numbers of the world.
pub(crate) mod limits {
    pub(crate) struct OpenFiles {
        pub(crate) now: u64,
    }

    pub(crate) const fn raise_open_files() -> OpenFiles {
        OpenFiles { now: u64::MAX }
    }
}
