//! Protection domains, thread domains and parent domains (`pd`), XRC domains (`xrcd`), and address
//! handles (`ah`). This room uses `device` and the rooms below it.

pub(crate) mod ah;
pub(crate) mod pd;
pub(crate) mod xrcd;
