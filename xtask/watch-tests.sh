#!/bin/sh
# cargo starts every program that it has built through this script (see .cargo/config.toml). It
# passes test programs to `watch-tests`, which kills them if they hang. That needs a built
# `watch-tests`: cargo builds it for the tests of xtask, and so for `cargo test --workspace`.
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
