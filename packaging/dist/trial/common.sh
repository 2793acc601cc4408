# Functions of the trials, which source this file.

# Repeats a client until its server listens.
retry() {
    for _ in $(seq 100); do
        if "$@"; then return; fi
        sleep 0.2
    done
    return 1
}

# Connects two processes with the command in the arguments: two of its own, and then two of an
# unmodified program, which must use our libraries.
two_processes() {
    trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
    "$@" --version
    "$@" devices
    "$@" ping serve --bind 127.0.0.1 &
    local server=$!
    retry "$@" ping 127.0.0.1 -C 3
    kill "$server"
    wait "$server" || true
    "$@" run --check -- ib_write_bw | tail -n 1
    "$@" run -- ib_write_bw -R -d iwarp0 -n 200 > server.txt &
    server=$!
    retry "$@" run -- ib_write_bw -R -d iwarp0 -n 200 127.0.0.1
    wait "$server"
    rm server.txt
}
