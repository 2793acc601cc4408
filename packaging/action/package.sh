# Installs the package PACKAGE (a path, a pattern or an https address). If SHA256 is set, compares
# the package with it first.
set -euo pipefail

case "$PACKAGE" in
https://*)
    if [ -z "$SHA256" ]; then
        echo "::warning::sha256 is not set, so only TLS protects $PACKAGE"
    fi
    file="$RUNNER_TEMP/iwarp.deb"
    curl --fail --location --silent --show-error --proto '=https' --output "$file" "$PACKAGE"
    ;;
http://*)
    echo "::error::$PACKAGE is not an https address"
    exit 1
    ;;
*)
    shopt -s nullglob
    # The pattern must be expanded. With an empty IFS a path with spaces stays one word.
    # shellcheck disable=SC2206
    IFS= files=($PACKAGE)
    if [ "${#files[@]}" -ne 1 ]; then
        echo "::error::$PACKAGE names ${#files[@]} files instead of one"
        exit 1
    fi
    file=$(realpath "${files[0]}")
    ;;
esac
if [ -n "$SHA256" ]; then
    echo "$SHA256  $file" | sha256sum --check --quiet -
fi

run=()
[ "$(id -u)" -eq 0 ] || run=(sudo)
"${run[@]}" apt-get update --quiet
"${run[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install --yes --quiet --no-install-recommends "$file"
