//! Queue pairs that are connected by GID and queue pair number, for programs that exchange these
//! themselves (`ibv_modify_qp(3)` to RTR with an address) instead of using the connection manager.
//!
//! iWARP does not define this way to connect: an MPA connection needs a TCP port, an initiator and
//! a responder. Therefore the queue pair number contains the port. The low 16 bits of an
//! addressable queue pair's number are a TCP port on which its device listens at each of its
//! addresses. The GID is the IP address. Each end learns its peer's address when it becomes RTR,
//! without waiting for the peer. The end with the smaller (GID, number) connects, and the other end
//! accepts. Requests that are posted before the connection is up wait. The MPA private data
//! contains both numbers, so a listener accepts only peers that one of its queue pairs has named.
//!
//! - `connect_peer`: the functions that programs call.
//! - `ports`: the ports of a device, and the queue pair numbers that contain them.
//! - `partner`: the state machine of one queue pair and its peer, with a table of transitions.
//! - `directory`: the partners of all queue pairs of a device. It passes events to them and applies
//!   the effects.
//!
//! A queue pair that is its own peer gets a TCP socket that is connected to itself. It skips MPA
//! start-up, which needs two ends.
//!
//! May use `cm`, `conn`, `objects` and everything below.

mod connect_peer;
mod directory;
mod partner;
mod ports;
