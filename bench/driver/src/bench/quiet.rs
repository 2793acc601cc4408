//! Measures the load by other programs during a sample, and waits until the CPUs are idle.

use std::time::Duration;

use iwarp_figures::load::{Watch, Watched};

/// How many CPUs other programs may use during a sample without disturbing it.
pub(super) const LIMIT: f64 = 0.15;
const CHECK_TIME: Duration = Duration::from_millis(250);

fn watch() -> Watch {
    // The measured programs are children of this process, and have exited at the end of a sample,
    // so their CPU time is known. Interrupts count as load.
    Watch::start(Watched {
        interrupts: true,
        ..Watched::default()
    })
}

/// Watches the load during samples, and waits for a quiet machine.
#[derive(Debug)]
pub(super) struct Quiet {
    watch: Watch,
    /// How long [`Quiet::wait`] may still wait in total.
    remaining: Duration,
}

impl Quiet {
    pub(super) fn new(total_wait: Duration) -> Self {
        Self {
            watch: watch(),
            remaining: total_wait,
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
        while !self.remaining.is_zero() {
            let watch = watch();
            std::thread::sleep(CHECK_TIME);
            self.remaining = self.remaining.saturating_sub(CHECK_TIME);
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
    fn total_waiting_time_is_limited() {
        let mut quiet = Quiet::new(Duration::from_millis(1));
        quiet.wait();
        assert!(quiet.others() >= 0.0 && quiet.remaining.is_zero());
    }
}
