//! libFuzzer's entry to [`iwarp_fuzz::targets::tags`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| iwarp_fuzz::targets::tags(data));
