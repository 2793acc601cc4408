//! Registered memory: the STag table (RFC 5040 section 2, RFC 5041 section 7, RFC 5042 section 6).
//!
//! An STag is a 24-bit index and an 8-bit key. All bits except four are drawn at random, so a peer that was not told an STag has to
//! guess it, and a wrong guess ends its stream. The four bits and the lowest others of an index are the slot, so that a look-up is a few
//! loads and one comparison, and entries stay where they are when the table grows (`slots`).
//!
//! What an entry names is [`Memory`] of the surroundings (`span`): one range of addresses in a process (`host`),
//! pages in a kernel (`pages`).
//!
//! Other threads, the peer and the kernel change registered memory at any time. So that this is not undefined behaviour,
//! * no reference to it is ever formed;
//! * it is read and written by the machine's copy, into which the compiler does not look (`copy`), as a device would. Surroundings
//!   whose programs may unmap it bring copies of their own, which can fail ([`Memory::copy_out`]);
//! * it is summed by a function of the surroundings that reads it in the same way ([`SharedCrc32cFn`]); where they have none, up to
//!   [`SUM_PART`](crate::limits::SUM_PART) octets at a time are copied to memory of our own and summed there;
//! * the last octet of a Write and the words of atomic operations are stored by atomic instructions.
//!
//! The program that shares the memory with the RNIC has to read it in the same way: volatile, atomic, or after a completion.
//!
//! Regions, fast-registration regions and windows live in the same table. Accesses, fast registrations and invalidations take
//! `&self`, so that queue pairs do not wait for each other; `state` orders them. An invalidation ends an STag at once, and is
//! complete when nobody uses the memory any more.
//!
//! Files: `slots` (where entries are), `table` (registration), `entry` and `state` (one STag), `access` (every check, users, invalidation), `window`, `sum` (CRCs),
//! `on_demand` (copies by STag, and memory whose pages may be missing).

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
pub(crate) use host::gone;
pub use iwarp_proto::ddp::Stag;
pub use on_demand::{ExchangeFn, Pager, ReadFn, WriteFn};
pub use pages::{ListedPages, PagePlace, Pages};
pub use slots::{Room, RoomSize};
pub use span::{Fragment, Fragments, Memory, Span, Word};
pub use sum::{CopyingCrc32cFn, Crc32c, SharedCrc32cFn};
pub use table::MemoryTable;
pub(crate) use users::Users;
pub use window::WindowType;

/// Why an access by STag is refused, in the order of the checks
/// (RFC 5041 section 5.2 and 7.1; RFC 5040 section 4.8).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessError {
    /// No such STag, or it is invalidated.
    InvalidStag,
    /// The STag belongs to another protection domain or queue pair.
    NotAssociated,
    /// A right is missing.
    AccessDenied,
    /// The tagged offset and length wrap around 64 bits.
    ToWrap,
    /// Outside the region.
    BaseOrBounds,
    /// Inside the region, but the access has failed: no memory is mapped there any more, or the mapping does not allow it.
    NotMapped,
}

/// Why a registration, a bind or an invalidation is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryError {
    /// The table has its maximum of entries (ENOMEM).
    TableFull,
    /// No memory for the table (ENOMEM).
    OutOfMemory,
    /// The rights contradict each other: remote writing needs `LOCAL_WRITE` (EINVAL).
    BadAccess,
    /// No such STag, or of another kind (EINVAL).
    NoSuchStag,
    /// Another protection domain (EINVAL).
    WrongProtectionDomain,
    /// The region does not allow windows, or not these rights (EINVAL).
    NotBindable,
    /// The range is outside the region (EINVAL).
    OutOfRange,
    /// Windows are bound to it (EBUSY).
    Busy,
    /// An access to the memory, or a plan that names it, is not finished yet. Try again (EBUSY).
    InUse,
    /// A valid window or region cannot be bound or registered again before it is invalidated (EINVAL).
    StillValid,
    /// It may not be invalidated (EINVAL).
    NotInvalidatable,
}

impl core::fmt::Display for MemoryError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::TableFull => "the device has its most memory regions: deregister some",
            Self::OutOfMemory => "out of memory for the region table",
            Self::BadAccess => "remote write and remote atomic access need local write access",
            Self::NoSuchStag => "no such key, or it names another kind of object",
            Self::WrongProtectionDomain => "the key belongs to another protection domain",
            Self::NotBindable => "the region was not registered for windows with these rights",
            Self::OutOfRange => "the range is not inside the region",
            Self::Busy => "memory windows are bound to the region: unbind them first",
            Self::InUse => "the memory is being read or written: try again",
            Self::StillValid => "invalidate it before binding or registering it again",
            Self::NotInvalidatable => "this kind of region cannot be invalidated",
        })
    }
}

impl core::error::Error for MemoryError {}
