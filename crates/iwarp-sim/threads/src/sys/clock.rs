//! The virtual clock. It advances when it is read, while programs compute, and when all threads
//! sleep.

use crate::world;

/// Time that it takes to read the clock, in nanoseconds.
const READ_TIME: u64 = 20;

pub(crate) fn now_ns() -> u64 {
    let now = world::spend(READ_TIME);
    world::note_clock_read(now);
    now
}
