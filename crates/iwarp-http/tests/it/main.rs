//! hyper, tonic and tower over iwarp's streams and channels. These tests are one program in a crate
//! of its own, so that the tests of `iwarp` compile none of them.

mod common;
mod examples;
mod grpc;
mod http1;
mod http2;
mod layers;
