//! The software RNIC, without I/O.
#![no_std]
