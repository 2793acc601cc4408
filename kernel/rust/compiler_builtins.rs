//! An empty replacement for the compiler's runtime library, which kernel modules do not use.
//!
//! The kernel provides the memory functions that the compiler calls by name (`memcpy` and the
//! like), patched for the processor. If generated code needs anything else from the library, that
//! is an undefined symbol, and the step `kernel` of `cargo xtask test` fails.
#![feature(compiler_builtins)]
#![compiler_builtins]
#![no_builtins]
#![no_std]
#![allow(internal_features)]
