//! Waits until other programs leave the CPUs idle, and measures how much they use the CPUs during a
//! sample.

use std::time::Duration;

use iwarp_figures::load::{Watch, Watched};

/// How many CPUs other programs may use during a sample.
pub(super) const LIMIT: f64 = 0.15;
/// Time of one check whether the machine is quiet.
const LOOK: Duration = Duration::from_millis(250);

fn watch() -> Watch {
    // The measured programs are children of this process and have ended when a sample is over, so
    // their CPU time is known. Interrupts are part of the load.
    Watch::start(Watched {
        interrupts: true,
        ..Watched::default()
    })
}

/// Watches samples, and waits for a quiet machine.
#[derive(Debug)]
pub(super) struct Quiet {
    watch: Watch,
    patience: Duration,
}

impl Quiet {
    pub(super) fn new(patience: Duration) -> Self {
        Self {
            watch: watch(),
            patience,
        }
    }

    /// Marks the beginning of a sample.
    pub(super) fn begin(&mut self) {
        self.watch = watch();
    }

    /// Returns how many CPUs other programs used since the beginning of the sample. All processes
    /// of the sample must have ended.
    pub(super) fn others(&self) -> f64 {
        self.watch.others()
    }

    /// Waits until the machine is quiet, or until the waiting time of the whole run is used up.
    pub(super) fn wait(&mut self) {
        while !self.patience.is_zero() {
            let watch = watch();
            std::thread::sleep(LOOK);
            self.patience = self.patience.saturating_sub(LOOK);
            if watch.others() <= LIMIT {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_ends_when_patience_does() {
        let mut quiet = Quiet::new(Duration::from_millis(1));
        quiet.wait();
        assert!(quiet.others() >= 0.0 && quiet.patience.is_zero());
    }
}
