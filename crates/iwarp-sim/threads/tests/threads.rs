//! Runs `IWARP_THREADS_SEEDS` seeds, or only the seed `IWARP_THREADS_SEED`.

use iwarp_sim_threads::{Plant, run};

const DEFAULT_SEEDS: u64 = 200;

fn env_number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn no_message_is_lost_or_delayed() {
    if let Some(seed) = env_number("IWARP_THREADS_SEED") {
        run(seed, None);
        return;
    }
    let seeds = env_number("IWARP_THREADS_SEEDS").unwrap_or(DEFAULT_SEEDS);
    (0..seeds).for_each(|seed| run(seed, None));
}

#[test]
fn planted_bugs_are_detected() {
    for plant in [
        Plant::LosesSignals,
        Plant::IgnoresTime,
        Plant::ForgetsArrivals,
        Plant::KeepsLease,
        Plant::ChecksFirst,
        Plant::NeverResumes,
        Plant::LeavesNoNote,
    ] {
        let failed = (0..10 * DEFAULT_SEEDS)
            .find(|seed| std::panic::catch_unwind(|| run(*seed, Some(plant))).is_err());
        let seed = failed.unwrap_or_else(|| panic!("{plant:?} is not detected"));
        println!("{plant:?} is detected by seed {seed}");
    }
}
