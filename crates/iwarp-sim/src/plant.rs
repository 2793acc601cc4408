//! Bugs that are planted on purpose, to show that the checks find them.
//!
//! The simulator's driver or host behaves as if a program or an RNIC had the bug. Only `SkipBounds`
//! changes the RNIC itself, and needs the feature `planted-bugs`.

use crate::rng::Rng;

/// A kind of bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plant {
    /// A completion is not written.
    DropCompletion,
    /// A completion is written twice.
    RepeatCompletion,
    /// Two completions are swapped.
    SwapCompletions,
    /// A wake-up to send is lost.
    LoseWakeup,
    /// A held Send is not processed when a receive is posted.
    ForgetHeld,
    /// A completion event is lost.
    LoseNotify,
    /// Regions are registered longer than the program requested.
    WideGrant,
    /// The STag table does not check the end of a region (feature `planted-bugs`).
    SkipBounds,
    /// An octet is changed when it is placed, after its CRC was checked.
    CorruptPlacement,
    /// An octet outside all registered regions is changed.
    StrayWrite,
}

impl Plant {
    /// All bugs, with their names on the command line.
    pub const ALL: &'static [(&'static str, Self)] = &[
        ("drop-completion", Self::DropCompletion),
        ("repeat-completion", Self::RepeatCompletion),
        ("swap-completions", Self::SwapCompletions),
        ("lose-wakeup", Self::LoseWakeup),
        ("forget-held", Self::ForgetHeld),
        ("lose-notify", Self::LoseNotify),
        ("wide-grant", Self::WideGrant),
        ("skip-bounds", Self::SkipBounds),
        ("corrupt-placement", Self::CorruptPlacement),
        ("stray-write", Self::StrayWrite),
    ];

    /// Returns the bug that has this name on the command line.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(n, _)| *n == name).map(|(_, p)| *p)
    }

    /// Returns `true` if this build can plant the bug.
    pub const fn is_available(self) -> bool {
        !matches!(self, Self::SkipBounds) || cfg!(feature = "planted-bugs")
    }
}

/// The bug of one run, and the number of occasions on which it does not happen yet.
#[derive(Debug, Clone, Copy)]
pub struct Planted {
    kind: Option<Plant>,
    countdown: u64,
}

impl Planted {
    /// Plants a bug that happens once, on one of its first 12 occasions.
    pub fn new(kind: Option<Plant>, rng: &mut Rng) -> Self {
        Self {
            kind,
            countdown: rng.below(12),
        }
    }

    /// Returns `true` if this kind is planted.
    pub fn is(&self, kind: Plant) -> bool {
        self.kind == Some(kind)
    }

    /// Records an occasion for this kind. Returns `true` if the bug happens now.
    pub fn happens(&mut self, kind: Plant) -> bool {
        if self.kind != Some(kind) {
            return false;
        }
        let now = self.countdown == 0;
        self.countdown = self.countdown.wrapping_sub(1);
        now
    }
}
