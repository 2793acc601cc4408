//! Cases that are shell scripts for a guest with our module: their common prelude, how they run,
//! and how the result is checked.

use std::cell::RefCell;

use anyhow::{Context as _, Result, bail};
use xtask::kernel::module::DEVICE;

use crate::case::{Case, Verdict};
use crate::guest::Guest;
use crate::{complaints, excuses};

/// Part of the message that the module logs on unloading if it leaked memory.
const LEAKED: &str = "were not freed";
/// Part of the message that the module logs on unloading if it leaked nothing.
const NO_LEAK: &str = "no allocation of the engine is left";

/// The first lines of each script. A script ends at the first command that fails; `refused` is for
/// commands that must fail. `MODULE` is the path of the module. `links` creates two RDMA devices.
/// `listening` waits until a server listens on a port (given in hexadecimal). `pair` runs a server
/// and its client, and retries them after a known sporadic fault. `namespaces` creates two network
/// namespaces with a link between them, and `near_is_gone` waits until the first one has
/// disappeared with its device. `unused` waits until clients in the kernel have released the
/// device, for 10 s or `TRIES` tenths of a second. It ignores completion queues, because the kernel
/// keeps those that such clients share.
const PRELUDE: &str = "set -e; . refused; MODULE=/lib/iwarp/iwarp_rnic.ko
links() {
    rdma link add iwarp0 type iwarp netdev user0
    rdma link add iwarp1 type iwarp netdev lo
    for i in $(seq 50); do if [ -e /dev/infiniband/rdma_cm ]; then break; fi; sleep 0.1; done
}
tools=/usr/bin/ip
namespaces() {
    $tools netns add near; $tools netns add far
    $tools link add near0 type veth peer name far0
    $tools link set near0 netns near; $tools link set far0 netns far
    $tools -n near addr add 10.66.0.1/24 dev near0
}
near_is_gone() {
    for i in $(seq 100); do
        if ! $tools -n far link show far0 >/dev/null 2>&1; then break; fi
        sleep 0.1
    done
    refused $tools -n far link show far0
    rdma link | refused grep iwarp9
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

/// Returns the first lines of each script.
pub(super) fn prelude() -> String {
    format!("{}{PRELUDE}", excuses::as_shell())
}

/// The name of a case, and its script, which loads and unloads the module itself. The shell prefers
/// busybox's commands to Debian's programs, unless they are given by path.
pub(super) type Script = (&'static str, &'static str);

/// A guest, and the output of the last script with the kernel's messages.
pub(super) struct Bench {
    pub(super) guest: Guest,
    pub(super) last_output: RefCell<String>,
}

/// Returns the case that runs a script. `variables` are shell assignments before the script;
/// `limit` is in seconds.
pub(super) fn case(&(name, script): &Script, variables: &str, limit: u64) -> Case<Bench> {
    let script = format!("{variables}\n{script}");
    Case::named(name, move |bench: &Bench| {
        run(bench, &script, limit).map(|()| Verdict::passed(""))
    })
}

/// Returns the whole script that the guest runs: the prelude and `lines`.
pub(super) fn full_script(lines: &str) -> String {
    format!("{}set -x\n{lines}", prelude())
}

fn run(bench: &Bench, script: &str, limit: u64) -> Result<()> {
    let guest = &bench.guest;
    let out = guest.run(&full_script(script), limit)?;
    let loaded = guest.run(&format!("grep -q '^{DEVICE} ' /proc/modules"), 20)?;
    if loaded.code == 0 {
        guest.run(&format!("rmmod {DEVICE}"), limit)?;
    }
    let output = guest.kernel_messages();
    *bench.last_output.borrow_mut() = format!("{}\n{output}", out.text);
    if out.code != 0 {
        let last = out.text.lines().last().context("no output")?;
        bail!("exit {}: {last}", out.code);
    }
    check_messages(&output)
}

/// Unloads the module.
///
/// Fails if the module is in use, or leaks memory.
pub(super) fn unload(guest: &Guest, limit: u64) -> Result<()> {
    guest.run_checked(&format!("rmmod {DEVICE}"), limit)?;
    check_messages(&guest.kernel_messages())
}

/// Fails if the kernel reported a fault, or the module leaked memory or was not unloaded.
pub(super) fn check_messages(output: &str) -> Result<()> {
    let leaked = || output.lines().find(|line| line.contains(LEAKED));
    if let Some(line) = complaints::first(output).or_else(leaked) {
        bail!("the guest's kernel: {line}");
    }
    if !output.contains(NO_LEAK) {
        bail!("the module was not unloaded: its message {NO_LEAK:?} is missing");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use super::*;

    #[test]
    fn leaking_or_loaded_module_fails() {
        let good = format!("[ 1.0] iwarp_rnic: unloaded, {NO_LEAK}\n");
        assert!(check_messages(&good).is_ok());
        assert!(check_messages("").is_err());
        assert!(check_messages(&format!("[ 0.9] WARNING: CPU: 0\n{good}")).is_err());
        assert!(
            check_messages("[ 1.0] iwarp_rnic: 3 allocations of the engine were not freed\n")
                .is_err()
        );
    }

    /// Runs a line with `refused` in a shell, and returns whether the line after it was reached.
    fn continues_after(line: &str) -> bool {
        let script = format!(
            "set -e\n{}\n{line}\necho end",
            include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/guest/refused"))
        );
        let out = Command::new("sh").args(["-c", &script]).output().unwrap();
        String::from_utf8(out.stdout).unwrap().ends_with("end\n")
    }

    #[test]
    fn refused_command_must_run_and_fail() {
        assert!(continues_after("refused false"));
        assert!(continues_after("echo one | refused grep two"));
        assert!(continues_after(
            "sh -c 'exit 3' & load=$!\nrefused wait $load"
        ));
        for wrong in [
            "refused true",
            "echo one | refused grep one",
            "true & load=$!\nrefused wait $load",
            "refused no-such-command",
            "refused sh -c 'kill -9 $$'",
        ] {
            assert!(!continues_after(wrong), "{wrong}");
        }
    }

    /// The shell ignores the status of `! command`.
    #[test]
    fn scripts_negate_no_commands() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut scripts = 0;
        for directory in ["guest", "src/kernel"] {
            for entry in std::fs::read_dir(root.join(directory)).unwrap() {
                let path = entry.unwrap().path();
                let text = std::fs::read_to_string(&path).unwrap();
                let negated = text.lines().find(|line| line.trim().starts_with("! "));
                assert_eq!(negated, None, "{}", path.display());
                scripts += 1;
            }
        }
        assert!(scripts > 40);
    }
}
