# Run as root, except for `use`. $2 is an RPM package. Debian's rpm does not know the packages of
# the root, so it cannot check what the package depends on; it prints that instead.
set -eux
. /tmp/common.sh
case $1 in
install)
    rpm --query --package --requires "$2"
    rpm --install --nodeps "$2"
    rpm --verify --nodeps iwarp
    ;;
use)
    cd "$HOME"
    two_processes iwarp
    ;;
remove)
    rpm --erase iwarp
    # The list of packages, which is empty again.
    find /var/lib/rpm -mindepth 1 -delete
    ;;
esac
