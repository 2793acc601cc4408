//! What other objects belong to: protection domains and their relatives (`pd`), address handles
//! (`ah`), XRC domains (`xrcd`). This room uses `device` and the rooms below it.

pub(crate) mod ah;
pub(crate) mod pd;
pub(crate) mod xrcd;
