# Stops and disables the service before the last version of its program is removed.
if [ "$1" -eq 0 ] && command -v systemctl >/dev/null; then
    systemctl --no-reload disable iwarp-cp.service >/dev/null 2>&1 || :
    if [ -d /run/systemd/system ]; then
        systemctl stop iwarp-cp.service >/dev/null 2>&1 || :
    fi
fi
