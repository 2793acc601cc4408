# The service is installed disabled. If it runs during an upgrade, it is restarted. RPM passes the
# number of versions that are installed afterwards.
if [ -d /run/systemd/system ]; then
    systemctl --system daemon-reload >/dev/null 2>&1 || :
    if [ "$1" -gt 1 ]; then
        systemctl try-restart iwarp-cp.service >/dev/null 2>&1 || :
    fi
fi
