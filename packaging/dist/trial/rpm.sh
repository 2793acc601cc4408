# Run as root, except for `use`. $2 is an RPM package. Debian's rpm does not know the packages of
# the root, so it cannot check what the package depends on; it prints that instead.
set -eux
. /tmp/common.sh
# Debian's rpm has no list of packages of its own, and would create one in the home directory.
rpm() {
    command rpm --dbpath /tmp/rpm "$@"
}
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
    ;;
esac
