//! `cargo xtask kernel engine`: the engine in a Linux kernel.
//!
//! Builds the module of `kernel/test` for Debian's kernel, boots that kernel in an emulated
//! machine, loads the module, and reads its messages. The module runs two queue pairs over memory
//! and over a TCP connection of the kernel, and unloads itself.

use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use xtask::context::Context;
use xtask::kernel::module::{self, TEST as MODULE};
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
    /// Show all messages of the guest's kernel
    #[arg(long)]
    messages: bool,
    /// Run only the tests whose names begin like this
    #[arg(long, value_name = "TEST", default_value = "")]
    only: String,
    #[command(flatten)]
    boot: Boot,
}

/// Limit of the whole run, which only ends a hang.
const LIMIT: Duration = Duration::from_secs(3600);
/// Time limit of all tests in the emulated guest, in seconds.
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
    let module = module::build(&context, MODULE, &object, headers, &dir, &mut log)?;
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
    let said = guest.kernel_messages();
    log.line(&said);
    if args.messages {
        println!("{said}");
    }
    let verdict = verdict(&said, &after.text);
    for line in said.lines().filter_map(own) {
        log.say(line);
        if verdict.is_ok() && line.contains(" tests, ") {
            break;
        }
    }
    verdict?;
    args.boot.look_for_leaks(&guest, &mut log)?;
    Ok(Outcome::Passed)
}

/// Returns the module's text in a line of the kernel log.
fn own(line: &str) -> Option<&str> {
    line.split_once(&format!("{MODULE}: "))
        .map(|(_, text)| text)
        // The kernel's remark that the module is out of tree and unsigned.
        .filter(|text| !text.contains("taint"))
}

/// Fails unless all tests passed and the kernel reported no fault.
///
/// If the kernel does not keep the module, busybox tries to load it in a second way, so all tests
/// may run twice.
fn verdict(said: &str, modules: &str) -> Result<()> {
    if let Some(line) = complaints::first(said) {
        bail!("the guest's kernel: {line}");
    }
    if modules.lines().any(|line| line.starts_with(MODULE)) {
        bail!("the module is still loaded");
    }
    let (mut passed, mut counted) = (0, 0);
    let mut last = "";
    for line in said.lines().filter_map(own) {
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
    fn all_tests_pass_and_count() {
        assert!(verdict(GOOD, "virtio_net 1 0\n").is_ok());
        let fails = |said: &str| verdict(said, "").unwrap_err().to_string();
        assert!(fails(&GOOD.replace("2 tests, 0", "2 tests, 1")).contains("1 failed"));
        assert!(fails(&GOOD.replace("passed two", "FAILED two: -5")).contains("1 passed"));
        assert!(verdict(&GOOD.repeat(2), "").is_ok());
        assert!(fails(&format!("{GOOD}{}", GOOD.replace("passed two", ""))).contains("3 passed"));
        assert!(fails(&GOOD.replace("2 tests, 0 failed", "")).contains("last message"));
        assert!(fails("").contains("last message"));
    }

    #[test]
    fn kernel_complaint_fails() {
        for word in [
            "BUG: sleeping function",
            "WARNING: CPU: 1 PID: 7",
            "iwarp: panic at a.rs:7",
        ] {
            assert!(verdict(&format!("{GOOD}[ 5.5] {word}\n"), "").is_err());
        }
        assert!(verdict(GOOD, "iwarp_engine_test 1 0\n").is_err());
    }
}
