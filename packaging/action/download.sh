# Downloads the command with its libraries from the release VERSION, checks it, and puts it into a
# folder of the job. The default is the version of the sources around this file. If SHA256 is set,
# the file must have this checksum; otherwise it must have that of the release's list.
set -euo pipefail

sources=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
if [ -z "$VERSION" ]; then
    while read -r name equals value; do
        if [ "$name $equals" = "version =" ]; then
            VERSION=${value//\"/}
            break
        fi
    done < "$sources/Cargo.toml"
fi
file=iwarp-linux-$(uname -m)
release=$REPOSITORY/releases/download/v${VERSION#v}
folder=$RUNNER_TEMP/iwarp
mkdir -p "$folder/bin"
cd "$folder"
get() {
    if ! curl --fail --location --silent --show-error --retry 3 --proto '=https' \
        --output "$1" "$release/$1"; then
        echo "::error::$release has no $1; set the input version, package or from-source"
        exit 1
    fi
}
get "$file"
if [ -n "$SHA256" ]; then
    echo "$SHA256  $file" > sums
else
    get SHA256SUMS
    # The names have only letters, digits and hyphens.
    grep "  $file\$" SHA256SUMS > sums || {
        echo "::error::the list of checksums has no $file"
        exit 1
    }
fi
sha256sum --check --quiet --strict sums
chmod 755 "$file"
mv "$file" bin/iwarp
echo "$folder/bin" >> "$GITHUB_PATH"
