//! `cargo xtask bench`: measures our library, plain TCP and other software.
//!
//! A point is a measurement of one series (for example RDMA Writes with CRC) at one size. A round
//! measures each point in one or several turns. A turn measures all points of one size in quick
//! succession. The speed of a shared machine changes, so ratios are computed only from samples of
//! the same turn. A sample that other programs disturb is repeated.
//!
//! Files: `plan` (the points), `peers` (other software), `quiet` (load by other programs),
//! `samples` (medians and ratios), `targets`, `report`, `plot`, and `against` (comparison of two
//! builds of our program).

mod against;
mod peers;
mod plan;
mod plot;
mod quiet;
mod report;
mod samples;
mod sizes;
mod targets;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use iwarp_figures::load::two_cpus;
use serde_json::Value;

use plan::{Point, What};
use quiet::Quiet;
use samples::{Sample, Samples};
use xtask::context::{Context, find_program};
use xtask::process::{Log, cargo};

/// Directory of recorded results.
const RESULTS: &str = "bench/results";
/// The environment variable that is set if this program runs in its own network namespace.
const INSIDE: &str = "IWARP_BENCH_INSIDE";
/// Maximum number of attempts for a sample that other programs disturb.
const MAX_ATTEMPTS: u32 = 3;
/// Time limit of a single measurement.
const LIMIT: Duration = Duration::from_secs(120);
const BUILD_LIMIT: Duration = Duration::from_secs(30 * 60);

/// Arguments of `cargo xtask bench`.
#[derive(Debug, Clone, Args)]
pub(crate) struct BenchArgs {
    /// Use fewer sizes and turns, shorter samples, and 3 rounds
    #[arg(long)]
    quick: bool,
    /// Measure only these groups: bandwidth, latency, ops, peers, verbs, scale, cpu
    #[arg(long, value_name = "GROUP", num_args = 1.., value_delimiter = ',')]
    only: Vec<String>,
    /// Also write all samples, and facts about the machine, to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Number of rounds; each has up to six turns [default: 5, quick: 3]
    #[arg(long, value_name = "N")]
    rounds: Option<u32>,
    /// Total time in seconds to wait for an idle machine [default: 300, quick: 10]
    #[arg(long, value_name = "S")]
    wait: Option<u64>,
    /// Write the results to bench/results, and the tables to bench/RESULTS.md
    #[arg(long)]
    record: bool,
    /// Do not measure; draw the results in bench/results again
    #[arg(long, conflicts_with_all = ["quick", "only", "json", "rounds", "wait", "record", "list"])]
    draw: bool,
    /// Compare with another build of `iwarp-bench`: measure the points of our library alternately
    /// with both programs, and print the ratios
    #[arg(long, value_name = "PROGRAM", conflicts_with_all = ["json", "record", "draw"])]
    against: Option<PathBuf>,
    /// Do not install other software from Debian packages, even as root
    #[arg(long)]
    no_install: bool,
    /// Do not measure; list the points that would be measured
    #[arg(long)]
    list: bool,
}

/// Runs the measurements. A missed target is reported, but is not an error.
///
/// # Errors
/// Fails if the build fails, a group is unknown, nothing could be measured, or the results cannot
/// be written.
pub(crate) fn command(args: &BenchArgs) -> Result<()> {
    let context = Context::new(args.quick, !args.no_install)?;
    if args.draw {
        return draw_again(&context.root);
    }
    let points = plan::points(args.quick, &args.only)?;
    if args.list {
        for p in &points {
            println!(
                "{:10} {:24} {:>8}  {}",
                p.groups[0],
                p.series,
                sizes::show(p.size),
                p.what
            );
        }
        return Ok(());
    }
    if std::env::var_os(INSIDE).is_none() {
        build(&context)?;
        if context.install && points.iter().any(|p| matches!(p.what, What::Peer(_))) {
            xtask::packages::install_peers(&context);
        }
        if in_namespace()? {
            return Ok(());
        }
        println!("cannot create a network namespace: using the host's loopback interface");
    }
    measure(&context, args, &points)
}

