//! Injects faults: what no device offers to those who test RDMA programs. [`fault::Spec`](crate::fault::Spec) says what is asked for.
//!
//! A device that was opened with a specification has a [`Plan`], which all devices of the process with the same one share, and each of its queue
//! pairs a [`QpInjector`]. Without a specification there is neither, and the data path asks one pointer of the queue pair.
//!
//! Injected faults act by the ways of real ones wherever there is such a way: a reset resets the socket, a stalled stream is not read and
//! not written, a wrong key is sent to the peer, a receiver that is not ready holds the message.
//!
//! What is decided at random is decided by the seed, the rule, the queue pair and the number of the opportunity, and by nothing else. So
//! rules and queue pairs do not disturb each other, and threads that run in another order change nothing.
//!
//! Files: `plan` (opportunities, counts, the seed), `log`, `qp` (what a queue pair counts and holds back), `post`, `completion` and `octets` (where
//! the data path asks), `act` (what happens), `clock` (what happens at a time), `device` (objects, the port).
//!
//! Locks: [`QpInjector`] and [`Plan`] have locks of their own, taken inside of all others. What needs other locks is put on a list, and
//! done when none is held ([`QpInjector::act`]).

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
