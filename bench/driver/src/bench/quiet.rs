//! Waits until the CPUs are idle, and measures the load by other programs during a sample.

use std::time::Duration;

use iwarp_figures::load::{Watch, Watched};

/// How many CPUs other programs may use during a sample.
pub(super) const LIMIT: f64 = 0.15;
const LOOK: Duration = Duration::from_millis(250);

fn watch() -> Watch {
    // The measured programs are children of this process and have ended after a sample, so their
    // CPU time is known. Interrupts count as load.
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

    pub(super) fn begin(&mut self) {
        self.watch = watch();
    }

    /// Returns how many CPUs other programs have used since the start of the sample. All processes
    /// of the sample must have ended.
    pub(super) fn others(&self) -> f64 {
        self.watch.others()
    }

    /// Waits until the machine is quiet, or until the total waiting time is used up.
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
