# Builds iwarp from the sources around this file and installs it below PREFIX. The default is a
# folder of the job.
set -euo pipefail

PREFIX=${PREFIX:-$RUNNER_TEMP/iwarp}
case "$PREFIX" in
/*) ;;
*)
    echo "::error::prefix is $PREFIX, which is not an absolute path"
    exit 1
    ;;
esac
if ! command -v cargo >/dev/null; then
    echo "::error::there is no cargo: install Rust first, or give this action a package"
    exit 1
fi
# The target folder is not below the sources, because other jobs of the runner may share them.
export CARGO_TARGET_DIR="$RUNNER_TEMP/iwarp-target"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
cargo --locked xtask install --prefix "$PREFIX"
echo "$PREFIX/bin" >> "$GITHUB_PATH"