fn build(context: &Context) -> Result<()> {
    let mut log = Log::create(&context.log_dir().join("bench-build.log"), BUILD_LIMIT)?;
    let mut command = cargo(&context.root);
    command.args([
        "build",
        "--release",
        "--package",
        "iwarp-bench",
        "--package",
        "iwarp-cli",
    ]);
    // Only the group `verbs` needs the C libraries, whose crate may be missing in a source archive.
    if context.has("crates/iwarp-verbs/Cargo.toml") {
        command.args(["--package", "iwarp-verbs"]);
    }
    log.run(&mut command)
        .with_context(|| format!("see {}", log.path().display()))
}

/// Runs this program again in a new network namespace, which has no other traffic. Returns `false`
/// if that is not possible.
fn in_namespace() -> Result<bool> {
    let possible = rustix::process::geteuid().is_root()
        && find_program("ip").is_some()
        && Command::new("unshare")
            .args(["-n", "ip", "link", "set", "lo", "up"])
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|s| s.success());
    if !possible {
        return Ok(false);
    }
    let status = Command::new("unshare")
        .args(["-n", "sh", "-c", "ip link set lo up && exec \"$@\"", "sh"])
        .arg(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(INSIDE, "1")
        .status()
        .context("cannot start this program in a network namespace")?;
    if !status.success() {
        bail!("this program failed in its network namespace: {status}");
    }
    Ok(true)
}

/// The programs and settings of the measurements.
struct Bench {
    program: PathBuf,
    programs: peers::Programs,
    cpus: Option<(usize, usize)>,
    quiet: Quiet,
}

impl Bench {
    fn run(&mut self, point: &Point) -> Result<Value> {
        match &point.what {
            What::Own(args) => {
                let mut command = Command::new(&self.program);
                let cpus = self
                    .cpus
                    .map_or_else(String::new, |(a, b)| format!("{a},{b}"));
                command.arg("--cpus").arg(cpus).args(args);
                let text = output(&mut command, LIMIT)?;
                serde_json::from_str(text.trim()).context("iwarp-bench has not printed JSON")
            }
            What::Peer(peer) => peer.measure(point.size, self.cpus, &self.programs),
        }
    }

    /// Measures a point, and adds its samples. Repeats the measurement if other programs disturb
    /// it. Appends `suffix` to the names of the series.
    fn sample(
        &mut self,
        point: &Point,
        turn: u32,
        suffix: &str,
        samples: &mut Samples,
    ) -> Result<()> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            self.quiet.begin();
            let values = self.run(point)?;
            let others = self.quiet.others();
            let good = others <= quiet::LIMIT;
            for (series, values) in point.results(&values) {
                let series = series + suffix;
                samples.add(Sample::new(turn, series, point.size, values, others, good));
            }
            if good || attempts >= MAX_ATTEMPTS {
                return Ok(());
            }
            self.quiet.wait();
        }
    }
}

/// Runs a command with a time limit, and returns its standard output.
///
/// # Errors
/// Fails if the command fails or exceeds the time limit. If the command fails, the error contains
/// the first line of its standard error.
pub(crate) fn output(command: &mut Command, limit: Duration) -> Result<String> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .env("RUST_BACKTRACE", "0")
        .spawn()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    fn reader(from: impl std::io::Read + Send + 'static) -> std::thread::JoinHandle<String> {
        let mut from = from;
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            // After an error, keep what was read so far.
            let _ = from.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        })
    }
    let out = child.stdout.take().map(reader);
    let err = child.stderr.take().map(reader);
    let end = Instant::now() + limit;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() > end {
            child.kill()?;
            child.wait()?;
            bail!("still running after {} s; killed", limit.as_secs());
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let text = |r: Option<std::thread::JoinHandle<String>>| {
        r.and_then(|r| r.join().ok()).unwrap_or_default()
    };
    let (out, err) = (text(out), text(err));
    if !status.success() {
        let line = err
            .lines()
            .chain(out.lines())
            .find(|l| !l.trim().is_empty());
        bail!("{status}: {}", line.unwrap_or("no output").trim());
    }
    Ok(out)
}

