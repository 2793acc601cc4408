# Run as an ordinary user: one file is enough. $2 is a bundle. $3, if given, is a program that is
# linked with musl.
set -eux
. /tmp/common.sh
cd "$HOME"
case $1 in
install)
    mkdir bin
    cp "$2" bin/iwarp
    ;;
use)
    two_processes bin/iwarp
    if [ -n "${3:-}" ]; then
        bin/iwarp run -- "$3" 2>&1 | grep 'linked with musl, and the libraries need glibc'
    fi
    ;;
remove)
    rm -r bin
    ;;
esac
