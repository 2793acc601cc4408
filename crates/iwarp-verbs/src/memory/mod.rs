//! Registered memory: regions (`mr`, `mr_ex`, `dmabuf` with `mapping`), device memory, memory
//! windows (`mw`), and the check for huge pages (`huge`). This room uses `domain` and the rooms
//! below it.

pub(crate) mod device_memory;
pub(crate) mod dmabuf;
mod huge;
mod mapping;
pub(crate) mod mr;
pub(crate) mod mr_ex;
pub(crate) mod mw;