fn measure(context: &Context, args: &BenchArgs, points: &[Point]) -> Result<()> {
    let rounds = args.rounds.unwrap_or(if args.quick { 3 } else { 5 });
    let wait = args.wait.unwrap_or(if args.quick { 10 } else { 300 });
    let release = context.target.join("release");
    let mut bench = Bench {
        program: release.join("iwarp-bench"),
        programs: peers::Programs::new(context),
        cpus: two_cpus(),
        quiet: Quiet::new(Duration::from_secs(wait)),
    };
    let facts = facts(context, &bench.program)?;
    println!("{}", report::facts_line(&facts));
    let start = Instant::now();
    if let Some(old) = &args.against {
        return against::compare(&mut bench, old, points, rounds, start);
    }
    let (points, omitted) = available(points, &bench.programs);
    for (program, reason) in &omitted {
        println!("omitted: {program}: {reason}");
    }
    let (plan, turns) = (plan::in_turns(&points), plan::turns_of_a_round(&points));
    let mut samples = Samples::new(rounds, turns);
    let mut failures: Vec<(String, String)> = Vec::new();
    for round in 0..rounds {
        for (step, &(turn, index)) in plan.iter().enumerate() {
            let point = &points[index];
            if round >= point.max_rounds
                || failures.iter().filter(|f| f.0 == point.name()).count() > 1
            {
                continue;
            }
            progress(round, rounds, step, plan.len(), start, &point.name());
            let turn = round * turns + turn;
            if let Err(error) = bench.sample(point, turn, "", &mut samples) {
                failures.push((point.name(), format!("{error:#}")));
            }
        }
    }
    eprintln!();
    let report = report::Report {
        facts: &facts,
        samples: &samples,
        omitted: &omitted,
        failures: &failures,
        quick: args.quick,
    };
    let text = report.markdown();
    println!("{text}");
    let json = report::lines(&report.json())?;
    let mut dirs = vec![context.target.join("bench")];
    if args.record {
        dirs.push(context.root.join(RESULTS));
        record(&context.root.join("bench/RESULTS.md"), &text)?;
        draw_for_readme(&context.root, &samples, &facts)?;
    }
    for dir in &dirs {
        std::fs::create_dir_all(dir)?;
        std::fs::write(dir.join("results.json"), &json)?;
        std::fs::write(dir.join("summary.md"), &text)?;
        draw(dir, &samples, &facts)?;
        println!("written: {}", dir.display());
    }
    if let Some(file) = &args.json {
        std::fs::write(file, &json).with_context(|| format!("cannot write {}", file.display()))?;
    }
    if samples.is_empty() {
        bail!("nothing could be measured");
    }
    Ok(())
}

fn draw(dir: &Path, samples: &Samples, facts: &Value) -> Result<()> {
    for (name, svg) in plot::all(samples, facts)? {
        std::fs::write(dir.join(name), svg)?;
    }
    Ok(())
}

/// The folder of the README's pictures.
const PICTURES: &str = "docs/pictures";

fn draw_for_readme(root: &Path, samples: &Samples, facts: &Value) -> Result<()> {
    for (name, svg) in plot::for_readme(samples, facts)? {
        std::fs::write(root.join(PICTURES).join(name), svg)?;
    }
    Ok(())
}

fn draw_again(root: &Path) -> Result<()> {
    let dir = root.join(RESULTS);
    let results: Value = serde_json::from_slice(&std::fs::read(dir.join("results.json"))?)?;
    let samples = Samples::from_results(&results)
        .context("results.json does not contain samples in the expected format")?;
    draw(&dir, &samples, &results["facts"])?;
    draw_for_readme(root, &samples, &results["facts"])
}

