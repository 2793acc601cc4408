//! libFuzzer's entry to [`iwarp_fuzz::targets::matching`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| iwarp_fuzz::targets::matching(data));
