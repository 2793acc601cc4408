#!/bin/sh
# cargo starts what it has built through this script (see .cargo/config.toml). It passes test
# programs to `watch-tests`, which ends those that hang, if that program has been built: cargo
# builds it for the tests of xtask, which are part of `cargo test --workspace`.
case "$1" in
*/deps/*)
    profile=${1%/deps/*}
    for watch in "$profile/watch-tests" "${profile%/*}/debug/watch-tests"; do
        if [ -x "$watch" ]; then
            exec "$watch" "$@"
        fi
    done
    ;;
esac
exec "$@"
