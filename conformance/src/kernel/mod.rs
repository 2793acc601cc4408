//! `cargo xtask kernel`: builds and tests the kernel module, in a virtual machine.

mod bench;
mod boot;
mod cuts;
mod endings;
mod ends;
mod engine;
mod guide;
mod hostile;
mod limits;
mod matrix;
mod script;
mod storage;
mod suite;
mod test;

use std::time::Duration;

use anyhow::Result;
use clap::{Args, Subcommand};
use xtask::context::Context;
use xtask::kernel::headers::SERIES;
use xtask::kernel::{debug, modules};
use xtask::outcome::Outcome;
use xtask::process::Log;

use bench::BenchArgs;
use engine::EngineArgs;
use test::TestArgs;

/// Arguments of `cargo xtask kernel`.
#[derive(Args)]
pub(crate) struct KernelArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build the module iwarp_rnic for Debian's kernels, and the source package for DKMS
    Build(BuildArgs),
    /// Build a kernel from Debian's source with sanitizers, for `engine` and `test` with `--kernel
    /// debug`
    DebugKernel,
    /// Test the protocol engine alone in a kernel, in a virtual machine
    Engine(EngineArgs),
    /// Test the module with unmodified programs, in a virtual machine
    Test(TestArgs),
    /// Compare the performance of the module and the kernel's siw, in a virtual machine
    Bench(BenchArgs),
}

/// Arguments of `cargo xtask kernel build`.
#[derive(Args)]
struct BuildArgs {
    /// Build only for this series of Debian's kernels, such as 6.12
    #[arg(long, value_name = "VERSION")]
    kernel: Option<String>,
}

/// Time limit for fetching and building for all kernels. It is long, and only stops a run that
/// hangs.
const LIMIT: Duration = Duration::from_secs(3600);

pub(crate) fn command(args: &KernelArgs) -> Result<Outcome> {
    match &args.command {
        Command::Build(args) => build(args),
        Command::DebugKernel => debug_kernel(),
        Command::Engine(args) => engine::command(args),
        Command::Test(args) => test::command(args),
        Command::Bench(args) => bench::command(args),
    }
}

fn build(args: &BuildArgs) -> Result<Outcome> {
    let context = Context::new(false, true)?;
    let mut log = Log::create(&context.log_dir().join("kernel-build.log"), LIMIT)?;
    match &args.kernel {
        Some(series) => modules(&context, &[series], &mut log),
        None => modules(&context, SERIES, &mut log),
    }
}

fn debug_kernel() -> Result<Outcome> {
    let context = Context::new(false, true)?;
    let mut log = Log::create(&context.log_dir().join("kernel-debug.log"), LIMIT)?;
    let kernel = debug::build(&context, &mut log)?;
    log.say(format!("Linux {}: {}", kernel.name, kernel.image.display()));
    Ok(Outcome::Passed)
}
