//! The process that searches for one target. It ends with a line that [`crate::command`] reads.

use std::fmt;
use std::fs;
use std::time::{Duration, Instant};

use crate::failure::{self, Failure};
use crate::minimise::minimise;
use crate::search::{Found, Search};
use crate::state::{Store, seeds};
use crate::trace::Trace;
use crate::{Suite, Target};

/// When a search ends.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Limit {
    /// After this time.
    Time(Duration),
    /// After so many executions.
    Executions(u64),
    /// When the seeds and the corpus have been run.
    Once,
}

/// What a search reports.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) executions: u64,
    pub(crate) milliseconds: u64,
    /// Inputs in the corpus.
    pub(crate) corpus: u64,
    /// Edges that were taken.
    pub(crate) edges: u64,
    /// Edges that are in the program.
    pub(crate) counters: u64,
    /// Edges with orders of magnitude.
    pub(crate) features: u64,
}

const WORD: &str = "report";

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{WORD} {} {} {} {} {} {}",
            self.executions,
            self.milliseconds,
            self.corpus,
            self.edges,
            self.counters,
            self.features
        )
    }
}

impl Report {
    /// Reads the line of a worker. Returns `None` for other lines.
    pub(crate) fn parse(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        if words.next() != Some(WORD) {
            return None;
        }
        let mut number = || words.next()?.parse::<u64>().ok();
        Some(Self {
            executions: number()?,
            milliseconds: number()?,
            corpus: number()?,
            edges: number()?,
            counters: number()?,
            features: number()?,
        })
    }
}

/// Searches until the limit, and prints the report. An input that fails is made small and kept.
///
/// # Errors
/// If an input fails, or if a file cannot be read or written.
pub(crate) fn work(
    suite: &Suite,
    target: &Target,
    store: &Store,
    limit: Limit,
    seed: u64,
) -> Result<(), String> {
    let running = store.running();
    let trace = Trace::new(&running, target.len_max)
        .map_err(|error| format!("{}: {error}", running.display()))?;
    let start = Instant::now();
    let mut search = Search::new(target, seed, trace);
    let ended = replay(suite, target, store, &mut search)
        .and_then(|()| go_on(store, limit, start, &mut search));
    store.add_executions(search.executions())?;
    let report = Report {
        executions: search.executions(),
        milliseconds: start.elapsed().as_millis() as u64,
        corpus: search.entries() as u64,
        edges: search.map().edges() as u64,
        counters: search.map().counters() as u64,
        features: search.map().features() as u64,
    };
    println!("{report}");
    match ended {
        Ok(()) => Ok(()),
        Err(Stop::Disk(error)) => Err(error),
        Err(Stop::Found(found)) => Err(tell(target, store, &found)?),
    }
}

/// Why a search ends early.
enum Stop {
    Found(Found),
    Disk(String),
}

/// Runs the seeds and the corpus, short ones first. What reaches nothing new is taken out of the corpus.
fn replay(
    suite: &Suite,
    target: &Target,
    store: &Store,
    search: &mut Search<'_>,
) -> Result<(), Stop> {
    for data in seeds(suite, target).map_err(Stop::Disk)? {
        search.add(data).map_err(Stop::Found)?;
    }
    let mut corpus = store.corpus().map_err(Stop::Disk)?;
    corpus.sort_by_key(|(_, data)| data.len());
    for (file, data) in corpus {
        if !search.add(data).map_err(Stop::Found)? {
            fs::remove_file(&file)
                .map_err(|error| Stop::Disk(format!("{}: {error}", file.display())))?;
        }
    }
    Ok(())
}

fn go_on(store: &Store, limit: Limit, start: Instant, search: &mut Search<'_>) -> Result<(), Stop> {
    loop {
        let over = match limit {
            Limit::Time(time) => start.elapsed() >= time,
            Limit::Executions(most) => search.executions() >= most,
            Limit::Once => true,
        };
        if over {
            return Ok(());
        }
        for data in search.round().map_err(Stop::Found)? {
            store.keep(&data).map_err(Stop::Disk)?;
        }
    }
}

/// Keeps an input that fails, made small if it fails again. Returns the text for the person.
fn tell(target: &Target, store: &Store, found: &Found) -> Result<String, String> {
    let same = |data: &[u8]| {
        failure::run(target, data).is_err_and(|failure| {
            (failure.kind, &failure.place) == (found.failure.kind, &found.failure.place)
        })
    };
    let again = found.failure.kind != "slow" && same(&found.data);
    let small = if again {
        minimise(&found.data, same)
    } else {
        found.data.clone()
    };
    let text = describe(target, store, &found.failure, &small)?;
    Ok(match again || found.failure.kind == "slow" {
        true => text,
        false => format!("{text} (it did not fail when it ran again)"),
    })
}

/// Keeps an input that fails. Returns the text for the person.
pub(crate) fn describe(
    target: &Target,
    store: &Store,
    failure: &Failure,
    data: &[u8],
) -> Result<String, String> {
    let file = store.fails(failure.kind, data)?;
    let hex: String = data.iter().map(|octet| format!("{octet:02x}")).collect();
    Ok(format!(
        "target {} {}; the input, kept as {}, is {hex}",
        target.name,
        failure.text,
        file.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_survive_the_pipe() {
        let report = Report {
            executions: 1,
            milliseconds: 2,
            corpus: 3,
            edges: 4,
            counters: 5,
            features: 6,
        };
        assert_eq!(Report::parse(&report.to_string()), Some(report));
        assert_eq!(Report::parse("report 1 2 3"), None);
        assert_eq!(Report::parse("anything else"), None);
    }

    #[test]
    fn a_failure_is_kept_small_and_the_corpus_survives() {
        let state = std::env::temp_dir().join(format!("iwarp-fuzz-worker-{}", std::process::id()));
        let seeds = state.join("seeds/test");
        fs::create_dir_all(&seeds).unwrap();
        fs::write(seeds.join("one"), [1, 2, 3]).unwrap();
        let target = Target {
            name: "test",
            run: |data| assert!(!data.contains(&0xee)),
            len_max: 16,
        };
        let path: &'static str = Box::leak(state.join("seeds").display().to_string().into());
        let suite = Suite {
            targets: &[],
            seeds: path,
        };
        let store = Store::open(&state, &target).unwrap();
        let error = work(&suite, &target, &store, Limit::Executions(1_000_000), 1).unwrap_err();
        assert!(error.ends_with(" is ee"), "{error}");
        assert!(store.executions() > 1);
        assert_eq!(work(&suite, &target, &store, Limit::Once, 1), Ok(()));
        fs::remove_dir_all(state).unwrap();
    }
}
