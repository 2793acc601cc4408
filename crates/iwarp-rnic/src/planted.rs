//! Bugs for the simulator to plant and to find. Compiled in with the feature `planted-bugs` only.

use core::sync::atomic::AtomicBool;

/// Look-ups do not compare with the end of a region or window. The host range still bounds them,
/// so that the bug shows in windows and in fast registrations and memory stays sound.
pub static SKIP_BOUNDS: AtomicBool = AtomicBool::new(false);
