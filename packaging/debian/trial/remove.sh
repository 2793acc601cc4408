# Run as root after use.sh: enables the service, removes the package, installs it again and purges
# it.
set -eux
systemctl enable iwarp-cp.service
test "$(systemctl is-enabled iwarp-cp.service)" = enabled
echo '# changed' >> /etc/default/iwarp-cp
# Make the files that exist after the service has run with a secret.
mkdir -p /var/lib/private/iwarp-cp /etc/credstore
ln -s private/iwarp-cp /var/lib/iwarp-cp
echo secret > /etc/credstore/iwarp-cp.secret

apt-get remove --yes iwarp
test ! -e /usr/bin/iwarp
test ! -e /usr/lib/iwarp
# Settings survive a removal, and after a new installation the service is enabled again.
grep -q changed /etc/default/iwarp-cp
apt-get install --yes --no-install-recommends "$1"
test "$(systemctl is-enabled iwarp-cp.service)" = enabled
grep -q changed /etc/default/iwarp-cp

apt-get purge --yes iwarp
rmdir /etc/credstore
if dpkg -s iwarp; then exit 1; fi
if compgen -G "/var/lib/dpkg/info/iwarp*"; then exit 1; fi
