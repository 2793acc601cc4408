//! Which opportunities a plan takes, and what they depend on.

use super::plan::{PROCESS, Plan};
use std::sync::Arc;

fn plan(text: &str) -> Arc<Plan> {
    Plan::of(&text.parse().unwrap()).unwrap()
}

/// The opportunities of a queue pair that the first rule takes, of `of`.
fn taken(plan: &Plan, subject: u32, of: u64) -> Vec<u64> {
    let mut count = 0;
    let all = (0..of).filter_map(|_| plan.opportunity(0, subject, &mut count));
    all.map(|taken| taken.n).collect()
}

#[test]
fn opportunities_are_taken_as_the_rule_says() {
    assert_eq!(taken(&plan("seed=100;reset"), 1, 5), [1]);
    assert_eq!(taken(&plan("seed=101;reset,nth=3"), 1, 5), [3]);
    assert_eq!(taken(&plan("seed=102;reset,every=2"), 1, 5), [2, 4]);
    assert_eq!(taken(&plan("seed=103;reset,every=2,times=1"), 1, 5), [2]);
    assert_eq!(taken(&plan("seed=104;reset,p=1"), 1, 3), [1, 2, 3]);
    assert_eq!(taken(&plan("seed=105;reset,p=0"), 1, 300), [0u64; 0]);
    assert_eq!(taken(&plan("seed=106;reset,bytes=1K"), 1, 9), [0u64; 0]);
    assert_eq!(taken(&plan("seed=107;reset,time=1s"), 1, 9), [0u64; 0]);
}

#[test]
fn a_time_is_a_condition_of_what_is_counted() {
    assert_eq!(taken(&plan("seed=108;post,time=1000s"), 1, 9), [0u64; 0]);
    assert_eq!(taken(&plan("seed=109;post,nth=2,time=0s"), 1, 9), [2]);
}

/// What one queue pair is met by depends neither on other queue pairs nor on other rules.
#[test]
fn the_seed_decides_and_nothing_else() {
    let alone = plan("seed=110;reset,p=10%");
    let both = plan("seed=110;reset,p=10%;crc,p=50%");
    let first = taken(&alone, 1, 1000);
    assert!((50..200).contains(&first.len()), "{}", first.len());
    let mut counts = [0u64; 2];
    let mut met = [Vec::new(), Vec::new()];
    for _ in 0..1000 {
        for (i, subject) in [2u32, 1].into_iter().enumerate() {
            let found = both.opportunity(0, subject, &mut counts[i]);
            met[i].extend(found.map(|taken| taken.n));
        }
    }
    assert_eq!(met[1], first, "the same queue pair, among others");
    assert_ne!(met[0], first, "another queue pair");
    assert_ne!(taken(&plan("seed=111;reset,p=10%"), 1, 1000), first);
}

#[test]
fn a_range_is_chosen_for_each_queue_pair() {
    let plan = plan("seed=112;reset,bytes=1..1G,times=100");
    let chosen: Vec<_> = (1..=8).map(|qp| plan.threshold(0, qp).unwrap()).collect();
    let again: Vec<_> = (1..=8).map(|qp| plan.threshold(0, qp).unwrap()).collect();
    assert_eq!(chosen, again);
    let mut different = chosen;
    different.sort_unstable();
    different.dedup();
    assert_eq!(different.len(), 8);
}

#[test]
fn devices_with_the_same_specification_share_a_plan() {
    assert!(Arc::ptr_eq(&plan("seed=113;crc"), &plan("seed=113;crc")));
    assert!(!Arc::ptr_eq(&plan("seed=113;crc"), &plan("seed=114;crc")));
}

#[test]
fn times_limit_the_whole_process() {
    let plan = plan("seed=115;reset,nth=1,times=2");
    let acted = (1..=5).filter(|qp| !taken(&plan, *qp, 1).is_empty());
    assert_eq!(acted.count(), 2);
    assert!(!plan.may(0));
    assert!(plan.draw(0, PROCESS, 0, "a") != plan.draw(0, PROCESS, 0, "b"));
}
