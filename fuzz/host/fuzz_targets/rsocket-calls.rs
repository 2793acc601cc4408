//! libFuzzer's entry to [`iwarp_fuzz_host::sockets::calls`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| iwarp_fuzz_host::sockets::calls(data));
