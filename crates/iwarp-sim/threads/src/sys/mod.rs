//! The operating system that the engine uses, simulated by [`world`](crate::world). Each module
//! replaces the module of the same name in `iwarp-os`.

pub(crate) mod clock;
pub(crate) mod eventfd;
pub(crate) mod poller;
#[path = "../../../../iwarp-os/src/prefetch.rs"]
pub(crate) mod prefetch;
pub(crate) mod thread;

/// Does nothing: the model has no registered memory.
pub(crate) mod guarded {
    pub(crate) const fn keep_installed() {}

    pub(crate) const fn keep_regularly(_now: u64) {}
}

/// The model does not fork.
pub(crate) mod fork {
    pub(crate) const fn generation() -> u32 {
        0
    }
}

/// The number of descriptors is not limited.
pub(crate) mod limits {
    pub(crate) struct OpenFiles {
        pub(crate) now: u64,
    }

    pub(crate) const fn raise_open_files() -> OpenFiles {
        OpenFiles { now: u64::MAX }
    }
}
