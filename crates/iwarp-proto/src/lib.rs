//! The iWARP wire: MPA, DDP and RDMAP.
#![no_std]
#![forbid(unsafe_code)]
