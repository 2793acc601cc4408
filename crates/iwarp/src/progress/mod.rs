//! Who drives a stream and when, and who waits for what: the small lock-free protocols on which no wake-up may be lost.
//!
//! Every protocol here is checked by `loom` over all interleavings of two or three threads, next to a deliberately broken
//! variant that the model must catch. Run the models with
//! `RUSTFLAGS="--cfg loom" cargo test -p iwarp --lib --release loom_`.

pub(crate) mod answers;
pub(crate) mod baton;
pub(crate) mod busy_poll;
pub(crate) mod in_vain;
pub(crate) mod lease;
pub(crate) mod parker;
pub(crate) mod slots;
pub(crate) mod sync;
pub(crate) mod wakers;
