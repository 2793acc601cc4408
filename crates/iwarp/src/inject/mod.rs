//! Fault injection, to test RDMA programs. [`fault::Spec`](crate::fault::Spec) selects the faults.
//!
//! A device that is opened with a specification has a [`Plan`]. All devices of the process with the
//! same specification share the plan. Each queue pair of such a device has a [`QpInjector`].
//! Without a specification, the data path only checks that the queue pair's pointer is `None`.
//!
//! Where possible, an injected fault takes the same code path as a real fault. A reset resets the
//! socket, a stalled stream is neither read nor written, and a wrong key is sent to the peer.
//!
//! A random choice depends only on the seed, the rule, the queue pair and the number of the
//! opportunity. Therefore rules and queue pairs do not influence each other, and the order in which
//! threads run has no influence.
//!
//! Files: `plan` (opportunities, counts, the seed), `log`, `qp` (counts and delays per queue pair),
//! `post`, `completion` and `octets` (hooks of the data path), `act` (actions), `clock` (timed
//! actions), `device` (objects, the port).
//!
//! Locks: [`QpInjector`] and [`Plan`] have their own locks, which are innermost. Actions that need
//! other locks are queued, and executed when no lock is held ([`QpInjector::act`]).

mod act;
mod clock;
mod completion;
mod device;
mod log;
mod octets;
mod plan;
mod post;
mod qp;

pub(crate) use plan::Plan;

#[cfg(test)]
mod effects_tests;
#[cfg(test)]
mod tests;
