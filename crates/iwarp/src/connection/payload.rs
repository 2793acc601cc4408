//! The data of a Send or Write, before it belongs to a request.

use super::channel_wait::ChannelMessage;
use super::handle::Connection;
use super::owned::Owned;
use super::receive::Message;
use super::region::Region;
use crate::error::Error;
use crate::failure::Refusal;
use bytemuck::Pod;

/// The data of a Send or Write. These types convert to it:
///
/// - References to slices, arrays, vectors, boxed slices, strings, received messages, and with the
///   feature `bytes` also `Bytes`: the data is copied when the request is posted, so its length is
///   limited to [`Options::message_size`](super::Options::message_size).
/// - Values: vectors, boxed slices, strings, and with the feature `bytes` also `Bytes`. The
///   operation owns the data, so it can be moved to another task. Short data is copied when the
///   request is posted; longer data is registered and sent from where it is.
/// - Regions, which are not copied.
#[derive(Debug)]
pub struct Payload<'a, T>(pub(super) Carried<'a, T>);

#[derive(Debug)]
pub(super) enum Carried<'a, T> {
    Copied(&'a [T]),
    Owned(Owned),
    Region(Region<T>),
}

impl<T: Pod + Send> From<Vec<T>> for Payload<'_, T> {
    fn from(elements: Vec<T>) -> Self {
        Self(Carried::Owned(Owned::new(elements)))
    }
}

impl<T: Pod + Send> From<Box<[T]>> for Payload<'_, T> {
    fn from(elements: Box<[T]>) -> Self {
        Self::from(elements.into_vec())
    }
}

impl From<String> for Payload<'_, u8> {
    fn from(text: String) -> Self {
        Self::from(text.into_bytes())
    }
}

#[cfg(feature = "bytes")]
impl From<bytes::Bytes> for Payload<'_, u8> {
    fn from(bytes: bytes::Bytes) -> Self {
        Self(Carried::Owned(Owned::Bytes(bytes)))
    }
}

impl<'a, T> From<&'a [T]> for Payload<'a, T> {
    fn from(elements: &'a [T]) -> Self {
        Self(Carried::Copied(elements))
    }
}

impl<'a, T> From<&'a Vec<T>> for Payload<'a, T> {
    fn from(elements: &'a Vec<T>) -> Self {
        Self(Carried::Copied(elements))
    }
}

impl<'a, T, const N: usize> From<&'a [T; N]> for Payload<'a, T> {
    fn from(elements: &'a [T; N]) -> Self {
        Self(Carried::Copied(elements))
    }
}

impl<'a, T> From<&'a Box<[T]>> for Payload<'a, T> {
    fn from(elements: &'a Box<[T]>) -> Self {
        Self(Carried::Copied(elements))
    }
}

/// Sends a received message on, for example back to its sender.
impl<'a> From<&'a Message> for Payload<'a, u8> {
    fn from(message: &'a Message) -> Self {
        Self(Carried::Copied(message))
    }
}

/// Sends a received message on, for example back to its sender.
impl<'a> From<&'a ChannelMessage> for Payload<'a, u8> {
    fn from(message: &'a ChannelMessage) -> Self {
        Self(Carried::Copied(message))
    }
}

#[cfg(feature = "bytes")]
impl<'a> From<&'a bytes::Bytes> for Payload<'a, u8> {
    fn from(bytes: &'a bytes::Bytes) -> Self {
        Self(Carried::Copied(bytes))
    }
}

impl<'a> From<&'a str> for Payload<'a, u8> {
    fn from(text: &'a str) -> Self {
        Self(Carried::Copied(text.as_bytes()))
    }
}

impl<'a> From<&'a String> for Payload<'a, u8> {
    fn from(text: &'a String) -> Self {
        Self(Carried::Copied(text.as_bytes()))
    }
}

impl<T> From<Region<T>> for Payload<'_, T> {
    fn from(region: Region<T>) -> Self {
        Self(Carried::Region(region))
    }
}

impl<T> From<&Region<T>> for Payload<'_, T> {
    fn from(region: &Region<T>) -> Self {
        Self(Carried::Region(region.clone()))
    }
}

impl<T: Pod> Payload<'_, T> {
    #[inline]
    pub(super) fn octets(&self) -> u64 {
        match &self.0 {
            Carried::Copied(elements) => size_of_val(*elements) as u64,
            Carried::Owned(owned) => owned.octets().len() as u64,
            Carried::Region(region) => region.octets() as u64,
        }
    }

    #[inline]
    pub(super) fn check(&self, connection: &Connection) -> Checked {
        let inner = &connection.inner;
        match &self.0 {
            Carried::Copied(elements) => inner.check_copied(size_of_val(*elements) as u64),
            Carried::Owned(_) => Ok(()),
            Carried::Region(region) => inner.check_own(region),
        }
    }
}

/// Whether a request can be posted. Boxed, so that success costs nothing.
pub(super) type Checked = Result<(), Box<Error>>;

#[cold]
pub(super) fn refused<T>(refusal: Refusal) -> Result<T, Box<Error>> {
    Err(Box::new(Error::Refused(refusal)))
}
