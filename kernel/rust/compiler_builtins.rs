//! Stands in for the compiler's runtime library, which a kernel module does without.
//!
//! The memory functions that the compiler calls by name (`memcpy` and the like) are the kernel's
//! own, which are patched for the processor. Anything else that generated code would need from the
//! library is then an undefined symbol, which the step `kernel` of `cargo xtask test` refuses.
#![feature(compiler_builtins)]
#![compiler_builtins]
#![no_builtins]
#![no_std]
#![allow(internal_features)]
