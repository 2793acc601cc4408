//! Direct Data Placement: STags, untagged queues and the two segment headers. RFC 5041 §4 to §7, with the RDMAP
//! control octet that RFC 5040 §4.1 puts in the header's first ULP octet.

mod header;
mod stag;
mod view;

pub use header::{Header, HeaderError, TaggedHeader, UntaggedHeader, control_octets, header_len};
pub use stag::{QueueNumber, Stag};
pub use view::{
    DDP_VERSION, RDMAP_VERSION, TAGGED_HEADER_LEN, TaggedView, UNTAGGED_HEADER_LEN, UntaggedView,
};
