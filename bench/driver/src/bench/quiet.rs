//! Waits until nobody else uses the CPUs, and says who does during a sample.

use std::time::Duration;

use iwarp_figures::load::{Watch, Watched};

/// CPUs that other programs may use during a sample.
pub(super) const LIMIT: f64 = 0.15;
/// How long a look at the machine takes.
const LOOK: Duration = Duration::from_millis(250);

fn watch() -> Watch {
    // Measured programs are children that have ended when a sample is over; their interrupts are part of the load.
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

    /// A sample begins.
    pub(super) fn begin(&mut self) {
        self.watch = watch();
    }

    /// CPUs that others used since it began. Its processes have ended and were waited for.
    pub(super) fn others(&self) -> f64 {
        self.watch.others()
    }

    /// Returns when the machine is quiet, or the patience for the whole run is used up.
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
