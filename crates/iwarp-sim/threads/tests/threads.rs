//! Runs `IWARP_THREADS_SEEDS` seeds, or only the seed `IWARP_THREADS_SEED`.

use iwarp_sim_threads::{Plant, run};

/// Default number of seeds.
const FEW: u64 = 200;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn no_message_is_lost_or_delayed() {
    if let Some(seed) = number("IWARP_THREADS_SEED") {
        run(seed, None);
        return;
    }
    let seeds = number("IWARP_THREADS_SEEDS").unwrap_or(FEW);
    (0..seeds).for_each(|seed| run(seed, None));
}

/// A few seeds detect each planted bug.
#[test]
fn planted_bugs_are_detected() {
    for plant in [
        Plant::LosesSignals,
        Plant::IgnoresTime,
        Plant::ForgetsArrivals,
        Plant::KeepsLease,
        Plant::LooksFirst,
        Plant::NeverResumes,
        Plant::LeavesNoNote,
    ] {
        let noticed = (0..10 * FEW)
            .find(|seed| std::panic::catch_unwind(|| run(*seed, Some(plant))).is_err());
        let seed = noticed.unwrap_or_else(|| panic!("{plant:?} is not detected"));
        println!("{plant:?} is detected by seed {seed}");
    }
}
