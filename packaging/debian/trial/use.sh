# Run as an ordinary user after install.sh: uses the installed programs.
set -eux
id
cd "$HOME"
iwarp --version
iwarp devices
iwarp perf --quick

# Kills the servers when the script ends.
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
# Repeats a client until its server listens.
retry() {
    for _ in $(seq 100); do
        if "$@"; then return; fi
        sleep 0.2
    done
    return 1
}

iwarp ping serve --bind 127.0.0.1 &
retry iwarp ping 127.0.0.1 -C 10 -v

mkdir -p served
head -c 3000000 /dev/urandom > served/file
iwarp cp serve "$HOME/served" &
retry iwarp cp -q 127.0.0.1:file copy
cmp served/file copy

# Both ends of a Debian program use our libraries.
iwarp run -- ib_write_bw -R -d iwarp0 > server.txt &
retry iwarp run -- ib_write_bw -R -d iwarp0 127.0.0.1
iwarp run -- ldd "$(command -v ib_write_bw)" | grep -F " => /usr/lib/iwarp/"

for page in /usr/share/man/man1/iwarp*.1.gz; do
    MANWIDTH=100 man --warnings -l "$page" 2> warnings > page
    test ! -s warnings
    grep -q 'SEE ALSO' page
done
MANWIDTH=100 man iwarp-cp | head -n 30
bash -ec '
    . /usr/share/bash-completion/bash_completion
    . /usr/share/bash-completion/completions/iwarp
    complete -p iwarp'
