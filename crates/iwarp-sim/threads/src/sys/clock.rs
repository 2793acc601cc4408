//! The clock of the world. Time passes with each look at it, with the work of programs, and when no
//! thread can do anything else.

use crate::world;

/// How long a look at the clock takes.
const LOOK: u64 = 20;

pub(crate) fn now_ns() -> u64 {
    let now = world::spend(LOOK);
    world::note_look(now);
    now
}
