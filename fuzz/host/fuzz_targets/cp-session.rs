//! libFuzzer's entry to [`iwarp_cp::fuzzing::session`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| iwarp_cp::fuzzing::session(data));
