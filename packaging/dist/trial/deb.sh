# Run as root, except for `use`. $2 is a Debian package. `cargo xtask deb --test` tries the service
# and the manual pages.
set -eux
. /tmp/common.sh
case $1 in
install) apt-get install --yes --no-install-recommends "$2" ;;
use)
    cd "$HOME"
    two_processes iwarp
    ;;
remove) apt-get purge --yes iwarp ;;
esac
