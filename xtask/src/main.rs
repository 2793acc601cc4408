//! The project's own tasks, run as `cargo xtask COMMAND`.
//!
//! Continuous integration runs these tasks, so a developer can run exactly the same checks. A new
//! subcommand is a variant of [`Command`] and a module; a new step of `test` is one row in
//! [`steps::STEPS`].

mod compliance;
mod deb;
mod dist;
mod fuzz;
mod lessons;
mod licences;
mod miri;
mod mutants;
mod no_std;
mod notices;
mod package;
mod pictures;
mod release;
mod roots;
mod runner;
mod site;
mod spelling;
mod steps;
mod targets;
mod tidy;
mod tools;

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Args, Parser, Subcommand};
use xtask::context::Context;
use xtask::install;
use xtask::process::program;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "The project's own tasks", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the checks that continuous integration runs
    Test(runner::TestArgs),
    /// Compare the RFC annotations with the RFCs and write the reports
    Compliance {
        /// Rewrite the committed snapshot
        #[arg(long)]
        bless: bool,
    },
    /// Write docs/unsafe.md from the table of files that may contain `unsafe`
    UnsafeDoc,
    /// Print the rooms (top-level modules) of all crates and the rooms that each of them names, in
    /// the form of xtask/rooms.txt
    Rooms,
    /// Run the benchmarks, interleaved with plain TCP and other software
    #[command(disable_help_flag = true)]
    Bench(Passed),
    /// Count the instructions of fixed workloads and compare the counts with recorded values
    #[command(disable_help_flag = true)]
    Instructions(Passed),
    /// Run the fuzz targets: search for failing inputs, guided by coverage
    Fuzz(fuzz::FuzzArgs),
    /// Build in release mode and install command, libraries, manual pages and completions below a
    /// prefix
    Install {
        /// Folder that gets bin/, lib/iwarp/ and share/
        #[arg(long, value_name = "DIR")]
        prefix: std::path::PathBuf,
    },
    /// Remove what `install` has installed below a prefix
    Uninstall {
        /// Folder that was given to `install`
        #[arg(long, value_name = "DIR")]
        prefix: std::path::PathBuf,
    },
    /// Build in release mode and write one executable file that contains the command and its
    /// libraries
    Bundle {
        /// The file to write [default: iwarp-bundle in the target folder]
        #[arg(long, value_name = "FILE")]
        output: Option<std::path::PathBuf>,
    },
    /// Follow the lessons of docs/learn and compare what their commands print
    Lessons(lessons::LessonsArgs),
    /// Draw the README's diagram and terminal session
    Pictures(pictures::PicturesArgs),
    /// Build the site from the documents with mdBook, and check its links
    Site,
    /// Build in release mode and write a Debian package
    Deb(deb::DebArgs),
    /// Write everything that users can download into one folder: bundles, packages, a wheel, an
    /// image, and their checksums
    Dist(dist::DistArgs),
    /// Check the packages before a release: features, oldest versions, interface, a dry run
    Release(release::ReleaseArgs),
    /// Run mutation tests: change the code in small ways and check that tests fail
    Mutants(mutants::MutantsArgs),
    /// Run programs between iwarp and other implementations
    #[command(disable_help_flag = true)]
    Interop(Passed),
    /// Build the Linux kernel module, or run the engine in a kernel in an emulated machine
    #[command(disable_help_flag = true)]
    Kernel(Passed),
    /// Run the soak test: keep 64 connections busy for hours, and disturb processes and network
    #[command(disable_help_flag = true)]
    Soak(Passed),
}

/// Arguments that are passed to another program of the project unchanged, `--help` included.
#[derive(Args)]
struct Passed {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

impl Passed {
    /// Replaces this process with the program of `package`, so that the caller gets its exit code.
    /// Returns only if the program cannot be started.
    fn run(&self, package: &str, subcommand: &[&str]) -> Result<bool> {
        let context = Context::new(false, false)?;
        let error = program(&context.root, package)
            .args(subcommand)
            .args(&self.args)
            .exec();
        Err(error).with_context(|| format!("cannot start {package}"))
    }
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Test(args) => runner::test(&args),
        Command::Compliance { bless } => {
            Context::new(false, false).and_then(|context| compliance::command(&context, bless))
        }
        Command::UnsafeDoc => Context::new(false, false)
            .and_then(|context| tidy::unsafe_doc::write(&context).map(|()| true)),
        Command::Rooms => Context::new(false, false)
            .and_then(|context| tidy::print_rooms(&context).map(|()| true)),
        Command::Install { prefix } => Context::new(false, false)
            .and_then(|context| install::install(&context, &prefix).map(|()| true)),
        Command::Uninstall { prefix } => install::uninstall(&prefix).map(|()| true),
        Command::Bundle { output } => Context::new(false, false)
            .and_then(|context| install::bundle(&context, output.as_deref()).map(|()| true)),
        Command::Fuzz(args) => fuzz::command(&args),
        Command::Lessons(args) => lessons::command(&args),
        Command::Pictures(args) => pictures::command(&args),
        Command::Site => site::command(),
        Command::Deb(args) => deb::command(&args),
        Command::Dist(args) => dist::command(&args),
        Command::Release(args) => release::command(&args),
        Command::Mutants(args) => mutants::command(&args),
        Command::Interop(args) => args.run(steps::CONFORMANCE, &[]),
        Command::Kernel(args) => args.run(steps::CONFORMANCE, &["kernel"]),
        Command::Soak(args) => args.run(steps::CONFORMANCE, &["soak"]),
        Command::Bench(args) => args.run(steps::BENCH, &["bench"]),
        Command::Instructions(args) => args.run(steps::BENCH, &["instructions"]),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
