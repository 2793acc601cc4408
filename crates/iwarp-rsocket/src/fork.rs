//! Forks. A connection belongs to the process that made it: threads do not survive a fork, and the child must not send anything on its
//! parent's connections.

pub(crate) use iwarp::runtime::{fork_generation as generation, notice_forks};
