//! `cargo xtask lessons`: follows the lessons of `docs/learn` word by word.
//!
//! It types the commands of each lesson, in a copy of `examples/`, with the installed command
//! `iwarp` in `PATH`, and compares what they print with what the lesson shows. With `--bless`, it
//! writes the real output into the lessons instead.

mod document;
mod session;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use clap::Args;

use document::{ANY_LINES, Shown};
use session::Session;
use xtask::context::{Context, find_program};
use xtask::outcome::Outcome;
use xtask::process::{self, Log};
use xtask::{install, layout};

/// The folder of the lessons.
const LESSONS: &str = "docs/learn";
/// The folder of their programs.
const EXAMPLES: &str = "examples";
/// Each file that a lesson needs, and the Debian package that contains it.
const NEEDED: &[(&str, &str)] = &[
    ("/usr/include/infiniband/verbs.h", "libibverbs-dev"),
    ("/usr/include/rdma/rdma_cma.h", "librdmacm-dev"),
    (
        "/usr/lib/python3/dist-packages/pyverbs/__init__.py",
        "python3-pyverbs",
    ),
    ("/usr/bin/make", "make"),
    ("/usr/bin/ib_write_bw", "perftest"),
    ("/usr/bin/rping", "rdmacm-utils"),
    ("/usr/bin/tshark", "tshark"),
];
/// Set in the process that runs in a network namespace of its own.
const INSIDE: &str = "--inside";

/// Arguments of `cargo xtask lessons`.
#[derive(Args)]
pub(crate) struct LessonsArgs {
    /// Only the lessons whose file names contain this
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Write what the commands print into the lessons
    #[arg(long)]
    bless: bool,
    /// The folder with bin/iwarp [default: build and install below the target folder]
    #[arg(long, value_name = "DIR")]
    prefix: Option<PathBuf>,
    /// Do not create a network namespace
    #[arg(long = "inside", hide = true)]
    inside: bool,
}

/// Runs the lessons.
///
/// # Errors
/// If a lesson shows something else than its commands print, or if packages are missing.
pub(crate) fn command(args: &LessonsArgs) -> Result<bool> {
    let context = Context::new(false, false)?;
    if let Some(missing) = missing_packages() {
        bail!("{missing}");
    }
    let prefix = match &args.prefix {
        Some(prefix) => fs::canonicalize(prefix).context("the prefix")?,
        None => installed(&context)?,
    };
    if !args.inside && namespaces() {
        let status = in_namespace(&context, &prefix, args)?.status();
        return Ok(status.context("cannot start unshare")?.success());
    }
    let folder = prepared_examples(&context)?;
    let mut variables = variables(&context, &prefix);
    if !args.inside {
        // The lessons show the device of the loopback interface only.
        variables.push(("IWARP_BIND", "127.0.0.1".to_owned()));
    }
    let mut different = 0;
    let lessons = lessons(&context.root, args.only.as_deref())?;
    for lesson in &lessons {
        let name = lesson.file_name().unwrap_or_default().to_string_lossy();
        match follow(lesson, &folder, &variables, args.bless) {
            Ok(count) => println!("{name}: {count} commands print what the lesson shows"),
            Err(error) => {
                different += 1;
                println!("{name}: {error:#}");
            }
        }
    }
    println!("{} lessons, {different} of them are wrong", lessons.len());
    Ok(different == 0)
}

/// The step of `cargo xtask test`.
pub(crate) fn step(context: &Context, log: &mut Log) -> Result<Outcome> {
    if let Some(missing) = missing_packages() {
        return Ok(Outcome::Skipped(missing));
    }
    let prefix = installed(context)?;
    // Other steps may have replaced the file of this program.
    let mut command = process::program(&context.root, "xtask");
    command
        .current_dir(&context.root)
        .arg("lessons")
        .arg("--prefix")
        .arg(prefix);
    let text = log.run_and_read(&mut command);
    let text = text.with_context(|| format!("see {}", log.path().display()))?;
    for line in text.lines().rev().take(1) {
        log.show(line);
    }
    Ok(Outcome::Passed)
}

/// Names the packages that are not installed, if any.
fn missing_packages() -> Option<String> {
    let missing = NEEDED.iter().filter(|(file, _)| !Path::new(file).exists());
    let names: Vec<&str> = missing.map(|(_, package)| *package).collect();
    (!names.is_empty()).then(|| format!("not installed: {}", names.join(", ")))
}

/// Installs the command below the target folder, and returns the prefix.
fn installed(context: &Context) -> Result<PathBuf> {
    let prefix = context.target.join("lessons/prefix");
    let built = install::build(context)?;
    layout::put(&layout::files(context, &built)?, &prefix)?;
    Ok(prefix)
}

/// Returns `true` if this user may create network namespaces.
fn namespaces() -> bool {
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--net", "true"]);
    let status = command.stderr(std::process::Stdio::null()).status();
    find_program("ip").is_some() && status.is_ok_and(|status| status.success())
}

