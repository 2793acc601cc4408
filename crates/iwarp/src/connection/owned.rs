//! Payloads that an operation owns: vectors, boxed slices, and `Bytes`.
//!
//! A short payload is copied when its request is posted. A long one is registered where it is, and
//! freed when the request has completed.

use crate::verbs::{Elements, Pages};
use bytemuck::Pod;

/// The bytes of a payload by value.
#[derive(Debug)]
pub(super) enum Owned {
    Elements(Elements),
    #[cfg(feature = "bytes")]
    Bytes(bytes::Bytes),
}

impl Owned {
    pub(super) fn new<T: Pod + Send>(elements: Vec<T>) -> Self {
        Self::Elements(Elements::new(elements))
    }

    pub(super) fn octets(&self) -> &[u8] {
        match self {
            Self::Elements(elements) => elements.octets(),
            #[cfg(feature = "bytes")]
            Self::Bytes(bytes) => bytes,
        }
    }

    /// Returns the memory, to register it.
    pub(super) fn into_pages(self) -> Pages {
        match self {
            Self::Elements(elements) => Pages::Elements(elements),
            #[cfg(feature = "bytes")]
            Self::Bytes(bytes) => Pages::Bytes(bytes),
        }
    }
}
