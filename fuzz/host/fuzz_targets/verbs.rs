//! libFuzzer's entry to [`iwarp_verbs::fuzzing::verbs`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| iwarp_verbs::fuzzing::verbs(data));
