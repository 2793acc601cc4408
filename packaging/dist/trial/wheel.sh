# Run as an ordinary user. $2 is a wheel.
set -eux
. /tmp/common.sh
cd "$HOME"
case $1 in
install)
    python3 -m venv environment
    environment/bin/pip install --no-index "$2"
    ;;
use)
    two_processes environment/bin/iwarp
    # The folder of the command need not be in PATH.
    two_processes environment/bin/python -m iwarp
    ;;
remove)
    environment/bin/pip uninstall --yes iwarp
    if find environment -name '*iwarp*' | grep .; then exit 1; fi
    rm -r environment
    ;;
esac
