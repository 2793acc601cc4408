//! The search: changes inputs of the corpus, and keeps those that reach something new.

use crate::Target;
use crate::coverage::{Map, Pair, record};
use crate::failure::{self, Failure};
use crate::mutate::{Random, mutate};
use crate::trace::Trace;

/// How many changed inputs are made of one before the next one is chosen.
const ROUND: u32 = 32;

/// An input of the corpus.
#[derive(Debug)]
struct Entry {
    data: Vec<u8>,
    /// What it compares, once known.
    pairs: Option<Vec<Pair>>,
    /// How often it was chosen.
    chosen: u64,
}

/// A search for one target.
#[derive(Debug)]
pub(crate) struct Search<'a> {
    target: &'a Target,
    map: Map,
    entries: Vec<Entry>,
    random: Random,
    trace: Trace,
    executions: u64,
}

/// An input that fails, and how.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// The input as it was found.
    pub(crate) data: Vec<u8>,
    /// What it does.
    pub(crate) failure: Failure,
}

impl<'a> Search<'a> {
    /// Begins with an empty corpus.
    pub(crate) fn new(target: &'a Target, seed: u64, trace: Trace) -> Self {
        let map = Map::new();
        map.clear();
        Self {
            target,
            map,
            entries: Vec::new(),
            random: Random::new(seed),
            trace,
            executions: 0,
        }
    }

    /// Returns the number of inputs that were run.
    pub(crate) const fn executions(&self) -> u64 {
        self.executions
    }

    /// Returns the number of inputs in the corpus.
    pub(crate) const fn entries(&self) -> usize {
        self.entries.len()
    }

    /// Returns what was reached.
    pub(crate) const fn map(&self) -> &Map {
        &self.map
    }

    /// Runs one input. Returns the number of features that no input before had.
    fn execute(&mut self, data: &[u8]) -> Result<usize, Found> {
        self.executions += 1;
        self.trace.begins(data, self.executions);
        match failure::run(self.target, data) {
            Ok(()) => Ok(self.map.take()),
            Err(failure) => Err(Found {
                data: data.to_vec(),
                failure,
            }),
        }
    }

    /// Runs an input that exists already. Returns `true` if it belongs to the corpus, because it reaches something new or because nothing is
    /// instrumented.
    pub(crate) fn add(&mut self, data: Vec<u8>) -> Result<bool, Found> {
        let new = self.execute(&data)?;
        let keeps = new > 0 || self.map.counters() == 0;
        if keeps {
            self.entries.push(Entry {
                data,
                pairs: None,
                chosen: 0,
            });
        }
        Ok(keeps)
    }

    /// Chooses one input and runs changes of it. Returns those that reach something new, which are in the corpus already.
    pub(crate) fn round(&mut self) -> Result<Vec<Vec<u8>>, Found> {
        let chosen = self.choose();
        let (mut parent, pairs) = match chosen {
            Some(at) => self.parent(at),
            None => (Vec::new(), Vec::new()),
        };
        let mut found = Vec::new();
        let mut data = Vec::new();
        for _ in 0..ROUND {
            data.clear();
            data.extend_from_slice(&parent);
            let other = match self.entries.len() {
                0 => &[][..],
                n => &self.entries[self.random.below(n)].data,
            };
            mutate(
                &mut self.random,
                &mut data,
                other,
                &pairs,
                self.target.len_max,
            );
            if self.execute(&data)? > 0 {
                self.entries.push(Entry {
                    data: data.clone(),
                    pairs: None,
                    chosen: 0,
                });
                found.push(data.clone());
                parent.clone_from(&data);
            }
        }
        Ok(found)
    }

    /// Chooses the one of two inputs that was chosen less often, so that new ones catch up.
    fn choose(&mut self) -> Option<usize> {
        let n = self.entries.len();
        if n == 0 {
            return None;
        }
        let (a, b) = (self.random.below(n), self.random.below(n));
        let at = if self.entries[a].chosen <= self.entries[b].chosen {
            a
        } else {
            b
        };
        self.entries[at].chosen += 1;
        Some(at)
    }

    /// Returns the content of an input of the corpus and what it compares.
    fn parent(&mut self, at: usize) -> (Vec<u8>, Vec<Pair>) {
        let target = self.target;
        let entry = &mut self.entries[at];
        if entry.pairs.is_none() {
            // It has passed before. If a target is not deterministic, a failure now shows again when the search goes on.
            let data = &entry.data;
            let pairs = record(|| drop(failure::run(target, data)));
            entry.pairs = Some(pairs);
            self.map.clear();
            self.executions += 1;
        }
        let entry = &self.entries[at];
        (entry.data.clone(), entry.pairs.clone().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(name: &str) -> (Trace, std::path::PathBuf) {
        let file = format!("iwarp-fuzz-search-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(file);
        (Trace::new(&path, 64).unwrap(), path)
    }

    #[test]
    fn a_search_counts_its_inputs_and_ends_with_the_one_that_fails() {
        let target = Target {
            name: "test",
            run: |data| assert!(data.len() < 20),
            len_max: 64,
        };
        let (trace, path) = trace("fails");
        let mut search = Search::new(&target, 1, trace);
        assert_eq!(search.add(vec![1; 10]), Ok(true), "kept without counters");
        let found = loop {
            match search.round() {
                Ok(new) => assert_eq!(new, Vec::<Vec<u8>>::new()),
                Err(found) => break found,
            }
        };
        assert!(found.data.len() >= 20 && found.data.len() <= 64);
        assert_eq!(found.failure.kind, "panic");
        assert_eq!(crate::trace::read(&path).unwrap().data, found.data);
        assert_eq!(
            crate::trace::read(&path).unwrap().number,
            search.executions()
        );
        std::fs::remove_file(path).unwrap();
    }
}
