//! libFuzzer's entry to [`iwarp_fuzz_host::measure::message`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| iwarp_fuzz_host::measure::message(data));
