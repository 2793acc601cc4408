//! Registered memory: the STag table (RFC 5040 section 2, RFC 5041 section 7, RFC 5042 section 6).
//!
//! An STag is a 24-bit index and an 8-bit key. All bits except four are random, so a peer that was
//! not given an STag has to guess it, and a wrong guess ends its stream.
//!
//! An entry refers to [`Memory`] supplied by the environment (`span`): one address range in a
//! process (`host`), or pages in a kernel (`pages`).
//!
//! Other threads, the peer and the kernel change registered memory at any time. To keep this from
//! being undefined behaviour,
//! * no Rust reference to it is ever formed;
//! * it is copied by `memcpy` called from assembly, which is opaque to the compiler (`copy`). An
//!   environment whose programs may unmap memory supplies copy functions that can fail
//!   ([`Memory::copy_out`]);
//! * its CRC is computed by a function of the environment that reads it in the same way
//!   ([`SharedCrc32cFn`]). Without such a function, up to [`SUM_PART`](crate::limits::SUM_PART)
//!   bytes at a time are copied to private memory and summed there;
//! * the last octet of a Write and the words of atomic operations are stored by atomic
//!   instructions.
//!
//! The program that shares the memory with the RNIC must follow similar rules: it reads the memory
//! by volatile or atomic accesses, or after a completion.
//!
//! Regions, fast-registration regions and windows share one table. Accesses, fast registrations and
//! invalidations take `&self`, so queue pairs do not block each other; the atomics in `state`
//! synchronize them. An invalidation revokes an STag immediately, and completes when the last
//! user of the memory is gone.
//!
//! Files: `slots` (storage of entries), `table` (registration), `entry` and `state` (one STag),
//! `access` (checks, users, invalidation), `window`, `sum` (CRCs), `on_demand` (copies by STag, and
//! memory whose pages may be missing).

mod access;
mod copy;
mod entry;
mod host;
mod on_demand;
pub(crate) mod pages;
mod slots;
mod span;
mod state;
#[cfg(test)]
mod stress_tests;
mod sum;
mod table;
mod users;
mod window;

pub use access::{Accessor, Held};
pub use entry::RegionInfo;
pub use host::HostRange;
#[cfg(test)]
pub(crate) use host::unmapped;
pub use iwarp_proto::ddp::Stag;
pub use on_demand::{ExchangeFn, Pager, ReadFn, WriteFn};
pub use pages::{ListedPages, PagePlace, Pages};
pub use slots::{NewSlotsSize, Room};
pub use span::{Fragment, Fragments, Memory, Span, Word};
pub use sum::{CopyingCrc32cFn, Crc32c, SharedCrc32cFn};
pub use table::MemoryTable;
pub(crate) use users::Users;
pub use window::WindowType;

/// Why an access by STag was refused, in the order of the checks (RFC 5041 sections 5.2 and 7.1;
/// RFC 5040 section 4.8).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessError {
    /// The STag does not exist or was invalidated.
    InvalidStag,
    /// The STag belongs to another protection domain or queue pair.
    NotAssociated,
    /// A required right is missing.
    AccessDenied,
    /// The tagged offset and length wrap around 64 bits.
    ToWrap,
    /// The range is outside the region or window.
    BaseOrBounds,
    /// The range is inside the region, but the memory is not mapped or does not allow the access.
    NotMapped,
}

/// Why a registration, a bind or an invalidation was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryError {
    /// The table is full (ENOMEM).
    TableFull,
    /// The allocator has no memory for the table (ENOMEM).
    OutOfMemory,
    /// The rights contradict each other: remote writing needs `LOCAL_WRITE` (EINVAL).
    BadAccess,
    /// The STag does not exist or refers to another kind of object (EINVAL).
    NoSuchStag,
    /// The STag belongs to another protection domain (EINVAL).
    WrongProtectionDomain,
    /// The region does not allow windows, or not windows with these rights (EINVAL).
    NotBindable,
    /// The range is outside the region (EINVAL).
    OutOfRange,
    /// Windows are bound to the region (EBUSY).
    Busy,
    /// An access or a plan still uses the memory: try again later (EBUSY).
    InUse,
    /// The window or region must be invalidated before it is bound or registered again (EINVAL).
    StillValid,
    /// This kind of object cannot be invalidated (EINVAL).
    NotInvalidatable,
}

impl core::fmt::Display for MemoryError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::TableFull => {
                "the device has the maximum number of memory regions: deregister some"
            }
            Self::OutOfMemory => "out of memory for the region table",
            Self::BadAccess => "remote write and remote atomic access need local write access",
            Self::NoSuchStag => "the key does not exist or belongs to another kind of object",
            Self::WrongProtectionDomain => "the key belongs to another protection domain",
            Self::NotBindable => "the region was not registered for windows with these rights",
            Self::OutOfRange => "the range is not inside the region",
            Self::Busy => "memory windows are bound to the region: unbind them first",
            Self::InUse => "the memory is being read or written: try again",
            Self::StillValid => {
                "the key is still valid: invalidate it before binding or registering it again"
            }
            Self::NotInvalidatable => "this kind of region cannot be invalidated",
        })
    }
}

impl core::error::Error for MemoryError {}
