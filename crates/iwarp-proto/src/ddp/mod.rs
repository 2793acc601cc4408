//! Direct Data Placement: STags, untagged queues and the two segment headers. RFC 5041 §4 to §7,
//! with the RDMAP control octet that RFC 5040 §4.1 puts into the header's first ULP octet.

mod control;
mod header;
pub(crate) mod opcode;
mod stag;
mod view;

pub use control::{DDP_VERSION, RDMAP_VERSION, control_octets};
pub use header::{Header, HeaderError, TaggedHeader, UntaggedHeader, header_len};
use opcode::Opcode;
pub use stag::{QueueNumber, Stag};
pub use view::{TAGGED_HEADER_LEN, TaggedView, UNTAGGED_HEADER_LEN, UntaggedView};
