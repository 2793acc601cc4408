//! Results of operations: what is read from the answer or from the memory that a request kept.

#![allow(
    private_interfaces,
    reason = "the trait is sealed: programs name the types, but cannot call its functions"
)]

use super::handle::Inner;
use super::region::Region;
use super::remote::RemoteRegion;
use super::request::Local;
use super::router::SlotId;
use super::window::Window;
use crate::error::{Error, Result};
use bytemuck::Pod;

mod sealed {
    use super::{Inner, Local, Result, SlotId};

    /// Result of a successful operation.
    pub trait Yield {
        type Output;
        /// Whether the answer is placed in the slot's staging memory.
        const ANSWERS: bool = false;

        /// Reads the answer from the staging memory before the slot is freed.
        fn read(&mut self, _inner: &Inner, _id: SlotId) -> Result<()> {
            Ok(())
        }

        /// Builds the result from the answer and the memory that the request kept.
        fn finish(&mut self, local: &mut Local<'_>) -> Result<Self::Output>;
    }
}

pub(super) use sealed::Yield;

/// Output of an operation without a result.
#[derive(Debug)]
pub struct Done;

impl Yield for Done {
    type Output = ();

    fn finish(&mut self, _local: &mut Local<'_>) -> Result<()> {
        Ok(())
    }
}

/// Output of an operation that reads elements of a peer.
#[derive(Debug)]
pub struct Elements<T> {
    pub(super) out: Vec<T>,
}

impl<T: Pod> Yield for Elements<T> {
    type Output = Vec<T>;
    const ANSWERS: bool = true;

    #[inline]
    fn read(&mut self, inner: &Inner, id: SlotId) -> Result<()> {
        inner.read_staging(id, bytemuck::cast_slice_mut(&mut self.out))
    }

    fn finish(&mut self, _local: &mut Local<'_>) -> Result<Vec<T>> {
        Ok(std::mem::take(&mut self.out))
    }
}

/// Output of an operation that returns one element of a peer, or the old value of a word.
#[derive(Debug)]
pub struct Element<T> {
    pub(super) out: T,
}

impl<T: Pod> Yield for Element<T> {
    type Output = T;
    const ANSWERS: bool = true;

    fn read(&mut self, inner: &Inner, id: SlotId) -> Result<()> {
        inner.read_staging(id, bytemuck::bytes_of_mut(&mut self.out))
    }

    fn finish(&mut self, _local: &mut Local<'_>) -> Result<T> {
        Ok(self.out)
    }
}

/// Output of a bind.
#[derive(Debug)]
pub struct Bound<T> {
    pub(super) token: RemoteRegion<T>,
    pub(super) region: Region<T>,
}

impl<T: Pod> Yield for Bound<T> {
    type Output = Window<T>;

    fn finish(&mut self, local: &mut Local<'_>) -> Result<Window<T>> {
        let Local::Window(bound) = std::mem::replace(local, Local::None) else {
            return Err(Error::InvalidState("the window of a bind is gone"));
        };
        Ok(Window {
            bound,
            token: self.token,
            region: self.region.clone(),
        })
    }
}
