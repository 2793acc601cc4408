//! The virtual clock. It advances with each reading, with the work of programs, and when no thread
//! can do anything else.

use crate::world;

const LOOK: u64 = 20;

pub(crate) fn now_ns() -> u64 {
    let now = world::spend(LOOK);
    world::note_look(now);
    now
}
