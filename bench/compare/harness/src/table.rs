//! The tables of results, in Markdown.

use crate::Samples;
use crate::programs::{LIST, Program};
use compare_harness::Outcome;

/// Prints a table of lines and allocations, and one of times.
pub(crate) fn print(programs: &[&Program], works: &[String], samples: &Samples) {
    println!(
        "| | Lines | `unsafe` | {} |",
        heads(works, "allocations, client + server")
    );
    println!("| --- | ---: | ---: |{}", " ---: |".repeat(works.len()));
    for program in programs {
        let (lines, unsafe_blocks) = program.lines();
        let cells = works
            .iter()
            .map(|work| allocations(sample(samples, program, work)));
        println!(
            "| {} | {lines} | {unsafe_blocks} | {} |",
            program.name,
            join(cells)
        );
    }
    println!("\n| | {} |", heads(works, "µs each; ÷ TCP"));
    println!("| --- |{}", " ---: |".repeat(works.len()));
    for program in programs {
        let cells = works.iter().map(|work| {
            let own = sample(samples, program, work);
            time(own, sample(samples, &LIST[0], work))
        });
        println!("| {} | {} |", program.name, join(cells));
    }
    println!();
}

fn heads(works: &[String], what: &str) -> String {
    join(works.iter().map(|work| format!("{work}: {what}")))
}

fn join(cells: impl Iterator<Item = String>) -> String {
    cells.collect::<Vec<_>>().join(" | ")
}

fn sample<'a>(samples: &'a Samples, program: &Program, work: &str) -> &'a [Option<Outcome>] {
    samples
        .get(&(program.name, work.to_owned()))
        .map_or(&[], Vec::as_slice)
}

/// Returns minimum, median and maximum.
fn spread(mut values: Vec<f64>) -> Option<(f64, f64, f64)> {
    values.sort_by(f64::total_cmp);
    let (first, last) = (*values.first()?, *values.last()?);
    let middle = (values[(values.len() - 1) / 2] + values[values.len() / 2]) / 2.0;
    Some((first, middle, last))
}

fn allocations(own: &[Option<Outcome>]) -> String {
    let median = |part: fn(&Outcome) -> f64| {
        spread(own.iter().flatten().map(part).collect()).map(|(_, median, _)| median)
    };
    match (
        median(|o| o.client_allocations),
        median(|o| o.server_allocations),
    ) {
        (Some(client), Some(server)) => format!("{client:.1} + {server:.1}"),
        _ => "failed".into(),
    }
}

fn time(own: &[Option<Outcome>], tcp: &[Option<Outcome>]) -> String {
    let times = own
        .iter()
        .flatten()
        .map(|o| o.nanoseconds / 1000.0)
        .collect();
    let pairs = own
        .iter()
        .zip(tcp)
        .filter_map(|(own, tcp)| Some((own.as_ref()?, tcp.as_ref()?)));
    let ratios = pairs
        .map(|(own, tcp)| own.nanoseconds / tcp.nanoseconds)
        .collect();
    match (spread(times), spread(ratios)) {
        (Some((_, time, _)), Some((least, ratio, most))) => {
            format!("{time:.1}; {ratio:.2} [{least:.2}–{most:.2}]")
        }
        _ => "failed".into(),
    }
}
