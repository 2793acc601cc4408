//! `cargo xtask kernel engine`: tests the protocol engine in a Linux kernel.
//!
//! Builds the module of `kernel/test` for Debian's kernel, boots that kernel in a virtual machine,
//! loads the module, and reads its kernel messages. The module runs tests with two queue pairs,
//! connected through memory or through TCP, and unloads itself.

use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use xtask::context::Context;
use xtask::kernel::module::{self, TEST as MODULE, Use};
use xtask::outcome::Outcome;
use xtask::process::Log;

use super::boot::{Boot, Parts};
use crate::complaints;
use crate::guest::Guest;
use crate::guest::image;
use crate::needs::{self, Suite};

/// Arguments of `cargo xtask kernel engine`.
#[derive(Args)]
pub(crate) struct EngineArgs {
    /// Print all messages of the guest's kernel
    #[arg(long)]
    messages: bool,
    /// Run only the tests whose names begin with this text
    #[arg(long, value_name = "TEST", default_value = "")]
    only: String,
    #[command(flatten)]
    boot: Boot,
}

/// Time limit of the whole run. It is long, and only stops a run that hangs.
const LIMIT: Duration = Duration::from_secs(3600);
/// Time limit of all tests together, in seconds.
const TESTS_LIMIT: u64 = 1200;

/// Builds the module, boots the guest, runs the tests and reports them.
pub(crate) fn command(args: &EngineArgs) -> Result<Outcome> {
    let context = Context::new(false, true)?;
    let mut log = Log::create(&context.log_dir().join("kernel-test.log"), LIMIT)?;
    needs::require_packages(Suite::Guest, &mut log)?;
    let Parts {
        kernel,
        object,
        dir,
        ..
    } = match args.boot.parts(&context, &mut log)? {
        Ok(parts) => parts,
        Err(why) => return Ok(Outcome::Skipped(why)),
    };
    log.say(format!("building the module for {}", kernel.name));
    let cache = dir.join("engine");
    std::fs::create_dir_all(&cache)?;
    let headers = &kernel.headers;
    let dir = cache.join("module");
    let wanted = (MODULE, Use::Tests);
    let module = module::build(&context, wanted, &object, headers, &dir, &mut log)?;
    let image = image::small(&context, &cache, &kernel, &module, &mut log)?;
    let machine = args.boot.machine();
    log.say(format!("booting Linux {}", image.release));
    let guest = Guest::start(&image, &cache, &machine, &mut log)?;
    args.boot.forget_leaks(&guest)?;
    guest.kernel_messages();
    // The module loader needs quotes, because test names contain spaces.
    let load = format!(
        "insmod /lib/iwarp/{MODULE}.ko 'only=\"{}\"'; cat /proc/modules",
        args.only
    );
    let after = guest.run(&load, args.boot.limit(TESTS_LIMIT))?;
    log.line(&after.text);
    let output = guest.kernel_messages();
    log.line(&output);
    if args.messages {
        println!("{output}");
    }
    let check_log = check_log(&output, &after.text);
    for line in output.lines().filter_map(module_text) {
        log.say(line);
        if check_log.is_ok() && line.contains(" tests, ") {
            break;
        }
    }
    check_log?;
    args.boot.check_leaks(&guest, &mut log)?;
    Ok(Outcome::Passed)
}

/// Returns the text of a log line that the module wrote.
fn module_text(line: &str) -> Option<&str> {
    line.split_once(&format!("{MODULE}: "))
        .map(|(_, text)| text)
        // The kernel itself logs that an unsigned, out-of-tree module taints it.
        .filter(|text| !text.contains("taint"))
}

/// Fails unless all tests passed and the kernel reported no fault.
///
/// All tests may run twice: if a module unloads itself, busybox's insmod tries to load it again
/// with another system call.
fn check_log(output: &str, modules: &str) -> Result<()> {
    if let Some(line) = complaints::first(output) {
        bail!("the guest's kernel: {line}");
    }
    if modules.lines().any(|line| line.starts_with(MODULE)) {
        bail!("the module is still loaded");
    }
    let (mut passed, mut counted) = (0, 0);
    let mut last = "";
    for line in output.lines().filter_map(module_text) {
        last = line;
        passed += usize::from(line.starts_with("passed "));
        if let Some((count, failed)) = line.split_once(" tests, ") {
            counted += count.parse::<usize>()?;
            if failed != "0 failed" {
                bail!("of {count} tests, {failed}");
            }
        }
    }
    if !last.contains(" tests, ") {
        bail!("the module did not finish; its last message: {last:?}");
    }
    if passed != counted || passed == 0 {
        bail!("of {counted} tests, {passed} passed");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "\
[    5.1] iwarp_engine_test: loading out-of-tree module taints kernel.
[    5.2] iwarp_engine_test: passed one
[    5.3] iwarp_engine_test: passed two
[    5.4] iwarp_engine_test: 2 tests, 0 failed
";

    #[test]
    fn only_complete_success_passes() {
        assert!(check_log(GOOD, "virtio_net 1 0\n").is_ok());
        let fails = |output: &str| check_log(output, "").unwrap_err().to_string();
        assert!(fails(&GOOD.replace("2 tests, 0", "2 tests, 1")).contains("1 failed"));
        assert!(fails(&GOOD.replace("passed two", "FAILED two: -5")).contains("1 passed"));
        assert!(check_log(&GOOD.repeat(2), "").is_ok());
        assert!(fails(&format!("{GOOD}{}", GOOD.replace("passed two", ""))).contains("3 passed"));
        assert!(fails(&GOOD.replace("2 tests, 0 failed", "")).contains("last message"));
        assert!(fails("").contains("last message"));
    }

    #[test]
    fn kernel_fault_or_loaded_module_fails() {
        for word in [
            "BUG: sleeping function",
            "WARNING: CPU: 1 PID: 7",
            "iwarp: panic at a.rs:7",
        ] {
            assert!(check_log(&format!("{GOOD}[ 5.5] {word}\n"), "").is_err());
        }
        assert!(check_log(GOOD, "iwarp_engine_test 1 0\n").is_err());
    }
}
