//! `cargo xtask bench --against PROGRAM`: measures the same points alternately with two builds of
//! `iwarp-bench`, and prints the ratios of their figures.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result, bail};

use super::plan::{Point, What, in_turns, turns_of_a_round};
use super::samples::Samples;
use super::sizes::{digits, show};
use super::{Bench, progress};

/// The compared metrics, and whether larger values are better.
const METRICS: &[(&str, bool)] = &[
    ("mmsg", true),
    ("med_us", false),
    ("echo_kmsg", true),
    ("setup_us", false),
    ("bytes", false),
];
/// Suffix of the names of the old program's series.
const OLD: &str = " old";
/// Ratios below this are listed after the table.
const WORSE: f64 = 0.97;

/// Returns `true` if the point measures our library, which may differ between the two programs.
fn is_ours(point: &Point) -> bool {
    match &point.what {
        What::Own(args) => {
            let is = |name: &str| args.iter().any(|arg| arg == name);
            args.first().is_some_and(|arg| arg.starts_with("iwarp-"))
                || is("spin-lat")
                || is("scale") && is("iwarp")
        }
        What::Peer(_) => false,
    }
}

/// Measures our points with both programs and prints the ratios.
///
/// # Errors
/// Fails if nothing could be measured. A point that fails is reported and omitted.
pub(super) fn compare(
    bench: &mut Bench,
    old: &Path,
    points: &[Point],
    rounds: u32,
    start: Instant,
) -> Result<()> {
    let points: Vec<Point> = points.iter().filter(|p| is_ours(p)).cloned().collect();
    let (plan, turns) = (in_turns(&points), turns_of_a_round(&points));
    let mut samples = Samples::new(rounds, turns);
    let programs = [bench.program.clone(), old.to_owned()];
    let copies = bench.program.with_file_name("against");
    for round in 0..rounds {
        let [new, old] = fresh_copies(&programs, &copies, round)?;
        for (step, &(turn, index)) in plan.iter().enumerate() {
            let point = &points[index];
            progress(round, rounds, step, plan.len(), start, &point.name());
            let turn = round * turns + turn;
            let mut both = [(&new, ""), (&old, OLD)];
            // Alternate the order, so that neither program always runs second.
            if (turn + step as u32).is_multiple_of(2) {
                both.reverse();
            }
            for (program, suffix) in both {
                bench.program.clone_from(program);
                if let Err(error) = bench.sample(point, turn, suffix, &mut samples) {
                    eprintln!("\n{}{suffix}: {error:#}", point.name());
                }
            }
        }
    }
    let [new, old] = programs;
    bench.program = new;
    std::fs::remove_dir_all(&copies)?;
    eprintln!();
    if samples.is_empty() {
        bail!("nothing could be measured");
    }
    println!("{}", table(&samples, &old.display().to_string()));
    Ok(())
}

/// Copies both programs into `folder`, with file names whose length changes each round. The length
/// matters: the same binary gave 17 million 64-byte Sends per second under one path and 28 million
/// under another. The probable reason is that a program stores its path on the heap, which shifts
/// all later allocations.
fn fresh_copies(programs: &[PathBuf; 2], folder: &Path, round: u32) -> Result<[PathBuf; 2]> {
    std::fs::create_dir_all(folder)?;
    let prefix = "x".repeat(round as usize * 13 % 64);
    let copies = [0, 1].map(|side| folder.join(format!("{prefix}{round}-{side}")));
    for (program, copy) in programs.iter().zip(&copies) {
        std::fs::copy(program, copy)
            .with_context(|| format!("cannot copy {}", program.display()))?;
    }
    Ok(copies)
}

/// Returns the ratios of all series as Markdown. Above one, the new program is better.
fn table(samples: &Samples, old: &str) -> String {
    let mut text = format!("Old: {old}. A ratio above 1 means that the new program is better.\n\n");
    text += "| series | size | metric | old | new | ratio | minimum | maximum |\n";
    text += "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |\n";
    let mut worse = Vec::new();
    for size in samples.sizes("") {
        for series in samples.series("", size) {
            if series.ends_with(OLD) {
                continue;
            }
            let before = format!("{series}{OLD}");
            for &(metric, larger_is_better) in METRICS {
                let (new, old) = ((series, size), (before.as_str(), size));
                let (above, below) = if larger_is_better {
                    (new, old)
                } else {
                    (old, new)
                };
                let Some(ratio) = samples.ratio(&[above], &[below], metric, larger_is_better)
                else {
                    continue;
                };
                let value = |key| samples.value(key, metric).map_or(0.0, |m| m.median);
                text += &format!(
                    "| {series} | {} | {metric} | {} | {} | {:.3}{} | {:.2} | {:.2} |\n",
                    show(size),
                    digits(value(old)),
                    digits(value(new)),
                    ratio.median,
                    if ratio.noisy { " (noisy)" } else { "" },
                    ratio.min,
                    ratio.max,
                );
                if ratio.median < WORSE {
                    worse.push(format!(
                        "{series}/{} {metric} {:.3}",
                        show(size),
                        ratio.median
                    ));
                }
            }
        }
    }
    let (undisturbed, all) = samples.undisturbed_and_all();
    text += &format!("\n{undisturbed} of {all} samples were undisturbed. Ratios below {WORSE}: ");
    text += &if worse.is_empty() {
        "none".into()
    } else {
        worse.join(", ")
    };
    text
}

#[cfg(test)]
mod tests {
    use super::super::samples::tests::sample;
    use super::*;

    #[test]
    fn ratio_above_one_is_better() {
        let mut samples = Samples::new(1, 1);
        samples.add(sample(0, "bw:write", 64, &[("mmsg", 3.0)], true));
        samples.add(sample(0, "bw:write old", 64, &[("mmsg", 2.0)], true));
        samples.add(sample(0, "lat:send", 4, &[("med_us", 8.0)], true));
        samples.add(sample(0, "lat:send old", 4, &[("med_us", 4.0)], true));
        let text = table(&samples, "before");
        assert!(
            text.contains("| bw:write | 64 | mmsg | 2.00 | 3.00 | 1.500 |"),
            "{text}"
        );
        assert!(
            text.contains("| lat:send | 4 | med_us | 4.00 | 8.00 | 0.500 |"),
            "{text}"
        );
        assert!(
            text.ends_with("below 0.97: lat:send/4 med_us 0.500"),
            "{text}"
        );
    }

    #[test]
    fn only_own_points_are_compared() {
        let points = super::super::plan::points(true, &[]).unwrap();
        let ours: Vec<_> = points
            .iter()
            .filter(|p| is_ours(p))
            .map(|p| p.series)
            .collect();
        assert!(ours.contains(&"bw:write") && ours.contains(&"lat:spin"));
        assert!(ours.contains(&"scale:iwarp-spin"));
        assert!(!ours.contains(&"bw:tcp") && !ours.contains(&"scale:tcp"));
        assert!(!ours.contains(&"bw:probe") && !ours.contains(&"bw:ucx-tag"));
    }
}
