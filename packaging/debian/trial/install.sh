# Run as root in a fresh Debian root: installs the package and checks the service without starting
# it.
set -eux
ls /usr/bin/iwarp 2>/dev/null && exit 1
apt-get install --yes --no-install-recommends "$1"
dpkg -s iwarp | grep -E '^(Status|Version|Installed-Size|Depends)'
dpkg -L iwarp
# The dynamic loader must not find our libraries by default.
ldconfig
if ldconfig -p | grep /usr/lib/iwarp; then exit 1; fi
systemd-analyze --man=yes verify iwarp-cp.service
test "$(systemctl is-enabled iwarp-cp.service)" = disabled
