# Installs the package PACKAGE (a path, a pattern or an https address), whose SHA-256 is SHA256 if that is set.
set -euo pipefail

case "$PACKAGE" in
https://*)
    if [ -z "$SHA256" ]; then
        echo "::warning::sha256 is not set, so nothing but TLS vouches for $PACKAGE"
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
    # The pattern is meant to be expanded, and a path may contain spaces.
    # shellcheck disable=SC2206
    IFS= files=($PACKAGE)
    if [ "${#files[@]}" -ne 1 ]; then
        echo "::error::$PACKAGE names ${#files[@]} files, and not one"
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
"${run[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends "$file"
