//! `cargo xtask kernel`: the kernel module and the engine in a Linux kernel.

mod bench;
mod boot;
mod cuts;
mod endings;
mod ends;
mod engine;
mod guide;
mod hostile;
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
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Build the module iwarp_rnic for Debian's kernels, and the source package for DKMS
    Build(BuildArgs),
    /// Build a kernel from Debian's source with sanitizers, for `engine` and `test` with `--kernel
    /// debug`
    DebugKernel,
    /// Run two of our queue pairs in a kernel, in an emulated machine
    Engine(EngineArgs),
    /// Run programs on the module, in an emulated machine
    Test(TestArgs),
    /// Measure the module against the kernel's siw, in an emulated machine
    Bench(BenchArgs),
}

/// Arguments of `cargo xtask kernel build`.
#[derive(Args)]
struct BuildArgs {
    /// Build only for this kernel of Debian, such as 6.12
    #[arg(long, value_name = "VERSION")]
    kernel: Option<String>,
}

/// Limit of fetching and building for all kernels, which only ends a hang.
const LIMIT: Duration = Duration::from_secs(3600);

pub(crate) fn command(args: &KernelArgs) -> Result<Outcome> {
    match &args.what {
        What::Build(args) => build(args),
        What::DebugKernel => debug_kernel(),
        What::Engine(args) => engine::command(args),
        What::Test(args) => test::command(args),
        What::Bench(args) => bench::command(args),
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
