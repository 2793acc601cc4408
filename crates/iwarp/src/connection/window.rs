//! Memory windows: remote rights to a part of a region, that end with their guard.

use super::region::Region;
use super::remote::RemoteRegion;
use crate::verbs::MemoryWindow;

/// Rights of the peer of one connection to a part of a region, from the bind until the guard is dropped. The region itself need
/// not be shared. Made by [`Connection::bind`](super::Connection::bind).
///
/// When the drop returns, the peer's rights are over: an access after that ends the connection, for the peer with an error. To end
/// them without a risk, tell the peer first, or let the peer do it by
/// [`send_with_invalidate`](super::Connection::send_with_invalidate).
#[derive(Debug)]
pub struct Window<T> {
    pub(super) bound: MemoryWindow,
    pub(super) token: RemoteRegion<T>,
    pub(super) region: Region<T>,
}

impl<T: bytemuck::Pod> Window<T> {
    /// Returns what the peer has to know to use it.
    pub const fn remote(&self) -> RemoteRegion<T> {
        self.token
    }

    /// Returns the memory behind it.
    pub const fn region(&self) -> &Region<T> {
        &self.region
    }

    /// Returns `true` if this message has invalidated it: the peer has given its rights back.
    pub fn is_invalidated_by(&self, message: &super::Message) -> bool {
        message.invalidated() == Some(self.bound.rkey())
    }
}