/// Returns the command that runs the lessons in a network namespace, where the loopback interface
/// is the only one and all ports are free. The programs have no privileges except for the network.
fn in_namespace(context: &Context, prefix: &Path, args: &LessonsArgs) -> Result<Command> {
    let mut command = Command::new("unshare");
    command
        .current_dir(&context.root)
        .args([
            "--user",
            "--map-user=1000",
            "--map-group=1000",
            "--keep-caps",
            "--net",
        ])
        .args(["sh", "-c", "ip link set lo up && exec \"$@\"", "sh"])
        .arg(std::env::current_exe()?)
        .args(["lessons", INSIDE, "--prefix"])
        .arg(prefix);
    if let Some(only) = &args.only {
        command.args(["--only", only]);
    }
    if args.bless {
        command.arg("--bless");
    }
    Ok(command)
}

/// Returns the paths of the lessons, in their order.
fn lessons(root: &Path, only: Option<&str>) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root.join(LESSONS))? {
        let path = entry?.path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let numbered = name.starts_with(|c: char| c.is_ascii_digit()) && name.ends_with(".md");
        if numbered && only.is_none_or(|only| name.contains(only)) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Follows a lesson in the folder of the examples, and returns the number of its commands.
///
/// # Errors
/// If a command prints something else than the lesson shows, unless `bless` is set.
fn follow(
    lesson: &Path,
    folder: &Path,
    variables: &[(&str, String)],
    bless: bool,
) -> Result<usize> {
    let text = fs::read_to_string(lesson)?;
    let commands = document::commands(&text);
    let mut results = Session::new(folder, variables).run(&commands)?;
    // From the end, so that the places of earlier commands stay the same.
    results.sort_by_key(|(shown, _)| std::cmp::Reverse(shown.line));
    let mut new = text.clone();
    let mut differences = Vec::new();
    for (shown, actual) in &results {
        let fixed = !shown.output.iter().any(|line| line == ANY_LINES);
        if bless && fixed {
            new = document::with_output(&new, shown, actual);
        } else if !document::matches(&shown.output, actual) {
            differences.push(difference(shown, actual));
        }
    }
    if new != text {
        fs::write(lesson, new)?;
    }
    if !differences.is_empty() {
        differences.reverse();
        bail!("{}", differences.join("\n"));
    }
    Ok(results.len())
}

fn difference(shown: &Shown, actual: &[String]) -> String {
    format!(
        "line {}: `{}`\n--- the lesson shows\n{}\n--- the command prints\n{}",
        shown.line + 1,
        shown.command,
        shown.output.join("\n"),
        actual.join("\n")
    )
}

/// Returns a folder with a fresh copy of the examples, in which the C programs are compiled, as the
/// course's first page says. The folder is inside the work tree, so that cargo finds the workspace.
fn prepared_examples(context: &Context) -> Result<PathBuf> {
    let folder = context.root.join("target/lessons/examples");
    let _ = fs::remove_dir_all(&folder);
    let prefix = Path::new(EXAMPLES);
    for file in xtask::files::listed(&context.root)? {
        if let Ok(inside) = Path::new(&file).strip_prefix(prefix) {
            let to = folder.join(inside);
            fs::create_dir_all(to.parent().context("a file in a folder")?)?;
            fs::copy(context.root.join(&file), &to)?;
        }
    }
    let make = Command::new("make")
        .args(["-s", "-C", "c"])
        .current_dir(&folder)
        .status();
    if !make.context("cannot start make")?.success() {
        bail!("the C programs of the lessons cannot be compiled");
    }
    // Now, because a lesson does not wait until other builds have released the target folder.
    let mut build = process::cargo(&context.root);
    process::run(build.args(["build", "--package", "iwarp-lessons"]))?;
    Ok(folder)
}

/// Returns the variables of a reader who has installed the command.
fn variables(context: &Context, prefix: &Path) -> Vec<(&'static str, String)> {
    let path = std::env::var("PATH").unwrap_or_default();
    vec![
        ("PATH", format!("{}:{path}", prefix.join("bin").display())),
        ("LC_ALL", "C.UTF-8".to_owned()),
        ("CARGO_TARGET_DIR", context.target.display().to_string()),
        ("CARGO_NET_OFFLINE", "true".to_owned()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The largest number of lines that a reader can take in at once.
    const LINES_MAX: usize = 120;

    #[test]
    fn programs_are_short() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut programs = 0;
        for file in xtask::files::listed(&root).unwrap() {
            let program = [".c", ".py", ".rs"].iter().any(|end| file.ends_with(end));
            if program && Path::new(&file).starts_with(EXAMPLES) {
                let lines = fs::read_to_string(root.join(&file))
                    .unwrap()
                    .lines()
                    .count();
                assert!(lines <= LINES_MAX, "{file} has {lines} lines");
                programs += 1;
            }
        }
        assert!(programs > 0);
    }
}
