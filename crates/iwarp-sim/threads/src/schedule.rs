//! The order in which threads run. Time advances by itself only if no thread can run.
//!
//! A seed selects one of two strategies. At random: at each point any thread may run. By priorities
//! (probabilistic concurrency testing, PCT: Burckhardt and others, "A Randomized Scheduler with
//! Probabilistic Guarantees of Finding Bugs", ASPLOS 2010): the thread with the highest priority
//! runs; at a few points, and when it yields, it becomes the last. That finds bugs for which a
//! thread must pause for long.

use shuttle::scheduler::{Schedule, Scheduler, Task, TaskId};
use std::collections::HashMap;

/// Largest number of priority changes.
const CHANGES: u64 = 6;
/// The changes are among this many points where another thread could run. Few executions have
/// more.
const POINTS: u64 = 8192;
/// The task that advances the time: the first one that the main task starts.
const TIME: usize = 1;

/// Pseudo-random numbers (SplitMix64: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
/// Generators", 2014).
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, below: u64) -> u64 {
        self.next() % below.max(1)
    }
}

/// How the next thread is selected.
#[derive(Debug)]
enum Strategy {
    Chance,
    Priorities {
        /// Priorities; the lowest number runs first.
        of: HashMap<TaskId, i64>,
        /// Higher than all others.
        last: i64,
        changes: Vec<u64>,
    },
}

/// The order of one execution, determined by its seed.
#[derive(Debug)]
pub(crate) struct Order {
    seed: u64,
    random: Random,
    way: Strategy,
    points: u64,
    has_begun: bool,
}

impl Order {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let way = match random.below(2) {
            0 => Strategy::Chance,
            _ => {
                // Some of the changes are close to the beginning.
                let within = POINTS >> random.below(8);
                let changes = random.below(CHANGES);
                Strategy::Priorities {
                    of: HashMap::new(),
                    last: i64::from(u32::MAX),
                    changes: (0..changes).map(|_| random.below(within)).collect(),
                }
            }
        };
        Self {
            seed,
            random,
            way,
            points: 0,
            has_begun: false,
        }
    }

    /// Selects one of several tasks.
    fn choose(&mut self, tasks: &[TaskId], current: Option<TaskId>, is_yielding: bool) -> TaskId {
        self.points += 1;
        let chance = |random: &mut Random| tasks[random.below(tasks.len() as u64) as usize];
        let Strategy::Priorities { of, last, changes } = &mut self.way else {
            return chance(&mut self.random);
        };
        for task in tasks {
            let first = i64::from(self.random.next() as u32);
            of.entry(*task).or_insert(first);
        }
        let changes = is_yielding || changes.contains(&self.points);
        if let Some(current) = current.filter(|_| changes) {
            *last += 1;
            of.insert(current, *last);
        }
        let first = tasks.iter().copied().min_by_key(|task| of.get(task));
        first.unwrap_or_else(|| chance(&mut self.random))
    }
}

impl Scheduler for Order {
    fn new_execution(&mut self) -> Option<Schedule> {
        let first = !std::mem::replace(&mut self.has_begun, true);
        first.then(|| Schedule::new(self.seed))
    }

    fn next_task(
        &mut self,
        tasks: &[&Task],
        current: Option<TaskId>,
        is_yielding: bool,
    ) -> Option<TaskId> {
        let time = TaskId::from(TIME);
        let can_go_on = tasks.iter().filter(|task| task.runnable());
        let others: Vec<_> = can_go_on
            .map(|task| task.id())
            .filter(|&task| task != time)
            .collect();
        Some(match others[..] {
            [] => time,
            [only] => only,
            _ => self.choose(&others, current, is_yielding),
        })
    }

    fn next_u64(&mut self) -> u64 {
        self.random.next()
    }
}
