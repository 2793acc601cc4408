//! The order in which threads run. The thread that advances the time runs only if no other can.
//!
//! A seed selects one of two strategies. Random: at each point, any thread may run. Priorities
//! (probabilistic concurrency testing, PCT: Burckhardt and others, "A Randomized Scheduler with
//! Probabilistic Guarantees of Finding Bugs", ASPLOS 2010): the thread with the highest priority
//! runs. At a few points, and when it yields, it gets the lowest priority. That finds bugs which
//! require that a thread is suspended for a long time.

use shuttle::scheduler::{Schedule, Scheduler, Task, TaskId};
use std::collections::HashMap;

/// Upper bound of the number of priority changes.
const MAX_CHANGES: u64 = 6;
/// The changes happen at the first points at which another thread could run. Few executions have
/// more points than this.
const POINTS: u64 = 8192;
/// The task that advances the time: the first task that the main task starts.
const CLOCK_TASK: usize = 1;

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

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }
}

/// How the next thread is selected.
#[derive(Debug)]
enum Strategy {
    Random,
    Priorities {
        /// The rank of each task; the task with the lowest rank runs.
        ranks: HashMap<TaskId, i64>,
        /// The largest rank.
        last: i64,
        /// The points at which the running task moves to the last rank.
        changes: Vec<u64>,
    },
}

/// The order of one execution, determined by its seed.
#[derive(Debug)]
pub(crate) struct Order {
    seed: u64,
    random: Random,
    strategy: Strategy,
    /// Number of points so far at which another task could run.
    points: u64,
    has_begun: bool,
}

impl Order {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let strategy = match random.below(2) {
            0 => Strategy::Random,
            _ => {
                // In some executions, all changes are close to the beginning.
                let limit = POINTS >> random.below(8);
                let changes = random.below(MAX_CHANGES);
                Strategy::Priorities {
                    ranks: HashMap::new(),
                    last: i64::from(u32::MAX),
                    changes: (0..changes).map(|_| random.below(limit)).collect(),
                }
            }
        };
        Self {
            seed,
            random,
            strategy,
            points: 0,
            has_begun: false,
        }
    }

    /// Selects one of several tasks.
    fn choose(&mut self, tasks: &[TaskId], current: Option<TaskId>, is_yielding: bool) -> TaskId {
        self.points += 1;
        let any_task = |random: &mut Random| tasks[random.below(tasks.len() as u64) as usize];
        let Strategy::Priorities {
            ranks,
            last,
            changes,
        } = &mut self.strategy
        else {
            return any_task(&mut self.random);
        };
        for task in tasks {
            let initial = i64::from(self.random.next() as u32);
            ranks.entry(*task).or_insert(initial);
        }
        let demote = is_yielding || changes.contains(&self.points);
        if let Some(current) = current.filter(|_| demote) {
            *last += 1;
            ranks.insert(current, *last);
        }
        let first = tasks.iter().copied().min_by_key(|task| ranks.get(task));
        first.unwrap_or_else(|| any_task(&mut self.random))
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
        let clock = TaskId::from(CLOCK_TASK);
        let runnable = tasks.iter().filter(|task| task.runnable());
        let others: Vec<_> = runnable
            .map(|task| task.id())
            .filter(|&task| task != clock)
            .collect();
        Some(match others[..] {
            [] => clock,
            [only] => only,
            _ => self.choose(&others, current, is_yielding),
        })
    }

    fn next_u64(&mut self) -> u64 {
        self.random.next()
    }
}
