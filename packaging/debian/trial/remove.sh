# Run as root behind use.sh: removal and purge, with the service enabled in between.
set -eux
systemctl enable iwarp-cp.service
test "$(systemctl is-enabled iwarp-cp.service)" = enabled
echo '# changed' >> /etc/default/iwarp-cp
# As if the service had run, and had a secret.
mkdir -p /var/lib/private/iwarp-cp /etc/credstore
ln -s private/iwarp-cp /var/lib/iwarp-cp
echo secret > /etc/credstore/iwarp-cp.secret

apt-get remove --yes iwarp
test ! -e /usr/bin/iwarp
test ! -e /usr/lib/iwarp
# Settings survive a removal, and what was enabled is enabled again.
grep -q changed /etc/default/iwarp-cp
apt-get install --yes --no-install-recommends "$1"
test "$(systemctl is-enabled iwarp-cp.service)" = enabled
grep -q changed /etc/default/iwarp-cp

apt-get purge --yes iwarp
rmdir /etc/credstore
if dpkg -s iwarp; then exit 1; fi
if compgen -G "/var/lib/dpkg/info/iwarp*"; then exit 1; fi
