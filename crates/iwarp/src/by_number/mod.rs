//! Queue pairs that are connected by GID and queue pair number, for programs that exchange these
//! themselves (`ibv_modify_qp(3)` to RTR with an address) instead of using the connection manager.
//!
//! iWARP has no such way to connect: an MPA connection needs a port and two roles. Therefore the
//! number carries the port. The low 16 bits of an addressable queue pair's number are a TCP port on
//! which its device listens, at each of its addresses; the address is the GID. Each end learns of
//! the other at RTR, and neither waits for the other. The end with the smaller (GID, number)
//! connects and the other accepts; requests posted meanwhile wait. The MPA private data names both
//! numbers, so a listener answers only peers that one of its queue pairs has named.
//!
//! - `connect_peer`: the calls of the program.
//! - `ports`: the ports of a device, and the numbers that contain them.
//! - `partner`: what one queue pair knows of its peer, as one state with a table of transitions.
//! - `directory`: the partners of all queue pairs of a device. It feeds them with events and
//!   carries out what they decide.
//!
//! A queue pair that is its own peer gets a TCP socket that is connected to itself. MPA start-up,
//! which needs two ends, is left out: there is nothing to agree on.
//!
//! May use `cm`, `conn`, `objects` and everything below.

mod connect_peer;
mod directory;
mod partner;
mod ports;
