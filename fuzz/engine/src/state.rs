//! What is on disk: seeds, which are committed, and the state folder with what a search has found.
//!
//! The state folder has a folder for each target, with `corpus/` (inputs that reach something of their own), `failures/`,
//! `executions` (how many there were since the corpus began) and `running` (the input that is running; see [`crate::trace`]).

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::{Suite, Target};

/// Returns the committed seeds of a target, in the order of their names.
///
/// # Errors
/// If a file cannot be read, or if there is none.
pub fn seeds(suite: &Suite, target: &Target) -> Result<Vec<Vec<u8>>, String> {
    let dir = Path::new(suite.seeds).join(target.name);
    let files = files(&dir)?;
    if files.is_empty() {
        return Err(format!("{} has no seeds", dir.display()));
    }
    files.iter().map(|file| read(file)).collect()
}

fn read(file: &Path) -> Result<Vec<u8>, String> {
    fs::read(file).map_err(|error| format!("{}: {error}", file.display()))
}

/// Returns the files in a folder, in the order of their names: none if there is no such folder.
fn files(dir: &Path) -> Result<Vec<PathBuf>, String> {
    let fail = |error: std::io::Error| format!("{}: {error}", dir.display());
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(fail)?,
    };
    let mut files = Vec::new();
    for entry in entries {
        files.push(entry.map_err(fail)?.path());
    }
    files.sort();
    Ok(files)
}

/// The name of an input: the same content has the same name.
fn name(data: &[u8]) -> String {
    // FNV-1a with 64 bits.
    let hash = data.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, octet| {
        (hash ^ u64::from(*octet)).wrapping_mul(0x100_0000_01b3)
    });
    format!("{hash:016x}")
}

/// The folder of one target.
#[derive(Debug, Clone)]
pub(crate) struct Store(PathBuf);

impl Store {
    /// Makes the folders of a target.
    pub(crate) fn open(state: &Path, target: &Target) -> Result<Self, String> {
        let dir = state.join(target.name);
        let corpus = dir.join("corpus");
        fs::create_dir_all(&corpus).map_err(|error| format!("{}: {error}", corpus.display()))?;
        Ok(Self(dir))
    }

    /// Returns the corpus: each input with its file.
    pub(crate) fn corpus(&self) -> Result<Vec<(PathBuf, Vec<u8>)>, String> {
        let files = files(&self.0.join("corpus"))?;
        files
            .into_iter()
            .map(|file| read(&file).map(|data| (file, data)))
            .collect()
    }

    /// Adds an input to the corpus.
    pub(crate) fn keep(&self, data: &[u8]) -> Result<(), String> {
        let file = self.0.join("corpus").join(name(data));
        fs::write(&file, data).map_err(|error| format!("{}: {error}", file.display()))
    }

    /// Keeps an input that fails. Returns its file.
    pub(crate) fn fails(&self, kind: &str, data: &[u8]) -> Result<PathBuf, String> {
        let dir = self.0.join("failures");
        let file = dir.join(format!("{kind}-{}", name(data)));
        fs::create_dir_all(&dir)
            .and_then(|()| fs::write(&file, data))
            .map_err(|error| format!("{}: {error}", file.display()))?;
        Ok(file)
    }

    /// Returns the file that shows the running input.
    pub(crate) fn running(&self) -> PathBuf {
        self.0.join("running")
    }

    /// Returns the number of executions since the corpus began.
    pub(crate) fn executions(&self) -> u64 {
        let text = fs::read_to_string(self.0.join("executions"));
        text.ok()
            .and_then(|text| text.trim().parse().ok())
            .unwrap_or(0)
    }

    /// Adds to the number of executions.
    pub(crate) fn add_executions(&self, more: u64) -> Result<(), String> {
        let file = self.0.join("executions");
        fs::write(&file, format!("{}\n", self.executions() + more))
            .map_err(|error| format!("{}: {error}", file.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_found_again() {
        let state = std::env::temp_dir().join(format!("iwarp-fuzz-state-{}", std::process::id()));
        let target = Target {
            name: "test",
            run: |_| (),
            len_max: 1,
        };
        let store = Store::open(&state, &target).unwrap();
        assert_eq!((store.corpus().unwrap(), store.executions()), (vec![], 0));
        for data in [&[1][..], &[], &[1]] {
            store.keep(data).unwrap();
        }
        let mut corpus: Vec<_> = store
            .corpus()
            .unwrap()
            .into_iter()
            .map(|(_, d)| d)
            .collect();
        corpus.sort();
        assert_eq!(corpus, [vec![], vec![1]]);
        let file = store.fails("panic", &[7]).unwrap();
        assert_eq!(fs::read(file).unwrap(), [7]);
        store.add_executions(5).unwrap();
        store.add_executions(6).unwrap();
        assert_eq!(Store::open(&state, &target).unwrap().executions(), 11);
        fs::remove_dir_all(state).unwrap();
    }
}