fn progress(round: u32, rounds: u32, step: usize, steps: usize, start: Instant, name: &str) {
    use std::io::IsTerminal as _;
    if std::io::stderr().is_terminal() {
        let minutes = start.elapsed().as_secs() / 60;
        eprint!(
            "\rround {}/{rounds}, {step}/{steps}, {minutes} min, {name:40}",
            round + 1
        );
    } else if step == 0 {
        eprintln!(
            "round {}/{rounds} after {} s",
            round + 1,
            start.elapsed().as_secs()
        );
    }
}

/// Returns the points that can be measured. Also returns the programs that cannot be run, each with
/// the reason.
fn available(points: &[Point], programs: &peers::Programs) -> (Vec<Point>, Vec<(String, String)>) {
    let mut omitted: Vec<(String, String)> = Vec::new();
    let mut kept = Vec::new();
    for point in points {
        let reason = match &point.what {
            What::Peer(peer) => peer
                .missing(programs)
                .map(|why| (peer.program().to_owned(), why)),
            What::Own(_) => None,
        };
        match reason {
            None => kept.push(point.clone()),
            Some(r) if !omitted.contains(&r) => omitted.push(r),
            Some(_) => {}
        }
    }
    (kept, omitted)
}

fn facts(context: &Context, program: &Path) -> Result<Value> {
    let mut facts: Value =
        serde_json::from_str(&output(Command::new(program).arg("host"), LIMIT)?)?;
    let stdout_of = |program: &str, args: &[&str]| {
        let mut command = Command::new(program);
        command.args(args).current_dir(&context.root);
        output(&mut command, LIMIT).map_or_else(|_| "unknown".into(), |text| text.trim().to_owned())
    };
    let changed = stdout_of("git", &["status", "--porcelain", "--untracked-files=no"]);
    let mut commit = stdout_of("git", &["rev-parse", "--short", "HEAD"]);
    if !changed.is_empty() {
        commit.push_str(" with changes");
    }
    facts["commit"] = commit.into();
    facts["date"] = stdout_of("date", &["-u", "+%Y-%m-%dT%H:%M:%SZ"]).into();
    facts["rustc"] = stdout_of("rustc", &["--version"]).into();
    facts["namespace"] = std::env::var_os(INSIDE).is_some().into();
    facts["pinned"] = two_cpus().is_some().into();
    Ok(facts)
}

/// The line in `RESULTS.md` between the hand-written text and the tables.
const MARK: &str = "<!-- tables: written by `cargo xtask bench --record` -->";

fn record(path: &Path, tables: &str) -> Result<()> {
    let old = std::fs::read_to_string(path).unwrap_or_else(|_| format!("# Measured\n\n{MARK}\n"));
    let head = old.split_once(MARK).map_or(old.as_str(), |(head, _)| head);
    Ok(std::fs::write(path, format!("{head}{MARK}\n\n{tables}"))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_output_and_failures_are_returned() {
        let run = |script: &str| {
            output(
                Command::new("sh").args(["-c", script]),
                Duration::from_secs(10),
            )
        };
        assert_eq!(run("echo a; echo b >&2").unwrap(), "a\n");
        assert!(
            run("echo why >&2; exit 3")
                .unwrap_err()
                .to_string()
                .contains("why")
        );
        let slow = output(Command::new("sleep").arg("30"), Duration::from_millis(50));
        assert!(slow.unwrap_err().to_string().contains("still running"));
    }

    #[test]
    fn record_keeps_hand_written_text() {
        let path = std::env::temp_dir().join(format!("bench-record-{}", std::process::id()));
        std::fs::write(&path, format!("my words\n{MARK}\nold")).unwrap();
        record(&path, "new").unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("my words\n") && text.ends_with("new") && !text.contains("old"));
        std::fs::remove_file(&path).unwrap();
    }
}
