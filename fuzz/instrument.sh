#!/bin/sh
# Runs the compiler for `cargo xtask fuzz`, which names this file in RUSTC_WORKSPACE_WRAPPER: adds the flags in FUZZ_FLAGS for the crates
# under test. The engine must be without them, because its callbacks would call themselves, and build scripts and macros have no engine.
for word in "$@"; do
    case $word in
        iwarp_fuzz_engine | build_script_build | proc-macro | --print=* | -vV) exec "$@" ;;
    esac
done
# The flags are words without spaces.
# shellcheck disable=SC2086
exec "$@" $FUZZ_FLAGS
