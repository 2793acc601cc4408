//! Memory windows: remote rights to a part of a region, which end when the window is dropped.

use super::region::Region;
use super::remote::RemoteRegion;
use crate::verbs::MemoryWindow;

/// Rights of one connection's peer to a part of a region, from the bind until this value is
/// dropped. The region need not be shared. Created by
/// [`Connection::bind`](super::Connection::bind).
///
/// After the drop an access by the peer is an error that ends the connection. To avoid that, notify
/// the peer first, or let it invalidate the window by
/// [`send_with_invalidate`](super::Connection::send_with_invalidate).
#[derive(Debug)]
pub struct Window<T> {
    pub(super) bound: MemoryWindow,
    pub(super) token: RemoteRegion<T>,
    pub(super) region: Region<T>,
}

impl<T: bytemuck::Pod> Window<T> {
    /// Returns the token that the peer needs.
    pub const fn remote(&self) -> RemoteRegion<T> {
        self.token
    }

    /// Returns the region.
    pub const fn region(&self) -> &Region<T> {
        &self.region
    }

    /// Ends the window, and returns the region. The peer can no longer access it, so it can be
    /// [viewed](Region::view) in place.
    ///
    /// ```
    /// # use iwarp::{Access, Connection, Region};
    /// /// Lets the peer fill a region, and returns the sum of the elements.
    /// async fn filled(connection: &Connection, region: &Region<u64>) -> iwarp::Result<u64> {
    ///     let window = connection.bind(region, Access::REMOTE_WRITE).await?;
    ///     connection.send(&window.remote().to_bytes()).await?;
    ///     let answer = connection.recv().await?; // the peer sends it with the invalidation
    ///     assert!(window.is_invalidated_by(&answer));
    ///     let region = window.into_region();
    ///     Ok(region.view()?.iter().sum())
    /// }
    /// ```
    pub fn into_region(self) -> Region<T> {
        self.region
    }

    /// Returns `true` if the peer has invalidated the window with this message.
    pub fn is_invalidated_by(&self, message: &super::Message) -> bool {
        message.invalidated() == Some(self.bound.rkey())
    }
}
