//! Cases that are shell scripts for a guest with our module: what they all begin with, how one
//! runs, and how it is judged.

use std::cell::RefCell;

use anyhow::{Context as _, Result, bail};
use xtask::kernel::module::DEVICE;

use crate::case::{Case, Verdict};
use crate::guest::Guest;
use crate::{complaints, excuses};

/// The module's message about leaked memory when it is unloaded.
const LEAKED: &str = "were not freed";
/// The module's message when it is unloaded and nothing has leaked.
const GONE: &str = "no allocation of the engine is left";

/// Begins all scripts. They end at the first command that fails; `MODULE` is the module's file.
/// `links` creates two devices. `listening` waits until a server listens on a port (in
/// hexadecimal). `pair` runs a server and its client, and repeats them after an excused failure.
/// `unused` waits, for at least 10 s or `TRIES` tenths of a second, until clients in the kernel
/// have released the device. The device keeps the completion queues that these clients share.
const PRELUDE: &str = "set -e; MODULE=/lib/iwarp/iwarp_rnic.ko
links() {
    rdma link add iwarp0 type iwarp netdev user0
    rdma link add iwarp1 type iwarp netdev lo
    for i in $(seq 50); do if [ -e /dev/infiniband/rdma_cm ]; then break; fi; sleep 0.1; done
}
listening() {
    for i in $(seq 100); do
        if grep -q \":$1 0*:0000 0A\" /proc/net/tcp /proc/net/tcp6; then return 0; fi
        sleep 0.1
    done
    return 1
}
pair() {
    for attempt in $(seq $ATTEMPTS); do
        $1 & server=$!
        case \"$1\" in ucmatose*) listening 1D2F;; *) listening 1BBC;; esac
        if $2 >/tmp/client 2>&1; then cat /tmp/client; wait $server; return; fi
        cat /tmp/client
        excused /tmp/client || return 1
        kill -9 $server; wait $server || true
    done
    return 1
}
unused() {
    for i in $(seq ${TRIES:-100}); do
        if rdma resource | grep 'iwarp0: pd 0 cq [0-9]* qp 0 cm_id 0 mr 0'; then return; fi
        sleep 0.1
    done
    rdma resource
    return 1
}
";

/// Returns what all scripts begin with.
pub(super) fn prelude() -> String {
    format!("{}{PRELUDE}", excuses::as_shell())
}

/// A case's name, and what runs in the guest, where it loads and unloads the module. The shell
/// prefers busybox's programs to Debian's, unless they are named by their paths.
pub(super) type Script = (&'static str, &'static str);

/// A guest, and what the last script and the kernel wrote.
pub(super) struct Bench {
    pub(super) guest: Guest,
    pub(super) written: RefCell<String>,
}

/// Returns the case of a script, which gets `settings` as its first lines and `limit` seconds.
pub(super) fn case(&(name, script): &Script, settings: &str, limit: u64) -> Case<Bench> {
    let script = format!("{settings}\n{script}");
    Case::named(name, move |bench: &Bench| {
        run(bench, &script, limit).map(|()| Verdict::passed(""))
    })
}

/// Returns a script as the guest runs it.
pub(super) fn whole(lines: &str) -> String {
    // `set -e` ignores a command after `!`, so such a line gets a failure of its own.
    let lines: String = lines.lines().map(expect_failure).collect();
    format!("{}set -x\n{lines}", prelude())
}

fn run(bench: &Bench, script: &str, limit: u64) -> Result<()> {
    let guest = &bench.guest;
    let out = guest.run(&whole(script), limit)?;
    let loaded = guest.run(&format!("grep -q '^{DEVICE} ' /proc/modules"), 20)?;
    if loaded.code == 0 {
        guest.run(&format!("rmmod {DEVICE}"), limit)?;
    }
    let said = guest.kernel_messages();
    *bench.written.borrow_mut() = format!("{}\n{said}", out.text);
    if out.code != 0 {
        let last = out.text.lines().last().context("no output")?;
        bail!("exit {}: {last}", out.code);
    }
    verdict(&said)
}

/// Unloads the module.
///
/// Fails if the module is in use, or leaks memory.
pub(super) fn unload(guest: &Guest, limit: u64) -> Result<()> {
    guest.must(&format!("rmmod {DEVICE}"), limit)?;
    verdict(&guest.kernel_messages())
}

/// Turns `! command` into a command that fails if `command` succeeds.
fn expect_failure(line: &str) -> String {
    match line.trim().strip_prefix("! ") {
        Some(command) => format!("if {command}; then exit 1; fi\n"),
        None => format!("{line}\n"),
    }
}

/// Fails if the kernel reported a fault, or the module leaked memory or was not unloaded.
pub(super) fn verdict(said: &str) -> Result<()> {
    let leaked = || said.lines().find(|line| line.contains(LEAKED));
    if let Some(line) = complaints::first(said).or_else(leaked) {
        bail!("the guest's kernel: {line}");
    }
    if !said.contains(GONE) {
        bail!("the module did not say that its memory is free");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaking_or_loaded_module_fails() {
        let good = format!("[ 1.0] iwarp_rnic: unloaded, {GONE}\n");
        assert!(verdict(&good).is_ok());
        assert!(verdict("").is_err());
        assert!(verdict(&format!("[ 0.9] WARNING: CPU: 0\n{good}")).is_err());
        assert!(
            verdict("[ 1.0] iwarp_rnic: 3 allocations of the engine were not freed\n").is_err()
        );
    }

    #[test]
    fn negated_command_must_fail() {
        assert_eq!(expect_failure("  ! false"), "if false; then exit 1; fi\n");
        assert_eq!(expect_failure("true"), "true\n");
    }
}
