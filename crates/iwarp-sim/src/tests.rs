//! Runs a few seeds, and checks that runs are reproducible and that every planted bug is found.

use std::collections::BTreeSet;

use crate::forgery::Forgery;
use crate::plant::Plant;
use crate::run::run;
use crate::world::{Ending, Fate, Pool};

/// At least one of this many seeds must find each planted bug.
const PLANT_SEEDS: u64 = 300;

#[test]
fn seeds_pass() {
    let mut pool = Pool::default();
    for seed in 0..150 {
        let outcome = run(seed, None, pool, false);
        pool = outcome.pool;
        assert_eq!(outcome.failure, None, "seed {seed}");
    }
}

#[test]
fn same_seed_gives_same_run() {
    for plant in [Plant::DropCompletion, Plant::LoseWakeup] {
        for seed in 0..40 {
            let once = run(seed, Some(plant), Pool::default(), false);
            let again = run(seed, Some(plant), Pool::default(), false);
            assert_eq!(once.failure, again.failure);
            assert_eq!(once.reached, again.reached);
        }
    }
}

#[test]
fn every_planted_bug_is_found() {
    for (name, plant) in Plant::ALL.iter().filter(|(_, p)| p.is_available()) {
        let mut pool = Pool::default();
        let mut found = 0;
        for seed in 0..PLANT_SEEDS {
            let outcome = run(seed, Some(*plant), pool, false);
            pool = outcome.pool;
            found += u32::from(outcome.failure.is_some());
        }
        assert!(found > 0, "none of {PLANT_SEEDS} seeds found {name}");
    }
}

#[test]
fn seeds_cover_every_kind() {
    let mut kinds = BTreeSet::new();
    let mut pool = Pool::default();
    for seed in 0..60 {
        let outcome = run(seed, None, pool, false);
        pool = outcome.pool;
        let first_words = outcome
            .reached
            .iter()
            .filter_map(|name| name.split(' ').next());
        kinds.extend(first_words.map(str::to_owned));
    }
    let wanted = [
        "RTR",
        "completes",
        "event",
        "fate",
        "fault",
        "fills",
        "flag",
        "framing",
        "posts",
        "reads",
        "receives",
        "state",
        "status",
        "stream",
    ];
    assert_eq!(kinds, wanted.map(str::to_owned).into());
}

/// Fates with equal numbers would be counted as the same fate.
#[test]
fn fates_have_different_numbers() {
    let fates = [
        Fate::Clean(Ending::Close(0)),
        Fate::Clean(Ending::Abort(0)),
        Fate::Clean(Ending::Reset),
        Fate::Clean(Ending::Forge(0, Forgery::QueueNumber)),
        Fate::Close(2, 0),
        Fate::Close(0, 0),
        Fate::Abort(0, 0),
        Fate::ToError(0, 0),
        Fate::Reset(0),
        Fate::Flip(0),
        Fate::Stall(0, 0),
        Fate::Illegal(0),
        Fate::TooLong(0),
        Fate::BadReceive(0),
        Fate::Starve(0),
    ];
    let (numbers, names): (BTreeSet<_>, BTreeSet<_>) =
        fates.map(Fate::number_and_name).into_iter().unzip();
    assert_eq!((numbers.len(), names.len()), (fates.len(), fates.len()));
}
