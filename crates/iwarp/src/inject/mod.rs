//! Fault injection, to test RDMA programs. [`fault::Spec`](crate::fault::Spec) selects the faults.
//!
//! A device opened with a specification has a [`Plan`], shared by all devices of the process with
//! the same specification, and each of its queue pairs has a [`QpInjector`]. Without a
//! specification the data path only checks one pointer of the queue pair.
//!
//! Where possible an injected fault takes the path of a real one: a reset resets the socket, a
//! stalled stream is neither read nor written, a wrong key is sent to the peer, a receiver that is
//! not ready holds the message.
//!
//! A random choice depends only on the seed, the rule, the queue pair and the number of the
//! opportunity. So rules and queue pairs do not influence each other, and neither does the order in
//! which threads run.
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
