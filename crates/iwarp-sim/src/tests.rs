//! Runs a few seeds, checks that runs repeat, and that every planted bug is found.

use crate::plant::Plant;
use crate::run::run;
use crate::world::Pool;

/// Number of seeds, in at least one of which each planted bug has to be found.
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
fn a_seed_is_the_same_run_every_time() {
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
        assert!(found > 0, "{name} is not found in {PLANT_SEEDS} seeds");
    }
}
