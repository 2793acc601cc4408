//! Forks. A connection belongs to the process that created it: threads do not survive a fork, and
//! the child must not send on its parent's connections.

pub(crate) use iwarp::runtime::{fork_generation as generation, notice_forks};
